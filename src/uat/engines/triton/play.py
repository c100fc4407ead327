"""Whole episodes of every stream in one launch (Triton), with policy and world in the same kernel.

The slow twin is `rollout`, which launches both at each step; tests check that the episodes are equal. A program plays a
few streams from their first step to their last, without further launches, and no program waits for another.

The kernel calls the four functions of a world: see `FusedWorld`.
Shapes: B streams, T steps, O entries of an observation, A actions.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from uat.engines.triton import step as triton_step
from uat.engines.triton.acting import (
    SMALL,
    draw,
    embed,
    encoding,
    look_up,
    pick,
    place,
    score,
    scoring,
    transformer_step,
    utility_step,
    utility_weights,
)
from uat.engines.triton.parts import fetched_some, put_wide, shares
from uat.engines.triton.step import WIDEST, Packed, arguments, at_once, feedback_arguments, observed, pack, served
from uat.engines.worlds import FusedWorld
from uat.episode import Step
from uat.nn.blocks import Transformer
from uat.nn.encoders import VectorEncoder
from uat.nn.heads import DiscreteHead, Head
from uat.nn.utility import UtilityGates
from uat.spec import Spec, Vector

PREFERRED_SHARED_MEMORY = 9
"""CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT of CUDA's driver: the share of shared memory, in percent."""


def fits(backbone: Transformer, head: Head, spec: Spec) -> bool:
    """Whether this policy, whose step is fused, can play whole episodes in one launch."""
    vector = isinstance(backbone.encoder, VectorEncoder) and isinstance(spec.obs, Vector) and spec.obs.width <= WIDEST
    discrete = isinstance(head, DiscreteHead) and head.linear.out_features <= WIDEST
    return vector and discrete and spec.reward_lag == 1


def fused_play(
    backbone: Transformer,
    utility: UtilityGates | None,
    head: Head,
    spec: Spec,
    streams: int,
    world: FusedWorld,
    gumbel_BTA: Tensor | None,
    policies: int = 1,
) -> Tensor:
    """Play one episode in each world and return its actions (B, T); the world writes the rest of the episode."""
    steps, c, positions = spec.steps, backbone.config, backbone.positions
    backbone.check_range(steps)
    packed, real = pack(backbone, utility), served(streams, c.num_heads, policies)
    past = _room(backbone, packed, streams, steps, real)
    action_BT = torch.empty(streams, steps, dtype=torch.long, device=positions.device)
    nothing = Step(  # the kernel makes its own steps: only the widths matter here
        obs=positions.new_empty(0, cast(Vector, spec.obs).width),
        prev_action=action_BT[:0, 0],
        prev_reward=positions.new_empty(0),
        first=positions.new_empty(0, dtype=torch.bool),
    )
    feedback = {} if utility is None else feedback_arguments(utility, nothing, positions, packed)
    gumbel_BTA = None if gumbel_BTA is None else gumbel_BTA.float().contiguous()
    given = arguments(backbone, packed, past, observed(backbone, nothing.obs), feedback, head, real, gumbel_BTA)
    unused = ("obs_ptr", "action_ptr", "reward_ptr", "ubar_ptr", "UBAR")
    kernel = cast(Any, _play)[(shares(streams, real),)](
        **{name: value for name, value in given.items() if name not in unused},
        to_action=action_BT, world=world.world, START=world.start, LOOK=world.look, NOTE=world.note, MOVE=world.move,
        T=steps, REWARDS=spec.reward_scale,
    )  # fmt: skip
    if policies > 1 and getattr(kernel, "function", None) is not None:
        _leave_shared_memory(kernel.function)
    return action_BT


@functools.cache
def _leave_shared_memory(function: int) -> None:
    """Ask the driver to split a multiprocessor's memory into much shared memory and little cache from the kernel's next
    launch on. The split changes only while a multiprocessor is idle: a rollout, which needs little shared memory, would
    otherwise keep optimize steps of other trainings away. The request is a hint; a failure changes nothing."""
    with contextlib.suppress(OSError, AttributeError):
        set_attribute = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute
        set_attribute(ctypes.c_void_p(function), ctypes.c_int(PREFERRED_SHARED_MEMORY), ctypes.c_int(100))


def _room(backbone: Transformer, packed: Packed, streams: int, steps: int, real: int) -> Tensor:
    """Allocate keys and values (L, 2, B, H, S, E). In tensor core layout, S is padded to a whole chunk."""
    c, padded = backbone.config, at_once(packed, steps, real)
    shape = (c.num_layers, 2, streams, c.num_heads, triton_step.CHUNK if padded else steps, c.d_model // c.num_heads)
    return packed.matrices.new_empty(shape)


@triton.jit
def _clear_values(kv_ptr, start, B, KV, D: tl.constexpr, L: tl.constexpr, REAL: tl.constexpr, CHUNK: tl.constexpr):
    """Clear the memory for the values of a program's streams."""
    at = tl.arange(0, REAL * CHUNK * D)
    own = start + at // (CHUNK * D) < B
    values_ptr = kv_ptr + tl.cast(start, tl.int64) * CHUNK * D + tl.cast(KV, tl.int64)
    for _ in tl.range(0, L, num_stages=1):
        tl.store(values_ptr + at, tl.zeros((REAL * CHUNK * D,), kv_ptr.dtype.element_ty), mask=own)
        values_ptr += 2 * tl.cast(KV, tl.int64)
    tl.debug_barrier()


@triton.jit
def _play(
    matrices_ptr, vectors_ptr, encode_w, encode_b, position_ptr, norm_w, norm_b, table_ptr, w1_ptr, w2_ptr, token_ptr,
    regime_ptr, head_w, head_b, kv_ptr, gumbel_ptr, gumbel_stride, to_action, world,
    B, S, KV, POSITIONS,
    D: tl.constexpr, H: tl.constexpr, E: tl.constexpr, F: tl.constexpr, L: tl.constexpr, A: tl.constexpr,
    A_ROOM: tl.constexpr, SCALE: tl.constexpr, REAL: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, SINGLE: tl.constexpr, IN_LAYOUT: tl.constexpr, AT_ONCE: tl.constexpr,
    UTILITY: tl.constexpr, SAMPLED: tl.constexpr, PRECISION: tl.constexpr,
    OUTSIDE: tl.constexpr, ENCODE: tl.constexpr, WIDTH: tl.constexpr, WIDTH_ROOM: tl.constexpr, J: tl.constexpr,
    J_ROOM: tl.constexpr, HIDDEN: tl.constexpr, U: tl.constexpr, DECAY: tl.constexpr,
    IDS: tl.constexpr, START: tl.constexpr, LOOK: tl.constexpr, NOTE: tl.constexpr, MOVE: tl.constexpr, T: tl.constexpr,
    REWARDS: tl.constexpr,
):  # fmt: skip
    row, d, a, o = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, A_ROOM), tl.arange(0, WIDTH_ROOM)
    start = tl.program_id(0) * REAL
    seat = row // H  # a stream has one row per head, all identical
    stream = start + seat
    live = (seat < REAL) & (stream < B)
    action, reward = tl.full((ROWS,), -1, tl.int32), tl.zeros((ROWS,), tl.float32)
    ubar = tl.zeros((ROWS, U), tl.float32)
    # data that every step needs is read once, and stays in shared memory if it fits
    feedback_size: tl.constexpr = J_ROOM * HIDDEN + HIDDEN * U + U * D if UTILITY else 0
    once: tl.constexpr = WIDTH_ROOM * D + D * A_ROOM + feedback_size <= SMALL
    if once:
        to_embed = encoding(encode_w, encode_b, d, WIDTH, WIDTH_ROOM, ENCODE)
        to_score = scoring(head_w, head_b, d, a, A, D)
        if UTILITY:
            of_utility = utility_weights(w1_ptr, w2_ptr, regime_ptr, d, J, J_ROOM, HIDDEN, U)
    if AT_ONCE:  # some values are read before they are written, with weight 0, so they must be finite
        _clear_values(kv_ptr, start, B, KV, D, L, REAL, CHUNK)
    spot = START(stream, live, world, T)
    for t in tl.range(0, T, num_stages=1):
        # the slowest loads start first
        drawn = draw(gumbel_ptr + t * A, gumbel_stride, stream, live[:, None], a, A, SAMPLED)
        code = tl.zeros((ROWS, J_ROOM), tl.float32)
        if UTILITY and IDS:
            code = look_up(action, table_ptr, tl.arange(0, J_ROOM), J)
        seen, known = LOOK(t, spot, stream, live, o, world, T, fetched_some)
        now, rho = ubar, ubar
        if UTILITY:
            now, ubar, rho = utility_step(
                code, reward, ubar, row < 0, of_utility if once else (code, code, code), w1_ptr, w2_ptr, regime_ptr, d,
                J, J_ROOM, HIDDEN, U, DECAY, once, OUTSIDE,
            )  # fmt: skip
        length = tl.where(live, t, 0)
        weight, bias = to_embed if once else encoding(encode_w, encode_b, d, WIDTH, WIDTH_ROOM, ENCODE)
        x = embed(seen, weight, bias, encode_w, d, D, ENCODE, OUTSIDE)
        position = tl.load(position_ptr + tl.minimum(t, POSITIONS - 1) * D + d)
        x = place(x, position[None, :], norm_w, norm_b, d, D, PRECISION)
        NOTE(t, seen, known, stream, live, o, world, T, put_wide)
        x = transformer_step(
            x, now, rho, length, seat, start, live, row, d,
            matrices_ptr, vectors_ptr, token_ptr, kv_ptr, B, S, KV,
            D, H, E, F, L, SCALE, REAL, ROWS, CHUNK, BLOCK, STAGES, SINGLE, True, IN_LAYOUT, AT_ONCE, UTILITY,
            PRECISION, OUTSIDE, U,
        )  # fmt: skip
        logits = score(x, to_score if once else scoring(head_w, head_b, d, a, A, D), OUTSIDE)
        action = pick(logits, drawn, a, A, SAMPLED)
        tl.store(to_action + stream * T + t, action.to(tl.int64), mask=live & (row % H == 0))
        reward, spot = MOVE(t, known, stream, live, action, world, T)
        reward *= REWARDS
        tl.debug_barrier()  # other threads read keys and values of this step in the next
