"""Live progress on standard error: a bar on a terminal, plain lines in a log, nothing if not wanted."""

from __future__ import annotations

import sys
import time
from typing import Any, Self


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
            print(
                f"{self.label}: epoch {epoch}/{self.total}, {now - self.start:.0f} s, {note}",
                file=sys.stderr,
                flush=True,
            )


class Bar(Progress):
    """rich's bar."""

    def __init__(self, label: str, total: int) -> None:
        from rich import progress as rich
        from rich.console import Console
        from rich.table import Column

        def text(
            template: str, ratio: int
        ) -> rich.TextColumn:  # gives way on a narrow terminal, so that the count stays
            return rich.TextColumn(template, table_column=Column(ratio=ratio, no_wrap=True, overflow="ellipsis"))

        columns: list[Any] = [text("{task.description}", 2), rich.BarColumn(12), rich.MofNCompleteColumn()]
        columns += [rich.TimeElapsedColumn(), rich.TimeRemainingColumn(), text("{task.fields[note]}", 3)]
        self.bar = rich.Progress(*columns, console=Console(stderr=True), expand=True)
        self.task = self.bar.add_task(label, total=total, note="")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def update(self, epoch: int, note: str = "") -> None:
        if note:
            self.bar.update(self.task, completed=epoch, note=note)
        else:
            self.bar.update(self.task, completed=epoch)


def show_progress(label: str, total: int) -> Progress:
    """A bar if somebody watches, lines otherwise."""
    return Bar(label, total) if sys.stderr.isatty() else Lines(label, total)
