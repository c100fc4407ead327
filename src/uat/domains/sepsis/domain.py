"""The sepsis domain: its splits, metrics and references.

Axes: B episodes, T time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uat.contracts import Agent
from uat.domains.chance import UniformAgent
from uat.domains.domain import Domain, Split
from uat.domains.sepsis.cohort import prepare
from uat.domains.sepsis.filter import HazardFilter, SegmentFilter
from uat.domains.sepsis.planner import Planner
from uat.domains.sepsis.treatment import REGIMES
from uat.domains.sepsis.world import SepsisConfig, SepsisSimulator
from uat.episode import Trajectory
from uat.metrics import Metric
from uat.settings import changed_fields

POST_SHIFT_STEPS = 5
"""Number of first steps of each regime that count as post-shift."""
BONUS = 0.5
"""Rewards above it, or below its negative, contain the bonus of an outcome; improvements alone give at most 0.15."""


class Sepsis(Domain):
    """Treatment of a patient whose response depends on a hidden regime that changes a few times per episode."""

    name = "sepsis"
    train_tasks = ("regimes", "aligned")
    metrics = (
        Metric(name="accuracy", label="Accuracy"),
        Metric(name="post_shift_accuracy", label="Post-shift accuracy"),
        *(Metric(name=f"{regime}_accuracy", label=f"Accuracy, {regime}", partial=True) for regime in REGIMES),
        Metric(name="recovery_rate", label="Recovery rate"),
        Metric(name="death_rate", label="Death rate", higher_is_better=False),
        Metric(name="return", label="Return"),
    )

    def __init__(self, config: SepsisConfig) -> None:
        self.config = config
        self.spec = config.spec
        self.task = config.task
        changed = changed_fields(config)
        changed.pop("task", None)
        if config.cohort is not None:
            changed["cohort"] = Path(config.cohort).stem  # the file name without the folder
        self.setting = ",".join(f"{name}={value}" for name, value in changed.items()) or "default"
        if config.cohort is not None:
            prepare(config.cohort)  # refuses an unusable file at once

    def simulator(self, split: Split, device: torch.device | str) -> SepsisSimulator:
        """Return the worlds of a split. Validation uses the training patients in other episodes; test has its own."""
        cohort = prepare(self.config.cohort)
        everyone = len(cohort.clinical_PF)
        patients = (cohort.num_train, everyone) if split == "test" else (0, cohort.num_train)
        return SepsisSimulator(self.config, cohort, patients, device)

    def measure(self, trajectory: Trajectory) -> dict[str, Tensor]:
        """Return the metrics per episode; a regime's accuracy is NaN in episodes without that regime."""
        regime_BT, valid_BT = trajectory.facts["regime"], trajectory.valid
        right_BT = (trajectory.action == trajectory.required_target).float()
        shifted_BT = since_shift(regime_BT) < POST_SHIFT_STEPS
        by_regime = {f"{name}_accuracy": _mean(right_BT, valid_BT & (regime_BT == r)) for r, name in enumerate(REGIMES)}
        reward_BT = torch.where(valid_BT & trajectory.terminated, trajectory.reward, 0.0)
        return {
            "accuracy": _mean(right_BT, valid_BT),
            "post_shift_accuracy": _mean(right_BT, valid_BT & shifted_BT),
            **by_regime,
            "recovery_rate": (reward_BT > BONUS).any(1).float(),
            "death_rate": (reward_BT < -BONUS).any(1).float(),
            "return": torch.where(valid_BT, trajectory.reward, 0.0).sum(1),
        }

    def references(self) -> dict[str, Agent[Any]]:
        """Return the references. The ceiling knows the distribution of segment lengths; "constant-hazard" knows only
        the mean number of segments; "planner" sees the regime, as the expert does, and maximises the effect."""
        c = self.config
        mean_segments = (c.min_segments + c.max_segments) / 2
        return {
            "ceiling": SegmentFilter(c),
            "constant-hazard": HazardFilter(c, hazard=mean_segments / c.horizon),
            "planner": Planner(c),
            "random": UniformAgent(self.spec),
        }


def since_shift(regime_BT: Tensor) -> Tensor:
    """(B, T) steps since the current regime began; 0 at its first step."""
    t_T = torch.arange(regime_BT.shape[1], device=regime_BT.device)
    begins_BT = torch.ones_like(regime_BT, dtype=torch.bool)
    begins_BT[:, 1:] = regime_BT[:, 1:] != regime_BT[:, :-1]
    return t_T - torch.where(begins_BT, t_T, 0).cummax(1).values


def _mean(x_BT: Tensor, counts_BT: Tensor) -> Tensor:
    """(B,) mean over the steps in `counts_BT`; NaN if no step counts."""
    return torch.where(counts_BT, x_BT, 0.0).sum(1) / counts_BT.sum(1)
