"""Indicators against independent computations; features never depend on later days."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from uat.data.markets.features import CLIP, Market, Protocol, prepare
from uat.data.markets.indicators import NAMES, WARM_UP, indicators, mfi
from uat.data.markets.panel import Panel, align
from uat.data.markets.synthetic import Size, generate

SMALL = Protocol(window=20)


@cache
def panel() -> Panel:
    return align(generate("x", Size(assets=4, days=400, start="2020-01-01")).bars)


@cache
def values() -> dict[str, np.ndarray]:
    return dict(zip(NAMES, np.moveaxis(indicators(panel()), -1, 0), strict=True))


def market(given: Panel | None = None, protocol: Protocol = SMALL) -> Market:
    return prepare("x", given or panel(), protocol)


def close_to(found: np.ndarray, expected: list[float], first: int) -> None:
    assert np.isnan(found[:first]).all()
    np.testing.assert_allclose(found[first:], expected, rtol=1e-8, atol=1e-8)


# ---------------------------------------------------------------- known answers, number by number


@pytest.mark.parametrize("asset", range(4))
def test_rsi_is_wilders(asset: int) -> None:
    """1978: both averages start as plain means of 14 moves; each later move counts 1/14; RSI = 100 - 100 / (1 + RS)."""
    close = panel().close_TN[:, asset].tolist()
    rises = [max(b - a, 0) for a, b in pairwise(close)]
    falls = [max(a - b, 0) for a, b in pairwise(close)]
    up, down, expected = sum(rises[:14]) / 14, sum(falls[:14]) / 14, []
    for i in range(13, len(rises)):
        if i > 13:
            up, down = (13 * up + rises[i]) / 14, (13 * down + falls[i]) / 14
        expected.append(100 - 100 / (1 + up / down))
    close_to(values()["rsi"][:, asset], expected, 14)


@pytest.mark.parametrize("asset", range(4))
def test_macd_is_exponential(asset: int) -> None:
    """Averages written as explicit weighted sums of the past, not as recursions."""
    close = panel().close_TN[:, asset]

    def average(x: np.ndarray, period: int, begin: int) -> np.ndarray:
        """From day begin + period - 1 on: the weight of the initial mean and of every later value."""
        keep, first = 1 - 2 / (period + 1), begin + period - 1
        return np.array(
            [
                x[begin : first + 1].mean() * keep ** (t - first)
                + sum((1 - keep) * keep ** (t - s) * x[s] for s in range(first + 1, t + 1))
                for t in range(first, len(x))
            ]
        )

    line = average(close, 12, 14) - average(close, 26, 0)
    signal = average(line, 9, 0)
    close_to(values()["macd"][:, asset], line[8:].tolist(), 33)
    close_to(values()["macd_signal"][:, asset], signal.tolist(), 33)
    close_to(values()["macd_histogram"][:, asset], (line[8:] - signal).tolist(), 33)


def test_the_others_on_one_day_by_their_definitions() -> None:
    p, n, t = panel(), 2, 200
    high, low, close, volume = (getattr(p, f"{x}_TN")[:, n] for x in ("high", "low", "close", "volume"))
    typical = (high + low + close) / 3
    last = typical[t - 13 : t + 1]
    expected = (typical[t] - last.mean()) / (0.015 * np.abs(last - last.mean()).mean())
    assert values()["cci"][t, n] == pytest.approx(expected, rel=1e-9)
    money = [(typical[s] > typical[s - 1], typical[s] * volume[s]) for s in range(t - 13, t + 1)]
    expected = 100 * sum(m for up, m in money if up) / sum(m for _, m in money)
    assert values()["mfi"][t, n] == pytest.approx(expected, rel=1e-9)
    expected = volume[0] + sum(np.sign(close[s] - close[s - 1]) * volume[s] for s in range(1, t + 1))
    assert values()["obv"][t, n] == pytest.approx(expected, rel=1e-9)
    raw = [
        100 * (close[s] - low[s - 4 : s + 1].min()) / (high[s - 4 : s + 1].max() - low[s - 4 : s + 1].min())
        for s in range(t - 4, t + 1)
    ]
    assert values()["stoch_k"][t, n] == pytest.approx(np.mean(raw[2:]), rel=1e-9)
    assert values()["stoch_d"][t, n] == pytest.approx(np.mean([np.mean(raw[i : i + 3]) for i in range(3)]), rel=1e-9)


def test_money_flow_ignores_days_with_an_unchanged_price() -> None:
    """0.1 + 0.2 + 0.3 and 0.3 + 0.2 + 0.1 are the same price, although the floating-point sums differ."""
    typical, volume = np.linspace(1, 2, 20)[:, None], np.ones((20, 1))
    typical[10] = typical[9] * (1 - 2e-16)
    assert typical[10] < typical[9]
    assert mfi(typical, volume)[14:] == pytest.approx(100)


def test_a_market_that_only_rises_is_all_trend() -> None:
    steady = np.tile(np.arange(100.0, 200.0)[:, None], 2)
    shape = {"open_TN": steady, "close_TN": steady, "high_TN": steady + 1, "low_TN": steady - 1}
    rising = replace(
        panel(), date_T=panel().date_T[:100], volume_TN=np.ones_like(steady), tradable_TN=steady > 0, **shape
    )
    found: dict[str, np.ndarray] = dict(zip(NAMES, np.moveaxis(indicators(rising)[WARM_UP:], -1, 0), strict=True))
    for name, value in {"rsi": 100, "adx": 100, "mfi": 100, "atr": 2}.items():
        assert found[name] == pytest.approx(value), name


def test_flat_prices_give_numbers() -> None:
    flat = np.full((100, 2), 7.0)
    same = {f"{name}_TN": flat for name in ("open", "high", "low", "close")}
    still = replace(panel(), date_T=panel().date_T[:100], volume_TN=0 * flat, tradable_TN=flat < 0, **same)
    assert np.isfinite(indicators(still)[WARM_UP:]).all()


def test_all_are_talibs() -> None:
    """Compare with the C library, if it is installed, on the day its warm-up ends and all later days."""
    talib = pytest.importorskip("talib")
    for n in range(4):
        high, low, close, volume = (
            np.ascontiguousarray(getattr(panel(), f"{name}_TN")[:, n]) for name in ("high", "low", "close", "volume")
        )
        expected = (
            talib.RSI(close, 14),
            *talib.MACD(close, 12, 26, 9),
            talib.ATR(high, low, close, 14),
            talib.ADX(high, low, close, 14),
            talib.CCI(high, low, close, 14),
            talib.MFI(high, low, close, volume, 14),
            talib.OBV(close, volume),
            *talib.STOCH(high, low, close, 5, 3, 0, 3, 0),
        )
        for name, value in zip(NAMES, expected, strict=True):
            np.testing.assert_allclose(values()[name][:, n], value, rtol=1e-8, atol=1e-8, err_msg=name)


# ---------------------------------------------------------------- no look-ahead


def spoilt(day: int) -> Panel:
    """The panel with different values on all days after this one."""
    changes = {}
    for name in ("open_TN", "high_TN", "low_TN", "close_TN", "volume_TN"):
        changes[name] = getattr(panel(), name).copy()
        changes[name][day + 1 :] *= 3.0 + np.arange(len(changes[name]) - day - 1)[:, None]
    return replace(panel(), **changes)


@pytest.mark.parametrize("day", [WARM_UP, 150, 300, 398])
def test_the_future_changes_no_earlier_indicator(day: int) -> None:
    before, after = indicators(panel()), indicators(spoilt(day))
    assert np.array_equal(before[: day + 1], after[: day + 1], equal_nan=True)
    assert not np.array_equal(before[day + 1 :], after[day + 1 :])


@pytest.mark.parametrize("lag", [0, 1])
def test_days_after_training_change_no_training_feature_and_no_statistic(lag: int) -> None:
    protocol = replace(SMALL, execution_lag=lag)
    before = market(protocol=protocol)
    last = before.splits["train"].stop - 1
    after = market(spoilt(last + WARM_UP), protocol)
    assert np.array_equal(before.mean_NF, after.mean_NF)
    assert np.array_equal(before.std_NF, after.std_NF)
    assert np.array_equal(before.feature_TNF[: last + 1], after.feature_TNF[: last + 1])
    assert not np.array_equal(before.feature_TNF[last + 1 :], after.feature_TNF[last + 1 :])
    known = last - lag  # the relative of day t is known lag + 1 days later
    assert np.array_equal(before.relative_TN[:known], after.relative_TN[:known])


@pytest.mark.parametrize("lag", [0, 1])
def test_relatives_are_the_next_closes_over_those_traded_at(lag: int) -> None:
    found, close, t = market(protocol=replace(SMALL, execution_lag=lag)), panel().close_TN, 77
    day = int(np.flatnonzero(panel().date_T == found.date_T[t])[0])
    assert found.relative_TN[t] == pytest.approx(close[day + 1 + lag] / close[day + lag], rel=1e-15)
    assert len(found.relative_TN) == len(found.date_T) == len(found.feature_TNF) == 400 - WARM_UP - 1 - lag


def test_training_features_have_mean_zero_and_deviation_one_and_all_are_finite() -> None:
    found = market()
    raw = indicators(panel())[WARM_UP:-1][found.splits["train"]]
    again = (raw - found.mean_NF) / found.std_NF
    np.testing.assert_allclose(again.mean(0), 0, atol=1e-9)
    np.testing.assert_allclose(again.std(0), 1, atol=1e-9)
    assert np.isfinite(found.feature_TNF).all()
    assert np.abs(found.feature_TNF).max() <= CLIP
    assert np.array_equal(found.feature_TNF[found.splits["train"]], np.clip(again, -CLIP, CLIP))


# ---------------------------------------------------------------- splits


def test_windows_are_the_calendars_arithmetic() -> None:
    protocol = Protocol()
    splits = protocol.split(np.arange(3386).astype("datetime64[D]"))  # 3,420 days, less 33 of warm-up and the last one
    assert splits == {"train": slice(0, 2242), "validation": slice(2302, 2708), "test": slice(2708, 3386)}
    assert {name: len(protocol.windows(part)) for name, part in splits.items()} == {
        "train": 2183,
        "validation": 347,
        "test": 619,
    }


def test_a_day_may_divide_training_from_test() -> None:
    dated = market(protocol=replace(SMALL, test_from="2021-02-06"))  # a Saturday
    first = dated.splits["test"].start
    assert str(dated.date_T[first]) == "2021-02-08"
    assert dated.splits["validation"].stop == first
    assert dated.splits["test"].stop == len(dated.date_T)
    with pytest.raises(ValueError, match=r"x: .* leave 0 for test"):
        market(protocol=replace(SMALL, test_from="2030-01-01"))


def test_no_window_of_training_comes_within_a_window_of_validation() -> None:
    splits, window = market().splits, SMALL.window
    train, validation = SMALL.windows(splits["train"]), SMALL.windows(splits["validation"])
    assert validation[0] - (train[-1] + window - 1) == window + 1
    assert SMALL.windows(splits["test"])[0] == splits["validation"].stop


@pytest.mark.parametrize("days", [20, 40, 150])
def test_too_few_days_are_refused_by_name(days: int) -> None:
    few = {
        f.name: getattr(panel(), f.name)[:days] for f in panel().__dataclass_fields__.values() if f.name != "tickers"
    }
    with pytest.raises(ValueError, match=r"too few|fewer than one window"):
        market(replace(panel(), **few), Protocol())


@pytest.mark.parametrize(
    "wrong",
    [{"test_from": "soon"}, {"train_share": 1.0}, {"validation_share": 0.0}, {"window": 0}, {"execution_lag": -1}],
)
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Protocol(**wrong)
