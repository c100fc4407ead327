"""The domain of hidden rules: its splits, metrics and references.

Axes: B episodes, T time, K actions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from uat.contracts import Agent
from uat.domains.chance import UniformAgent
from uat.domains.domain import Domain, Split
from uat.domains.rule.baselines import Hebbian, LinTS, LinUCB
from uat.domains.rule.filter import KalmanFilter, PointFilter, ProbitFilter, RuleFilter
from uat.domains.rule.world import RuleConfig, RuleSimulator
from uat.episode import Trajectory, episode_mean
from uat.metrics import Metric
from uat.settings import changed_fields

LATE_STEPS = 20
"""Number of last steps that count as late."""
POST_FLIP_STEPS = 5
"""Number of first steps after each flip that count as post-flip."""


class Rule(Domain):
    """A contextual bandit: a hidden rule decides which action is right for an observation, and rewards reveal it."""

    name = "rule"
    train_tasks = ("fixed", "flip", "drift")
    rivals = ("hebbian",)

    def __init__(self, config: RuleConfig) -> None:
        self.config = config
        self.spec = config.spec
        self.task = config.task
        changed = changed_fields(config)
        changed.pop("task", None)
        self.setting = ",".join(f"{name}={value}" for name, value in changed.items()) or "default"
        flips = (Metric(name="post_flip_accuracy", label="Post-flip accuracy", partial=True),)
        self.metrics = (
            Metric(name="accuracy", label="Accuracy"),
            Metric(name="late_accuracy", label="Accuracy, last 20 steps"),
            *(flips if config.task == "flip" else ()),
            Metric(name="return", label="Return"),
            Metric(name="regret", label="Regret", higher_is_better=False),
        )

    def simulator(self, split: Split, device: torch.device | str) -> RuleSimulator:
        """Return the worlds of a split; splits differ by seed alone."""
        return RuleSimulator(self.config, device)

    def measure(self, trajectory: Trajectory) -> dict[str, Tensor]:
        """Return the metrics per episode; accuracy after flips is NaN in episodes without one."""
        valid_BT = trajectory.valid
        right_BT = (trajectory.action == trajectory.required_target).float()
        t_T = torch.arange(valid_BT.shape[1], device=valid_BT.device)
        values = {
            "accuracy": episode_mean(right_BT, valid_BT),
            "late_accuracy": episode_mean(right_BT, valid_BT & (t_T >= valid_BT.sum(1, keepdim=True) - LATE_STEPS)),
        }
        if self.config.task == "flip":
            shifted_BT = (since_flip(trajectory.facts["turn"]) < POST_FLIP_STEPS) & valid_BT
            values["post_flip_accuracy"] = torch.where(shifted_BT, right_BT, 0.0).sum(1) / shifted_BT.sum(1)
        values["return"] = torch.where(valid_BT, trajectory.reward, 0.0).sum(1)
        values["regret"] = torch.where(valid_BT, self._shortfall(trajectory, right_BT), 0.0).sum(1)
        return values

    def references(self) -> dict[str, Agent[Any]]:
        """Return the references. Those between the filter and chance know no laws, and never forget."""
        c = self.config
        return {
            "ceiling": bayes_filter(c),
            "hebbian": Hebbian(c),
            "lin-ucb": LinUCB(c),
            "lin-ts": LinTS(c),
            "random": UniformAgent(self.spec),
        }

    def _shortfall(self, trajectory: Trajectory, right_BT: Tensor) -> Tensor:
        """(B, T) expected reward of the right action minus that of the action taken."""
        if self.config.reward == "sign":
            return 2 * (1 - 2 * self.config.label_noise) * (1 - right_BT)
        score_BTK = trajectory.facts["score"]
        return score_BTK.amax(-1) - score_BTK.gather(-1, trajectory.action[..., None])[..., 0]


def bayes_filter(config: RuleConfig) -> RuleFilter:
    """Return the best filter that covers a problem."""
    covering = (KalmanFilter, ProbitFilter, PointFilter)
    return next(kind(config) for kind in covering if kind.unsupported_reason(config) is None)


def since_flip(turn_BT: Tensor) -> Tensor:
    """(B, T) steps since the last flip; 0 at its first step, and at least T before the first flip."""
    steps = turn_BT.shape[1]
    t_T = torch.arange(steps, device=turn_BT.device)
    flips_BT = torch.zeros_like(turn_BT, dtype=torch.bool)
    flips_BT[:, 1:] = turn_BT[:, 1:] != turn_BT[:, :-1]
    return t_T - torch.where(flips_BT, t_T, -steps).cummax(1).values
