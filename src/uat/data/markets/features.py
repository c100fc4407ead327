"""A market as policies see it: standardised features, the return of each asset, and the split of the days.

A decision day is a day t whose indicators are defined and whose next price relative, close[t + 1 + lag] /
close[t + lag], is known. The first `train_share` of the decision days, or those before the day `test_from`, are the
training segment. Its last part is the validation split. The days of one window before it belong to no split (an
embargo), so that no training window overlaps a validation day. Features are standardised with the means and standard
deviations of the training days only.

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
    """How the days of a market are split into training, validation and test."""

    window: Steps = 60
    """Days of one episode."""
    train_share: Inner = 0.8
    """Share of the decision days in the training segment; the rest is the test split."""
    validation_share: Inner = 0.15
    """Share of the training segment, at its end, that is used for validation."""
    execution_lag: Delay = 0
    """Days between a decision and the close at which the trade is executed."""
    test_from: str = ""
    """First test day, YYYY-MM-DD; if empty, `train_share` decides."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.test_from and not _is_day(self.test_from):
            raise ValueError(f"test_from={shown(self.test_from)} must be a day, YYYY-MM-DD")

    def split(self, date_T: NDArray[np.datetime64]) -> dict[str, slice]:
        """Decision days of each split."""
        days = len(date_T)
        segment = int(days * self.train_share)
        if self.test_from:
            segment = int(np.searchsorted(date_T, np.datetime64(self.test_from, "D")))
        validation = segment - int(segment * self.validation_share)
        splits = {
            "train": slice(0, validation - self.window),
            "validation": slice(validation, segment),
            "test": slice(segment, days),
        }
        for name, part in splits.items():
            if part.stop - part.start < self.window:
                raise ValueError(
                    f"{days} decision days leave {max(part.stop - part.start, 0)} for {name}: "
                    f"fewer than one window of {self.window}"
                )
        return splits

    def windows(self, part: slice) -> NDArray[np.int64]:
        """First days of the windows inside a split, one day apart."""
        return np.arange(part.start, part.stop - self.window + 1)


def calendar(date_T: NDArray[np.datetime64], protocol: Protocol) -> dict[str, int]:
    """Number of windows in each split, from the days of a panel."""
    decision_T = date_T[WARM_UP : len(date_T) - 1 - protocol.execution_lag]
    return {name: len(protocol.windows(part)) for name, part in protocol.split(decision_T).items()}


def _is_day(text: str) -> bool:
    """Whether the text is a date (a year or a month means its first day). NumPy alone would also accept "today"."""
    try:
        return bool(re.fullmatch(r"\d{4}(-\d\d(-\d\d)?)?", text, re.ASCII)) and not np.isnat(np.datetime64(text, "D"))
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Market:
    """Features, price relatives and splits of one market."""

    name: str
    tickers: tuple[str, ...]
    date_T: NDArray[np.datetime64]
    feature_TNF: Floats
    relative_TN: Floats
    """Value, at the end of the step, of one unit of money held in each asset."""
    tradable_TN: Flags
    mean_NF: Floats
    std_NF: Floats
    splits: dict[str, slice]


def prepare(name: str, panel: Panel, protocol: Protocol) -> Market:
    """Compute the features, price relatives and splits of a panel."""
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
    """Standardise each asset's indicators with the training days' mean and standard deviation, and clip to ±5.

    Returns the standardised features, the means and the standard deviations.
    """
    mean_NF, std_NF = raw_TNF[train].mean(0), raw_TNF[train].std(0)
    scale_NF = np.where(std_NF > 0, std_NF, 1.0)
    return np.clip((raw_TNF - mean_NF) / scale_NF, -CLIP, CLIP), mean_NF, scale_NF
