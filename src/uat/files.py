"""Files that anybody may have touched: read with every fault as one sentence, written whole or not at all.

Reading raises FileError with the file's name and what is wrong, whatever the file holds. Writing never follows a
symbolic link, keeps the mode of the file that it replaces, and leaves the old file if it fails or is killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from uat.settings import shown

try:
    import fcntl
except ImportError:  # pragma: no cover (Windows)
    fcntl = None

TEMPORARY = ".partial"
MOST_JSON = 256 * 2**20
"""Bytes of the largest JSON file that is read at once: far more than any of ours."""
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
"""Opening a symbolic link fails; not known on Windows."""


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=@-]{0,99}")
"""Names that may become parts of paths."""
LONGEST_NAME = 255
"""Bytes of a file's name, on every common file system."""
DEEPEST = 50
"""Levels of a JSON value: files of ours have a few."""


class FileError(ValueError):
    """A file that cannot be used, with its name and what is wrong."""


# ---------------------------------------------------------------- reading


def read_text(path: Path) -> str:
    """The whole of a UTF-8 text file, of a size that fits."""
    if not path.is_file():
        raise FileError(f"{path} is {'not a file' if path.exists() else 'not there'}")
    if (size := path.stat().st_size) > MOST_JSON:
        raise FileError(f"{path} has {size:,} bytes, more than any file of its kind")
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from None


def parse_json(text: str, where: str) -> Any:
    """The value of a JSON text; NaN and infinity are values, as undefined metrics are written so."""
    try:
        value = json.loads(text)
        if text.count("[") + text.count("{") <= DEEPEST or depth(value) <= DEEPEST:
            return value
    except RecursionError:
        pass
    except ValueError as error:
        raise FileError(f"{where} is not valid JSON: {error}") from None
    raise FileError(f"{where} is nested deeper than {DEEPEST} levels")


def depth(value: Any) -> int:
    """Levels of lists and tables inside each other."""
    levels, level = 0, [value]
    while containers := [one for one in level if isinstance(one, dict | list)]:
        levels += 1
        level = [item for one in containers for item in (one.values() if isinstance(one, dict) else one)]
    return levels


def parse_row(line: str, where: str) -> dict[str, Any]:
    """One line of a .jsonl file: a table of values."""
    row = parse_json(line, where)
    if not isinstance(row, dict):
        raise FileError(f"{where} is not a row: expected a JSON object, got {type(row).__name__}")
    return row


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds one object."""
    return parse_row(read_text(path), str(path))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file; none where there is no file."""
    if not path.exists():
        return []
    lines = read_text(path).split("\n")
    return [parse_row(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line]


def check_name(name: Any, where: str) -> str:
    """A name that becomes part of a path: letters, digits and a few marks, so that it cannot lead elsewhere."""
    if isinstance(name, str) and NAME.fullmatch(name):
        return name
    raise FileError(f"{where} {name!r:.60} cannot be part of a file's name: expected letters, digits and . _ + = @ -")


def safe_name(text: str, most: int = 150) -> str:
    """Any text as the name of one file: what could lead elsewhere becomes "+"; a long text ends with its checksum."""
    plain = "".join(c if c.isprintable() and c not in "/\\:" else "+" for c in text).lstrip(".")
    if len(plain.encode()) <= most:
        return plain
    kept = plain.encode()[: most - 9].decode(errors="ignore")
    return f"{kept}-{hashlib.blake2b(text.encode(errors='replace'), digest_size=4).hexdigest()}"


def check_path(value: Any, name: str) -> Path:
    """A path that a caller gives, or a ValueError with the argument's name."""
    try:
        text = os.fspath(value)
    except Exception:  # anything without a path, and a class of the caller's may raise anything when asked for one
        text = None
    if not isinstance(text, str):
        raise ValueError(f"{name}={shown(value)} must be a path: a str or a pathlib.Path")
    try:
        longest = max(map(len, os.fsencode(text).split(b"/")))
    except UnicodeEncodeError:  # half of a letter
        longest = LONGEST_NAME + 1
    if not text or not longest <= LONGEST_NAME or "\0" in text:
        raise ValueError(f"{name}={shown(text)} is not the name of a file or folder")
    return Path(text)


# ---------------------------------------------------------------- writing


def write_atomically(path: Path, content: bytes, *, durable: bool = True) -> None:
    """All of it or nothing, also when killed: a temporary name, flushed to disk, then renamed.

    durable: wait for the disk, so that not even a crash of the machine leaves less.
    """
    with replacing(path, durable=durable) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """A file to be written inside, which then takes the place of `path`; after an error there is nothing new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_over(path)
    temporary, descriptor = _new_temporary(path)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            if (mode := _mode(path)) is not None:
                os.chmod(temporary, mode)  # noqa: PTH101 (of the file that was just made here)
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            if fcntl is not None:
                temporary.replace(path)  # while its lock is held
        if fcntl is None:  # pragma: no cover (Windows renames closed files alone)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _new_temporary(path: Path) -> tuple[Path, int]:
    """A new file beside `path` and its descriptor, which holds its lock (flock): so others see that it is in use."""
    while True:
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{TEMPORARY}")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_FOLLOW, 0o666)
        try:
            is_ours = _lock(descriptor) is not False and os.fstat(descriptor).st_nlink > 0
        except BaseException:
            os.close(descriptor)
            raise
        if is_ours:
            return temporary, descriptor
        os.close(descriptor)  # somebody took it for a left-over before it was locked


def _lock(descriptor: int) -> bool | None:
    """Take the lock of an open file: whether it is ours now; None where there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None
    return True


def _remove_left_over(path: Path) -> None:
    """Remove what writers of this file left that were killed: nobody holds the lock of such a file."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}{re.escape(TEMPORARY)}")
    for file in [file for file in path.parent.iterdir() if name.fullmatch(file.name)]:
        with contextlib.suppress(OSError):  # a link, or gone by now
            descriptor = os.open(file, os.O_RDWR | NO_FOLLOW)
            try:
                if _lock(descriptor):
                    file.unlink(missing_ok=True)
            finally:
                os.close(descriptor)


def _mode(path: Path) -> int | None:
    """Permissions of a file that is to be replaced; None if there is none."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return stat.S_IMODE(found.st_mode) if stat.S_ISREG(found.st_mode) else None


def is_temporary(path: Path) -> bool:
    """Left behind by a kill in the middle of a write."""
    return path.name.startswith(".") and path.name.endswith(TEMPORARY)


def row_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """At the end of a .jsonl file; a kill may cut the last line short."""
    with opened_to_append(path) as file:
        file.write(row_lines(rows).encode())


def opened_to_append(path: Path, *, empty: bool = False) -> IO[bytes]:
    """A file that is written at its end, if it is not a symbolic link; `empty` drops what it holds."""
    how = os.O_TRUNC if empty else 0
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | NO_FOLLOW | how, 0o666), "ab")
