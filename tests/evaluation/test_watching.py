"""Films of runs: their episodes are those that `evaluate` scores, frames show their steps, and errors write nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from PIL import ImageSequence

from tests.builders import call, untrained
from uat.adapters.gymnasium import domain
from uat.cli import main
from uat.config import override
from uat.domains import DOMAINS
from uat.domains.darkroom.world import BLUE, FLOOR, GREEN, ORANGE, DarkRoomConfig, DarkRoomSimulator
from uat.evaluation import evaluate
from uat.evaluation.film import BARS, LEAST_WIDTH, Frame, Packed, drawn, write_film
from uat.evaluation.watching import watch
from uat.recipes import recipe
from uat.runs import Run

STEPS = 6


class Drawn(gymnasium.Env[Any, Any]):
    """An environment whose image is grey, 10 brighter after every step, and which can fail in several ways."""

    metadata = {"render_modes": ["rgb_array", "human"]}  # noqa: RUF012 (as Gymnasium declares it)
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, render_mode: str | None = None, fails: str = "", at: int = 3) -> None:
        self.render_mode, self.fails, self.at, self.t = render_mode, fails, at, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self._obs(), float(action) + self.t, self.t == STEPS, False, {}

    def render(self) -> Any:
        image = np.full((30, 20, 3), 10 * self.t, dtype=np.uint8)
        if not self.fails or self.t < self.at:
            return image
        if self.fails == "raises":
            raise RuntimeError("no display")
        return {"type": image / 255.0, "shape": image[:10], "nothing": None, "flat": image[:, :, 0]}[self.fails]

    def _obs(self) -> Any:
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)


class Blind(Drawn):
    """An environment without images."""

    metadata = {"render_modes": ["human"]}  # noqa: RUF012


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Register both environments, and take away all that a test adds."""
    known, before = dict(gymnasium.registry), DOMAINS.loaded()
    for kind in (Drawn, Blind):
        made: Any = kind
        gymnasium.register(f"{kind.__name__}-v0", entry_point=made, max_episode_steps=20)
    yield
    for name in DOMAINS.loaded().keys() - before.keys():
        del DOMAINS[name]
    gymnasium.registry.clear()
    gymnasium.registry.update(known)


def of_gym(folder: Path, name: str = "gym:Drawn-v0", method: str = "uat", **settings: Any) -> Run:
    changes = {f"domain.{key}": value for key, value in settings.items()}
    return untrained(override(recipe(name, method, "smoke"), {**changes, "evaluation.episodes": 4}), folder)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return of_gym(tmp_path / "run")


def frames_of(file: Path) -> list[Any]:
    with Pillow.open(file) as film:
        return [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(film)]


# ---------------------------------------------------------------- films


def test_a_film_has_the_episodes_that_are_scored_and_a_frame_for_every_step(run: Run, tmp_path: Path) -> None:
    scored = evaluate(run, device="cpu", references=False).episodes["uat"]
    watched = watch(run, tmp_path / "new" / "film.gif", episodes=2)
    assert watched.file == tmp_path / "new" / "film.gif"
    assert [row["episode"] for row in watched.rows] == [0, 1]
    assert [row["return"] for row in watched.rows] == scored["return"][:2].tolist()
    assert [row["steps"] for row in watched.rows] == scored["length"][:2].tolist() == [STEPS] * 2
    assert {row["end"] for row in watched.rows} == {"terminated"}
    images = frames_of(watched.file)
    assert [int(image[50, 50].mean()) for image in images] == pytest.approx(
        [10 * t for t in range(STEPS + 1)] * 2, abs=2
    )
    assert images[0].shape[1] == LEAST_WIDTH
    with Pillow.open(watched.file) as film:
        times = [frame.info["duration"] for frame in ImageSequence.Iterator(film)]
    assert times == [*[50] * STEPS, 1000] * 2


def test_watching_twice_writes_the_same_film_into_the_run_folder(run: Run) -> None:
    first = watch(run)
    assert first.file == run.file("watch.gif")
    film = first.file.read_bytes()
    assert watch(run.path).rows == first.rows
    assert run.file("watch.gif").read_bytes() == film


def test_a_seed_chooses_other_worlds(run: Run) -> None:
    watch(run)
    film = run.file("watch.gif").read_bytes()
    films = []
    for seed in (0, 0, 1):
        watch(run, seed=seed)
        films.append(run.file("watch.gif").read_bytes())
    assert films[0] == films[1]
    assert len({film, *films}) == 3


def test_an_episode_can_be_cut_off_and_ends_at_its_end_otherwise(run: Run) -> None:
    assert watch(run, max_steps=2).rows == [
        {"episode": 0, "steps": 2, "return": pytest.approx(3, abs=4), "end": "truncated"}
    ]
    assert len(frames_of(run.file("watch.gif"))) == 3
    assert watch(run, max_steps=100).rows[0]["steps"] == STEPS


def test_the_feedback_is_that_of_the_run(tmp_path: Path) -> None:
    config = override(recipe("darkroom", "uat", "smoke"), {"domain.horizon": 12, "feedback.noise": 3.0})
    run = untrained(config, tmp_path / "run")
    scored = evaluate(run, device="cpu", references=False, episodes=1).episodes["uat"]["return"]
    assert watch(run).rows[0]["return"] == pytest.approx(scored[0].item())


def test_a_dark_room_shows_agent_and_goal() -> None:
    worlds = DarkRoomSimulator(DarkRoomConfig(size=3), "cpu")
    world, _ = worlds.reset(worlds.noise(torch.arange(1), 0))
    image, goal, position = worlds.frame(world), int(worlds.goal(world)[0]), int(world.position_B[0])
    assert image.shape == (3, 3, 3)
    assert tuple(image.view(9, 3)[goal].tolist()) == ORANGE
    assert tuple(image.view(9, 3)[position].tolist()) == BLUE
    assert (image == FLOOR).all(-1).sum() == 7
    world.position_B.fill_(goal)
    assert tuple(worlds.frame(world).view(9, 3)[goal].tolist()) == GREEN


@pytest.mark.parametrize("method", ["uat", "uat-late", "vanilla"])
def test_bars_show_the_gates_of_methods_that_have_some(method: str, tmp_path: Path) -> None:
    run = of_gym(tmp_path / "run", method=method)
    file = run.file("policy.safetensors")
    before = file.read_bytes()
    watch(run)
    assert file.read_bytes() == before
    texts = [len(image) for image in frames_of(run.file("watch.gif"))]
    assert len(set(texts)) == 1
    with_bars = method != "vanilla"
    assert texts[0] == (18 * 30 + 2 * 16 + 6 + 10 * with_bars)


def test_a_bar_is_as_long_as_its_share_of_the_width() -> None:
    image = Packed.of(np.zeros((10, 400, 3), np.uint8), "world")
    [page] = drawn([Frame(image, ("a line",), (0.5, 2.0))])
    pixels = np.asarray(page)
    for colour, length in zip(BARS, (194, 388), strict=True):
        assert (pixels == colour).all(-1).sum() == length * 3


def test_wide_frames_are_reduced_and_all_sizes_are_even() -> None:
    for shape in ((501, 1203, 3), (7, 13, 4), (33, 401, 3)):
        [page] = drawn([Frame(Packed.of(np.zeros(shape, np.uint8), "world"), ("a line",))])
        assert page.width % 2 == page.height % 2 == 0
        assert LEAST_WIDTH <= page.width <= 640


def test_an_mp4_has_the_frames_and_holds_the_last_one(tmp_path: Path) -> None:
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    image = Packed.of(np.full((50, 400, 3), 200, np.uint8), "world")
    frames = [Frame(image, ("one",)), Frame(image, ("two",)), Frame(image, ("three",), last=True)]
    write_film(tmp_path / "film.mp4", frames, fps=10)
    assert ffmpeg.count_frames_and_secs(str(tmp_path / "film.mp4")) == (12, pytest.approx(1.2))
    assert [file.name for file in tmp_path.iterdir()] == ["film.mp4"]


def test_classic_control_is_watched(tmp_path: Path) -> None:
    run = of_gym(tmp_path / "run", "gym:CartPole-v1")
    watch(run, max_steps=3)
    assert frames_of(run.file("watch.gif"))[0].shape[1] == 600


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("fails", "sentence"),
    [
        ("raises", r"gym:Drawn-v0 raised RuntimeError: no display while rendering, in step 3 of the episode"),
        ("nothing", r"gym:Drawn-v0 rendered None, where an array of shape \(height, width, 3\) is expected, in step 3"),
        ("type", r"gym:Drawn-v0 rendered an array of shape \(30, 20, 3\) and type float64, where one of shape"),
        ("flat", r"gym:Drawn-v0 rendered an array of shape \(30, 20\) and type uint8"),
        ("shape", r"gym:Drawn-v0 rendered an image of shape \(10, 20, 3\) after one of shape \(30, 20, 3\)"),
    ],
)
def test_an_environment_that_fails_to_render_writes_nothing(fails: str, sentence: str, tmp_path: Path) -> None:
    run = of_gym(tmp_path / "run", arguments=json.dumps({"fails": fails}))
    run.file("watch.gif").write_bytes(b"an older film")
    before = sorted(file.name for file in run.path.iterdir())
    with pytest.raises(ValueError, match=sentence):
        watch(run)
    assert sorted(file.name for file in run.path.iterdir()) == before
    assert run.file("watch.gif").read_bytes() == b"an older film"


def test_an_environment_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gym:Blind-v0 renders no rgb_array frames: its render modes are human"):
        watch(of_gym(tmp_path / "run", "gym:Blind-v0"))


def test_a_domain_without_frames_is_refused(tmp_path: Path) -> None:
    run = untrained(recipe("rule", "uat", "smoke"), tmp_path / "run")
    with pytest.raises(ValueError, match=r"rule cannot be watched: its worlds have no frames"):
        watch(run)


def test_an_environment_passed_as_an_object_must_render_arrays(tmp_path: Path) -> None:
    config = recipe("gym:Drawn-v0", "uat", "smoke")
    with pytest.raises(ValueError, match=r"was not trained in the given domain"):
        watch(untrained(config, tmp_path / "named"), domain=lambda: Drawn())
    for mode in (None, "rgb_array"):
        given = domain(lambda mode=mode: Drawn(render_mode=mode))
        config = replace(recipe(given.name, "uat", "smoke"), domain=given.config)
        run = untrained(config, tmp_path / str(mode))
        if mode is None:
            with pytest.raises(
                ValueError, match=r"made with render_mode=None: pass it again, made with render_mode='rgb"
            ):
                watch(run)
        else:
            assert watch(run).rows[0]["steps"] == STEPS


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ({"out": "film.avi"}, r"out='film.avi' must end in .gif or .mp4"),
        ({"out": "film"}, r"must end in .gif or .mp4"),
        ({"out": 3}, r"out=3 must be a path"),
        ({"episodes": 0}, r"episodes=0"),
        ({"fps": 0}, r"fps=0"),
        ({"fps": 100}, r"fps=100"),
        ({"max_steps": 0}, r"max_steps=0"),
        ({"seed": 0.5}, r"seed=0.5"),
    ],
)
def test_bad_arguments_are_named(argument: dict[str, Any], sentence: str, run: Run) -> None:
    with pytest.raises(ValueError, match=sentence):
        watch(run, **argument)
    assert not run.file("watch.gif").exists()


def test_missing_libraries_are_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "imageio_ffmpeg" else True)
    with pytest.raises(ValueError, match=r"MP4 needs imageio-ffmpeg.* pip install imageio-ffmpeg, or name a .gif"):
        watch(run, "film.mp4")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'uat-transformer\[watch\]'"):
        watch(run)


def test_the_command_prints_a_row_for_each_episode(run: Run, capsys: Any) -> None:
    code, out, err = call(capsys, main, "watch", str(run.path), "--episodes", "2", "--fps", "10", "--json")
    assert code == 0, err
    assert [row["steps"] for row in json.loads(out)] == [STEPS] * 2
    assert f"film: {run.file('watch.gif')}" in err
    assert call(capsys, main, "watch", str(run.path), "--max-steps", "2")[1].splitlines()[0].split() == [
        *("episode", "steps", "return", "end")
    ]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [("watch nowhere", "nowhere is not a run folder"), ("watch", "uat watch needs RUN"), ("watch a --fsp 3", "--fps")],
)
def test_a_wrong_command_is_one_sentence(line: str, sentence: str, capsys: Any) -> None:
    code, out, err = call(capsys, main, *line.split())
    assert (code, out) == (2, "")
    assert sentence in err
