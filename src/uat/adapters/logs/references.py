"""References: chance, the habits of the logging policy, and its last action again.

A policy that is not clearly better than "repeat" has learned no more than which action follows which.

Axes: B streams, A actions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uat.contracts import Agent
from uat.episode import Step
from uat.spec import Spec


class Habit(Agent[None]):
    """Takes each action with a probability that depends on the previous action alone."""

    def __init__(self, spec: Spec, log_prob_PA: Tensor) -> None:
        self.spec, self.log_prob_PA = spec, log_prob_PA
        """The last row is for the first step of a stream."""

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> None:
        self.log_prob_PA = self.log_prob_PA.to(device)

    def step(self, state: None, step: Step) -> tuple[Tensor, None]:
        previous_B = torch.where(step.first, -1, step.prev_action)
        logits_BA = self.log_prob_PA[previous_B % len(self.log_prob_PA)]
        return logits_BA if step.allowed is None else logits_BA.masked_fill(~step.allowed, -torch.inf), None


def habits(spec: Spec, counts_PA: Tensor | None) -> dict[str, Agent[None]]:
    """Return references for actions that are ids, given how often each followed each in training."""
    if counts_PA is None:
        return {}
    marginal_A = (counts_PA.sum(0).double() + 1).log().log_softmax(0)
    after_PA = (counts_PA.double() + marginal_A.exp()).log().log_softmax(1)
    tables = {
        "random": torch.zeros_like(after_PA).log_softmax(1),
        "frequent": marginal_A.expand_as(after_PA).clone(),
        "repeat": after_PA,
    }
    return {name: Habit(spec, table.float()) for name, table in tables.items()}
