"""A market as a panel: every asset on every day of one calendar.

Two ways to handle suspensions:
  common   keep only days on which every asset has a bar (as in the paper);
  mask     keep every day once all assets have started. A missing bar repeats the last close and is marked as not
           tradable, as is a day without volume.
Neither uses later days: nothing is ever filled from the future.

Axes: T days, N assets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from uat.data.markets.bars import NUMBERS, PRICES, Bars, Flags, Floats

Suspensions = Literal["common", "mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """OHLCV of N assets on T days."""

    date_T: NDArray[np.datetime64]
    tickers: tuple[str, ...]
    open_TN: Floats
    high_TN: Floats
    low_TN: Floats
    close_TN: Floats
    volume_TN: Floats
    tradable_TN: Flags


def align(bars: Bars, suspensions: Suspensions = "common") -> Panel:
    """Align checked bars into a panel, with assets sorted by ticker."""
    days, day = np.unique(bars.date, return_inverse=True)
    names, asset = np.unique(bars.ticker, return_inverse=True)
    raw = {name: np.full((len(days), len(names)), np.nan) for name in NUMBERS}
    for name, x_TN in raw.items():
        x_TN[day, asset] = getattr(bars, name)
    present_TN = ~np.isnan(raw["close"])
    if suspensions == "common":
        kept_T = present_TN.all(1)
    else:
        kept_T = np.maximum.accumulate(present_TN).all(1)
        _carry(raw, present_TN)
    if not kept_T.any():
        raise ValueError(f"there is no day on which all {len(names)} tickers have a bar")
    tradable_TN = present_TN if suspensions == "common" else present_TN & (raw["volume"] > 0)
    columns = {f"{name}_TN": x_TN[kept_T] for name, x_TN in raw.items()}
    tickers = tuple(map(str, names))
    return Panel(date_T=days[kept_T], tickers=tickers, tradable_TN=tradable_TN[kept_T], **columns)


def _carry(raw: dict[str, Floats], present_TN: Flags) -> None:
    """Fill missing bars in place: all prices become the last close, and the volume becomes zero."""
    last_TN = np.maximum.accumulate(np.where(present_TN, np.arange(len(present_TN))[:, None], 0))
    carried_TN = np.take_along_axis(raw["close"], last_TN, 0)  # NaN before an asset's first bar
    for name in PRICES:
        raw[name][~present_TN] = carried_TN[~present_TN]
    raw["volume"][~present_TN] = 0.0
