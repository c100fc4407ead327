"""Worker processes: each runs one job at a time, fails without affecting others, and ends with its parent.

If a worker is killed (for example by the system, when memory runs out), its job fails and a new worker takes its place.
A worker ends at once when its parent has ended for any reason, so that no training continues beside the next attempt.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

_context = multiprocessing.get_context("spawn")
STOP_SECONDS = 5.0


class WorkerDied(Exception):  # noqa: N818 (an outcome, never raised at a user)
    """The worker's process ended during its job."""


@dataclass(slots=True)
class Worker:
    """A worker process, its index in the pool, and the parent's connection to it."""

    place: int
    process: Any
    line: Connection
    job: int | None = None
    """Index of its current job."""


def run_jobs(
    jobs: Iterable[Any],
    do: Callable[[int, Any], Any],
    workers: int,
    watch: Callable[[], None],
    poll_seconds: float,
    begin: Callable[[int], None],
) -> Iterator[tuple[int, Any]]:
    """Yield each job's index and the result of `do(place, job)`, or WorkerDied, as the jobs end.

    jobs: drawn one by one, when a worker is free and the caller has received every result so far.
    do, begin: module-level functions, since workers import them; a worker calls `begin(place)` first.
    watch: called every `poll_seconds` in the meantime.
    """
    todo = iter(enumerate(jobs))
    pool: dict[int, Worker] = {}
    try:
        for place, job in zip(range(workers), todo, strict=False):
            pool[place] = _start(place, do, begin)
            _hand_over(pool[place], job)
        while busy := {worker.line: worker for worker in pool.values() if worker.job is not None}:
            ready = set(wait(list(busy), timeout=poll_seconds))
            for worker in [worker for line, worker in busy.items() if line in ready]:
                index, outcome = worker.job, _receive(worker)
                assert index is not None
                worker.job = None
                yield index, outcome
                if (job := next(todo, None)) is not None:
                    if isinstance(outcome, WorkerDied):
                        pool[worker.place] = _start(worker.place, do, begin)
                    _hand_over(pool[worker.place], job)
            watch()
    finally:
        for worker in pool.values():
            worker.process.terminate()
        for worker in pool.values():
            worker.process.join(STOP_SECONDS)
            worker.process.kill()
            worker.line.close()


def _start(place: int, do: Callable[[int, Any], Any], begin: Callable[[int], None]) -> Worker:
    parent_end, worker_end = _context.Pipe()
    process = _context.Process(
        target=_work, args=(place, worker_end, do, begin), name=f"uat worker {place}", daemon=True
    )
    with _interrupts_held_back():  # inherited, so that only the parent handles Ctrl-C, even while a worker imports
        process.start()
    worker_end.close()
    return Worker(place, process, parent_end)


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Hide Ctrl-C from processes that start inside the block; this process receives it afterwards."""
    if not hasattr(signal, "pthread_sigmask"):  # pragma: no cover (Windows)
        yield
        return
    resource_tracker.ensure_running()  # because it unblocks interrupts when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _hand_over(worker: Worker, job: tuple[int, Any]) -> None:
    """Send the worker its next job, which comes with its index."""
    worker.job = job[0]
    with contextlib.suppress(OSError):  # the worker has died, which reading from it will report
        worker.line.send(job[1])


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
    """End this process as soon as the parent has ended; run folders tolerate a kill at any time."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
