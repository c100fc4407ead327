"""References: the exact filter, no feedback, the true regime, and chance.

Each has a belief about the regime, and ranks items by their probability to be the target.

Axes: B windows, T time, G groups, I items, K candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from uat.channel import FeedbackConfig
from uat.contracts import Reader
from uat.domains.movielens.filter import posterior, posterior_of
from uat.domains.movielens.regime import MISS, STARS, Catalogue, RegimeLaw
from uat.domains.movielens.shuffled import MOST_COURSES, Courses, count_courses, last_posterior
from uat.episode import Batch

Belief = Callable[[Batch, Catalogue], Tensor]
"""Function that returns the probabilities (B, G) of the regimes at the last step."""


class Believer(Reader):
    """A reference that scores items by a belief about the regime."""

    def __init__(self, catalogue: Catalogue, belief: Belief) -> None:
        self.belief = belief
        self._catalogues = {catalogue.group_I.device: catalogue}

    def on(self, device: torch.device) -> Catalogue:
        """Return the catalogue on a device, copied once: a CUDA graph cannot contain copies from the host."""
        if device not in self._catalogues:
            self._catalogues[device] = next(iter(self._catalogues.values())).to(device)
        return self._catalogues[device]

    def read(self, batch: Batch) -> GroupScores:
        catalogue = self.on(batch.obs.device)
        return GroupScores(self.belief(batch, catalogue) / catalogue.size_G, catalogue.group_I)


@dataclass(frozen=True, slots=True)
class GroupScores:
    """Answers in which all items of a group have the same score."""

    score_BG: Tensor
    group_I: Tensor

    def among(self, candidate_BK: Tensor) -> Tensor:
        return self.score_BG.gather(1, self.group_I[candidate_BK])

    def every(self, episodes: slice) -> Tensor:
        return self.score_BG[episodes][:, self.group_I]


def filtered(law: RegimeLaw, delay: int) -> Belief:
    """Return the belief of the exact filter, an upper bound for every policy."""

    def belief(batch: Batch, catalogue: Catalogue) -> Tensor:
        assert batch.trajectory is not None
        return posterior(law, catalogue.group_I[batch.obs], batch.trajectory.reward, delay)[:, -1]

    return belief


REWARD_TOLERANCE = 1e-3


def informed(law: RegimeLaw, delay: int, horizon: int, feedback: FeedbackConfig) -> dict[str, Belief]:
    """Return the beliefs of filters that know how feedback is corrupted, and receive it.

    delay: steps by which the domain itself delivers rewards late. Without noise and shuffling the filter is exact. With
    either, it also knows the logged ratings, which policies do not see: no policy can be better.
    """
    if feedback.reward == "null":
        return {"ceiling": every_regime}
    lag = delay + feedback.delay
    if feedback.reward != "shuffled":
        return {"ceiling": _received(law, lag, feedback)}
    if count_courses(law, horizon) > MOST_COURSES:
        return {}
    return {"ceiling": Shuffled(law, lag, horizon, feedback)}


def _received(law: RegimeLaw, lag: int, feedback: FeedbackConfig) -> Belief:
    """Return the belief given rewards that are true or inverted, perhaps noisy, and `lag` steps late."""

    def belief(batch: Batch, catalogue: Catalogue) -> Tensor:
        group_BT, received_BT = catalogue.group_I[batch.obs], _by_step(batch, feedback)
        if not feedback.noise:
            return posterior(law, group_BT, received_BT, lag)[:, -1]
        assert batch.trajectory is not None
        hit_BT, miss_BT = (
            _density(received_BT, sent, feedback.noise) for sent in (batch.trajectory.facts["rating"] / STARS, MISS)
        )
        own_BTG = torch.arange(law.num_groups, device=group_BT.device) == group_BT[..., None]
        return posterior_of(law, torch.where(own_BTG, hit_BT[..., None], miss_BT[..., None]), lag)[:, -1]

    return belief


class Shuffled:
    """The belief given shuffled rewards; see `shuffled.py`."""

    def __init__(self, law: RegimeLaw, lag: int, horizon: int, feedback: FeedbackConfig) -> None:
        self.law, self.lag, self.feedback = law, lag, feedback
        self._courses = {torch.device("cpu"): Courses.of(law, horizon)}

    def on(self, device: torch.device) -> Courses:
        """Return the courses on a device, copied once: a CUDA graph cannot contain copies from the host."""
        if device not in self._courses:
            self._courses[device] = next(iter(self._courses.values())).to(device)
        return self._courses[device]

    def __call__(self, batch: Batch, catalogue: Catalogue) -> Tensor:
        assert batch.trajectory is not None
        group_BT, received_BT = catalogue.group_I[batch.obs], _by_step(batch, self.feedback)
        received_BS = received_BT[:, : max(0, received_BT.shape[1] - self.lag)]
        hit_BT1 = batch.trajectory.facts["rating"][:, :, None] / STARS
        hit_BTS = _density(received_BS[:, None], hit_BT1, self.feedback.noise)
        miss_BS = _density(received_BS, MISS, self.feedback.noise)
        return last_posterior(self.on(batch.obs.device), self.law.num_groups, group_BT, hit_BTS, miss_BS)


def _by_step(batch: Batch, feedback: FeedbackConfig) -> Tensor:
    """(B, T) what the channel carries for the reward of each step, with its true sign; the last entries, as many as
    `feedback.delay`, have no meaning."""
    assert batch.trajectory is not None
    assert batch.trajectory.told is not None
    received_BT = batch.trajectory.told.reward.roll(-feedback.delay, dims=1)
    return -received_BT if feedback.reward == "inverted" else received_BT


def _density(received: Tensor, sent: Tensor | float, sigma: float) -> Tensor:
    """Return the density of received numbers around a sent reward, up to a factor; without noise, 1 if they agree."""
    error = received.double() - sent
    return (-0.5 * (error / sigma) ** 2).exp() if sigma else (error.abs() < REWARD_TOLERANCE).double()


def every_regime(batch: Batch, catalogue: Catalogue) -> Tensor:
    """Give every regime the same probability: the belief without feedback."""
    return torch.ones(len(batch.obs), len(catalogue.size_G), device=batch.obs.device).double()


def true_regime(batch: Batch, catalogue: Catalogue) -> Tensor:
    """Give the true regime probability 1: the belief of the expert, which sees the regime."""
    assert batch.trajectory is not None
    regime_B1 = batch.trajectory.facts["regime"][:, -1:]
    return (torch.arange(len(catalogue.size_G), device=regime_B1.device) == regime_B1).double()


def every_item(batch: Batch, catalogue: Catalogue) -> Tensor:
    """Give every item the same probability, so that larger groups are more likely: chance."""
    return every_regime(batch, catalogue) * catalogue.size_G
