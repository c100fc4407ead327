"""References: the exact filter, no feedback, the true regime, and chance.

Each has a belief about the regime, and ranks items by their probability to be the target.

Axes: B windows, T time, G groups, I items, K candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from uat.contracts import Reader
from uat.domains.movielens.filter import posterior
from uat.domains.movielens.regime import Catalogue, RegimeLaw
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
