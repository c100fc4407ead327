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
        """The last row of the table is for the first step of a stream."""
        self.spec = spec
        self._tables = {log_prob_PA.device: log_prob_PA}

    def on(self, device: torch.device) -> Tensor:
        """Return the table on a device, copied once: a CUDA graph cannot contain copies from the host."""
        if device not in self._tables:
            self._tables[device] = next(iter(self._tables.values())).to(device)
        return self._tables[device]

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> None:
        return None

    def step(self, state: None, step: Step) -> tuple[Tensor, None]:
        previous_B = torch.where(step.first, -1, step.prev_action)
        table_PA = self.on(step.first.device)
        logits_BA = table_PA[previous_B % len(table_PA)]
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
