"""The comparison of PPO with its peers: its smoke run, its table, and the rows that are committed."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from uat.files import read_rows, row_lines

FOLDER = Path(__file__).parents[2] / "benchmarks"
SAY_WHY = "the peers are not installed: pip install 'uat-transformer[peers]'"


def loaded() -> ModuleType:
    found = importlib.util.spec_from_file_location("ppo_peers", FOLDER / "ppo_peers.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["ppo_peers"] = module  # dataclasses look their module up
    found.loader.exec_module(module)
    return module


peers: Any = loaded()


def row(player: str, seed: int, returns: list[float], **others: Any) -> Any:
    given = {"env": "cartpole", "steps": 100, "env_steps": 120, "seconds": 4.0, "cpu_seconds": 2.0, "parameters": 1234}
    given |= {"settings": {}, "curve": [], "versions": {}, "device": "CPU", "load": 0.0}
    return peers.Row(player=player, seed=seed, returns=returns, **{**given, **others})


def test_every_player_trains_and_is_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for module in ("sb3_contrib", "rl_zoo3"):
        pytest.importorskip(module, reason=SAY_WHY)
    out = tmp_path / "rows.jsonl"
    assert peers.main(["--smoke", "--out", str(out)]) == 0
    rows = read_rows(out)
    assert [found["player"] for found in rows] == list(peers.PLAYERS)
    for found in rows:
        assert found["env_steps"] >= 300
        assert len(found["returns"]) == 4
        assert all(1 <= earned <= 500 for earned in found["returns"])
        assert found["curve"]
    assert all(f"| {player} | 1 |" in capsys.readouterr().out for player in peers.PLAYERS[:1])
    before = out.read_bytes()
    assert peers.main(["--smoke", "--out", str(out)]) == 0  # finished rows are skipped
    assert out.read_bytes() == before


@pytest.mark.parametrize("player", ["recurrent-ppo", "ppo-stack"])
@pytest.mark.parametrize("env", ["cartpole", "pendulum"])
def test_peers_have_the_settings_that_their_library_publishes(env: str, player: str) -> None:
    pytest.importorskip("rl_zoo3", reason=SAY_WHY)
    settings = peers.peer_settings(player, peers.PROBLEMS[env])
    assert settings["normalize"] is True
    assert settings["gamma"] == {"cartpole": 0.98, "pendulum": 0.9}[env]
    assert settings["n_epochs"] == {"cartpole": 20, "pendulum": 10}[env]


def test_the_table_has_means_differences_and_paces() -> None:
    rows = [row("recurrent-ppo", 0, [10.0, 12.0]), row("uat", 0, [13.0, 15.0]), row("uat", 1, [16.0, 16.0])]
    *_, peer, ours = peers.table(rows).splitlines()
    assert "| recurrent-ppo | 1 | 11.0 ± " in peer
    assert peer.endswith("|  | 30 | 60 | 1,234 |")
    assert "| uat | 2 | 15.0 ± " in ours
    assert "| 3.0 ± 0.0 |" in ours  # seed 0 alone has a peer


def test_a_stack_is_filled_with_the_latest_observations() -> None:
    class Model:
        def predict(self, obs: Any, state: Any, first: Any, deterministic: bool) -> tuple[Any, Any]:
            self.seen = obs
            return np.zeros(len(obs)), None

    model = Model()
    player = peers.Peer(model, None, True, None)
    for t in range(1, 7):
        player.act([np.array([float(t), -t])], np.zeros(1), first=t == 1)
        last = [max(0, t - back) for back in (3, 2, 1, 0)]
        assert model.seen.tolist() == [[x for at in last for x in (at, -at)]]


def test_a_curve_is_the_mean_over_episodes_in_equal_parts() -> None:
    assert peers.curve([(5, 1.0, 1), (10, 3.0, 3), (95, 7.0, 1), (104, 9.0, 1)], 100) == [
        (5, 1.0),
        (10, 3.0),
        (95, 7.0),
        (105, 9.0),
    ]
    assert peers.curve([], 100) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--envs", "cartpol"], "unknown environment 'cartpol'; did you mean 'cartpole'?"),
        (["--players", "recurent-ppo"], "did you mean 'recurrent-ppo'?"),
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--episodes", "1"], "--episodes 1 must be at least 2"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert peers.main([*arguments, "--out", str(tmp_path / "rows.jsonl")]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"the peers need sb3_contrib: pip install 'uat-transformer\[peers\]'"):
        peers.need_peers()


def test_committed_rows_give_the_committed_table(tmp_path: Path) -> None:
    rows = peers.read(peers.ROWS)
    assert {found.player for found in rows} >= set(peers.PLAYERS)
    assert len({found.key for found in rows}) == len(rows)
    assert all(len(found.returns) == 100 and found.env_steps >= found.steps for found in rows)
    assert peers.table(rows) in (FOLDER / "README.md").read_text(encoding="utf-8")
    again = tmp_path / "rows.jsonl"
    again.write_text(row_lines(asdict(replace(found)) for found in rows), encoding="utf-8")
    assert peers.read(again) == rows
