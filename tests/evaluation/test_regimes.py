"""The regime diagnostic: labels lie on the right days, and what a policy carries inside is sorted as it should be."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from uat.config import override
from uat.data.markets.panel import align
from uat.data.markets.regimes import UNKNOWN, label
from uat.data.markets.synthetic import SIZES, generate
from uat.domains.markets import MarketsConfig
from uat.domains.markets.days import MONTH, days_of
from uat.domains.markets.tables import load
from uat.evaluation.regimes import QUARTILES, auc, diagnose
from uat.recipes import recipe
from uat.runs import Run, load_policy, save_policy
from uat.training import train

CONFIG = MarketsConfig(days=400, horizon=8)


@pytest.mark.parametrize("lag", [0, 1])
def test_days_are_labelled_as_the_whole_panel_would_be(lag: int) -> None:
    """Labels are worked out from relatives; from prices of the panel they are the same, where both have a label."""
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


def test_auc_counts_pairs() -> None:
    high, low = np.array([3.0, 1.0, 2.0]), np.array([0.0, 2.0, 2.0, 5.0])
    pairs = [(a > b) + 0.5 * (a == b) for a in high for b in low]
    assert auc(high, low) == pytest.approx(np.mean(pairs))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A UAT with random gates, so that they are not zero."""
    config = override(recipe("markets", "uat", "smoke"), {"domain.days": 600, "train.epochs": 1})
    run = train(config, tmp_path_factory.mktemp("runs") / "uat", device="cpu")
    policy = load_policy(run.path)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "utility.regime" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    save_policy(run.file("policy.safetensors"), policy, "uat", domain=config.domain)
    return run


def test_every_group_has_the_mean_of_its_steps(run: Run) -> None:
    found = diagnose(run, device="cpu")
    windows = run.config.build_domain().episodes["test"]
    assert found.arrays["rho"].shape == found.arrays["h"].shape == (windows, 8)
    assert (found.arrays["rho"][:, 0] == 0).all()  # no feedback yet
    end = found.arrays["rho"][:, -1]
    for row in found.rows:
        if (row["quantity"], row["where"]) == ("rho", "end") and "mean" in row:
            own = end[found.arrays[row["by"]] == row["group"]]
            assert (row["mean"], row["n"]) == (pytest.approx(own.mean()), len(own))
    quartiles = {
        r["group"]: r for r in found.rows if (r["quantity"], r["where"], r["by"]) == ("rho", "end", "quartile")
    }
    assert set(quartiles) == set(QUARTILES)
    assert quartiles[QUARTILES[0]]["increase"] == pytest.approx(0)
    assert sum(r["n"] for r in quartiles.values()) == windows
    assert {r["n"] for r in quartiles.values()} <= set(range(windows // 4 - 2, windows // 4 + 3))
    assert any("auc" in row and row["by"] == "known" for row in found.rows)


def test_a_run_of_another_domain_is_refused(tmp_path: Path) -> None:
    run = Run.create(recipe("darkroom", "uat", "smoke"), tmp_path / "run")
    with pytest.raises(ValueError, match="is a run of darkroom"):
        diagnose(run, device="cpu")


def test_the_study_trains_both_and_leaves_rows_and_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, out = Path(__file__).parents[2] / "results" / "make_regimes.py", tmp_path / "rows.jsonl"
    flags = ["--preset", "smoke", "--runs", str(tmp_path), "--out", str(out), "--set", "train.epochs=1"]
    monkeypatch.setattr("sys.argv", ["make_regimes.py", "tiny", *flags])
    runpy.run_path(str(script), run_name="__main__")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {(row["method"], row["quantity"]) for row in rows} == {("uat", "rho"), ("uat", "h"), ("vanilla", "h")}
    with np.load(tmp_path / "rows.npz") as arrays:
        shared = {"date", "day", "regime", "known", "quartile", "market", "h"}
        assert set(arrays) == {f"{m}-0/{name}" for m in ("uat", "vanilla") for name in shared} | {"uat-0/rho"}
