"""Films of episodes: frames with a caption, written as an animated GIF (Pillow) or an MP4 (imageio-ffmpeg).

Axes: H height, W width of an image.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from uat.files import replacing, write_atomically
from uat.settings import shown

Image = NDArray[np.uint8]
FORMATS = (".gif", ".mp4")
LEAST_WIDTH, MOST_WIDTH = 360, 640
"""Narrower frames are enlarged by a whole number, wider ones reduced."""
LINE, MARGIN, BAR = 16, 6, 3
"""Height of a line of the caption, margins, and thickness of a bar, in pixels."""
INK, PAPER, EDGE, BARS = (20, 20, 20), (255, 255, 255), (200, 200, 200), ((0, 114, 178), (213, 94, 0))
HOLD_SECONDS = 1.0
"""Time for which the last frame of an episode stands still."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A compressed image: an episode of a thousand raw ones would take a gigabyte."""

    shape: tuple[int, ...]
    data: bytes

    @staticmethod
    def of(image: Any, label: str) -> Packed:
        """Compress an image; raise a ValueError if it is none."""
        array = np.asarray(image)
        if array.ndim != 3 or array.shape[2] not in (3, 4) or array.dtype != np.uint8 or not array.size:
            raise ValueError(
                f"{label} rendered an array of shape {array.shape} and type {array.dtype}, where one of shape "
                "(height, width, 3) and type uint8 is expected"
            )
        rgb = np.ascontiguousarray(array[:, :, :3])
        return Packed(rgb.shape, zlib.compress(rgb.tobytes(), 1))

    def image(self) -> Image:
        return np.frombuffer(zlib.decompress(self.data), dtype=np.uint8).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a film."""

    image: Packed
    caption: tuple[str, ...]
    """Lines below the image."""
    bars: tuple[float, ...] = ()
    """Lengths of bars under the caption, from 0 to 1."""
    last: bool = False
    """Whether this is the last frame of its episode."""


def check_film(file: Path) -> Path:
    """Return the file if a film can be written there; call it before anything is played."""
    if file.suffix.lower() not in FORMATS:
        raise ValueError(f"out={shown(str(file))} must end in {' or '.join(FORMATS)}")
    if file.is_dir():
        raise ValueError(f"out={file} is a folder; name a file in it")
    if importlib.util.find_spec("PIL") is None:
        raise ValueError("watching needs pillow, which is not installed: pip install 'uat-transformer[watch]'")
    if file.suffix.lower() == ".mp4" and importlib.util.find_spec("imageio_ffmpeg") is None:
        raise ValueError(
            f"out={file}: MP4 needs imageio-ffmpeg, which is not installed: pip install imageio-ffmpeg, or name a .gif"
        )
    return file


def write_film(file: Path, frames: Sequence[Frame], fps: int) -> None:
    """Write a film; after an error the file is unchanged."""
    if file.suffix.lower() == ".mp4":
        _write_mp4(file, frames, fps)
        return
    images = drawn(frames)
    duration = [round(1000 * (HOLD_SECONDS if frame.last else 1 / fps)) for frame in frames]
    with replacing(file) as target:
        next(images).save(target, format="GIF", save_all=True, append_images=images, duration=duration, loop=0)


def _write_mp4(file: Path, frames: Sequence[Frame], fps: int) -> None:
    ffmpeg, images = importlib.import_module("imageio_ffmpeg"), drawn(frames)
    first = next(images)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "film.mp4"
        writer = ffmpeg.write_frames(str(made), first.size, fps=fps, macro_block_size=2, ffmpeg_log_level="error")
        try:
            writer.send(None)
            for frame, image in zip(frames, itertools.chain([first], images), strict=True):
                for _ in range(round(HOLD_SECONDS * fps) if frame.last else 1):
                    writer.send(image.tobytes())
        except OSError as error:
            raise ValueError(f"{file} was not written: {' '.join(str(error).split())[:300]}") from None
        finally:
            writer.close()
        write_atomically(file, made.read_bytes())


def drawn(frames: Sequence[Frame]) -> Iterator[Any]:
    """Yield the images with their captions, all of the size of the first, which is even in both directions."""
    pillow, draws = importlib.import_module("PIL.Image"), importlib.import_module("PIL.ImageDraw")
    font = importlib.import_module("PIL.ImageFont").load_default(size=12)
    width, height = _size(frames[0].image.shape)
    strip = LINE * max(len(frame.caption) for frame in frames) + MARGIN
    strip += (BAR + 2) * max(len(frame.bars) for frame in frames)
    whole = (width + width % 2, height + strip + (height + strip) % 2)
    for frame in frames:
        page = pillow.new("RGB", whole, PAPER)
        image = pillow.fromarray(frame.image.image())
        enlarged = width >= image.width
        how = pillow.Resampling.NEAREST if enlarged else pillow.Resampling.BILINEAR
        page.paste(image if image.size == (width, height) else image.resize((width, height), how), (0, 0))
        pen = draws.Draw(page)
        pen.line((0, height, whole[0], height), fill=EDGE)
        for i, line in enumerate(frame.caption):
            pen.text((MARGIN, height + 2 + i * LINE), line, fill=INK, font=font)
        for i, (length, colour) in enumerate(zip(frame.bars, BARS, strict=False)):
            top = whole[1] - (BAR + 2) * (len(frame.bars) - i)
            end = MARGIN + round(min(1.0, max(0.0, length)) * (width - 2 * MARGIN))
            if end > MARGIN:
                pen.rectangle((MARGIN, top, end - 1, top + BAR - 1), fill=colour)
        yield page


def _size(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return width and height at which an image (H, W, 3) is shown."""
    height, width = shape[:2]
    if width > MOST_WIDTH:
        return MOST_WIDTH, max(1, round(height * MOST_WIDTH / width))
    times = -(-LEAST_WIDTH // width)
    return width * times, height * times
