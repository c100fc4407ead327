"""Treatments: five clustered actions, their effect in three regimes, and one step of the physiology.

There are two tasks with the same labels. In `regimes` the labels are the paper's, which are not always the actions with
the largest effect. In `aligned` the label has the largest effect in every regime at every step, so that no policy
brings patients into a better state than the expert.

Axes: A actions, R regimes, 3 the physiological state (SOFA, lactate, mean arterial pressure), each on [0, 1].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from uat.episode import TensorFields

ACTIONS: tuple[tuple[float, float], ...] = ((0.17, 0.1), (0.17, 0.5), (0.83, 0.2), (0.17, 0.9), (0.83, 0.8))
"""Vasopressor and fluid level of each action on [0, 1], by intensity: k-means on the 4 x 6 grid of levels."""
REGIMES = ("fluid", "vasopressor", "conservative")
Task = Literal["regimes", "aligned"]


@dataclass(frozen=True, slots=True)
class Effects:
    """Effects of treatment in one task."""

    of_regimes: tuple[tuple[float, float, float], ...]
    """Per regime: effect without treatment, per unit of vasopressor, per unit of fluid."""
    wear_off: bool
    """Whether the benefit of a repeated treatment decreases."""


EFFECTS: dict[Task, Effects] = {
    "regimes": Effects(((-0.45, 0.1, 1.0), (-0.35, 1.2, -0.5), (0.55, -1.1, -1.1)), wear_off=True),
    "aligned": Effects(((-0.25, -0.25, 0.6), (-0.1, 0.4, 0.35), (0.65, -0.5, -0.5)), wear_off=False),
}
EXPERT = (3, 4, 0)
"""The expert's action in each regime, in both tasks."""
FREE_REPEATS = 3
"""Number of times in a row that a treatment can be given before its benefit decreases."""

SOFA, LACTATE, MAP = range(3)


@dataclass(slots=True, kw_only=True)
class Physiology(TensorFields):
    """Tables for one step, on any device and in any precision."""

    effect_RA: Tensor
    direction_3: Tensor
    """Change of each coordinate per unit of response."""
    reversion_3: Tensor
    """Share of the distance to the middle that each coordinate returns per step without treatment."""
    resistance: Tensor
    """Factor on a benefit for every repeat past the free ones."""

    @classmethod
    def of(cls, task: Task, response: float, resistance: float, dtype: torch.dtype) -> Physiology:
        level_A2 = torch.tensor(ACTIONS, dtype=dtype)
        effect_R3 = torch.tensor(EFFECTS[task].of_regimes, dtype=dtype)
        return cls(
            effect_RA=response * (effect_R3[:, :1] + effect_R3[:, 1:] @ level_A2.T),
            direction_3=torch.tensor([-0.7, -1.0, 1.0], dtype=dtype),
            reversion_3=torch.tensor([0.05, 0.05, 0.0], dtype=dtype),
            resistance=torch.tensor(resistance, dtype=dtype),
        )

    def expected(self, state_3: Tensor, effect: Tensor, repeats: Tensor) -> Tensor:
        """(..., 3) next state before noise and limits. repeats: how many times in a row this treatment was given."""
        pull_3 = self.reversion_3 * (0.5 - state_3)
        return state_3 + pull_3 + self.worn(effect, repeats)[..., None] * self.direction_3

    def worn(self, effect: Tensor, repeats: Tensor) -> Tensor:
        """Return the effect of a treatment given for the n-th time in a row: benefits wear off, harm does not."""
        return effect * torch.where(effect > 0, self.resistance ** (repeats - FREE_REPEATS).clamp_min(0), 1.0)


def to_state(z: Tensor) -> Tensor:
    """Convert z-scores to [0, 1]."""
    return (0.5 + 0.2 * z).clamp(0, 1)


def to_z(state: Tensor) -> Tensor:
    return (state - 0.5) / 0.2
