"""One step of every stream, from the observation to the chosen action, in one launch instead of a hundred (Triton).

The slow twin is `UtilityGates.step`, `Transformer.step`, `Head.logits` and `choose`; tests check that the results are
equal. A program processes a few streams through all layers with everything in registers. Matrix products need at least
16 rows, so a stream has one row per head, all identical. The weights of all layers are packed into one buffer when a
memory is created, so that a layer is an offset.

Shapes: B streams, D width, H heads, E head size, S capacity, F feed-forward, U utility width, L layers, A actions,
J width of an action's embedding.
U is padded with zeros to a size that matrix products support; UBAR of its entries are stored.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import math
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

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
from uat.engines.triton.complete_weights import hidden_units, power_of_two, room
from uat.engines.triton.pack import Packed, fused_pack
from uat.engines.triton.parts import shares
from uat.episode import Step
from uat.nn.blocks import Transformer
from uat.nn.cache import KVCache
from uat.nn.encoders import IdEmbedding, VectorEncoder
from uat.nn.heads import DiscreteHead, Head
from uat.nn.utility import UtilityGates

ROWS, MOST_ROWS = 16, 32
"""Fewest rows of a matrix product on tensor cores, and most rows that a program has registers for; a stream has a row
for each of its heads."""
PROGRAMS = 132
"""Approximate number of multiprocessors of a large GPU, and of programs to launch."""
CHUNK, WARPS, STAGES = 64, 4, 3
"""Cached steps read at a time, warps per program, and blocks of weights loading at a time."""
MOST_PASTS = 4
"""Most streams per program whose keys, and then values, fit in registers."""
HELD = 64 * 128
"""Largest half-precision matrix, in weights, that is loaded into registers ahead of its use."""
WIDEST = 128
"""Largest width of observations, and most actions, handled inside the kernel; larger ones are handled outside."""


def unsupported_reason(backbone: Transformer, utility: UtilityGates | None) -> str | None:
    """Return why the fused step does not support this policy; None if it does."""
    c = backbone.config
    for name, size, most in (("d_model", c.d_model, 128), ("d_ff", c.d_ff, 256)):  # more does not fit shared memory
        if size & (size - 1) or not 16 <= size <= most:
            return f"it takes powers of two from 16 to {most}, and {name} is {size}"
    widths = (
        {}
        if utility is None
        else {"d_utility": utility.d_utility, "their number of hidden units": hidden_units(utility.encoder)}
    )
    for name, width in widths.items():
        if width > 256:
            return f"it takes utilities and hidden units to 256, and {name} is {width}"
    if widths and (both := math.prod(widths.values())) > 256 * 128:  # more does not fit shared memory
        return f"it takes as many utilities times hidden units as {256 * 128:,}, and they are {both:,}"
    if utility is not None and c.d_model > 64:
        return f"with gates it takes a d_model of at most 64, and it is {c.d_model}: more does not fit shared memory"
    if c.num_heads & (c.num_heads - 1):
        return f"it takes a power of two of heads, and num_heads is {c.num_heads}"
    if backbone.positions.dtype != torch.float32:
        return f"it takes float32 weights, not {backbone.positions.dtype}"
    return None


def memory_taken(backbone: Transformer, utility: UtilityGates | None) -> int:
    """Return the most bytes of shared memory that a program needs, for supported sizes, as compilers report them (a
    test compares). Half precision needs little; exact products store whole blocks of weights there."""
    d, most = backbone.config.d_model, 96 * 1024
    if rounding() != "half" and d > 32:
        most = 184 * 1024 if d > 64 else most if utility is None else 136 * 1024
    gates = 0 if utility is None else 4 * utility.d_utility * hidden_units(utility.encoder) + 1024
    return max(most, gates)


def pack(backbone: Transformer, utility: UtilityGates | None) -> Packed:
    """Pack the current weights; each rollout calls this."""
    c, half = backbone.config, rounding() == "half"
    tensor_core_layout = half and c.d_model <= 64 and c.d_model * c.d_ff <= HELD
    return fused_pack(backbone, utility, half=half, tensor_core_layout=tensor_core_layout)


def fused_step(
    backbone: Transformer,
    utility: UtilityGates | None,
    head: Head,
    step: Step,
    cache: KVCache,
    packed: Packed,
    policies: int,
    ubar_BU: Tensor | None = None,
    gumbel_BA: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the logits (B, A) of this step and, if actions are ids, the choice (B,); update cache and regime state in
    place.

    With Gumbel noise the choice is a sample, without it the arg-max of the logits.
    """
    inside = head.linear.out_features <= WIDEST
    feedback = {} if utility is None else feedback_arguments(utility, step, ubar_BU, packed)
    seen, scored = observed(backbone, step.obs), head if inside else None
    found, choice_B = _launch(backbone, cache, packed, policies, seen, feedback, scored, step, gumbel_BA)
    if not inside:
        return head.logits(found, step.allowed), None
    return found, choice_B if isinstance(head, DiscreteHead) else None


def fused_token(backbone: Transformer, x_BD: Tensor, cache: KVCache, packed: Packed, policies: int) -> Tensor:
    """Return features h (B, D) of one token whose embedding includes its position; update the cache in place."""
    seen = {"obs_ptr": x_BD.float().contiguous(), "ENCODE": "token"}
    return _launch(backbone, cache, packed, policies, seen, {}, None, None, None)[0]


def products() -> str:
    """Return the input rounding of matrix products: bf16 is treated like tf32 (see docs/speed.md)."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def rounding() -> str:
    """Return the input rounding of products inside the layers. If tf32 is allowed, it is half precision, which keeps as
    many bits of numbers from 0.00006 to 65,504 and halves the bytes to read in each step."""
    return "half" if products() == "tf32" else products()


def served(streams: int, heads: int, policies: int) -> int:
    """Return the number of streams per program: one program for each multiprocessor, or two if that needs more rows
    than the minimum of a product. Several concurrent policies share two programs per multiprocessor, so each program
    serves more streams, but only as long as the shapes of all products and the path of attention stay the same: sums in
    another order could change some actions of a policy compared with acting alone."""
    alone = _among(streams, PROGRAMS)
    if alone * heads > ROWS:
        alone = max(1, ROWS // heads, min(_among(streams, 2 * PROGRAMS), MOST_ROWS // heads))
    if policies == 1:
        return alone
    most = min(room(alone * heads) // heads, MOST_PASTS if alone <= MOST_PASTS else ROWS)
    return max(alone, min(_among(streams, max(1, 2 * PROGRAMS // policies)), most))


def _among(streams: int, programs: int) -> int:
    return min(ROWS, power_of_two(shares(streams, programs)))


def _launch(
    backbone: Transformer,
    cache: KVCache,
    packed: Packed,
    policies: int,
    seen: dict[str, Any],
    feedback: dict[str, Any],
    head: Head | None,
    step: Step | None,
    gumbel_BA: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Launch `_step`; without a head it returns h. Unused arguments may be any tensor."""
    streams, unread = cache.length_B.shape[0], cache.kv_L2BHSE
    real = served(streams, backbone.config.num_heads, policies)
    out = backbone.positions.new_empty(streams, backbone.config.d_model if head is None else head.linear.out_features)
    choice_B = torch.empty(streams, dtype=torch.long, device=out.device)
    allowed = None if step is None or step.allowed is None or head is None else step.allowed.contiguous()
    given = {
        "first_ptr": unread if step is None else step.first,
        "length_ptr": cache.length_B,
        "allowed_ptr": unread if allowed is None else allowed,
        "out_ptr": out,
        "choice_ptr": choice_B,
        "HEAD": head is not None,
        "MASKED": allowed is not None,
    }
    drawn_BA = None if gumbel_BA is None else gumbel_BA.float()
    reads = arguments(backbone, packed, cache.kv_L2BHSE, seen, feedback, head, real, drawn_BA)
    cast(Any, _step)[(shares(streams, real),)](**reads, **given)
    return out, choice_B


def arguments(
    backbone: Transformer,
    packed: Packed,
    past_L2BHSE: Tensor,
    seen: dict[str, Any],
    feedback: dict[str, Any],
    head: Head | None,
    real: int,
    gumbel: Tensor | None,
) -> dict[str, Any]:
    """Return the arguments of kernels that process the layers. Unused ones may be any tensor."""
    c, unread, capacity = backbone.config, past_L2BHSE, past_L2BHSE.shape[-2]
    d, size = c.d_model, c.d_model // c.num_heads
    actions = 1 if head is None else head.linear.out_features
    pointers = {
        **dict.fromkeys(OBSERVED + FEEDBACK, unread),
        **{name: value for name, value in (seen | feedback).items() if isinstance(value, Tensor)},
        "matrices_ptr": packed.matrices,
        "vectors_ptr": packed.vectors,
        "position_ptr": backbone.positions,
        "norm_w": backbone.norm.weight,
        "norm_b": backbone.norm.bias,
        "head_w": unread if head is None else head.linear.weight,
        "head_b": unread if head is None else head.linear.bias,
        "kv_ptr": past_L2BHSE,
        "gumbel_ptr": unread if gumbel is None else gumbel,
        "gumbel_stride": 0 if gumbel is None else gumbel.stride(0),
    }
    sizes = {
        "WIDTH": 1,
        "WIDTH_ROOM": 16,
        "J": 1,
        "J_ROOM": 16,
        "HIDDEN": 16,
        "U": 16,
        "UBAR": 16,
        "DECAY": 0.0,
        "IDS": True,
        **{name: value for name, value in (seen | feedback).items() if not isinstance(value, Tensor)},
        "B": past_L2BHSE.shape[2],
        "S": capacity,
        "KV": past_L2BHSE.stride(1),
        "POSITIONS": backbone.positions.shape[0],
        "D": d,
        "H": c.num_heads,
        "E": size,
        "F": c.d_ff,
        "L": c.num_layers,
        "A": actions,
        "A_ROOM": room(actions),
        "SCALE": size**-0.5,
        "REAL": real,
        "ROWS": room(real * c.num_heads),
        "CHUNK": CHUNK,
        "BLOCK": min(64, c.d_ff),
        "STAGES": STAGES,
        "SINGLE": capacity <= CHUNK,
        "IN_LAYOUT": packed.tensor_core_layout,
        "AT_ONCE": at_once(packed, capacity, real),
        "UTILITY": bool(feedback),
        "SAMPLED": gumbel is not None,
        "PRECISION": "half" if packed.matrices.dtype == torch.float16 else products(),
        "OUTSIDE": products(),  # values outside the layers may be large
    }
    return {**pointers, **sizes, "num_warps": WARPS if d <= 64 else 2 * WARPS}


def at_once(packed: Packed, capacity: int, real: int) -> bool:
    """Whether keys, and then values, of all steps of a program's streams fit in registers."""
    return packed.tensor_core_layout and capacity <= CHUNK and real <= MOST_PASTS


OBSERVED = ("obs_ptr", "encode_w", "encode_b")
FEEDBACK = ("action_ptr", "reward_ptr", "table_ptr", "w1_ptr", "w2_ptr", "token_ptr", "regime_ptr", "ubar_ptr")


def observed(backbone: Transformer, obs: Tensor) -> dict[str, Any]:
    """Return the observation arguments of `_step`: a vector and its map, ids and their table, or an embedding."""
    encoder = backbone.encoder
    if isinstance(encoder, IdEmbedding):
        return {"obs_ptr": obs.contiguous(), "encode_w": encoder.weight, "ENCODE": "ids"}
    if isinstance(encoder, VectorEncoder) and obs.dim() == 2 and obs.shape[1] <= WIDEST:
        width, linear = obs.shape[1], encoder.linear
        weights = {"encode_w": linear.weight, "encode_b": linear.bias}
        sizes = {"ENCODE": "map", "WIDTH": width, "WIDTH_ROOM": room(width)}
        return {"obs_ptr": obs.float().contiguous(), **weights, **sizes}
    return {"obs_ptr": encoder(obs).float().contiguous(), "ENCODE": "done"}


def feedback_arguments(utility: UtilityGates, step: Step, ubar_BU: Tensor | None, packed: Packed) -> dict[str, Any]:
    """Return the feedback arguments of `_step`, from which it computes gates."""
    assert ubar_BU is not None
    assert packed.feedback is not None
    table, first, last, token, regime = packed.feedback
    width, reward_B = first.shape[1] - 1, step.prev_reward.float().contiguous()
    if table is not None:
        action = step.prev_action.contiguous()
    elif utility.encoder.use_action:
        action = table = utility.encoder.action(step.prev_action).float().contiguous()
    else:
        action = table = reward_B.new_zeros(len(reward_B), width)
    return {
        "action_ptr": action, "reward_ptr": reward_B, "table_ptr": table, "w1_ptr": first, "w2_ptr": last,
        "token_ptr": token, "regime_ptr": regime, "ubar_ptr": ubar_BU,
        "J": width, "J_ROOM": room(width + 1), "HIDDEN": first.shape[0], "U": last.shape[0],
        "UBAR": utility.d_utility, "DECAY": utility.feedback_decay, "IDS": packed.feedback.table_AJ is not None,
    }  # fmt: skip


@triton.jit
def _step(
    matrices_ptr, vectors_ptr, obs_ptr, encode_w, encode_b, position_ptr, norm_w, norm_b,
    action_ptr, reward_ptr, table_ptr, w1_ptr, w2_ptr, token_ptr, regime_ptr, ubar_ptr,
    head_w, head_b, first_ptr, length_ptr, kv_ptr, allowed_ptr, gumbel_ptr, gumbel_stride,
    out_ptr, choice_ptr, B, S, KV, POSITIONS,
    D: tl.constexpr, H: tl.constexpr, E: tl.constexpr, F: tl.constexpr, L: tl.constexpr, A: tl.constexpr,
    A_ROOM: tl.constexpr, SCALE: tl.constexpr, REAL: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, SINGLE: tl.constexpr, IN_LAYOUT: tl.constexpr, AT_ONCE: tl.constexpr,
    UTILITY: tl.constexpr, HEAD: tl.constexpr, MASKED: tl.constexpr, SAMPLED: tl.constexpr, PRECISION: tl.constexpr,
    OUTSIDE: tl.constexpr, ENCODE: tl.constexpr, WIDTH: tl.constexpr, WIDTH_ROOM: tl.constexpr, J: tl.constexpr,
    J_ROOM: tl.constexpr, HIDDEN: tl.constexpr, U: tl.constexpr, UBAR: tl.constexpr, DECAY: tl.constexpr,
    IDS: tl.constexpr,
):  # fmt: skip
    row, d = tl.arange(0, ROWS), tl.arange(0, D)
    start = tl.program_id(0) * REAL
    seat = row // H  # a stream has one row per head, all identical
    stream = start + seat
    live = (seat < REAL) & (stream < B)
    own, alive = live & (row % H == 0), live[:, None]

    # restart, embed
    length = tl.load(length_ptr + stream, mask=live, other=0).to(tl.int32)
    if ENCODE != "token":
        first = tl.load(first_ptr + stream, mask=live, other=1) != 0
        length = tl.where(first, 0, length)
    if ENCODE == "map":
        o = tl.arange(0, WIDTH_ROOM)
        seen = alive & (o < WIDTH)[None, :]
        seen = tl.load(obs_ptr + stream[:, None] * WIDTH + o[None, :], mask=seen, other=0.0)
    elif ENCODE == "ids":
        seen = tl.load(obs_ptr + stream, mask=live, other=-1)
    else:
        seen = tl.load(obs_ptr + stream[:, None] * D + d[None, :], mask=alive, other=0.0)
    weight, bias = encoding(encode_w, encode_b, d, WIDTH, WIDTH_ROOM, ENCODE)
    x = embed(seen, weight, bias, encode_w, d, D, ENCODE, OUTSIDE)
    if ENCODE != "token":
        position = tl.load(position_ptr + tl.minimum(length, POSITIONS - 1)[:, None] * D + d[None, :])
        x = place(x, position, norm_w, norm_b, d, D, PRECISION)

    # feedback
    now, rho = x, x
    if UTILITY:
        j, u = tl.arange(0, J_ROOM), tl.arange(0, U)
        if IDS:
            action = tl.load(action_ptr + stream, mask=live, other=-1)
            code = look_up(action, table_ptr, j, J)
        else:
            code = tl.load(action_ptr + stream[:, None] * J + j[None, :], mask=alive & (j < J)[None, :], other=0.0)
        reward = tl.load(reward_ptr + stream, mask=live, other=0.0)
        at, kept = stream[:, None] * UBAR + u[None, :], alive & (u < UBAR)[None, :]
        before = tl.load(ubar_ptr + at, mask=kept, other=0.0)
        small: tl.constexpr = J_ROOM * HIDDEN + HIDDEN * U + U * D <= SMALL
        weights = utility_weights(w1_ptr, w2_ptr, regime_ptr, d, J, J_ROOM, HIDDEN, U) if small else (code, code, code)
        now, ubar, rho = utility_step(
            code, reward, before, first, weights, w1_ptr, w2_ptr, regime_ptr, d,
            J, J_ROOM, HIDDEN, U, DECAY, small, OUTSIDE,
        )  # fmt: skip
        tl.debug_barrier()  # wait until all rows of a stream have read it
        tl.store(ubar_ptr + at, ubar, mask=kept & own[:, None])

    x = transformer_step(
        x, now, rho, length, seat, start, live, row, d,
        matrices_ptr, vectors_ptr, token_ptr, kv_ptr, B, S, KV,
        D, H, E, F, L, SCALE, REAL, ROWS, CHUNK, BLOCK, STAGES, SINGLE, False, IN_LAYOUT, AT_ONCE, UTILITY, PRECISION,
        OUTSIDE, U,
    )  # fmt: skip
    tl.store(length_ptr + stream, (length + 1).to(tl.int64), mask=own)

    # decide
    if HEAD:
        a = tl.arange(0, A_ROOM)
        possible = alive & (a < A)[None, :]
        logits = score(x, scoring(head_w, head_b, d, a, A, D), OUTSIDE)
        at = stream[:, None] * A + a[None, :]
        if MASKED:
            may = tl.load(allowed_ptr + at, mask=possible, other=0) != 0
            logits = tl.where(may, logits, -float("inf"))
        tl.store(out_ptr + at, logits, mask=possible & own[:, None])
        best = pick(logits, draw(gumbel_ptr, gumbel_stride, stream, alive, a, A, SAMPLED), a, A, SAMPLED)
        tl.store(choice_ptr + stream, best.to(tl.int64), mask=own)
    else:
        tl.store(out_ptr + stream[:, None] * D + d[None, :], x, mask=own[:, None])
