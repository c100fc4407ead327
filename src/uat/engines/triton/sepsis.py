"""All arithmetic of a step of the sepsis world in one launch (Triton); the slow twin is `SepsisSimulator.step`."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from uat.contracts import Transition
from uat.domains.sepsis import world as equations
from uat.domains.sepsis.treatment import FREE_REPEATS
from uat.domains.sepsis.world import SepsisSimulator, World
from uat.episode import Noise

BLOCK = 8
CONSTANTS = (
    *("SOFA_WEIGHT", "LACTATE_WEIGHT", "DEATH_CHANCE", "DEATH_SOFA", "DEATH_LACTATE"),
    *("RECOVERY_CHANCE", "RECOVERY_LEVEL"),
)
"""Constants of the world's module, under the same names."""


class Treated(NamedTuple):
    """Result of a treatment: the patients' new state, rewards and observations."""

    state_B3: Tensor
    repeats_B: Tensor
    ended_B: Tensor
    reward_B: Tensor
    over_B: Tensor
    """Whether this step was the last one: the patient died or recovered."""
    obs_BO: Tensor
    clinical_BF: Tensor


def treat(simulator: SepsisSimulator, world: World, action_B: Tensor) -> Treated:
    """Compute one step of every world."""
    t, physiology, start_BF = world.t, simulator.physiology, world.start_BF
    (streams, columns), components = start_BF.shape, simulator.moving_3O.shape[1]
    treated = Treated(
        torch.empty_like(world.state_B3),
        torch.empty_like(world.repeats_B),
        torch.empty_like(world.ended_B),
        world.state_B3.new_empty(streams),
        torch.empty_like(world.ended_B),
        world.still_BO.new_empty(streams, components),
        torch.empty_like(start_BF),
    )
    regime_B, shock_B3 = world.regime_BT[:, t], world.shock_BT3[:, t]
    fate_B, blur_BO = world.fate_BT[:, t], world.blur_BTO[:, t + 1]
    cast(Any, _treat)[(triton.cdiv(streams, BLOCK),)](
        action_B, world.state_B3, world.last_B, world.repeats_B, world.ended_B, regime_B, shock_B3, fate_B, blur_BO,
        world.still_BO, start_BF, physiology.effect_RA, physiology.direction_3, physiology.reversion_3,
        simulator.moving_3O, simulator.dynamic, *treated, streams,
        regime_B.stride(0), shock_B3.stride(0), fate_B.stride(0), blur_BO.stride(0),
        LOG_RESISTANCE=math.log(simulator.config.remaining_benefit), FREE=FREE_REPEATS,
        **{name: getattr(equations, name) for name in CONSTANTS}, A=physiology.effect_RA.shape[1],
        WIDTH=components, ROOM=triton.next_power_of_2(components), F=columns, F_ROOM=triton.next_power_of_2(columns),
        BLOCK=BLOCK, num_warps=2,
    )  # fmt: skip
    return treated


@dataclass(frozen=True, slots=True)
class ChartedWorld(World):
    clinical_BF: Tensor | None = None
    """The current clinical columns, computed together with the step."""


class FusedSepsis(SepsisSimulator):
    """Sepsis worlds with steps of a single launch."""

    def __init__(self, simulator: SepsisSimulator) -> None:
        vars(self).update(vars(simulator))

    def reset(self, noise: Noise) -> tuple[World, Tensor]:
        world, obs = super().reset(noise)
        return ChartedWorld(**{field.name: getattr(world, field.name) for field in fields(World)}), obs

    def step(self, world: World, action: Tensor) -> Transition[World]:
        action = action.contiguous()
        found = treat(self, world, action)
        after = replace(
            cast(ChartedWorld, world),
            state_B3=found.state_B3,
            last_B=action,
            repeats_B=found.repeats_B,
            ended_B=found.ended_B,
            t=world.t + 1,
            clinical_BF=found.clinical_BF,
        )
        terminated_B = ~world.ended_B if after.t == self.spec.steps else found.over_B
        return Transition(after, found.obs_BO, found.reward_B, terminated_B)

    def clinical(self, world: World) -> Tensor:
        clinical_BF = cast(ChartedWorld, world).clinical_BF
        return super().clinical(world) if clinical_BF is None else clinical_BF


@triton.jit
def _treat(
    action_ptr, state_ptr, last_ptr, repeats_ptr, ended_ptr, regime_ptr, shock_ptr, fate_ptr, blur_ptr,
    still_ptr, start_ptr, effect_ptr, direction_ptr, reversion_ptr, moving_ptr, dynamic_ptr,
    to_state, to_repeats, to_ended, to_reward, to_over, to_obs, to_clinical, B,
    regime_stride, shock_stride, fate_stride, blur_stride,
    LOG_RESISTANCE: tl.constexpr, FREE: tl.constexpr, SOFA_WEIGHT: tl.constexpr, LACTATE_WEIGHT: tl.constexpr,
    DEATH_CHANCE: tl.constexpr, DEATH_SOFA: tl.constexpr, DEATH_LACTATE: tl.constexpr,
    RECOVERY_CHANCE: tl.constexpr, RECOVERY_LEVEL: tl.constexpr, A: tl.constexpr,
    WIDTH: tl.constexpr, ROOM: tl.constexpr, F: tl.constexpr, F_ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b, o, f = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, ROOM), tl.arange(0, F_ROOM)
    live = b < B
    seen, known = live[:, None] & (o < WIDTH)[None, :], live[:, None] & (f < F)[None, :]
    action = tl.load(action_ptr + b, mask=live, other=0)
    again = action == tl.load(last_ptr + b, mask=live, other=-1)
    repeats = tl.where(again, tl.load(repeats_ptr + b, mask=live, other=0) + 1, 1)
    ended = tl.load(ended_ptr + b, mask=live, other=1) != 0
    effect = tl.load(effect_ptr + tl.load(regime_ptr + b * regime_stride, mask=live, other=0) * A + action, mask=live)
    worn = tl.exp(LOG_RESISTANCE * tl.maximum(repeats - FREE, 0).to(tl.float32))
    push = effect * tl.where(effect > 0, worn, 1.0)

    obs = tl.load(still_ptr + b[:, None] * WIDTH + o[None, :], mask=seen, other=0.0)
    obs += tl.load(blur_ptr + b[:, None] * blur_stride + o[None, :], mask=seen, other=0.0)
    clinical = tl.load(start_ptr + b[:, None] * F + f[None, :], mask=known, other=0.0)
    reward, sofa, lactate = push * 0.0, push * 0.0, push * 0.0
    for i in tl.static_range(3):
        old = tl.load(state_ptr + b * 3 + i, mask=live, other=0.0)
        new = old + tl.load(reversion_ptr + i) * (0.5 - old) + push * tl.load(direction_ptr + i)
        new += tl.load(shock_ptr + b * shock_stride + i, mask=live, other=0.0)
        new = tl.where(ended, old, tl.minimum(tl.maximum(new, 0.0), 1.0))
        tl.store(to_state + b * 3 + i, new, mask=live)
        z = (new - 0.5) / 0.2
        obs += z[:, None] * tl.load(moving_ptr + i * WIDTH + o, mask=o < WIDTH, other=0.0)[None, :]
        clinical = tl.where((f == tl.load(dynamic_ptr + i))[None, :], z[:, None], clinical)
        if i == 0:
            sofa, reward = new, reward + SOFA_WEIGHT * (old - new)
        if i == 1:
            lactate, reward = new, reward + LACTATE_WEIGHT * (old - new)

    fate = tl.load(fate_ptr + b * fate_stride, mask=live, other=1.0)
    died = (sofa > DEATH_SOFA) & (lactate > DEATH_LACTATE) & (fate < DEATH_CHANCE) & ~ended
    well = (sofa < RECOVERY_LEVEL) & (lactate < RECOVERY_LEVEL) & (fate < RECOVERY_CHANCE) & ~ended
    over = died | well
    tl.store(to_repeats + b, repeats, mask=live)
    tl.store(to_ended + b, ended | over, mask=live)
    tl.store(to_reward + b, reward + well.to(tl.float32) - died.to(tl.float32), mask=live)
    tl.store(to_over + b, over, mask=live)
    tl.store(to_obs + b[:, None] * WIDTH + o[None, :], obs, mask=seen)
    tl.store(to_clinical + b[:, None] * F + f[None, :], clinical, mask=known)
