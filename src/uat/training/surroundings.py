"""Device, seeds and precision of a run, as context managers that restore the previous state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from uat.settings import shown


def pick_device(device: torch.device | str | None = None) -> torch.device:
    """Return the requested device, and raise an error if it does not exist. Default: CUDA if available, else CPU."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        return torch.device("cuda" if num_gpus else "cpu")
    if not isinstance(device, str | torch.device):
        raise ValueError(f"device={shown(device)} must be 'cpu' or 'cuda'")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        chosen = None
    if chosen is None or chosen.type not in ("cpu", "cuda") or (chosen.type == "cpu" and chosen.index):
        raise ValueError(f"unknown device {shown(str(device))}; use 'cpu' or 'cuda'")
    if chosen.type == "cuda" and (chosen.index or 0) >= num_gpus:
        available = f"only {num_gpus}" if num_gpus else "none"
        raise ValueError(
            f"device {str(device)!r} was asked for, but this machine or this build of torch has {available}; "
            "use device 'cpu'"
        )
    return chosen


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make this the current CUDA device, on which graphs are captured and kernels launched."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators, and restore their state afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def precision(name: str) -> Iterator[None]:
    """Set the input precision of matrix products on a GPU; sums, norms and the residual stream stay float32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = name in ("tf32", "bf16")
    try:
        with torch.autocast("cuda", torch.bfloat16, enabled=name == "bf16", cache_enabled=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
