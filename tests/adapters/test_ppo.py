"""PPO in environments of Gymnasium: the usual objective there, the scale of rewards, and interrupted trainings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium import spaces

import uat
from tests.adapters.envs import Counting
from uat.adapters.gymnasium import GymConfig, domain

SMALL: dict[str, Any] = {
    "train.epochs": 3,
    "train.batch_size": 6,
    "train.validate_every": 1,
    "train.validation_episodes": 3,
    "method.context": 4,
}


class Paying(gymnasium.Env[Any, Any]):
    """Three steps, of which the second pays a given reward."""

    observation_space: Any = spaces.Discrete(2)
    action_space: Any = spaces.Discrete(2)

    def __init__(self, reward: float) -> None:
        self.reward, self.t = reward, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.t = 0
        return 0, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return 1, self.reward if self.t == 2 else 0.0, self.t == 3, False, {}


@pytest.mark.parametrize(("reward", "scale"), [(0.0025, 400.0), (-50.0, 0.02), (0.0, 1.0), (3.0, 0.33)])
def test_training_measures_the_scale_of_rewards(reward: float, scale: float) -> None:
    assert domain(lambda: Paying(reward)).settled().reward_scale == scale
    given = domain(lambda: Paying(reward), reward_scale=2.0)
    assert given.settled().reward_scale == 2.0
    assert given.spec.reward_scale == 2.0


def test_a_run_holds_the_measured_scale(tmp_path: Path) -> None:
    run = uat.train(lambda: Paying(0.5), tmp_path / "run", preset="smoke", settings={**SMALL, "train.epochs": 1})
    assert run.config.objective_name == "ppo"
    assert isinstance(run.config.domain, GymConfig)
    assert run.config.domain.reward_scale == 2.0
    assert uat.load(run.path).spec.reward_scale == 2.0
    again = uat.train(lambda: Paying(0.5), run.path, preset="smoke", settings={**SMALL, "train.epochs": 1}, resume=True)
    assert again.config == run.config


@pytest.mark.parametrize("workers", [0, 2])
def test_an_environment_that_raises_leaves_a_run_that_can_be_resumed(workers: int, tmp_path: Path) -> None:
    """Episodes of several lengths, terminated and truncated; the resumed run ends with the numbers of an undisturbed
    one, whatever the number of processes."""
    how: dict[str, Any] = {"preset": "smoke", "settings": {**SMALL, "domain.max_steps": 5}}
    whole = uat.train(Counting, tmp_path / "whole", **how)
    rows = whole.rows("metrics.jsonl")
    assert rows[-1]["length"] <= 5
    assert rows[-1]["steps"] == pytest.approx(rows[-1]["length"] * 6)
    from uat.training.epoch import Epoch

    run, calls = Epoch.run, []

    def broken(self: Epoch, *rest: Any) -> Any:
        calls.append(rest)
        if len(calls) == 3:
            raise ValueError("the environment raised")
        return run(self, *rest)

    how["settings"] = {**how["settings"], "domain.workers": workers}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Epoch, "run", broken)
        with pytest.raises(ValueError, match="raised"):
            uat.train(Counting, tmp_path / "part", **how)
    part = uat.train(Counting, tmp_path / "part", **how, resume=True)
    assert part.file("metrics.jsonl").read_text() == whole.file("metrics.jsonl").read_text()


def test_progress_says_where_the_time_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from uat.training.progress import Lines

    def lines(label: str, total: int) -> Lines:
        return Lines(label, total, every_seconds=0.0)

    uat.train(Counting, tmp_path / "run", preset="smoke", settings=SMALL, progress=lines)
    last = capsys.readouterr().err.splitlines()[-1]
    assert "steps/s (worlds" in last
    assert "updates" in last
    assert "entropy" in last


def test_a_session_acts_within_the_limits_of_a_continuous_environment(tmp_path: Path) -> None:
    run = uat.train("gym:Pendulum-v1", tmp_path / "run", preset="smoke", settings={**SMALL, "domain.max_steps": 20})
    env, session, reward = gymnasium.make("Pendulum-v1"), uat.Session(uat.load(run.path)), None
    obs, _ = env.reset(seed=0)
    for _ in range(20):
        action = session.act(obs, reward=reward)
        assert env.action_space.contains(action)
        obs, earned, *_ = env.step(action)
        reward = float(earned)
    env.close()
