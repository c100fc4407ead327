"""A user's logs become episodes like any other, or a sentence that says what is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import uat

SPEC = uat.Spec(obs=uat.Vector(2), action=uat.Discrete(3), horizon=4)
WEIGHTS = uat.Spec(obs=uat.Items(5), action=uat.Weights(2), horizon=4)


def log(**changes: Any) -> dict[str, Any]:
    """Two episodes, the second one step shorter, with rubbish in its padding."""
    plain: dict[str, Any] = {
        "obs": np.array([[[0.0, 1], [1, 1], [2, 1]], [[3, 1], [4, 1], [np.nan, np.nan]]]),
        "action": [[0, 1, 2], [2, 1, 77]],
        "reward": [[1, 0, 1], [0, 1, 9]],
        "valid": [[True, True, True], [True, True, False]],
    }
    return plain | changes


def test_logs_become_what_a_policy_may_know() -> None:
    trajectory = uat.episodes(SPEC, **log())
    batch = SPEC.clock.batch(trajectory)
    assert batch.prev_action.tolist() == [[-1, 0, 1], [-1, 2, -1]]
    assert batch.prev_reward.tolist() == [[0, 1, 0], [0, 0, 0]]
    assert trajectory.done.tolist() == [[False, False, True], [False, True, False]]
    assert torch.equal(trajectory.required_target, trajectory.action)


@pytest.mark.parametrize("kind", [np.int64, np.bool_, np.float32])
def test_clicks_are_numbers_and_never_ids(kind: Any) -> None:
    reward = np.array([[1, 0, 1], [0, 1, 0]], dtype=kind)
    batch = SPEC.clock.batch(uat.episodes(SPEC, **log(reward=reward)))
    assert batch.prev_reward.tolist() == [[0, 1, 0], [0, 0, 0]]


def test_the_clock_takes_clicks_as_numbers_too() -> None:
    trajectory = uat.episodes(SPEC, **log())
    trajectory.reward = trajectory.reward.long()
    assert SPEC.clock.batch(trajectory).prev_reward.tolist() == [[0, 1, 0], [0, 0, 0]]


def test_a_policy_learns_from_logs() -> None:
    policy = uat.UAT(SPEC, uat.UATConfig(d_model=8, num_heads=2, num_layers=1, d_ff=8))
    total, count = policy.loss(SPEC.clock.batch(uat.episodes(SPEC, **log())))["imitation"]
    total.backward()
    assert count == 5
    assert total.isfinite()


def test_weights_and_items_are_logs_too() -> None:
    halves = np.full((1, 2, 2), 0.5)
    trajectory = uat.episodes(WEIGHTS, obs=[[4, 0]], action=halves, reward=[[0.1, 0.2]])
    assert WEIGHTS.clock.batch(trajectory).prev_action[0].tolist() == [[0, 0], [0.5, 0.5]]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"obs": np.full((2, 3, 2), np.nan)}, r"obs: expected finite numbers, got nan at \(0, 0, 0\)"),
        ({"obs": np.zeros((2, 3, 5))}, r"obs: expected shape \(2, 3, 2\), got \(2, 3, 5\)"),
        ({"action": [[0, 1, 3], [0, 0, 0]]}, r"action: ids must lie in \[0, 3\), got 3 at \(0, 2\)"),
        ({"action": [[0, 1, -7], [0, 0, 0]]}, r"action: ids must lie in \[0, 3\), got -7 at \(0, 2\)"),
        ({"action": [[0.0, 1, 2], [0, 0, 0]]}, "action: expected integer ids, got torch.float64"),
        ({"target": [[0, 1, 9], [0, 0, 0]]}, r"target: ids must lie in \[0, 3\), got 9"),
        ({"reward": [[1.0, np.inf, 0], [0, 0, 0]]}, r"reward: expected finite numbers, got inf at \(0, 1\)"),
        ({"reward": [1.0, 2.0]}, r"reward: expected shape \(episodes, steps\) .*, got \(2,\)"),
        ({"valid": [[1, 1, 1], [1, 1, 0]]}, "valid: expected booleans"),
        ({"reward": "abc"}, "reward: expected numbers"),
    ],
)
def test_a_log_that_cannot_be_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        uat.episodes(SPEC, **log(**changes))


def test_methods_see_no_fact_that_the_spec_does_not_name() -> None:
    trajectory = uat.episodes(SPEC, **log())
    trajectory.facts = {"regime": torch.ones(2, 3), "price": torch.ones(2, 3)}
    open_spec = uat.Spec(obs=uat.Vector(2), action=uat.Discrete(3), horizon=4, facts={"price": ()})
    assert SPEC.clock.batch(trajectory).facts == {}
    assert open_spec.clock.batch(trajectory).facts.keys() == {"price"}
