"""Comparisons: a method against another on the same episodes, and one number over many tasks.

A paired difference is y_se(a) - y_se(b), seed by seed and episode by episode; its mean has the interval of
intervals.py, with seeds and episodes as crossed sources of chance. The p value is the level at which that interval
just touches zero, so p < 0.05 says the same as "the 95 % interval leaves zero out".

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
    """One method against another in one task and metric, on the same seeds and episodes."""

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
    """Mean difference of a and b, its 95 % interval, and the p value of there being none."""
    if a_SE.shape != b_SE.shape:
        raise ValueError(f"paired: {tuple(a_SE.shape)} and {tuple(b_SE.shape)} are not the same seeds and episodes")
    found = Spread.of(a_SE - b_SE, block)
    return found.mean, *found.interval(), found.p_value()


def holm(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs with p values that hold for all of them at once."""
    order = sorted(range(len(pairs)), key=lambda i: pairs[i].p)
    found, worst = list(pairs), 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, pairs[i].p * (len(pairs) - rank)))
        found[i] = replace(pairs[i], p_holm=worst)
    return found


def interquartile_mean(values: Sequence[float]) -> float:
    """Mean of the middle half; a value on its edge counts by the share that lies inside."""
    x, n = np.sort(np.asarray(values, dtype=float)), len(values)
    left = np.arange(n) / n
    weight = np.clip(np.minimum(left + 1 / n, 0.75) - np.maximum(left, 0.25), 0, None)
    return float((x * weight).sum() / weight.sum())


def aggregate(by_task: Mapping[str, Sequence[float]]) -> tuple[float, float, float]:
    """Interquartile mean over all runs of all tasks, and its 95 % interval: seeds are drawn anew within each task."""
    tables, random = [np.asarray(v, dtype=float) for v in by_task.values()], np.random.default_rng(0)
    drawn = [
        interquartile_mean(np.concatenate([x[random.integers(len(x), size=len(x))] for x in tables]).tolist())
        for _ in range(RESAMPLES)
    ]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return interquartile_mean(np.concatenate(tables).tolist()), float(low), float(high)
