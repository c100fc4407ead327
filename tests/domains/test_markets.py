"""Markets: what is seen, allowed, earned and labelled, and that nothing knows a later day."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.builders import build_random
from uat.acting import rollout
from uat.data.markets import features
from uat.data.markets.bars import Bars
from uat.data.markets.features import Market
from uat.data.markets.panel import align
from uat.data.markets.synthetic import SIZES, generate
from uat.domains.markets import Markets, MarketsConfig, MarketsSimulator, world
from uat.domains.markets.performance import cagr, max_drawdown, sharpe, volatility
from uat.domains.markets.tables import load
from uat.episode import Trajectory
from uat.evaluation.scores import evaluate
from uat.recipes import recipe
from uat.training.trainer import train

CONFIG = MarketsConfig(days=260, horizon=10)
ASSETS = [SIZES[name].assets for name in SIZES]


def simulator(split: Any = "test", **settings: Any) -> MarketsSimulator:
    return MarketsSimulator(replace(CONFIG, **settings), split, "cpu")


def play(sim: MarketsSimulator, agent: Any, count: int = 9) -> Trajectory:
    return rollout(agent, sim, sim.noise(torch.arange(count), 0))


def policy(method: str = "uat", config: MarketsConfig = CONFIG) -> Any:
    return build_random(method, config.spec, dtype=torch.float32)


def markets() -> tuple[Market, ...]:
    return load(CONFIG.data, CONFIG.suspensions, CONFIG.days, CONFIG.protocol)


# ---------------------------------------------------------------- worlds


def test_an_episode_is_a_window_of_its_market() -> None:
    sim = simulator()
    noise = sim.noise(torch.arange(6), 0)
    assert noise["market"].tolist() == [0, 1, 2, 0, 1, 2]
    seen = play(sim, policy(), 6).obs
    for episode in range(6):
        market = markets()[episode % 3]
        begin = market.splits["test"].start + episode // 3
        expected = torch.from_numpy(market.feature_TNF[begin : begin + 10]).float()
        assert torch.equal(seen[episode, :, : len(market.tickers)], expected)
        assert (seen[episode, :, len(market.tickers) :] == 0).all()


def test_every_window_of_a_split_is_there_and_no_window_leaves_it() -> None:
    for split in ("validation", "test"):
        found, first = simulator(split).windows, 0
        for m, market in enumerate(markets()):
            part = market.splits[split]
            expected = torch.arange(part.start, part.stop - 10 + 1) + first
            assert torch.equal(found.start_W[found.market_W == m], expected)
            first += len(market.date_T)


def test_training_draws_as_many_windows_of_each_market_and_only_training_days() -> None:
    noise, first = simulator("train").noise(torch.arange(3000), 5), 0
    assert noise["market"].bincount().tolist() == [1000, 1000, 1000]
    for m, market in enumerate(markets()):
        start = noise["start"][noise["market"] == m] - first
        assert (start.min(), start.max()) == (0, market.splits["train"].stop - 10)
        first += len(market.date_T)


@pytest.mark.parametrize("method", ["uat", "vanilla", "dt"])
def test_weights_lie_on_cash_and_the_markets_own_assets(method: str) -> None:
    action = play(simulator(), policy(method)).action
    for episode, weights in enumerate(action):
        held = ASSETS[episode % 3] + 1
        assert (weights[:, held:] == 0).all()
        assert (weights[:, :held] > 0).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(10))


def test_what_is_earned_is_the_weights_times_the_next_relatives() -> None:
    played = play(simulator(), policy())
    for episode in (0, 4, 8):
        market = markets()[episode % 3]
        begin = market.splits["test"].start + episode // 3
        move = torch.from_numpy(market.relative_TN[begin : begin + 10] - 1)
        weights = played.action[episode, :, 1 : len(market.tickers) + 1].double()
        expected = (weights * move).sum(-1)
        np.testing.assert_allclose(played.reward[episode].numpy(), expected.numpy(), atol=1e-7)


def test_labels_are_the_papers_soft_hindsight() -> None:
    target = play(simulator(temperature=0.05), None).required_target[1, 3]
    market = markets()[1]
    relative = market.relative_TN[market.splits["test"].start + 3]
    weight = np.exp(np.concatenate([[0.0], (relative - 1) / 0.05]))
    np.testing.assert_allclose(target[: len(weight)].numpy(), weight / weight.sum(), rtol=1e-5)
    assert (target[len(weight) :] == 0).all()


def test_costs_are_paid_for_what_is_traded_from_drifted_weights() -> None:
    """Equal weights: on the first day all of it is bought, afterwards only the drift is undone."""
    agent = Markets(CONFIG).references()["equal-weight"]
    free, dear = play(simulator(), agent, 1), play(simulator(cost=0.01), agent, 1)
    market = markets()[0]
    relative = market.relative_TN[market.splits["test"].start :][:9]
    drifted = relative / relative.sum(1, keepdims=True)
    traded = np.concatenate([[1.0], np.abs(drifted - 1 / 30).sum(1)])
    np.testing.assert_allclose((free.reward - dear.reward)[0].numpy(), 0.01 * traded, atol=1e-6)


def test_buying_and_holding_trades_once_and_earns_the_mean_of_the_assets_growth() -> None:
    """The returns of the last decisions, put together, are the money that lay in all assets since the first of them."""
    domain = Markets(CONFIG)
    agent, count = domain.references()["buy-and-hold"], 30
    measured = domain.measure(play(simulator(), agent, count))
    for m, market in enumerate(markets()):
        own = measured["market"] == m
        first = market.splits["test"].start + CONFIG.horizon - 1
        worth = market.relative_TN[first : first + int(own.sum())].prod(0).mean()
        assert (1 + measured["return"][own].double()).prod().item() == pytest.approx(worth, rel=1e-5)
        torch.testing.assert_close(measured["turnover"][own][1:], torch.zeros(int(own.sum()) - 1), atol=1e-6, rtol=0)


def test_an_asset_that_cannot_be_traded_gets_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = markets()
    tradable = first.tradable_TN.copy()
    day = first.splits["test"].start + 4
    tradable[day, 7] = False
    monkeypatch.setattr(world, "load", lambda *_: (replace(first, tradable_TN=tradable), *others))
    played = play(simulator(), policy(), 1)
    assert played.action[0, 4, 8] == played.required_target[0, 4, 8] == 0
    assert (played.action[0, [3, 5], 8] > 0).all()


def test_suspensions_missing_bars_and_empty_days_go_through_unharmed(tmp_path: Path) -> None:
    pytest.importorskip("polars")
    from uat.data.markets.files import write

    bars: Bars = generate("cn", replace(SIZES["cn"], days=300)).bars
    bars.volume[30 * 250 + 3] = 0.0
    keep = np.ones(len(bars), bool)
    keep[[30 * 120 + 4, *range(30 * 255 + 5, 30 * 262 + 5, 30)]] = False
    write(bars.take(keep), tmp_path / "cn.parquet")
    for suspensions, days in (("common", 300 - 8), ("mask", 300)):
        sim = simulator(data=str(tmp_path), suspensions=suspensions, days=0)
        assert len(sim.tables.feature_XNF) == days - 34
        played = play(sim, policy(), 20)
        assert played.obs.isfinite().all()
        assert played.reward.isfinite().all()
        assert play(sim, None, 20).required_target.isfinite().all()


# ---------------------------------------------------------------- what may be known when


@pytest.mark.parametrize(("method", "lag"), [("uat", 0), ("uat", 1), ("adt", 0), ("adt", 2)])
def test_the_future_changes_no_earlier_feature_weight_or_score(
    method: str, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The return of a decision that is traded later arrives only when it is known."""
    config = replace(CONFIG, execution_lag=lag)
    found = load(config.data, config.suspensions, config.days, config.protocol)

    def spoilt(day: int) -> tuple[Market, ...]:
        """The first market, with every bar after a decision day of test changed."""
        first = generate("us", replace(SIZES["us"], days=260)).bars
        after = first.date > found[0].date_T[day]
        for name in ("open", "high", "low", "close", "volume"):
            getattr(first, name)[after] *= np.random.default_rng(1).uniform(1.5, 2.0, after.sum())
        first.high[after] *= 2
        return features.prepare("us", align(first), config.protocol), *found[1:]

    day, agent = found[0].splits["test"].start + 12, policy(method, config)
    before = play(simulator(execution_lag=lag), agent, 30)
    monkeypatch.setattr(world, "load", lambda *_: spoilt(day))
    after = play(simulator(execution_lag=lag), agent, 30)
    differs = {"obs": 0, "action": 0, "reward": 0}
    for episode in range(0, 30, 3):  # of the first market: window episode / 3
        for t in range(10):
            at = episode // 3 + t
            for name, known in (("obs", 12), ("action", 12), ("reward", 11 - lag)):
                same = torch.equal(getattr(before, name)[episode, t], getattr(after, name)[episode, t])
                assert same or at > known, (name, episode, t)
                differs[name] += not same
    assert all(differs.values()), "the future was not changed"


# ---------------------------------------------------------------- metrics


def test_only_the_last_decision_of_a_window_counts() -> None:
    played = play(simulator(), policy())
    measured = Markets(CONFIG).measure(played)
    assert torch.equal(measured["return"], played.reward[:, -1])
    assert measured["market"].tolist() == [0, 1, 2] * 3


def test_buy_and_hold_of_a_known_series() -> None:
    price = np.array([100.0, 103.0, 101.0, 104.5, 102.0, 107.0])
    series = price[1:] / price[:-1] - 1
    given = torch.from_numpy(series)
    expected = {
        sharpe: series.mean() / series.std(ddof=1) * math.sqrt(252),
        volatility: series.std(ddof=1) * math.sqrt(252),
        cagr: (107 / 100) ** (252 / 5) - 1,
        max_drawdown: 1 - 102 / 104.5,
    }
    for number, value in expected.items():
        assert number(given).mean().item() == pytest.approx(value, rel=1e-12), number.__name__


@pytest.mark.parametrize("number", [sharpe, volatility, cagr, max_drawdown])
def test_influences_tell_how_far_a_day_moves_the_number(number: Any) -> None:
    """A day that counts a little more moves the number by its own share: the series repeated, and one day more."""
    series = torch.from_numpy(np.random.default_rng(0).normal(0.001, 0.01, 60))
    value_E, copies = number(series), 400
    whole = number(series.repeat(copies)).mean() if number is not max_drawdown else number(series).mean()
    assert value_E.mean() == pytest.approx(whole.item(), rel=2e-2)
    if number is not max_drawdown:
        for day in (3, 17, 42):
            more = number(torch.cat([series.repeat(copies), series[day : day + 1]])).mean()
            moved = (more - whole) * (60 * copies + 1)
            assert moved.item() == pytest.approx((value_E[day] - value_E.mean()).item(), rel=5e-2, abs=2e-2)


@pytest.mark.parametrize("number", [sharpe, volatility, cagr, max_drawdown])
@pytest.mark.parametrize("series", [torch.zeros(9), torch.full((9,), 0.01), torch.tensor([0.02])])
def test_dull_series_have_numbers(number: Any, series: torch.Tensor) -> None:
    assert number(series.double()).isfinite().all()


def test_the_joint_number_is_the_mean_over_markets() -> None:
    domain = Markets(CONFIG)
    found = domain.summarise(domain.measure(play(simulator(), policy(), 50)))
    for name in ("sharpe", "cagr", "turnover"):
        single = [found[f"{name}_{market}"].mean() for market in SIZES]
        assert found[name].mean().item() == pytest.approx(sum(single).item() / 3, rel=1e-9)  # pyright: ignore[reportAttributeAccessIssue]


# ---------------------------------------------------------------- a run


def test_a_run_is_trained_and_scored_on_every_window_with_its_references(tmp_path: Path) -> None:
    config = recipe("markets", "uat", "smoke")
    run = train(config, tmp_path / "run", device="cpu")
    found = evaluate(run, device="cpu")
    assert found.episodes.keys() == {"uat", "equal-weight", "buy-and-hold", "random", "expert"}
    windows = config.build_domain().episodes["test"]
    assert {score.n for score in found.scores if score.metric == "sharpe"} == {windows}
    low, high = found.interval("uat", "sharpe")
    assert low < found.episodes["uat"]["sharpe"].mean() < high
    with pytest.raises(ValueError, match=f"episodes=7 is not what markets is tested on: all of its {windows}"):
        evaluate(run, episodes=7, device="cpu")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"cost": -0.1}, "cost=-0.1"),
        ({"train_share": 1.5}, "train_share=1.5"),
        ({"suspensions": "drop"}, "suspensions='drop'"),
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="must") as refused:
        MarketsConfig(**wrong)
    assert said in str(refused.value)


def test_too_many_assets_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_assets=40 is below the 45 assets of hk"):
        simulator(max_assets=40)
    with pytest.raises(ValueError, match="does not exist"):
        simulator(data=str(tmp_path / "nowhere"))


def test_settings_that_differ_are_said() -> None:
    assert Markets(CONFIG).setting == "days=260,horizon=10"
    assert MarketsConfig(data="/some/where/hsi.parquet", cost=0.5).setting == "data=hsi,cost=0.5"
