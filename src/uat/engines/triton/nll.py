"""Negative log-likelihood of target actions, summed over real steps, and its gradient (Triton).

The slow twin is `masked_sum` of `DiscreteHead.nll`; tests check that sums and gradients are equal. Logits, softmax,
mask and sum are one kernel; the backward pass is another, which recomputes the logits.

Shapes: N rows, D width, A actions.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from uat.engines.triton.complete_weights import room
from uat.engines.triton.outer import added, unpacked
from uat.engines.triton.parts import exp, read, shares, times_loaded, write
from uat.engines.triton.step import WIDEST, products
from uat.nn.heads import DiscreteHead, Head

ROWS = 64
"""Rows per program."""
COUNTED = 1 << 24
"""Largest number of rows that float32 represents exactly."""


def fits(head: Head, h_BTD: Tensor) -> bool:
    """Whether the head has few actions, and the kernels support all dtypes and shapes."""
    d, rows, weight = h_BTD.shape[-1], h_BTD[..., 0].numel(), head.linear.weight
    small = len(weight) <= WIDEST and room(d) == d <= WIDEST and 0 < rows <= COUNTED
    small = small and shares(rows, ROWS) * (weight.numel() + len(weight)) < 1 << 31  # offsets fit 32 bits
    return isinstance(head, DiscreteHead) and small and h_BTD.dtype == weight.dtype == torch.float32


def fused_nll(head: Head, h_BTD: Tensor, target_BT: Tensor, valid_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of -log π(target) over real steps, and their number."""
    h_ND, target_N, valid_N = h_BTD.flatten(0, -2).contiguous(), target_BT.flatten(), valid_BT.flatten()
    found = FusedNll.apply(h_ND, head.linear.weight, head.bias_A, target_N.contiguous(), valid_N.contiguous())
    return cast("tuple[Tensor, Tensor]", found)


class FusedNll(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, h: Tensor, weight: Tensor, bias: Tensor, target: Tensor, valid: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(h, weight, bias, target, valid)
        ctx.precision = products()
        parts = torch.empty(shares(len(h), ROWS), 2, device=h.device)
        cast(Any, _nll)[(len(parts),)](h, weight, bias, target, valid, parts, len(h), **_sizes(weight, ctx.precision))
        total, count = added(parts)[0].unbind()
        ctx.mark_non_differentiable(count)
        return total, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor, dcount: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        h, weight, bias, target, valid = ctx.saved_tensors
        dh, parts = torch.empty_like(h), torch.empty(shares(len(h), ROWS), weight.numel() + len(bias), device=h.device)
        cast(Any, _nll_backward)[(len(parts),)](
            h, weight, bias, target, valid, dtotal, dh, parts, len(h), **_sizes(weight, ctx.precision)
        )
        [(dweight, dbias)] = unpacked(added(parts)[0], [(weight.shape[0], weight.shape[1])])
        return dh, dweight, dbias, None, None


def _sizes(weight_AD: Tensor, precision: str) -> dict[str, Any]:
    actions, d = weight_AD.shape
    return {"A": actions, "A_ROOM": room(actions), "D": d, "ROWS": ROWS, "PRECISION": precision}


@triton.jit
def _log_softmax(
    h_ptr, w_ptr, b_ptr, target_ptr, valid_ptr, N,
    A: tl.constexpr, A_ROOM: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return h, W, log π, the mask of targets and the mask of counted rows of this program. A target of -1 is not
    counted, and any other invalid target makes the sum NaN."""
    n, d, a = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, A_ROOM)
    inside, target = a < A, read(target_ptr + n, n < N)
    live = read(valid_ptr + n, n < N) != 0
    counts = live & (target != -1)
    h = read(h_ptr + n[:, None] * D + d[None, :], counts[:, None])  # other rows may hold anything
    w_AD = tl.load(w_ptr + a[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
    logits = times_loaded(h, tl.trans(w_AD), PRECISION) + tl.load(b_ptr + a, mask=inside, other=0.0)[None, :]
    logits = tl.where(inside[None, :], logits, -float("inf"))
    logits -= tl.max(logits, 1)[:, None]
    logits -= tl.log(tl.sum(exp(logits), 1))[:, None]
    logits = tl.where(((target < -1) | (target >= A))[:, None], float("nan"), logits)
    return h, w_AD, logits, target[:, None] == a[None, :], counts, live


@triton.jit
def _nll(
    h_ptr, w_ptr, b_ptr, target_ptr, valid_ptr, parts_ptr, N,
    A: tl.constexpr, A_ROOM: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    _, _, logits, chosen, counts, live = _log_softmax(
        h_ptr, w_ptr, b_ptr, target_ptr, valid_ptr, N, A, A_ROOM, D, ROWS, PRECISION
    )
    loss = -tl.sum(tl.where(chosen | (logits != logits), logits, 0.0), 1)
    tl.store(parts_ptr + 2 * tl.program_id(0), tl.sum(tl.where(counts, loss, 0.0), 0))
    tl.store(parts_ptr + 2 * tl.program_id(0) + 1, tl.sum(live.to(tl.float32), 0))


@triton.jit
def _nll_backward(
    h_ptr, w_ptr, b_ptr, target_ptr, valid_ptr, dtotal_ptr, dh_ptr, parts_ptr, N,
    A: tl.constexpr, A_ROOM: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    h, w_AD, logits, chosen, counts, _ = _log_softmax(
        h_ptr, w_ptr, b_ptr, target_ptr, valid_ptr, N, A, A_ROOM, D, ROWS, PRECISION
    )
    n, d, a = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, A_ROOM)
    dlogits = tl.where(counts[:, None], exp(logits) - chosen.to(tl.float32), 0.0) * tl.load(dtotal_ptr)
    write(dh_ptr + n[:, None] * D + d[None, :], times_loaded(dlogits, w_AD, PRECISION), (n < N)[:, None])
    to = parts_ptr + tl.program_id(0) * (A * D + A)
    inside = a < A
    dw_AD = times_loaded(tl.trans(dlogits), h, PRECISION)
    tl.store(to + a[:, None] * D + d[None, :], dw_AD, mask=inside[:, None])
    tl.store(to + A * D + a, tl.sum(dlogits, 0), mask=inside)
