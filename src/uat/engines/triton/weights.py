"""Gradients of the weights of all Transformer blocks in one launch (Triton).

Each gradient is a tiny sum over all rows. They do not depend on each other, and only the optimizer needs them: launched
together after the backward pass of all blocks, they fill the device, which those of one block would not. Rows are
divided among programs; `added` sums the results in a fixed order.

Gradients of norms follow from the same sums. A map W reads y = w z + b, and dout is the gradient of its output. With S
the sum of dout z^T over rows, and s the sum of dout, the gradient of W is S w + s b^T; that of w is the sum over
outputs of W S, entry by entry; and that of b is W^T s. So no other backward kernel sums over rows.

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

from uat.engines.triton.outer import outer_tile, tile_of
from uat.engines.triton.parts import enlarged, read, scaled, shares, times_loaded

SPLITS = 11
"""Programs that share the rows of a tile of a gradient: with three blocks of eight tiles each, this gives two programs
per multiprocessor of a large GPU, so that all run at the same time."""


class Factors(NamedTuple):
    """Factors of the gradients of all blocks, (L, N, ...): the gradient of a linear map's output, `enlarged`, and its
    input."""

    e2: Tensor
    hidden: Tensor
    dhidden: Tensor
    z1: Tensor
    """Input of the map before the norm's scale and bias, like z."""
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
    factors: Factors,
    norms: Sequence[Norms],
    gates: Tensor | None,
    laid: Tensor,
    peak: Tensor,
    heads: int,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return shares (shares, L, ...) of the gradients, to be summed: of norms (4 D,), the second norm first; of W_2,
    W_1 and W_o, each (M, K) with its bias (M,), in the format of `unpacked`; and of W, W^u and U.

    laid: the matrices in the dtype of products, as they are and transposed, (L, 2, ...)."""
    (layers, rows, d), f, tile = factors.z.shape, factors.hidden.shape[-1], tile_of(precision)
    gated, size = gates is not None, d // heads
    # tiles after a norm are as low as the others are high, and so use the same instructions
    normed = Normed(wide=min(tile.high, d), up=min(tile.high, f), project=max(min(tile.high, d), size if gated else 0))
    projects, ups = 3 * (d // normed.project) * (d // normed.wide), (f // normed.up) * (d // normed.wide)
    downs, outs = (shares(d, tile.high) * shares(k, tile.wide) for k in (f, d))
    splits, norm_shares = min(SPLITS, shares(rows, tile.rows)), max(3 * (d // normed.project), f // normed.up)
    norm_parts = torch.empty(splits * norm_shares, layers, 4 * d, device=peak.device)
    map_parts = torch.empty(splits, layers, sum(m * k + m for m, k in map_sizes(d, f)), device=peak.device)
    total = 6 * d * d + 3 * heads * size * size if gated else 3 * d * d
    project_parts = torch.empty(splits, layers, total, device=peak.device)
    cast(Any, _weights)[(splits, projects + ups + downs + outs, layers)](
        *factors, *zip(*norms, strict=True), factors.z if gates is None else gates, laid, peak,
        norm_parts, map_parts, project_parts, rows, laid.stride(0),
        D=d, F=f, E=size, H=heads, L=layers, HIGH=tile.high, WIDE=tile.wide, PROJECT_HIGH=normed.project,
        UP_HIGH=normed.up, NORMED_WIDE=normed.wide, PROJECTS=projects, UPS=ups, DOWNS=downs, NORM_SHARES=norm_shares,
        ROWS=tile.rows, TURNS=shares(rows, splits * tile.rows), UTILITY=gated, PRECISION=precision,
        num_warps=tile.warps(max(normed.project, tile.high)),
    )  # fmt: skip
    return norm_parts, map_parts, project_parts


class Normed(NamedTuple):
    """Tiles of the gradients of maps that follow a norm: columns, and rows of W_1 and of the projections."""

    wide: int
    up: int
    project: int


def map_sizes(d: int, f: int) -> list[tuple[int, int]]:
    """Return the shapes of W_2, W_1 and W_o."""
    return [(d, f), (f, d), (d, d)]


@triton.jit
def _weights(
    e2_ptr, hidden_ptr, dhidden_ptr, z1_ptr, e1_ptr, h_ptr, dqkv_ptr, z_ptr, norm_ws, norm_bs, ff_norm_ws, ff_norm_bs,
    gates_ptr, laid_ptr, peak_ptr, norms_ptr, maps_ptr, projects_ptr, N, LAID,
    D: tl.constexpr, F: tl.constexpr, E: tl.constexpr, H: tl.constexpr, L: tl.constexpr, HIGH: tl.constexpr,
    WIDE: tl.constexpr, PROJECT_HIGH: tl.constexpr, UP_HIGH: tl.constexpr, NORMED_WIDE: tl.constexpr,
    PROJECTS: tl.constexpr, UPS: tl.constexpr, DOWNS: tl.constexpr, NORM_SHARES: tl.constexpr, ROWS: tl.constexpr,
    TURNS: tl.constexpr, UTILITY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    split, tile, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    before = tl.cast(N, tl.int64) * layer  # rows of earlier blocks
    small = 1 / enlarged(peak_ptr, PRECISION)
    at = split * L + layer
    squares: tl.constexpr = 10 if UTILITY else 4
    turned_ptr = laid_ptr + layer * LAID + squares * D * D + 2 * D * F
    norms_ptr += (split * NORM_SHARES * L + layer) * 4 * D  # pointer to the first of its shares
    each_norm: tl.constexpr = L * 4 * D
    wide: tl.constexpr = D // NORMED_WIDE
    to = maps_ptr + at * (2 * D * F + D * D + F + 2 * D)
    if tile < PROJECTS:  # the slowest tiles come first
        high: tl.constexpr = D // PROJECT_HIGH
        part, column = tile // (high * wide), tile % wide
        m = tile // wide % high * PROJECT_HIGH + tl.arange(0, PROJECT_HIGH)
        k = column * NORMED_WIDE + tl.arange(0, NORMED_WIDE)
        gate_ptr = gates_ptr
        if part > 0:
            gate_ptr += (before + N) * D
        dw, dtwin, du, _, dgamma, dbeta = _after_norm(
            dqkv_ptr + before * 3 * D + part * D, 3 * D, z_ptr + before * D, gate_ptr, turned_ptr + part * D * D, D,
            _of(norm_ws, layer), _of(norm_bs, layer), small, N, split, m, k,
            D, PROJECT_HIGH, NORMED_WIDE, ROWS, TURNS, UTILITY, PRECISION,
        )  # fmt: skip
        total: tl.constexpr = 6 * D * D + 3 * H * E * E if UTILITY else 3 * D * D
        project_ptr = projects_ptr + at * total
        cell = part * D * D + m[None, :] * D + k[:, None]
        tl.store(project_ptr + cell, dw)
        if UTILITY:
            tl.store(project_ptr + 3 * D * D + cell, dtwin)
            inside = part * H * E * E + (m[:, None] // E) * E * E + (m[:, None] % E) * E + m[None, :] % E
            own = ((m[:, None] // E) == (m[None, :] // E)) & (column == 0)
            tl.store(project_ptr + 6 * D * D + inside, du, mask=own)
        _store_norm(norms_ptr + 2 * D + k, dgamma, dbeta, tile // wide, 3 * high, NORM_SHARES, each_norm, D)
    elif tile < PROJECTS + UPS:
        tile -= PROJECTS
        m = tile // wide * UP_HIGH + tl.arange(0, UP_HIGH)
        k = tile % wide * NORMED_WIDE + tl.arange(0, NORMED_WIDE)
        dw, _, _, summed, dgamma, dbeta = _after_norm(
            dhidden_ptr + before * F, F, z1_ptr + before * D, gates_ptr, turned_ptr + squares * D * D, F,
            _of(ff_norm_ws, layer), _of(ff_norm_bs, layer), small, N, split, m, k,
            D, UP_HIGH, NORMED_WIDE, ROWS, TURNS, False, PRECISION,
        )  # fmt: skip
        to += D * F + D
        tl.store(to + m[None, :] * D + k[:, None], dw)
        if tile % wide == 0:
            tl.store(to + D * F + m, summed)
        _store_norm(norms_ptr + k, dgamma, dbeta, tile // wide, F // UP_HIGH, NORM_SHARES, each_norm, D)
    elif tile < PROJECTS + UPS + DOWNS:
        tile -= PROJECTS + UPS
        a, b = e2_ptr + before * D, hidden_ptr + before * F
        outer_tile(a, b, to, small, N, split, D, F, tile, D, F, HIGH, WIDE, ROWS, TURNS, PRECISION)
    else:
        tile -= PROJECTS + UPS + DOWNS
        a, b = e1_ptr + before * D, h_ptr + before * D
        to += 2 * D * F + D + F
        outer_tile(a, b, to, small, N, split, D, D, tile, D, D, HIGH, WIDE, ROWS, TURNS, PRECISION)


@triton.jit
def _of(entries, layer):
    """Select the entry of this block."""
    found = entries[0]
    for i in tl.static_range(1, len(entries)):
        found = tl.where(layer == i, entries[i], found)
    return found


@triton.jit
def _after_norm(
    dout_ptr, stride, z_ptr, gate_ptr, turned_ptr, turned_stride, norm_w, norm_b, small, N, split, m, k,
    D: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr,
    UTILITY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the gradients of maps of y = w z + b over one share of the rows: of W and, if gated, of W^u,
    stored three squares later, both as (in, out); of U; the sum of dout; and of w and b.

    The computed factor is the right one: a left factor would be read from registers, and the compiler would then make
    the program wait for each instruction of each product."""
    dw = tl.zeros((WIDE, HIGH), tl.float32)
    dtwin = tl.zeros((WIDE, HIGH), tl.float32)
    du = tl.zeros((HIGH, HIGH), tl.float32)
    ones = tl.full((ROWS, 16), 1.0, z_ptr.dtype.element_ty)
    total = tl.zeros((HIGH, 16), tl.float32)
    for turn in tl.range(0, TURNS):
        n = (split * TURNS + turn) * ROWS + tl.arange(0, ROWS)
        live = (n < N)[:, None]
        dout = read(dout_ptr + n[:, None] * stride + m[None, :], live)
        z = tl.trans(read(z_ptr + n[:, None] * D + k[None, :], live))
        dw += times_loaded(z, dout, PRECISION)
        total += times_loaded(tl.trans(dout), ones, PRECISION)
        if UTILITY:
            gate = read(gate_ptr + n[:, None] * D + m[None, :], live)
            du += times_loaded(tl.trans(dout), gate, PRECISION)
            dtwin += times_loaded(z, scaled(dout, gate, PRECISION), PRECISION)
    w, b = tl.load(norm_w + k)[:, None], tl.load(norm_b + k)[:, None]
    at = k[:, None] * turned_stride + m[None, :]
    matrix = tl.load(turned_ptr + at).to(tl.float32) * small
    summed = tl.max(total, 1)  # all columns are identical
    dgamma, dbeta = tl.sum(matrix * dw, 1), tl.sum(matrix * summed[None, :], 1)
    dw = (dw * w + summed[None, :] * b) * small
    if UTILITY:
        passed = tl.sum(tl.where(m[:, None] == m[None, :], du, 0.0), 1)  # the sum of dout times the gate
        matrix = tl.load(turned_ptr + 3 * D * D + at).to(tl.float32) * small
        dgamma += tl.sum(matrix * dtwin, 1)
        dbeta += tl.sum(matrix * passed[None, :], 1)
        dtwin = (dtwin * w + passed[None, :] * b) * small
    return dw, dtwin, du * small, summed * small, dgamma, dbeta


@triton.jit
def _store_norm(
    to, dgamma, dbeta, share, SHARES: tl.constexpr, ALL: tl.constexpr, EACH: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Write one of SHARES shares of the gradients of a norm's scale and bias; the last also writes zeros up to ALL."""
    tl.store(to + share * EACH, dgamma)
    tl.store(to + share * EACH + D, dbeta)
    if share == SHARES - 1:
        for empty in tl.static_range(SHARES, ALL):
            tl.store(to + empty * EACH, dgamma * 0)
            tl.store(to + empty * EACH + D, dbeta * 0)
