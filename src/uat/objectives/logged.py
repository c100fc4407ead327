"""Learning from logs, without a critic: clone the logged actions, or those of the best episodes or steps.

  clone      -log π(a_t | h_t)                     at every logged step
  filtered   the same, at the best share of a batch's episodes (or steps) by return (or return-to-go)

The share is taken within each batch. Entries that tie with the last one are kept as well, so that a share of 1 is
cloning, and a log whose rewards never vary is cloned whole. A step without a known reward counts with the mean known
reward of the batch.
Shapes: B episodes, T time.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from uat.clock import blank
from uat.contracts import Recording, Simulator
from uat.episode import Batch, Losses, Trajectory, masked_mean, masked_sum
from uat.methods.policy import Phase, Policy
from uat.metrics import Metric
from uat.objectives.objective import Objective, has_own_phases
from uat.objectives.returns import advantages
from uat.settings import Between, Share, check_fields
from uat.spec import Discrete, Weights

LOSS = Metric(name="loss", higher_is_better=False)
"""The number of validation episodes by which these objectives select the best weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CloneConfig:
    """Cloning has no settings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilteredConfig:
    share: Annotated[float, Between(0, 1, without_low=True)] = 0.3
    """Share of each batch that is cloned: the episodes or steps with the highest returns; 1 clones the whole log."""
    by: Literal["episode", "step"] = "episode"
    """Compare whole episodes by their return, or single steps by their return-to-go."""
    discount: Share = 1.0
    """Discount γ of a reward one step later, in returns."""

    def __post_init__(self) -> None:
        check_fields(self, "objective.")


class LogObjective(Objective):
    """Base of the objectives that learn from recorded actions and rewards, and never play."""

    @classmethod
    def unsupported_reason(cls, policy: Policy, worlds: Simulator[Any] | Recording, config: Any) -> str | None:
        if has_own_phases(type(policy)):
            return f"{type(policy).__name__} defines its own training, and takes no other objective"
        if not isinstance(worlds, Recording):
            return "it learns from logs, and these worlds are played: take ppo, or imitation of an expert"
        if isinstance(policy.spec.action, Weights):
            return f"it clones single actions, and actions {policy.spec.action} divide one whole"
        return None

    @classmethod
    def criterion(cls, metrics: Sequence[Metric]) -> Metric:
        return LOSS

    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.name, self.loss, judged_by="loss"),)

    @abstractmethod
    def loss(self, batch: Batch) -> Losses:
        """Return the loss of recorded episodes."""


class Clone(LogObjective):
    """Clone the logged actions, whatever they earned."""

    name = "clone"

    def loss(self, batch: Batch) -> Losses:
        nll_BT, counts_BT = action_nll(self.policy, self.policy.features(batch), logged(batch))
        return {"clone": masked_sum(nll_BT, counts_BT)}


class Filtered(LogObjective):
    """Clone the best share of the episodes or steps."""

    name = "filtered"

    def __init__(self, policy: Policy, config: FilteredConfig) -> None:
        super().__init__(policy, config)
        self.config: FilteredConfig = config

    def loss(self, batch: Batch) -> Losses:
        episodes = logged(batch)
        nll_BT, counts_BT = action_nll(self.policy, self.policy.features(batch), episodes)
        return {"filtered": masked_sum(nll_BT, counts_BT & self.kept(episodes))}

    def kept(self, episodes: Trajectory) -> Tensor:
        """(B, T) True at the best steps, or at all steps of the best episodes."""
        valid_BT, known_BT = episodes.valid, known_steps(episodes)
        earned_BT = self.policy.spec.clock.earned(episodes)
        earned_BT = torch.where(known_BT, earned_BT, masked_mean(earned_BT, known_BT))
        nothing_BT = torch.zeros_like(earned_BT)
        to_go_BT = advantages(earned_BT, nothing_BT, episodes, discount=self.config.discount, decay=1.0)
        if self.config.by == "step":
            return best_share(to_go_BT, valid_BT, self.config.share)
        return best_share(to_go_BT[:, 0], valid_BT.any(1), self.config.share)[:, None] & valid_BT


def logged(batch: Batch) -> Trajectory:
    """Return the recorded episodes of a batch."""
    if batch.trajectory is None:
        raise ValueError("learning from logs needs logged actions and rewards, and this batch has no trajectory")
    return batch.trajectory


def known_steps(episodes: Trajectory) -> Tensor:
    """(B, T) True at real steps whose reward is known."""
    return episodes.valid if episodes.reward_known is None else episodes.valid & episodes.reward_known


def action_nll(policy: Policy, h_BTD: Tensor, episodes: Trajectory) -> tuple[Tensor, Tensor]:
    """Return -log π(a_t | h_t) (B, T) of the logged actions, and a mask of the steps where it counts.

    A logged action that the mask of allowed actions excludes has probability zero, and its step is left out.
    """
    action, counts_BT = blank(episodes.action, episodes.valid), episodes.valid
    if episodes.allowed is not None and isinstance(policy.spec.action, Discrete):
        counts_BT = counts_BT & episodes.allowed.gather(-1, action.clamp_min(0)[..., None])[..., 0]
        action = blank(action, counts_BT)
    return policy.head.nll(h_BTD, action, episodes.allowed), counts_BT


def best_share(score: Tensor, counted: Tensor, share: float) -> Tensor:
    """Return True for the highest scores: this share of the counted entries, rounded, at least one, and all ties."""
    ordered_N = torch.where(counted, score, -torch.inf).flatten().sort(descending=True).values
    last = (counted.sum() * share).round().long().clamp_min(1) - 1
    return counted & (score >= ordered_N.gather(0, last[None]))
