"""Generated markets have the sizes of the real panels and the stated statistical features."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from uat.data.markets.bars import COLUMNS, inspect
from uat.data.markets.panel import Panel, align
from uat.data.markets.synthetic import MEAN_DAYS, REGIMES, SIZES, Size, SyntheticMarket, generate


@cache
def market(name: str, seed: int = 0) -> SyntheticMarket:
    return generate(name, SIZES[name], seed)


@cache
def panel(name: str) -> Panel:
    return align(market(name).bars)


def moves(name: str) -> np.ndarray:
    return np.diff(np.log(panel(name).close_TN), axis=0)


every_market = pytest.mark.parametrize("name", SIZES)


@every_market
def test_bars_pass_the_check_with_nothing_odd(name: str) -> None:
    report = inspect(market(name).bars, name)
    assert report.unsupported_reason is None
    odd = {f.what: f.count for f in report.findings}
    assert odd.pop("jumps over 25%") <= 5
    assert set(odd.values()) == {0}
    assert (report.facts["tickers"], report.facts["days"]) == (SIZES[name].assets, SIZES[name].days)


def test_a_market_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    for name in COLUMNS:
        assert np.array_equal(getattr(generate("cn", SIZES["cn"]).bars, name), getattr(market("cn").bars, name))
    assert not np.array_equal(market("cn").bars.close, market("cn", 1).bars.close)
    assert not np.array_equal(market("us").regime_T[:2000], market("cn").regime_T[:2000])


def test_a_longer_market_begins_as_the_shorter_one() -> None:
    long, short = (generate("x", Size(assets=3, days=days, start="2020-01-01")) for days in (90, 60))
    assert np.array_equal(long.bars.close[: 60 * 3], short.bars.close)
    assert np.array_equal(long.regime_T[:60], short.regime_T)


@every_market
def test_every_regime_occurs_and_lasts_as_long_as_it_says(name: str) -> None:
    regime_T = np.concatenate([market(name, seed).regime_T for seed in range(8)])
    starts = np.flatnonzero(np.diff(regime_T, prepend=-1))
    lasts, kind = np.diff(starts, append=len(regime_T)), regime_T[starts]
    for k in range(len(REGIMES)):
        assert (market(name).regime_T == k).any()
        assert lasts[kind == k].mean() == pytest.approx(MEAN_DAYS[k], rel=0.35)


@every_market
def test_regimes_differ_in_drift_and_volatility_as_documented(name: str) -> None:
    proxy, regime = moves(name).mean(1), market(name).regime_T[1:]
    mean = {REGIMES[k]: proxy[regime == k].mean() for k in range(4)}
    spread = {REGIMES[k]: proxy[regime == k].std() for k in range(4)}
    assert mean["bull"] > mean["bear"] > mean["shock"]
    assert spread["shock"] > spread["bear"] > spread["bull"]


@every_market
def test_assets_are_correlated_and_more_within_a_sector(name: str) -> None:
    c = np.corrcoef(moves(name).T)
    sector = np.arange(len(c)) % 5
    other = ~np.eye(len(c), dtype=bool)
    within, across = (c[(sector[:, None] == sector) & other].mean(), c[sector[:, None] != sector].mean())
    assert 0.15 < across < within < 0.8


@every_market
def test_volatility_clusters_and_tails_are_heavy(name: str) -> None:
    proxy = moves(name).mean(1)
    proxy = proxy - proxy.mean()
    size = np.abs(proxy)
    assert np.corrcoef(size[1:], size[:-1])[0, 1] > 0.1
    assert abs(np.corrcoef(proxy[1:], proxy[:-1])[0, 1]) < 0.15
    assert (proxy**4).mean() / (proxy**2).mean() ** 2 > 3.5


def test_files_of_the_generator_are_read_like_anybodys(tmp_path: Path) -> None:
    pytest.importorskip("polars")
    from uat.data.markets.files import read, write

    write(market("cn").bars, tmp_path / "cn.parquet")
    again = align(read(tmp_path / "cn.parquet"))
    assert again.tickers == panel("cn").tickers
    assert np.array_equal(again.close_TN, panel("cn").close_TN)
