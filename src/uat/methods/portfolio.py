"""What methods that allocate money share: which problems are theirs, and what weights earn.

Axes: B batch, T time, N assets, A cash and assets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uat.episode import Batch
from uat.spec import Assets, Spec, Weights

RELATIVE = "relative"
"""The fact of a step that says what one unit of money in cash and each asset becomes."""
FAR = 1e4
"""Below any score: what may not be held has no weight, and a step on which nothing may is still finite."""


def refusal(spec: Spec) -> str | None:
    """Why a problem is not one of weights over cash and assets whose price relatives are told; None: it is."""
    if not isinstance(spec.obs, Assets) or not isinstance(spec.action, Weights):
        return f"allocates over assets: observations are {spec.obs}, actions {spec.action}"
    if spec.action.count != spec.obs.count + 1:
        return f"allocates over cash and assets: {spec.action} must be one more than {spec.obs}"
    if spec.facts.get(RELATIVE) != (spec.action.count,):
        return f"learns from what each asset earns, and {spec.obs} come without the fact {RELATIVE!r}"
    return None


def relatives(batch: Batch) -> Tensor:
    """(B, T, A) what one unit of money becomes; 1 in padding."""
    return torch.where(batch.valid[..., None], batch.facts[RELATIVE], 1.0)


def tradable(allowed: Tensor | None, like: Tensor) -> Tensor:
    """(..., N) True for assets that may be held; `like` has as many axes, and N last."""
    return torch.ones_like(like, dtype=torch.bool) if allowed is None else allowed[..., 1:]


def masked(logits: Tensor, allowed: Tensor | None) -> Tensor:
    return logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
