"""A job of a grid of trainings: its outcome, its progress for other processes, and the file that keeps its failure."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from uat.files import safe_name, write_atomically
from uat.threads import cpu_threads
from uat.training.progress import Progress
from uat.training.surroundings import pick_device


class Job(Protocol):
    """Work for one worker at a time, which can be pickled."""

    @property
    def name(self) -> str:
        """The name in progress lines and failures."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a job."""

    name: str
    rows: list[dict[str, Any]]
    seconds: float
    failure: str | None = None
    """The reason in one sentence; None if the job succeeded."""
    traceback: str = ""
    died: bool = False
    """Whether the worker's process ended during the job."""


class Note(Progress):
    """Progress in a small file for observers in other processes or machines, written at most twice a second."""

    def __init__(self, file: Path, name: str) -> None:
        self.file, self.name, self.total, self.last = file, name, 1, 0.0
        self.write(0, "")

    def begin(self, label: str, total: int) -> Note:
        self.total = total
        return self

    def update(self, epoch: int, note: str = "") -> None:
        if time.monotonic() - self.last > 0.5:
            self.write(epoch, note)

    def write(self, epoch: int, note: str) -> None:
        self.last = time.monotonic()
        row = {"name": self.name, "epoch": epoch, "total": self.total, "note": note}
        write_atomically(self.file, json.dumps(row).encode(), durable=False)


Do = Callable[[Any, torch.device, Note], list[dict[str, Any]]]
"""A function that does a job on a device, reports progress to a note, and returns rows. Workers import it, so it is
defined in a module, or a `functools.partial` of such a function."""


def run_job(job: Job, do: Do, note: Path, device: str | None, threads: int | None = None) -> Outcome:
    """Do a job. A failure becomes an outcome, so that the rest of a grid continues."""
    started, chosen = time.perf_counter(), pick_device(device)
    progress = Note(note, job.name)
    try:
        with cpu_threads(threads):
            rows = do(job, chosen, progress)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0]
        seconds = time.perf_counter() - started
        return Outcome(name=job.name, rows=[], seconds=seconds, failure=reason, traceback=traceback.format_exc())
    finally:
        note.unlink(missing_ok=True)
    return Outcome(name=job.name, rows=rows, seconds=time.perf_counter() - started)


def keep_failure(folder: Path, outcome: Outcome) -> Path:
    """Write a failure with its traceback to a file; return the path."""
    name = "".join(c if c.isalnum() or c in "=.-" else "-" for c in outcome.name)
    file = folder / f"{safe_name(name)}.txt"
    write_atomically(file, f"{outcome.failure}\n\n{outcome.traceback}".encode(errors="backslashreplace"))
    return file
