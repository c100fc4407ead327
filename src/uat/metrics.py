"""Metrics that a domain reports, and measured scores."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric that a domain reports per episode."""

    name: str
    higher_is_better: bool = True
    label: str = ""
    partial: bool = False
    """Whether the metric may be undefined (NaN) in an episode, which is then left out of every mean."""

    def better(self, value: float, than: float) -> bool:
        """Whether `value` is better than `than`. NaN (undefined) is worse than any number."""
        if math.isnan(than):
            return not math.isnan(value)
        return value > than if self.higher_is_better else value < than


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One measured number: one row of the results."""

    run: str
    method: str
    domain: str
    task: str
    setting: str
    split: str
    seed: int
    metric: str
    value: float
    n: int
    numerics: str = ""
    """Revision of the build that trained the policy, such as "cuda-2" (see `uat.numerics`); empty for references."""
