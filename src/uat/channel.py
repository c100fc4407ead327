"""The feedback channel: the settings that say how feedback is corrupted, and their law.

In place of r_s, the reward of step s, a policy receives

  true       r_s                    shuffled   r_j, with j drawn uniformly from 0 .. s
  null       0                      inverted   -r_s

plus `noise` times a standard normal number, and `delay` steps later than in the clean channel. A null action is the
action "none". Draws depend on (seed, episode, step) alone, so they are the same for every policy and in every batch.

`uat.feedback` applies a channel to simulators, recordings and logs; references of a domain may know it.

Axes: B episodes, T time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from uat.clock import NO_ACTION, known_rewards, shift
from uat.episode import Noise, Told, Trajectory
from uat.noise import uniform
from uat.settings import Amount, Delay, changed_fields, check_fields

PREFIX = "feedback."
"""Prefix of the names of the channel's own noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedbackConfig:
    reward: Literal["true", "null", "shuffled", "inverted"] = "true"
    """Reward that policies see: the true one, zero, one drawn from the episode so far, or the negated one."""
    noise: Amount = 0.0
    """Standard deviation of the normal noise added to these rewards, in units of the domain's reward."""
    action: Literal["true", "null"] = "true"
    """Previous action that policies see: the true one, or none."""
    delay: Delay = 0
    """Steps by which rewards arrive later than in the domain itself."""

    def __post_init__(self) -> None:
        check_fields(self, PREFIX)

    @property
    def is_true(self) -> bool:
        return self == FeedbackConfig()

    @property
    def setting(self) -> str:
        """The settings that differ from true feedback: "feedback.reward=null,feedback.action=null"."""
        changed = changed_fields(self)
        return ",".join(f"{PREFIX}{name}={value}" for name, value in changed.items())

    def draw(self, episode_ids: Tensor, seed: int, steps: int) -> Noise:
        """Draw the channel's random numbers for these episodes; empty if the channel is not random."""
        drawn: Noise = {}
        if self.reward == "shuffled":
            share_BT = uniform(seed, "feedback.pick", episode_ids, steps)
            drawn[PREFIX + "pick"] = (share_BT * torch.arange(1, steps + 1, device=share_BT.device)).long()
        if self.noise:
            drawn[PREFIX + "normal"] = torch.special.ndtri(uniform(seed, "feedback.noise", episode_ids, steps)).float()
        return drawn

    def change(self, action: Tensor, reward: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the changes that need neither randomness nor the past."""
        if self.action == "null":
            action = torch.full_like(action, 0 if action.is_floating_point() else NO_ACTION)
        if self.reward == "null":
            reward = torch.zeros_like(reward)
        elif self.reward == "inverted":
            reward = -reward
        return action, reward

    def tell(self, trajectory: Trajectory, noise: Noise) -> Trajectory:
        """Return whole episodes with corrupted feedback: the same as a corrupted simulator gives step by step."""
        true = trajectory if trajectory.told is None else trajectory.told
        action, sent_BT = self.change(true.action, known_rewards(true.reward, true.reward_known))
        known_BT = true.reward_known
        if (pick_BT := noise.get(PREFIX + "pick")) is not None:
            sent_BT = sent_BT.gather(1, pick_BT)
            known_BT = None if known_BT is None else known_BT.gather(1, pick_BT)
        if (normal_BT := noise.get(PREFIX + "normal")) is not None:
            sent_BT = sent_BT + self.noise * normal_BT
        if known_BT is not None:
            known_BT = shift(known_BT.float(), self.delay).bool()
        return replace(trajectory, told=Told(action=action, reward=shift(sent_BT, self.delay), reward_known=known_BT))


TRUE = FeedbackConfig()
