"""Replay: accepted events are a deployment, whose actions are those that the policy takes on them alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.builders import SPECS, build_random, random_trajectory
from uat.contracts import Agent, Memory
from uat.episode import Step, Told, Trajectory
from uat.evaluation.off_policy import OffPolicyConfig, accepted_events, action_probabilities, replay_estimate
from uat.spec import Discrete, Spec, Vector

SPEC = SPECS["vector-discrete"]


def uniform_log(
    spec: Spec = SPEC, episodes: int = 6, events: int = 60, *, masked: bool = False
) -> tuple[Trajectory, Tensor]:
    """Long streams of uniformly logged events, and their propensities."""
    trajectory = random_trajectory(spec, episodes=episodes, steps=events, masked=masked, whole=True)
    choices_BT = torch.full((episodes, events), 4) if trajectory.allowed is None else trajectory.allowed.sum(-1)
    return trajectory, 1 / choices_BT


@pytest.mark.parametrize("method", ["uat", "vanilla", "adt", "gtrxl", "dt", "tent", "uat-late", "dpt"])
def test_the_policy_takes_the_accepted_actions_on_accepted_events_alone(method: str) -> None:
    """Rejected events leave no trace in the policy's memory: a parallel pass over the accepted ones agrees."""
    policy, (log, propensity_BT) = build_random(method, SPEC), uniform_log()
    accepted = accepted_events(policy, log, propensity_BT, steps=5)
    assert accepted.reached_BK.all()
    assert (accepted.event_BK.diff(dim=1) > 0).all()
    index_BK = accepted.event_BK
    deployed = Trajectory(
        obs=log.obs[torch.arange(6)[:, None], index_BK],
        action=log.action.gather(1, index_BK),
        reward=log.reward.gather(1, index_BK),
        terminated=torch.zeros(6, 5, dtype=torch.bool),
        valid=torch.ones(6, 5, dtype=torch.bool),
    )
    assert torch.equal(accepted.reward_BK, deployed.reward.double())
    taken_BTA = action_probabilities(policy, deployed)
    assert torch.equal(taken_BTA.argmax(-1), deployed.action)


def test_no_event_between_accepted_ones_agreed_with_the_policy() -> None:
    """The first accepted event is the first one whose logged action is the policy's own first action."""
    policy, (log, propensity_BT) = build_random("uat", SPEC), uniform_log()
    accepted = accepted_events(policy, log, propensity_BT, steps=1)
    for b, event in enumerate(accepted.event_BK[:, 0].tolist()):
        for t in range(event + 1):
            alone = log.map(lambda x, b=b, t=t: x[b : b + 1, t : t + 1])
            action = action_probabilities(policy, alone).argmax(-1).item()
            assert (action == log.action[b, t].item()) == (t == event)


def test_sampling_policies_and_masks() -> None:
    policy, (log, propensity_BT) = build_random("uat", SPEC), uniform_log(masked=True)
    first, again, other = (
        accepted_events(policy, log, propensity_BT, steps=4, greedy=False, seed=seed).event_BK for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@dataclass(slots=True)
class Last(Memory):
    arm_B: Tensor


class StayOrShift(Agent[Last]):
    """Repeats an arm that paid and takes the next one after an arm that did not."""

    spec = Spec(obs=Vector(1), action=Discrete(2), horizon=50)

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> Last:
        return Last(torch.zeros(streams, dtype=torch.long, device=device))

    def step(self, state: Last, step: Step) -> tuple[Tensor, Last]:
        arm_B = torch.where(step.prev_reward > 0, step.prev_action, 1 - step.prev_action)
        arm_B = torch.where(step.first, 0, arm_B)
        return 9.0 * (arm_B[:, None] == torch.arange(2)), Last(arm_B)


def bandit(streams: int, events: int) -> tuple[Trajectory, Tensor]:
    """Two arms that pay with 0.8 and 0.4, logged uniformly."""
    generator = torch.Generator().manual_seed(0)
    action_BT = torch.randint(2, (streams, events), generator=generator)
    pays_BT = torch.where(action_BT == 0, 0.8, 0.4)
    trajectory = Trajectory(
        obs=torch.zeros(streams, events, 1),
        action=action_BT,
        reward=(torch.rand(streams, events, generator=generator) < pays_BT).float(),
        terminated=torch.zeros(streams, events, dtype=torch.bool),
        valid=torch.ones(streams, events, dtype=torch.bool),
    )
    return trajectory, torch.full((streams, events), 0.5)


def test_the_estimate_is_the_policy_s_worth_in_deployment() -> None:
    """The arm is a Markov chain: it stays with the probability that it pays. Its exact mean over 10 steps is known."""
    share, mean = 1.0, 0.0
    for _ in range(10):
        mean += (0.8 * share + 0.4 * (1 - share)) / 10
        share = 0.8 * share + 0.6 * (1 - share)
    estimate = replay_estimate(StayOrShift(), *bandit(600, 40), steps=10)
    assert estimate.low is not None
    assert estimate.high is not None
    assert estimate.low < mean < estimate.high
    assert estimate.high - estimate.low < 0.06
    assert estimate.ess == 600
    assert "deployment by replay" in estimate.sentence()


def test_too_few_complete_streams_are_refused() -> None:
    estimate = replay_estimate(StayOrShift(), *bandit(600, 12), steps=10)
    assert estimate.value is None
    assert estimate.refused is not None
    assert "accepted events, fewer than 150" in estimate.refused
    short = replay_estimate(StayOrShift(), *bandit(600, 12), steps=3, config=OffPolicyConfig(resamples=20))
    assert short.value is not None


class Counting(StayOrShift):
    """An agent whose memory holds a number that all streams share."""

    @dataclass(slots=True)
    class Steps(Memory):
        arm_B: Tensor
        count: int = 0

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> Any:
        return self.Steps(torch.zeros(streams, dtype=torch.long))

    def step(self, state: Any, step: Step) -> tuple[Tensor, Any]:
        return torch.zeros(len(step.obs), 2), self.Steps(state.arm_B, state.count + 1)


class Plain(StayOrShift):
    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> Any:
        return torch.zeros(streams)


def test_logs_and_agents_that_replay_does_not_fit_are_refused() -> None:
    log, even_BT = bandit(3, 5)
    skewed_BT = even_BT.clone()
    skewed_BT[1, 2] = 0.7
    never_BT = torch.zeros(3, 5, dtype=torch.bool)
    told = Told(action=log.action, reward=log.reward)
    late = StayOrShift()
    late.spec = replace(late.spec, reward_lag=2)
    cases: list[tuple[Any, Trajectory, Tensor, int, str]] = [
        (StayOrShift(), log, skewed_BT, 2, r"uniform logging: expected a propensity of 1/2, got 0.7 at \(1, 2\)"),
        (StayOrShift(), log, even_BT * torch.nan, 2, "propensity_BT: expected finite numbers"),
        (StayOrShift(), replace(log, reward_known=never_BT), even_BT, 2, "needs all rewards"),
        (StayOrShift(), replace(log, told=told), even_BT, 2, "no corrupted feedback"),
        (late, log, even_BT, 2, "reward_lag=2 must be 1"),
        (StayOrShift(), log, even_BT, 51, "steps=51 must be at most the policy's horizon of 50"),
        (StayOrShift(), log, even_BT, 0, "steps=0"),
        (Counting(), log, even_BT, 2, "Counting changes count, which all streams share"),
        (Plain(), log, even_BT, 2, "the memory of Plain must be"),
    ]
    for agent, trajectory, propensity_BT, steps, sentence in cases:
        with pytest.raises(ValueError, match=sentence):
            accepted_events(agent, trajectory, propensity_BT, steps=steps)
