"""The files of a log: finding, scanning, fingerprints and checksums. A log is never loaded as a whole here."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import weakref
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from uat.adapters.logs.config import MINARI, is_minari
from uat.data import need
from uat.data.frames import reading, silenced
from uat.files import FileError

SUFFIXES = (".parquet", ".csv", ".arrow", ".ipc", ".feather")
MOST_FILES = 10_000
WHOLE = 2**30
"""Largest size in bytes of a file whose contents are hashed as a whole."""
PARSED_ONCE = 2**25
"""Size in bytes from which on CSV is parsed once into a temporary file of columns, and not again for every column."""
SAMPLES, SAMPLE = 1024, 2**20
"""Number and size in bytes of the evenly spaced blocks that are hashed in a larger file."""

Fingerprint = tuple[tuple[str, int, int], ...]
"""Name, size and time of the last change of each file."""
Lazy = Any
"""A lazy frame of polars, which is imported only when needed."""


def find(path: str) -> list[Path]:
    """Return the files of a log, all of one kind; raise FileError if there is no such file."""
    place = Path(path)
    if not path:
        raise ValueError("domain.path='' names no log: give one, such as uat train logs:events.parquet")
    if place.is_file():
        if place.suffix not in SUFFIXES:
            raise FileError(f"{place} must be a file that ends in {', '.join(SUFFIXES)}, or a folder of such files")
        return [place]
    if not place.is_dir():
        raise FileError(f"{place} does not exist")
    files = sorted(file for file in place.iterdir() if file.suffix in SUFFIXES and file.is_file())
    kinds = sorted({file.suffix for file in files})
    if len(kinds) != 1 or len(files) > MOST_FILES:
        held = f"{len(files):,} files" if len(kinds) == 1 else f"files of the kinds {', '.join(kinds) or 'none'}"
        raise FileError(
            f"{place} holds {held}: expected files of one kind ({', '.join(SUFFIXES)}), at most {MOST_FILES:,}"
        )
    return files


def fingerprint(path: str) -> Fingerprint:
    """Return what changes when a file is written to."""
    if is_minari(path):
        return ((path, 0, 0),)
    stats = [(file, file.stat()) for file in find(path)]
    return tuple((str(file), stat.st_size, stat.st_mtime_ns) for file, stat in stats)


def digest(path: str) -> str | None:
    """Checksum of a log's contents for the identity of a run, independent of folders and dates; None: no such log.

    Of a file above WHOLE bytes, the size and SAMPLES evenly spaced blocks count, so that a change elsewhere that keeps
    the size goes unnoticed.
    """
    try:
        return None if is_minari(path) else _digest(fingerprint(path))
    except (ValueError, OSError):
        return None


@lru_cache(maxsize=16)
def _digest(files: Fingerprint) -> str:
    total = hashlib.blake2b(digest_size=16)
    for name, size, _ in files:
        total.update(f"{size} ".encode())
        with Path(name).open("rb") as file:
            if size <= WHOLE:
                while block := file.read(SAMPLE):
                    total.update(block)
            else:
                for i in range(SAMPLES):
                    file.seek(i * (size - SAMPLE) // (SAMPLES - 1))
                    total.update(file.read(SAMPLE))
    return total.hexdigest()


@dataclass(slots=True, weakref_slot=True, eq=False)
class Log:
    """The rows of a log as a lazy frame, and their places in files. A temporary file of columns goes with it."""

    path: str
    frame: Lazy
    kinds: dict[str, str]
    """Column -> number, integer, flag, text, time, list or other."""
    lazies: list[tuple[str, Lazy]]
    """Name and lazy frame of each file."""
    fingerprint: Fingerprint
    _ends: list[int] = field(default_factory=list)

    def collect(self, frame: Lazy) -> Any:
        """Compute a lazy frame in pieces."""
        with reading(Path(self.path)), silenced():
            return frame.collect(engine="streaming")

    def select(self, *columns: Any) -> Any:
        return self.collect(self.frame.select(*columns))

    def place(self, row: int, column: str = "") -> str:
        """Return "FILE: row 17, column x"; rows of a file are counted from 1, without a header."""
        pl = need("polars", "data", "reading logs")
        if not self._ends:
            self._ends = list(accumulate(self.collect(lazy.select(pl.len())).item() for _, lazy in self.lazies))
        file = next((i for i, end in enumerate(self._ends) if row < end), 0)
        inside = row - (self._ends[file - 1] if file else 0)
        return f"{self.lazies[file][0]}: row {inside + 1}{f', column {column}' if column else ''}"

    def value(self, row: int, column: str) -> Any:
        """Return one raw value."""
        return self.collect(self.frame.select(column).slice(row, 1)).item()

    def check_unchanged(self) -> None:
        """Raise FileError if a file has changed since the log was opened."""
        now = _now(self.path)
        if self.fingerprint != now:
            changed = next((name for name, *_ in {*self.fingerprint} ^ {*now}), self.path)
            before, after = (sum(size for _, size, _ in files) for files in (self.fingerprint, now))
            raise FileError(
                f"{changed} changed while it was read ({before:,} bytes before, {after:,} now): run the command again "
                "when nothing writes to it"
            )


def _now(path: str) -> Fingerprint:
    try:
        return fingerprint(path)
    except (FileError, OSError):
        return ((path, 0, -1),)


def open_log(path: str) -> Log:
    """Open a log without reading its rows."""
    pl = need("polars", "data", f"reading {path or 'logs'}")
    if is_minari(path):
        from uat.adapters.logs.minari import frame_of

        frame = frame_of(path.removeprefix(MINARI)).lazy()
        return Log(path, frame, _kinds(pl, frame.collect_schema()), [(path, frame)], fingerprint(path))
    before = fingerprint(path)
    lazies = [(name, _scan(pl, Path(name))) for name, _, _ in before]
    first_name, first = lazies[0][0], _schema(pl, *lazies[0])
    for name, lazy in lazies[1:]:
        _check_same(name, _schema(pl, name, lazy), first_name, first)
    with reading(Path(path)), silenced():
        frame = pl.concat([lazy.select(list(first)) for _, lazy in lazies], how="vertical_relaxed")
        log = Log(path, frame, _kinds(pl, frame.collect_schema()), lazies, before)
        if first_name.endswith(".csv") and sum(size for _, size, _ in before) >= PARSED_ONCE:
            columns = Path(tempfile.mkdtemp(prefix="uat-logs-")) / "columns.parquet"
            weakref.finalize(log, shutil.rmtree, columns.parent, ignore_errors=True)
            frame.sink_parquet(columns, compression="lz4")
            log.frame = pl.scan_parquet(columns)
        return log


def _scan(pl: Any, file: Path) -> Lazy:
    with reading(file):
        if file.suffix == ".parquet":
            return pl.scan_parquet(file)
        if file.suffix == ".csv":
            return pl.scan_csv(file, infer_schema=False)  # as text: wrong values are reported by row and column
        return pl.scan_ipc(file)


def _schema(pl: Any, name: str, lazy: Lazy) -> dict[str, Any]:
    with reading(Path(name)), silenced():
        return dict(lazy.collect_schema())


def _check_same(name: str, own: dict[str, Any], first_name: str, first: dict[str, Any]) -> None:
    """Raise FileError unless two files have the same columns, with types that can be joined."""
    for column in [*first, *own]:
        if column not in own or column not in first:
            here, there = (first_name, name) if column not in own else (name, first_name)
            raise FileError(f"{there}: row 1, column {column} is not there, but {here} has it")
        a, b = first[column], own[column]
        if a != b and not (a.is_numeric() and b.is_numeric()):
            raise FileError(f"{name}: row 1, column {column} is {b}, but {a} in {first_name}: write all files alike")


def _kinds(pl: Any, schema: Any) -> dict[str, str]:
    def kind(dtype: Any) -> str:
        if dtype.is_integer():
            return "integer"
        if dtype.is_numeric():
            return "number"
        if dtype == pl.Boolean:
            return "flag"
        if dtype in (pl.String, pl.Categorical, pl.Enum):
            return "text"
        if dtype.is_temporal():
            return "time"
        return "list" if isinstance(dtype, pl.List | pl.Array) and not dtype.inner.is_nested() else "other"

    return {name: kind(dtype) for name, dtype in schema.items()}
