"""Dropout whose random numbers an engine may replace."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

import torch.nn.functional as F
from torch import Tensor, nn


class Dropout(nn.Module):
    """Torch's own dropout, unless an engine replaces it.

    All trainings on a device share one generator of torch. An engine that runs several trainings at once replaces it by
    a seed for each dropout layer.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        return x if not self.training or self.share == 0 else dropped_by.get()(self, x)


def dropped_by_torch(place: Dropout, x: Tensor) -> Tensor:
    return F.dropout(x, place.share)


dropped_by: ContextVar[Callable[[Dropout, Tensor], Tensor]] = ContextVar("dropped_by", default=dropped_by_torch)
"""Function that applies dropout in training. An engine replaces it by a kernel while the engine runs."""
