"""Several networks of one shape side by side, and what they are asked in: one product per layer serves all members.

Shapes: M members, N rows, I inputs, D width.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class EnsembleLinear(nn.Module):
    """W_m x + b_m of each member m, every one with its own first weights, drawn as torch's own layers draw them."""

    def __init__(self, members: int, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight_MID = nn.Parameter(torch.empty(members, d_in, d_out))
        self.bias_M1D = nn.Parameter(torch.empty(members, 1, d_out))
        for parameter in (self.weight_MID, self.bias_M1D):
            nn.init.uniform_(parameter, -(d_in**-0.5), d_in**-0.5)

    def forward(self, x_MNI: Tensor) -> Tensor:
        return torch.baddbmm(self.bias_M1D, x_MNI, self.weight_MID)


class Ensemble(nn.Module):
    """Networks with SiLU between their layers."""

    def __init__(self, members: int, d_in: int, d_hidden: int, num_hidden: int, d_out: int) -> None:
        super().__init__()
        widths = [d_in, *[d_hidden] * num_hidden, d_out]
        self.members = members
        self.layers = nn.ModuleList(EnsembleLinear(members, a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x_NI: Tensor) -> Tensor:
        """(M, N, D) from rows that all members share, or that are (M, N, I) their own."""
        x_MNI = x_NI.expand(self.members, *x_NI.shape) if x_NI.dim() == 2 else x_NI
        for layer in self.layers[:-1]:
            x_MNI = F.silu(layer(x_MNI))
        return self.layers[-1](x_MNI)


class Units(nn.Module):
    """What each number usually is, and how far it usually lies from that, over all batches seen in training.

    Far is the mean distance, which a rare large number hardly moves; of Gaussian numbers it is their deviation.
    """

    def __init__(self, d: int) -> None:
        super().__init__()
        for name, tensor in (("mean_D", torch.zeros(d)), ("spread_D", torch.ones(d)), ("batches", torch.zeros(()))):
            self.register_buffer(name, tensor)

    mean_D: Tensor
    spread_D: Tensor
    batches: Tensor

    @torch.no_grad()
    def see(self, x_ND: Tensor, valid_N: Tensor) -> None:
        """One more batch; the last hundred count most."""
        self.batches.add_(1)
        rate = (1 / self.batches).clamp_min(0.01)
        self.mean_D.lerp_(_mean(x_ND, valid_N), rate)
        distance_D = _mean((x_ND - self.mean_D).abs(), valid_N) * math.sqrt(math.pi / 2)
        self.spread_D.lerp_(distance_D.clamp_min(LEAST), rate)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean_D) / self.spread_D

    def back(self, x: Tensor) -> Tensor:
        return self.mean_D + x * self.spread_D


LEAST = 1e-6
"""No scale or variance is smaller."""


def gaussian_nll(mean_MND: Tensor, found_ND: Tensor, valid_N: Tensor) -> Tensor:
    """-log N(found; mean, variance) up to a constant, averaged over members and outputs: (N,).

    Each output has one variance, the one under which these rows are likeliest: outputs of any scale weigh alike.
    """
    return 0.5 * _likeliest((found_ND - mean_MND).square().mean(0), valid_N)


def laplace_nll(median_MND: Tensor, found_ND: Tensor, valid_N: Tensor) -> Tensor:
    """The same of the Laplace density: numbers far from all others pull no more than any other."""
    return _likeliest((found_ND - median_MND).abs().mean(0), valid_N)


def _likeliest(error_ND: Tensor, valid_N: Tensor) -> Tensor:
    """(N,) error / scale + log scale, the scale being the mean error of the valid rows; no gradient goes through it."""
    scale_D = _mean(error_ND.detach(), valid_N).clamp_min(LEAST)
    return (error_ND / scale_D + scale_D.log()).mean(-1)


def _mean(x_ND: Tensor, valid_N: Tensor) -> Tensor:
    return torch.where(valid_N[:, None], x_ND, 0.0).sum(0) / valid_N.sum().clamp_min(1)
