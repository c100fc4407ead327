"""Executors run jobs in this process, in a pool of local processes, or on a Ray cluster, with identical rows."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from uat.paper.studies.work import Outcome, Task, run_job
from uat.paper.studies.workers import WorkerDied, run_jobs

POLL_SECONDS = 0.5


class Executor(Protocol):
    """Runs jobs in any order."""

    @property
    def workers(self) -> int:
        """Number of jobs at a time."""
        ...

    def outcomes(
        self, tasks: Sequence[Task], runs: Path, notes: Path, watch: Callable[[], None]
    ) -> Iterator[tuple[int, Outcome]]:
        """Yield the index and outcome of each job as it ends; `watch` is called regularly in the meantime."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcess:
    """Runs one job after the other in this process."""

    device: str | None = None
    workers: int = 1
    threads: int | None = None

    def outcomes(
        self, tasks: Sequence[Task], runs: Path, notes: Path, watch: Callable[[], None]
    ) -> Iterator[tuple[int, Outcome]]:
        for index, task in enumerate(tasks):
            yield index, run_job(task, runs, notes / "0.json", self.device, self.threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Runs jobs in processes on this machine, one per core or per GPU."""

    workers: int
    device: str | None = None
    threads: int | None = None

    def outcomes(
        self, tasks: Sequence[Task], runs: Path, notes: Path, watch: Callable[[], None]
    ) -> Iterator[tuple[int, Outcome]]:
        run_here = partial(_run_here, runs=runs, notes=notes, device=self.device, threads=self.threads)
        begin = partial(_choose_device, device=self.device)
        for index, outcome in run_jobs(tasks, run_here, self.workers, watch, POLL_SECONDS, begin):
            if isinstance(outcome, WorkerDied):
                died = f"its worker was killed (out of memory?): {outcome}; run the same command again, perhaps with "
                outcome = Outcome(name=tasks[index].name, rows=[], seconds=0.0, failure=f"{died}fewer --workers")
            yield index, outcome


def _choose_device(place: int, device: str | None) -> None:
    own = own_device(place, device)
    if own is not None and own.startswith("cuda"):
        torch.cuda.set_device(own)  # graphs are captured and kernels launched on the current device


def own_device(place: int, device: str | None) -> str | None:
    """Device of the worker with this index; GPUs are assigned in turn."""
    if device == "cuda" or (device is None and torch.cuda.is_available()):
        return f"cuda:{place % torch.cuda.device_count()}"
    return device


def _run_here(place: int, task: Task, runs: Path, notes: Path, device: str | None, threads: int | None) -> Outcome:
    return run_job(task, runs, notes / f"{place}.json", own_device(place, device), threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ray:
    """Runs jobs on a Ray cluster, by default a local one. All its machines must share the folder of results."""

    workers: int
    address: str | None = None
    """Address of a running cluster; None starts a local one with `workers` workers."""
    device: str | None = None
    threads: int | None = None

    def outcomes(
        self, tasks: Sequence[Task], runs: Path, notes: Path, watch: Callable[[], None]
    ) -> Iterator[tuple[int, Outcome]]:
        ray = need_ray()
        package = str(Path(__file__).parents[2])
        options: dict[str, Any] = {"runtime_env": {"py_modules": [package]}, "log_to_driver": False}
        on_gpu = self.device == "cuda" or (self.device is None and torch.cuda.is_available())
        if self.address is None:
            options = {"num_cpus": self.workers, "include_dashboard": False, "log_to_driver": False}
        ray.init(address=self.address, **options)
        try:
            remote = ray.remote(num_cpus=1, num_gpus=1 if on_gpu else 0, max_retries=0)(run_job)
            files = [(notes / f"{index}.json").absolute() for index in range(len(tasks))]
            waiting = {
                remote.remote(task, runs.absolute(), note, self.device, self.threads): index
                for index, (task, note) in enumerate(zip(tasks, files, strict=True))
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
