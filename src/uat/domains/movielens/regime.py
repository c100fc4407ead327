"""The simulated part of an episode: a hidden regime, the reward of each interaction, targets and negatives.

The regime is a group of genres. It switches to another one every 12 to 20 steps. The reward of a logged interaction
is rating / 5 if its item belongs to the regime's group, and -0.2 otherwise. The target is an item of that group.

Everything depends on (seed, episode id) alone. Validation and test always use the same seed and ids, so that every
method on every machine gets the same episodes; training uses new ids, and so new regimes and targets, in every epoch.

Axes: B episodes, T time, G groups, I items, K candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from uat.episode import TensorFields
from uat.noise import integers, uniform
from uat.settings import MOST_WIDTH, Between, Steps, check_fields

MISS = -0.2
"""Reward of an item that is not of the regime's group."""
STARS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class RegimeLaw:
    """Distribution of the hidden group: segments of uniform length, each of another group than the one before."""

    num_groups: Annotated[int, Between(2, MOST_WIDTH)] = 4
    """Number of groups of genres."""
    shortest: Steps = 12
    """Steps of the shortest segment."""
    longest: Steps = 20
    """Steps of the longest segment."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"shortest={self.shortest} must be at least 1 and at most longest={self.longest}")

    def draw(self, seed: int, ids_B: Tensor, horizon: int) -> Tensor:
        """(B, T) group of each step; a segment begins at the first step."""
        count = -(-horizon // self.shortest)
        lengths = integers(seed, "movielens.lengths", ids_B, count, below=self.longest - self.shortest + 1)
        ends_BK = (lengths + self.shortest).cumsum(1)
        start_B1 = integers(seed, "movielens.start", ids_B, 1, below=self.num_groups)
        jumps_BK = 1 + integers(seed, "movielens.jumps", ids_B, count, below=self.num_groups - 1)
        group_BK = (torch.cat([start_B1, jumps_BK], dim=1).cumsum(1)) % self.num_groups
        step_BT = torch.arange(horizon, device=ids_B.device).expand(len(ids_B), -1).contiguous()
        return group_BK.gather(1, torch.searchsorted(ends_BK, step_BT, right=True))

    def hazard(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the probability that a segment ends after it has lasted 1, 2, .. longest steps."""
        lasted = torch.arange(1, self.longest + 1, device=device)
        return torch.where(lasted < self.shortest, 0.0, 1.0 / (self.longest - lasted + 1).double())


def rewards(group_BT: Tensor, rating_BT: Tensor, regime_BT: Tensor) -> Tensor:
    """(B, T) reward of each logged interaction; `group_BT` is the group of its item."""
    return torch.where(group_BT == regime_BT, rating_BT / STARS, MISS)


@dataclass(slots=True, kw_only=True)
class Catalogue(TensorFields):
    """Items by group."""

    group_I: Tensor
    item_I: Tensor
    """Items, group after group."""
    first_G: Tensor
    """Index in `item_I` of the first item of each group."""
    size_G: Tensor

    @classmethod
    def of(cls, group_I: Tensor, num_groups: int) -> Catalogue:
        group_I = group_I.long()
        size_G = torch.bincount(group_I, minlength=num_groups)
        if len(size_G) != num_groups or (size_G == 0).any():
            raise ValueError(f"each of {num_groups} groups needs an item; their sizes are {size_G.tolist()}")
        order_I = group_I.argsort(stable=True)
        return cls(group_I=group_I, item_I=order_I, first_G=size_G.cumsum(0) - size_G, size_G=size_G)

    def targets(self, seed: int, ids_B: Tensor, regime_BT: Tensor) -> Tensor:
        """(B, T) items drawn uniformly from the regime's group."""
        share_BT = uniform(seed, "movielens.targets", ids_B, regime_BT.shape[1])
        place_BT = (share_BT * self.size_G[regime_BT]).long()
        return self.item_I[self.first_G[regime_BT] + place_BT]

    def negatives(self, seed: int, ids_B: Tensor, t: int, target_B: Tensor, count: int = 99) -> Tensor:
        """(B, count) different items other than the target of step t; every set has the same probability.

        Floyd's algorithm: the k-th draw is at most a bound that grows by one; a repeated item is replaced by the bound.
        """
        others = len(self.group_I) - 1
        if count > others:
            raise ValueError(f"{count} negatives cannot be drawn from {others} items")
        share_BK = uniform(seed, f"movielens.negatives.{t}", ids_B, count)
        drawn_BK = torch.full((len(ids_B), count), -1, device=ids_B.device)
        for k in range(count):
            bound = others - count + k
            draw_B = (share_BK[:, k] * (bound + 1)).long()
            taken_B = (drawn_BK == draw_B[:, None]).any(1)
            drawn_BK[:, k] = torch.where(taken_B, bound, draw_B)
        return drawn_BK + (drawn_BK >= target_B[:, None])
