"""DeepTrader: blocks, graphs and rewards equal the equations, and toy markets are traded well."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.builders import SPECS, build_random, moments, random_batch
from tests.methods.market import ASSETS, INDICATORS, SPEC, STEPS, batch_of, fit, signalled
from uat.episode import Batch
from uat.methods.deeptrader import Block, DeepTrader, DeepTraderConfig, conditions, correlation, reward_of_risk
from uat.training.surroundings import seeded

SMALL = {"d_asset": 8, "d_spatial": 4, "num_blocks": 2, "d_market": 6, "winners": 2, "dropout": 0.0}


def policy(**settings: Any) -> DeepTrader:
    with seeded(0, torch.device("cpu")):
        return DeepTrader(SPEC, DeepTraderConfig(**{**SMALL, **settings}))


# ---------------------------------------------------------------- parts


def test_a_block_equals_the_equations() -> None:
    """One day of two assets, number by number."""
    generator = torch.Generator().manual_seed(0)
    block = Block(DeepTraderConfig(d_asset=3, d_spatial=2, dropout=0.0), 2, 1).double()
    now, before = (torch.randn(2, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    graphs = tuple(torch.rand(2, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    found = block(now, before, graphs, torch.tensor([True, True]))
    x = (torch.cat([now, before], -1) @ block.temporal.weight.T + block.temporal.bias).clamp_min(0)
    x = torch.cat([x, graphs[0] @ x, graphs[1] @ x], -1) @ block.graph.weight.T + block.graph.bias
    affinity = ((x @ block.query.weight.T) @ (x @ block.key.weight.T).T).clamp_min(0)
    share = (affinity @ block.among.weight.T + block.among.bias).exp()
    mixed = (share / share.sum(-1, keepdim=True)) @ x + now @ block.residual.weight.T + block.residual.bias
    mean, variance = mixed.mean(-1, keepdim=True), mixed.var(-1, keepdim=True, correction=0)
    torch.testing.assert_close(found, (mixed - mean) / (variance + 1e-5).sqrt(), rtol=1e-12, atol=1e-12)


def test_the_graph_is_the_correlation_of_changes() -> None:
    """Two assets move together, one moves against them, and one does not trade."""
    generator = torch.Generator().manual_seed(0)
    change = torch.randn(STEPS, INDICATORS, generator=generator, dtype=torch.float64)
    obs = torch.stack([change, 2 * change, -change, change], dim=1).cumsum(0)[None]
    together = policy(graph_decay=0.5).double().correlated(obs)
    graph = correlation(together, torch.tensor([True, True, True, False]).expand(1, STEPS, -1))
    assert (graph[:, 0] == 0).all()  # nothing has moved yet
    expected = torch.tensor([[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 1, 0], [0.5, 0.5, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(graph[0, 1:], expected.expand(STEPS - 1, -1, -1))
    sums = sum(0.5 ** (5 - s) * change[s] @ change[s] for s in range(1, 6))
    assert together[0, 5, 0, 0].item() == pytest.approx(float(sums))


def test_the_market_is_seen_as_mean_and_deviation() -> None:
    obs = torch.tensor([[1.0, 10.0], [3.0, 10.0], [99.0, 99.0]])
    found = conditions(obs, torch.tensor([True, True, False]))
    assert found.tolist() == [2.0, 10.0, 1.0, 0.0]
    assert conditions(obs, torch.tensor([False, False, False])).isfinite().all()


def test_only_the_best_assets_are_held() -> None:
    found = torch.tensor([0.0, 0.9, 0.2, 0.8, 0.1])
    weights = policy().allocate(found, None).exp()
    assert weights.sum().item() == pytest.approx(1.0)
    assert weights[0].item() == pytest.approx(0.5)  # sigmoid(0) in cash
    assert (weights[1] / weights[3]).item() == pytest.approx(math.exp(0.1), rel=1e-5)
    assert 0 < weights[[2, 4]].max() < 1e-15
    allowed = torch.tensor([True, False, True, True, True])
    weights = policy().allocate(found, allowed).exp()
    assert weights[1] == 0
    assert weights[2].item() == pytest.approx(0.5 / (1 + math.exp(0.6)), rel=1e-5)


def test_the_reward_of_risk_is_the_ratio_of_return_to_drawdown() -> None:
    earned = torch.tensor([[0.1, -0.2, 0.05, -0.1, 0.3], [0.01, 0.01, 0.01, 0.0, 0.0]], dtype=torch.float64)
    valid = torch.tensor([[True] * 5, [True, True, True, False, False]])
    wealth = [1.0, 1.1, 0.88, 0.924, 0.8316, 1.08108]
    drawdown = 1 - wealth[4] / wealth[1]
    expected = [0.03 / math.log(1 + math.exp(drawdown)), 0.01 / math.log(2)]
    assert reward_of_risk(earned, valid).tolist() == pytest.approx(expected, rel=1e-12)


@torch.no_grad()
def test_losses_equal_the_equations() -> None:
    trader, batch = policy(), signalled(torch.Generator().manual_seed(2), episodes=3)
    move = batch.facts["relative"][..., 1:] - 1
    found = trader.features(batch)
    gained, ratio = 0.0, 0.0
    for b in range(3):
        earned = []
        for t in range(STEPS):
            day = move[b, t]
            share = found[b, t, 1:].softmax(0)
            spread = day.std(correction=0).clamp_min(1e-6)
            gained += float((share * (day - day.mean()) / spread).sum())
            weights = trader.allocate(found[b, t], None).softmax(0)
            earned.append((weights[1:] * day).sum())
        ratio += float(reward_of_risk(torch.stack(earned)[None], torch.ones(1, STEPS, dtype=torch.bool)))
    losses = trader.loss(batch)
    assert losses["assets"][0].item() == pytest.approx(-gained, rel=1e-4)
    assert losses["market"][0].item() == pytest.approx(-50 * ratio, rel=1e-4)


def test_each_unit_learns_from_its_own_reward() -> None:
    trader, batch = policy(), signalled(torch.Generator().manual_seed(2), episodes=3)
    units = {"assets": [trader.score, trader.enter], "market": [trader.caution, trader.market, trader.recall]}
    for name, other in (("assets", "market"), ("market", "assets")):
        trader.zero_grad()
        trader.loss(batch)[name][0].backward()
        assert all(p.grad is not None for part in units[name] for p in part.parameters())
        assert all(p.grad is None or not p.grad.any() for part in units[other] for p in part.parameters())


# ---------------------------------------------------------------- toy markets


def test_the_asset_unit_finds_what_rises() -> None:
    trader = policy(winners=1)
    fit(trader, trader.phases()[0], 120)
    test = signalled(torch.Generator().manual_seed(7))
    rises = test.facts["relative"][..., 1:] > 1
    with torch.no_grad():
        best = trader.features(test)[..., 1:].argmax(-1)
    some = rises.any(-1)
    assert rises.gather(-1, best[..., None])[..., 0][some].float().mean() > 0.9


def test_the_market_unit_holds_back_where_it_falls() -> None:
    """The sign of the indicators' mean predicts whether all assets rise or fall by 1 % in this episode."""

    def draw(generator: torch.Generator) -> Batch:
        way = torch.randint(2, (24, 1, 1), generator=generator) * 2.0 - 1
        noise = torch.randn(24, STEPS, ASSETS, INDICATORS, generator=generator)
        return batch_of(noise + way[..., None], 0.01 * way.expand(-1, STEPS, ASSETS))

    trader = policy()
    fit(trader, trader.phases()[0], 60, draw)
    test = draw(torch.Generator().manual_seed(9))
    with torch.no_grad():
        cash = trader.logits(test).softmax(-1)[:, 3:, 0].mean(1)
    rises = test.facts["relative"][:, 0, 1] > 1
    assert cash[rises].max() < 0.2
    assert cash[~rises].min() > 0.8


def test_a_stream_that_starts_anew_knows_nothing_of_the_one_before() -> None:
    spec = SPECS["assets-weights"]
    trader, batch = build_random("deeptrader", spec), random_batch(spec, whole=True)
    state, said = trader.init_state(3, spec.steps, "cpu"), []
    for moment in [*moments(batch), *moments(batch)]:
        logits, state = trader.step(state, moment)
        said.append(logits)
    assert torch.equal(torch.stack(said[: spec.horizon]), torch.stack(said[spec.horizon :]))


@pytest.mark.parametrize("wrong", [{"winners": 0}, {"num_blocks": 0}, {"dropout": 1.0}, {"graph_decay": -0.1}])
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        DeepTraderConfig(**wrong)
