"""Device, seeds and precision of a run: set inside, put back outside."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch


def pick_device(device: torch.device | str | None = None) -> torch.device:
    """The device asked for; without a wish, CUDA where there is one."""
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"unknown device {device!r}; use 'cpu' or 'cuda'") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device 'cuda' was asked for, but this machine or this build of torch has none; use device 'cpu'"
        )
    return chosen


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Graphs are captured, and kernels launched, on this device inside: there may be several."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """torch's own generators start from this seed inside, and are as they were outside."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def precision(name: str) -> Iterator[None]:
    """How matrix products on a GPU round what goes into them; sums, norms and the residual stream stay float32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = name in ("tf32", "bf16")
    try:
        with torch.autocast("cuda", torch.bfloat16, enabled=name == "bf16", cache_enabled=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
