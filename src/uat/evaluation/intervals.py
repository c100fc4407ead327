"""Confidence intervals of means over seeds and episodes, two crossed random effects: all seeds play the same episodes.

A hard episode is hard for every seed, so more seeds do not average out its effect. With S seeds and E episodes,

  y_se = μ + a_s + b_e + c_se      effects of the seed, of the episode (shared by all seeds), and of the two together

and the mean of all y has the variance (α²/S + γ²/(SE)) + β²/E. Both summands have unbiased estimates:

  between seeds     V_S = A/S              A: variance of the seeds' means (its expectation includes γ²/E)
  shared episodes   V_E = B/E - C/(SE)     B: variance of the episodes' means, C: variance of the residuals
                                           (E[B] = β² + γ²/S and E[C] = γ²; a negative V_E counts as zero)

The 95 % interval is mean ± √(t² V_S + t'² V_E), with Student's t for S - 1 and t' for E - 1 degrees of freedom. Three
seeds say little about the variance between seeds, so t is large (4.3). The interval is never narrower than
mean ± t' √(B/E), the interval for the same seeds on other episodes, in case the seeds' means agree by chance. A single
seed has only that narrower interval, which does not generalise to other seeds. The same holds for references, which
have no seed.

A metric may be undefined (NaN) in some episodes, and in different ones for each seed. A seed's mean is then a ratio of
sums over its defined episodes, which `filled` linearises: with m_e = 1 where y_e is defined and 0 elsewhere,

  z_e = mean + (y_e - mean) m_e / m̄      has the same mean, and the variance of its mean is that of the ratio.

Episodes that follow each other in time are not independent. For them, B/E is replaced by the variance of the mean under
the stationary bootstrap (Politis and Romano 1994), which resamples blocks of geometric length, in closed form and
without sampling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

LEVEL = 0.05
"""Significance level: the probability that an interval misses the true value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A mean over seeds and episodes, with its standard errors."""

    mean: float
    seeds: int
    episodes: int
    by_episode: float
    """Standard error for the same seeds on other episodes."""
    by_seed: float
    """Standard error between seeds; 0 for a single one."""
    shared: float
    """Standard error of the effect that all seeds share: the difficulty of the episodes."""

    @staticmethod
    def of(y_SE: Tensor, block: float = 1.0) -> Spread:
        y_SE = filled(y_SE)
        (seeds, episodes), mean = y_SE.shape, y_SE.mean().item()
        if episodes < 2:
            return Spread(mean=mean, seeds=seeds, episodes=episodes, by_episode=math.nan, by_seed=0.0, shared=math.nan)
        by_episode, by_seed, shared = variance_of_mean(y_SE.mean(0), block), 0.0, 0.0
        if seeds > 1:
            rest_SE = y_SE - y_SE.mean(0) - y_SE.mean(1, keepdim=True) + mean
            rest = rest_SE.square().sum().item() / ((seeds - 1) * (episodes - 1))
            by_seed, shared = y_SE.mean(1).var().item() / seeds, max(0.0, by_episode - rest / (seeds * episodes))
        roots = {
            name: math.sqrt(x) for name, x in (("by_episode", by_episode), ("by_seed", by_seed), ("shared", shared))
        }
        return Spread(mean=mean, seeds=seeds, episodes=episodes, **roots)

    def half(self, level: float = LEVEL) -> float:
        """Half the width of the interval."""
        if self.episodes < 2:
            return math.nan
        t_episodes = student(self.episodes - 1, level)
        half = t_episodes * self.by_episode
        if self.seeds > 1:
            half = max(half, math.hypot(student(self.seeds - 1, level) * self.by_seed, t_episodes * self.shared))
        return half

    def interval(self) -> tuple[float, float]:
        half = self.half()
        return self.mean - half, self.mean + half

    def p_value(self) -> float:
        """Two-sided p value of a zero mean: the level at which the interval just reaches zero."""
        if self.episodes < 2 or math.isnan(self.mean):
            return math.nan
        low, high = 0.0, 1.0  # the smaller the level, the wider the interval
        for _ in range(40):
            level = (low + high) / 2
            low, high = (low, level) if self.half(level) < abs(self.mean) else (level, high)
        return (low + high) / 2


def interval(y_SE: Tensor, block: float = 1.0) -> tuple[float, float]:
    """95 % interval of the mean over seeds and episodes; NaN for a single episode.

    block: mean length of the resampled blocks of episodes, ordered by time; 1 for independent episodes.
    """
    return Spread.of(y_SE, block).interval()


def filled(y_SE: Tensor) -> Tensor:
    """Fill undefined values such that every seed keeps its mean over defined episodes (NaN without any)."""
    y_SE = y_SE.double()
    defined_SE = ~y_SE.isnan()
    if defined_SE.all():
        return y_SE
    mean_S1, share_S1 = y_SE.nanmean(1, keepdim=True), defined_SE.double().mean(1, keepdim=True)
    return mean_S1 + ((y_SE - mean_S1) / share_S1).where(defined_SE, 0.0)


def variance_of_mean(y_E: Tensor, block: float) -> float:
    """Variance of the mean when blocks of mean length `block` are resampled on a circle.

    With C(k) = Σ_e (y_e - mean)(y_{e+k} - mean) / E and q = 1 - 1/block it is, up to the factor E / (E - 1),
      (C(0) + 2 Σ_k ((1 - k/E) q^k + (k/E) q^(E-k)) C(k)) / E.
    """
    episodes = len(y_E)
    if block == 1:
        return y_E.var().item() / episodes
    x_E = (y_E - y_E.mean()).numpy()
    c_K = np.correlate(x_E, x_E, "full")[episodes - 1 :] / episodes
    lag_K, q = np.arange(episodes), 1 - 1 / block
    weight_K = (1 - lag_K / episodes) * q**lag_K + lag_K / episodes * q ** (episodes - lag_K)
    total = c_K[0] + 2 * float((weight_K[1:] * c_K[1:]).sum())
    return max(total, 0.0) / (episodes - 1)


def student(freedom: int, level: float = LEVEL) -> float:
    """Two-sided critical value of Student's t at this level."""
    angle, share = _student(freedom)
    return math.sqrt(freedom) * math.tan(float(np.interp((1 - level) * share[-1], share, angle)))


@lru_cache(maxsize=32)
def _student(freedom: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Angles φ and cumulative sums of cos^(ν-1) φ, the density of t = √ν tan φ up to a constant."""
    angle = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angle) ** (freedom - 1)
    return angle, np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
