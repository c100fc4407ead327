"""Live progress on standard error: a bar on a terminal, plain lines in a log, nothing if not wanted."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any, Self

from uat.files import read_json
from uat.rows import NOTE, check_row
from uat.terminal import plain, say


class Progress:
    """Says nothing; the others say more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, epoch: int, note: str = "") -> None:
        """So many epochs are done; a note is news."""


class Lines(Progress):
    """A line whenever there is news, at most every few seconds."""

    def __init__(self, label: str, total: int, every_seconds: float = 5.0) -> None:
        self.label, self.total, self.every = label, total, every_seconds
        self.start = self.last = time.monotonic()

    def update(self, epoch: int, note: str = "") -> None:
        now = time.monotonic()
        if note and (now - self.last >= self.every or epoch == self.total):
            self.last = now
            say(f"{self.label}: epoch {epoch}/{self.total}, {now - self.start:.0f} s, {note}")


class Bar(Progress):
    """rich's bar."""

    def __init__(self, label: str, total: int) -> None:
        self.bar = _rich_progress()
        self.task = self.bar.add_task(plain(label), total=total, note="")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def update(self, epoch: int, note: str = "") -> None:
        if note:
            self.bar.update(self.task, completed=epoch, note=plain(note))
        else:
            self.bar.update(self.task, completed=epoch)


def _rich_progress() -> Any:
    from rich import progress as rich
    from rich.console import Console
    from rich.table import Column

    def text(template: str, ratio: int) -> rich.TextColumn:  # gives way on a narrow terminal, so that the count stays
        return rich.TextColumn(template, table_column=Column(ratio=ratio, no_wrap=True, overflow="ellipsis"))

    columns: list[Any] = [text("{task.description}", 2), rich.BarColumn(12), rich.MofNCompleteColumn()]
    columns += [rich.TimeElapsedColumn(), rich.TimeRemainingColumn(), text("{task.fields[note]}", 3)]
    return rich.Progress(*columns, console=Console(stderr=True), expand=True)


def show_progress(label: str, total: int) -> Progress:
    """A bar if somebody watches, lines otherwise."""
    return Bar(label, total) if sys.stderr.isatty() else Lines(label, total)


# ---------------------------------------------------------------- many jobs at once


class Board:
    """Progress of a grid of jobs, and of each worker: lines in a log. Workers leave notes, small files, to be read."""

    def __init__(self, total: int, every_seconds: float = 15.0) -> None:
        self.total, self.finished, self.failed, self.every = total, 0, 0, every_seconds
        self.start = self.last = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, line: str) -> None:
        say(line)

    def done(self, name: str, seconds: float, *, failed: bool) -> None:
        """A job has come to its end."""
        self.finished, self.failed = self.finished + 1, self.failed + failed
        self.say(f"{self.standing()}: {'failed' if failed else 'done'} {name} ({seconds:.0f} s)")

    def watch(self, notes: Path) -> None:
        """Look where the workers stand."""
        if time.monotonic() - self.last >= self.every:
            self.last = time.monotonic()
            for worker, note in read_notes(notes).items():
                self.say(f"  worker {worker}: {note['name']}, epoch {note['epoch']}/{note['total']} {note['note']}")

    def standing(self) -> str:
        gone = time.monotonic() - self.start
        left = gone / max(1, self.finished) * (self.total - self.finished)
        return f"[{self.finished}/{self.total}, {gone:.0f} s, about {left:.0f} s left]"


class BoardOfBars(Board):
    """rich's bars: one for the grid, one for each worker."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self.bars = _rich_progress()
        self.grid = self.bars.add_task("all jobs", total=total, note="")
        self.workers: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def say(self, line: str) -> None:
        self.bars.console.print(plain(line), markup=False, highlight=False)

    def done(self, name: str, seconds: float, *, failed: bool) -> None:
        self.finished, self.failed = self.finished + 1, self.failed + failed
        note = plain(f"last: {name}") + (f"; {self.failed} failed" if self.failed else "")
        self.bars.update(self.grid, completed=self.finished, note=note)

    def watch(self, notes: Path) -> None:
        for worker, note in read_notes(notes).items():
            if worker not in self.workers:
                self.workers[worker] = self.bars.add_task("", total=1, note="")
            said = {"description": plain(note["name"]), "completed": note["epoch"], "total": note["total"]}
            self.bars.update(self.workers[worker], note=plain(note["note"]), **said)


def read_notes(folder: Path) -> dict[str, dict[str, Any]]:
    """What each worker says of itself; a note that is damaged, or just being replaced, is left out."""
    found = {}
    for file in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            found[file.stem] = check_row(read_json(file), NOTE, str(file))
    return found


def show_board(total: int) -> Board:
    """Bars if somebody watches and rich is there, lines otherwise."""
    watched = sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
    return BoardOfBars(total) if watched else Board(total)
