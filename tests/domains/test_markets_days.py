"""Regimes and volatilities are those of the right decision days."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from uat.data.markets.panel import align
from uat.data.markets.regimes import UNKNOWN, label
from uat.data.markets.synthetic import SIZES, generate
from uat.domains.markets import MarketsConfig
from uat.domains.markets.days import MONTH, days_of
from uat.domains.markets.tables import load

CONFIG = MarketsConfig(days=400, horizon=8)


@pytest.mark.parametrize("lag", [0, 1])
def test_days_are_labelled_as_the_whole_panel_would_be(lag: int) -> None:
    """Labels come from relatives; prices of the panel give the same labels, where both have one."""
    config = replace(CONFIG, execution_lag=lag)
    found, first = days_of(config), 0
    for market in load(config.data, config.suspensions, config.days, config.protocol):
        made = generate(market.name, replace(SIZES[market.name], days=400))
        panel = align(made.bars)
        rows = slice(first, first + len(market.date_T))
        at = np.searchsorted(panel.date_T, market.date_T)
        own, expected = found.regime_X[rows], label(panel.close_TN)[at]
        both = (own != UNKNOWN) & (expected != UNKNOWN)
        assert both.sum() > 200
        assert np.array_equal(own[both], expected[both])
        assert np.array_equal(found.known_X[rows], made.regime_T[at])
        proxy = np.log((panel.close_TN[1:] / panel.close_TN[:-1]).mean(1))
        day = at[300]
        assert found.volatility_X[rows][300] == pytest.approx(proxy[day - MONTH : day].std(ddof=1), rel=1e-9)
        first += len(market.date_T)
