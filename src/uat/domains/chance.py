"""Chance: the reference that ignores all input, for every domain with discrete actions."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from uat.contracts import Agent
from uat.episode import Step
from uat.spec import Discrete, Spec


class UniformAgent(Agent[None]):
    """Agent without memory that chooses all actions with the same probability."""

    sampled: ClassVar[bool] = True

    def __init__(self, spec: Spec) -> None:
        assert isinstance(spec.action, Discrete)
        self.spec, self.num_actions = spec, spec.action.count

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> None:
        return None

    def step(self, state: None, step: Step) -> tuple[Tensor, None]:
        return torch.zeros(step.obs.shape[0], self.num_actions, device=step.obs.device), None
