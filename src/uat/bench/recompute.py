"""The slow baseline of streaming: the policy processes its whole history again at each step.

This module must not be optimised, since every speed is reported as a ratio to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from uat.contracts import Agent
from uat.episode import Batch, Step
from uat.methods import Policy


@dataclass(slots=True)
class History:
    steps: list[Step] = field(default_factory=list)


class Recomputing(Agent[History]):
    """Plays a policy without a cache."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.spec = policy, policy.spec

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> History:
        return History()

    def step(self, state: History, step: Step) -> tuple[Tensor, History]:
        state.steps.append(step)
        batch = Batch(
            obs=torch.stack([s.obs for s in state.steps], dim=1),
            prev_action=torch.stack([s.prev_action for s in state.steps], dim=1),
            prev_reward=torch.stack([s.prev_reward for s in state.steps], dim=1),
            target=step.prev_action[:, None],
            valid=step.first[:, None],
        )
        h_BTD = self.policy.features(batch)
        return self.policy.head.logits(h_BTD[:, -1], step.allowed), state
