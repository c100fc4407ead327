"""Sums of ratios of means over episodes, and their studentised bootstrap intervals.

Every estimate is V = Σ_k Σ_i N_ik / Σ_i D_ik over episodes i: a plain mean has one column and D = 1, self-normalised
weights are in D, and estimates by decision have a column for each step. The influence of an episode on V is

  ψ_i = Σ_k (N_ik - V_k D_ik) / D̄_k        and the standard error is  s = √(Σ_i ψ_i² / (B (B - 1))).

The bootstrap resamples whole episodes, and computes V* and s* of each resample. The interval is
[V - q₉₇.₅ s, V - q₂.₅ s] with the quantiles q of (V* - V) / s*. It needs no symmetry: products of ratios are skewed,
and percentiles of V* itself cover less often where a few weights are large.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from uat.evaluation.intervals import LEVEL

CHUNK = 2**16
"""Numbers of a block of resamples that exist at once: they stay in a processor's cache."""
TINY = 1e-300


@dataclass(frozen=True, slots=True)
class Ratios:
    """Numerators and denominators of B episodes, in K columns."""

    top_BK: Tensor
    bottom_BK: Tensor

    @staticmethod
    def mean(score_B: Tensor) -> Ratios:
        """Return the plain mean of one score for each episode."""
        return Ratios(score_B[:, None], torch.ones_like(score_B)[:, None])

    @property
    def value(self) -> float:
        return (self.top_BK.sum(0) / self.bottom_BK.sum(0)).sum().item()

    @property
    def standard_error(self) -> float:
        """Standard error of the value, to first order; NaN for a single episode."""
        episodes = len(self.top_BK)
        if episodes < 2:
            return math.nan
        weight_BR = torch.ones(episodes, 1, dtype=self.top_BK.dtype)
        return self._resampled(weight_BR)[1].item()

    def interval(self, *, resamples: int, seed: int, level: float = LEVEL) -> tuple[float, float]:
        """Return the interval of the studentised bootstrap; NaN for a single episode."""
        episodes, error = len(self.top_BK), self.standard_error
        if episodes < 2:
            return math.nan, math.nan
        if error <= 1e-12 * max(1.0, abs(self.value)):
            return self.value, self.value
        generator, studentised, block = torch.Generator().manual_seed(seed), [], max(1, CHUNK // episodes)
        for begin in range(0, resamples, block):
            size = min(block, resamples - begin)
            drawn_BR = torch.randint(episodes, (episodes, size), generator=generator)
            count_BR = torch.zeros(episodes, size, dtype=self.top_BK.dtype)
            count_BR.scatter_add_(0, drawn_BR, torch.ones_like(count_BR))
            value_R, error_R = self._resampled(count_BR)
            studentised.append((value_R - self.value) / error_R.clamp_min(TINY))
        low, high = torch.quantile(torch.cat(studentised), torch.tensor([level / 2, 1 - level / 2]).double()).tolist()
        return self.value - high * error, self.value - low * error

    def _resampled(self, count_BR: Tensor) -> tuple[Tensor, Tensor]:
        """(R,) values and standard errors in which episodes are counted this many times."""
        episodes = len(count_BR)
        bottom_KR = (self.bottom_BK.T @ count_BR / episodes).clamp_min(TINY)
        value_KR = self.top_BK.T @ count_BR / episodes / bottom_KR
        influence_BR = self.top_BK @ (1 / bottom_KR) - self.bottom_BK @ (value_KR / bottom_KR)
        variance_R = (count_BR * influence_BR.square()).sum(0) / (episodes * (episodes - 1))
        return value_KR.sum(0), variance_R.sqrt()


def effective_size(weight: Tensor) -> float:
    """Return (Σw)² / Σw² over the first axis, the least one over the other axes; 0 if all weights are 0."""
    weight = weight.double()
    return (weight.sum(0).square() / weight.square().sum(0).clamp_min(TINY)).min().item()
