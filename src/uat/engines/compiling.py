"""Where kernels of Triton may take the place of their slow twins."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, cast

import torch


def compiles(device: torch.device) -> bool:
    """Whether Triton is there, and this device a GPU whose instructions the kernels name."""
    if device.type != "cuda" or torch.version.hip is not None or not _has_triton():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may take there, as Triton counts them."""
    from triton.runtime import driver

    index, active = torch.cuda.current_device() if device.index is None else device.index, cast(Any, driver.active)
    return active.utils.get_device_properties(index)["max_shared_mem"]
