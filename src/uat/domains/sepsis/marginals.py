"""Quantile functions of clinical columns, rebuilt from a few aggregates.

Between the five published quantiles the value is linear in the normal score. The tails are linear as well: their two
slopes, which cannot be negative, give the column its published mean and deviation as closely as possible. A score of
whole points keeps the slope of its last segment, because its quantiles are rounded and determine its mean less well. A
yes-or-no column has two values and its published share of yes.

Axes: Q points of a fine grid over the normal law, L published quantile levels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]

GRID = 4001
"""Number of equally likely points for the computation of moments."""


def normal_quantile(level: Array) -> Array:
    return torch.special.ndtri(torch.as_tensor(level, dtype=torch.float64)).numpy()


SCORES: Array = normal_quantile((np.arange(GRID) + 0.5) / GRID)


@dataclass(frozen=True, slots=True)
class Marginal:
    """A non-decreasing function of a normal score: linear between knots, rounded to whole points if `point` is set."""

    knots: Array
    values: Array
    point: float | None = None
    """Height of one point of a score, in the column's units."""
    anchor: float = 0.0
    """A value that is a whole number of points."""

    def __call__(self, score: Array) -> Array:
        first, last = self.knots[0], self.knots[-1]
        below = (self.values[1] - self.values[0]) / (self.knots[1] - first)
        above = (self.values[-1] - self.values[-2]) / (last - self.knots[-2])
        value = np.interp(score, self.knots, self.values)
        value = value + below * np.minimum(score - first, 0) + above * np.maximum(score - last, 0)
        if self.point is None:
            return value
        return self.anchor + self.point * np.round((value - self.anchor) / self.point)


def continuous(
    levels: Sequence[float], quantiles: Sequence[float], mean: float, std: float, point: float | None = None
) -> Marginal:
    """Return the marginal with these quantiles and, without points, this mean and deviation as closely as possible."""
    knots, values = normal_quantile(np.asarray(levels)), np.asarray(quantiles, dtype=np.float64)
    if point is not None:
        return Marginal(knots, values, point, anchor=float(quantiles[len(quantiles) // 2]))
    low_Q, high_Q = np.minimum(SCORES - knots[0], 0), np.maximum(SCORES - knots[-1], 0)
    below, above = _tails(np.interp(SCORES, knots, values), low_Q, high_Q, mean, std)
    knots = np.concatenate([[knots[0] - 1], knots, [knots[-1] + 1]])
    values = np.concatenate([[values[0] - below], values, [values[-1] + above]])
    return Marginal(knots, values)


def _tails(inner_Q: Array, low_Q: Array, high_Q: Array, mean: float, std: float) -> tuple[float, float]:
    """Return the slopes of both tails: of all pairs that give the mean, the one with the closest deviation."""
    lowers = np.linspace(0, 6 * std, 601)
    uppers = np.maximum((mean - inner_Q.mean() - lowers * low_Q.mean()) / high_Q.mean(), 0)
    parts = np.stack([inner_Q, low_Q, high_Q])
    weights = np.stack([np.ones_like(lowers), lowers, uppers])
    means = parts.mean(1) @ weights
    squares = np.einsum("is,ij,js->s", weights, parts @ parts.T / len(inner_Q), weights)
    best = np.hypot(np.sqrt(squares - means**2) - std, means - mean).argmin()
    return float(lowers[best]), float(uppers[best])


def two_valued(low: float, mean: float) -> tuple[float, float]:
    """Return the upper value of a z-scored yes-or-no column, and the share of yes in this cohort.

    The column was z-scored with its own mean and deviation in the population, hence high = -1 / low.
    """
    high = -1 / low
    return high, (mean - low) / (high - low)


def steps(shares: Sequence[float], values: Sequence[float]) -> Marginal:
    """Return the marginal of discrete values with these shares, in order of rising scores."""
    cuts = normal_quantile(np.cumsum(np.asarray(shares))[:-1])
    width = 1e-9
    knots = np.sort(np.concatenate([cuts - width, cuts + width]))
    return Marginal(np.concatenate([[-40.0], knots, [40.0]]), np.repeat(np.asarray(values, dtype=np.float64), 2))


def moments(marginal: Marginal) -> tuple[float, float]:
    value_Q = marginal(SCORES)
    return float(value_Q.mean()), math.sqrt(float(value_Q.var()))
