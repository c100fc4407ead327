"""Read untrusted files with clear errors, and write files atomically.

Whatever a file contains, reading either succeeds or raises a FileError that names the file and the problem. Writing
never follows a symbolic link, keeps the mode of the file that it replaces, and leaves the old file in place if it fails
or is killed.
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
"""Size limit of a JSON file in bytes, far above that of any file that we write."""
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
"""Flag that makes opening a symbolic link fail; 0 on Windows, which lacks it."""


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=@-]{0,99}")
"""Names that are allowed as parts of paths."""
LONGEST_NAME = 255
"""Limit of a file name in bytes, on all common file systems."""
DEEPEST = 50
"""Nesting limit of a JSON value; our own files have a few levels."""


class FileError(ValueError):
    """A file that cannot be used; the message names the file and the problem."""


# ---------------------------------------------------------------- reading


def read_text(path: Path) -> str:
    """Read a UTF-8 text file of limited size."""
    if not path.is_file():
        raise FileError(f"{path} is {'not a file' if path.exists() else 'not there'}")
    if (size := path.stat().st_size) > MOST_JSON:
        raise FileError(f"{path} has {size:,} bytes, more than the limit of {MOST_JSON:,} for files of its kind")
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from None


def parse_json(text: str, where: str) -> Any:
    """Parse a JSON text. NaN and infinity are accepted, since undefined metrics are written as NaN."""
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
    """Number of nested levels of lists and dictionaries."""
    levels, level = 0, [value]
    while containers := [one for one in level if isinstance(one, dict | list)]:
        levels += 1
        level = [item for one in containers for item in (one.values() if isinstance(one, dict) else one)]
    return levels


def parse_row(line: str, where: str) -> dict[str, Any]:
    """Parse one line of a .jsonl file, which must be a JSON object."""
    row = parse_json(line, where)
    if not isinstance(row, dict):
        raise FileError(f"{where} is not a row: expected a JSON object, got {type(row).__name__}")
    return row


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds one object."""
    return parse_row(read_text(path), str(path))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a .jsonl file; an empty list if there is no file."""
    if not path.exists():
        return []
    lines = read_text(path).split("\n")
    return [parse_row(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line]


def check_name(name: Any, where: str) -> str:
    """Return a name that may become part of a path, or raise FileError: it must not be able to leave its folder."""
    if isinstance(name, str) and NAME.fullmatch(name):
        return name
    raise FileError(f"{where} {name!r:.60} cannot be part of a file's name: expected letters, digits and . _ + = @ -")


def safe_name(text: str, most: int = 150) -> str:
    """Turn any text into a file name: unsafe characters become "+", and long texts are cut and end with a checksum."""
    plain = "".join(c if c.isprintable() and c not in "/\\:" else "+" for c in text).lstrip(".")
    if len(plain.encode()) <= most:
        return plain
    kept = plain.encode()[: most - 9].decode(errors="ignore")
    return f"{kept}-{hashlib.blake2b(text.encode(errors='replace'), digest_size=4).hexdigest()}"


def check_path(value: Any, name: str) -> Path:
    """Return the argument `name` as a Path, or raise a ValueError that names the argument and its value."""
    try:
        text = os.fspath(value)
    except Exception:  # anything without a path, and a class of the caller's may raise anything when asked for one
        text = None
    if not isinstance(text, str):
        raise ValueError(f"{name}={shown(value)} must be a path: a str or a pathlib.Path")
    try:
        longest = max(map(len, os.fsencode(text).split(b"/")))
    except UnicodeEncodeError:  # a lone surrogate
        longest = LONGEST_NAME + 1
    if not text or not longest <= LONGEST_NAME or "\0" in text:
        raise ValueError(f"{name}={shown(text)} is not the name of a file or folder")
    return Path(text)


# ---------------------------------------------------------------- writing


def write_atomically(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Write a temporary file, flush it to disk and rename it, so that a kill leaves the old file or the new one.

    durable: wait for the disk, so that this holds even if the machine crashes.
    """
    with replacing(path, durable=durable) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Open a temporary file for writing that replaces `path` at the end; after an error `path` is unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_over(path)
    temporary, descriptor = _new_temporary(path)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            if (mode := _mode(path)) is not None:
                os.chmod(temporary, mode)  # noqa: PTH101 (of the file that was just created)
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            if fcntl is not None:
                temporary.replace(path)  # while its lock is held
        if fcntl is None:  # pragma: no cover (Windows can rename closed files only)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _new_temporary(path: Path) -> tuple[Path, int]:
    """Create a file beside `path`; return it and its descriptor, which holds a lock to show that the file is in use."""
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
        os.close(descriptor)  # another process removed it as a leftover before it was locked


def _lock(descriptor: int) -> bool | None:
    """Try to lock an open file; return whether that succeeded, or None where locks are not supported."""
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
    """Remove temporary files left behind by killed writers of this file: no process holds their locks."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}{re.escape(TEMPORARY)}")
    for file in [file for file in path.parent.iterdir() if name.fullmatch(file.name)]:
        with contextlib.suppress(OSError):  # a symbolic link, or already removed
            descriptor = os.open(file, os.O_RDWR | NO_FOLLOW)
            try:
                if _lock(descriptor):
                    file.unlink(missing_ok=True)
            finally:
                os.close(descriptor)


def _mode(path: Path) -> int | None:
    """Permissions of the regular file at `path`; None if there is none."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return stat.S_IMODE(status.st_mode) if stat.S_ISREG(status.st_mode) else None


def is_temporary(path: Path) -> bool:
    """Whether this is a temporary file, which stays behind when a writer is killed."""
    return path.name.startswith(".") and path.name.endswith(TEMPORARY)


def row_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows to a .jsonl file; if the process is killed, the last line may be incomplete."""
    with opened_to_append(path) as file:
        file.write(row_lines(rows).encode())


def opened_to_append(path: Path, *, empty: bool = False) -> IO[bytes]:
    """Open a file for appending, unless it is a symbolic link; `empty` truncates it first."""
    truncate = os.O_TRUNC if empty else 0
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | NO_FOLLOW | truncate, 0o666), "ab")
