"""Worker processes of a grid: each does one job at a time, fails alone, and ends with its parent.

A worker that is killed (by the system, when memory runs out) fails the job it was doing, and another one takes its
place. A worker whose parent has ended, however that happened, ends at once: nothing trains on beside the next attempt.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

_context = multiprocessing.get_context("spawn")
STOP_SECONDS = 5.0


class WorkerDied(Exception):  # noqa: N818 (an outcome, never raised at a user)
    """The process ended in the middle of its job."""


@dataclass(slots=True)
class Worker:
    """A process in one of the pool's places, and its end of the line to the parent."""

    place: int
    process: Any
    line: Connection
    job: int | None = None
    """Index of the job it is doing."""


def run_jobs(
    jobs: Sequence[Any],
    do: Callable[[int, Any], Any],
    workers: int,
    watch: Callable[[], None],
    poll_seconds: float,
    begin: Callable[[int], None],
) -> Iterator[tuple[int, Any]]:
    """Each job's index and what `do(place, job)` gave for it, or WorkerDied, as they are done.

    do, begin: functions of a module, as workers import them; a worker calls `begin(place)` first. `watch` is called
    every `poll_seconds` meanwhile.
    """
    todo = list(enumerate(jobs))[::-1]
    pool: dict[int, Worker] = {}
    try:
        for place in range(min(workers, len(jobs))):
            pool[place] = _start(place, do, begin)
            _hand_over(pool[place], todo)
        while busy := {worker.line: worker for worker in pool.values() if worker.job is not None}:
            ready = set(wait(list(busy), timeout=poll_seconds))
            for worker in [worker for line, worker in busy.items() if line in ready]:
                index, outcome = worker.job, _receive(worker)
                assert index is not None
                if isinstance(outcome, WorkerDied) and todo:
                    pool[worker.place] = _start(worker.place, do, begin)
                _hand_over(pool[worker.place], todo)
                yield index, outcome
            watch()
    finally:
        for worker in pool.values():
            worker.process.terminate()
        for worker in pool.values():
            worker.process.join(STOP_SECONDS)
            worker.process.kill()
            worker.line.close()


def _start(place: int, do: Callable[[int, Any], Any], begin: Callable[[int], None]) -> Worker:
    ours, theirs = _context.Pipe()
    process = _context.Process(target=_work, args=(place, theirs, do, begin), name=f"uat worker {place}", daemon=True)
    with _interrupts_held_back():  # inherited: Ctrl-C is the parent's to answer, while a worker imports as well
        process.start()
    theirs.close()
    return Worker(place, process, ours)


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """A process started inside never sees Ctrl-C; one that comes meanwhile reaches this process afterwards."""
    if not hasattr(signal, "pthread_sigmask"):  # pragma: no cover (Windows)
        yield
        return
    resource_tracker.ensure_running()  # when it starts it lets interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _hand_over(worker: Worker, todo: list[tuple[int, Any]]) -> None:
    """The next job, if there is one."""
    worker.job = None
    if todo:
        worker.job, job = todo.pop()
        with contextlib.suppress(OSError):  # it has died already: its line says so when it is read
            worker.line.send(job)


def _receive(worker: Worker) -> Any:
    try:
        return worker.line.recv()
    except (EOFError, OSError):
        worker.process.join(STOP_SECONDS)
        worker.line.close()
        return WorkerDied(f"exit code {worker.process.exitcode}")


# ---------------------------------------------------------------- in the worker


def _work(place: int, line: Connection, do: Callable[[int, Any], Any], begin: Callable[[int], None]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    begin(place)
    with contextlib.suppress(EOFError):
        while True:
            line.send(do(place, line.recv()))


def _end_with_parent() -> None:
    """Wait for the parent's end and end at once, in the middle of whatever is done: a run folder bears any kill."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
