"""The dark room as a domain: what is trained, measured, and shown beside it.

Axes: B episodes, T time, A actions, C cells of the agent, G cells of the goal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from uat.contracts import Agent
from uat.domains.chance import UniformAgent
from uat.domains.darkroom.filter import DarkRoomFilter
from uat.domains.darkroom.world import MANY_WORLDS, DarkRoomConfig, DarkRoomSimulator, Grid
from uat.domains.domain import Domain, Split
from uat.episode import Trajectory, episode_mean
from uat.metrics import Metric
from uat.settings import changed_fields


class DarkRoom(Domain):
    """Navigation to a goal that drifts, jumps or cycles between episodes."""

    name = "darkroom"
    train_tasks = ("gradual", "abrupt", "cyclic")
    metrics = (
        Metric(name="accuracy", label="Accuracy"),
        Metric(name="optimal_accuracy", label="Optimal-set accuracy"),
        Metric(name="efficiency", label="Navigation efficiency"),
        Metric(name="return", label="Return"),
    )

    def __init__(self, config: DarkRoomConfig) -> None:
        self.config = config
        self.spec = config.spec
        self.task = config.schedule
        self.setting = _setting(config)
        self.grid = Grid.build(config.size, config.tie_break)
        self._grids: dict[torch.device, Grid] = {}

    def simulator(self, split: Split, device: torch.device | str) -> DarkRoomSimulator:
        """The same room for every split; splits differ by seed.

        To be judged, each episode comes from a world of its own, so that episodes are independent draws of the
        same law: memory ends with an episode, so nothing else of the sequence could matter.
        """
        config = self.config if split == "train" else replace(self.config, num_worlds=MANY_WORLDS)
        return DarkRoomSimulator(config, device)

    def measure(self, trajectory: Trajectory) -> dict[str, Tensor]:
        action_BT, valid_BT = trajectory.action, trajectory.valid
        position_BT, goal_BT = trajectory.facts["position"], trajectory.facts["goal"]
        optimal_BT = self._grid_on(action_BT.device).optimal_ACG[action_BT, position_BT, goal_BT]
        return {
            "accuracy": episode_mean((action_BT == trajectory.required_target).float(), valid_BT),
            "optimal_accuracy": episode_mean(optimal_BT.float(), valid_BT),
            "efficiency": self._efficiency(position_BT, goal_BT, valid_BT),
            "return": torch.where(valid_BT, trajectory.reward, 0.0).sum(1),
        }

    def references(self) -> dict[str, Agent[Any]]:
        return {"ceiling": DarkRoomFilter(self.config), "random": UniformAgent(self.spec)}

    def _efficiency(self, position_BT: Tensor, goal_BT: Tensor, valid_BT: Tensor) -> Tensor:
        """(B,) shortest path over moves made until first on the goal of the moment; the horizon if never.

        The cell before action t is the cell after t moves, and arriving with the last move counts as the horizon.
        """
        arrived_BT = (position_BT == goal_BT) & valid_BT
        moves_B = torch.where(arrived_BT.any(1), arrived_BT.int().argmax(1), self.spec.steps)
        shortest_B = self._grid_on(position_BT.device).distance_CG[position_BT[:, 0], goal_BT[:, 0]]
        return shortest_B / torch.maximum(moves_B, shortest_B)

    def _grid_on(self, device: torch.device) -> Grid:
        """Brought there once: a host that brings it waits until the device has done all else."""
        if device not in self._grids:
            self._grids[device] = self.grid.to(device)
        return self._grids[device]


def _setting(config: DarkRoomConfig) -> str:
    """The fields beside the schedule that are not at their defaults: "tie_break=row-first,size=8"."""
    changed = changed_fields(config)
    changed.pop("schedule", None)
    if "shift_steps" in changed:
        changed["shift_steps"] = "+".join(map(str, config.shift_steps))
    return ",".join(f"{name}={value}" for name, value in changed.items()) or "default"
