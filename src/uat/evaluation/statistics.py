"""Statistics of comparisons: paired differences between methods, and one aggregate score over many tasks.

A paired difference is y_se(a) - y_se(b) for every seed and episode. The interval of its mean is that of intervals.py,
with seeds and episodes as crossed random effects. The p value is the level at which that interval just reaches zero, so
p < 0.05 is equivalent to a 95 % interval that excludes zero.

Across tasks, the interquartile mean (Agarwal et al. 2021) of a normalised score leaves out the best and the worst
quarter of the runs; its interval comes from resampling the seeds of each task.
"""

from __future__ import annotations

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
    order = sorted(range(len(pairs)), key=lambda i: pairs[i].p)
    corrected, worst = list(pairs), 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, pairs[i].p * (len(pairs) - rank)))
        corrected[i] = replace(pairs[i], p_holm=worst)
    return corrected


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
