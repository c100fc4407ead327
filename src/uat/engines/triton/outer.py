"""Gradients of the weights of linear maps: a^T b over very many rows with a tiny result (Triton).

Matrix product libraries are slow at this shape, since few programs process all rows. Here the rows are divided among
many programs, and their sums are added in a fixed order.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from uat.engines.triton.complete_weights import power_of_two
from uat.engines.triton.parts import read, shares, times_loaded

MOST = 3
"""Most sums per launch."""
COLUMNS, MOST_ROWS, AT_ONCE = 32, 256, 4096
"""Fewest columns per program, most rows that a program reads at a time, and numbers that it reads at a time if there
are few rows."""


class Tile(NamedTuple):
    """Part of a product that a program computes: rows that it reads at a time, and a tile of the result."""

    rows: int
    high: int
    wide: int
    thrice: bool
    """Whether each product takes three, for exactness."""

    def warps(self, high: int) -> int:
        """More warps if each product takes three or the tile is high, since registers are limited."""
        return 4 if self.thrice or high > 32 else 2


def tile_of(precision: str) -> Tile:
    """Return the tile size. Small tiles use instructions that read both factors in any layout. Instructions for large
    tiles need tf32 factors contiguous along the axis of the sum, which here runs across rows: transposing took more
    than half of the time. In half precision they support both layouts."""
    return Tile(64, 64, 64, thrice=False) if precision == "half" else Tile(32, 32, 64, thrice=precision == "tf32x3")


def outer(a_NM: Tensor, b_NK: Tensor, *, splits: int, precision: str) -> tuple[Tensor, Tensor]:
    """Return the sums over rows of a ⊗ b, (M, K), and of a, (M,)."""
    (rows, m), k, tile = a_NM.shape, b_NK.shape[1], tile_of(precision)
    splits = min(splits, shares(rows, tile.rows))
    parts = torch.empty(splits, m * k + m, device=a_NM.device)
    cast(Any, _outer)[(splits, shares(m, tile.high) * shares(k, tile.wide))](
        a_NM, b_NK, parts, rows, a_NM.stride(0), b_NK.stride(0),
        M=m, K=k, HIGH=tile.high, WIDE=tile.wide, ROWS=tile.rows, TURNS=shares(rows, splits * tile.rows),
        PRECISION=precision, num_warps=tile.warps(tile.high),
    )  # fmt: skip
    [(product, total)] = unpacked(added(parts)[0], [(m, k)])
    return product, total


def unpacked(summed: Tensor, sizes: Sequence[tuple[int, int]]) -> list[tuple[Tensor, Tensor]]:
    """Split a buffer into products (M, K), each followed by the sum (M,) of its left factor."""
    found, at = [], 0
    for m, k in sizes:
        found.append((summed[at : at + m * k].view(m, k), summed[at + m * k : at + m * k + m]))
        at += m * k + m
    return found


def added(*parts: Tensor) -> list[Tensor]:
    """Sum up to three tensors over their first axis, in one launch and in a fixed order."""
    assert len(parts) <= MOST
    widths = [part.shape[1] for part in parts]
    out = parts[0].new_empty(sum(widths))
    filled = [*parts, *[parts[0]] * (MOST - len(parts))]
    rows = [min(MOST_ROWS, power_of_two(len(part))) for part in filled]
    columns = [max(COLUMNS, AT_ONCE // high) for high in rows]
    blocks = [shares(width, wide) for width, wide in zip(widths, columns, strict=False)] + [0] * (MOST - len(parts))
    sizes = {f"ROWS{i}": high for i, high in enumerate(rows)} | {f"COLUMNS{i}": wide for i, wide in enumerate(columns)}
    cast(Any, _added)[(sum(blocks),)](
        *filled, out, *(len(part) for part in filled), *(part.shape[1] for part in filled),
        **sizes, BLOCKS0=blocks[0], BLOCKS1=blocks[1],
    )  # fmt: skip
    return list(out.split(widths))


@triton.jit
def _added(
    a, b, c, out_ptr, a_rows, b_rows, c_rows, a_wide, b_wide, c_wide,
    ROWS0: tl.constexpr, ROWS1: tl.constexpr, ROWS2: tl.constexpr, COLUMNS0: tl.constexpr, COLUMNS1: tl.constexpr,
    COLUMNS2: tl.constexpr, BLOCKS0: tl.constexpr, BLOCKS1: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if block < BLOCKS0:
        _add(a, out_ptr, block, a_rows, a_wide, ROWS0, COLUMNS0)
    elif block < BLOCKS0 + BLOCKS1:
        _add(b, out_ptr + a_wide, block - BLOCKS0, b_rows, b_wide, ROWS1, COLUMNS1)
    else:
        _add(c, out_ptr + a_wide + b_wide, block - BLOCKS0 - BLOCKS1, c_rows, c_wide, ROWS2, COLUMNS2)


@triton.jit
def _add(parts, out_ptr, block, rows, wide, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum some columns of one of the tensors."""
    column, row = block * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, ROWS)
    there = column < wide
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    start = rows * 0
    while start < rows:
        n = start + row
        at = n[:, None] * wide + column[None, :]
        total += tl.load(parts + at, mask=(n < rows)[:, None] & there[None, :], other=0.0)
        start += ROWS
    tl.store(out_ptr + column, tl.sum(total, 0), mask=there)


@triton.jit
def _outer(
    a_ptr, b_ptr, parts_ptr, N, a_stride, b_stride,
    M: tl.constexpr, K: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    split, tile = tl.program_id(0), tl.program_id(1)
    to = parts_ptr + split * (M * K + M)
    outer_tile(
        a_ptr, b_ptr, to, 1.0, N, split, a_stride, b_stride, tile, M, K, HIGH, WIDE, ROWS, TURNS, PRECISION
    )  # fmt: skip


@triton.jit
def outer_tile(
    a_ptr, b_ptr, to, small, N, split, a_stride, b_stride, tile,
    M: tl.constexpr, K: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    TURNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one tile of a^T b, and of the sum of a, over one share of the rows, multiplied by `small`."""
    wide: tl.constexpr = (K + WIDE - 1) // WIDE
    m, k = tile // wide * HIGH + tl.arange(0, HIGH), tile % wide * WIDE + tl.arange(0, WIDE)
    product = tl.zeros((HIGH, WIDE), tl.float32)
    ones = tl.full((ROWS, 16), 1.0, b_ptr.dtype.element_ty)  # the sum of a is a product, too, and tensor cores are idle
    total = tl.zeros((HIGH, 16), tl.float32)
    for turn in tl.range(0, TURNS):
        n = (split * TURNS + turn) * ROWS + tl.arange(0, ROWS)
        a = read(a_ptr + n[:, None] * a_stride + m[None, :], (n < N)[:, None] & (m < M)[None, :])
        b = read(b_ptr + n[:, None] * b_stride + k[None, :], (n < N)[:, None] & (k < K)[None, :])
        product += times_loaded(tl.trans(a), b, PRECISION)
        total += times_loaded(tl.trans(a), ones, PRECISION)
    tl.store(to + m[:, None] * K + k[None, :], product * small, mask=(m < M)[:, None] & (k < K)[None, :])
    if tile % wide == 0:
        tl.store(to + M * K + m, tl.max(total, 1) * small, mask=m < M)  # all columns are alike
