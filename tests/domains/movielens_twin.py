"""Another way to what the references score: groups are ranked, not items."""

from __future__ import annotations

from torch import Tensor

from uat.domains.movielens.ranking import Ranking
from uat.domains.movielens.regime import Catalogue


def judge(belief_BG: Tensor, regime_B: Tensor, catalogue: Catalogue, ranking: Ranking) -> dict[str, Tensor]:
    """Return metrics (B,) of a belief: all items of a group have the same score, so that groups are ranked."""
    score_BG, own_B1 = belief_BG / catalogue.size_G, regime_B[:, None]
    own_score_B1 = score_BG.gather(1, own_B1)
    begin_B = ((score_BG > own_score_B1) * catalogue.size_G).sum(1)
    end_B = ((score_BG >= own_score_B1) * catalogue.size_G).sum(1)
    return ranking.between(begin_B, end_B)
