"""Executors draw a job only when they need one, so that it may depend on the outcomes of earlier jobs."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from uat.executors import Executor, InProcess, Note, Pool, Ray, check_executor, executor_for, kinds


@dataclass(frozen=True)
class Number:
    number: int

    @property
    def name(self) -> str:
        return f"job {self.number}"


def square(job: Number, device: torch.device, note: Note) -> list[dict[str, Any]]:
    if job.number == 3:
        raise ValueError("3 is refused")
    return [{"square": job.number**2, "threads": torch.get_num_threads()}]


class InstantRay(types.SimpleNamespace):
    """The part of Ray's interface that is used, in one process: the job submitted last ends first."""

    def __init__(self) -> None:
        super().__init__(exceptions=types.SimpleNamespace(RayError=ConnectionError), most=0, results=[])

    def init(self, **options: Any) -> None:
        self.options = options

    def remote(self, **_: Any) -> Callable[[Any], Any]:
        def submit(do: Any, *args: Any) -> int:
            self.results.append(ConnectionError("lost\nlong") if args[0].number == 4 else do(*args))
            return len(self.results) - 1

        return lambda do: types.SimpleNamespace(remote=lambda *args: submit(do, *args))

    def wait(self, waiting: list[int], timeout: float) -> tuple[list[int], list[int]]:
        self.most = max(self.most, len(waiting))
        return waiting[-1:], waiting[:-1]

    def get(self, reference: int) -> Any:
        if isinstance(result := self.results[reference], Exception):
            raise result
        return result

    def shutdown(self) -> None:
        self.closed = True


def drawn(count: int, received: list[int], most: int) -> Iterator[Number]:
    """Yield jobs, and check at each that no more than `most` of the earlier ones are still to be received."""
    for number in range(count):
        assert number - len(received) < most
        yield Number(number)


def squares(executor: Executor, jobs: Any, notes: Path, received: list[int]) -> dict[int, Any]:
    found = {}
    for index, outcome in executor.outcomes(jobs, square, notes, lambda: None):
        received.append(index)
        found[index] = outcome.failure or outcome.rows[0]["square"]
        assert outcome.name == f"job {index}"
    return found


EXPECTED = {0: 0, 1: 1, 2: 4, 3: "ValueError: 3 is refused"}


@pytest.mark.parametrize("executor", [InProcess(device="cpu"), Pool(workers=2, device="cpu")], ids=["one", "pool"])
def test_jobs_are_drawn_when_a_worker_is_free(executor: Executor, tmp_path: Path) -> None:
    received: list[int] = []
    assert squares(executor, drawn(4, received, executor.workers), tmp_path, received) == EXPECTED


@pytest.mark.parametrize("lazy", [True, False])
def test_ray_gets_a_list_at_once_and_other_jobs_as_workers_are_free(
    lazy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray, received = InstantRay(), list[int]()
    monkeypatch.setattr(kinds, "need_ray", lambda: ray)
    jobs = drawn(5, received, 2) if lazy else [Number(number) for number in range(5)]
    assert squares(Ray(workers=2, device="cpu"), jobs, tmp_path, received) == {**EXPECTED, 4: "lost"}
    assert (ray.most, ray.options["num_cpus"], ray.closed) == (2 if lazy else 5, 2, True)


def test_the_executor_follows_from_its_name_and_the_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    about: dict[str, Any] = {"address": None, "device": "cpu", "threads": 1}
    assert executor_for("local", workers=1, **about) == InProcess(device="cpu", threads=1)
    assert executor_for("local", workers=3, **about) == Pool(workers=3, device="cpu", threads=1)
    assert executor_for("ray", workers=3, **about) == Ray(workers=3, device="cpu", threads=1)
    monkeypatch.setattr(kinds, "cores", lambda: 7)
    assert executor_for("local", workers=None, **about).workers == 7
    monkeypatch.setattr(kinds.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'uat-transformer\[cluster\]'"):
        check_executor("ray", workers=1, address=None)
    check_executor("ray", workers=1, address=None, runs=False)
