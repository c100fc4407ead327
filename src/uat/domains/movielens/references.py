"""What stands beside every score: the exact filter, nobody's feedback, the regime itself, and chance.

All of them believe something of the regime, and rank items by their chance to be the target.

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
"""(B, G) what is thought of the regime at the last step."""


class Believer(Reader):
    """A reference that reads whole episodes."""

    def __init__(self, catalogue: Catalogue, belief: Belief) -> None:
        self.belief = belief
        self._catalogues = {catalogue.group_I.device: catalogue}

    def on(self, device: torch.device) -> Catalogue:
        """The catalogue there, moved once: a copy from the host would break a CUDA graph."""
        if device not in self._catalogues:
            self._catalogues[device] = next(iter(self._catalogues.values())).to(device)
        return self._catalogues[device]

    def read(self, batch: Batch) -> GroupScores:
        catalogue = self.on(batch.obs.device)
        return GroupScores(self.belief(batch, catalogue) / catalogue.size_G, catalogue.group_I)


@dataclass(frozen=True, slots=True)
class GroupScores:
    """Answers in which all items of a group have one score."""

    score_BG: Tensor
    group_I: Tensor

    def among(self, candidate_BK: Tensor) -> Tensor:
        return self.score_BG.gather(1, self.group_I[candidate_BK])

    def every(self, episodes: slice) -> Tensor:
        return self.score_BG[episodes][:, self.group_I]


def filtered(law: RegimeLaw, delay: int) -> Belief:
    """The exact filter's: no policy can know more."""

    def belief(batch: Batch, catalogue: Catalogue) -> Tensor:
        assert batch.trajectory is not None
        return posterior(law, catalogue.group_I[batch.obs], batch.trajectory.reward, delay)[:, -1]

    return belief


def indifferent(batch: Batch, catalogue: Catalogue) -> Tensor:
    """Without feedback every regime is as likely."""
    return torch.ones(len(batch.obs), len(catalogue.size_G), device=batch.obs.device).double()


def told(batch: Batch, catalogue: Catalogue) -> Tensor:
    """The expert's, who sees the regime."""
    assert batch.trajectory is not None
    regime_B1 = batch.trajectory.facts["regime"][:, -1:]
    return (torch.arange(len(catalogue.size_G), device=regime_B1.device) == regime_B1).double()


def ignorant(batch: Batch, catalogue: Catalogue) -> Tensor:
    """Knows no groups: every item is as likely."""
    return indifferent(batch, catalogue) * catalogue.size_G
