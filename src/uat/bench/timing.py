"""Timing of single calls, with the device idle before and after each.

Compared paths are timed in alternation, so that other load on the machine affects all of them equally.
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
"""Number of rounds of the alternation."""
SHORT = 0.1
"""Calls shorter than this many seconds are warmed up again in each round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured number."""

    device: str
    case: str
    method: str
    path: str
    """fast, graph, cached, recompute, or peer:NAME, see `uat.bench.cases`; for a loss, whole or pieces."""
    batch: int
    context: int
    metric: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Call:
    """A timed call, and the untimed preparation before it."""

    run: Callable[[], Any]
    before: Callable[[], Any] | None = None


def measure(
    calls: Mapping[Key, Call], repeats: int, device: torch.device, *, seconds: float = 10.0
) -> dict[Key, list[float]]:
    """Milliseconds of `repeats` single calls each; fewer if the calls of one key take over `seconds` in total."""
    timings: dict[Key, list[float]] = {key: [] for key in calls}
    rounds = min(ROUNDS, repeats)
    with quiet():
        for turn in range(1, rounds + 1):
            for key, call in calls.items():
                times = timings[key]
                if not times or times[-1] < 1000 * SHORT:
                    once(call, device)
                while len(times) < repeats * turn / rounds and sum(times) < 1000 * seconds * turn / rounds:
                    times.append(once(call, device))
    return timings


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
    """The smallest time that at least a share q of the times do not exceed."""
    return sorted(times)[max(0, math.ceil(q * len(times)) - 1)]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Disable garbage collection inside the block."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads inside the block, and NumPy as well if `numpy_obeys`."""
    numpy_limit: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if importlib.util.find_spec("threadpoolctl") is not None:
        numpy_limit = importlib.import_module("threadpoolctl").threadpool_limits(count, "blas")
    with cpu_threads(count), numpy_limit:
        yield


def numpy_obeys(count: int) -> bool:
    """Whether NumPy's matrix products, which a Session's fast step uses, run with this number of threads."""
    setting = next((os.environ[name] for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS") if name in os.environ), "")
    return setting == str(count) or importlib.util.find_spec("threadpoolctl") is not None
