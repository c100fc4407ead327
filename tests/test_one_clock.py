"""One table of cases holds every place that tells feedback to one definition: batches, rollouts, sessions, the kernel,
and corrupted channels.

The definition: at step t of an episode one knows the action of step t - 1, and the reward of step t - lag - delay,
times the scale; nothing (the id -1, or zeros) where there is no such step, and 0 where that reward is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.builders import CPU, random_trajectory
from uat.acting import rollout
from uat.clock import Clock, nothing
from uat.contracts import Agent, Simulator, Transition
from uat.episode import Noise, Step, Trajectory
from uat.feedback import FeedbackConfig, corrupt
from uat.methods.vanilla import Vanilla, VanillaConfig
from uat.serving import Session
from uat.spec import Box, Discrete, Spec, Vector, Weights
from uat.training.surroundings import seeded

STREAMS, STEPS = 4, 7
ACTIONS: dict[str, Any] = {"ids": Discrete(4), "weights": Weights(3), "box": Box(low=(-1.0, 0.0), high=(1.0, 9.0))}


@dataclass(frozen=True)
class Case:
    actions: str = "ids"
    lag: int = 1
    scale: float = 1.0
    unknown: bool = False
    padded: bool = False
    delay: int = 0

    @property
    def spec(self) -> Spec:
        action = ACTIONS[self.actions]
        return Spec(obs=Vector(2), action=action, horizon=STEPS, reward_lag=self.lag, reward_scale=self.scale)

    def trajectory(self, seed: int = 0) -> Trajectory:
        """Build a random trajectory: unknown rewards are NaN, and padding holds anything."""
        told = random_trajectory(self.spec, episodes=STREAMS, seed=seed, masked=False, whole=not self.padded)
        if not self.unknown:
            return told
        known_BT = torch.rand(STREAMS, STEPS, generator=torch.Generator().manual_seed(seed + 1)) < 0.5
        return replace(told, reward=told.reward.masked_fill(~known_BT, torch.nan), reward_known=known_BT)


CASES = [
    *(Case(lag=lag, scale=scale) for lag in range(4) for scale in (1.0, -2.5)),
    *(Case(actions=actions, lag=lag, padded=True) for actions in ACTIONS for lag in (0, 2)),
    *(Case(unknown=True, lag=lag, padded=lag == 3, scale=0.5) for lag in range(4)),
    *(Case(delay=delay, lag=lag) for delay in (1, 3, STEPS + 1) for lag in (0, 1, 2)),
    Case(actions="box", lag=3, scale=0.1, unknown=True, padded=True, delay=2),
    Case(lag=STEPS + 2),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
played_cases = pytest.mark.parametrize("case", [case for case in CASES if case.lag > 0], ids=str)


def defined(case: Case, told: Trajectory, t: int) -> Iterator[tuple[Tensor, float, bool]]:
    """For each episode: the action, the reward and whether it is known, as step t sees them."""
    for b in range(STREAMS):
        action = told.action[b, t - 1] if t else torch.full_like(told.action[b, 0], nothing(told.action))
        s = t - case.lag - case.delay
        known = s >= 0 and (told.reward_known is None or bool(told.reward_known[b, s]))
        yield action, case.scale * told.reward[b, s].item() if known else 0.0, known


def assert_told(case: Case, told: Trajectory, t: int, step: Step, only: Tensor | None = None) -> None:
    """There is no mask before a simulator gives the first one."""
    for b, (action, reward, known) in enumerate(defined(case, told, t)):
        if only is not None and not only[b]:
            continue
        assert torch.equal(step.prev_action[b], action), (b, t)
        assert step.prev_reward[b].item() == pytest.approx(reward, rel=1e-6), (b, t)
        if step.reward_known is not None:
            assert step.reward_known[b].item() == known, (b, t)
    assert (step.reward_known is not None) <= case.unknown
    assert t == 0 or (step.reward_known is not None) == case.unknown


# ---------------------------------------------------------------- all at once


@every_case
def test_a_batch_is_told_what_is_defined(case: Case) -> None:
    told = case.trajectory()
    channel = corrupt(told, FeedbackConfig(delay=case.delay)) if case.delay else told
    batch = case.spec.clock.batch(channel)
    for t in range(STEPS):
        step, real_B = batch.step(t), told.valid[:, t]
        for name in ("obs", "prev_action", "prev_reward"):
            value = getattr(step, name)
            assert (value[~real_B] == nothing(getattr(batch, name))).all(), name
        if step.reward_known is not None:
            assert not step.reward_known[~real_B].any()
        assert_told(case, told, t, step, only=real_B)


@pytest.mark.parametrize("case", [case for case in CASES if case.actions == "ids" and not case.delay], ids=str)
def test_the_kernel_computes_the_inputs_of_a_batch(case: Case) -> None:
    pytest.importorskip("triton")
    from uat.clock import known_rewards
    from uat.engines.triton.clock import fused_inputs

    told, device = case.trajectory(), "cuda" if torch.cuda.is_available() else "cpu"
    given = told.obs, told.action, known_rewards(told.reward, told.reward_known), told.valid
    none = nothing(told.obs), nothing(told.action)
    found = fused_inputs(*(x.to(device) for x in given), lag=case.lag, scale=case.scale, none=none)
    batch = case.spec.clock.batch(told)
    for x, expected in zip(found, (batch.obs, batch.prev_action, batch.prev_reward), strict=True):
        assert torch.equal(x.cpu(), expected)


# ---------------------------------------------------------------- step by step


class Replay(Simulator[int]):
    """Shows and pays what a trajectory says, whatever is done."""

    def __init__(self, spec: Spec, told: Trajectory) -> None:
        self.spec, self.told = spec, told

    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        return {"id": episode_ids}

    def reset(self, noise: Noise) -> tuple[int, Tensor]:
        return 0, self.told.obs[:, 0]

    def step(self, world: int, action: Tensor) -> Transition[int]:
        known = None if self.told.reward_known is None else self.told.reward_known[:, world]
        over_B = torch.full((STREAMS,), world + 1 == STEPS)
        after = self.told.obs[:, min(world + 1, STEPS - 1)]
        return Transition(world + 1, after, self.told.reward[:, world], over_B, reward_known_B=known)


class Listener(Agent[int]):
    """Replays the actions of a trajectory, and keeps the feedback that it receives."""

    def __init__(self, spec: Spec, told: Trajectory) -> None:
        self.spec, self.told, self.heard = spec, told, list[Step]()

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> int:
        return 0

    def step(self, state: int, step: Step) -> tuple[Tensor, int]:
        raise NotImplementedError

    def decide(self, state: int, step: Step, gumbel_BA: Tensor | None = None) -> tuple[Tensor, int]:
        self.heard.append(step.map(torch.clone))
        return self.told.action[:, state], state + 1


@played_cases
def test_an_agent_is_told_what_is_defined_and_its_episode_gives_the_same_batch(case: Case) -> None:
    told = case.trajectory()
    worlds, agent = Replay(case.spec, told), Listener(case.spec, told)
    channel = corrupt(worlds, delay=case.delay) if case.delay else worlds
    played = rollout(agent, channel, channel.noise(torch.arange(STREAMS), 0))
    batch = case.spec.clock.batch(played)
    for t in range(STEPS):
        assert_told(case, told, t, agent.heard[t])
        assert_told(case, told, t, batch.step(t))


class Attentive(Vanilla):
    """Keeps the steps that it receives."""

    def step(self, state: Any, step: Step) -> tuple[Tensor, Any]:
        self.heard = step.map(torch.clone)
        return super().step(state, step)


@pytest.mark.parametrize("case", [case for case in CASES if not case.delay], ids=str)
def test_a_session_tells_what_is_defined_also_after_a_restart(case: Case) -> None:
    """Streams 1 and 3 begin another episode after three steps; what the last one earned does not reach it."""
    first, second = replace(case, padded=False).trajectory(), replace(case, padded=False).trajectory(seed=5)
    with seeded(0, CPU):
        policy = Attentive(case.spec, VanillaConfig(d_model=8, num_heads=2, num_layers=1, d_ff=8))
    session, again, cut = Session(policy, streams=STREAMS, path="cached"), torch.tensor([1, 3]), 3
    for t in range(STEPS):
        if t == cut:
            session.restart(again)
        now = first if t < cut else _spliced(first, second, cut, again)
        earned = t if case.lag == 0 else t - 1
        session.act(
            now.obs[:, t],
            reward=None if earned < 0 else now.reward[:, earned],
            reward_known=None if earned < 0 or now.reward_known is None else now.reward_known[:, earned],
            action=None if t == 0 else now.action[:, t - 1],
        )
        assert (policy.heard.reward_known is not None) == (case.unknown and earned >= 0)
        for b, (action, reward, known) in enumerate(defined(case, first, t)):
            restarted = t >= cut and b in again
            if restarted:
                action, reward, known = list(defined(case, second, t - cut))[b]
            if policy.heard.reward_known is not None:
                assert policy.heard.reward_known[b].item() == known, (b, t)
            assert torch.equal(policy.heard.prev_action[b], action), (b, t)
            assert policy.heard.prev_reward[b].item() == pytest.approx(reward, rel=1e-6), (b, t)
            assert policy.heard.first[b].item() == (t == 0 or (restarted and t == cut))


def _spliced(first: Trajectory, second: Trajectory, cut: int, streams: Tensor) -> Trajectory:
    """The first episodes up to a step, and the second ones from there in some of the streams."""

    def splice(x: Tensor, y: Tensor) -> Tensor:
        spliced = x.clone()
        spliced[streams, cut:] = y[streams, : STEPS - cut]
        return spliced

    known = None
    if first.reward_known is not None and second.reward_known is not None:
        known = splice(first.reward_known, second.reward_known)
    names = ("obs", "action", "reward")
    own = {name: splice(getattr(first, name), getattr(second, name)) for name in names}
    return replace(first, **own, reward_known=known)


# ---------------------------------------------------------------- values at the edges


def test_one_stream_takes_a_plain_number_and_says_that_it_is_unknown() -> None:
    spec = Case().spec
    with seeded(0, CPU):
        policy = Attentive(spec, VanillaConfig(d_model=8, num_heads=2, num_layers=1, d_ff=8))
    session = Session(policy, path="cached")
    session.act([[0.0, 0.0]])
    session.act([[0.0, 0.0]], reward=1.5)
    assert policy.heard.prev_reward.tolist() == [1.5]
    session.act([[0.0, 0.0]], reward=float("nan"), reward_known=False)
    assert policy.heard.prev_reward.tolist() == [0.0]
    with pytest.raises(ValueError, match="reward: expected finite numbers, got nan"):
        session.act([[0.0, 0.0]], reward=float("nan"))
    with pytest.raises(ValueError, match=r"reward_known: expected booleans of shape \(1,\)"):
        session.act([[0.0, 0.0]], reward=[1.0], reward_known=[1.0])
    with pytest.raises(ValueError, match=r"reward: expected shape \(2,\), got \(\)"):
        Session(policy, streams=2, path="cached").act([[0.0, 0.0]] * 2, reward=1.0)


def test_what_an_unknown_reward_was_is_never_read() -> None:
    """Neither by the clock, nor by losses that learn from rewards."""
    case = Case(unknown=True, lag=2)
    told = case.trajectory()
    other = replace(told, reward=told.reward.nan_to_num(7.0))
    clock = Clock(reward_lag=2)
    assert torch.equal(clock.batch(told).prev_reward, clock.batch(other).prev_reward)
    assert torch.equal(clock.earned(told), clock.earned(other))
    assert told.reward_known is not None
    assert (clock.earned(told)[~told.reward_known] == 0).all()
