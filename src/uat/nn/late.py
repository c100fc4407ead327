"""Late gates while acting: the keys and values of a step are rewritten once the feedback on that step is known.

A step enters the cache without gates, since nothing has come of it yet. At every later step, before its own token,

  bind      rewrites the step j whose action and reward are both known now, with the gates of E(a_j, r_j); if rewards
            come later than actions, also the latest step, with the gates of its action alone (`pending`)
  remember  keeps the inputs of the present step's attention, from which its keys and values will be computed again

The slow twin is `UtilityGates.late`, for whole episodes.
Shapes: B streams, D width, L layers, P steps whose feedback is still to come (`Clock.wait`), the latest first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from uat.clock import Clock
from uat.contracts import Memory
from uat.episode import Step
from uat.nn.blocks import Transformer
from uat.nn.cache import KVCache
from uat.nn.utility import UtilityGates


@dataclass(slots=True)
class Unanswered(Memory):
    """The last steps of each stream, whose feedback is still to come."""

    x_LPBD: Tensor
    """Inputs of each layer's attention."""
    action_PB: Tensor
    """Actions that the channel delivered at the last P - 1 steps; vectors have one more axis."""
    reward_PB: Tensor
    """The reward delivered at the last step, if rewards arrive before actions; otherwise none."""

    @classmethod
    def empty(cls, backbone: Transformer, clock: Clock, no_action_B: Tensor) -> Unanswered:
        like, c, streams = backbone.like, backbone.config, len(no_action_B)
        return cls(
            x_LPBD=like.new_zeros(c.num_layers, clock.wait, streams, c.d_model),
            action_PB=no_action_B.expand(clock.wait - 1, *no_action_B.shape).clone(),
            reward_PB=like.new_zeros(clock.wait - clock.reward_lag, streams),
        )

    def bind(
        self, backbone: Transformer, utility: UtilityGates, cache: KVCache, step: Step, clock: Clock, *, pending: bool
    ) -> None:
        """Rewrite the keys and values of earlier steps whose feedback arrives with this step."""
        action_PB, reward_PB = self._with(step)
        u_BU = utility.encoder(action_PB[-1], reward_PB[-1])
        backbone.rewrite_step(self.x_LPBD[:, -1], utility.keys_values(u_BU), cache, clock.wait)
        if pending and clock.wait > 1:
            u_BU = utility.encoder(step.prev_action, torch.zeros_like(reward_PB[0]))
            backbone.rewrite_step(self.x_LPBD[:, 0], utility.keys_values(u_BU), cache, 1)

    def remember(self, step: Step, inputs: list[Tensor]) -> Unanswered:
        """Return the memory after this step; inputs: those of its token, one (B, D) per layer."""
        action_PB, reward_PB = self._with(step)
        kept = self.x_LPBD.shape[1] - 1
        x_LPBD = torch.cat([torch.stack(inputs)[:, None], self.x_LPBD[:, :kept]], dim=1)
        return Unanswered(x_LPBD, action_PB[: len(self.action_PB)], reward_PB[: len(self.reward_PB)])

    def _with(self, step: Step) -> tuple[Tensor, Tensor]:
        """Return the delivered actions and rewards, those of this step first."""
        action_PB = torch.cat([step.prev_action[None].to(self.action_PB.dtype), self.action_PB])
        return action_PB, torch.cat([step.prev_reward[None].to(self.reward_PB.dtype), self.reward_PB])
