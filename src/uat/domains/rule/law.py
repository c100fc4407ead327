"""The laws of the hidden rule: what its rows are, how they turn, and how they wander.

With K actions the rule is a matrix W of K rows, and action a has the score W_a · o. The rows are those of W = A Z:
Z has K - 1 rows of independent normal numbers with variance 1 / d, d being the width of an observation, and the K rows
of A are the corners of a regular simplex: unit vectors that sum to zero. Therefore

  - every W_a is normal with an expected squared length of 1, the rows sum to zero, and all pairs are alike;
  - with two actions A = (1, -1), so that W = (w, -w) with w ~ N(0, I / d);
  - every score is linear in a normal vector, so that a Kalman filter of payoffs is exact.

The reward `sign` of two actions depends on the direction of w alone, which is uniform on the sphere, so that the world
is the same there as with a unit vector w.

Axes: B episodes, T time, K actions, J = K - 1 rows of Z, O observation, P points in time at which Z is drawn.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from uat.noise import integers, uniform

Task = Literal["fixed", "flip", "drift"]


def simplex(count: int) -> Tensor:
    """(K, J) corners of a regular simplex around zero: unit vectors, each pair with the product -1 / (K - 1)."""
    corner_KJ = torch.zeros(count, count - 1, dtype=torch.float64)
    for i in range(count - 1):
        corner_KJ[i, i] = (1 - corner_KJ[i, :i].square().sum()).sqrt()
        product = corner_KJ[i + 1 :, :i] @ corner_KJ[i, :i]
        corner_KJ[i + 1 :, i] = (-1 / (count - 1) - product) / corner_KJ[i, i]
    return corner_KJ


def rules(seed: int, ids_B: Tensor, count: int, width: int) -> Tensor:
    """(B, J, O) the matrix Z at the first step."""
    return normal(seed, "rule.rule", ids_B, (count - 1) * width).view(-1, count - 1, width) / math.sqrt(width)


def drifting(seed: int, ids_B: Tensor, count: int, width: int, steps: int, drift: float) -> Tensor:
    """(B, P, J, O) the matrix Z at each step: a stationary random walk (an Ornstein-Uhlenbeck process),

    Z_(t+1) = √(1 - drift) Z_t + √(drift) X_t      with X_t drawn like Z_0.
    """
    change = normal(seed, "rule.drift", ids_B, (steps - 1) * (count - 1) * width)
    change_BPJO = change.view(-1, steps - 1, count - 1, width) * math.sqrt(drift / width)
    path, keep = [rules(seed, ids_B, count, width)], math.sqrt(1 - drift)
    for t in range(steps - 1):
        path.append(keep * path[-1] + change_BPJO[:, t])
    return torch.stack(path, dim=1)


def turns(seed: int, ids_B: Tensor, count: int, steps: int, chance: float) -> Tensor:
    """(B, T) places by which the rows are rotated at each step: action a has the row (a + turn) mod K.

    At every step after the first, with the given chance, all rows rotate by 1 .. K - 1 places, uniformly, so that no
    action keeps its row. With two actions w changes its sign.
    """
    hit_BT = uniform(seed, "rule.flip", ids_B, steps) < chance
    move_BT = 1 + integers(seed, "rule.turn", ids_B, steps, below=count - 1)
    hit_BT[:, 0] = False
    return torch.where(hit_BT, move_BT, 0).cumsum(1) % count


def rows(corner_KJ: Tensor, z: Tensor) -> Tensor:
    """(..., K, O) the matrix W = A Z. A sum of products gives the same bits in any batch, which `@` does not."""
    return (corner_KJ[:, :, None] * z[..., None, :, :]).sum(-2)


def normal(seed: int, name: str, ids_B: Tensor, count: int) -> Tensor:
    """(B, count) standard normal numbers in double precision."""
    return torch.special.ndtri(uniform(seed, name, ids_B, count))
