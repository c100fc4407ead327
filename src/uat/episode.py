"""The data between methods and domains: steps, episodes, batches, and sums over their real steps.

Axes, one letter each through the whole library:
  B batch or stream   T time   S cached steps   D width   H heads   E head size   L layers
  U utility width     O observation   A actions   N assets or items   G goals or groups
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

Noise = dict[str, Tensor]
"""All randomness of some episodes, as tensors whose first axis is the episode."""
Losses = dict[str, tuple[Tensor, Tensor]]
"""Named (sum, count) pairs, so that masks, ranks and micro-batches add up exactly."""


class TensorFields:
    """A dataclass of tensors, dictionaries of tensors and None, moved and sliced as one."""

    def map(self, f: Callable[[Tensor], Tensor]) -> Self:
        def apply(value: Any) -> Any:
            if isinstance(value, Tensor):
                return f(value)
            if isinstance(value, TensorFields):
                return value.map(f)
            return {k: f(v) for k, v in value.items()} if isinstance(value, dict) else value

        return replace(self, **{item.name: apply(getattr(self, item.name)) for item in fields(self)})  # pyright: ignore[reportArgumentType]

    def to(self, device: torch.device | str) -> Self:
        return self.map(lambda x: x.to(device))


@dataclass(slots=True, kw_only=True)
class Step(TensorFields):
    """The input of a policy at one step of B streams."""

    obs: Tensor
    prev_action: Tensor
    prev_reward: Tensor
    first: Tensor
    """(B,) True where the stream starts a new episode with this observation."""
    reward_known: Tensor | None = None
    """(B,) True where `prev_reward` is a known reward; False where no reward has arrived, or its value is unknown.
    None: no mask has been given so far."""
    allowed: Tensor | None = None
    """(B, A) True where the action is allowed; None: all are."""


@dataclass(slots=True, kw_only=True)
class Told(TensorFields):
    """Action and reward that the feedback channel carries in place of the true ones; the clock shifts them as well."""

    action: Tensor
    reward: Tensor
    reward_known: Tensor | None = None
    """True where the reward is known; None: everywhere."""


@dataclass(slots=True, kw_only=True)
class Trajectory(TensorFields):
    """B episodes as they happened, unshifted: action[t] follows obs[t] and earns reward[t]."""

    obs: Tensor
    action: Tensor
    reward: Tensor
    terminated: Tensor
    """(B, T) True at the step at which the task ended the episode: no reward could follow."""
    valid: Tensor
    """(B, T) True for real steps, False for padding."""
    reward_known: Tensor | None = None
    """(B, T) False where the reward is unknown, such as missing in a log; `reward` may hold anything there. None: all
    rewards are known."""
    truncated: Tensor | None = None
    """(B, T) True at the step after which the episode was cut off, as by a time limit. None: nowhere."""
    final_obs: Tensor | None = None
    """(B, ...) observation after the last real step; needed only if episodes can be truncated."""
    target: Tensor | None = None
    """The expert's action: ids (B, T), or vectors (B, T, A). None: there is no expert."""
    allowed: Tensor | None = None
    facts: dict[str, Tensor] = field(default_factory=dict)
    """Data of each step for metrics; hidden from methods unless the spec names it."""
    told: Told | None = None
    """The content of the feedback channel before the clock shifts it. None: the true actions and rewards."""
    propensity: Tensor | None = None
    """(B, T) probability with which the logging policy took the action, or its density. None: unknown."""

    @property
    def done(self) -> Tensor:
        """(B, T) True at the last step of an episode, whatever ended it."""
        return self.terminated if self.truncated is None else self.terminated | self.truncated

    @property
    def required_target(self) -> Tensor:
        """The expert's actions, for a metric or a loss that needs them; raise a ValueError if there is no expert."""
        return _required(self.target)


@dataclass(slots=True, kw_only=True)
class Batch(TensorFields):
    """The input of a policy at every step of B episodes, with the targets to learn. Only the clock creates it."""

    obs: Tensor
    prev_action: Tensor
    prev_reward: Tensor
    valid: Tensor
    reward_known: Tensor | None = None
    """(B, T) True where `prev_reward` is a known reward; False where no reward has arrived, or its value is unknown.
    None: every reward that has arrived is known."""
    target: Tensor | None = None
    """The expert's action; None: there is no expert."""
    allowed: Tensor | None = None
    start: Tensor | None = None
    """(B,) position of the first step in the policy's table; None: 0."""
    facts: dict[str, Tensor] = field(default_factory=dict)
    """Facts that the spec shows to methods."""
    trajectory: Trajectory | None = None
    """The episodes themselves, for losses that need actions, rewards or ends. Decisions never depend on them."""

    def step(self, t: int) -> Step:
        """Return the step t of streams that start with these episodes."""
        return Step(
            obs=self.obs[:, t],
            prev_action=self.prev_action[:, t],
            prev_reward=self.prev_reward[:, t],
            first=torch.full((len(self.obs),), t == 0, device=self.obs.device),
            reward_known=None if self.reward_known is None else self.reward_known[:, t],
            allowed=None if self.allowed is None else self.allowed[:, t],
        )

    @property
    def last_B(self) -> Tensor:
        """(B,) number of the last real step of each episode."""
        return self.valid.sum(1) - 1

    @property
    def required_target(self) -> Tensor:
        """The expert's actions, for a loss that needs them; raise a ValueError if there is no expert."""
        return _required(self.target)


def _required(target: Tensor | None) -> Tensor:
    if target is None:
        raise ValueError(
            "imitation needs an expert's actions, and these episodes have none: give the simulator an `expert` or the "
            "log a `target`, or learn from rewards with the objective 'ppo'"
        )
    return target


def masked_sum(x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum over real steps, and their number. Padding may have any value, even NaN."""
    return torch.where(valid, x, 0.0).sum(), valid.sum()


def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
    """Mean over real steps only; padding changes neither the sum nor the count."""
    total, count = masked_sum(x, valid)
    return total / count.clamp_min(1)


def episode_mean(x_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """Mean over the real steps of each episode."""
    return torch.where(valid_BT, x_BT, 0.0).sum(1) / valid_BT.sum(1).clamp_min(1)
