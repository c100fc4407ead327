"""Attention of one step over the cached keys and values of its streams (Triton).

A stream has a row for each of its heads. `transformer_step` in `acting.py` starts loading keys during the projections,
and attends once the queries are computed.

Shapes: D width, H heads, E head size, S capacity.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from uat.engines.triton.parts import exp2, late, put, rounded, times_loaded
from uat.engines.triton.tensor_core_layout import COLUMNS, load_keys, load_values

NEVER = tl.constexpr(-1e30)
"""The logit of masked steps."""


@triton.jit
def _past(
    ptr, r, s, across, seat, seats, length, most, S,
    H: tl.constexpr, E: tl.constexpr, EVEN: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Load keys (D, S) (TURNED) or values (S, D) of the steps s of stream r."""
    there = s < (tl.where(r < seats, most, 0) if EVEN else tl.max(tl.where(seat == r, length, 0), 0))
    at = r * H * S * E + across
    if TURNED:
        found = tl.load(ptr + at[:, None] + s[None, :] * E, mask=there[None, :], other=0.0)
    else:
        found = tl.load(ptr + at[None, :] + s[:, None] * E, mask=there[:, None], other=0.0)
    return found


@triton.jit
def _look(
    q, keys_ptr, values_ptr, begin, across, seat, seats, length, most, top, mass, mixed, S,
    H: tl.constexpr, E: tl.constexpr, REAL: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to a chunk of every stream's past: return the maximum logit, the sum of weights and the weighted values of
    each row.

    Each stream's keys are multiplied with the queries of all streams, and its own rows are selected: a product has this
    number of rows anyway. Logits are to base two."""
    s = begin + tl.arange(0, CHUNK)
    logits = tl.full((ROWS, CHUNK), -float("inf"), tl.float32)
    for r in tl.range(0, REAL, num_stages=STAGES):
        k_DS = _past(keys_ptr, r, s, across, seat, seats, length, most, S, H, E, EVEN, True)
        logits = tl.where((seat == r)[:, None], times_loaded(q, k_DS, PRECISION), logits)
    logits = tl.where(s[None, :] < length[:, None], logits, -float("inf"))
    higher = tl.maximum(top, tl.max(logits, 1))
    weight, fade = exp2(logits - higher[:, None]), exp2(top - higher)
    mass = mass * fade + tl.sum(weight, 1)
    mixed = mixed * fade[:, None]
    weight = rounded(weight, PRECISION)
    for r in tl.range(0, REAL, num_stages=STAGES):
        v_SD = _past(values_ptr, r, s, across, seat, seats, length, most, S, H, E, EVEN, False)
        mixed = tl.where((seat == r)[:, None], mixed + times_loaded(weight, v_SD, PRECISION), mixed)
    return higher, mass, mixed


@triton.jit
def _weighed(top_a, total_a, top_b, total_b):
    """Return the larger of two logits, and the sum of weights relative to it."""
    top = tl.maximum(top_a, top_b)
    return top, total_a * exp2(top_a - top) + total_b * exp2(top_b - top)


@triton.jit
def _own_and_past(own_a, top_a, total_a, own_b, top_b, total_b):
    top, total = _weighed(top_a, total_a, top_b, total_b)
    return own_a + own_b, top, total


@triton.jit
def pasts(
    ptr, s, across, seat, seats, length, most, S,
    D: tl.constexpr, H: tl.constexpr, E: tl.constexpr, REAL: tl.constexpr, CHUNK: tl.constexpr,
    PAST_IN_LAYOUT: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Start loading keys or values of every stream."""
    found = ()
    for r in tl.static_range(REAL):
        if PAST_IN_LAYOUT and KEYS:
            found += (load_keys(ptr + r * D * CHUNK, tl.where(r < seats, most, 0), D, CHUNK),)
        elif PAST_IN_LAYOUT:
            found += (load_values(ptr + r * D * CHUNK, tl.where(r < seats, most, 0), D, CHUNK),)
        else:
            found += (_past(ptr, r, s, across, seat, seats, length, most, S, H, E, False, KEYS),)
    return found


@triton.jit
def _arrived(asked, REAL: tl.constexpr, PAST_IN_LAYOUT: tl.constexpr):
    found = asked
    if not PAST_IN_LAYOUT:
        found = ()
        for r in tl.static_range(REAL):
            found += (late(asked[r]),)
    return found


@triton.jit
def _look_at_once(
    q, k, v, keys, values_ptr, across, seat, seats, length, most, S,
    D: tl.constexpr, H: tl.constexpr, E: tl.constexpr, REAL: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    PAST_IN_LAYOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to a past of a single chunk for few streams, whose keys or values fit in registers: all loads start before
    any is needed. k, v: key and value of this step."""
    s = tl.arange(0, CHUNK)
    if REAL <= 2:
        values = pasts(values_ptr, s, across, seat, seats, length, most, S, D, H, E, REAL, CHUNK, PAST_IN_LAYOUT, False)
    keys = _arrived(keys, REAL, PAST_IN_LAYOUT)
    own = q * k
    q = rounded(q, PRECISION)
    logits = times_loaded(q, keys[0], PRECISION)
    for r in tl.static_range(1, REAL):
        logits = tl.where((seat == r)[:, None], times_loaded(q, keys[r], PRECISION), logits)
    if REAL > 2:  # registers cannot hold both
        values = pasts(values_ptr, s, across, seat, seats, length, most, S, D, H, E, REAL, CHUNK, PAST_IN_LAYOUT, False)
    logits = tl.where(s[None, :] < length[:, None], logits, NEVER)
    # each thread computes weights of its own steps; then all use the common maximum, which is one more factor
    columns: tl.constexpr = min(CHUNK, COLUMNS)
    wide: tl.constexpr = CHUNK // columns
    some = tl.reshape(logits, (ROWS, wide, columns // 2, 2))
    top = tl.max(tl.max(some, 3), 1)
    weight = exp2(some - top[:, None, :, None])
    total = tl.sum(tl.sum(weight, 3), 1)
    if CHUNK == D:
        own = tl.sum(tl.sum(tl.reshape(own, (ROWS, wide, columns // 2, 2)), 3), 1)
        own, higher, total = tl.reduce((own, top, total), 1, _own_and_past)
    else:
        own = tl.sum(own, 1)
        higher, total = tl.reduce((top, total), 1, _weighed)
    highest = tl.maximum(own, higher)
    fade, factor = exp2(own - highest), exp2(top - highest[:, None])
    weight = tl.reshape(weight * factor[:, None, :, None], (ROWS, CHUNK))
    mass, own = fade + total * exp2(higher - highest), v * fade[:, None]
    weight = rounded(weight, PRECISION)
    values = _arrived(values, REAL, PAST_IN_LAYOUT)
    mixed = own + times_loaded(weight, values[0], PRECISION)
    for r in tl.static_range(1, REAL):
        mixed = tl.where((seat == r)[:, None], own + times_loaded(weight, values[r], PRECISION), mixed)
    return mass, mixed


@triton.jit
def look_back(
    q, k, v, keys, keys_ptr, values_ptr, key_cell, value_cell, mine, across, seat, seats, length, most, S,
    D: tl.constexpr, H: tl.constexpr, E: tl.constexpr, REAL: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    STAGES: tl.constexpr, SINGLE: tl.constexpr, AT_ONCE: tl.constexpr, PAST_IN_LAYOUT: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to the past and this step; return the sum of weights and the unnormalised values of each row's head. Write
    this step's key and value to the cache, where `mine`. AT_ONCE: whether `keys` are already loading."""
    if PAST_IN_LAYOUT:
        put(keys_ptr + key_cell, rounded(k, PRECISION), mine)
        put(values_ptr + value_cell, rounded(v, PRECISION), mine)
    else:
        tl.store(keys_ptr + key_cell, rounded(k, PRECISION), mask=mine)
        tl.store(values_ptr + value_cell, rounded(v, PRECISION), mask=mine)
    if AT_ONCE:
        mass, mixed = _look_at_once(
            q, k, v, keys, values_ptr, across, seat, seats, length, most,
            S, D, H, E, REAL, ROWS, CHUNK, PAST_IN_LAYOUT, PRECISION,
        )  # fmt: skip
    else:  # this step's key and value first, then the past
        top, mass, mixed = tl.sum(q * k, 1), tl.full((ROWS,), 1.0, tl.float32), v
        q = rounded(q, PRECISION)
        if SINGLE:
            top, mass, mixed = _look(
                q, keys_ptr, values_ptr, 0, across, seat, seats, length, most, top, mass, mixed,
                S, H, E, REAL, ROWS, CHUNK, STAGES, EVEN, PRECISION,
            )  # fmt: skip
        else:
            begin = most * 0
            while begin < most:
                top, mass, mixed = _look(
                    q, keys_ptr, values_ptr, begin, across, seat, seats, length, most, top, mass, mixed,
                    S, H, E, REAL, ROWS, CHUNK, 1, EVEN, PRECISION,
                )  # fmt: skip
                begin += CHUNK
    return mass, mixed
