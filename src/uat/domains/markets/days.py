"""Regime and volatility of each decision day, for the analysis of policies.

Rows are those of the tables: the decision days of all markets, one market after the other.

Axes: X decision days of all markets, T decision days of one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from uat.data.markets.features import Market
from uat.data.markets.regimes import UNKNOWN, label
from uat.data.markets.synthetic import REGIMES, SIZES, Size, generate
from uat.domains.markets.tables import load
from uat.domains.markets.world import MarketsConfig

MONTH = 21
"""Number of days over which volatility is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Days:
    date_X: NDArray[np.datetime64]
    regime_X: NDArray[np.int64]
    """Regime by the paper's rules, as an index into REGIMES; UNKNOWN if too few days surround the day."""
    known_X: NDArray[np.int64]
    """True regime of generated markets; UNKNOWN in any other market."""
    volatility_X: NDArray[np.float64]
    """Standard deviation of the market's log returns over the last month; NaN in the first month."""


def days_of(config: MarketsConfig) -> Days:
    markets = load(config.data, config.suspensions, config.days, config.protocol)
    lag = config.execution_lag
    known = [_known(market, config) for market in markets]
    return Days(
        date_X=np.concatenate([market.date_T for market in markets]),
        regime_X=np.concatenate([_labels(market, lag) for market in markets]),
        known_X=np.concatenate(known),
        volatility_X=np.concatenate([_volatility(market, lag) for market in markets]),
    )


def _labels(market: Market, lag: int) -> NDArray[np.int64]:
    """Return the regime of each day from prices up to a constant factor.

    Relative k is the ratio of the next close to the close of decision day k + lag.
    """
    price_TN = np.concatenate([np.ones_like(market.relative_TN[:1]), market.relative_TN.cumprod(0)])
    label_T = np.full(len(market.date_T), UNKNOWN)
    label_T[lag:] = label(price_TN)[: len(label_T) - lag]
    return label_T


def _volatility(market: Market, lag: int) -> NDArray[np.float64]:
    volatility_T = np.full(len(market.date_T), np.nan)
    log_T = np.log(market.relative_TN.mean(1))  # the k-th ends on decision day k + 1 + lag
    if len(log_T) >= MONTH:
        last_T = sliding_window_view(log_T, MONTH).std(-1, ddof=1)
        first = MONTH + lag
        volatility_T[first:] = last_T[: max(len(volatility_T) - first, 0)]
    return volatility_T


def _known(market: Market, config: MarketsConfig) -> NDArray[np.int64]:
    if config.data:
        return np.full(len(market.date_T), UNKNOWN)
    size = SIZES[market.name]
    made = generate(market.name, Size(assets=size.assets, days=config.days or size.days, start=size.start))
    return made.regime_T[np.searchsorted(made.date_T, market.date_T)]


__all__ = ["MONTH", "REGIMES", "UNKNOWN", "Days", "days_of"]
