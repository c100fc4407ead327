"""What stands beside every score: the exact filter, nobody's feedback, and the regime itself.

Axes: B windows, T time, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uat.domains.movielens.filter import posterior
from uat.domains.movielens.ranking import Ranking
from uat.domains.movielens.regime import Catalogue, RegimeLaw, rewards


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
