"""Market regimes labelled with hindsight: the paper's rules on series with known answers."""

from __future__ import annotations

import numpy as np
import pytest

from uat.data.markets.panel import align
from uat.data.markets.regimes import AHEAD, BACK, BEAR, BULL, CHOP, SHOCK, UNKNOWN, label
from uat.data.markets.synthetic import SIZES, generate


def prices(log: np.ndarray) -> np.ndarray:
    """Two assets with identical returns."""
    return np.tile(np.exp(np.concatenate([[0.0], log.cumsum()]))[:, None] * 10, 2)


def quiet(days: int, drift: float) -> np.ndarray:
    return drift + 0.002 * np.tile([1.0, -1.0], days)[:days]


@pytest.mark.parametrize(("drift", "expected"), [(0.001, BULL), (-0.001, BEAR), (0.0, CHOP)])
def test_a_steady_market_has_one_label(drift: float, expected: int) -> None:
    found = label(prices(quiet(200, drift)))
    assert (found[BACK:-AHEAD] == expected).all()
    assert (found[:BACK] == UNKNOWN).all()
    assert (found[-AHEAD:] == UNKNOWN).all()


@pytest.mark.parametrize(("fall", "expected"), [(-0.02, SHOCK), (-0.01, BULL)])
def test_a_large_move_is_a_shock_if_wealth_falls_soon_after(fall: float, expected: int) -> None:
    log = quiet(200, 0.002)
    log[100], log[103] = 0.02, fall  # return i ends on day i + 1
    assert label(prices(log))[101] == expected


def test_a_small_move_is_never_a_shock() -> None:
    log = quiet(200, 0.0)
    log[103] = -0.03
    assert label(prices(log))[101] != SHOCK


def test_days_beyond_the_labels_reach_change_nothing() -> None:
    log = np.random.default_rng(0).normal(0, 0.01, 300)
    before, after = log.copy(), log.copy()
    after[200:] = 0.05
    assert np.array_equal(label(prices(before))[: 201 - AHEAD], label(prices(after))[: 201 - AHEAD])


def test_few_days_have_no_label() -> None:
    assert (label(prices(quiet(60, 0.0))) == UNKNOWN).all()


def test_labels_agree_with_the_generators_bulls_and_bears_better_than_chance() -> None:
    market = generate("us", SIZES["us"])
    found, true = label(align(market.bars).close_TN), market.regime_T
    known = found != UNKNOWN
    told_bear = (found == BEAR)[known]
    assert told_bear[true[known] == BEAR].mean() > told_bear[true[known] == BULL].mean() + 0.2
