"""The DarkRoom domain: its splits, metrics and references.

Axes: B episodes, T time, A actions, C cells of the agent, G cells of the goal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from uat.channel import FeedbackConfig
from uat.contracts import Agent
from uat.domains.chance import UniformAgent
from uat.domains.darkroom.channel_filter import ChannelFilter, covers
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
        """Return the worlds of a split; all splits share the room and differ by seed.

        In validation and test each episode has a world of its own, so that episodes are independent draws of the same
        distribution. Policies forget everything between episodes, so the rest of a goal sequence is not needed.
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

    def references_under(self, feedback: FeedbackConfig) -> dict[str, Agent[Any]]:
        """Return the filter that knows the channel, except for channels without an exact one."""
        return {"ceiling": ChannelFilter(self.config, feedback)} if covers(self.config, feedback) else {}

    def _efficiency(self, position_BT: Tensor, goal_BT: Tensor, valid_BT: Tensor) -> Tensor:
        """(B,) length of the shortest path over the number of moves until the agent first is on the current goal.

        The cell before action t is the cell after t moves. The number of moves is the horizon if the agent never
        arrives, or arrives with the last move.
        """
        arrived_BT = (position_BT == goal_BT) & valid_BT
        moves_B = torch.where(arrived_BT.any(1), arrived_BT.int().argmax(1), self.spec.steps)
        shortest_B = self._grid_on(position_BT.device).distance_CG[position_BT[:, 0], goal_BT[:, 0]]
        return shortest_B / torch.maximum(moves_B, shortest_B)

    def _grid_on(self, device: torch.device) -> Grid:
        """Return the grid on a device, copied once: each copy would make the host wait for the device."""
        if device not in self._grids:
            self._grids[device] = self.grid.to(device)
        return self._grids[device]


def _setting(config: DarkRoomConfig) -> str:
    """Return the settings that are not at their defaults, without the schedule: "tie_break=row-first,size=8"."""
    changed = changed_fields(config)
    changed.pop("schedule", None)
    if "shift_steps" in changed:
        changed["shift_steps"] = "+".join(map(str, config.shift_steps))
    return ",".join(f"{name}={value}" for name, value in changed.items()) or "default"
