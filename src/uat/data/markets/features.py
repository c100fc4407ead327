"""A market as a policy meets it: standardised features, what each asset earns next, and which days are whose.

A decision day is a day t whose indicators are defined and whose next relative, close[t + 1 + lag] / close[t + lag], is
known. The first `train_share` of them, or those before the day `test_from`, are the training segment. Its last part is
for validation, and before that as many days as a window has are nobody's (embargo), so that no window of training
touches a day that validation is judged on. Means and deviations are those of the training days alone.

Axes: T decision days, N assets, F indicators.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from uat.data.markets.bars import Flags, Floats
from uat.data.markets.indicators import WARM_UP, indicators
from uat.data.markets.panel import Panel
from uat.settings import Delay, Inner, Steps, check_fields, shown

CLIP = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How a market's days are split and dealt with."""

    window: Steps = 60
    """Days of one episode."""
    train_share: Inner = 0.8
    """The training segment's share of the decision days; the rest is test."""
    validation_share: Inner = 0.15
    """Which share of the training segment, at its end, is for validation."""
    execution_lag: Delay = 0
    """Days between a decision and the close at which it is traded."""
    test_from: str = ""
    """The first day that is test, YYYY-MM-DD; empty: the training segment's share decides."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.test_from and not _is_day(self.test_from):
            raise ValueError(f"test_from={shown(self.test_from)} must be a day, YYYY-MM-DD")

    def split(self, date_T: NDArray[np.datetime64]) -> dict[str, slice]:
        """Which decision days belong to whom."""
        days = len(date_T)
        segment = int(days * self.train_share)
        if self.test_from:
            segment = int(np.searchsorted(date_T, np.datetime64(self.test_from, "D")))
        validation = segment - int(segment * self.validation_share)
        found = {
            "train": slice(0, validation - self.window),
            "validation": slice(validation, segment),
            "test": slice(segment, days),
        }
        for name, part in found.items():
            if part.stop - part.start < self.window:
                raise ValueError(
                    f"{days} decision days leave {max(part.stop - part.start, 0)} for {name}: "
                    f"fewer than one window of {self.window}"
                )
        return found

    def windows(self, part: slice) -> NDArray[np.int64]:
        """First days of the windows inside a split, one day apart."""
        return np.arange(part.start, part.stop - self.window + 1)


def calendar(date_T: NDArray[np.datetime64], protocol: Protocol) -> dict[str, int]:
    """From the days of a panel to windows: how many there are of each split."""
    decision_T = date_T[WARM_UP : len(date_T) - 1 - protocol.execution_lag]
    return {name: len(protocol.windows(part)) for name, part in protocol.split(decision_T).items()}


def _is_day(text: str) -> bool:
    """Whether it names a day, or a year or month for its first one; NumPy would take "today" as well."""
    try:
        return bool(re.fullmatch(r"\d{4}(-\d\d(-\d\d)?)?", text, re.ASCII)) and not np.isnat(np.datetime64(text, "D"))
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Market:
    """What one market shows and pays."""

    name: str
    tickers: tuple[str, ...]
    date_T: NDArray[np.datetime64]
    feature_TNF: Floats
    relative_TN: Floats
    """What one unit of money in each asset becomes."""
    tradable_TN: Flags
    mean_NF: Floats
    std_NF: Floats
    splits: dict[str, slice]


def prepare(name: str, panel: Panel, protocol: Protocol) -> Market:
    """Features, relatives and splits of a panel."""
    begin, end = WARM_UP, len(panel.date_T) - 1 - protocol.execution_lag
    if end <= begin:
        raise ValueError(f"{name}: {len(panel.date_T)} days are too few: indicators take the first {WARM_UP}")
    raw_TNF = indicators(panel)[begin:end]
    try:
        splits = protocol.split(panel.date_T[begin:end])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    feature_TNF, mean_NF, std_NF = standardised(raw_TNF, splits["train"])
    traded = slice(begin + protocol.execution_lag, len(panel.date_T))
    close_TN = panel.close_TN[traded]
    return Market(
        name=name,
        tickers=panel.tickers,
        date_T=panel.date_T[begin:end],
        feature_TNF=feature_TNF,
        relative_TN=close_TN[1:] / close_TN[:-1],
        tradable_TN=panel.tradable_TN[begin:end],
        mean_NF=mean_NF,
        std_NF=std_NF,
        splits=splits,
    )


def standardised(raw_TNF: Floats, train: slice) -> tuple[Floats, Floats, Floats]:
    """Per asset and indicator: less the training days' mean, over their deviation, within ±5; and both of these."""
    mean_NF, std_NF = raw_TNF[train].mean(0), raw_TNF[train].std(0)
    scale_NF = np.where(std_NF > 0, std_NF, 1.0)
    return np.clip((raw_TNF - mean_NF) / scale_NF, -CLIP, CLIP), mean_NF, scale_NF
