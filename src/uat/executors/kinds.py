"""Executors run jobs in this process, in a pool of local processes, or on a Ray cluster, with identical rows."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from uat.executors.jobs import Do, Job, Outcome, run_job
from uat.executors.workers import WorkerDied, run_jobs
from uat.threads import cores, thread_count

POLL_SECONDS = 0.5
ExecutorName = Literal["local", "ray"]


class Executor(Protocol):
    """Runs jobs in any order."""

    @property
    def workers(self) -> int:
        """Number of jobs at a time."""
        ...

    def outcomes(
        self, jobs: Iterable[Job], do: Do, notes: Path, watch: Callable[[], None]
    ) -> Iterator[tuple[int, Outcome]]:
        """Yield the index and outcome of each job as it ends; `watch` is called regularly in the meantime.

        The next job is drawn when a worker is free and the caller has received every outcome so far. It may therefore
        depend on them.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcess:
    """Runs one job after the other in this process."""

    device: str | None = None
    workers: int = 1
    threads: int | None = None

    def outcomes(
        self, jobs: Iterable[Job], do: Do, notes: Path, watch: Callable[[], None]
    ) -> Iterator[tuple[int, Outcome]]:
        for index, job in enumerate(jobs):
            yield index, run_job(job, do, notes / "0.json", self.device, self.threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Runs jobs in processes on this machine, one per core or per GPU."""

    workers: int
    device: str | None = None
    threads: int | None = None

    def outcomes(
        self, jobs: Iterable[Job], do: Do, notes: Path, watch: Callable[[], None]
    ) -> Iterator[tuple[int, Outcome]]:
        run_here = partial(_run_here, do=do, notes=notes, device=self.device, threads=self.threads)
        begin = partial(_choose_device, device=self.device)
        names: list[str] = []
        for index, outcome in run_jobs(_noted(jobs, names), run_here, self.workers, watch, POLL_SECONDS, begin):
            if isinstance(outcome, WorkerDied):
                died = f"its worker was killed (out of memory?): {outcome}; run the same command again, perhaps with "
                failure = f"{died}fewer --workers"
                outcome = Outcome(name=names[index], rows=[], seconds=0.0, failure=failure, died=True)
            yield index, outcome


def _noted(jobs: Iterable[Job], names: list[str]) -> Iterator[Job]:
    """Yield the jobs, and append their names to a list."""
    for job in jobs:
        names.append(job.name)
        yield job


def _choose_device(place: int, device: str | None) -> None:
    own = own_device(place, device)
    if own is not None and own.startswith("cuda"):
        torch.cuda.set_device(own)  # graphs are captured and kernels launched on the current device


def own_device(place: int, device: str | None) -> str | None:
    """Device of the worker with this index; GPUs are assigned in turn."""
    if on_gpu(device):
        return f"cuda:{place % torch.cuda.device_count()}"
    return device


def _run_here(place: int, job: Job, do: Do, notes: Path, device: str | None, threads: int | None) -> Outcome:
    return run_job(job, do, notes / f"{place}.json", own_device(place, device), threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ray:
    """Runs jobs on a Ray cluster, by default a local one. All its machines must share the folder of results.

    The jobs of a list are submitted at once, and run as the cluster has room; of other iterables, `workers` jobs run at
    a time.
    """

    workers: int
    address: str | None = None
    """Address of a running cluster; None starts a local one with `workers` workers."""
    device: str | None = None
    threads: int | None = None

    def outcomes(
        self, jobs: Iterable[Job], do: Do, notes: Path, watch: Callable[[], None]
    ) -> Iterator[tuple[int, Outcome]]:
        ray = need_ray()
        package = str(Path(__file__).parents[1])
        options: dict[str, Any] = {"runtime_env": {"py_modules": [package]}, "log_to_driver": False}
        if self.address is None:
            options = {"num_cpus": self.workers, "include_dashboard": False, "log_to_driver": False}
        ray.init(address=self.address, **options)
        try:
            remote = ray.remote(num_cpus=1, num_gpus=1 if on_gpu(self.device) else 0, max_retries=0)(run_job)
            todo, at_a_time = enumerate(jobs), len(jobs) if isinstance(jobs, Sequence) else self.workers
            waiting: dict[Any, tuple[int, str]] = {}

            def submit(count: int) -> None:
                for index, job in itertools.islice(todo, count):
                    note = (notes / f"{index}.json").absolute()
                    waiting[remote.remote(job, do, note, self.device, self.threads)] = (index, job.name)

            submit(at_a_time)
            while waiting:
                done, _ = ray.wait(list(waiting), timeout=POLL_SECONDS)
                for reference in done:
                    index, name = waiting.pop(reference)
                    yield index, _ray_outcome(ray, reference, name)
                    submit(1)
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
        failure = str(error).splitlines()[0]
        return Outcome(name=name, rows=[], seconds=0.0, failure=failure, traceback=str(error), died=True)


def on_gpu(device: str | None) -> bool:
    """Whether jobs compute on GPUs."""
    return device == "cuda" or (device is None and torch.cuda.is_available())


def executor_for(
    name: ExecutorName, *, workers: int | None, address: str | None, device: str | None, threads: int | None
) -> Executor:
    """Return an executor; without a number of workers, one for each GPU, or for each core if there is no GPU."""
    gpus = torch.cuda.device_count() if on_gpu(device) else 0
    workers, threads = workers or gpus or cores(), thread_count(threads)
    if name == "ray":
        return Ray(workers=workers, address=address, device=device, threads=threads)
    if workers == 1:
        return InProcess(device=device, threads=threads)
    return Pool(workers=workers, device=device, threads=threads)


def check_executor(name: ExecutorName, *, workers: int | None, address: str | None, runs: bool = True) -> None:
    """Raise a ValueError if these arguments do not fit together, or jobs should run on Ray and it is not installed."""
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers} must be at least 1")
    if address is not None and name != "ray":
        raise ValueError(f"address={address!r} is for --executor ray")
    if name == "ray" and runs:
        need_ray()
