"""Dropout whose draw an engine may replace."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

import torch.nn.functional as F
from torch import Tensor, nn


class Dropout(nn.Module):
    """One place in a network that drops: torch's own dropout, unless an engine draws another way.

    Torch's generator is one for all trainings on a device. Where several run at once, an engine draws from a seed of
    each place instead.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        return x if not self.training or self.share == 0 else dropped_by.get()(self, x)


def dropped_by_torch(place: Dropout, x: Tensor) -> Tensor:
    return F.dropout(x, place.share)


dropped_by: ContextVar[Callable[[Dropout, Tensor], Tensor]] = ContextVar("dropped_by", default=dropped_by_torch)
"""What drops in training. An engine sets a kernel for as long as the engine runs."""
