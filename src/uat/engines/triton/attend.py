"""Causal attention over whole episodes, forward and backward, one program per episode and head (Triton).

Logits and weights are never stored: the backward pass recomputes them from queries and keys.

Shapes: N rows (B episodes of T steps), D width, H heads, E head size.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import Any, cast

import triton
import triton.language as tl
from torch import Tensor

from uat.engines.triton.complete_weights import room
from uat.engines.triton.parts import LOG2_E, exp2, inverse, kept, read, rounded, thinned, times_loaded, write

LONGEST = 128
"""Longest episode that fits into one program."""


def attend(
    qkv_N3D: Tensor,
    h_ND: Tensor,
    seed: Tensor,
    site: int,
    shape: tuple[int, int],
    heads: int,
    drop: float,
    precision: str,
) -> None:
    """Write h = softmax(q k^T / √E) v to h_ND. shape: (B, T)."""
    sizes = _sizes(h_ND, shape[1], heads, drop, precision)
    cast(Any, _attend)[(shape[0] * heads,)](qkv_N3D, h_ND, seed, shape[1], site, **sizes)


def attend_backward(
    qkv_N3D: Tensor, dh_ND: Tensor, dqkv_N3D: Tensor, seed: Tensor, site: int, shape: tuple[int, int], heads: int,
    drop: float, precision: str,
) -> None:  # fmt: skip
    """Write the gradient of queries, keys and values to dqkv_N3D."""
    sizes = _sizes(dh_ND, shape[1], heads, drop, precision)
    cast(Any, _attend_backward)[(shape[0] * heads,)](qkv_N3D, dh_ND, dqkv_N3D, seed, shape[1], site, **sizes)


def _sizes(h_ND: Tensor, steps: int, heads: int, drop: float, precision: str) -> dict[str, Any]:
    d, filled = h_ND.shape[1], room(steps)
    sizes = {"D": d, "H": heads, "E": d // heads, "ROOM": filled, "SCALE": (d // heads) ** -0.5}
    return {**sizes, "DROP": drop, "PRECISION": precision, "num_warps": 4 if filled <= 64 else 8}


@triton.jit
def _places(T, D: tl.constexpr, H: tl.constexpr, E: tl.constexpr, ROOM: tl.constexpr):
    """Return the steps of this program's episode, their mask, and the offsets of its head in h and in qkv."""
    t, e = tl.arange(0, ROOM), tl.arange(0, E)
    row, column = tl.program_id(0) // H * T + t, tl.program_id(0) % H * E + e
    return t, (t < T)[:, None], row[:, None] * D + column[None, :], row[:, None] * 3 * D + column[None, :]


@triton.jit
def _causal(q, k, t, SCALE: tl.constexpr, PRECISION: tl.constexpr):
    """Return the unnormalised causal softmax, and the factors that normalise its rows."""
    logits = times_loaded(q, tl.trans(k), PRECISION)
    logits = tl.where(t[None, :] <= t[:, None], logits, -float("inf"))
    weight = exp2((logits - tl.max(logits, 1)[:, None]) * (SCALE * LOG2_E))
    return weight, inverse(tl.sum(weight, 1))


@triton.jit(do_not_specialize=["site"])
def _attend(
    qkv_ptr, h_ptr, seed_ptr, T, site,
    D: tl.constexpr, H: tl.constexpr, E: tl.constexpr, ROOM: tl.constexpr, SCALE: tl.constexpr, DROP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    seed = tl.load(seed_ptr)
    t, live, here, at = _places(T, D, H, E, ROOM)
    q, k, v = read(qkv_ptr + at, live), read(qkv_ptr + D + at, live), read(qkv_ptr + 2 * D + at, live)
    weight, scale = _causal(q, k, t, SCALE, PRECISION)
    if DROP > 0:
        weight = tl.where(kept(seed, tl.program_id(0) * ROOM + t, t, site, DROP), weight, 0.0)
        scale *= 1 / (1 - DROP)
    h = rounded(times_loaded(weight, v, PRECISION) * scale[:, None], PRECISION)
    write(h_ptr + here, h, live)


@triton.jit(do_not_specialize=["site"])
def _attend_backward(
    qkv_ptr, dh_ptr, dqkv_ptr, seed_ptr, T, site,
    D: tl.constexpr, H: tl.constexpr, E: tl.constexpr, ROOM: tl.constexpr, SCALE: tl.constexpr, DROP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    seed = tl.load(seed_ptr)
    t, live, here, at = _places(T, D, H, E, ROOM)
    q, k, v = read(qkv_ptr + at, live), read(qkv_ptr + D + at, live), read(qkv_ptr + 2 * D + at, live)
    dh = read(dh_ptr + here, live)
    weight, scale = _causal(q, k, t, SCALE, PRECISION)
    weight *= scale[:, None]
    used = thinned(weight, seed, tl.program_id(0) * ROOM + t, t, site, DROP)
    dv = times_loaded(tl.trans(rounded(used, PRECISION)), dh, PRECISION)
    write(dqkv_ptr + 2 * D + at, rounded(dv, PRECISION), live)
    scaled_dh = rounded(dh.to(tl.float32) * SCALE, PRECISION)  # scaling dh takes the fewest multiplications
    dused = used * times_loaded(scaled_dh, tl.trans(v), PRECISION)
    dlogits = rounded(dused - weight * tl.sum(dused, 1)[:, None], PRECISION)
    dq, dk = times_loaded(dlogits, k, PRECISION), times_loaded(tl.trans(dlogits), q, PRECISION)
    write(dqkv_ptr + at, rounded(dq, PRECISION), live)
    write(dqkv_ptr + D + at, rounded(dk, PRECISION), live)
