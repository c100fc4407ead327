"""Ensembles of equally shaped networks with one batched product per layer, normalisation units, and likelihoods.

Shapes: M members, N rows, I inputs, D width.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class EnsembleLinear(nn.Module):
    """W_m x + b_m for each member m. Every member has its own initial weights, drawn as in torch's own layers."""

    def __init__(self, members: int, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight_MID = nn.Parameter(torch.empty(members, d_in, d_out))
        self.bias_M1D = nn.Parameter(torch.empty(members, 1, d_out))
        for parameter in (self.weight_MID, self.bias_M1D):
            nn.init.uniform_(parameter, -(d_in**-0.5), d_in**-0.5)

    def forward(self, x_MNI: Tensor) -> Tensor:
        return torch.baddbmm(self.bias_M1D, x_MNI, self.weight_MID)


class Ensemble(nn.Module):
    """Multilayer networks with SiLU between layers."""

    def __init__(self, members: int, d_in: int, d_hidden: int, num_hidden: int, d_out: int) -> None:
        super().__init__()
        widths = [d_in, *[d_hidden] * num_hidden, d_out]
        self.members = members
        self.layers = nn.ModuleList(EnsembleLinear(members, a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x_NI: Tensor) -> Tensor:
        """Return (M, N, D) for rows (N, I) that all members share, or for separate rows (M, N, I)."""
        x_MNI = x_NI.expand(self.members, *x_NI.shape) if x_NI.dim() == 2 else x_NI
        for layer in self.layers[:-1]:
            x_MNI = F.silu(layer(x_MNI))
        return self.layers[-1](x_MNI)


class Units(nn.Module):
    """Running mean and spread of each number over the training batches, for standardising.

    The spread is the mean absolute distance from the mean, which rare outliers hardly affect, scaled so that it equals
    the standard deviation for Gaussian numbers.
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
        """Update the statistics with a batch; the last hundred batches have most weight."""
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
"""Lower bound of scales and variances."""


def gaussian_nll(mean_MND: Tensor, actual_ND: Tensor, valid_N: Tensor) -> Tensor:
    """Return -log N(actual; mean, variance) up to a constant, averaged over members and outputs: (N,).

    Each output has the one variance that maximises the likelihood of these rows, so that the scale of an output does
    not change its weight in the loss.
    """
    return 0.5 * _likeliest((actual_ND - mean_MND).square().mean(0), valid_N)


def laplace_nll(median_MND: Tensor, actual_ND: Tensor, valid_N: Tensor) -> Tensor:
    """Return the negative log-likelihood of a Laplace density instead, in which outliers pull no harder than others."""
    return _likeliest((actual_ND - median_MND).abs().mean(0), valid_N)


def _likeliest(error_ND: Tensor, valid_N: Tensor) -> Tensor:
    """(N,) error / scale + log scale, where the scale is the mean error of the valid rows, without a gradient."""
    scale_D = _mean(error_ND.detach(), valid_N).clamp_min(LEAST)
    return (error_ND / scale_D + scale_D.log()).mean(-1)


def _mean(x_ND: Tensor, valid_N: Tensor) -> Tensor:
    return torch.where(valid_N[:, None], x_ND, 0.0).sum(0) / valid_N.sum().clamp_min(1)
