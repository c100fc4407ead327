"""Hit rate and NDCG of a target, averaged analytically over the draw of target and negatives.

If `a` of the other items are above the target, the number j of the n drawn negatives above it is hypergeometric.
Averaging over the items of the regime's group also removes the draw of the target. Items of equal score are in random
order, over which the metrics are averaged as well.

Axes: B episodes, I items, K candidates (the target first), R items above the target (0 .. I - 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from uat.episode import TensorFields

CUTOFFS = (10, 20)


@dataclass(frozen=True, slots=True)
class Ranks:
    """Items of each episode by falling score."""

    begin_BI: Tensor
    end_BI: Tensor
    """Items of the same score share the ranks from `begin` to before `end`."""
    share_BI: Tensor
    """Probability that the item is the target."""


def ranks(score_BI: Tensor, wanted_BI: Tensor) -> Ranks:
    """Return the ranks of all items; the wanted ones are the target with equal probability."""
    falling_BI, order_BI = score_BI.sort(1, descending=True)
    ranked_BI = -falling_BI
    begin_BI = torch.searchsorted(ranked_BI, ranked_BI)
    end_BI = torch.searchsorted(ranked_BI, ranked_BI, right=True)
    wanted_BI = wanted_BI.gather(1, order_BI).double()
    return Ranks(begin_BI, end_BI, wanted_BI / wanted_BI.sum(1, keepdim=True))


@dataclass(slots=True, kw_only=True)
class Ranking(TensorFields):
    """Expected value of each metric for each number of other items above the target."""

    value_R: dict[str, Tensor]

    @classmethod
    def sampled(cls, num_items: int, negatives: int = 99) -> Ranking:
        """Rank against `negatives` items, drawn without repetition from the other items."""
        others = num_items - 1
        if not 1 <= negatives <= others:
            raise ValueError(f"negatives={negatives} must be within [1, {others}], the items beside the target")
        above_R1 = torch.arange(num_items, dtype=torch.float64)[:, None]
        drawn_J = torch.arange(min(max(CUTOFFS), negatives + 1), dtype=torch.float64)
        chance_RJ = torch.exp(
            _log_choose(above_R1, drawn_J)
            + _log_choose(others - above_R1, negatives - drawn_J)
            - _log_choose(torch.tensor(float(others)).double(), torch.tensor(float(negatives)).double())
        )
        return cls(value_R=_metrics(chance_RJ))

    @classmethod
    def full(cls, num_items: int) -> Ranking:
        """Rank against all other items."""
        chance_RJ = torch.eye(num_items, max(CUTOFFS), dtype=torch.float64)
        return cls(value_R=_metrics(chance_RJ))

    def expected(self, place: Ranks) -> dict[str, Tensor]:
        """Return each metric (B,), averaged over the wanted items as targets."""
        values = self.between(place.begin_BI, place.end_BI)
        return {name: (value_BI * place.share_BI).sum(1) for name, value_BI in values.items()}

    def between(self, begin: Tensor, end: Tensor) -> dict[str, Tensor]:
        """Return each metric of a target whose rank is uniform from `begin` to before `end`."""
        sums = {name: torch.cat([value_R.new_zeros(1), value_R.cumsum(0)]) for name, value_R in self.value_R.items()}
        return {name: (until_R[end] - until_R[begin]) / (end - begin) for name, until_R in sums.items()}


def drawn(score_BK: Tensor) -> dict[str, Tensor]:
    """Return each metric (B,) of one draw: the first score is the target's, the others are its negatives'."""
    target_B1, other_BK = score_BK[:, :1], score_BK[:, 1:]
    above_B = (other_BK > target_B1).sum(1)
    tied_B1 = (other_BK == target_B1).sum(1, keepdim=True)
    place_J = torch.arange(max(CUTOFFS), device=score_BK.device)
    among_BJ = (place_J >= above_B[:, None]) & (place_J <= above_B[:, None] + tied_B1)
    return _metrics(among_BJ.double() / (tied_B1 + 1))


def _metrics(chance_RJ: Tensor) -> dict[str, Tensor]:
    """Return the metrics of each row, given the probability that j candidates are above the target."""
    gain_J = 1 / torch.log2(torch.arange(chance_RJ.shape[1], device=chance_RJ.device).double() + 2)
    hits = {f"hr@{cutoff}": chance_RJ[:, :cutoff].sum(1) for cutoff in CUTOFFS}
    return {**hits, **{f"ndcg@{cutoff}": (chance_RJ * gain_J)[:, :cutoff].sum(1) for cutoff in CUTOFFS}}


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    """Return the logarithm of n choose k; minus infinity where k is outside [0, n]."""
    n, k = torch.broadcast_tensors(n, k)
    value = torch.lgamma(n + 1) - torch.lgamma(k.clamp_min(0) + 1) - torch.lgamma((n - k).clamp_min(0) + 1)
    return torch.where((k >= 0) & (k <= n), value, -math.inf)
