"""How things are timed: single calls, the device idle before and after each, medians.

Paths that are compared take turns, so that whatever else the machine does meanwhile falls on all of them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from uat.threads import cpu_threads

Key = TypeVar("Key")

ROUNDS = 5
"""Turns that each path takes."""
SHORT = 0.1
"""Calls below this many seconds are warmed up again at each turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured number."""

    device: str
    case: str
    method: str
    path: str
    """fast, graph, cached, recompute, or peer:NAME, see `uat.bench.cases`; of a loss whole or pieces."""
    batch: int
    context: int
    metric: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Call:
    """What is timed, and what must be done before it without being timed."""

    run: Callable[[], Any]
    before: Callable[[], Any] | None = None


def measure(
    calls: Mapping[Key, Call], repeats: int, device: torch.device, *, seconds: float = 10.0
) -> dict[Key, list[float]]:
    """Milliseconds of single calls: so many of each, fewer where they take longer than that in all."""
    found: dict[Key, list[float]] = {key: [] for key in calls}
    rounds = min(ROUNDS, repeats)
    with quiet():
        for turn in range(1, rounds + 1):
            for key, call in calls.items():
                times = found[key]
                if not times or times[-1] < 1000 * SHORT:
                    once(call, device)
                while len(times) < repeats * turn / rounds and sum(times) < 1000 * seconds * turn / rounds:
                    times.append(once(call, device))
    return found


def once(call: Call, device: torch.device) -> float:
    """Milliseconds of one call."""
    if call.before is not None:
        call.before()
    wait(device)
    start = time.perf_counter()
    call.run()
    wait(device)
    return 1000 * (time.perf_counter() - start)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def quantile(times: list[float], q: float) -> float:
    """The smallest time that at least a share q does not exceed; the largest of all, where there are few."""
    return sorted(times)[max(0, math.ceil(q * len(times)) - 1)]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No garbage is collected inside."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Torch computes with so many threads inside, and so does numpy where `numpy_obeys`."""
    numpys: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if importlib.util.find_spec("threadpoolctl") is not None:
        numpys = importlib.import_module("threadpoolctl").threadpool_limits(count, "blas")
    with cpu_threads(count), numpys:
        yield


def numpy_obeys(count: int) -> bool:
    """Whether numpy's products, which a Session's fast step is made of, use so many threads as well."""
    told = next((os.environ[name] for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS") if name in os.environ), "")
    return told == str(count) or importlib.util.find_spec("threadpoolctl") is not None
