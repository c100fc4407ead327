"""Regime schedules: draws of segments for the worlds, and their distribution for the Bayes filter.

An episode has K segments, K uniform between two bounds. Every segment has at least `min_length` steps; the other steps
of the horizon T are assigned to segments at random with probabilities w ~ Dirichlet(a, ..., a).
With w integrated out, the length of the next segment depends only on the remaining segments and steps,

  length = min_length + x,   x ~ BetaBinomial(n - k min_length; a, (k - 1) a)      k segments and n steps remaining,

so lengths are drawn, and filtered, one segment after the other. The first regime is uniform, and each next one is
uniform over the others.

Axes: B episodes, T time, K segments, J segments after the current one, S first step of a segment, R regimes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from uat.noise import integers, uniform

NUM_REGIMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLaw:
    horizon: int
    least: int
    """Minimum number of segments."""
    most: int
    min_length: int
    evenness: float
    """Parameter a of the Dirichlet distribution; larger values give more even lengths."""

    def lengths(self) -> Tensor:
        """(K + 1, T + 1, T + 1) probability of each length of the next segment, by remaining segments and steps."""
        law = torch.zeros(self.most + 1, self.horizon + 1, self.horizon + 1, dtype=torch.float64)
        for left in range(1, self.most + 1):
            for steps in range(left * self.min_length, self.horizon + 1):
                spare = steps - left * self.min_length
                if left == 1:
                    law[left, steps, steps] = 1.0
                else:
                    begin = self.min_length
                    law[left, steps, begin : begin + spare + 1] = _beta_binomial(
                        spare, self.evenness, (left - 1) * self.evenness
                    )
        return law

    def hazards(self) -> Tensor:
        """(J, S, T) probability that a segment begun at s, and not over at t - 1, is over at t; J segments follow."""
        law, table = self.lengths(), torch.zeros(self.most, self.horizon, self.horizon, dtype=torch.float64)
        for after in range(1, self.most):
            for start in range(self.horizon):
                length = law[after + 1, self.horizon - start]
                lasting = length.flip(0).cumsum(0).flip(0)  # probability of this length or a longer one
                hazard = torch.where(lasting > 0, length / lasting.clamp_min(1e-300), 0.0)
                table[after, start, start + 1 :] = hazard[1 : self.horizon - start]
        return table

    def draw(self, seed: int, ids_B: Tensor) -> Tensor:
        """(B, T) regime of every step."""
        count_B = self.least + integers(seed, "sepsis.segments", ids_B, 1, below=self.most - self.least + 1)[:, 0]
        chance_BK = uniform(seed, "sepsis.lengths", ids_B, self.most)
        above = self.lengths().cumsum(-1).to(ids_B.device, non_blocking=True)
        start_B, starts = torch.zeros_like(count_B), []
        for k in range(self.most):
            starts.append(torch.where(count_B > k, start_B, self.horizon))
            reached = above[(count_B - k).clamp_min(0), self.horizon - start_B] < chance_BK[:, k, None]
            start_B = (start_B + reached.sum(1)).clamp_max(self.horizon)
        start_BK = torch.stack(starts, dim=1)
        first_B1 = integers(seed, "sepsis.regime.first", ids_B, 1, below=NUM_REGIMES)
        move_BK = 1 + integers(seed, "sepsis.regime.next", ids_B, self.most - 1, below=NUM_REGIMES - 1)
        regime_BK = torch.cat([first_B1, move_BK], dim=1).cumsum(1) % NUM_REGIMES
        t_T = torch.arange(self.horizon, device=ids_B.device)
        segment_BT = (t_T[:, None] >= start_BK[:, None]).sum(-1) - 1
        return regime_BK.gather(1, segment_BT)


def _beta_binomial(count: int, a: float, b: float) -> Tensor:
    """(count + 1,) probability of 0 .. count."""
    x, n = torch.arange(count + 1, dtype=torch.float64), torch.tensor(float(count), dtype=torch.float64)
    ways = (n + 1).lgamma() - (x + 1).lgamma() - (n - x + 1).lgamma()
    log_mass = ways + _log_beta(x + a, n - x + b)
    return log_mass.softmax(0)


def _log_beta(a: Tensor, b: Tensor) -> Tensor:
    return a.lgamma() + b.lgamma() - (a + b).lgamma()
