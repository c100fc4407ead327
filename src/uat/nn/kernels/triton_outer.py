"""Gradients of weights: a^T b over very many rows, where the result is tiny (Triton).

Libraries of matrix products are slow at this shape: few programs walk through all rows. Here the rows are shared out,
and the shares are added up in a fixed order.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from uat.nn.kernels.triton_parts import enlarged, read, shares, times_loaded
from uat.nn.kernels.whole import power_of_two

MOST = 3
"""Products, or sums, of one launch."""
COLUMNS, MOST_ROWS = 32, 256
"""Columns that a program adds up, and how many rows of them at a time."""


class Tile(NamedTuple):
    """How much of a product a program works out: rows that it reads at a time, and a tile of the result."""

    rows: int
    high: int
    wide: int
    thrice: bool
    """Whether a product is three, for exactness."""

    def warps(self, high: int) -> int:
        """More where a product is three, or its tile is high: else there are too few registers."""
        return 4 if self.thrice or high > 32 else 2


def tile_of(precision: str) -> Tile:
    """Low tiles, of few warps, are multiplied by instructions that read both sides in any order. Those for large ones
    want tf32 along what is summed over, which here is across the rows: turning it cost more than half of the time. In
    half precision they take either."""
    return Tile(64, 64, 64, thrice=False) if precision == "half" else Tile(32, 32, 64, thrice=precision == "tf32x3")


def shapes(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[int, int]]:
    """Of the products."""
    return [(a.shape[1], b.shape[1]) for a, b in pairs]


def outers(
    pairs: Sequence[tuple[Tensor, Tensor]], parts: Tensor, *, precision: str, peak: Tensor | None = None
) -> None:
    """For each pair a (N, M), b (N, K): the sums over rows of a ⊗ b, (M, K), and of a, (M,), to be added up and
    `unpacked`: one row of `parts` for each share of the rows. With a peak a is `enlarged`."""
    assert len(pairs) <= MOST
    rows, sizes, tile = pairs[0][0].shape[0], shapes(pairs), tile_of(precision)
    tiles = [shares(m, tile.high) * shares(k, tile.wide) for m, k in sizes]
    filled = [*pairs, *[pairs[0]] * (MOST - len(pairs))]
    places = {f"M{i}": m for i, (m, _) in enumerate(sizes)} | {f"K{i}": k for i, (_, k) in enumerate(sizes)}
    places |= {f"{name}{i}": 1 for name in "MK" for i in range(len(pairs), MOST)}
    cast(Any, _outers)[(len(parts), sum(tiles))](
        *(x for pair in filled for x in pair), parts, parts if peak is None else peak, rows,
        *(x.stride(0) for pair in filled for x in pair),
        **places, TILES0=tiles[0], TILES1=tiles[1] if len(tiles) > 1 else 0, TOTAL=parts.stride(0),
        HIGH=tile.high, WIDE=tile.wide, ROWS=tile.rows, TURNS=shares(rows, len(parts) * tile.rows),
        PRECISION=precision, ENLARGED=peak is not None, num_warps=tile.warps(tile.high),
    )  # fmt: skip


def outers_alone(pairs: Sequence[tuple[Tensor, Tensor]], *, splits: int, precision: str) -> list[tuple[Tensor, Tensor]]:
    """The sums of `outers` themselves."""
    rows, sizes = pairs[0][0].shape[0], shapes(pairs)
    splits = min(splits, shares(rows, tile_of(precision).rows))
    parts = torch.empty(splits, sum(m * k + m for m, k in sizes), device=pairs[0][0].device)
    outers(pairs, parts, precision=precision)
    return unpacked(added(parts)[0], sizes)


def unpacked(summed: Tensor, sizes: Sequence[tuple[int, int]]) -> list[tuple[Tensor, Tensor]]:
    """The sums of `outers`, once they are added up: (M, K) and (M,) of each pair."""
    found, at = [], 0
    for m, k in sizes:
        found.append((summed[at : at + m * k].view(m, k), summed[at + m * k : at + m * k + m]))
        at += m * k + m
    return found


def added(*parts: Tensor) -> list[Tensor]:
    """The sum over the first axis of each of up to three tensors, in one launch and a fixed order."""
    assert len(parts) <= MOST
    widths = [part.shape[1] for part in parts]
    out = parts[0].new_empty(sum(widths))
    filled = [*parts, *[parts[0]] * (MOST - len(parts))]
    blocks = [shares(width, COLUMNS) for width in widths] + [0] * (MOST - len(parts))
    rows = {f"ROWS{i}": min(MOST_ROWS, power_of_two(len(part))) for i, part in enumerate(filled)}
    cast(Any, _added)[(sum(blocks),)](
        *filled, out, *(len(part) for part in filled), *(part.shape[1] for part in filled),
        **rows, BLOCKS0=blocks[0], BLOCKS1=blocks[1], COLUMNS=COLUMNS,
    )  # fmt: skip
    return list(out.split(widths))


@triton.jit
def _added(
    a, b, c, out_ptr, a_rows, b_rows, c_rows, a_wide, b_wide, c_wide,
    ROWS0: tl.constexpr, ROWS1: tl.constexpr, ROWS2: tl.constexpr, BLOCKS0: tl.constexpr, BLOCKS1: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if block < BLOCKS0:
        _add(a, out_ptr, block, a_rows, a_wide, ROWS0, COLUMNS)
    elif block < BLOCKS0 + BLOCKS1:
        _add(b, out_ptr + a_wide, block - BLOCKS0, b_rows, b_wide, ROWS1, COLUMNS)
    else:
        _add(c, out_ptr + a_wide + b_wide, block - BLOCKS0 - BLOCKS1, c_rows, c_wide, ROWS2, COLUMNS)


@triton.jit
def _add(parts, out_ptr, block, rows, wide, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Some columns of one of them."""
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
def _outers(
    a0, b0, a1, b1, a2, b2, parts_ptr, peak_ptr, N, a0_stride, b0_stride, a1_stride, b1_stride, a2_stride, b2_stride,
    M0: tl.constexpr, K0: tl.constexpr, M1: tl.constexpr, K1: tl.constexpr, M2: tl.constexpr, K2: tl.constexpr,
    TILES0: tl.constexpr, TILES1: tl.constexpr, TOTAL: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, TURNS: tl.constexpr, PRECISION: tl.constexpr, ENLARGED: tl.constexpr,
):  # fmt: skip
    split, tile = tl.program_id(0), tl.program_id(1)
    to = parts_ptr + split * TOTAL
    small = 1.0
    if ENLARGED:
        small = 1 / enlarged(peak_ptr, PRECISION)
    if tile < TILES0:
        _outer(a0, b0, to, small, N, split, a0_stride, b0_stride, tile, M0, K0, HIGH, WIDE, ROWS, TURNS, PRECISION)
    elif tile < TILES0 + TILES1:
        to += M0 * K0 + M0
        tile -= TILES0
        _outer(a1, b1, to, small, N, split, a1_stride, b1_stride, tile, M1, K1, HIGH, WIDE, ROWS, TURNS, PRECISION)
    else:
        to += M0 * K0 + M0 + M1 * K1 + M1
        tile -= TILES0 + TILES1
        _outer(a2, b2, to, small, N, split, a2_stride, b2_stride, tile, M2, K2, HIGH, WIDE, ROWS, TURNS, PRECISION)


@triton.jit
def _outer(
    a_ptr, b_ptr, to, small, N, split, a_stride, b_stride, tile,
    M: tl.constexpr, K: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    TURNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of a^T b over one share of the rows, and of the sum of a."""
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
        tl.store(to + M * K + m, tl.max(total, 1) * small, mask=m < M)
