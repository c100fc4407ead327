"""Tests on real panels, if available: UAT_MARKETS=FOLDER pytest tests/data/test_market_real.py."""

from __future__ import annotations

import os
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from uat.data import SOURCES
from uat.data.markets.bars import market_files
from uat.data.markets.indicators import NAMES, WARM_UP, indicators
from uat.data.markets.panel import Panel, align
from uat.domains.markets import MarketsConfig
from uat.domains.markets.tables import load, windows

pytest.importorskip("polars")
FOLDER = Path(os.environ.get("UAT_MARKETS", ""))
FILES = market_files(FOLDER) if "UAT_MARKETS" in os.environ else []
pytestmark = pytest.mark.skipif(not FILES, reason="UAT_MARKETS names no folder of market files")
every_file = pytest.mark.parametrize("file", FILES or [Path("none")], ids=lambda file: file.stem)


@cache
def panel(file: Path) -> Panel:
    from uat.data.markets.files import read

    return align(read(file))


@every_file
def test_the_check_passes_and_counts_the_windows_that_the_domain_plays(file: Path) -> None:
    [report] = SOURCES["markets"].check(file)
    assert report.unsupported_reason is None
    config = MarketsConfig(data=str(file))
    markets = load(config.data, config.suspensions, config.days, config.protocol)
    assert np.isfinite(markets[0].feature_TNF).all()
    for split in ("train", "validation", "test"):
        assert windows(markets, split, config.protocol).counts == (report.facts[f"{split} windows"],)
    days = report.facts["days on which all traded"] - WARM_UP - 1
    segment = int(0.8 * days)
    held = int(0.15 * segment)
    expected = {"train": segment - held - 60 - 59, "validation": held - 59, "test": days - segment - 59}
    assert {split: report.facts[f"{split} windows"] for split in expected} == expected


@every_file
def test_rsi_and_macd_of_the_first_ticker_equal_an_independent_computation(file: Path) -> None:
    close = panel(file).close_TN[:, 0].tolist()
    found = dict(zip(NAMES, np.moveaxis(indicators(panel(file))[:, 0], -1, 0), strict=True))
    rises, falls = ([max(sign * (b - a), 0) for a, b in pairwise(close)] for sign in (1, -1))
    up, down, rsi = sum(rises[:14]) / 14, sum(falls[:14]) / 14, []
    for i in range(13, len(rises)):
        if i > 13:
            up, down = (13 * up + rises[i]) / 14, (13 * down + falls[i]) / 14
        rsi.append(100 - 100 / (1 + up / down))
    np.testing.assert_allclose(found["rsi"][14:], rsi, rtol=1e-8, atol=1e-8)

    def average(x: list[float], period: int) -> list[float]:
        out = [sum(x[:period]) / period]
        for value in x[period:]:
            out.append(out[-1] + 2 / (period + 1) * (value - out[-1]))
        return out

    fast, slow = average(close[14:], 12), average(close, 26)  # both begin on day 25
    line = [a - b for a, b in zip(fast, slow, strict=True)]
    signal = average(line, 9)
    np.testing.assert_allclose(found["macd"][33:], line[8:], rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(found["macd_signal"][33:], signal, rtol=1e-8, atol=1e-8)
