"""x W^T + b whose weight gradient is summed in parallel over groups of rows.

A training batch has thousands of rows and a layer few columns: one product of dY^T X has little to spread over a GPU
and takes ten times as long as reading its inputs. Groups of rows make many products at once, and one sum. The slow twin
is `F.linear`, which this is in the forward pass, to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEAST_ROWS = 4096
"""Below this the plain gradient is as fast."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear; on CUDA, for many rows, with the grouped gradient."""
    rows = x.numel() // x.shape[-1]
    if x.device.type != "cuda" or rows < LEAST_ROWS or not torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    return GroupedLinear.apply(x, weight, bias)  # pyright: ignore[reportReturnType]


class Linear(nn.Linear):
    """nn.Linear through `linear`."""

    def forward(self, input: Tensor) -> Tensor:  # torch's own name of the argument
        return linear(input, self.weight, self.bias)


class GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        (dy,), (x, weight) = grads, ctx.saved_tensors
        rows_dy, rows_x = dy.flatten(0, -2), x.flatten(0, -2)
        groups = group_count(len(rows_x))
        parts = torch.bmm(rows_dy.view(groups, -1, dy.shape[-1]).mT, rows_x.view(groups, -1, x.shape[-1]))
        needs_x, _, needs_bias = ctx.needs_input_grad
        return dy @ weight if needs_x else None, parts.sum(0), rows_dy.sum(0) if needs_bias else None


def group_count(rows: int, most: int = 64) -> int:
    """The largest number of equal groups, at most `most`."""
    return next(n for n in range(min(most, rows), 0, -1) if rows % n == 0)
