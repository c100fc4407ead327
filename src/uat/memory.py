"""Memory limits of devices, to refuse in advance what cannot fit."""

from __future__ import annotations

import os
from pathlib import Path

import torch

GIB = 2**30


def check_fits(needed: int, what: str, device: torch.device | str = "cpu") -> None:
    """Raise ValueError if `needed` bytes exceed the device's memory; `what` names the settings and their values."""
    if needed > (limit := memory_of(torch.device(device))):
        raise ValueError(
            f"{what} would take about {needed / GIB:,.0f} GiB of memory, but only {limit / GIB:,.1f} GiB are available"
        )


def memory_of(device: torch.device) -> int:
    """Limit in bytes of the memory that this process can use on a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")] if hasattr(os, "sysconf") else []
    try:
        import resource
    except ImportError:  # Windows
        return min(limits, default=2**63)
    if (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        limits.append(limit)
    group = Path("/sys/fs/cgroup/memory.max")
    if group.is_file() and (text := group.read_text().strip()).isdigit():
        limits.append(int(text))
    return min(limits, default=2**63)
