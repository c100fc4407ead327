"""The clock: it decides which action and reward a policy knows at each step."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from uat.episode import Batch, Step, Trajectory

NO_ACTION = -1
"""The id of "no action yet"; its embedding is exactly zero."""


def shift(x_BT: Tensor, lag: int) -> Tensor:
    """Return x shifted `lag` steps later; the first `lag` steps are filled with "none" (id -1, or zero)."""
    before = torch.full_like(x_BT[:, :lag], nothing(x_BT))
    return torch.cat([before, x_BT], dim=1)[:, : x_BT.shape[1]]


def unshift(x_BT: Tensor, steps: int) -> Tensor:
    """Return x shifted `steps` steps earlier; the last `steps` steps are filled with "none" (id -1, or zero)."""
    after = torch.full_like(x_BT[:, :steps], nothing(x_BT))
    return torch.cat([x_BT[:, steps:], after], dim=1)


def blank(x_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """Return x with "none" at every step that is padding."""
    return torch.where(valid_BT.view(*valid_BT.shape, *[1] * (x_BT.dim() - 2)), x_BT, nothing(x_BT))


def nothing(x_BT: Tensor) -> int:
    """The value that stands for "none": -1 among ids (B, T), 0 among numbers and vectors."""
    return 0 if x_BT.is_floating_point() or x_BT.dim() > 2 else NO_ACTION


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The only place where feedback is shifted, delayed and scaled.

    `batch` serves training and `begin` serves acting; a test holds them equal.
    """

    reward_lag: int = 1
    reward_scale: float = 1.0
    facts: tuple[str, ...] = ()
    """Names of the facts that methods see."""

    def batch(self, trajectory: Trajectory) -> Batch:
        """Return the batch of a trajectory: everything that the policy knows at each step. Padding is blanked."""
        valid = trajectory.valid
        told = trajectory if trajectory.told is None else trajectory.told
        reward_BT, known_BT = known_rewards(told.reward, told.reward_known), told.reward_known
        obs, prev_action, prev_reward = inputs_by.get()(self, trajectory.obs, told.action, reward_BT, valid)
        return Batch(
            obs=obs,
            prev_action=prev_action,
            prev_reward=prev_reward,
            reward_known=None if known_BT is None else self.arrived(known_BT, valid),
            target=trajectory.target,
            valid=valid,
            allowed=trajectory.allowed,
            facts={name: trajectory.facts[name] for name in self.facts},
            trajectory=trajectory,
        )

    def inputs(self, obs: Tensor, action: Tensor, reward_BT: Tensor, valid_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what policies know at every step: observations, previous actions, rewards that have arrived."""
        prev_action, prev_reward_BT = shift(action, 1), shift(reward_BT, self.reward_lag)
        return blank(obs, valid_BT), blank(prev_action, valid_BT), blank(prev_reward_BT, valid_BT) * self.reward_scale

    def arrived(self, known_BT: Tensor, valid_BT: Tensor) -> Tensor:
        """(B, T) True where the reward channel carries a reward whose value is known."""
        return shift(known_BT.float(), self.reward_lag).bool() & valid_BT

    def earned(self, trajectory: Trajectory) -> Tensor:
        """Return the scaled reward (B, T) of each step, 0 where it is unknown, for losses that learn from rewards and
        leave those steps out (`Trajectory.reward_known`)."""
        return blank(known_rewards(trajectory.reward, trajectory.reward_known), trajectory.valid) * self.reward_scale

    @property
    def wait(self) -> int:
        """Steps after which both the action and the reward of a step are known."""
        return max(1, self.reward_lag)

    def answers(self, prev_action: Tensor, prev_reward_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return the action and the reward of each step itself, read from the channel at the steps where they arrive;
        "none" for those that arrive after the last step."""
        return unshift(prev_action, 1), unshift(prev_reward_BT, self.reward_lag)

    def begin(self, no_action_B: Tensor) -> History:
        """Return the empty feedback history of B new episodes."""
        no_reward_B = torch.zeros(no_action_B.shape[0], device=no_action_B.device)
        return History(clock=self, actions=[no_action_B], rewards=[no_reward_B] * self.reward_lag)


def known_rewards(reward: Tensor, known: Tensor | None = None) -> Tensor:
    """Return rewards as numbers, also clicks and counts; 0 where they are unknown."""
    numbers = reward if reward.is_floating_point() else reward.float()
    return numbers if known is None else torch.where(known, numbers, 0.0)


inputs_by: ContextVar[Callable[[Clock, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]]
inputs_by = ContextVar("inputs_by", default=Clock.inputs)
"""The function that computes `Clock.inputs` for a batch. While an engine runs, it is a kernel with the same bits."""


@dataclass(slots=True, kw_only=True)
class History:
    """Feedback as it comes in, delivered by the clock. Entry t of each list is delivered at step t."""

    clock: Clock
    actions: list[Tensor]
    rewards: list[Tensor]
    known: list[Tensor] = field(default_factory=list)
    """Masks of known rewards; empty while all are known."""
    starts: tuple[Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        never_B = torch.zeros_like(self.actions[0].reshape(len(self.actions[0]), -1)[:, 0], dtype=torch.bool)
        self.starts = (~never_B, never_B)

    def step(self, obs: Tensor, allowed: Tensor | None = None) -> Step:
        """Return the input of the policy at the present step."""
        t = len(self.actions) - 1
        feedback = {"prev_action": self.actions[t], "prev_reward": self.rewards[t]}
        known_B = self.known[t] if t < len(self.known) else None
        return Step(obs=obs, first=self.starts[min(t, 1)], reward_known=known_B, allowed=allowed, **feedback)

    def add(self, action: Tensor, reward_B: Tensor, known_B: Tensor | None = None) -> None:
        """Append the action and the reward of the present step, as the channel carries them. Once a mask of known
        rewards was given, it is needed at every step."""
        scale = self.clock.reward_scale
        self.actions.append(action)
        reward_B = known_rewards(reward_B, known_B)
        self.rewards.append(reward_B if scale == 1 else reward_B * scale)
        if known_B is not None:
            self.known = self.known or [torch.zeros_like(known_B)] * self.clock.reward_lag
            self.known.append(known_B)
