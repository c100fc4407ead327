"""What stands beside every score: the exact filter, nobody's feedback, the regime itself, and chance.

All of them believe something of the regime, and rank items by their chance to be the target.

Axes: B windows, T time, G groups, I items, K candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from uat.domains.movielens.filter import posterior
from uat.domains.movielens.ranking import Ranking
from uat.domains.movielens.regime import Catalogue, RegimeLaw, rewards
from uat.types import Batch

Belief = Callable[[Batch, Catalogue], Tensor]
"""(B, G) what is thought of the regime at the last step."""


class Believer:
    """A reference that reads whole episodes."""

    sampled: ClassVar[bool] = False

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
        assert batch.happened is not None
        return posterior(law, catalogue.group_I[batch.obs], batch.happened.reward, delay)[:, -1]

    return belief


def indifferent(batch: Batch, catalogue: Catalogue) -> Tensor:
    """Without feedback every regime is as likely."""
    return torch.ones(len(batch.obs), len(catalogue.size_G), device=batch.obs.device).double()


def told(batch: Batch, catalogue: Catalogue) -> Tensor:
    """The expert's, who sees the regime."""
    assert batch.happened is not None
    regime_B1 = batch.happened.facts["regime"][:, -1:]
    return (torch.arange(len(catalogue.size_G), device=regime_B1.device) == regime_B1).double()


def ignorant(batch: Batch, catalogue: Catalogue) -> Tensor:
    """Knows no groups: every item is as likely."""
    return indifferent(batch, catalogue) * catalogue.size_G


def reference_scores(
    item_BT: Tensor,
    rating_BT: Tensor,
    catalogue: Catalogue,
    *,
    law: RegimeLaw,
    ranking: Ranking,
    seed: int,
    delay: int = 1,
    draws: int = 20,
) -> dict[str, dict[str, Tensor]]:
    """Metrics (draws,) of each reference at the last step of every window, averaged over windows."""
    if draws < 1:
        raise ValueError(f"draws={draws} must be at least 1")
    (windows, horizon), found = item_BT.shape, {}
    group_BT = catalogue.group_I[item_BT]
    for draw in range(draws):
        ids_B = torch.arange(draw * windows, (draw + 1) * windows, device=item_BT.device)
        regime_BT = law.draw(seed, ids_B, horizon)
        reward_BT = rewards(group_BT, rating_BT, regime_BT)
        regime_B = regime_BT[:, -1]
        beliefs = {
            "ceiling": posterior(law, group_BT, reward_BT, delay)[:, -1],
            "no-feedback": torch.full((windows, law.num_groups), 1 / law.num_groups, device=item_BT.device).double(),
            "true-regime": torch.nn.functional.one_hot(regime_B, law.num_groups).double(),
        }
        for name, belief_BG in beliefs.items():
            for metric, value_B in judge(belief_BG, regime_B, catalogue, ranking).items():
                found.setdefault(name, {}).setdefault(metric, []).append(value_B.mean())
    return {name: {metric: torch.stack(values) for metric, values in rows.items()} for name, rows in found.items()}


def judge(belief_BG: Tensor, regime_B: Tensor, catalogue: Catalogue, ranking: Ranking) -> dict[str, Tensor]:
    """Metrics (B,) of whoever believes this and ranks items by their chance to be the target.

    All items of a group have one score, so that groups are ranked, not items.
    """
    score_BG, own_B1 = belief_BG / catalogue.size_G, regime_B[:, None]
    own_score_B1 = score_BG.gather(1, own_B1)
    begin_B = ((score_BG > own_score_B1) * catalogue.size_G).sum(1)
    end_B = ((score_BG >= own_score_B1) * catalogue.size_G).sum(1)
    return ranking.between(begin_B, end_B)
