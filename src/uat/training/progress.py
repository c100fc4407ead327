"""Live progress on standard error: a bar on a terminal, plain lines in a log, or nothing."""

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
    """Silent progress, and the interface of the other kinds."""

    unit: str = "epoch"
    """The word for one count."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, epoch: int, note: str = "") -> None:
        """Show that this number of epochs is done, with an optional note."""


class Lines(Progress):
    """Progress as one line per note, at most every few seconds."""

    def __init__(self, label: str, total: int, every_seconds: float = 5.0) -> None:
        self.label, self.total, self.every = label, total, every_seconds
        self.start = self.last = time.monotonic()

    def update(self, epoch: int, note: str = "") -> None:
        now = time.monotonic()
        if note and (now - self.last >= self.every or epoch == self.total):
            self.last = now
            say(f"{self.label}: {self.unit} {epoch}/{self.total}, {now - self.start:.0f} s, {note}")


class Bar(Progress):
    """Progress as a bar, drawn by rich."""

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

    def text(template: str, ratio: int) -> rich.TextColumn:  # shrinks on a narrow terminal to keep the count visible
        return rich.TextColumn(template, table_column=Column(ratio=ratio, no_wrap=True, overflow="ellipsis"))

    columns: list[Any] = [text("{task.description}", 2), rich.BarColumn(12), rich.MofNCompleteColumn()]
    columns += [rich.TimeElapsedColumn(), rich.TimeRemainingColumn(), text("{task.fields[note]}", 3)]
    return rich.Progress(*columns, console=Console(stderr=True), expand=True)


def show_progress(label: str, total: int) -> Progress:
    """Return a bar on a terminal, and lines otherwise."""
    return Bar(label, total) if sys.stderr.isatty() else Lines(label, total)


# ---------------------------------------------------------------- many jobs at once


class Board:
    """Progress of a grid of jobs and of each worker, as lines. Workers report their progress in small files: notes."""

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
        """Report a finished or failed job."""
        self.finished, self.failed = self.finished + 1, self.failed + failed
        self.say(f"{self.counts()}: {'failed' if failed else 'done'} {name} ({seconds:.0f} s)")

    def watch(self, notes: Path) -> None:
        """Show the progress of the workers."""
        if time.monotonic() - self.last >= self.every:
            self.last = time.monotonic()
            for worker, note in read_notes(notes).items():
                self.say(f"  worker {worker}: {note['name']}, epoch {note['epoch']}/{note['total']} {note['note']}")

    def counts(self) -> str:
        gone = time.monotonic() - self.start
        left = gone / max(1, self.finished) * (self.total - self.finished)
        return f"[{self.finished}/{self.total}, {gone:.0f} s, about {left:.0f} s left]"


class BoardOfBars(Board):
    """Bars drawn by rich: one for the grid, one for each worker."""

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
            columns = {"description": plain(note["name"]), "completed": note["epoch"], "total": note["total"]}
            self.bars.update(self.workers[worker], note=plain(note["note"]), **columns)


def read_notes(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the progress note of each worker; damaged and half-replaced files are skipped."""
    notes = {}
    for file in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            notes[file.stem] = check_row(read_json(file), NOTE, str(file))
    return notes


def show_board(total: int) -> Board:
    """Return bars on a terminal if rich is installed, and lines otherwise."""
    interactive = sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
    return BoardOfBars(total) if interactive else Board(total)
