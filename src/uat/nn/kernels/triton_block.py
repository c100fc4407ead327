"""A Transformer block forwards and backwards in a few launches (Triton).

The slow twin is `Block.forward`; tests hold outputs and all gradients equal. Forwards there are three kernels:

  _project    y = LN(x); q, k, v = W y + gate ⊙ (W^u y) + U gate
  _attend     h = softmax(q k^T / √E) v, causal, an episode and a head at a time
  _mix        x1 = x + drop(W_o h + b_o); x2 = x1 + drop(W_2 relu(W_1 LN(x1) + b_1) + b_2)

Backwards each has a twin that gives the gradients of what came in, row by row. Gradients of weights are sums over all
rows: `_outers` and `_project_weights` share the rows out among programs, and torch adds up what they found, in a fixed
order, so that a step repeated gives the same bits. The products W^u y are worked out again instead of being kept.

Dropout draws from (seed, place): the seed lies on the device, and whoever trains changes it before each step.

Shapes: N rows (B episodes of T steps), D width, H heads, E head size, F feed-forward.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from uat.nn.blocks import Block
from uat.nn.kernels.triton_outer import outers
from uat.nn.kernels.triton_parts import (
    diagonal,
    dropped,
    norm_backward,
    norm_rows,
    offset,
    shares,
    standardised,
    times,
    times_loaded,
)
from uat.nn.kernels.triton_step import products
from uat.nn.kernels.whole import projections, room

ROWS, WARPS = 64, 4
"""Rows that a program serves, and its warps."""
SPLITS = 48
"""Programs that share the rows of a weight's gradient."""
LONGEST = 128
"""Most steps of an episode that fit one program."""
SITES = 3
"""Places in a block that drop: attention, its output, the feed-forward network's output."""


def fused_block(
    block: Block, x_ND: Tensor, rho_ND: Tensor | None, g_ND: Tensor | None, shape: tuple[int, int], layer: int,
    seed: Tensor,
) -> Tensor:  # fmt: skip
    """The block's output for x (B * T, D); gates likewise, or None. shape: (B, T)."""
    a, (ff1, _, ff2) = block.attention, block.ff
    weights = (
        block.attention_norm.weight, block.attention_norm.bias, *projections(a.project),
        a.out.weight, a.out.bias, block.ff_norm.weight, block.ff_norm.bias, ff1.weight, ff1.bias, ff2.weight, ff2.bias,
    )  # fmt: skip
    drop = a.dropout if block.training else 0.0
    g_ND = None if g_ND is None else g_ND.contiguous()
    return cast(Tensor, FusedBlock.apply(x_ND, rho_ND, g_ND, seed, shape, a.num_heads, drop, SITES * layer, *weights))


class FusedBlock(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, rho: Tensor | None, g: Tensor | None, seed: Tensor, shape: tuple[int, int], heads: int,
        drop: float, site: int, *weights: Tensor | None,
    ) -> Tensor:  # fmt: skip
        norm_w, norm_b, project_w, u, out_w, out_b, ff_norm_w, ff_norm_b, w1, b1, w2, b2 = weights
        assert w1 is not None
        (rows, d), f, gated = x.shape, w1.shape[0], rho is not None
        y, qkv, h, x1, y1 = (torch.empty(rows, width, device=x.device) for width in (d, 3 * d, d, d, d))
        hidden, x2 = torch.empty(rows, f, device=x.device), torch.empty_like(x)
        same = {"D": d, "PRECISION": products()}
        grid, gates = (shares(rows, ROWS),), (x, x) if rho is None or g is None else (rho, g)
        cast(Any, _project)[grid](
            x, norm_w, norm_b, project_w, u, *gates, y, qkv, rows,
            **same, H=heads, E=d // heads, ROWS=ROWS, UTILITY=gated, num_warps=WARPS,
        )  # fmt: skip
        attention = _attention(shape, d, heads, drop, products())
        cast(Any, _attend)[(shape[0] * heads,)](qkv, h, seed, shape[1], site, **attention)
        cast(Any, _mix)[grid](
            h, x, out_w, out_b, ff_norm_w, ff_norm_b, w1, b1, w2, b2, seed, x1, y1, hidden, x2, rows, site,
            **same, F=f, ROWS=ROWS, DROP=drop, num_warps=WARPS,
        )  # fmt: skip
        ctx.save_for_backward(x, *gates, seed, y, qkv, h, x1, y1, hidden, *weights)
        ctx.shape, ctx.heads, ctx.drop, ctx.site, ctx.gated = shape, heads, drop, site, gated
        ctx.precision = same["PRECISION"]
        return x2

    @staticmethod
    def backward(ctx: Any, d2: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, rho, g, seed, y, qkv, h, x1, y1, hidden, *weights = ctx.saved_tensors
        norm_w, norm_b, project_w, u, out_w, _, ff_norm_w, _, w1, _, w2, _ = weights
        (rows, d), f, heads = x.shape, w1.shape[0], ctx.heads
        d2 = d2.contiguous()
        same = {"D": d, "PRECISION": ctx.precision}
        programs = shares(rows, ROWS)
        ff_norm_parts, norm_parts = (torch.empty(programs, 2 * d, device=x.device) for _ in range(2))
        e2, e1, dh, dx1 = (torch.empty_like(x) for _ in range(4))
        dhidden = torch.empty_like(hidden)
        cast(Any, _mix_backward)[(programs,)](
            d2, x1, hidden, out_w, ff_norm_w, w1, w2, seed, e2, dhidden, dx1, e1, dh, ff_norm_parts, rows, ctx.site,
            **same, F=f, ROWS=ROWS, DROP=ctx.drop, num_warps=WARPS,
        )  # fmt: skip
        (dw2, db2), (dw1, db1), (dout_w, dout_b) = outers(
            [(e2, hidden), (dhidden, y1), (e1, h)], splits=SPLITS, precision=ctx.precision
        )
        dqkv = torch.empty_like(qkv)
        attention = _attention(ctx.shape, d, heads, ctx.drop, ctx.precision)
        cast(Any, _attend_backward)[(ctx.shape[0] * heads,)](qkv, dh, dqkv, seed, ctx.shape[1], ctx.site, **attention)

        drho, dg = (torch.empty(rows, d, device=x.device) for _ in range(2)) if ctx.gated else (x, x)
        dx = torch.empty_like(x)
        cast(Any, _project_backward)[(programs,)](
            dqkv, x, dx1, norm_w, norm_b, project_w, u, rho, g, dx, drho, dg, norm_parts, rows,
            **same, H=heads, E=d // heads, ROWS=ROWS, UTILITY=ctx.gated, num_warps=WARPS,
        )  # fmt: skip
        dproject, du = _project_gradients(dqkv, y, rho, g, project_w, u, heads, ctx.gated, ctx.precision)
        dnorm, dff_norm = norm_parts.sum(0), ff_norm_parts.sum(0)
        gates = (drho, dg) if ctx.gated else (None, None)
        return (
            dx, *gates, None, None, None, None, None, dnorm[:d], dnorm[d:], dproject, du, dout_w, dout_b,
            dff_norm[:d], dff_norm[d:], dw1, db1, dw2, db2,
        )  # fmt: skip


def _attention(shape: tuple[int, int], d: int, heads: int, drop: float, precision: str) -> dict[str, Any]:
    size = d // heads
    steps = room(shape[1])
    sizes = {"D": d, "H": heads, "E": size, "ROOM": steps, "SCALE": size**-0.5}
    return {**sizes, "DROP": drop, "PRECISION": precision, "num_warps": 4 if steps <= 64 else 8}


def _project_gradients(
    dqkv: Tensor, y: Tensor, rho: Tensor, g: Tensor, project_w: Tensor, u: Tensor | None, heads: int, gated: bool,
    precision: str,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gradients of W, W^u and U."""
    (rows, d), tile = y.shape, min(64, y.shape[1])
    biases = 0 if u is None else u.numel()
    splits = min(SPLITS, shares(rows, 32))
    parts = torch.empty(splits, project_w.numel() + biases, device=y.device)
    cast(Any, _project_weights)[(splits, 3 * (d // tile) ** 2)](
        dqkv, y, rho, g, parts, rows,
        D=d, E=d // heads, H=heads, TILE=tile, ROWS=32, TURNS=shares(rows, splits * 32),
        TOTAL=parts.shape[1], UTILITY=gated, PRECISION=precision,
    )  # fmt: skip
    total = parts.sum(0)
    return total[: project_w.numel()].view_as(project_w), None if u is None else total[project_w.numel() :].view_as(u)


# ---------------------------------------------------------------- projections


@triton.jit
def _project(
    x_ptr, norm_w, norm_b, w_ptr, u_ptr, rho_ptr, g_ptr, y_ptr, qkv_ptr, N,
    D: tl.constexpr, H: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, UTILITY: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    n, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    live = (n < N)[:, None]
    here = n[:, None] * D + d[None, :]
    y = norm_rows(tl.load(x_ptr + here, mask=live, other=0.0), norm_w, norm_b, d, D)
    tl.store(y_ptr + here, y, mask=live)
    if UTILITY:
        rho = tl.load(rho_ptr + here, mask=live, other=0.0)
        g = tl.load(g_ptr + here, mask=live, other=0.0)
    for part in tl.static_range(3):
        out = times(y, w_ptr + part * D * D, d, d, D, PRECISION)
        if UTILITY:
            gate = rho if part == 0 else g
            out += gate * times(y, w_ptr + (3 + part) * D * D, d, d, D, PRECISION)
            out += offset(gate, u_ptr + part * H * E * E, d, D, E, PRECISION)
        tl.store(qkv_ptr + n[:, None] * 3 * D + part * D + d[None, :], out, mask=live)


@triton.jit
def _project_backward(
    dqkv_ptr, x_ptr, dres_ptr, norm_w, norm_b, w_ptr, u_ptr, rho_ptr, g_ptr, dx_ptr, drho_ptr, dg_ptr, parts_ptr, N,
    D: tl.constexpr, H: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, UTILITY: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Down to x: through the projections, the norm, and what comes along the residual."""
    n, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    live = (n < N)[:, None]
    here = n[:, None] * D + d[None, :]
    z, scale = standardised(tl.load(x_ptr + here, mask=live, other=0.0), D)
    gamma = tl.load(norm_w + d)
    y = z * gamma[None, :] + tl.load(norm_b + d)[None, :]
    dy = tl.zeros((ROWS, D), tl.float32)
    if UTILITY:
        rho = tl.load(rho_ptr + here, mask=live, other=0.0)
        g = tl.load(g_ptr + here, mask=live, other=0.0)
        dg = tl.zeros((ROWS, D), tl.float32)
    for part in tl.static_range(3):
        dout = tl.load(dqkv_ptr + n[:, None] * 3 * D + part * D + d[None, :], mask=live, other=0.0)
        w = tl.load(w_ptr + part * D * D + d[:, None] * D + d[None, :])  # (out, in)
        dy += times_loaded(dout, w, PRECISION)
        if UTILITY:
            gate = rho if part == 0 else g
            twin = tl.load(w_ptr + (3 + part) * D * D + d[:, None] * D + d[None, :])
            dy += times_loaded(dout * gate, twin, PRECISION)
            dgate = dout * times_loaded(y, tl.trans(twin), PRECISION)
            dgate += times_loaded(dout, tl.trans(diagonal(u_ptr + part * H * E * E, d, E)), PRECISION)
            if part == 0:
                tl.store(drho_ptr + here, dgate, mask=live)
            else:
                dg += dgate
    if UTILITY:
        tl.store(dg_ptr + here, dg, mask=live)
    dx = norm_backward(dy, z, scale, gamma, parts_ptr + tl.program_id(0) * 2 * D, d, D)
    tl.store(dx_ptr + here, dx + tl.load(dres_ptr + here, mask=live, other=0.0), mask=live)


@triton.jit
def _project_weights(
    dqkv_ptr, y_ptr, rho_ptr, g_ptr, parts_ptr, N,
    D: tl.constexpr, E: tl.constexpr, H: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr,
    TOTAL: tl.constexpr, UTILITY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of the gradients of W, W^u and U of queries, keys or values, over one share of the rows."""
    tiles: tl.constexpr = D // TILE
    split, part = tl.program_id(0), tl.program_id(1) // (tiles * tiles)
    m = (tl.program_id(1) // tiles) % tiles * TILE + tl.arange(0, TILE)
    k = tl.program_id(1) % tiles * TILE + tl.arange(0, TILE)
    dw = tl.zeros((TILE, TILE), tl.float32)
    dtwin = tl.zeros((TILE, TILE), tl.float32)
    du = tl.zeros((TILE, TILE), tl.float32)
    gate_ptr = g_ptr
    if part == 0:
        gate_ptr = rho_ptr
    for turn in tl.range(0, TURNS):
        n = (split * TURNS + turn) * ROWS + tl.arange(0, ROWS)
        live = n < N
        dout = tl.load(dqkv_ptr + n[None, :] * 3 * D + part * D + m[:, None], mask=live[None, :], other=0.0)
        y = tl.load(y_ptr + n[:, None] * D + k[None, :], mask=live[:, None], other=0.0)
        dw += times_loaded(dout, y, PRECISION)
        if UTILITY:
            gate_m = tl.load(gate_ptr + n[None, :] * D + m[:, None], mask=live[None, :], other=0.0)
            gate_k = tl.load(gate_ptr + n[:, None] * D + k[None, :], mask=live[:, None], other=0.0)
            dtwin += times_loaded(dout * gate_m, y, PRECISION)
            du += times_loaded(dout, gate_k, PRECISION)
    to = parts_ptr + split * TOTAL
    cell = m[:, None] * D + k[None, :]
    tl.store(to + part * D * D + cell, dw)
    if UTILITY:
        tl.store(to + (3 + part) * D * D + cell, dtwin)
        inside = (m[:, None] // E) * E * E + (m[:, None] % E) * E + k[None, :] % E
        tl.store(to + 6 * D * D + part * H * E * E + inside, du, mask=(m[:, None] // E) == (k[None, :] // E))


# ---------------------------------------------------------------- attention


@triton.jit
def _weights(q, k, t, SCALE: tl.constexpr, PRECISION: tl.constexpr):
    """Causal softmax."""
    logits = times_loaded(q, tl.trans(k), PRECISION) * SCALE
    logits = tl.where(t[None, :] <= t[:, None], logits, -float("inf"))
    weight = tl.exp(logits - tl.max(logits, 1)[:, None])
    return weight / tl.sum(weight, 1)[:, None]


@triton.jit(do_not_specialize=["site"])
def _attend(
    qkv_ptr, h_ptr, seed_ptr, T, site,
    D: tl.constexpr, H: tl.constexpr, E: tl.constexpr, ROOM: tl.constexpr, SCALE: tl.constexpr, DROP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    t, e = tl.arange(0, ROOM), tl.arange(0, E)
    episode, head = tl.program_id(0) // H, tl.program_id(0) % H
    live = (t < T)[:, None]
    row = episode * T + t
    at = row[:, None] * 3 * D + head * E + e[None, :]
    q = tl.load(qkv_ptr + at, mask=live, other=0.0)
    k = tl.load(qkv_ptr + D + at, mask=live, other=0.0)
    v = tl.load(qkv_ptr + 2 * D + at, mask=live, other=0.0)
    weight = _weights(q, k, t, SCALE, PRECISION)
    if DROP > 0:
        place = (tl.program_id(0) * ROOM + t[:, None]) * ROOM + t[None, :]
        weight = dropped(weight, seed_ptr, place, site, DROP)
    tl.store(h_ptr + row[:, None] * D + head * E + e[None, :], times_loaded(weight, v, PRECISION), mask=live)


@triton.jit(do_not_specialize=["site"])
def _attend_backward(
    qkv_ptr, dh_ptr, dqkv_ptr, seed_ptr, T, site,
    D: tl.constexpr, H: tl.constexpr, E: tl.constexpr, ROOM: tl.constexpr, SCALE: tl.constexpr, DROP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    t, e = tl.arange(0, ROOM), tl.arange(0, E)
    episode, head = tl.program_id(0) // H, tl.program_id(0) % H
    live = (t < T)[:, None]
    row = episode * T + t
    at = row[:, None] * 3 * D + head * E + e[None, :]
    q = tl.load(qkv_ptr + at, mask=live, other=0.0)
    k = tl.load(qkv_ptr + D + at, mask=live, other=0.0)
    v = tl.load(qkv_ptr + 2 * D + at, mask=live, other=0.0)
    dh = tl.load(dh_ptr + row[:, None] * D + head * E + e[None, :], mask=live, other=0.0)
    weight = _weights(q, k, t, SCALE, PRECISION)
    dweight = times_loaded(dh, tl.trans(v), PRECISION)
    kept = weight
    if DROP > 0:
        place = (tl.program_id(0) * ROOM + t[:, None]) * ROOM + t[None, :]
        kept = dropped(weight, seed_ptr, place, site, DROP)
        dweight = dropped(dweight, seed_ptr, place, site, DROP)
    tl.store(dqkv_ptr + 2 * D + at, times_loaded(tl.trans(kept), dh, PRECISION), mask=live)
    dlogits = weight * (dweight - tl.sum(weight * dweight, 1)[:, None]) * SCALE
    tl.store(dqkv_ptr + at, times_loaded(dlogits, k, PRECISION), mask=live)
    tl.store(dqkv_ptr + D + at, times_loaded(tl.trans(dlogits), q, PRECISION), mask=live)


# ---------------------------------------------------------------- output, feed-forward


@triton.jit(do_not_specialize=["site"])
def _mix(
    h_ptr, x_ptr, out_w, out_b, norm_w, norm_b, w1_ptr, b1_ptr, w2_ptr, b2_ptr, seed_ptr, x1_ptr, y1_ptr, hidden_ptr,
    x2_ptr, N, site,
    D: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n, d, f = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, F)
    live = (n < N)[:, None]
    here = n[:, None] * D + d[None, :]
    h = tl.load(h_ptr + here, mask=live, other=0.0)
    change = times(h, out_w, d, d, D, PRECISION) + tl.load(out_b + d)[None, :]
    if DROP > 0:
        change = dropped(change, seed_ptr, here, site + 1, DROP)
    x1 = tl.load(x_ptr + here, mask=live, other=0.0) + change
    tl.store(x1_ptr + here, x1, mask=live)
    y1 = norm_rows(x1, norm_w, norm_b, d, D)
    tl.store(y1_ptr + here, y1, mask=live)
    hidden = tl.maximum(times(y1, w1_ptr, f, d, D, PRECISION) + tl.load(b1_ptr + f)[None, :], 0.0)
    tl.store(hidden_ptr + n[:, None] * F + f[None, :], hidden, mask=live)
    change = times(hidden, w2_ptr, d, f, F, PRECISION) + tl.load(b2_ptr + d)[None, :]
    if DROP > 0:
        change = dropped(change, seed_ptr, here, site + 2, DROP)
    tl.store(x2_ptr + here, x1 + change, mask=live)


@triton.jit(do_not_specialize=["site"])
def _mix_backward(
    d2_ptr, x1_ptr, hidden_ptr, out_w, norm_w, w1_ptr, w2_ptr, seed_ptr, e2_ptr, dhidden_ptr, dx1_ptr, e1_ptr, dh_ptr,
    parts_ptr, N, site,
    D: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """e2 and e1 are the gradients of what was added to the residual stream, before it was dropped."""
    n, d, f = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, F)
    live = (n < N)[:, None]
    here = n[:, None] * D + d[None, :]
    d2 = tl.load(d2_ptr + here, mask=live, other=0.0)
    e2 = d2
    if DROP > 0:
        e2 = dropped(d2, seed_ptr, here, site + 2, DROP)
    tl.store(e2_ptr + here, e2, mask=live)
    hidden = tl.load(hidden_ptr + n[:, None] * F + f[None, :], mask=live, other=0.0)
    dhidden = times_loaded(e2, tl.load(w2_ptr + d[:, None] * F + f[None, :]), PRECISION)
    dhidden = tl.where(hidden > 0, dhidden, 0.0)
    tl.store(dhidden_ptr + n[:, None] * F + f[None, :], dhidden, mask=live)
    dy = times_loaded(dhidden, tl.load(w1_ptr + f[:, None] * D + d[None, :]), PRECISION)
    z, scale = standardised(tl.load(x1_ptr + here, mask=live, other=0.0), D)
    gamma = tl.load(norm_w + d)
    dx1 = d2 + norm_backward(dy, z, scale, gamma, parts_ptr + tl.program_id(0) * 2 * D, d, D)
    tl.store(dx1_ptr + here, dx1, mask=live)
    e1 = dx1
    if DROP > 0:
        e1 = dropped(dx1, seed_ptr, here, site + 1, DROP)
    tl.store(e1_ptr + here, e1, mask=live)
    dh = times_loaded(e1, tl.load(out_w + d[:, None] * D + d[None, :]), PRECISION)
    tl.store(dh_ptr + here, dh, mask=live)
