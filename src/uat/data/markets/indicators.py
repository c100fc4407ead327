"""Eleven technical indicators from OHLCV, for all assets of a market at once.

The formulas, periods and starting values are those of TA-Lib (RSI, ATR and ADX by Wilder's method, exponential MACD),
written in NumPy. TA-Lib is the tests' reference but not a dependency: it is a compiled library, this code is as fast
for whole panels, and results should not depend on which libraries are installed.

The value at day t uses only the days up to t. Days on which an indicator is not yet defined are NaN; from WARM_UP on,
every indicator is defined.

Axes: T days, N assets, F indicators, P days of a window.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from uat.data.markets.bars import Floats
from uat.data.markets.panel import Panel

NAMES = ("rsi", "macd", "macd_signal", "macd_histogram", "atr", "adx", "cci", "mfi", "obv", "stoch_k", "stoch_d")
PERIOD = 14
FAST, SLOW, SIGNAL = 12, 26, 9
STOCH_K, STOCH_SMOOTH = 5, 3
TIE = 1e-12
"""Typical prices that differ by less than this share count as equal."""
WARM_UP = SLOW + SIGNAL - 2
"""The first day on which every indicator is defined; the MACD signal is the last to start."""


def indicators(panel: Panel) -> Floats:
    """All indicators (T, N, F), in the order of NAMES."""
    high, low, close, volume = panel.high_TN, panel.low_TN, panel.close_TN, panel.volume_TN
    if len(close) <= WARM_UP:
        raise ValueError(f"{len(close)} days are too few: indicators need more than {WARM_UP}")
    typical = (high + low + close) / 3
    columns = (
        rsi(close),
        *macd(close),
        wilder_mean(true_range(high, low, close), PERIOD),
        adx(high, low, close),
        cci(typical),
        mfi(typical, volume),
        obv(close, volume),
        *stochastic(high, low, close),
    )
    return np.stack(columns, axis=-1)


def rsi(close_TN: Floats) -> Floats:
    """Relative strength index: rises as a share of all moves, 0 to 100, both smoothed by Wilder's mean."""
    move_TN = np.diff(close_TN, axis=0, prepend=np.nan)
    up_TN, down_TN = (wilder_mean(np.maximum(sign * move_TN, 0.0), PERIOD) for sign in (1, -1))
    return 100 * _ratio(up_TN, up_TN + down_TN)


def macd(close_TN: Floats) -> tuple[Floats, Floats, Floats]:
    """MACD line (fast minus slow exponential mean), its signal (the mean of the line), and their difference."""
    fast_TN = exponential_mean(close_TN, FAST, begin=SLOW - FAST)  # both averages start on the same day
    line_TN = fast_TN - exponential_mean(close_TN, SLOW)
    signal_TN = exponential_mean(line_TN, SIGNAL, begin=SLOW - 1)
    line_TN[:WARM_UP] = np.nan
    return line_TN, signal_TN, line_TN - signal_TN


def true_range(high_TN: Floats, low_TN: Floats, close_TN: Floats) -> Floats:
    """The day's range, extended to include the previous close; NaN on the first day."""
    before_TN = _previous(close_TN)
    return np.maximum(high_TN, before_TN) - np.minimum(low_TN, before_TN)


def adx(high_TN: Floats, low_TN: Floats, close_TN: Floats) -> Floats:
    """Average directional index: strength of the trend, up or down, from 0 to 100."""
    up_TN, down_TN = high_TN - _previous(high_TN), _previous(low_TN) - low_TN
    plus_TN = np.where((up_TN > down_TN) & (up_TN > 0), up_TN, 0.0)
    minus_TN = np.where((down_TN > up_TN) & (down_TN > 0), down_TN, 0.0)
    range_TN = true_range(high_TN, low_TN, close_TN)
    plus, minus, total = (_wilder_sum(x, PERIOD) for x in (plus_TN, minus_TN, range_TN))
    plus, minus = _ratio(plus, total), _ratio(minus, total)
    directed_TN = 100 * _ratio(np.abs(plus - minus), plus + minus)
    return wilder_mean(directed_TN, PERIOD, begin=PERIOD)


def cci(typical_TN: Floats) -> Floats:
    """Commodity channel index: distance of the typical price from its mean, in units of 0.015 mean deviations."""
    window_TNP = _windows(typical_TN, PERIOD)
    mean_TN = window_TNP.mean(-1)
    deviation_TN = np.abs(window_TNP - mean_TN[..., None]).mean(-1)
    return _padded(_ratio(window_TNP[..., -1] - mean_TN, 0.015 * deviation_TN), PERIOD - 1)


def mfi(typical_TN: Floats, volume_TN: Floats) -> Floats:
    """Money flow index: share of turnover on days with a rising price, 0 to 100; 0 if almost nothing was traded.

    A day whose price does not change counts for neither side, even if rounding in the sum of three prices makes it
    look like a change. Only on such days may TA-Lib differ, as TA-Lib itself does between machines.
    """
    move_TN, money_TN = np.diff(typical_TN, axis=0), (typical_TN * volume_TN)[1:]
    move_TN[np.abs(move_TN) < TIE * typical_TN[1:]] = 0.0
    up_TN, down_TN = (_windows(np.where(sign * move_TN > 0, money_TN, 0.0), PERIOD).sum(-1) for sign in (1, -1))
    all_TN = up_TN + down_TN
    return _padded(np.where(all_TN < 1, 0.0, 100 * _ratio(up_TN, all_TN)), PERIOD)


def obv(close_TN: Floats, volume_TN: Floats) -> Floats:
    """On-balance volume: cumulative volume, with the sign of each day's move."""
    signed_TN = np.sign(np.diff(close_TN, axis=0)) * volume_TN[1:]
    return np.concatenate([volume_TN[:1], signed_TN]).cumsum(0)


def stochastic(high_TN: Floats, low_TN: Floats, close_TN: Floats) -> tuple[Floats, Floats]:
    """Position of the close in the range of the last days, 0 to 100, averaged once (%K) and twice (%D)."""
    top_TN, bottom_TN = _windows(high_TN, STOCH_K).max(-1), _windows(low_TN, STOCH_K).min(-1)
    raw_TN = 100 * _ratio(close_TN[STOCH_K - 1 :] - bottom_TN, top_TN - bottom_TN)
    k_TN = _windows(raw_TN, STOCH_SMOOTH).mean(-1)
    d_TN = _windows(k_TN, STOCH_SMOOTH).mean(-1)
    first = STOCH_K + 2 * STOCH_SMOOTH - 3  # both start on the first day of the second average
    return _padded(k_TN[STOCH_SMOOTH - 1 :], first), _padded(d_TN, first)


# ---------------------------------------------------------------- averages


def wilder_mean(x_TN: Floats, period: int, begin: int = 1) -> Floats:
    """m_t = m_{t-1} + (x_t - m_{t-1}) / period; the first value is the plain mean of `period` values from `begin`."""
    return _smoothed(x_TN, period, begin, 1 / period)


def exponential_mean(x_TN: Floats, period: int, begin: int = 0) -> Floats:
    """Like `wilder_mean`, with the weight 2 / (period + 1)."""
    return _smoothed(x_TN, period, begin, 2 / (period + 1))


def _smoothed(x_TN: Floats, period: int, begin: int, weight: float) -> Floats:
    out_TN, first = np.full_like(x_TN, np.nan), begin + period - 1
    mean_N = x_TN[begin : first + 1].mean(0)
    out_TN[first] = mean_N
    for t in range(first + 1, len(x_TN)):
        mean_N = mean_N + weight * (x_TN[t] - mean_N)
        out_TN[t] = mean_N
    return out_TN


def _wilder_sum(x_TN: Floats, period: int) -> Floats:
    """s_t = s_{t-1} - s_{t-1} / period + x_t, starting from the sum of `period` - 1 values after the first day."""
    out_TN, sum_N = np.full_like(x_TN, np.nan), x_TN[1:period].sum(0)
    for t in range(period, len(x_TN)):
        sum_N = sum_N - sum_N / period + x_TN[t]
        out_TN[t] = sum_N
    return out_TN


def _ratio(top: Floats, bottom: Floats) -> Floats:
    """Quotient; 0 where the divisor is 0."""
    return np.divide(top, bottom, out=np.where(np.isnan(bottom), np.nan, 0.0), where=bottom > 0)


def _previous(x_TN: Floats) -> Floats:
    """Shift by one day; the first day is NaN."""
    return np.concatenate([np.full_like(x_TN[:1], np.nan), x_TN[:-1]])


def _windows(x_TN: Floats, period: int) -> Floats:
    """Sliding windows (T - period + 1, N, period) of days, the latest day last."""
    return sliding_window_view(x_TN, period, axis=0)


def _padded(x_TN: Floats, days: int) -> Floats:
    return np.concatenate([np.full((days, x_TN.shape[1]), np.nan), x_TN])
