"""Cross-entropy over large vocabularies, with logits of only a few rows in memory at a time.

The plain computation keeps logits, log-probabilities and their gradients for every row: 3 GB each for 60,000 items, 256
episodes and 50 steps. Here the forward pass keeps one number per row, the log of the normaliser, and the backward
pass computes the logits of a few rows again. `F.cross_entropy` on whole logits is the slow twin.

Shapes: R rows (steps of all episodes), D width, A actions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

AT_ONCE = 1 << 22
"""Most logits in memory at a time: 16 MB in float32, which is also fastest on a CPU."""
AT_ONCE_ON_CUDA = 1 << 26
"""Most logits in memory at a time on a GPU: 256 MB, to need few launches."""


def is_large(rows: int, count: int) -> bool:
    """Whether all logits together would exceed the memory limit."""
    return rows * count > AT_ONCE


def linear_cross_entropy(h_RD: Tensor, weight_AD: Tensor, bias_A: Tensor, target_R: Tensor) -> Tensor:
    """Return -log softmax(W h + b)[target] of each row, zero for the target -1; under autocast, in its precision."""
    device = h_RD.device.type
    if torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
        h_RD, weight_AD, bias_A = h_RD.to(kind), weight_AD.to(kind), bias_A.to(kind)
    with torch.autocast(device, enabled=False):
        loss_R: Any = LinearCrossEntropy.apply(h_RD, weight_AD, bias_A, target_R)
    return loss_R


class LinearCrossEntropy(torch.autograd.Function):
    """Forward and backward pass over a few rows at a time, with sums in float32 or better."""

    @staticmethod
    def forward(ctx: Any, h_RD: Tensor, weight_AD: Tensor, bias_A: Tensor, target_R: Tensor) -> Tensor:
        kept = torch.promote_types(h_RD.dtype, torch.float32)
        norm_R, loss_R = (h_RD.new_empty(len(h_RD), dtype=kept) for _ in range(2))
        for rows in _pieces(h_RD, weight_AD):
            logits_RA = F.linear(h_RD[rows], weight_AD, bias_A)
            norm_R[rows] = logits_RA.to(kept).logsumexp(1)
            loss_R[rows] = norm_R[rows] - logits_RA.gather(1, target_R[rows, None].clamp_min(0))[:, 0]
        ctx.save_for_backward(h_RD, weight_AD, bias_A, target_R, norm_R)
        return loss_R.masked_fill_(target_R < 0, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        h_RD, weight_AD, bias_A, target_R, norm_R = ctx.saved_tensors
        grad_R = grads[0].masked_fill(target_R < 0, 0.0)
        to_h_RD = torch.empty_like(h_RD)
        to_weight_AD, to_bias_A = (torch.zeros_like(x, dtype=norm_R.dtype) for x in (weight_AD, bias_A))
        for rows in _pieces(h_RD, weight_AD):
            logits_RA = F.linear(h_RD[rows], weight_AD, bias_A).to(norm_R.dtype)
            pull_RA = logits_RA.sub_(norm_R[rows, None]).exp_().mul_(grad_R[rows, None])  # softmax times the gradient
            pull_RA.scatter_add_(1, target_R[rows, None].clamp_min(0), -grad_R[rows, None])
            to_bias_A += pull_RA.sum(0)
            pull_RA = pull_RA.to(h_RD.dtype)
            to_h_RD[rows] = pull_RA @ weight_AD
            to_weight_AD += pull_RA.T @ h_RD[rows]
        return to_h_RD, to_weight_AD.to(weight_AD.dtype), to_bias_A.to(bias_A.dtype), None


def _pieces(h_RD: Tensor, weight_AD: Tensor) -> list[slice]:
    size = max(1, (AT_ONCE_ON_CUDA if h_RD.is_cuda else AT_ONCE) // len(weight_AD))
    return [slice(begin, begin + size) for begin in range(0, len(h_RD), size)]
