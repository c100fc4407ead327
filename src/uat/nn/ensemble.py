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
        learns = x_MNI.is_cuda and torch.is_grad_enabled()
        pieces = math.gcd(x_MNI.shape[1], PIECES) if learns else 1
        return in_pieces(x_MNI, self.weight_MID, self.bias_M1D, pieces)


PIECES = 32
"""Shares of the rows, at most, over which a GPU sums the gradients of weights apart."""


def in_pieces(x_MNI: Tensor, weight_MID: Tensor, bias_M1D: Tensor, pieces: int) -> Tensor:
    """x W + b with the rows shared out: the gradient of W, a sum over many rows with a small result, is then a sum of
    as many small ones, which libraries of matrix products do not think of by themselves."""
    (members, rows, width), d_out = x_MNI.shape, weight_MID.shape[2]
    weight = weight_MID[:, None].expand(-1, pieces, -1, -1).reshape(members * pieces, width, d_out)
    bias = bias_M1D[:, None].expand(-1, pieces, -1, -1).reshape(members * pieces, 1, d_out)
    return torch.baddbmm(bias, x_MNI.reshape(members * pieces, -1, width), weight).view(members, rows, d_out)


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
        count = valid_N.sum().clamp_min(1)

        def mean(x: Tensor) -> Tensor:
            return torch.where(valid_N[:, None], x, 0.0).sum(0) / count

        self.batches.add_(1)
        rate = (1 / self.batches).clamp_min(0.01)
        self.mean_D.lerp_(mean(x_ND), rate)
        distance_D = mean((x_ND - self.mean_D).abs()) * math.sqrt(math.pi / 2)
        self.spread_D.lerp_(distance_D.clamp_min(1e-6), rate)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean_D) / self.spread_D

    def back(self, x: Tensor) -> Tensor:
        return self.mean_D + x * self.spread_D


def laplace_nll(median_MND: Tensor, found_ND: Tensor, valid_N: Tensor, least: float = 1e-6) -> Tensor:
    """-log of the Laplace density up to a constant, averaged over members and outputs: (N,). Its scale is that of the
    batch, as in `gaussian_nll`; numbers far from all others pull no more than any other."""
    distance_ND = (found_ND - median_MND).abs().mean(0)
    with torch.no_grad():
        total_D = torch.where(valid_N[:, None], distance_ND, 0.0).sum(0)
        scale_D = (total_D / valid_N.sum().clamp_min(1)).clamp_min(least)
    return (distance_ND / scale_D + scale_D.log()).mean(-1)


def gaussian_nll(mean_MND: Tensor, found_ND: Tensor, valid_N: Tensor, least: float = 1e-6) -> Tensor:
    """-log N(found; mean, variance) up to a constant, averaged over members and outputs: (N,).

    Each output has one variance, the one under which these rows are likeliest: outputs of any scale weigh alike.
    """
    square_ND = (found_ND - mean_MND).square().mean(0)
    with torch.no_grad():
        total_D = torch.where(valid_N[:, None], square_ND, 0.0).sum(0)
        variance_D = (total_D / valid_N.sum().clamp_min(1)).clamp_min(least)
    return 0.5 * (square_ND / variance_D + variance_D.log()).mean(-1)
