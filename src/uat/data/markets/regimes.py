"""Market regime of each day, labelled with hindsight by the paper's rules. For analysing policies, never for training.

The market's daily log return r is that of the equal-weighted mean of its assets' simple returns. With σ the standard
deviation of the 63 returns up to a day, that day is
  shock   if |r| / σ > 1.5 and wealth falls by more than 1.5 % from a peak within the next five days, else
  bull    if the next 21 log returns sum to more than 1 %,
  bear    if they sum to less than -1 %,
  chop    otherwise.
Days without enough days before and after them have no label.

Axes: T days, N assets.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from uat.data.markets.bars import Floats
from uat.data.markets.synthetic import REGIMES

BULL, BEAR, CHOP, SHOCK = range(len(REGIMES))
UNKNOWN = -1
BACK, AHEAD, SOON = 63, 21, 5
LARGE, FALL, TREND = 1.5, 0.015, 0.01


def label(close_TN: Floats) -> NDArray[np.int64]:
    """Regime of each day (T,), an index into REGIMES or UNKNOWN."""
    label_T = np.full(len(close_TN), UNKNOWN)
    if len(close_TN) <= BACK + AHEAD:
        return label_T
    log_T = np.log(np.mean(close_TN[1:] / close_TN[:-1], axis=1))  # from day 1 on
    sigma_T = sliding_window_view(log_T, BACK).std(-1, ddof=1)[:-AHEAD]  # from day 63 on
    now_T = log_T[BACK - 1 : -AHEAD]
    next_TP = sliding_window_view(log_T[BACK:], AHEAD)
    ahead_T, fall_T = next_TP.sum(-1), _drawdown(next_TP[:, :SOON])
    shock_T = (np.abs(now_T) > LARGE * sigma_T) & (fall_T > FALL)
    known_T = np.where(ahead_T > TREND, BULL, np.where(ahead_T < -TREND, BEAR, CHOP))
    label_T[BACK : len(close_TN) - AHEAD] = np.where(shock_T, SHOCK, known_T)
    return label_T


def _drawdown(log_TP: Floats) -> Floats:
    """Largest fall from a peak (T,), as a share, within the days of each row and the day before them."""
    wealth_TP = np.concatenate([np.zeros((len(log_TP), 1)), log_TP.cumsum(-1)], axis=-1)
    return -np.expm1((wealth_TP - np.maximum.accumulate(wealth_TP, axis=-1)).min(-1))
