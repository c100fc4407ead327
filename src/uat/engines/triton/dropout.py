"""Dropout by a hash of (seed, offset), forward and backward (Triton)."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from uat.engines.triton.parts import dropped, shares

BLOCK = 1024


def fused_dropout(x: Tensor, seed: Tensor, share: float) -> Tensor:
    return cast(Tensor, FusedDropout.apply(x, seed, share))


class FusedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: Tensor, share: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(seed)
        ctx.share = share
        return _launch(x, seed, share)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _launch(dy, ctx.saved_tensors[0], ctx.share), None, None


def _launch(x: Tensor, seed: Tensor, share: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    grid = (shares(x.numel(), BLOCK),)
    cast(Any, _drop)[grid](x, seed, out, x.numel(), 0, BLOCK=BLOCK, DROP=share)
    return out


@triton.jit(do_not_specialize=["site"])
def _drop(x_ptr, seed_ptr, out_ptr, N, site, BLOCK: tl.constexpr, DROP: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + n, mask=n < N, other=0.0)
    tl.store(out_ptr + n, dropped(x, seed_ptr, n, site, DROP), mask=n < N)
