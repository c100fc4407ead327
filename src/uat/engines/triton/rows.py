"""Row-wise operations between one attention and the next, forward and backward (Triton).

Forward, for the previous block (MIX) and for the next block (PROJECT):

  x1 = x + drop(W_o h + b_o); x2 = x1 + drop(W_2 relu(W_1 LN(x1) + b_1) + b_2)
  y = LN(x2); q, k, v = W y + gate ⊙ (W^u y) + U gate

Backward, from the attention of the block above down to that of the block below. `block.py` launches both. For each
norm, z (its rows before scale and bias) and the factor that normalised them are stored for the backward pass.

Shapes: N rows, D width, F feed-forward. Matrices lie side by side: SQUARES of (D, D), then W_1 and W_2.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from uat.engines.triton.parts import (
    enlarged,
    read,
    rectified,
    rounded,
    scaled,
    standardised,
    thinned,
    through_norm,
    times,
    write,
)


@triton.jit(do_not_specialize=["site"])
def rows_forward(
    x_ptr, h_ptr, mix_ptr, out_b, ff_norm_w, ff_norm_b, b1_ptr, b2_ptr, seed_ptr, z1_ptr, scale1_ptr, hidden_ptr,
    x2_ptr, norm_w, norm_b, project_ptr, rho_ptr, g_ptr, z_ptr, scale_ptr, qkv_ptr, N, site,
    D: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr, SQUARES: tl.constexpr, ROWS: tl.constexpr,
    DROP: tl.constexpr, MIX: tl.constexpr, PROJECT: tl.constexpr, UTILITY: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    n, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    live, seed = (n < N)[:, None], tl.load(seed_ptr)
    here = n[:, None] * D + d[None, :]
    x = read(x_ptr + here, live)
    if MIX:
        out_w = mix_ptr + (SQUARES - 1) * D * D
        up = out_w + D * D
        change = times(read(h_ptr + here, live), out_w, d, d, D, PRECISION) + tl.load(out_b + d)[None, :]
        x += thinned(change, seed, n, d, site + 1, DROP)
        y1 = _normed(x, ff_norm_w, ff_norm_b, z1_ptr + here, scale1_ptr + n, n < N, d, D, PRECISION)
        change = tl.zeros((ROWS, D), tl.float32)
        for block in tl.range(0, F // BLOCK, num_stages=STAGES):
            f = block * BLOCK + tl.arange(0, BLOCK)
            hidden = times(y1, up, f, d, D, PRECISION) + tl.load(b1_ptr + f)[None, :]
            hidden = rectified(hidden, PRECISION)
            write(hidden_ptr + n[:, None] * F + f[None, :], hidden, live)
            change += times(hidden, up + D * F, d, f, F, PRECISION)
        change += tl.load(b2_ptr + d)[None, :]
        x += thinned(change, seed, n, d, site + 2, DROP)
        write(x2_ptr + here, x, live)
    if PROJECT:
        y = _normed(x, norm_w, norm_b, z_ptr + here, scale_ptr + n, n < N, d, D, PRECISION)
        for part in tl.range(0, 3, num_stages=STAGES):
            out = times(y, project_ptr + part * D * D, d, d, D, PRECISION)
            if UTILITY:
                gate = rounded(read(tl.where(part == 0, rho_ptr, g_ptr) + here, live), PRECISION)
                out += gate * times(y, project_ptr + (3 + part) * D * D, d, d, D, PRECISION)
                out += times(gate, project_ptr + (6 + part) * D * D, d, d, D, PRECISION)
            write(qkv_ptr + n[:, None] * 3 * D + part * D + d[None, :], rounded(out, PRECISION), live)


@triton.jit
def _normed(x, w_ptr, b_ptr, z_ptr, scale_ptr, live, d, D: tl.constexpr, PRECISION: tl.constexpr):
    """Return the LayerNorm of each row, rounded for products. Write data of the backward pass to `z_ptr` and
    `scale_ptr`."""
    z, scale = standardised(x, D)
    write(z_ptr, rounded(z, PRECISION), live[:, None])
    write(scale_ptr, scale, live)
    return rounded(z * tl.load(w_ptr + d)[None, :] + tl.load(b_ptr + d)[None, :], PRECISION)


@triton.jit(do_not_specialize=["site"])
def rows_backward(
    d2_ptr, dqkv_ptr, z_ptr, scale_ptr, dres_ptr, norm_w, norm_b, project_ptr, rho_ptr, g_ptr, drho_ptr, dg_ptr,
    z1_ptr, scale1_ptr, hidden_ptr, ff_norm_w, mix_ptr, seed_ptr, peak_ptr, e2_ptr, dhidden_ptr, dx1_ptr, e1_ptr,
    dh_ptr, dx_ptr, N, site,
    D: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr, SQUARES: tl.constexpr, ROWS: tl.constexpr,
    DROP: tl.constexpr, MIX: tl.constexpr, PROJECT: tl.constexpr, UTILITY: tl.constexpr, TOP: tl.constexpr,
    ENLARGED: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    live, seed = (n < N)[:, None], tl.load(seed_ptr)
    here = n[:, None] * D + d[None, :]
    total: tl.constexpr = SQUARES * D * D + 2 * D * F
    large = enlarged(peak_ptr, PRECISION)
    small = 1.0 / large
    if PROJECT:
        # back through the projections, the norm and the residual stream; weights of the next part load while these
        # are used
        turned_ptr = project_ptr + total
        dy = tl.zeros((ROWS, D), tl.float32)
        if UTILITY:
            unit = small
            if ENLARGED:
                unit = 1.0
            y = read(z_ptr + here, live).to(tl.float32) * tl.load(norm_w + d)[None, :] + tl.load(norm_b + d)[None, :]
            y = rounded(y, PRECISION)
            if STAGES == 1:  # if gates cannot load while others are used, registers hold both
                rho = rounded(read(rho_ptr + here, live), PRECISION)
                g = rounded(read(g_ptr + here, live), PRECISION)
            dg = tl.zeros((ROWS, D), tl.float32)
            drho = _narrowed(dg, ENLARGED)
        for part in tl.range(0, 3, num_stages=STAGES):
            dout = read(dqkv_ptr + n[:, None] * 3 * D + part * D + d[None, :], live)
            dy += times(dout, turned_ptr + part * D * D, d, d, D, PRECISION)
            if UTILITY:
                if STAGES == 1:
                    gate = tl.where(part == 0, rho, g)
                else:
                    gate = rounded(read(tl.where(part == 0, rho_ptr, g_ptr) + here, live), PRECISION)
                dy += times(scaled(dout, gate, PRECISION), turned_ptr + (3 + part) * D * D, d, d, D, PRECISION)
                dgate = dout * times(y, project_ptr + (3 + part) * D * D, d, d, D, PRECISION)
                dgate = (dgate + times(dout, turned_ptr + (6 + part) * D * D, d, d, D, PRECISION)) * unit
                drho = tl.where(part == 0, _narrowed(dgate, ENLARGED), drho)
                dg += tl.where(part == 0, 0.0, dgate)
        if UTILITY:
            if not TOP:  # the blocks share their rho
                drho = _narrowed(drho.to(tl.float32) + read(drho_ptr + here, live), ENLARGED)
            write(drho_ptr + here, drho, live)
            write(dg_ptr + here, _narrowed(dg, ENLARGED), live)
        z, scale = read(z_ptr + here, live).to(tl.float32), read(scale_ptr + n, n < N)
        d2 = read(dres_ptr + here, live) + through_norm(dy, z, scale * small, tl.load(norm_w + d), D)
    else:
        d2 = read(d2_ptr + here, live)
    if MIX:
        # e2 and e1 are the gradients of the additions to the residual stream, before dropout
        out_w = mix_ptr + total + (SQUARES - 1) * D * D
        up = out_w + D * D
        e2 = rounded(thinned(d2, seed, n, d, site + 2, DROP, large), PRECISION)
        write(e2_ptr + here, e2, live)
        dy = tl.zeros((ROWS, D), tl.float32)
        for block in tl.range(0, F // BLOCK, num_stages=STAGES):
            f = block * BLOCK + tl.arange(0, BLOCK)
            hidden = read(hidden_ptr + n[:, None] * F + f[None, :], live)
            dhidden = times(e2, up + D * F, f, d, D, PRECISION)
            dhidden = rounded(tl.where(hidden > 0, dhidden, 0.0), PRECISION)
            write(dhidden_ptr + n[:, None] * F + f[None, :], dhidden, live)
            dy += times(dhidden, up, d, f, F, PRECISION)
        z, scale = read(z1_ptr + here, live).to(tl.float32), read(scale1_ptr + n, n < N)
        d2 += through_norm(dy, z, scale * small, tl.load(ff_norm_w + d), D)
        write(dx1_ptr + here, d2, live)
        e1 = rounded(thinned(d2, seed, n, d, site + 1, DROP, large), PRECISION)
        write(e1_ptr + here, e1, live)
        write(dh_ptr + here, rounded(times(e1, out_w, d, d, D, PRECISION), PRECISION), live)
    else:
        write(dx_ptr + here, d2, live)


@triton.jit
def _narrowed(x, HALF: tl.constexpr):
    """Round to the dtype in which gradients of gates are stored."""
    return rounded(x, "half") if HALF else x
