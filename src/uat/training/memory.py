"""Whether a training fits into memory, estimated before anything of its size is allocated."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from uat.config import RunConfig
from uat.methods import METHODS
from uat.runs import empty_policy
from uat.settings import shown
from uat.types import Assets, Items, Spec, Weights

COPIES = 4
"""Of every weight: itself, its gradient, and the two moments of the optimizer."""
PER_LAYER = 12
"""Numbers of the residual stream's width that a layer keeps of a step for its gradients."""
GIB = 2**30


def check_memory(config: RunConfig, spec: Spec, device: torch.device, *, share: int = 1) -> None:
    """Refuse a training that is certainly larger than the memory of its device.

    share: among how many processes a batch is divided.
    """
    weights = COPIES * sum(
        x.nbytes for x in empty_policy(METHODS[config.method_name], spec, config.method).parameters()
    )
    batch = 4 * -(-config.train.batch_size // share) * spec.horizon * numbers_per_step(spec, config.method)
    there = memory_of(device)
    if weights + batch <= there:
        return
    if weights > batch:
        names = [name for name in WIDTHS if hasattr(config.method, name)]
        what = ", ".join(f"method.{name}={shown(getattr(config.method, name))}" for name in names)
        said = f"the weights of {config.method_name} with {what}"
    else:
        said = f"train.batch_size={config.train.batch_size} episodes of horizon={spec.horizon}"
        said += "".join(
            f", method.{name}={getattr(config.method, name)}" for name in WIDTHS[:2] if hasattr(config.method, name)
        )
    raise ValueError(
        f"{said} need about {(weights + batch) / GIB:,.0f} GiB to train, and {device} has {there / GIB:,.1f}"
    )


WIDTHS = ("d_model", "num_layers", "d_ff", "d_hidden", "d_utility", "members", "num_hidden", "d_encoder", "d_asset")
"""Settings that decide how many weights there are."""


def numbers_per_step(spec: Spec, config: Any) -> int:
    """What training keeps of one step of an episode: what is told of it, and what its gradients need."""
    match spec.obs:
        case Items():
            obs = 1
        case Assets(count, features):
            obs = count * features
        case vector:
            obs = vector.width
    action = spec.action.count if isinstance(spec.action, Weights) else 1
    width, layers = getattr(config, "d_model", 0), getattr(config, "num_layers", 0)
    return 2 * obs + 4 * action + layers * (PER_LAYER * width + 2 * getattr(config, "d_ff", 0))


def memory_of(device: torch.device) -> int:
    """Bytes that a process may have there at most."""
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
