"""Treatments: five clustered actions, their effect in three regimes, and one step of the physiology.

Axes: A actions, R regimes, 3 the physiological state (SOFA, lactate, mean arterial pressure), each on [0, 1].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from uat.episode import TensorFields

ACTIONS: tuple[tuple[float, float], ...] = ((0.17, 0.1), (0.17, 0.5), (0.83, 0.2), (0.17, 0.9), (0.83, 0.8))
"""Vasopressor and fluid level of each action on [0, 1], by intensity: k-means on the 4 x 6 grid of levels."""
REGIMES = ("fluid", "vasopressor", "conservative")
EFFECTS: tuple[tuple[float, float, float], ...] = ((-0.45, 0.1, 1.0), (-0.35, 1.2, -0.5), (0.55, -1.1, -1.1))
"""Per regime: effect without treatment, per unit of vasopressor, per unit of fluid."""
EXPERT = (3, 4, 0)
"""The expert's action in each regime."""
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
    def of(cls, response: float, resistance: float, dtype: torch.dtype) -> Physiology:
        level_A2, effect_R3 = torch.tensor(ACTIONS, dtype=dtype), torch.tensor(EFFECTS, dtype=dtype)
        return cls(
            effect_RA=response * (effect_R3[:, :1] + effect_R3[:, 1:] @ level_A2.T),
            direction_3=torch.tensor([-0.7, -1.0, 1.0], dtype=dtype),
            reversion_3=torch.tensor([0.05, 0.05, 0.0], dtype=dtype),
            resistance=torch.tensor(resistance, dtype=dtype),
        )

    def expected(self, state_3: Tensor, effect: Tensor, repeats: Tensor) -> Tensor:
        """(..., 3) next state before noise and limits. repeats: how many times in a row this treatment was given."""
        worn = torch.where(effect > 0, self.resistance ** (repeats - FREE_REPEATS).clamp_min(0), 1.0)
        pull_3 = self.reversion_3 * (0.5 - state_3)
        return state_3 + pull_3 + (effect * worn)[..., None] * self.direction_3


def to_state(z: Tensor) -> Tensor:
    """Convert z-scores to [0, 1]."""
    return (0.5 + 0.2 * z).clamp(0, 1)


def to_z(state: Tensor) -> Tensor:
    return (state - 0.5) / 0.2
