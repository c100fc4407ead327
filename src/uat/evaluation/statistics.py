"""Statistics of comparisons: paired differences between methods, and one aggregate score over many tasks.

A paired difference is y_se(a) - y_se(b) for every seed and episode. The interval of its mean is that of intervals.py,
with seeds and episodes as crossed random effects. The p value is the level at which that interval just reaches zero, so
p < 0.05 is equivalent to a 95 % interval that excludes zero.

A family of hypotheses shares one chance of error by Holm's method. Counts of updates, some of which never ended, are
compared by ranks.

Across tasks, the interquartile mean (Agarwal et al. 2021) of a normalised score leaves out the best and the worst
quarter of the runs; its interval comes from resampling the seeds of each task.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from uat.evaluation.intervals import Spread

RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Comparison of two methods in one task and metric, on the same seeds and episodes."""

    domain: str
    task: str
    setting: str
    metric: str
    method: str
    other: str
    difference: float
    """Mean of method - other."""
    low: float
    high: float
    """95 % interval of the difference."""
    p: float
    p_holm: float
    """Corrected by Holm's rule for all pairs of the same task, setting and metric."""
    n: int
    seeds: tuple[int, ...]


def paired(a_SE: Tensor, b_SE: Tensor, block: float = 1.0) -> tuple[float, float, float, float]:
    """Mean difference a - b, its 95 % interval, and the p value of the hypothesis that it is zero."""
    if a_SE.shape != b_SE.shape:
        raise ValueError(f"paired: {tuple(a_SE.shape)} and {tuple(b_SE.shape)} are not the same seeds and episodes")
    spread = Spread.of(a_SE - b_SE, block)
    return spread.mean, *spread.interval(), spread.p_value()


def holm(pairs: Sequence[Pair]) -> list[Pair]:
    """Fill in p values corrected for multiple comparisons by Holm's method."""
    corrected = holm_corrected([pair.p for pair in pairs])
    return [replace(pair, p_holm=p) for pair, p in zip(pairs, corrected, strict=True)]


def holm_corrected(values: Sequence[float], count: int | None = None) -> list[float]:
    """Return the p values of a family of hypotheses, corrected by Holm's method; NaN stays NaN.

    count: number of hypotheses in the family, those not tested yet included; unset: the number of known p values.
    """
    order = sorted((i for i, p in enumerate(values) if not math.isnan(p)), key=lambda i: values[i])
    if count is None:
        count = len(order)
    if count < len(order):
        raise ValueError(f"count={count} is less than the {len(order)} p values of the family")
    corrected, worst = [math.nan] * len(values), 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, values[i] * (count - rank)))
        corrected[i] = worst
    return corrected


def rank_test(own: Sequence[float], other: Sequence[float]) -> float:
    """Two-sided p value of Wilcoxon's rank sum test, by counting all permutations; ties share their mean rank.

    Values may be infinite: numbers of updates of seeds that never got there are larger than all others.
    """
    if not (own and other):
        raise ValueError(f"a rank test needs values on both sides, got {len(own)} and {len(other)}")
    both = [*own, *other]
    if any(math.isnan(x) for x in both):
        raise ValueError("a rank test needs values that can be ordered, and one of them is NaN")
    doubled = [sum((y < x) + (y <= x) for y in both) + 1 for x in both]  # twice the mean rank, a whole number
    sums: list[Counter[int]] = [Counter({0: 1}), *(Counter[int]() for _ in own)]  # by number of values drawn
    for rank in doubled:
        for drawn in range(len(own), 0, -1):
            for total, ways in sums[drawn - 1].items():
                sums[drawn][total + rank] += ways
    expected = len(own) * (len(both) + 1)
    distance = abs(sum(doubled[: len(own)]) - expected)
    extreme = sum(ways for total, ways in sums[-1].items() if abs(total - expected) >= distance)
    return extreme / math.comb(len(both), len(own))


def interquartile_mean(values: Sequence[float]) -> float:
    """Mean of the middle half of the values; values on its edges are weighted by the share that lies inside."""
    x, n = np.sort(np.asarray(values, dtype=float)), len(values)
    left = np.arange(n) / n
    weight = np.clip(np.minimum(left + 1 / n, 0.75) - np.maximum(left, 0.25), 0, None)
    return float((x * weight).sum() / weight.sum())


def aggregate(by_task: Mapping[str, Sequence[float]]) -> tuple[float, float, float]:
    """Interquartile mean over all runs of all tasks, and its 95 % interval by resampling the seeds of each task."""
    tables, random = [np.asarray(v, dtype=float) for v in by_task.values()], np.random.default_rng(0)
    drawn = [
        interquartile_mean(np.concatenate([x[random.integers(len(x), size=len(x))] for x in tables]).tolist())
        for _ in range(RESAMPLES)
    ]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return interquartile_mean(np.concatenate(tables).tolist()), float(low), float(high)
