"""Numbers that a domain reports, and one measured number."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A number that a domain reports per episode."""

    name: str
    higher_is_better: bool = True
    label: str = ""
    partial: bool = False
    """Whether an episode may leave it undefined: such an episode reports NaN and is left out of every mean."""

    def better(self, value: float, than: float) -> bool:
        """Whether a value is better than another; NaN, an undefined one, is worse than any number."""
        if math.isnan(than):
            return not math.isnan(value)
        return value > than if self.higher_is_better else value < than


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One measured number: a row of every table."""

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
