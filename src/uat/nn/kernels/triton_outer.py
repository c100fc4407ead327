"""Gradients of weights: a^T b over very many rows, where the result is tiny (Triton).

Libraries of matrix products are slow at this shape: few programs walk through all rows. Here the rows are shared out,
and the shares are added up in a fixed order.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from uat.nn.kernels.triton_parts import shares, times_loaded

ROWS, TILE = 32, 64
MOST = 3
"""Products of one launch."""


def outers(pairs: Sequence[tuple[Tensor, Tensor]], *, splits: int, precision: str) -> list[tuple[Tensor, Tensor]]:
    """For each pair a (N, M), b (N, K): the sums over rows of a ⊗ b, (M, K), and of a, (M,)."""
    assert len(pairs) <= MOST
    rows, device = pairs[0][0].shape[0], pairs[0][0].device
    splits = min(splits, shares(rows, ROWS))
    sizes = [(a.shape[1], b.shape[1]) for a, b in pairs]
    tiles = [shares(m, TILE) * shares(k, TILE) for m, k in sizes]
    total = sum(m * k + m for m, k in sizes)
    parts = torch.empty(splits, total, device=device)
    filled = [*pairs, *[pairs[0]] * (MOST - len(pairs))]
    places = {f"M{i}": m for i, (m, _) in enumerate(sizes)} | {f"K{i}": k for i, (_, k) in enumerate(sizes)}
    places |= {f"{name}{i}": 1 for name in "MK" for i in range(len(pairs), MOST)}
    cast(Any, _outers)[(splits, sum(tiles))](
        *(x for pair in filled for x in pair), parts, rows, *(x.stride(0) for pair in filled for x in pair),
        **places, TILES0=tiles[0], TILES1=tiles[1] if len(tiles) > 1 else 0, TOTAL=total, TILE=TILE, ROWS=ROWS,
        TURNS=shares(rows, splits * ROWS), PRECISION=precision,
    )  # fmt: skip
    summed, found, at = parts.sum(0), [], 0
    for m, k in sizes:
        found.append((summed[at : at + m * k].view(m, k), summed[at + m * k : at + m * k + m]))
        at += m * k + m
    return found


@triton.jit
def _outers(
    a0, b0, a1, b1, a2, b2, parts_ptr, N, a0_stride, b0_stride, a1_stride, b1_stride, a2_stride, b2_stride,
    M0: tl.constexpr, K0: tl.constexpr, M1: tl.constexpr, K1: tl.constexpr, M2: tl.constexpr, K2: tl.constexpr,
    TILES0: tl.constexpr, TILES1: tl.constexpr, TOTAL: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    TURNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    split, tile = tl.program_id(0), tl.program_id(1)
    to = parts_ptr + split * TOTAL
    if tile < TILES0:
        _outer(a0, b0, to, N, split, a0_stride, b0_stride, tile, M0, K0, TILE, ROWS, TURNS, PRECISION)
    elif tile < TILES0 + TILES1:
        to += M0 * K0 + M0
        _outer(a1, b1, to, N, split, a1_stride, b1_stride, tile - TILES0, M1, K1, TILE, ROWS, TURNS, PRECISION)
    else:
        to += M0 * K0 + M0 + M1 * K1 + M1
        tile -= TILES0 + TILES1
        _outer(a2, b2, to, N, split, a2_stride, b2_stride, tile, M2, K2, TILE, ROWS, TURNS, PRECISION)


@triton.jit
def _outer(
    a_ptr, b_ptr, to, N, split, a_stride, b_stride, tile,
    M: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of a^T b over one share of the rows, and of the sum of a."""
    wide: tl.constexpr = (K + TILE - 1) // TILE
    m, k = tile // wide * TILE + tl.arange(0, TILE), tile % wide * TILE + tl.arange(0, TILE)
    product = tl.zeros((TILE, TILE), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    for turn in tl.range(0, TURNS):
        n = (split * TURNS + turn) * ROWS + tl.arange(0, ROWS)
        a = tl.load(a_ptr + n[None, :] * a_stride + m[:, None], mask=(n < N)[None, :] & (m < M)[:, None], other=0.0)
        b = tl.load(b_ptr + n[:, None] * b_stride + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
        product += times_loaded(a, b, PRECISION)
        total += tl.sum(a, 1)
    tl.store(to + m[:, None] * K + k[None, :], product, mask=(m < M)[:, None] & (k < K)[None, :])
    if tile % wide == 0:
        tl.store(to + M * K + m, total, mask=m < M)
