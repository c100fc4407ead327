"""Probabilities of the target policy: one parallel pass equals acting step by step, and leaves the policy unchanged."""

from __future__ import annotations

import pytest
import torch

from tests.builders import SPECS, build_random, random_trajectory, stream
from uat.contracts import Agent
from uat.episode import Step, Trajectory
from uat.evaluation.off_policy import action_probabilities

SPEC = SPECS["vector-discrete"]


@pytest.mark.parametrize("method", ["uat", "vanilla", "adt", "gtrxl"])
@pytest.mark.parametrize("masked", [False, True])
def test_the_parallel_pass_equals_acting(method: str, masked: bool) -> None:
    policy, trajectory = build_random(method, SPEC), random_trajectory(SPEC, episodes=5, masked=masked)
    found_BTA = action_probabilities(policy, trajectory, greedy=False, chunk=2)
    logits_BTA = stream(policy, SPEC.clock.batch(trajectory))
    if trajectory.allowed is not None:
        logits_BTA = logits_BTA.masked_fill(~trajectory.allowed, -torch.inf)
    expected_BTA = logits_BTA.softmax(-1)
    assert torch.allclose(found_BTA[trajectory.valid], expected_BTA[trajectory.valid], atol=1e-12)
    chosen_BTA = action_probabilities(policy, trajectory)  # policies are greedy in evaluation
    assert torch.equal(chosen_BTA.argmax(-1)[trajectory.valid], expected_BTA.argmax(-1)[trajectory.valid])
    assert chosen_BTA.unique().tolist() == [0, 1]


def test_smoothing_mixes_in_allowed_actions() -> None:
    policy, trajectory = build_random("uat", SPEC), random_trajectory(SPEC, masked=True)
    assert trajectory.allowed is not None
    plain_BTA, smooth_BTA = (action_probabilities(policy, trajectory, smoothing=x) for x in (0.0, 0.2))
    even_BTA = trajectory.allowed / trajectory.allowed.sum(-1, keepdim=True)
    assert torch.allclose(smooth_BTA, 0.8 * plain_BTA + 0.2 * even_BTA, atol=1e-7)
    assert (smooth_BTA[~trajectory.allowed] == 0).all()
    assert torch.allclose(smooth_BTA.sum(-1), torch.ones(()).double())
    with pytest.raises(ValueError, match=r"smoothing=1\.5"):
        action_probabilities(policy, trajectory, smoothing=1.5)


def test_dropout_is_off_and_the_modes_of_all_modules_are_restored() -> None:
    policy, trajectory = build_random("uat", SPEC, dropout=0.5), random_trajectory(SPEC)
    expected_BTA = action_probabilities(policy, trajectory, greedy=False)
    policy.train()
    policy.head.eval()
    modes = [module.training for module in policy.modules()]
    assert torch.equal(action_probabilities(policy, trajectory, greedy=False), expected_BTA)
    assert [module.training for module in policy.modules()] == modes
    assert len(set(modes)) == 2


class Counter(Agent[torch.Tensor]):
    """An agent without a parallel pass: it prefers the action that is the number of its step."""

    spec = SPEC

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> torch.Tensor:
        return torch.zeros(streams, dtype=torch.long, device=device)

    def step(self, state: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        return 5.0 * (state[:, None] == torch.arange(4)), state + 1


def test_an_agent_without_a_parallel_pass_is_played_step_by_step() -> None:
    found_BTA = action_probabilities(Counter(), random_trajectory(SPEC))
    assert found_BTA.argmax(-1)[0, :4].tolist() == [0, 1, 2, 3]


def test_other_actions_than_ids_are_refused() -> None:
    spec = SPECS["vector-weights"]
    trajectory: Trajectory = random_trajectory(spec)
    with pytest.raises(ValueError, match="need discrete actions"):
        action_probabilities(build_random("uat", spec), trajectory)
