"""Logged steps refuse bad input with a sentence that names it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.builders import SPECS, random_trajectory
from uat.evaluation.off_policy import LoggedSteps, OffPolicyConfig, deployment, fit_values, logged_steps
from uat.evaluation.off_policy.values import fold_numbers

GOOD: dict[str, Any] = {
    "reward_BT": torch.ones(2, 2),
    "target_BT": torch.full((2, 2), 0.5),
    "propensity_BT": torch.full((2, 2), 0.5),
}
ALL: dict[str, Any] = {
    **GOOD,
    "target_BTA": torch.full((2, 2, 2), 0.5),
    "behaviour_BTA": torch.full((2, 2, 2), 0.5),
    "action_BT": torch.zeros(2, 2, dtype=torch.long),
}


def changed(name: str, value: float) -> torch.Tensor:
    x = ALL[name].clone()
    x[1, 0] = value
    return x


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"reward_BT": torch.ones(2)}, r"reward_BT: expected shape \(episodes, steps\)"),
        ({"reward_BT": torch.ones(0, 2)}, "at least one of each"),
        ({"reward_BT": changed("reward_BT", torch.nan)}, r"reward_BT: expected finite numbers, got nan at \(1, 0\)"),
        ({"propensity_BT": changed("propensity_BT", 0.0)}, r"above 0, got 0 at \(1, 0\): the logging policy took"),
        ({"propensity_BT": changed("propensity_BT", 1.5)}, r"from 0 to 1, got 1.5 at \(1, 0\)"),
        ({"propensity_BT": changed("propensity_BT", -0.5)}, "from 0 to 1, got -0.5"),
        ({"propensity_BT": changed("propensity_BT", torch.nan)}, "propensity_BT: expected finite numbers, got nan"),
        ({"propensity_BT": torch.ones(2, 3)}, r"propensity_BT: expected shape \(2, 2\), got \(2, 3\)"),
        ({"target_BT": changed("target_BT", 2.0)}, "target_BT: expected probabilities from 0 to 1, got 2"),
        ({"target_BT": "many"}, "target_BT: expected numbers"),
        ({"valid_BT": torch.tensor([[True, True], [False, True]])}, "valid"),
        ({"reward_known_BT": torch.ones(2, 2)}, "reward_known_BT: expected booleans"),
        ({"features_BTF": torch.ones(2, 2)}, "features_BTF: expected shape"),
        ({"features_BTF": torch.full((2, 2, 1), torch.inf)}, "features_BTF: expected finite numbers"),
        ({"action_BT": None}, "give the ids of the logged actions too"),
        ({"action_BT": torch.full((2, 2), 5)}, r"ids must lie in \[0, 2\), got 5"),
        ({"target_BTA": changed("target_BTA", 0.4)}, r"target_BTA: probabilities must sum to 1, got a sum of 0.8"),
        ({"behaviour_BTA": torch.full((2, 2, 4), 0.25)}, "expected the same number of actions"),
        ({"propensity_BT": changed("propensity_BT", 0.25)}, r"behaviour_BTA: the logged action has probability 0.5"),
        ({"target_BT": changed("target_BT", 0.25)}, r"0.5 at \(1, 0\), and target_BT says 0.25"),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        LoggedSteps(**{**ALL, **changes})


def test_good_input_is_kept_in_double_precision() -> None:
    steps = LoggedSteps(**ALL)
    assert steps.ratio_BT.dtype == torch.float64
    assert steps.known_BT.all()
    assert steps.unsupported() == 0
    rounded = LoggedSteps(**{**GOOD, "propensity_BT": torch.full((2, 2), 1 + 1e-6)})
    assert rounded.propensity_BT.max() == 1


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"discount": 1.5}, r"discount=1.5 must lie in \[0, 1\]"),
        ({"clip": 0.0}, "clip=0.0 must be positive"),
        ({"least_ess": 0.5}, "least_ess=0.5"),
        ({"folds": 1}, "folds=1"),
        ({"resamples": 0}, "resamples=0"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        OffPolicyConfig(**settings)


def test_values_need_features_and_enough_episodes() -> None:
    steps = LoggedSteps(**GOOD)
    with pytest.raises(ValueError, match="features_BTF are needed"):
        fit_values(steps, discount=1.0, folds=2, penalty=1.0, seed=0)
    assert [e.name for e in deployment(steps)] == ["log", "ips", "wis", "pdis", "pdwis"]
    with pytest.raises(ValueError, match="folds=5 must not be more than the number of episodes, 2"):
        deployment(replace(steps, features_BTF=torch.ones(2, 2, 1)))
    assert fold_numbers(7, 3, 0).bincount().tolist() == [3, 2, 2]


def test_a_trajectory_becomes_logged_steps() -> None:
    spec = SPECS["vector-discrete"]
    trajectory = random_trajectory(spec, episodes=4)
    even_BTA = torch.full((4, spec.steps, 4), 0.25)
    steps = logged_steps(trajectory, even_BTA, behaviour_BTA=even_BTA)
    assert torch.equal(steps.ratio_BT, torch.ones(4, spec.steps).double())
    assert torch.equal(steps.real_BT, trajectory.valid)
    assert torch.equal(steps.reward_BT[trajectory.valid], trajectory.reward.double()[trajectory.valid])
    half = logged_steps(trajectory, even_BTA, propensity_BT=torch.full((4, spec.steps), 0.5))
    assert half.ratio_BT[trajectory.valid].unique().tolist() == [0.5]
    with pytest.raises(ValueError, match="propensities are needed"):
        logged_steps(trajectory, even_BTA)
    weights = random_trajectory(SPECS["vector-weights"])
    with pytest.raises(ValueError, match="for discrete actions alone"):
        logged_steps(weights, even_BTA, propensity_BT=torch.ones(3, 7))
