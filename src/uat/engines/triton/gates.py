"""Gates from feedback, forward and backward, one program per episode (Triton).

The slow twin is `UtilityGates.forward`; tests check that outputs and gradients are equal. Only actions and rewards are
stored: the backward pass recomputes the rest. Each program writes its share of the weights' gradients; `added` sums
the shares.

Shapes: B episodes, T steps, D width, L layers, U utility width, J width of an action's embedding, A actions.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from uat.clock import NO_ACTION
from uat.engines.triton.complete_weights import feedback, room
from uat.engines.triton.outer import added
from uat.engines.triton.parts import enlarged, exp2, read, tanh, times, times_loaded, times_some, write
from uat.engines.triton.step import products, rounding
from uat.nn.utility import UtilityGates

MOST_ACTIONS = 64


def gates_fit(utility: UtilityGates, prev_action_BT: Tensor, longest: int) -> bool:
    encoder, steps = utility.encoder, prev_action_BT.shape[1]
    if prev_action_BT.dim() > 2 or steps > longest:
        return False
    return not encoder.use_action or encoder.action.get_parameter("weight").shape[0] <= MOST_ACTIONS


def fused_gates(utility: UtilityGates, prev_action_BT: Tensor, prev_reward_BT: Tensor, peak: Tensor) -> Tensor:
    """Return rho and the g of each layer (1 + L, B * T, D), like `UtilityGates.forward`. If products inside the blocks
    have half precision, so do the gates, and their gradient arrives `enlarged` according to the peak."""
    table, *weights = feedback(utility)
    if table is None:  # actions are not used
        table = prev_reward_BT.new_zeros(1, weights[0].shape[1] - 1, dtype=torch.float32)
        prev_action_BT = torch.full_like(prev_action_BT, NO_ACTION)
    layers, decay = utility.num_layers, utility.feedback_decay
    return cast(Tensor, FusedGates.apply(prev_action_BT, prev_reward_BT.float(), peak, layers, decay, table, *weights))


class FusedGates(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, action: Tensor, reward: Tensor, peak: Tensor, layers: int, decay: float, *weights: Tensor
    ) -> Tensor:
        (episodes, steps), d = action.shape, weights[-1].shape[0]
        action, reward = action.contiguous(), reward.contiguous()
        kind = torch.float16 if rounding() == "half" else torch.float32
        gates = torch.empty(layers + 1, episodes * steps, d, device=reward.device, dtype=kind)
        ctx.sizes = _sizes(steps, layers, decay, products(), *weights)
        cast(Any, _gates)[(episodes,)](action, reward, *weights, gates, episodes, steps, **ctx.sizes)
        ctx.save_for_backward(action, reward, *weights)
        ctx.peak = peak
        return gates

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dgates: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        action, reward, *weights = ctx.saved_tensors
        (episodes, steps), counts = action.shape, [w.numel() for w in weights]
        parts = torch.empty(episodes, sum(counts), device=reward.device)
        cast(Any, _gates_backward)[(episodes,)](
            action, reward, *weights, dgates.contiguous(), ctx.peak, parts, episodes, steps,
            TOTAL=sum(counts), ENLARGED=dgates.dtype == torch.float16, **ctx.sizes,
        )  # fmt: skip
        grads = [part.view_as(w) for part, w in zip(added(parts)[0].split(counts), weights, strict=True)]
        return None, None, None, None, None, *grads


def _sizes(steps: int, layers: int, decay: float, precision: str, *weights: Tensor) -> dict[str, Any]:
    (count, j), hidden, (d, u) = weights[0].shape, weights[1].shape[0], weights[4].shape
    rooms = {"ROOM": room(steps), "A_ROOM": room(count), "J_ROOM": room(j + 1)}
    sizes = {"A": count, "J": j, "HIDDEN": hidden, "U": u, "D": d, "L": layers}
    return {**sizes, **rooms, "LOG_DECAY": _log2(decay), "DECAY": decay, "PRECISION": precision}


def _log2(decay: float) -> float:
    """Return the logarithm for powers by exp2; for 0, a number so small that every power is 0."""
    return torch.tensor(decay, dtype=torch.float64).log2().item() if decay > 0 else -1000.0


@triton.jit
def _utility(
    action_ptr, reward_ptr, table_ptr, w1_ptr, w2_ptr, row, live, J: tl.constexpr, J_ROOM: tl.constexpr,
    HIDDEN: tl.constexpr, U: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the utility encoder; return its input, its hidden units, and u."""
    j, hidden, u = tl.arange(0, J_ROOM), tl.arange(0, HIDDEN), tl.arange(0, U)
    action = tl.load(action_ptr + row, mask=live, other=-1)
    known = (action >= 0)[:, None] & (j < J)[None, :]
    code = tl.load(table_ptr + action[:, None] * J + j[None, :], mask=known, other=0.0)
    reward = read(reward_ptr + row, live)
    code = tl.where(j[None, :] == J, reward[:, None], code)
    h = tl.maximum(times_some(code, w1_ptr, hidden, j, J + 1, PRECISION), 0.0)
    return code, action, h, times(h, w2_ptr, u, hidden, HIDDEN, PRECISION)


@triton.jit
def _ages(t, DECAY: tl.constexpr, LOG_DECAY: tl.constexpr):
    """Return the weight (T, T) of step s in the regime state of step t."""
    age = t[:, None] - t[None, :]
    return tl.where(age >= 0, (1 - DECAY) * exp2(age.to(tl.float32) * LOG_DECAY), 0.0)


@triton.jit
def _gates(
    action_ptr, reward_ptr, table_ptr, w1_ptr, w2_ptr, token_ptr, regime_ptr, gates_ptr, B, T,
    A: tl.constexpr, J: tl.constexpr, HIDDEN: tl.constexpr, U: tl.constexpr, D: tl.constexpr, L: tl.constexpr,
    ROOM: tl.constexpr, A_ROOM: tl.constexpr, J_ROOM: tl.constexpr, LOG_DECAY: tl.constexpr, DECAY: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    t, d, u = tl.arange(0, ROOM), tl.arange(0, D), tl.arange(0, U)
    row, live = tl.program_id(0) * T + t, t < T
    here = row[:, None] * D + d[None, :]
    _, _, _, now = _utility(
        action_ptr, reward_ptr, table_ptr, w1_ptr, w2_ptr, row, live, J, J_ROOM, HIDDEN, U, PRECISION
    )
    ubar = times_loaded(_ages(t, DECAY, LOG_DECAY), now, PRECISION)
    rho = tanh(times(ubar, regime_ptr, d, u, U, PRECISION))
    write(gates_ptr + here, rho.to(gates_ptr.dtype.element_ty), live[:, None])
    for layer in tl.static_range(L):
        gates_ptr += B * T * D
        g = tanh(times(now, token_ptr + layer * D * U, d, u, U, PRECISION))
        write(gates_ptr + here, g.to(gates_ptr.dtype.element_ty), live[:, None])


@triton.jit
def _gates_backward(
    action_ptr, reward_ptr, table_ptr, w1_ptr, w2_ptr, token_ptr, regime_ptr, dgates_ptr, peak_ptr, parts_ptr, B, T,
    A: tl.constexpr, J: tl.constexpr, HIDDEN: tl.constexpr, U: tl.constexpr, D: tl.constexpr, L: tl.constexpr,
    ROOM: tl.constexpr, A_ROOM: tl.constexpr, J_ROOM: tl.constexpr, LOG_DECAY: tl.constexpr, DECAY: tl.constexpr,
    PRECISION: tl.constexpr, TOTAL: tl.constexpr, ENLARGED: tl.constexpr,
):  # fmt: skip
    """Compute gradients of the weights over one episode, in the order of the arguments."""
    t, d, u = tl.arange(0, ROOM), tl.arange(0, D), tl.arange(0, U)
    j, hidden, a = tl.arange(0, J_ROOM), tl.arange(0, HIDDEN), tl.arange(0, A_ROOM)
    row, live = tl.program_id(0) * T + t, t < T
    here = row[:, None] * D + d[None, :]
    code, action, h, now = _utility(
        action_ptr, reward_ptr, table_ptr, w1_ptr, w2_ptr, row, live, J, J_ROOM, HIDDEN, U, PRECISION
    )
    ages = _ages(t, DECAY, LOG_DECAY)
    ubar = times_loaded(ages, now, PRECISION)
    to = parts_ptr + tl.program_id(0) * TOTAL
    small = 1.0
    if ENLARGED:
        small = 1 / enlarged(peak_ptr, "half")
    to_w1 = to + A * J
    to_w2 = to_w1 + HIDDEN * (J + 1)
    to_token = to_w2 + U * HIDDEN
    cell = d[:, None] * U + u[None, :]

    rho = tanh(times(ubar, regime_ptr, d, u, U, PRECISION))
    dpre = read(dgates_ptr + here, live[:, None]) * small * (1 - rho * rho)
    tl.store(to_token + L * D * U + cell, times_loaded(tl.trans(dpre), ubar, PRECISION))
    dubar = times_loaded(dpre, tl.load(regime_ptr + cell), PRECISION)
    du = times_loaded(tl.trans(ages), dubar, PRECISION)
    for layer in tl.static_range(L):
        dgates_ptr += B * T * D
        g = tanh(times(now, token_ptr + layer * D * U, d, u, U, PRECISION))
        dpre = read(dgates_ptr + here, live[:, None]) * small * (1 - g * g)
        tl.store(to_token + layer * D * U + cell, times_loaded(tl.trans(dpre), now, PRECISION))
        du += times_loaded(dpre, tl.load(token_ptr + layer * D * U + cell), PRECISION)

    at = u[:, None] * HIDDEN + hidden[None, :]
    tl.store(to_w2 + at, times_loaded(tl.trans(du), h, PRECISION))
    dh = tl.where(h > 0, times_loaded(du, tl.load(w2_ptr + at), PRECISION), 0.0)
    at = hidden[:, None] * (J + 1) + j[None, :]
    inside = (j <= J)[None, :]
    tl.store(to_w1 + at, times_loaded(tl.trans(dh), code, PRECISION), mask=inside)
    dcode = times_loaded(dh, tl.load(w1_ptr + at, mask=inside, other=0.0), PRECISION)
    is_a = (action[None, :] == a[:, None]).to(tl.float32)
    tl.store(
        to + a[:, None] * J + j[None, :],
        times_loaded(is_a, dcode, PRECISION),
        mask=(a < A)[:, None] & (j < J)[None, :],
    )
