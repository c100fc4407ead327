"""Mechanism: attention maps that reproduce the policy's outputs, parts that sum to the logits, and known masses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.builders import SPECS, build_random, random_batch, randomise, vanilla_of
from uat.config import override
from uat.data.markets.regimes import label
from uat.data.markets.synthetic import REGIMES as REGIMES_OF_DAYS
from uat.domains.markets.tables import load
from uat.domains.sepsis.treatment import REGIMES
from uat.episode import Batch
from uat.evaluation.intervals import interval
from uat.methods.uat import UAT
from uat.nn import attention
from uat.paper.mechanism import (
    MarketGates,
    attention_maps,
    attention_under_shifts,
    centred,
    gate_norms,
    gates_by_regime,
    gates_of,
    gates_of_markets,
    kinetics_of,
    kinetics_rows,
    logit_split,
    post_shift_mass,
    shifted_episodes,
)
from uat.paper.mechanism.attention import even_mass
from uat.paper.mechanism.markets import QUARTILES, SHOCKS, auc, group_mean
from uat.recipes import recipe
from uat.runs import Run, save_policy
from uat.training.trainer import build_policy

ON_THE_BACKBONE = ["vanilla", "adt", "dt", "uat", "uat-no-q", "uat-no-kv", "uat-no-bias"]
SPEC = SPECS["vector-discrete"]


def placed_batch() -> Batch:
    """Episodes that start in the middle of the position table."""
    batch = random_batch(SPEC, whole=True)
    batch.start = torch.tensor([0, 3, 1])
    return batch


def saved_run(folder: Path, domain: str, method: str, *, weights: Any = None, **settings: Any) -> Run:
    """A run that was never trained, with these weights, or random ones."""
    config = override(recipe(domain, method, "smoke"), {k.replace("__", "."): v for k, v in settings.items()})
    run = Run.create(config, folder)
    policy = weights or randomise(build_policy(config, config.build_domain(), torch.device("cpu")), 1)
    save_policy(run.file("policy.safetensors"), policy, method, domain=config.domain)
    return run


# ---------------------------------------------------------------- maps


@pytest.mark.parametrize("method", ON_THE_BACKBONE)
def test_maps_reproduce_the_policys_own_outputs(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replacing the softmax of every layer by the maps gives the same representation."""
    policy, batch = build_random(method, SPEC, max_positions=11), placed_batch()
    expected = policy.features(batch)
    maps = list(policy.trace(batch).attention_LBHTT)

    def use_the_map(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        return maps.pop(0) @ v

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", use_the_map)
    torch.testing.assert_close(policy.features(batch), expected, rtol=0, atol=1e-10)
    assert not maps


@pytest.mark.parametrize(
    ("method", "settings"), [(m, {}) for m in [*ON_THE_BACKBONE, "gtrxl"]] + [("dt", {"include_actions": True})]
)
def test_maps_are_causal_and_steps_share_out_all_attention(method: str, settings: dict[str, Any]) -> None:
    policy, batch = build_random(method, SPEC, **settings), random_batch(SPEC, whole=True)
    maps = attention_maps(policy, batch)
    assert maps.shape == (2, 3, 3, SPEC.horizon, SPEC.horizon)
    assert maps.triu(1).abs().max() == 0
    torch.testing.assert_close(maps.sum(-1), torch.ones_like(maps[..., 0]))


@pytest.mark.parametrize("method", ON_THE_BACKBONE)
def test_base_and_modulation_sum_to_the_logits(method: str) -> None:
    policy, batch = build_random(method, SPEC, max_positions=11), placed_batch()
    base, modulation = logit_split(policy, batch)
    trace = policy.trace(batch)
    unseen = torch.ones_like(base[0, 0, 0], dtype=torch.bool).triu(1)
    alpha = (base + modulation).masked_fill(unseen, -torch.inf).softmax(-1)
    torch.testing.assert_close(alpha, trace.attention_LBHTT, rtol=0, atol=1e-6)
    log = trace.attention_LBHTT.masked_fill(unseen, 1.0).log()
    torch.testing.assert_close(centred(log), centred(base + modulation), rtol=0, atol=1e-6, equal_nan=True)
    assert (modulation.abs().max() > 0) == isinstance(policy, UAT)


def test_base_equals_the_first_layer_logits_of_vanilla_with_the_same_weights() -> None:
    policy, batch = build_random("uat", SPEC), random_batch(SPEC)
    assert isinstance(policy, UAT)
    assert torch.equal(logit_split(policy, batch)[0][0], logit_split(vanilla_of(policy), batch)[0][0])
    with pytest.raises(ValueError, match="GTrXL"):
        logit_split(build_random("gtrxl", SPEC), batch)


def test_post_shift_mass_on_known_maps() -> None:
    steps, shifts = 10, (4, 7)
    itself, first = torch.eye(steps), torch.zeros(steps, steps)
    first[:, 0] = 1
    last = torch.zeros(steps, steps)  # each step attends to the last step before it
    last[torch.arange(1, steps), torch.arange(steps - 1)] = 1
    maps = torch.stack([itself, first, last])[None, :, None]
    mass_KB = post_shift_mass(maps, shifts)
    expected = torch.tensor([[1.0, 0.0, 2 / 3], [1.0, 0.0, 2 / 3]])
    torch.testing.assert_close(mass_KB, expected)
    torch.testing.assert_close(post_shift_mass(maps, shifts, 1), torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]))
    assert even_mass(steps, shifts) == pytest.approx([(1 / 5 + 2 / 6 + 3 / 7) / 3, (1 / 8 + 2 / 9 + 3 / 10) / 3])
    assert even_mass(steps, shifts, 2) == pytest.approx([(1 / 5 + 2 / 6) / 2, (1 / 8 + 2 / 9) / 2])


# ---------------------------------------------------------------- trained policies under shifts


LONG = {"method__max_positions": 21, "train__random_start": True, "domain__schedule": "cyclic"}
HOW: dict[str, Any] = {"steps": 20, "shifts": (8, 14), "episodes": 4, "device": "cpu"}


def test_a_uat_with_closed_gates_equals_its_vanilla(tmp_path: Path) -> None:
    config = override(recipe("darkroom", "uat", "smoke"), {"method.max_positions": 21})
    fresh = build_policy(config, config.build_domain(), torch.device("cpu"))
    assert isinstance(fresh, UAT)
    told = saved_run(tmp_path / "uat", "darkroom", "uat", weights=fresh, **LONG)
    blind = saved_run(tmp_path / "vanilla", "darkroom", "vanilla", weights=vanilla_of(fresh), **LONG)
    found = attention_under_shifts([told], [blind], **HOW)
    assert np.nanmax(np.abs(found.difference_LTT)) == 0
    assert np.nanmax(found.modulation_size_LTT) == 0
    assert np.array_equal(found.told_LTT, found.blind_LTT, equal_nan=True)
    assert [row["value"] for row in found.rows if " - " in row["method"]] == [0] * 6


def test_attention_under_shifts_gives_maps_and_paired_masses(tmp_path: Path) -> None:
    runs = {
        method: [saved_run(tmp_path / f"{method}{seed}", "darkroom", method, seed=seed, **LONG) for seed in (0, 1)]
        for method in ("uat", "vanilla")
    }
    policy, played = shifted_episodes(runs["uat"][0], **HOW)
    assert played.obs.shape == (4, 20, 10)
    goal_BT = played.facts["goal"]
    assert all(bool(moves) == (t in (8, 14)) for t in range(1, 20) for moves in (goal_BT[:, t] != goal_BT[:, t - 1]))
    found = attention_under_shifts(runs["uat"], runs["vanilla"], **HOW)
    lower = np.tril(np.ones((20, 20), bool))
    for name in ("blind", "told", "base", "modulation", "modulation_size", "difference"):
        x_LTT = getattr(found, f"{name}_LTT")
        assert x_LTT.shape == (2, 20, 20)
        assert (np.isfinite(x_LTT) == lower).all()
    np.testing.assert_allclose(np.nansum(found.told_LTT, -1), 1, atol=1e-5)
    rows = {(row["method"], row["shift"]): row for row in found.rows if row["quantity"] == "post_shift_mass"}
    assert len(found.rows) == 2 * len(rows)
    assert len(rows) == 9
    for shift in ("8", "14", "all"):
        told, blind, both = (rows[name, shift] for name in ("uat", "vanilla", "uat - vanilla"))
        assert both["value"] == pytest.approx(told["value"] - blind["value"])
        assert both["low"] < both["value"] < both["high"]
        assert (told["seeds"], told["n"]) == (2, 4)
    own = post_shift_mass(attention_maps(policy, policy.spec.clock.batch(played)), (8, 14))
    assert own.shape == (2, 4)
    with pytest.raises(ValueError, match="table of 21"):
        shifted_episodes(runs["uat"][0], steps=22, shifts=(8,), episodes=2, device="cpu")


# ---------------------------------------------------------------- gates and kinetics


def test_gates_by_regime_by_hand() -> None:
    norm = np.array([[1.0, 3, 9, 9], [5, 5, 5, 50]])
    regime = np.array([[0, 0, 1, 1], [0, 0, 0, 0]])
    valid = np.array([[True] * 4, [True, True, True, False]])
    rows = gates_by_regime(norm, regime, valid, ("first", "second", "never"))
    assert [row["value"] for row in rows[:2]] == [3.5, 9.0]
    assert [row["n"] for row in rows] == [2, 1, 0]
    policy, batch = build_random("uat", SPEC), random_batch(SPEC)
    found = gate_norms(policy, batch)
    assert found.rho_BT.shape == (3, 7)
    assert found.g_LBT.shape == (2, 3, 7)
    assert found.rho_BT[:, 0].max() == 0, "there is no feedback before the first step"
    with pytest.raises(ValueError, match="Vanilla has no gates"):
        gate_norms(build_random("vanilla", SPEC), batch)


def test_sepsis_gates_and_kinetics_are_rows(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "uat", "sepsis", "uat")
    rows = gates_of(run, REGIMES, episodes=6, device="cpu")
    assert [row["regime"] for row in rows] == list(REGIMES)
    assert all(row["low"] <= row["value"] <= row["high"] for row in rows if row["n"] > 1)
    found = kinetics_of(run, episodes=6, device="cpu")
    rows = kinetics_rows(run, found)
    assert [row["offset"] for row in rows] == [*range(-10, 16), None, None, None]
    assert 0 < found.before_sem < 0.5
    assert rows[10]["n"] == max(found.shifts) > 10
    with pytest.raises(ValueError, match="darkroom"):
        kinetics_of(saved_run(tmp_path / "room", "darkroom", "uat"), device="cpu")


# ---------------------------------------------------------------- markets


MARKET: dict[str, Any] = {"domain__days": 600, "domain__horizon": 5}


@pytest.fixture(scope="module")
def market_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Random weights, so that gates are open."""
    folder = tmp_path_factory.mktemp("markets") / "uat"
    return saved_run(folder, "markets", "uat", **MARKET)


@pytest.fixture(scope="module")
def seen(market_run: Run) -> MarketGates:
    return gates_of_markets(market_run, device="cpu")


def test_market_gates_name_windows_by_their_last_day(market_run: Run, seen: MarketGates) -> None:
    c = market_run.config.domain
    market = load(c.data, c.suspensions, c.days, c.protocol)[0]
    own_E, test = seen.market_E == market.name, market.splits["test"]
    assert (seen.date_ET[own_E, -1] == market.date_T[test][c.horizon - 1 :]).all()
    close_TN = np.concatenate([np.ones((1, len(market.tickers))), market.relative_TN.cumprod(0)])
    assert (seen.regime_ET[own_E, -1] == label(close_TN)[:-1][test][c.horizon - 1 :]).all()
    assert (seen.regime_ET[own_E, -1][-20:] == -1).all(), "what follows the last days is not known"
    assert (seen.known_ET >= 0).all(), "the generator knows all"
    day_X, rho_X = seen.daily("rho_norm", market.name)
    assert (day_X == market.date_T[test][1:]).all(), "the first has no feedback"
    held = seen.date_ET[own_E] == day_X[2]
    held[:, 0] = False
    assert rho_X[2] == pytest.approx(seen.norms["rho_norm"][own_E][held].mean())


def test_rows_are_means_of_their_groups(seen: MarketGates) -> None:
    index = {"regime": seen.regime_ET, "known": seen.known_ET, "volatility": seen.quartile_ET}
    names = {"regime": REGIMES_OF_DAYS, "known": REGIMES_OF_DAYS, "volatility": QUARTILES}
    for row in seen.rows:
        x_ET, where = seen.norms[row["quantity"]], row["where"]
        steps = slice(1, None) if where == "step" else slice(-1, None)
        x_ES = x_ET.mean(1, keepdims=True) if where == "window" else x_ET[:, steps]
        groups = {by: np.array([*names[by], ""])[index_ET[:, steps]] for by, index_ET in index.items()}
        if "auc" in row:
            high, low = x_ES[groups[row["by"]] == "shock"], x_ES[np.isin(groups[row["by"]], ("bull", "chop"))]
            pairs = (high[:, None] > low) + 0.5 * (high[:, None] == low)
            assert (row["auc"], row["n"], row["calm"]) == (pytest.approx(pairs.mean()), len(high), len(low))
            assert row["low"] < row["auc"] < row["high"]
        else:
            own = x_ES[groups[row["by"]] == row["group"]] if row["by"] in groups else x_ES.ravel()
            calmest = x_ES[groups["volatility"] == "calmest"].mean()
            assert (row["value"], row["n"]) == (pytest.approx(own.mean()), len(own))
            assert row["std"] == pytest.approx(own.std(), abs=1e-12)
            assert row["over_calmest"] == pytest.approx(own.mean() / calmest - 1)
            assert row["low"] <= row["value"] <= row["high"] or len(own) == 1
    ends = [row for row in seen.rows if (row["quantity"], row["where"]) == ("rho_norm", "end")]
    assert [row["group"] for row in ends if row["by"] == "volatility"] == list(QUARTILES)
    assert {row["by"] for row in ends if row["group"] == SHOCKS} == {"regime", "known"}


def test_intervals_of_groups_and_areas_are_those_of_plain_samples() -> None:
    """With one step per window and no blocks, groups have the interval of `filled`, and AUCs have DeLong's variance."""
    draw = np.random.default_rng(0)
    x_ES, own_ES = draw.normal(size=(400, 1)), draw.random((400, 1)) < 0.3
    found = group_mean(x_ES, own_ES, 1.0)
    low, high = interval(torch.from_numpy(np.where(own_ES, x_ES, np.nan)).T, 1.0)
    assert (found["low"], found["high"]) == (pytest.approx(low), pytest.approx(high))
    area = auc(x_ES, own_ES, ~own_ES, 1.0)
    above = (x_ES[own_ES][:, None] > x_ES[~own_ES]).astype(float)
    variance = sum(part.var(ddof=1) / len(part) for part in (above.mean(0), above.mean(1)))
    assert (area["high"] - area["low"]) / 2 == pytest.approx(1.966 * variance**0.5, rel=0.01)


def test_weights_are_moved_by_gates_alone(tmp_path: Path, market_run: Run, seen: MarketGates) -> None:
    moved_ET = seen.norms["weights_moved"]
    assert moved_ET[:, 0].max() == 0 == seen.norms["rho_norm"][:, 0].max(), "there is no feedback yet"
    assert 0 < moved_ET[:, 1:].min() <= moved_ET.max() <= 2
    config = market_run.config
    fresh = build_policy(config, config.build_domain(), torch.device("cpu"))
    shut = gates_of_markets(saved_run(tmp_path / "shut", "markets", "uat", weights=fresh, **MARKET), device="cpu")
    assert shut.norms["weights_moved"].max() == 0 == shut.norms["rho_norm"].max()
    assert np.isnan(
        [row["over_calmest"] for row in shut.rows if row["quantity"] == "rho_norm" and "value" in row]
    ).all()
    blind = gates_of_markets(saved_run(tmp_path / "blind", "markets", "vanilla", **MARKET), device="cpu")
    assert set(blind.norms) == {"h_norm"}
    with pytest.raises(ValueError, match="is a run of darkroom"):
        gates_of_markets(saved_run(tmp_path / "room", "darkroom", "uat"), device="cpu")
