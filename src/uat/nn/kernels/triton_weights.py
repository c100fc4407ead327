"""Gradients of the weights of all Transformer blocks in one launch (Triton).

Each is a sum over all rows, and tiny. None waits for another, and only the optimizer waits for them: launched together
once the way back is through all blocks, they fill the device, where those of one block would not. Rows are shared out;
`added` adds up what the programs found, in a fixed order.

Shapes: N rows, D width, H heads, E head size, F feed-forward, L blocks.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from uat.nn.kernels.triton_outer import outer_tile, tile_of
from uat.nn.kernels.triton_parts import enlarged, read, scaled, shares, times_loaded

SPLITS = 16
"""Programs that share the rows of a tile of a gradient."""


class Factors(NamedTuple):
    """What is multiplied, of all blocks, (L, N, ...): the gradient of what a linear map gave, `enlarged`, and what went
    into it."""

    e2: Tensor
    hidden: Tensor
    dhidden: Tensor
    z1: Tensor
    """What went in, but for the norm's scale and bias; so is z."""
    e1: Tensor
    h: Tensor
    dqkv: Tensor
    z: Tensor


class Norms(NamedTuple):
    """Scales and biases of one block, (D,)."""

    w: Tensor
    b: Tensor
    ff_w: Tensor
    ff_b: Tensor


def weight_gradients(
    factors: Factors, norms: Sequence[Norms], gates: Tensor | None, peak: Tensor, heads: int, precision: str
) -> tuple[Tensor, Tensor]:
    """Shares of the gradients, to be added up, (splits, L, ...): of W_2, W_1 and W_o, each (M, K), with its bias, (M,),
    as `unpacked` takes them; and of W, W^u and U."""
    (layers, rows, d), f, tile = factors.z.shape, factors.hidden.shape[-1], tile_of(precision)
    gated, size = gates is not None, d // heads
    high, wide = max(min(tile.high, d), size if gated else 0), min(tile.wide, d)
    maps = [shares(m, tile.high) * shares(k, tile.wide) for m, k in map_sizes(d, f)]
    splits = min(SPLITS, shares(rows, tile.rows))
    map_parts = torch.empty(splits, layers, sum(m * k + m for m, k in map_sizes(d, f)), device=peak.device)
    total = 6 * d * d + 3 * heads * size * size if gated else 3 * d * d
    project_parts = torch.empty(splits, layers, total, device=peak.device)
    projects = 3 * (d // high) * (d // wide)
    cast(Any, _weights)[(splits, projects + sum(maps), layers)](
        *factors, *zip(*norms, strict=True), factors.z if gates is None else gates, peak, map_parts, project_parts,
        rows,
        D=d, F=f, E=size, H=heads, L=layers, HIGH=tile.high, WIDE=tile.wide, PROJECT_HIGH=high, PROJECT_WIDE=wide,
        PROJECTS=projects, TILES0=maps[0], TILES1=maps[1], ROWS=tile.rows, TURNS=shares(rows, splits * tile.rows),
        UTILITY=gated, PRECISION=precision, num_warps=tile.warps(max(high, tile.high)),
    )  # fmt: skip
    return map_parts, project_parts


def map_sizes(d: int, f: int) -> list[tuple[int, int]]:
    """Of W_2, W_1 and W_o."""
    return [(d, f), (f, d), (d, d)]


@triton.jit
def _weights(
    e2_ptr, hidden_ptr, dhidden_ptr, z1_ptr, e1_ptr, h_ptr, dqkv_ptr, z_ptr, norm_ws, norm_bs, ff_norm_ws, ff_norm_bs,
    gates_ptr, peak_ptr, maps_ptr, projects_ptr, N,
    D: tl.constexpr, F: tl.constexpr, E: tl.constexpr, H: tl.constexpr, L: tl.constexpr, HIGH: tl.constexpr,
    WIDE: tl.constexpr, PROJECT_HIGH: tl.constexpr, PROJECT_WIDE: tl.constexpr, PROJECTS: tl.constexpr,
    TILES0: tl.constexpr, TILES1: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr, UTILITY: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    split, tile, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    before = tl.cast(N, tl.int64) * layer  # rows of the blocks below
    small = 1 / enlarged(peak_ptr, PRECISION)
    at = split * L + layer
    if tile < PROJECTS:  # these take longest, and come first
        total: tl.constexpr = 6 * D * D + 3 * H * E * E if UTILITY else 3 * D * D
        gate_ptr = gates_ptr
        if tile >= PROJECTS // 3:
            gate_ptr += (before + N) * D
        _project(
            dqkv_ptr + before * 3 * D, z_ptr + before * D, _of(norm_ws, layer), _of(norm_bs, layer), gate_ptr,
            projects_ptr + at * total, small, N, split, tile,
            D, E, H, PROJECT_HIGH, PROJECT_WIDE, ROWS, TURNS, UTILITY, PRECISION,
        )  # fmt: skip
    else:
        tile -= PROJECTS
        to = maps_ptr + at * (2 * D * F + D * D + F + 2 * D)
        if tile < TILES0:
            a, b = e2_ptr + before * D, hidden_ptr + before * F
            outer_tile(a, b, to, to, to, small, N, split, D, F, tile, D, F, HIGH, WIDE, ROWS, TURNS, False, PRECISION)
        elif tile < TILES0 + TILES1:
            a, b = dhidden_ptr + before * F, z1_ptr + before * D
            w, bias = _of(ff_norm_ws, layer), _of(ff_norm_bs, layer)
            to += D * F + D
            tile -= TILES0
            outer_tile(a, b, w, bias, to, small, N, split, F, D, tile, F, D, HIGH, WIDE, ROWS, TURNS, True, PRECISION)
        else:
            a, b = e1_ptr + before * D, h_ptr + before * D
            to += 2 * D * F + D + F
            tile -= TILES0 + TILES1
            outer_tile(a, b, to, to, to, small, N, split, D, D, tile, D, D, HIGH, WIDE, ROWS, TURNS, False, PRECISION)


@triton.jit
def _of(entries, layer):
    """The entry of this block."""
    found = entries[0]
    for i in tl.static_range(1, len(entries)):
        found = tl.where(layer == i, entries[i], found)
    return found


@triton.jit
def _project(
    dqkv_ptr, z_ptr, norm_w, norm_b, gate_ptr, to, small, N, split, tile,
    D: tl.constexpr, E: tl.constexpr, H: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    TURNS: tl.constexpr, UTILITY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of the gradients of W, W^u and U of queries, keys or values, over one share of the rows.

    With y = w z + b the sum of dout y is w times that of dout z, and b times that of dout."""
    high: tl.constexpr = D // HIGH
    wide: tl.constexpr = D // WIDE
    part, column = tile // (high * wide), tile % wide
    m, k = (tile // wide) % high * HIGH + tl.arange(0, HIGH), column * WIDE + tl.arange(0, WIDE)
    dw = tl.zeros((HIGH, WIDE), tl.float32)
    dtwin = tl.zeros((HIGH, WIDE), tl.float32)
    du = tl.zeros((HIGH, HIGH), tl.float32)
    ones = tl.full((ROWS, 16), 1.0, z_ptr.dtype.element_ty)
    total = tl.zeros((HIGH, 16), tl.float32)
    gated = tl.zeros((HIGH, 16), tl.float32)
    for turn in tl.range(0, TURNS):
        n = (split * TURNS + turn) * ROWS + tl.arange(0, ROWS)
        live = (n < N)[:, None]
        dout = read(dqkv_ptr + n[:, None] * 3 * D + part * D + m[None, :], live)
        z = read(z_ptr + n[:, None] * D + k[None, :], live)
        dw += times_loaded(tl.trans(dout), z, PRECISION)
        total += times_loaded(tl.trans(dout), ones, PRECISION)
        if UTILITY:
            gate = read(gate_ptr + n[:, None] * D + m[None, :], live)
            passed = tl.trans(scaled(dout, gate, PRECISION))
            dtwin += times_loaded(passed, z, PRECISION)
            gated += times_loaded(passed, ones, PRECISION)
            du += times_loaded(tl.trans(dout), gate, PRECISION)
    w, b = tl.load(norm_w + k)[None, :] * small, tl.load(norm_b + k)[None, :] * small
    cell = m[:, None] * D + k[None, :]
    tl.store(to + part * D * D + cell, dw * w + tl.max(total, 1)[:, None] * b)
    if UTILITY:
        tl.store(to + (3 + part) * D * D + cell, dtwin * w + tl.max(gated, 1)[:, None] * b)
        inside = (m[:, None] // E) * E * E + (m[:, None] % E) * E + m[None, :] % E
        own = ((m[:, None] // E) == (m[None, :] // E)) & (column == 0)
        tl.store(to + 6 * D * D + part * H * E * E + inside, du * small, mask=own)
