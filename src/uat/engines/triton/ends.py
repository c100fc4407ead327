"""Norms and linear maps before the first block and after the last, with gradients of their weights (Triton)."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from uat.engines.triton.outer import added, outer
from uat.engines.triton.parts import norm_backward, norm_rows, read, shares, standardised, write
from uat.engines.triton.step import products

ROWS = 32
SPLITS = 64


def fused_norm(norm: nn.LayerNorm, x_ND: Tensor, peak: Tensor | None = None) -> Tensor:
    """Return the LayerNorm of x. The backward pass writes the largest gradient to `peak`."""
    return cast(Tensor, FusedNorm.apply(x_ND, norm.weight, norm.bias, peak))


def fused_linear(linear: nn.Linear, x_NI: Tensor) -> Tensor:
    return cast(Tensor, FusedLinear.apply(x_NI, linear.weight, linear.bias))


class FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, peak: Tensor | None
    ) -> Tensor:
        y, (rows, d) = torch.empty_like(x), x.shape
        cast(Any, _norm)[(shares(rows, ROWS),)](x, weight, bias, y, rows, D=d, ROWS=ROWS)
        ctx.save_for_backward(x, weight)
        ctx.peak = peak
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        dx, (rows, d) = torch.empty_like(x), x.shape
        parts = torch.empty(shares(rows, ROWS), 2 * d, device=x.device)
        to_peak = parts if ctx.peak is None else ctx.peak.zero_()
        cast(Any, _norm_backward)[(len(parts),)](
            x, weight, dy.contiguous(), dx, parts, to_peak, rows, D=d, ROWS=ROWS, PEAK=ctx.peak is not None
        )
        dweight, dbias = added(parts)[0].chunk(2)
        return dx, dweight, dbias, None


class FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x, weight)
        ctx.precision = products()
        return F.linear(x, weight, bias).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        dy = dy.contiguous()
        dweight, dbias = outer(dy, x, splits=SPLITS, precision=ctx.precision)
        return dy @ weight if ctx.needs_input_grad[0] else None, dweight, dbias


@triton.jit
def _norm(x_ptr, w_ptr, b_ptr, y_ptr, N, D: tl.constexpr, ROWS: tl.constexpr):
    n, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    here, live = n[:, None] * D + d[None, :], (n < N)[:, None]
    write(y_ptr + here, norm_rows(read(x_ptr + here, live), w_ptr, b_ptr, d, D), live)


@triton.jit
def _norm_backward(
    x_ptr, w_ptr, dy_ptr, dx_ptr, parts_ptr, peak_ptr, N, D: tl.constexpr, ROWS: tl.constexpr, PEAK: tl.constexpr
):  # fmt: skip
    n, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    here, live = n[:, None] * D + d[None, :], (n < N)[:, None]
    z, scale = standardised(read(x_ptr + here, live), D)
    dy = read(dy_ptr + here, live)
    dx = norm_backward(dy, z, scale, tl.load(w_ptr + d), parts_ptr + tl.program_id(0) * 2 * D, d, D)
    write(dx_ptr + here, dx, live)
    if PEAK:
        peak = tl.max(tl.max(tl.where(tl.abs(dx) < float("inf"), tl.abs(dx), float("inf")), 1), 0)
        tl.atomic_max(peak_ptr, peak)
