"""Where kernels of Triton may take the place of their slow twins."""

from __future__ import annotations

import functools
import importlib.util

import torch


@functools.cache
def compiles(device: torch.device) -> bool:
    """Whether Triton is there, and this device a GPU that it serves."""
    if device.type != "cuda" or torch.version.hip is not None or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
