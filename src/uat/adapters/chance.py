"""Chance in Gymnasium environments: uniformly random actions among those that are allowed."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from uat.contracts import Agent
from uat.distributions import limits
from uat.episode import Step
from uat.spec import Box, Discrete, Spec

LOG_STD = math.log(math.pi / math.sqrt(12))
"""Log-deviation of the logistic distribution whose squashing is uniform."""


class RandomAgent(Agent[None]):
    """Agent without memory that chooses allowed ids, or numbers within the limits, uniformly."""

    sampled: ClassVar[bool] = True

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> None:
        return None

    def step(self, state: None, step: Step) -> tuple[Tensor, None]:
        """Return equal logits; in a box, the squashed Gaussian that is nearest to the uniform distribution."""
        action, streams = self.spec.action, len(step.first)
        numbers = torch.zeros(streams, action.numbers, device=step.obs.device)
        if isinstance(action, Box):
            numbers[:, action.count :] = LOG_STD
        elif step.allowed is not None:
            numbers = numbers.masked_fill(~step.allowed, -math.inf)
        return numbers, None

    def decide(self, state: None, step: Step, gumbel_BA: Tensor | None = None) -> tuple[Tensor, None]:
        if isinstance(self.spec.action, Discrete) or gumbel_BA is None:
            return super().decide(state, step, gumbel_BA)
        assert isinstance(self.spec.action, Box)
        low, high = limits(self.spec.action, gumbel_BA.device, torch.float32)
        return low + (high - low) * torch.special.ndtr(gumbel_BA).float(), None
