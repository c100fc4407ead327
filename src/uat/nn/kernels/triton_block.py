"""A Transformer block forwards and backwards in a few launches (Triton).

The slow twin is `Block.forward`; tests hold outputs and all gradients equal. Forwards there are three kernels:

  _project    y = LN(x); q, k, v = W y + gate ⊙ (W^u y) + U gate
  _attend     h = softmax(q k^T / √E) v, causal, an episode and a head at a time
  _mix        x1 = x + drop(W_o h + b_o); x2 = x1 + drop(W_2 relu(W_1 LN(x1) + b_1) + b_2)

Backwards each has a twin that gives the gradients of what came in, row by row. Gradients of weights are sums over all
rows: `_outers` and `_project_weights` share the rows out among programs, and `added` adds up what they found, in a
fixed order, so that a step repeated gives the same bits. The products W^u y are worked out again instead of being kept.

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
from uat.nn.kernels import triton_outer as tiles
from uat.nn.kernels.triton_outer import added, outers, unpacked
from uat.nn.kernels.triton_parts import (
    dropped,
    enlarged,
    norm_backward,
    norm_rows,
    rounded,
    shares,
    standardised,
    times,
    times_loaded,
)
from uat.nn.kernels.triton_step import rounding
from uat.nn.kernels.whole import projections, room

ROWS, WARPS = 64, 4
"""Rows that a program serves, and its warps."""
SPLITS, PROJECT_SPLITS = 48, 64
"""Programs that share the rows of a weight's gradient, and of those of projections."""
LAID = 1024
"""Numbers that a program copies when matrices are laid side by side."""
LONGEST = 128
"""Most steps of an episode that fit one program."""
SITES = 3
"""Places in a block that drop: attention, its output, the feed-forward network's output."""


def fused_block(
    block: Block, x_ND: Tensor, rho_ND: Tensor | None, g_ND: Tensor | None, shape: tuple[int, int], layer: int,
    seed: Tensor, peak: Tensor,
) -> Tensor:  # fmt: skip
    """The block's output for x (B * T, D); gates likewise, or None. shape: (B, T).

    peak: the largest gradient of what the last block gives, written before the way back comes here."""
    a, (ff1, _, ff2) = block.attention, block.ff
    weights = (
        block.attention_norm.weight, block.attention_norm.bias, *projections(a.project),
        a.out.weight, a.out.bias, block.ff_norm.weight, block.ff_norm.bias, ff1.weight, ff1.bias, ff2.weight, ff2.bias,
    )  # fmt: skip
    drop = a.dropout if block.training else 0.0
    g_ND = None if g_ND is None else g_ND.contiguous()
    site = SITES * layer
    return cast(Tensor, FusedBlock.apply(x_ND, rho_ND, g_ND, seed, peak, shape, a.num_heads, drop, site, *weights))


class FusedBlock(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, rho: Tensor | None, g: Tensor | None, seed: Tensor, peak: Tensor, shape: tuple[int, int],
        heads: int, drop: float, site: int, *weights: Tensor | None,
    ) -> Tensor:  # fmt: skip
        norm_w, norm_b, project_w, u, out_w, out_b, ff_norm_w, ff_norm_b, w1, b1, w2, b2 = weights
        assert project_w is not None
        assert out_w is not None
        assert w1 is not None
        assert w2 is not None
        (rows, d), f, gated, precision = x.shape, w1.shape[0], rho is not None, rounding()
        laid = _laid(project_w, u, out_w, w1, w2, precision)
        y, qkv, h, y1, hidden = (laid.new_empty(rows, width) for width in (d, 3 * d, d, d, f))
        x1, x2 = torch.empty_like(x), torch.empty_like(x)
        same = {"D": d, "PRECISION": precision}
        grid, gates = (shares(rows, ROWS),), (x, x) if rho is None or g is None else (rho, g)
        cast(Any, _project)[grid](
            x, norm_w, norm_b, laid, *gates, y, qkv, rows,
            **same, ROWS=ROWS, UTILITY=gated, STAGES=_stages(d, precision), num_warps=WARPS,
        )  # fmt: skip
        attention = _attention(shape, d, heads, drop, precision)
        cast(Any, _attend)[(shape[0] * heads,)](qkv, h, seed, shape[1], site, **attention)
        cast(Any, _mix)[grid](
            h, x, laid, out_b, ff_norm_w, ff_norm_b, b1, b2, seed, x1, y1, hidden, x2, rows, site,
            **same, F=f, BEFORE=_squares(gated) - 1, ROWS=ROWS, DROP=drop, num_warps=WARPS,
        )  # fmt: skip
        ctx.save_for_backward(x, *gates, seed, laid, y, qkv, h, x1, y1, hidden, norm_w, ff_norm_w)
        ctx.peak, ctx.shape, ctx.heads, ctx.drop, ctx.site, ctx.gated = peak, shape, heads, drop, site, gated
        ctx.precision, ctx.shapes = precision, (project_w.shape, None if u is None else u.shape)
        return x2

    @staticmethod
    def backward(ctx: Any, d2: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, rho, g, seed, laid, y, qkv, h, x1, y1, hidden, norm_w, ff_norm_w = ctx.saved_tensors
        (rows, d), f, heads, peak = x.shape, hidden.shape[1], ctx.heads, ctx.peak
        d2 = d2.contiguous()
        same = {"D": d, "PRECISION": ctx.precision}
        programs, (plain, turned) = shares(rows, ROWS), laid.chunk(2)
        norm_parts = torch.empty(programs, 4 * d, device=x.device)
        e2, e1, dh, dhidden, dqkv = (torch.empty_like(like) for like in (y, y, y, hidden, qkv))
        dx1, dx = torch.empty_like(x), torch.empty_like(x)
        cast(Any, _mix_backward)[(programs,)](
            d2, x1, hidden, turned, ff_norm_w, seed, peak, e2, dhidden, dx1, e1, dh, norm_parts, rows, ctx.site,
            **same, F=f, BEFORE=_squares(ctx.gated) - 1, ROWS=ROWS, DROP=ctx.drop, num_warps=WARPS,
        )  # fmt: skip
        outer_parts, sizes = outers(
            [(e2, hidden), (dhidden, y1), (e1, h)], splits=SPLITS, precision=ctx.precision, peak=peak
        )
        attention = _attention(ctx.shape, d, heads, ctx.drop, ctx.precision)
        cast(Any, _attend_backward)[(ctx.shape[0] * heads,)](qkv, dh, dqkv, seed, ctx.shape[1], ctx.site, **attention)

        large = large_products(x.device) and ctx.precision == "half"
        drho, dg = (torch.empty_like(x) for _ in range(2)) if ctx.gated else (x, x)
        cast(Any, _project_backward)[(programs,)](
            dqkv, x, y, dx1, norm_w, turned, plain, rho, g, peak, dx, drho, dg, norm_parts, rows,
            **same, ROWS=ROWS, UTILITY=ctx.gated, STAGES=_stages(d, ctx.precision),
            num_warps=WARPS if large else 2 * WARPS,
        )  # fmt: skip
        project_shape, u_shape = ctx.shapes
        project_parts = _project_gradients(dqkv, y, rho, g, peak, u_shape, heads, ctx.gated, ctx.precision)
        dnorms, summed, dprojects = added(norm_parts, outer_parts, project_parts)
        dff_norm, dnorm = dnorms.split(2 * d)
        (dw2, db2), (dw1, db1), (dout_w, dout_b) = unpacked(summed, sizes)
        dproject, biases = dprojects[: project_shape.numel()].view(project_shape), dprojects[project_shape.numel() :]
        du = None if u_shape is None else biases.view(u_shape)
        gates = (drho, dg) if ctx.gated else (None, None)
        return (
            dx, *gates, None, None, None, None, None, None, dnorm[:d], dnorm[d:], dproject, du, dout_w, dout_b,
            dff_norm[:d], dff_norm[d:], dw1, db1, dw2, db2,
        )  # fmt: skip


def large_products(device: torch.device) -> bool:
    """Whether the GPU has instructions for large matrix products, which need fewer registers: Hopper and Blackwell for
    data centres do, older ones and those for workstations do not."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)


def _attention(shape: tuple[int, int], d: int, heads: int, drop: float, precision: str) -> dict[str, Any]:
    size = d // heads
    steps = room(shape[1])
    sizes = {"D": d, "H": heads, "E": size, "ROOM": steps, "SCALE": size**-0.5}
    return {**sizes, "DROP": drop, "PRECISION": precision, "num_warps": 4 if steps <= 64 else 8}


def _stages(d: int, precision: str) -> int:
    """Blocks of weights under way at a time: more than one where they are small enough for shared memory."""
    return 2 if precision == "half" and d <= 64 else 1


def _squares(gated: bool) -> int:
    """Matrices of (D, D) in a block: those of projections, with feedback their twins and U, and the output's."""
    return 10 if gated else 4


def _laid(project_w: Tensor, u: Tensor | None, out_w: Tensor, w1: Tensor, w2: Tensor, precision: str) -> Tensor:
    """All matrices side by side in the type that products take, as they are and then transposed: W, W^u, U with the
    heads' matrices along the diagonal, the output's, those of the feed-forward network.

    Gradients are multiplied with the transposed ones: products on tensor cores read along what they sum over."""
    f, d = w1.shape
    total = _squares(u is not None) * d * d + 2 * d * f
    to = out_w.new_empty(2 * total, dtype=torch.float16 if precision == "half" else torch.float32)
    cast(Any, _lay)[(shares(total, LAID),)](
        project_w, out_w if u is None else u, out_w, w1, w2, to, total,
        D=d, F=f, E=d if u is None else u.shape[-1], PROJECT=len(project_w) // d, SQUARES=_squares(u is not None),
        BLOCK=LAID, PRECISION=precision,
    )  # fmt: skip
    return to


@triton.jit
def _lay(
    project_w, u_ptr, out_w, w1_ptr, w2_ptr, to_ptr, TOTAL,
    D: tl.constexpr, F: tl.constexpr, E: tl.constexpr, PROJECT: tl.constexpr, SQUARES: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    which, r, c = i // (D * D), i % (D * D) // D, i % D
    up = i - SQUARES * D * D
    down = up - F * D
    w = tl.load(project_w + i, mask=which < PROJECT, other=0.0)
    own = (which >= PROJECT) & (which < SQUARES - 1) & (r // E == c // E)
    w += tl.load(u_ptr + ((which - PROJECT) * D + r) * E + c % E, mask=own, other=0.0)
    w += tl.load(out_w + r * D + c, mask=which == SQUARES - 1, other=0.0)
    w += tl.load(w1_ptr + up, mask=(up >= 0) & (down < 0), other=0.0)
    w += tl.load(w2_ptr + down, mask=(down >= 0) & (i < TOTAL), other=0.0)
    at = tl.where(up < 0, which * D * D + c * D + r, SQUARES * D * D + up % D * F + up // D)
    at = tl.where(down < 0, at, SQUARES * D * D + F * D + down % F * D + down // F)
    w = rounded(w, PRECISION)
    tl.store(to_ptr + i, w, mask=i < TOTAL)
    tl.store(to_ptr + TOTAL + at, w, mask=i < TOTAL)


def _project_gradients(
    dqkv: Tensor, y: Tensor, rho: Tensor, g: Tensor, peak: Tensor, u_shape: torch.Size | None, heads: int, gated: bool,
    precision: str,
) -> Tensor:  # fmt: skip
    """Gradients of W, W^u and U, to be added up: one row for each share of the rows."""
    rows, d = y.shape
    high, wide = max(min(tiles.HIGH, d), d // heads if gated else 0), min(tiles.WIDE, d)
    biases = 0 if u_shape is None else u_shape.numel()
    splits = min(PROJECT_SPLITS, shares(rows, tiles.ROWS))
    parts = torch.empty(splits, (6 if gated else 3) * d * d + biases, device=y.device)
    cast(Any, _project_weights)[(splits, 3 * (d // high) * (d // wide))](
        dqkv, y, rho, g, peak, parts, rows,
        D=d, E=d // heads, H=heads, HIGH=high, WIDE=wide, ROWS=tiles.ROWS, TURNS=shares(rows, splits * tiles.ROWS),
        TOTAL=parts.shape[1], UTILITY=gated, PRECISION=precision, num_warps=tiles.warps(precision, high),
    )  # fmt: skip
    return parts


# ---------------------------------------------------------------- projections


@triton.jit
def _project(
    x_ptr, norm_w, norm_b, w_ptr, rho_ptr, g_ptr, y_ptr, qkv_ptr, N,
    D: tl.constexpr, ROWS: tl.constexpr, UTILITY: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    live = (n < N)[:, None]
    here = n[:, None] * D + d[None, :]
    y = rounded(norm_rows(tl.load(x_ptr + here, mask=live, other=0.0), norm_w, norm_b, d, D), PRECISION)
    tl.store(y_ptr + here, y, mask=live)
    if UTILITY:
        rho = rounded(tl.load(rho_ptr + here, mask=live, other=0.0), PRECISION)
        g = rounded(tl.load(g_ptr + here, mask=live, other=0.0), PRECISION)
    for part in tl.range(0, 3, num_stages=STAGES):
        out = times(y, w_ptr + part * D * D, d, d, D, PRECISION)
        if UTILITY:
            gate = tl.where(part == 0, rho, g)
            out += gate * times(y, w_ptr + (3 + part) * D * D, d, d, D, PRECISION)
            out += times(gate, w_ptr + (6 + part) * D * D, d, d, D, PRECISION)
        tl.store(qkv_ptr + n[:, None] * 3 * D + part * D + d[None, :], rounded(out, PRECISION), mask=live)


@triton.jit
def _project_backward(
    dqkv_ptr, x_ptr, y_ptr, dres_ptr, norm_w, turned_ptr, w_ptr, rho_ptr, g_ptr, peak_ptr, dx_ptr, drho_ptr, dg_ptr,
    parts_ptr, N,
    D: tl.constexpr, ROWS: tl.constexpr, UTILITY: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Down to x: through the projections, the norm, and what comes along the residual.

    Weights of the next part are under way while these are used.
    """
    n, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    live = (n < N)[:, None]
    here = n[:, None] * D + d[None, :]
    dy = tl.zeros((ROWS, D), tl.float32)
    small = 1 / enlarged(peak_ptr, PRECISION)
    if UTILITY:
        y = tl.load(y_ptr + here, mask=live, other=0.0)
        rho = rounded(tl.load(rho_ptr + here, mask=live, other=0.0), PRECISION)
        g = rounded(tl.load(g_ptr + here, mask=live, other=0.0), PRECISION)
        dg = tl.zeros((ROWS, D), tl.float32)
    for part in tl.range(0, 3, num_stages=STAGES):
        dout = tl.load(dqkv_ptr + n[:, None] * 3 * D + part * D + d[None, :], mask=live, other=0.0)
        dy += times(dout, turned_ptr + part * D * D, d, d, D, PRECISION)
        if UTILITY:
            gate = tl.where(part == 0, rho, g)
            gated = dout.to(tl.float32) * gate
            dy += times(gated, turned_ptr + (3 + part) * D * D, d, d, D, PRECISION)
            dgate = dout * times(y, w_ptr + (3 + part) * D * D, d, d, D, PRECISION)
            dgate += times(dout, turned_ptr + (6 + part) * D * D, d, d, D, PRECISION)
            tl.store(drho_ptr + here, dgate * small, mask=live & (part == 0))
            dg += tl.where(part == 0, 0.0, dgate)
    if UTILITY:
        tl.store(dg_ptr + here, dg * small, mask=live)
    z, scale = standardised(tl.load(x_ptr + here, mask=live, other=0.0), D)
    to = parts_ptr + (2 * tl.program_id(0) + 1) * 2 * D
    dx = norm_backward(dy * small, z, scale, tl.load(norm_w + d), to, d, D)
    tl.store(dx_ptr + here, dx + tl.load(dres_ptr + here, mask=live, other=0.0), mask=live)


@triton.jit
def _project_weights(
    dqkv_ptr, y_ptr, rho_ptr, g_ptr, peak_ptr, parts_ptr, N,
    D: tl.constexpr, E: tl.constexpr, H: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    TURNS: tl.constexpr, TOTAL: tl.constexpr, UTILITY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of the gradients of W, W^u and U of queries, keys or values, over one share of the rows."""
    high: tl.constexpr = D // HIGH
    wide: tl.constexpr = D // WIDE
    split, part = tl.program_id(0), tl.program_id(1) // (high * wide)
    column = tl.program_id(1) % wide
    m = (tl.program_id(1) // wide) % high * HIGH + tl.arange(0, HIGH)
    k = column * WIDE + tl.arange(0, WIDE)
    dw = tl.zeros((HIGH, WIDE), tl.float32)
    dtwin = tl.zeros((HIGH, WIDE), tl.float32)
    du = tl.zeros((HIGH, HIGH), tl.float32)
    gate_ptr = g_ptr
    if part == 0:
        gate_ptr = rho_ptr
    for turn in tl.range(0, TURNS):
        n = (split * TURNS + turn) * ROWS + tl.arange(0, ROWS)
        live = (n < N)[:, None]
        dout = tl.load(dqkv_ptr + n[:, None] * 3 * D + part * D + m[None, :], mask=live, other=0.0)
        y = tl.load(y_ptr + n[:, None] * D + k[None, :], mask=live, other=0.0)
        dw += times_loaded(tl.trans(dout), y, PRECISION)
        if UTILITY:
            gate = tl.load(gate_ptr + n[:, None] * D + m[None, :], mask=live, other=0.0)
            dtwin += times_loaded(tl.trans(dout * gate), y, PRECISION)
            du += times_loaded(tl.trans(dout), gate, PRECISION)
    small = 1 / enlarged(peak_ptr, PRECISION)
    to = parts_ptr + split * TOTAL
    cell = m[:, None] * D + k[None, :]
    tl.store(to + part * D * D + cell, dw * small)
    if UTILITY:
        tl.store(to + (3 + part) * D * D + cell, dtwin * small)
        inside = (m[:, None] // E) * E * E + (m[:, None] % E) * E + m[None, :] % E
        own = ((m[:, None] // E) == (m[None, :] // E)) & (column == 0)
        tl.store(to + 6 * D * D + part * H * E * E + inside, du * small, mask=own)


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
    h = rounded(times_loaded(weight, v, PRECISION), PRECISION)
    tl.store(h_ptr + row[:, None] * D + head * E + e[None, :], h, mask=live)


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
    dv = times_loaded(tl.trans(kept), dh, PRECISION)
    tl.store(dqkv_ptr + 2 * D + at, rounded(dv, PRECISION), mask=live)
    dlogits = weight * (dweight - tl.sum(weight * dweight, 1)[:, None]) * SCALE
    dlogits = rounded(dlogits, PRECISION)
    dq, dk = times_loaded(dlogits, k, PRECISION), times_loaded(tl.trans(dlogits), q, PRECISION)
    tl.store(dqkv_ptr + at, rounded(dq, PRECISION), mask=live)
    tl.store(dqkv_ptr + D + at, rounded(dk, PRECISION), mask=live)


# ---------------------------------------------------------------- output, feed-forward


@triton.jit(do_not_specialize=["site"])
def _mix(
    h_ptr, x_ptr, w_ptr, out_b, norm_w, norm_b, b1_ptr, b2_ptr, seed_ptr, x1_ptr, y1_ptr, hidden_ptr, x2_ptr, N, site,
    D: tl.constexpr, F: tl.constexpr, BEFORE: tl.constexpr, ROWS: tl.constexpr, DROP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """BEFORE: matrices of (D, D) that lie before those of this kernel."""
    n, d, f = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, F)
    live = (n < N)[:, None]
    here = n[:, None] * D + d[None, :]
    out_w = w_ptr + BEFORE * D * D
    up = out_w + D * D
    h, x = tl.load(h_ptr + here, mask=live, other=0.0), tl.load(x_ptr + here, mask=live, other=0.0)
    w_out = tl.load(out_w + d[None, :] * D + d[:, None])
    w_up, w_down = tl.load(up + f[None, :] * D + d[:, None]), tl.load(up + D * F + d[None, :] * F + f[:, None])
    change = times_loaded(h, w_out, PRECISION) + tl.load(out_b + d)[None, :]
    if DROP > 0:
        change = dropped(change, seed_ptr, here, site + 1, DROP)
    x1 = x + change
    tl.store(x1_ptr + here, x1, mask=live)
    y1 = rounded(norm_rows(x1, norm_w, norm_b, d, D), PRECISION)
    tl.store(y1_ptr + here, y1, mask=live)
    hidden = times_loaded(y1, w_up, PRECISION) + tl.load(b1_ptr + f)[None, :]
    hidden = rounded(tl.maximum(hidden, 0.0), PRECISION)
    tl.store(hidden_ptr + n[:, None] * F + f[None, :], hidden, mask=live)
    change = times_loaded(hidden, w_down, PRECISION) + tl.load(b2_ptr + d)[None, :]
    if DROP > 0:
        change = dropped(change, seed_ptr, here, site + 2, DROP)
    tl.store(x2_ptr + here, x1 + change, mask=live)


@triton.jit(do_not_specialize=["site"])
def _mix_backward(
    d2_ptr, x1_ptr, hidden_ptr, turned_ptr, norm_w, seed_ptr, peak_ptr, e2_ptr, dhidden_ptr, dx1_ptr, e1_ptr, dh_ptr,
    parts_ptr, N, site,
    D: tl.constexpr, F: tl.constexpr, BEFORE: tl.constexpr, ROWS: tl.constexpr, DROP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """e2 and e1 are the gradients of what was added to the residual stream, before it was dropped."""
    n, d, f = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, F)
    live = (n < N)[:, None]
    here = n[:, None] * D + d[None, :]
    out_w = turned_ptr + BEFORE * D * D
    up = out_w + D * D
    large = enlarged(peak_ptr, PRECISION)
    d2, x1 = tl.load(d2_ptr + here, mask=live, other=0.0), tl.load(x1_ptr + here, mask=live, other=0.0)
    hidden = tl.load(hidden_ptr + n[:, None] * F + f[None, :], mask=live, other=0.0)
    w_down, w_up = tl.load(up + D * F + f[None, :] * D + d[:, None]), tl.load(up + d[None, :] * F + f[:, None])
    w_out = tl.load(out_w + d[None, :] * D + d[:, None])
    e2 = d2
    if DROP > 0:
        e2 = dropped(d2, seed_ptr, here, site + 2, DROP)
    e2 = rounded(e2 * large, PRECISION)
    tl.store(e2_ptr + here, e2, mask=live)
    dhidden = times_loaded(e2, w_down, PRECISION)
    dhidden = rounded(tl.where(hidden > 0, dhidden, 0.0), PRECISION)
    tl.store(dhidden_ptr + n[:, None] * F + f[None, :], dhidden, mask=live)
    dy = times_loaded(dhidden, w_up, PRECISION) / large
    z, scale = standardised(x1, D)
    gamma = tl.load(norm_w + d)
    dx1 = d2 + norm_backward(dy, z, scale, gamma, parts_ptr + tl.program_id(0) * 4 * D, d, D)
    tl.store(dx1_ptr + here, dx1, mask=live)
    e1 = dx1
    if DROP > 0:
        e1 = dropped(dx1, seed_ptr, here, site + 1, DROP)
    e1 = rounded(e1 * large, PRECISION)
    tl.store(e1_ptr + here, e1, mask=live)
    dh = times_loaded(e1, w_out, PRECISION)
    tl.store(dh_ptr + here, rounded(dh, PRECISION), mask=live)
