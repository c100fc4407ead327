"""One step of every stream in 1 + L launches (Triton), instead of a hundred.

The slow twin is `UtilityGates.step` followed by `Transformer.step`; tests hold the two equal. A program serves a few
streams and walks through the layer with everything in registers; matrix products take 16 rows, of which those few are
real. Weights are read where they lie: nothing is packed anew after an update.

Shapes: B streams, D width, H heads, E head size, S capacity, F feed-forward, U utility width, L layers.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from uat.nn.blocks import Block, Transformer
from uat.nn.cache import KVCache
from uat.nn.encoders import IdEmbedding
from uat.nn.utility import UtilityGates
from uat.types import Step

ROWS = 16
"""Least rows of a matrix product on tensor cores."""
PROGRAMS = 132
"""About as many programs as a large GPU has multiprocessors."""
CHUNK, WARPS = 32, 4
"""Cached steps that are read at a time, and warps of a program."""


def unfit(backbone: Transformer, utility: UtilityGates | None) -> str | None:
    """Why this policy cannot take the fused step; None if it can."""
    c = backbone.config
    sizes = {"d_model": c.d_model, "d_ff": c.d_ff}
    if utility is not None:
        if not utility.complete:
            return "it takes the whole of UAT, and this variant lacks a part"
        sizes |= {"d_utility": utility.d_utility, "d_hidden": utility.encoder.d_hidden}
        if not isinstance(utility.encoder.action, IdEmbedding):
            return "it takes discrete actions alone"
    for name, size in sizes.items():
        if size & (size - 1) or not 16 <= size <= 256:
            return f"it takes powers of two from 16 to 256, and {name} is {size}"
    if c.num_heads & (c.num_heads - 1):
        return f"it takes a power of two of heads, and num_heads is {c.num_heads}"
    if backbone.positions.dtype != torch.float32:
        return f"it takes float32 weights, not {backbone.positions.dtype}"
    return None


def fused_step(
    backbone: Transformer, utility: UtilityGates | None, step: Step, cache: KVCache, ubar_BU: Tensor | None = None
) -> Tensor:
    """h (B, D) of this step. Cache, lengths and regime state move on in place."""
    c = backbone.config
    streams, d, gated = step.obs.shape[0], c.d_model, utility is not None
    e_BD = backbone.encoder(step.obs)
    x_BD, scratch_2BD = torch.empty_like(e_BD), e_BD.new_empty(2, streams, d)
    gates = e_BD.new_empty(c.num_layers + 1, streams, d) if gated else e_BD  # rho, then g of each layer
    real = min(ROWS, triton.next_power_of_2(triton.cdiv(streams, PROGRAMS)))
    grid = (triton.cdiv(streams, real),)
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    same = {"D": d, "REAL": real, "ROWS": ROWS, "PRECISION": precision, "UTILITY": gated, "num_warps": WARPS}
    cast(Any, _open)[grid](
        e_BD, backbone.positions, cache.length_B, backbone.norm.weight, backbone.norm.bias, step.first,
        *_feedback(utility, step, ubar_BU, e_BD), x_BD, gates, streams, backbone.positions.shape[0],
        **same, **_widths(utility), L=c.num_layers,
    )  # fmt: skip
    for layer, block in enumerate(backbone.blocks):
        assert isinstance(block, Block)
        project, attention, (ff1, _, ff2) = block.attention.project, block.attention, block.ff
        bias = project.weight if project.bias_3HEE is None else project.bias_3HEE
        cast(Any, _layer)[grid](
            x_BD, gates, gates[layer + 1] if gated else gates, cache.kv_L2BHSE[layer], cache.length_B, scratch_2BD,
            block.attention_norm.weight, block.attention_norm.bias, project.weight, bias,
            attention.out.weight, attention.out.bias, block.ff_norm.weight, block.ff_norm.bias,
            ff1.weight, ff1.bias, ff2.weight, ff2.bias, backbone.last_norm.weight, backbone.last_norm.bias,
            streams, cache.capacity, **same, H=c.num_heads, E=d // c.num_heads, F=c.d_ff, CHUNK=CHUNK,
            SCALE=(d // c.num_heads) ** -0.5, LAST=layer == c.num_layers - 1,
        )  # fmt: skip
    return x_BD


def _feedback(utility: UtilityGates | None, step: Step, ubar_BU: Tensor | None, any_tensor: Tensor) -> list[Tensor]:
    """What `_open` reads to make gates; without utility it reads nothing, whatever is passed."""
    if utility is None or ubar_BU is None:
        return [any_tensor] * 8
    first, _, last = utility.encoder.mlp
    table = utility.encoder.action.get_parameter("weight")
    weights = [table, first.weight, last.weight, utility.token.weight, utility.regime.weight]
    return [step.prev_action, step.prev_reward, *weights, ubar_BU]


def _widths(utility: UtilityGates | None) -> dict[str, Any]:
    if utility is None:
        return {"A": 1, "A_ROOM": 16, "HIDDEN": 16, "U": 16, "DECAY": 0.0}
    width = utility.encoder.action.get_parameter("weight").shape[1]
    room = max(16, triton.next_power_of_2(width + 1))
    hidden = utility.encoder.d_hidden
    return {"A": width, "A_ROOM": room, "HIDDEN": hidden, "U": utility.d_utility, "DECAY": utility.decay}


@triton.jit
def _norm(x, w_ptr, b_ptr, d, D: tl.constexpr):
    """LayerNorm of each row."""
    mean = tl.sum(x, 1) / D
    x = x - mean[:, None]
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + 1e-5)
    return x * scale[:, None] * tl.load(w_ptr + d)[None, :] + tl.load(b_ptr + d)[None, :]


@triton.jit
def _times(x, w_ptr, out, inner, IN: tl.constexpr, PRECISION: tl.constexpr):
    """x W^T for W of shape (out, IN), row by row in memory."""
    return tl.dot(x, tl.load(w_ptr + out[None, :] * IN + inner[:, None]), input_precision=PRECISION)


@triton.jit
def _offset(gate, u_ptr, d, D: tl.constexpr, E: tl.constexpr, PRECISION: tl.constexpr):
    """U gate inside each head: one product with the heads' matrices laid along the diagonal."""
    same_head = (d[:, None] // E) == (d[None, :] // E)
    at = (d[None, :] // E) * E * E + (d[None, :] % E) * E + d[:, None] % E
    return tl.dot(gate, tl.load(u_ptr + at, mask=same_head, other=0.0), input_precision=PRECISION)


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _open(
    e_ptr, position_ptr, length_ptr, norm_w, norm_b, first_ptr, action_ptr, reward_ptr, table_ptr, w1_ptr, w2_ptr,
    token_ptr, regime_ptr, ubar_ptr, x_ptr, gates_ptr, B, POSITIONS,
    D: tl.constexpr, REAL: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr, A: tl.constexpr,
    A_ROOM: tl.constexpr, HIDDEN: tl.constexpr, U: tl.constexpr, DECAY: tl.constexpr, L: tl.constexpr,
    UTILITY: tl.constexpr,
):  # fmt: skip
    """Restart streams, embed the observation, and turn feedback into the gates of all layers."""
    row, d = tl.arange(0, ROWS), tl.arange(0, D)
    stream = tl.program_id(0) * REAL + row
    live = (row < REAL) & (stream < B)
    here = stream[:, None] * D + d[None, :]
    first = tl.load(first_ptr + stream, mask=live, other=1) != 0
    length = tl.where(first, 0, tl.load(length_ptr + stream, mask=live, other=0))
    tl.store(length_ptr + stream, length, mask=live)
    position = tl.minimum(length, POSITIONS - 1)
    p = tl.load(position_ptr + position[:, None] * D + d[None, :])
    e = tl.load(e_ptr + here, mask=live[:, None], other=0.0)
    tl.store(x_ptr + here, _norm(e + p, norm_w, norm_b, d, D), mask=live[:, None])
    if UTILITY:
        a, hidden, u = tl.arange(0, A_ROOM), tl.arange(0, HIDDEN), tl.arange(0, U)
        action = tl.load(action_ptr + stream, mask=live, other=-1)
        reward = tl.load(reward_ptr + stream, mask=live, other=0.0)
        known = (action >= 0)[:, None] & (a[None, :] < A)
        said = tl.load(table_ptr + action[:, None] * A + a[None, :], mask=known, other=0.0)
        said = tl.where(a[None, :] == A, reward[:, None], said)  # [f_a(a); r]
        w1 = tl.load(w1_ptr + hidden[None, :] * (A + 1) + a[:, None], mask=(a <= A)[:, None], other=0.0)
        h = tl.maximum(tl.dot(said, w1, input_precision=PRECISION), 0.0)
        now = _times(h, w2_ptr, u, hidden, HIDDEN, PRECISION)
        at = stream[:, None] * U + u[None, :]
        before = tl.load(ubar_ptr + at, mask=live[:, None], other=0.0)
        ubar = DECAY * tl.where(first[:, None], 0.0, before) + (1 - DECAY) * now
        tl.store(ubar_ptr + at, ubar, mask=live[:, None])
        tl.store(gates_ptr + here, _tanh(_times(ubar, regime_ptr, d, u, U, PRECISION)), mask=live[:, None])
        for layer in tl.static_range(L):
            g = _tanh(_times(now, token_ptr + layer * D * U, d, u, U, PRECISION))
            tl.store(gates_ptr + (layer + 1) * B * D + here, g, mask=live[:, None])


@triton.jit
def _layer(
    x_ptr, rho_ptr, g_ptr, kv_ptr, length_ptr, scratch_ptr, norm_w, norm_b, project_ptr, bias_ptr, out_w, out_b,
    ff_norm_w, ff_norm_b, ff1_w, ff1_b, ff2_w, ff2_b, last_w, last_b, B, S,
    D: tl.constexpr, REAL: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr, H: tl.constexpr,
    E: tl.constexpr, F: tl.constexpr, CHUNK: tl.constexpr, SCALE: tl.constexpr, UTILITY: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """One block: projections, cached attention, feed-forward."""
    row, d, f = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, F)
    start = tl.program_id(0) * REAL
    stream = start + row
    live = (row < REAL) & (stream < B)
    here = stream[:, None] * D + d[None, :]
    x = tl.load(x_ptr + here, mask=live[:, None], other=0.0)
    y = _norm(x, norm_w, norm_b, d, D)
    q = _times(y, project_ptr, d, d, D, PRECISION)
    k = _times(y, project_ptr + D * D, d, d, D, PRECISION)
    v = _times(y, project_ptr + 2 * D * D, d, d, D, PRECISION)
    if UTILITY:
        rho = tl.load(rho_ptr + here, mask=live[:, None], other=0.0)
        g = tl.load(g_ptr + here, mask=live[:, None], other=0.0)
        q += rho * _times(y, project_ptr + 3 * D * D, d, d, D, PRECISION) + _offset(rho, bias_ptr, d, D, E, PRECISION)
        k += g * _times(y, project_ptr + 4 * D * D, d, d, D, PRECISION)
        k += _offset(g, bias_ptr + H * E * E, d, D, E, PRECISION)
        v += g * _times(y, project_ptr + 5 * D * D, d, d, D, PRECISION)
        v += _offset(g, bias_ptr + 2 * H * E * E, d, D, E, PRECISION)

    slot = tl.load(length_ptr + stream, mask=live, other=0)
    cell = stream[:, None] * H * S * E + (d[None, :] // E) * S * E + slot[:, None] * E + d[None, :] % E
    values_ptr = kv_ptr + B * H * S * E
    tl.store(kv_ptr + cell, k, mask=live[:, None])
    tl.store(values_ptr + cell, v, mask=live[:, None])
    tl.store(scratch_ptr + here, q * SCALE, mask=live[:, None])
    tl.debug_barrier()  # the same program reads them back, laid out by head

    few = tl.arange(0, REAL)
    real = (start + few) < B
    length = tl.load(length_ptr + start + few, mask=real, other=0)
    head, e = tl.arange(0, H)[None, None, :, None], tl.arange(0, E)[None, None, None, :]
    owner = (start + few)[:, None, None, None]
    mine = real[:, None, None, None]
    q4 = tl.load(scratch_ptr + owner * D + head * E + e, mask=mine, other=0.0)
    top = tl.full((REAL, H), -float("inf"), tl.float32)
    mass = tl.zeros((REAL, H), tl.float32)
    mixed = tl.zeros((REAL, H, E), tl.float32)
    last = tl.max(length, 0)
    begin = last * 0
    while begin <= last:
        s = begin + tl.arange(0, CHUNK)
        seen = (s[None, :] <= length[:, None]) & real[:, None]
        at = owner * H * S * E + head * S * E + s[None, :, None, None] * E + e
        k4 = tl.load(kv_ptr + at, mask=seen[:, :, None, None], other=0.0)
        logits = tl.where(seen[:, :, None], tl.sum(q4 * k4, 3), -float("inf"))  # (REAL, CHUNK, H)
        higher = tl.maximum(top, tl.max(logits, 1))
        higher = tl.where(real[:, None], higher, 0.0)
        weight = tl.exp(logits - higher[:, None, :])
        fade = tl.exp(top - higher)
        v4 = tl.load(values_ptr + at, mask=seen[:, :, None, None], other=0.0)
        mass = mass * fade + tl.sum(weight, 1)
        mixed = mixed * fade[:, :, None] + tl.sum(weight[:, :, :, None] * v4, 1)
        top = higher
        begin += CHUNK
    mixed = mixed / tl.where(real[:, None], mass, 1.0)[:, :, None]
    head3, e3 = tl.arange(0, H)[None, :, None], tl.arange(0, E)[None, None, :]
    mixed_ptr = scratch_ptr + B * D
    tl.store(mixed_ptr + (start + few)[:, None, None] * D + head3 * E + e3, mixed, mask=real[:, None, None])
    tl.debug_barrier()

    h = tl.load(mixed_ptr + here, mask=live[:, None], other=0.0)
    x += _times(h, out_w, d, d, D, PRECISION) + tl.load(out_b + d)[None, :]
    y = _norm(x, ff_norm_w, ff_norm_b, d, D)
    h = tl.maximum(_times(y, ff1_w, f, d, D, PRECISION) + tl.load(ff1_b + f)[None, :], 0.0)
    x += _times(h, ff2_w, d, f, F, PRECISION) + tl.load(ff2_b + d)[None, :]
    if LAST:
        x = _norm(x, last_w, last_b, d, D)
        tl.store(length_ptr + stream, slot + 1, mask=live)
    tl.store(x_ptr + here, x, mask=live[:, None])
