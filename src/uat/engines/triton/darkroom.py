"""The dark room on a GPU (Triton): all table lookups of a step in one launch, or whole episodes in a policy's kernel.

The slow twin of both is `DarkRoomSimulator`.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from uat.contracts import Transition
from uat.domains.darkroom import world as rules
from uat.domains.darkroom.world import DarkRoomSimulator, Grid, World
from uat.engines.worlds import FusedRollouts, FusedWorld
from uat.episode import Noise, Trajectory

BLOCK = 32
CUE_CHANCE, COIN_CHANCE = tl.constexpr(rules.CUE_CHANCE), tl.constexpr(rules.COIN_CHANCE)


class Moved(NamedTuple):
    """Result of a move: new positions, rewards, observations, and the expert's actions."""

    position_B: Tensor
    reward_B: Tensor
    obs_BO: Tensor
    target_B: Tensor


def move(
    grid: Grid,
    action_B: Tensor,
    position_B: Tensor,
    goal_B: Tensor,
    next_goal_B: Tensor,
    fires_B: Tensor,
    coin_B: Tensor,
) -> Moved:
    """Compute one step of every world. Columns of a table (goals, cue, coin) may have any stride."""
    streams, cells, width = len(action_B), grid.walls_CO.shape[0], grid.obs_2CGO.shape[-1]
    moved = Moved(
        torch.empty_like(position_B),
        grid.reward_ACG.new_empty(streams),
        grid.obs_2CGO.new_empty(streams, width),
        torch.empty_like(position_B),
    )
    cast(Any, _move)[(triton.cdiv(streams, BLOCK),)](
        action_B, position_B, goal_B, next_goal_B, fires_B, coin_B, grid.next_AC, grid.reward_ACG, grid.obs_2CGO,
        grid.expert_2CG, *moved, streams, goal_B.stride(0), next_goal_B.stride(0), fires_B.stride(0), coin_B.stride(0),
        C=cells, WIDTH=width, ROOM=triton.next_power_of_2(width), BLOCK=BLOCK, num_warps=1,
    )  # fmt: skip
    return moved


@dataclass(frozen=True, slots=True)
class LabelledWorld(World):
    target_B: Tensor | None = None
    """The expert's action, looked up together with the step."""


class FusedDarkRoom(DarkRoomSimulator, FusedRollouts):
    """A dark room with steps of a single launch, and episodes that a policy's kernel can play."""

    def __init__(self, simulator: DarkRoomSimulator) -> None:
        vars(self).update(vars(simulator))
        self._ends: dict[int, tuple[Tensor, Tensor]] = {}

    def reset(self, noise: Noise) -> tuple[World, Tensor]:
        world, obs = super().reset(noise)
        return LabelledWorld(**{field.name: getattr(world, field.name) for field in fields(World)}), obs

    def expert(self, world: World) -> Tensor:
        target_B = cast(LabelledWorld, world).target_B
        return super().expert(world) if target_B is None else target_B

    def step(self, world: World, action: Tensor) -> Transition[World]:
        after = replace(world, t=world.t + 1)
        fires_B, coin_B = world.fires_BT[:, after.t], world.coin_BT[:, min(after.t, self.spec.steps - 1)]
        moved = move(self.grid, action, world.position_B, self.goal(world), self.goal(after), fires_B, coin_B)
        after = replace(cast(LabelledWorld, after), position_B=moved.position_B, target_B=moved.target_B)
        return Transition(after, moved.obs_BO, moved.reward_B, self.terminated(after))

    def fused_world(self, noise: Noise) -> FusedWorld:
        grid, steps, streams = self.grid, self.spec.steps, len(noise["start"])
        position_BT, target_BT = (noise["start"].new_empty(streams, steps) for _ in range(2))
        goal_BT, reward_BT = self.goals(noise["goal"]), grid.reward_ACG.new_empty(streams, steps)
        obs_BTO = grid.obs_2CGO.new_empty(streams, steps, grid.obs_2CGO.shape[-1])

        def trajectory(action_BT: Tensor) -> Trajectory:
            terminated_BT, valid_BT = self.ends(streams)
            return Trajectory(
                obs=obs_BTO,
                action=action_BT,
                reward=reward_BT,
                terminated=terminated_BT,
                target=target_BT,
                valid=valid_BT,
                facts={"position": position_BT, "goal": goal_BT},
            )

        tables = (grid.next_AC, grid.reward_ACG, grid.obs_2CGO, grid.expert_2CG)
        to_note = (position_BT, reward_BT, obs_BTO, target_BT)
        drawn = (noise["start"].contiguous(), goal_BT, noise["cue"].contiguous(), noise["tie"].contiguous())
        sizes = (grid.walls_CO.shape[0], obs_BTO.shape[-1], *goal_BT.stride())
        return FusedWorld(_start, _look, _note, _move_on, (*tables, *to_note, *drawn, *sizes), trajectory)

    def ends(self, streams: int) -> tuple[Tensor, Tensor]:
        """Return `terminated` and `valid` (B, T) of whole episodes: constant, created once, never written."""
        if streams not in self._ends:
            valid_BT = torch.ones(streams, self.spec.steps, dtype=torch.bool)
            terminated_BT = torch.zeros_like(valid_BT)
            terminated_BT[:, -1] = True
            self._ends[streams] = terminated_BT.to(self.device), valid_BT.to(self.device)
        return self._ends[streams]


@triton.jit
def _start(stream, live, world, T: tl.constexpr):
    """Return position and goal as one number, and write the position."""
    (_, _, _, _, positions, _, _, _, starts, goals, _, _, cells, _, goal_stride, _) = world
    position = tl.load(starts + stream, mask=live, other=0)
    goal = tl.load(goals + stream * goal_stride, mask=live, other=0)
    tl.store(positions + stream * T, position, mask=live)
    return (position * cells + goal).to(tl.int32)


@triton.jit
def _look(t, spot, stream, live, o, world, T: tl.constexpr, FETCH: tl.constexpr):
    """Return the observation at step t, and `known`: position and goal, and the expert's action."""
    (_, _, obs_ptr, expert_ptr, _, _, _, _, _, _, cues, ties, cells, width, _, _) = world
    coin = (tl.load(ties + stream * T + t, mask=live, other=0.0) >= COIN_CHANCE).to(tl.int32)
    fires = (tl.load(cues + stream * (T + 1) + t, mask=live, other=1.0) < CUE_CHANCE).to(tl.int32)
    row = (fires * cells * cells + spot).to(tl.int64)[:, None] * width + o[None, :]
    seen = FETCH(obs_ptr + row, live[:, None] & (o < width)[None, :])
    return seen, (spot, tl.load(expert_ptr + coin * cells * cells + spot, mask=live, other=0))


@triton.jit
def _note(t, seen, known, stream, live, o, world, T: tl.constexpr, PUT: tl.constexpr):
    """Write the observation and the expert's action."""
    (_, _, _, _, _, _, to_obs, to_target, _, _, _, _, _, width, _, _) = world
    _, target = known
    at = stream * T + t
    PUT(to_obs + at[:, None] * width + o[None, :], seen, live[:, None] & (o < width)[None, :])
    tl.store(to_target + at, target, mask=live)


@triton.jit
def _move_on(t, known, stream, live, action, world, T: tl.constexpr):
    """Return and write the reward of the action at step t and the next position."""
    (next_ptr, reward_ptr, _, _, positions, to_reward, _, _, _, goals, _, _, cells, _, goal_stride, goal_step) = world
    spot, _ = known
    at = stream * T + t
    after = tl.load(next_ptr + action * cells + spot // cells, mask=live, other=0)
    reward = tl.load(reward_ptr + action * cells * cells + spot, mask=live, other=0.0)
    goes_on = live & (t + 1 < T)
    goal = tl.load(goals + stream * goal_stride + (t + 1) * goal_step, mask=goes_on, other=0)
    tl.store(positions + at + 1, after, mask=goes_on)
    tl.store(to_reward + at, reward, mask=live)
    return reward, (after * cells + goal).to(tl.int32)


@triton.jit
def _move(
    action_ptr, position_ptr, goal_ptr, next_goal_ptr, fires_ptr, coin_ptr, next_ptr, reward_ptr, obs_ptr, expert_ptr,
    to_position, to_reward, to_obs, to_target, B, goal_stride, next_goal_stride, fires_stride, coin_stride,
    C: tl.constexpr, WIDTH: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = b < B
    action = tl.load(action_ptr + b, mask=live, other=0)
    position = tl.load(position_ptr + b, mask=live, other=0)
    goal = tl.load(goal_ptr + b * goal_stride, mask=live, other=0)
    next_goal = tl.load(next_goal_ptr + b * next_goal_stride, mask=live, other=0)
    fires = tl.load(fires_ptr + b * fires_stride, mask=live, other=0)
    coin = tl.load(coin_ptr + b * coin_stride, mask=live, other=0)
    reward = tl.load(reward_ptr + (action * C + position) * C + goal, mask=live, other=0.0)
    after = tl.load(next_ptr + action * C + position, mask=live, other=0)
    target = tl.load(expert_ptr + (coin * C + after) * C + next_goal, mask=live, other=0)
    o = tl.arange(0, ROOM)
    inside = live[:, None] & (o < WIDTH)[None, :]
    row = ((fires * C + after) * C + next_goal)[:, None] * WIDTH + o[None, :]
    tl.store(to_position + b, after, mask=live)
    tl.store(to_reward + b, reward, mask=live)
    tl.store(to_target + b, target, mask=live)
    tl.store(to_obs + b[:, None] * WIDTH + o[None, :], tl.load(obs_ptr + row, mask=inside, other=0.0), mask=inside)
