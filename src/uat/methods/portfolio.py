"""Shared parts of the methods that allocate money: supported problems, price relatives, masks.

Axes: B batch, T time, N assets, A cash and assets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uat.episode import Batch
from uat.spec import Assets, Spec, Weights

RELATIVE = "relative"
"""Name of the fact with the price relatives: the value of one unit of money in cash and each asset a step later."""
FAR = 1e4
"""A score below all others, for assets that may not be held. It is finite, for steps without any allowed asset."""


def unsupported_portfolio(spec: Spec) -> str | None:
    """Return why a problem is not one of weights over cash and assets with price relatives; None: it is one."""
    if not isinstance(spec.obs, Assets) or not isinstance(spec.action, Weights):
        return f"allocates over assets: observations are {spec.obs}, actions {spec.action}"
    if spec.action.count != spec.obs.count + 1:
        return f"allocates over cash and assets: {spec.action} must be one more than {spec.obs}"
    if spec.facts.get(RELATIVE) != (spec.action.count,):
        return f"learns from what each asset earns, and {spec.obs} come without the fact {RELATIVE!r}"
    return None


def relatives(batch: Batch) -> Tensor:
    """Return price relatives (B, T, A), the value of one unit of money a step later; 1 in padding."""
    return torch.where(batch.valid[..., None], batch.facts[RELATIVE], 1.0)


def tradable(allowed: Tensor | None, like: Tensor) -> Tensor:
    """Return (..., N), True for assets that may be held; `like` has the same shape."""
    return torch.ones_like(like, dtype=torch.bool) if allowed is None else allowed[..., 1:]


def masked(logits: Tensor, allowed: Tensor | None) -> Tensor:
    return logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
