"""Dropout that leaves torch's generator on a GPU alone: what is dropped is a hash of (seed, place).

So several trainings can run side by side on one device (`uat.training.together`). On a CPU, and in double precision, it
is torch's own dropout.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uat.engines import kernels


class Dropout(nn.Module):
    """One place in a network that drops; each has a seed of its own (`Policy.reseed`)."""

    dropout_seed: Tensor

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.register_buffer("dropout_seed", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.share == 0:
            return x
        if kernels.can_drop(x):
            return kernels.fused_dropout(x, self.dropout_seed, self.share)
        return F.dropout(x, self.share)
