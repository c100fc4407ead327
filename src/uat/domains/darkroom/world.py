"""DarkRoom: a grid with a hidden goal; each step is a few table lookups.

Order of events at step t: the goal moves (if t is a shift step), the agent observes, the expert labels, the agent
acts; the reward is earned with the goal of step t. A shift at t therefore shows in observation and label t, while
reward t - 1 still belongs to the old goal.

Axes: B worlds, C cells of the agent and G cells of the goal (row * size + column), A actions, O wall mask.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Literal, Self

import torch
from torch import Tensor

from uat.contracts import Simulator, Transition
from uat.domains.darkroom.schedule import Schedule, goals
from uat.episode import Noise, TensorFields
from uat.memory import check_fits
from uat.noise import integers, uniform
from uat.settings import Between, Steps, check_fields
from uat.spec import Discrete, Spec, Vector

TieBreak = Literal["larger-axis", "row-first", "random"]

STAY, UP, DOWN, LEFT, RIGHT = range(5)
MOVES = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))
CUE_REACH = 2
CUE_CHANCE = 0.5
COIN_CHANCE = 0.5
FLOOR, BLUE, ORANGE, GREEN = 235, (0, 114, 178), (230, 159, 0), (0, 158, 115)
"""Colours of a frame."""
MOST_SIDE = 1000
BYTES_PER_PAIR = 150
"""Memory for each pair of a cell and a goal while the tables of a room are computed."""
MANY_WORLDS = 2**40
"""A number of worlds greater than any number of episodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DarkRoomConfig:
    schedule: Schedule = "gradual"
    """Movement of the goal from episode to episode: gradual, abrupt or cyclic."""
    tie_break: TieBreak = "larger-axis"
    """Shortest path that the expert takes: larger-axis, row-first or random."""
    size: Annotated[int, Between(2, MOST_SIDE)] = 10
    """Cells along each side of the room."""
    horizon: Steps = 60
    """Steps of one episode; no episode ends early."""
    num_worlds: Annotated[int, Between(1, MANY_WORLDS)] = 256
    """Number of goal sequences; episode id = index in its sequence * num_worlds + world."""
    shift_steps: tuple[Steps, ...] = ()
    """Steps within an episode at which the goal moves along its schedule."""

    def __post_init__(self) -> None:
        check_fields(self)
        bounds = (0, *self.shift_steps, self.horizon)
        if any(a >= b for a, b in pairwise(bounds)):
            raise ValueError(f"shift_steps={self.shift_steps} must increase within [1, horizon={self.horizon})")

    @property
    def spec(self) -> Spec:
        return Spec(obs=Vector(10), action=Discrete(len(MOVES)), horizon=self.horizon)


@dataclass(slots=True, kw_only=True)
class Grid(TensorFields):
    """Tables of all transitions, rewards, expert actions and observations of a room."""

    next_AC: Tensor
    """Cell after a move; a move into a wall stays."""
    reward_ACG: Tensor
    optimal_ACG: Tensor
    """True for the moves that reduce the distance, and for staying on the goal."""
    expert_2CG: Tensor
    """The expert's action for each side of its coin; they differ only where it chooses between two optimal moves."""
    walls_CO: Tensor
    """3x3 mask around the cell, row by row: 1 outside the room."""
    distance_CG: Tensor
    """Manhattan distance."""
    obs_2CGO: Tensor
    """Observation (wall mask, then cue) while the cue is silent, and while it fires if the goal is near."""

    @classmethod
    def build(cls, size: int, tie_break: TieBreak) -> Self:
        check_fits(BYTES_PER_PAIR * size**4, f"the tables of a room of size={size}")
        cell_C, move_A2 = torch.arange(size**2), torch.tensor(MOVES)
        row_C, column_C = cell_C // size, cell_C % size
        row_AC, column_AC = row_C + move_A2[:, :1], column_C + move_A2[:, 1:]
        next_AC = row_AC.clamp(0, size - 1) * size + column_AC.clamp(0, size - 1)

        down_CG, right_CG = row_C - row_C[:, None], column_C - column_C[:, None]  # from the agent to the goal
        distance_CG = down_CG.abs() + right_CG.abs()
        after_ACG = distance_CG[next_AC]
        closer_ACG, farther_ACG = after_ACG < distance_CG, after_ACG > distance_CG
        reward_ACG = -0.01 + 0.5 * closer_ACG.double() - 0.5 * farther_ACG.double() + 2.0 * (after_ACG == 0).double()
        optimal_ACG = closer_ACG.clone()
        optimal_ACG[STAY] = distance_CG == 0

        around = torch.tensor([-1, 0, 1])
        row_CO, column_CO = row_C[:, None] + around.repeat_interleave(3), column_C[:, None] + around.repeat(3)
        walls_CO = ((row_CO < 0) | (row_CO >= size) | (column_CO < 0) | (column_CO >= size)).float()
        cue_2CG = torch.stack([torch.zeros_like(distance_CG), distance_CG <= CUE_REACH]).float()
        walls_2CGO = walls_CO[None, :, None].expand(2, -1, size**2, -1)
        return cls(
            next_AC=next_AC,
            reward_ACG=reward_ACG.float(),
            optimal_ACG=optimal_ACG,
            expert_2CG=_expert(down_CG, right_CG, tie_break),
            walls_CO=walls_CO,
            distance_CG=distance_CG,
            obs_2CGO=torch.cat([walls_2CGO, cue_2CG[..., None]], dim=-1),
        )


def _expert(down_CG: Tensor, right_CG: Tensor, tie_break: TieBreak) -> Tensor:
    """(2, C, G) the expert's action for each side of its coin."""
    vertical_CG, horizontal_CG = torch.where(down_CG < 0, UP, DOWN), torch.where(right_CG < 0, LEFT, RIGHT)
    if tie_break == "larger-axis":
        goes_vertical = (down_CG.abs() >= right_CG.abs()).expand(2, -1, -1)
    elif tie_break == "row-first":
        goes_vertical = (down_CG != 0).expand(2, -1, -1)
    else:
        goes_vertical = torch.stack([down_CG != 0, right_CG == 0])
    arrived_CG = (down_CG == 0) & (right_CG == 0)
    return torch.where(arrived_CG, STAY, torch.where(goes_vertical, vertical_CG, horizontal_CG))


@dataclass(frozen=True, slots=True)
class World:
    position_B: Tensor
    goal_BK: Tensor
    """The goal at the start and after each shift."""
    fires_BT: Tensor
    """1 where the cue fires if the goal is near."""
    coin_BT: Tensor
    """The expert's choice between two optimal moves, 0 or 1."""
    ended_B: Tensor
    """False everywhere: no episode ends before the horizon."""
    t: int = 0


class DarkRoomSimulator(Simulator[World]):
    """Worlds of one room. Only `noise` reads values on the host; all else can be captured as a CUDA graph."""

    def __init__(self, config: DarkRoomConfig, device: torch.device | str) -> None:
        self.config = config
        self.spec = config.spec
        self.device = device
        self.grid = Grid.build(config.size, config.tie_break).to(device)

    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        c, ids_B = self.config, episode_ids.to(self.device, non_blocking=True)
        furthest = int(episode_ids.max()) // c.num_worlds  # no wait for the device if the ids are on the host
        world_B, index_B = ids_B % c.num_worlds, ids_B // c.num_worlds
        goal_BK = goals(c.schedule, c.size, seed, world_B, index_B, len(c.shift_steps), c.num_worlds, furthest)
        other_B = integers(seed, "darkroom.start", ids_B, 1, below=c.size**2 - 1)[:, 0]
        return {
            "goal": goal_BK,
            "start": other_B + (other_B >= goal_BK[:, 0]),  # uniform over the cells that are not the goal
            "cue": uniform(seed, "darkroom.cue", ids_B, c.horizon + 1).float(),
            "tie": uniform(seed, "darkroom.tie", ids_B, c.horizon).float(),
        }

    def reset(self, noise: Noise) -> tuple[World, Tensor]:
        world = World(
            position_B=noise["start"],
            goal_BK=noise["goal"],
            fires_BT=(noise["cue"] < CUE_CHANCE).long(),
            coin_BT=(noise["tie"] >= COIN_CHANCE).long(),
            ended_B=torch.zeros_like(noise["start"], dtype=torch.bool),
        )
        return world, self._observe(world)

    def expert(self, world: World) -> Tensor:
        return self.grid.expert_2CG[world.coin_BT[:, world.t], world.position_B, self.goal(world)]

    def step(self, world: World, action: Tensor) -> Transition[World]:
        reward_B = self.grid.reward_ACG[action, world.position_B, self.goal(world)]
        after = replace(world, position_B=self.grid.next_AC[action, world.position_B], t=world.t + 1)
        return Transition(after, self._observe(after), reward_B, self.terminated(after))

    def goals(self, goal_BK: Tensor) -> Tensor:
        """(B, T) the goal at each step; a view if it never moves within an episode."""
        bounds = pairwise((0, *self.config.shift_steps, self.spec.steps))
        parts = [goal_BK[:, k, None].expand(-1, end - begin) for k, (begin, end) in enumerate(bounds)]
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def terminated(self, after: World) -> Tensor:
        """(B,) whether the episode is over. The horizon is part of the task, so it terminates and does not truncate."""
        return ~after.ended_B if after.t == self.spec.steps else after.ended_B

    def facts(self, world: World) -> dict[str, Tensor]:
        return {"position": world.position_B, "goal": self.goal(world)}

    def frame(self, world: World) -> Tensor:
        """Return one pixel per cell: the agent blue, the goal orange, and green for both on one cell."""
        goal, position = int(self.goal(world)[0]), int(world.position_B[0])
        image = torch.full((self.config.size**2, 3), FLOOR, dtype=torch.uint8)
        image[goal] = torch.tensor(ORANGE, dtype=torch.uint8)
        image[position] = torch.tensor(GREEN if position == goal else BLUE, dtype=torch.uint8)
        return image.view(self.config.size, self.config.size, 3)

    def goal(self, world: World) -> Tensor:
        return world.goal_BK[:, bisect_right(self.config.shift_steps, world.t)]

    def _observe(self, world: World) -> Tensor:
        """(B, 10) wall mask and cue."""
        return self.grid.obs_2CGO[world.fires_BT[:, world.t], world.position_B, self.goal(world)]
