"""One step of a program's streams, from the observation to the action: the parts of `_step` and `_play` (Triton).

Everything is in registers, and a stream has one row per head, all identical. Warps share rows: they synchronise at
every sum along a row, and before each product for its left factor.

Shapes: D width, H heads, E head size, S capacity, F feed-forward, U utility width, L layers, A actions, J width of an
action's embedding.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from uat.engines.triton.parts import (
    LOG2_E,
    diagonal,
    fetched,
    fetched_some,
    inverse,
    late,
    normed_at_once,
    rectified,
    rounded,
    tanh,
    times,
    times_loaded,
    times_some,
)
from uat.engines.triton.past import look_back, pasts
from uat.engines.triton.tensor_core_layout import key_place, load_block_diagonal, load_matrix, value_place

SMALL = tl.constexpr(64 * 64)
"""Largest float32 matrix, in weights, that is loaded into registers ahead of its use."""


@triton.jit
def _asked(w, PART: tl.constexpr, D: tl.constexpr, E: tl.constexpr, UTILITY: tl.constexpr):
    """Start loading W, W^u and U of queries, keys or values."""
    found = (load_matrix(w + PART * D * D, D, D),)
    if UTILITY:
        found += (load_matrix(w + (3 + PART) * D * D, D, D), load_block_diagonal(w + (6 + PART) * D * D, D, E))
    return found


@triton.jit
def _projected(y, gate, weights, PRECISION: tl.constexpr, UTILITY: tl.constexpr):
    out = times_loaded(y, weights[0], PRECISION)
    if UTILITY:
        out += gate * times_loaded(y, weights[1], PRECISION)
        out += times_loaded(gate, weights[2], PRECISION)
    return out


@triton.jit
def encoding(
    encode_w, encode_b, d,
    WIDTH: tl.constexpr, WIDTH_ROOM: tl.constexpr, ENCODE: tl.constexpr,
):  # fmt: skip
    """Load W^E and its bias, if observations are vectors."""
    weight, bias = d, d
    if ENCODE == "map":
        o = tl.arange(0, WIDTH_ROOM)
        weight = tl.load(encode_w + d[None, :] * WIDTH + o[:, None], mask=(o < WIDTH)[:, None], other=0.0)
        bias = tl.load(encode_b + d)
    return weight, bias


@triton.jit
def embed(seen, weight, bias, encode_w, d, D: tl.constexpr, ENCODE: tl.constexpr, OUTSIDE: tl.constexpr):
    """Compute W^E o of an observation: a vector, ids, or an embedding computed outside."""
    x = seen
    if ENCODE == "map":
        x = times_loaded(seen, weight, OUTSIDE) + bias[None, :]
    elif ENCODE == "ids":
        x = tl.load(encode_w + seen[:, None] * D + d[None, :], mask=(seen >= 0)[:, None], other=0.0)
    return x


@triton.jit
def place(x, position, norm_w, norm_b, d, D: tl.constexpr, PRECISION: tl.constexpr):
    """Add the embedding of the position and apply the first norm."""
    return normed_at_once(x + position, tl.load(norm_w + d), tl.load(norm_b + d), D, PRECISION)


@triton.jit
def look_up(action, table_ptr, j, J: tl.constexpr):
    """Load f_a(a), or zeros if there was no action."""
    known = (action >= 0)[:, None] & (j < J)[None, :]
    return fetched_some(table_ptr + action[:, None] * J + j[None, :], known)


@triton.jit
def utility_weights(
    w1_ptr, w2_ptr, regime_ptr, d,
    J: tl.constexpr, J_ROOM: tl.constexpr, HIDDEN: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """Load the weights of `utility_step` in advance, if they are small enough."""
    j, unit, u = tl.arange(0, J_ROOM), tl.arange(0, HIDDEN), tl.arange(0, U)
    w1 = tl.load(w1_ptr + unit[None, :] * (J + 1) + j[:, None], mask=(j <= J)[:, None], other=0.0)
    w2 = tl.load(w2_ptr + u[None, :] * HIDDEN + unit[:, None])
    return w1, w2, tl.load(regime_ptr + d[None, :] * U + u[:, None])


@triton.jit
def utility_step(
    code, reward, before, first, weights, w1_ptr, w2_ptr, regime_ptr, d,
    J: tl.constexpr, J_ROOM: tl.constexpr, HIDDEN: tl.constexpr, U: tl.constexpr, DECAY: tl.constexpr,
    READ: tl.constexpr, OUTSIDE: tl.constexpr,
):  # fmt: skip
    """Compute u, the regime state and its gate from feedback: `code` is f_a(a), and the reward r.

    READ: whether the weights are loaded; otherwise each is read when needed, if shared memory cannot hold them all.
    """
    j, unit, u = tl.arange(0, J_ROOM), tl.arange(0, HIDDEN), tl.arange(0, U)
    code = tl.where(j[None, :] == J, reward[:, None], code)  # [f_a(a); r]
    if READ:
        w1, w2, regime = weights
        now = times_loaded(tl.maximum(times_loaded(code, w1, OUTSIDE), 0.0), w2, OUTSIDE)
    else:
        now = tl.maximum(times_some(code, w1_ptr, unit, j, J + 1, OUTSIDE), 0.0)
        now = times(now, w2_ptr, u, unit, HIDDEN, OUTSIDE)
    ubar = DECAY * tl.where(first[:, None], 0.0, before) + (1 - DECAY) * now
    rho = times_loaded(ubar, regime, OUTSIDE) if READ else times(ubar, regime_ptr, d, u, U, OUTSIDE)
    return now, ubar, tanh(rho)


@triton.jit
def transformer_step(
    x, now, rho, length, seat, start, live, row, d,
    matrices_ptr, vectors_ptr, token_ptr, kv_ptr, B, S, KV,
    D: tl.constexpr, H: tl.constexpr, E: tl.constexpr, F: tl.constexpr, L: tl.constexpr, SCALE: tl.constexpr,
    REAL: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    SINGLE: tl.constexpr, EVEN: tl.constexpr, IN_LAYOUT: tl.constexpr, AT_ONCE: tl.constexpr, UTILITY: tl.constexpr,
    PRECISION: tl.constexpr, OUTSIDE: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """Compute all layers and the last norm, h of this step, and write its keys and values to the cache.

    length: number of earlier steps. EVEN: whether it is the same for all streams.
    IN_LAYOUT: whether matrices are stored in tensor core layout, and loaded into registers ahead of their use.
    """
    f, u = tl.arange(0, F), tl.arange(0, U)
    most, seats = tl.max(length, 0), B - start
    head = (row % H)[:, None] == d[None, :] // E  # the entries of a row that belong to its own head
    mine = head & live[:, None]
    across = (d // E) * S * E + d % E
    PAST_IN_LAYOUT: tl.constexpr = AT_ONCE and EVEN
    if PAST_IN_LAYOUT:
        key_cell = seat[:, None] * D * CHUNK + key_place(d[None, :], length[:, None], D, CHUNK)
        value_cell = seat[:, None] * D * CHUNK + value_place(d[None, :], length[:, None], D)
    else:
        key_cell = seat[:, None] * H * S * E + across[None, :] + length[:, None] * E
        value_cell = key_cell
    square = d[None, :] * D + d[:, None]
    small: tl.constexpr = U * D <= SMALL
    token = d[None, :] * U + u[:, None]
    diagonals: tl.constexpr = 3 * D * D if IN_LAYOUT else 3 * H * E * E
    projections: tl.constexpr = 6 * D * D + diagonals if UTILITY else 3 * D * D
    each: tl.constexpr = projections + D * D + 2 * F * D

    w, vectors, all_keys = matrices_ptr, vectors_ptr, tl.cast(KV, tl.int64)
    keys_ptr = kv_ptr + tl.cast(start, tl.int64) * H * S * E  # offset of these streams; offsets within them fit 32 bits
    norm_1w, norm_1b = fetched(vectors + d), fetched(vectors + D + d)
    for layer in tl.range(0, L, num_stages=1):
        # start all loads before they are needed: waiting for each would cost as much as a product
        rest = w + projections
        up = rest + D * D
        down = up + F * D
        g, keys = x, ()
        if IN_LAYOUT:
            for_q, for_k = _asked(w, 0, D, E, UTILITY), _asked(w, 1, D, E, UTILITY)
        if UTILITY and small and IN_LAYOUT:
            w_token = load_matrix(token_ptr + layer * D * U, U, D)
        elif UTILITY and small:
            w_token = tl.load(token_ptr + layer * D * U + token)
        y = normed_at_once(x, norm_1w, norm_1b, D, PRECISION)
        if UTILITY and small:
            g = tanh(times_loaded(now, w_token if IN_LAYOUT else late(w_token), OUTSIDE))
        elif UTILITY:
            g = tanh(times_loaded(now, tl.load(token_ptr + layer * D * U + token), OUTSIDE))

        # projections
        if IN_LAYOUT:
            y = rounded(y, PRECISION)
            for_v = _asked(w, 2, D, E, UTILITY)
            q = _projected(y, rho, for_q, PRECISION, UTILITY)
            if AT_ONCE:
                s = tl.arange(0, CHUNK)
                keys = pasts(
                    keys_ptr, s, across, seat, seats, length, most, S, D, H, E, REAL, CHUNK, PAST_IN_LAYOUT, True
                )
            k = _projected(y, g, for_k, PRECISION, UTILITY)
            v = _projected(y, g, for_v, PRECISION, UTILITY)
            w_out = load_matrix(rest, D, D)
        else:  # in one loop, so that the next weights load while these are used
            q, k, v = y, y, y
            for part in tl.range(0, 3, num_stages=STAGES):
                out = times_loaded(y, tl.load(w + part * D * D + square), PRECISION)
                if UTILITY:
                    gate = tl.where(part == 0, rho, g)
                    out += gate * times_loaded(y, tl.load(w + (3 + part) * D * D + square), PRECISION)
                    u_DD = diagonal(w + 6 * D * D + part * H * E * E, d, E)
                    out += times_loaded(gate, u_DD, PRECISION)
                q = tl.where(part == 0, out, q)
                k = tl.where(part == 1, out, k)
                v = out
            w_out = tl.load(rest + square)
        out_b, down_b = tl.load(vectors + 2 * D + d), tl.load(vectors + 5 * D + d)
        norm_2w, norm_2b = tl.load(vectors + 3 * D + d), tl.load(vectors + 4 * D + d)
        blocks, block = tl.arange(0, F // BLOCK), tl.arange(0, BLOCK)
        if IN_LAYOUT:
            up_b = fetched(vectors + 6 * D + f)
        else:
            up_b = tl.load(vectors + 6 * D + blocks[:, None] * BLOCK + block[None, :])

        # attention; each head of a stream has a row, from which the other rows get it
        mass, mixed = look_back(
            tl.where(head, q * (SCALE * LOG2_E), 0.0), k, v, keys, keys_ptr, keys_ptr + all_keys, key_cell, value_cell,
            mine, across, seat, seats, length, most, S,
            D, H, E, REAL, ROWS, CHUNK, STAGES, SINGLE, AT_ONCE, PAST_IN_LAYOUT, EVEN, PRECISION,
        )  # fmt: skip
        if IN_LAYOUT:
            w_up = load_matrix(up, D, F)
        h = tl.where(head, mixed * inverse(mass)[:, None], 0.0)
        h = tl.sum(tl.reshape(h, (ROWS // H, H, D)), 1)
        h = tl.reshape(tl.broadcast_to(h[:, None, :], (ROWS // H, H, D)), (ROWS, D))

        # output, feed-forward: all hidden units at once if registers can hold the weights, else a block at a time
        vectors += 6 * D + F
        norm_1w, norm_1b = fetched(vectors + d), fetched(vectors + D + d)
        x += times_loaded(h, w_out if IN_LAYOUT else late(w_out), PRECISION) + out_b[None, :]
        if IN_LAYOUT:
            w_down = load_matrix(down, F, D)
        y = normed_at_once(x, norm_2w, norm_2b, D, PRECISION)
        if IN_LAYOUT:
            hidden = rectified(times_loaded(y, w_up, PRECISION) + up_b[None, :], PRECISION)
            change = times_loaded(hidden, w_down, PRECISION)
        else:
            change = tl.zeros((ROWS, D), tl.float32)
            for part in tl.range(0, F // BLOCK, num_stages=STAGES):
                b = part * BLOCK + block
                hidden = times_loaded(y, tl.load(up + b[None, :] * D + d[:, None]), PRECISION)
                hidden += tl.sum(tl.where((blocks == part)[:, None], up_b, 0.0), 0)[None, :]
                change += times_loaded(tl.maximum(hidden, 0.0), tl.load(down + d[None, :] * F + b[:, None]), PRECISION)
        x += change + down_b[None, :]
        keys_ptr += 2 * all_keys
        w += each
    # loaded again: values carried out of the loop would be distributed over threads differently
    return normed_at_once(x, fetched(vectors + d), fetched(vectors + D + d), D, PRECISION)


@triton.jit
def scoring(head_w, head_b, d, a, A: tl.constexpr, D: tl.constexpr):
    """Load the weights of `score`."""
    weight_DA = tl.load(head_w + a[None, :] * D + d[:, None], mask=(a < A)[None, :], other=0.0)
    return weight_DA, tl.load(head_b + a, mask=a < A, other=0.0)


@triton.jit
def score(x, weights, OUTSIDE: tl.constexpr):
    """Compute the logits."""
    weight_DA, bias_A = weights
    return times_loaded(x, weight_DA, OUTSIDE) + bias_A[None, :]


@triton.jit
def draw(gumbel_ptr, gumbel_stride, stream, alive, a, A: tl.constexpr, SAMPLED: tl.constexpr):
    """Load Gumbel noise for `pick`, if actions are sampled."""
    drawn = a[None, :].to(tl.float32)
    if SAMPLED:
        at = gumbel_ptr + stream[:, None] * gumbel_stride + a[None, :]
        drawn = fetched_some(at, alive & (a < A)[None, :])
    return drawn


@triton.jit
def pick(logits, drawn, a, A: tl.constexpr, SAMPLED: tl.constexpr):
    """Return the arg-max, which with Gumbel noise is a sample. Logits that are NaN also give a valid action."""
    if SAMPLED:
        logits += drawn
    logits = tl.where((a < A)[None, :], logits, -float("inf"))
    return tl.minimum(tl.argmax(logits, 1), A - 1)
