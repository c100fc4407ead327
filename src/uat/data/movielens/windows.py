"""Cut a log into sequences of equal length, split by user.

Axes: U users, W windows, T time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from uat.data.movielens.log import Log
from uat.episode import TensorFields
from uat.noise import derive, uniform

Split = Literal["train", "validation", "test"]
SHARES: dict[Split, float] = {"train": 0.8, "validation": 0.1, "test": 0.1}


@dataclass(slots=True, kw_only=True)
class Windows(TensorFields):
    """Interactions of each window, in order of time."""

    item_WT: Tensor
    rating_WT: Tensor
    """Stars."""
    user_W: Tensor
    """Index of the user in the log."""


def split_users(num_users: int, split: Split, seed: int = 0) -> Tensor:
    """Users of a split in random order, equal for every method and machine."""
    if num_users < 10:
        raise ValueError(f"{num_users} users are too few to split: at least 10 are needed")
    shuffled_U = uniform(derive(seed, "movielens"), "users", torch.arange(num_users), 1)[:, 0].argsort(stable=True)
    bounds = [0, *(round(num_users * share) for share in np.cumsum(list(SHARES.values())))]
    place = list(SHARES).index(split)
    return shuffled_U[bounds[place] : bounds[place + 1]]


def windows(log: Log, users_U: Tensor, *, horizon: int = 50, most_per_user: int = 12, limit: int = 20_000) -> Windows:
    """Up to `limit` windows that do not overlap: the newest of every user first, then the second newest, and so on."""
    for name, value in {"horizon": horizon, "most_per_user": most_per_user, "limit": limit}.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    first_U, end_U = log.first_U[users_U.numpy()], log.first_U[users_U.numpy() + 1]
    begins, owners = [], []
    for back in range(1, most_per_user + 1):
        begin_U = end_U - back * horizon
        fits_U = begin_U >= first_U
        begins.append(begin_U[fits_U])
        owners.append(users_U.numpy()[fits_U])
    begin_W, user_W = np.concatenate(begins)[:limit], np.concatenate(owners)[:limit]
    if not len(begin_W):
        raise ValueError(f"no user of {len(users_U)} has horizon={horizon} interactions")
    rows_WT = begin_W[:, None] + np.arange(horizon)
    return Windows(
        item_WT=torch.from_numpy(log.item_N[rows_WT].astype(np.int64)),
        rating_WT=torch.from_numpy(log.rating_N[rows_WT]),
        user_W=torch.from_numpy(user_W),
    )
