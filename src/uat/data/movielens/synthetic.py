"""Generate a synthetic stand-in for MovieLens, with the statistics of ML-1M and no user's data.

It reproduces these statistics of the filtered ML-1M: the shares of items and of interactions per group, a popularity
that falls by a factor of fifty from the first item to the last, the distribution of the stars, long-tailed lengths
with a median near 210, and 46 % of steps that stay in the same group.

Axes: U users, I items, G groups, C bursts in which a user rates several items of one group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from uat.data.movielens.log import Filters, Log, Ratings
from uat.memory import check_fits
from uat.noise import gumbel, uniform
from uat.settings import MOST_COUNT, Between, Seed, check_fields

ITEM_SHARES = (0.14, 0.24, 0.37, 0.25)
"""Share of the items in each group."""
APPEALS = (2.4, 0.8, 0.8, 0.95)
"""How often items of each group are rated, relative to other items of the same rank."""
POPULARITY_FALL = 4.0
TASTE = 0.8
"""Standard deviation of a user's preference for a group, on a log scale."""
SHORTEST, EXTRA, SPREAD = 105, 105.0, 1.1
"""A user rates SHORTEST + EXTRA exp(SPREAD z) items."""
BURST = 0.6
"""Items per burst of a group, counting empty bursts."""
BYTES_PER_PAIR = 60
"""Memory per pair of user and item while ratings are drawn."""
STAR_SHARES = (0.056, 0.111, 0.268, 0.350, 0.215)
"""Share of ratings with one to five stars."""
ITEM_PART, USER_PART = 0.5, 0.35
"""Weights of the item's quality and of the user's bias in a rating."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticConfig:
    num_users: Annotated[int, Between(10, MOST_COUNT)] = 2000
    """Users before the filters."""
    num_items: Annotated[int, Between(300, MOST_COUNT)] = 1000
    """Items before the filters."""
    seed: Seed = 0
    """Seed of all random numbers."""

    def __post_init__(self) -> None:
        check_fields(self)


def synthetic(config: SyntheticConfig | None = None, filters: Filters | None = None) -> Log:
    """Log of a synthetic catalogue, with the same filters as for real data."""
    return Log.of(synthetic_ratings(config or SyntheticConfig()), filters or Filters())


def synthetic_ratings(config: SyntheticConfig) -> Ratings:
    """All ratings of the synthetic catalogue, unfiltered."""
    users, items, seed = config.num_users, config.num_items, config.seed
    check_fits(BYTES_PER_PAIR * users * items, f"a catalogue of users={users} and items={items}")
    user_U, item_I = torch.arange(users), torch.arange(items)
    group_I = _groups(items, seed)
    rank_I = uniform(seed, "movielens.rank", item_I, 1)[:, 0].argsort().argsort() / items
    appeal_I = torch.tensor(APPEALS, dtype=torch.float64).log()[group_I] - POPULARITY_FALL * rank_I
    taste_UG = TASTE * normal(seed, "movielens.taste", user_U, len(ITEM_SHARES))
    length_U = SHORTEST + EXTRA * (SPREAD * normal(seed, "movielens.length", user_U, 1)[:, 0]).exp()
    wish_UI = appeal_I + taste_UG[:, group_I] + gumbel(seed, "movielens.choice", user_U, items)
    chosen_UI = wish_UI.argsort(1, descending=True).argsort(1) < length_U.clamp(max=items // 2).long()[:, None]

    quality_I, bias_U1 = normal(seed, "movielens.quality", item_I, 1)[:, 0], normal(seed, "movielens.bias", user_U, 1)
    rest = math.sqrt(1 - ITEM_PART**2 - USER_PART**2)
    liking_UI = ITEM_PART * quality_I + USER_PART * bias_U1 + rest * normal(seed, "movielens.mood", user_U, items)
    bounds = torch.special.ndtri(torch.tensor(STAR_SHARES, dtype=torch.float64).cumsum(0)[:-1])
    stars_UI = 1 + torch.bucketize(liking_UI, bounds)

    time_UI = _times(chosen_UI, group_I, seed)
    user_N, item_N = chosen_UI.nonzero(as_tuple=True)
    return Ratings(
        user_N=user_N.numpy(),
        item_N=item_N.numpy(),
        rating_N=stars_UI[user_N, item_N].float().numpy(),
        time_N=time_UI[user_N, item_N].numpy(),
        user_names=np.array([f"user-{i:06d}" for i in range(users)]),
        item_names=np.array([f"item-{i:06d}" for i in range(items)]),
        group_I=group_I.numpy(),
    )


def normal(seed: int, name: str, ids_B: Tensor, count: int) -> Tensor:
    """Standard normal numbers (B, count)."""
    return torch.special.ndtri(uniform(seed, name, ids_B, count))


def _groups(items: int, seed: int) -> Tensor:
    """Group of each item: exact shares, at random positions."""
    bounds = (torch.tensor(ITEM_SHARES, dtype=torch.float64).cumsum(0)[:-1] * items).round()
    place_I = uniform(seed, "movielens.group", torch.arange(items), 1)[:, 0].argsort().argsort()
    return torch.bucketize(place_I.double(), bounds, right=True)


def _times(chosen_UI: Tensor, group_I: Tensor, seed: int) -> Tensor:
    """Times (U, I) in seconds. Each item falls into one burst of its group; items of one burst are close in time."""
    users, items = chosen_UI.shape
    user_U, groups = torch.arange(users), len(ITEM_SHARES)
    count_UG = torch.zeros(users, groups, dtype=torch.long)
    count_UG.index_add_(1, group_I, chosen_UI.long())
    bursts_UG = (count_UG / BURST).ceil().clamp_min(1)
    most = int(bursts_UG.max())
    burst_UI = (uniform(seed, "movielens.burst", user_U, items) * bursts_UG[:, group_I]).long()
    moment_UC = uniform(seed, "movielens.moment", user_U, groups * most)
    moment_UI = moment_UC.gather(1, group_I * most + burst_UI)
    return (moment_UI * 1e8).long() * 10 + (10 * uniform(seed, "movielens.second", user_U, items)).long()
