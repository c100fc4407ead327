"""Who does the jobs: this process, a pool of processes on this machine, or a Ray cluster. The rows are the same."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from uat.paper.studies.work import Outcome, Task, do
from uat.paper.studies.workers import WorkerDied, run_jobs

POLL_SECONDS = 0.5


class Executor(Protocol):
    """Does jobs in any order."""

    @property
    def workers(self) -> int:
        """How many at a time."""
        ...

    def outcomes(
        self, tasks: Sequence[Task], runs: Path, notes: Path, watch: Callable[[], None]
    ) -> Iterator[tuple[int, Outcome]]:
        """Each job's index and what came of it, as they are done; `watch` is called every now and then meanwhile."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcess:
    """One job after the other, here."""

    device: str | None = None
    workers: int = 1
    threads: int | None = None

    def outcomes(
        self, tasks: Sequence[Task], runs: Path, notes: Path, watch: Callable[[], None]
    ) -> Iterator[tuple[int, Outcome]]:
        for index, task in enumerate(tasks):
            yield index, do(task, runs, notes / "0.json", self.device, self.threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Processes on this machine: one for each core, or for each GPU."""

    workers: int
    device: str | None = None
    threads: int | None = None

    def outcomes(
        self, tasks: Sequence[Task], runs: Path, notes: Path, watch: Callable[[], None]
    ) -> Iterator[tuple[int, Outcome]]:
        do_here = partial(_do_here, runs=runs, notes=notes, device=self.device, threads=self.threads)
        begin = partial(_settle_down, device=self.device)
        for index, outcome in run_jobs(tasks, do_here, self.workers, watch, POLL_SECONDS, begin):
            if isinstance(outcome, WorkerDied):
                died = f"its worker was killed (out of memory?): {outcome}; run the same command again, perhaps with "
                outcome = Outcome(name=tasks[index].name, rows=[], seconds=0.0, failure=f"{died}fewer --workers")
            yield index, outcome


def _settle_down(place: int, device: str | None) -> None:
    own = own_device(place, device)
    if own is not None and own.startswith("cuda"):
        torch.cuda.set_device(own)  # graphs are captured and kernels launched on the current one


def own_device(place: int, device: str | None) -> str | None:
    """Where the worker in this place computes: GPUs are shared out."""
    if device == "cuda" or (device is None and torch.cuda.is_available()):
        return f"cuda:{place % torch.cuda.device_count()}"
    return device


def _do_here(place: int, task: Task, runs: Path, notes: Path, device: str | None, threads: int | None) -> Outcome:
    return do(task, runs, notes / f"{place}.json", own_device(place, device), threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ray:
    """A Ray cluster, or a small one of this machine. The folder of results must be one that all its machines see."""

    workers: int
    address: str | None = None
    """Of a running cluster; None: one is started here, with `workers` workers."""
    device: str | None = None
    threads: int | None = None

    def outcomes(
        self, tasks: Sequence[Task], runs: Path, notes: Path, watch: Callable[[], None]
    ) -> Iterator[tuple[int, Outcome]]:
        ray = need_ray()
        package = str(Path(__file__).parents[2])
        how: dict[str, Any] = {"runtime_env": {"py_modules": [package]}, "log_to_driver": False}
        on_gpu = self.device == "cuda" or (self.device is None and torch.cuda.is_available())
        if self.address is None:
            how = {"num_cpus": self.workers, "include_dashboard": False, "log_to_driver": False}
        ray.init(address=self.address, **how)
        try:
            remote = ray.remote(num_cpus=1, num_gpus=1 if on_gpu else 0, max_retries=0)(do)
            where = [(notes / f"{index}.json").absolute() for index in range(len(tasks))]
            waiting = {
                remote.remote(task, runs.absolute(), note, self.device, self.threads): index
                for index, (task, note) in enumerate(zip(tasks, where, strict=True))
            }
            while waiting:
                done, _ = ray.wait(list(waiting), timeout=POLL_SECONDS)
                for reference in done:
                    index = waiting.pop(reference)
                    yield index, _ray_outcome(ray, reference, tasks[index].name)
                watch()
        finally:
            ray.shutdown()


def need_ray() -> Any:
    if importlib.util.find_spec("ray") is None:
        raise ValueError("--executor ray needs ray, which is not installed: pip install 'uat-transformer[cluster]'")
    return importlib.import_module("ray")


def _ray_outcome(ray: Any, reference: Any, name: str) -> Outcome:
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        return Outcome(name=name, rows=[], seconds=0.0, failure=str(error).splitlines()[0], traceback=str(error))
