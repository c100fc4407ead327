"""The planner: a privileged reference that sees the regime and takes the treatment with the largest effect now.

It knows how much of a treatment's benefit has worn off, so that it changes treatment when another one helps more. Its
label accuracy says how far rewards and labels agree, and its return is what a policy can earn if it knows the regime.

Axes: B streams, A actions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from uat.contracts import Agent
from uat.domains.sepsis.treatment import ACTIONS
from uat.domains.sepsis.world import SepsisConfig
from uat.episode import Step


@dataclass(slots=True, kw_only=True)
class Course:
    """The treatment so far, and the regime."""

    regime_B: Tensor
    action_B: Tensor
    """The previous treatment."""
    repeats_B: Tensor
    """Number of times in a row that it was given."""


class Planner(Agent[Course]):
    """Takes the treatment with the largest effect at this step, including what has worn off."""

    def __init__(self, config: SepsisConfig) -> None:
        self.spec, self.physiology = config.spec, config.physiology(torch.float64)

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> Course:
        self.physiology = self.physiology.to(device)
        zeros_B = torch.zeros(streams, dtype=torch.long, device=device)
        return Course(regime_B=zeros_B, action_B=zeros_B - 1, repeats_B=zeros_B)

    def look(self, state: Course, facts: dict[str, Tensor]) -> Course:
        return replace(state, regime_B=facts["regime"])

    def step(self, state: Course, step: Step) -> tuple[Tensor, Course]:
        action_B = torch.where(step.first, -1, step.prev_action)
        repeats_B = torch.where(step.first, 0, torch.where(action_B == state.action_B, state.repeats_B + 1, 1))
        again_BA = action_B[:, None] == torch.arange(len(ACTIONS), device=action_B.device)
        repeats_BA = torch.where(again_BA, repeats_B[:, None] + 1, 1)
        effect_BA = self.physiology.worn(self.physiology.effect_RA[state.regime_B], repeats_BA)
        return effect_BA, replace(state, action_B=action_B, repeats_B=repeats_B)
