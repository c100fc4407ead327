"""How sure a mean is. Seeds and episodes are two sources of chance, and they cross: every seed plays the same episodes.

A hard episode is hard for every seed, so that more seeds do not average its effect away. With S seeds and E episodes,

  y_se = μ + a_s + b_e + c_se      effects of the seed, of the episode (shared by all seeds), and of the two together

and the mean of all y has the variance (α²/S + γ²/(SE)) + β²/E. Both summands have unbiased estimates:

  between seeds     V_S = A/S              A: variance of the seeds' means (it holds γ²/E, so nothing is left out)
  shared episodes   V_E = B/E - C/(SE)     B: variance of the episodes' means, C: variance of what both leave over
                                           (B expects β² + γ²/S, and C expects γ²; below zero, V_E counts as zero)

The 95 % interval is mean ± √(t² V_S + t'² V_E), with Student's t for S - 1 and t' for E - 1 degrees of freedom: three
seeds tell little of how seeds differ, and t = 4.3 says so. It is never narrower than mean ± t' √(B/E), the interval
for these very seeds on other episodes, should the seeds' means agree by luck. One seed has that interval alone, which
is silent about other seeds; so have references, which have no seed.

A metric may be undefined in some episodes (NaN), in others for each seed. A seed's mean is then a ratio of sums over
its defined episodes, and `filled` puts in the ratio's linear part: with m_e = 1 where y_e is defined and 0 elsewhere,

  z_e = mean + (y_e - mean) m_e / m̄      has the same mean, and the variance of its mean is the ratio's.

Episodes that follow each other in time are not independent. For them B/E is the variance that the mean has under the
stationary bootstrap (Politis and Romano 1994), which resamples blocks of geometric length; its closed form is used, so
that nothing is drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """A mean over seeds and episodes, and where its uncertainty comes from (the module says how)."""

    mean: float
    seeds: int
    episodes: int
    by_seed: float
    """V_S; 0 for a single seed."""
    shared: float
    """V_E; 0 for a single seed."""
    by_episode: float
    """B/E."""

    def half(self, level: float = 0.95) -> float:
        """Half the width of the interval that holds the truth with this probability; NaN for a single episode."""
        if self.episodes < 2:
            return math.nan
        t_episodes = student(self.episodes - 1, level)
        least = t_episodes * math.sqrt(self.by_episode)
        if self.seeds < 2:
            return least
        t_seeds = student(self.seeds - 1, level)
        return max(least, math.hypot(t_seeds * math.sqrt(self.by_seed), t_episodes * math.sqrt(self.shared)))


def doubt(y_SE: Tensor, block: float = 1.0) -> Doubt:
    """How sure the mean over seeds and episodes is.

    block: mean length of the blocks in which episodes, in the order of time, are resampled; 1: they are independent.
    """
    y_SE = filled(y_SE)
    (seeds, episodes), mean = y_SE.shape, y_SE.mean().item()
    by_seed = shared = 0.0
    by_episode = variance_of_mean(y_SE.mean(0), block) if episodes > 1 else math.nan
    if seeds > 1 and episodes > 1:
        rest_SE = y_SE - y_SE.mean(0) - y_SE.mean(1, keepdim=True) + mean
        rest = rest_SE.square().sum().item() / ((seeds - 1) * (episodes - 1))
        by_seed, shared = y_SE.mean(1).var().item() / seeds, max(0.0, by_episode - rest / (seeds * episodes))
    return Doubt(mean=mean, seeds=seeds, episodes=episodes, by_seed=by_seed, shared=shared, by_episode=by_episode)


def interval(y_SE: Tensor, block: float = 1.0) -> tuple[float, float]:
    """95 % interval of the mean over seeds and episodes; NaN if there is but one episode."""
    found = doubt(y_SE, block)
    return found.mean - found.half(), found.mean + found.half()


def filled(y_SE: Tensor) -> Tensor:
    """The table without gaps, in which every seed keeps its mean over defined episodes; NaN if it has none."""
    y_SE = y_SE.double()
    defined_SE = ~y_SE.isnan()
    if defined_SE.all():
        return y_SE
    mean_S1, share_S1 = y_SE.nanmean(1, keepdim=True), defined_SE.double().mean(1, keepdim=True)
    return mean_S1 + ((y_SE - mean_S1) / share_S1).where(defined_SE, 0.0)


def variance_of_mean(y_E: Tensor, block: float) -> float:
    """What the mean varies by under resampling in blocks of mean length `block` on a circle.

    With C(k) = Σ_e (y_e - mean)(y_{e+k} - mean) / E and q = 1 - 1/block it is, but for E / (E - 1),
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


def student(freedom: int, level: float = 0.95) -> float:
    """What Student's t stays below, to either side, with this probability.

    With t = √ν tan φ its density is proportional to cos^(ν-1) φ, which is summed up here.
    """
    share, angle = _angles(freedom)
    return math.sqrt(freedom) * math.tan(float(np.interp(level * share[-1], share, angle)))


@lru_cache(maxsize=64)
def _angles(freedom: int) -> tuple[np.ndarray, np.ndarray]:
    angle = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angle) ** (freedom - 1)
    return np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])]), angle
