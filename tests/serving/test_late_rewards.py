"""`Session.set_reward`: a reward that comes late, but before the clock delivers it, is as good as one in time."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.builders import SPECS, build_random, largest, random_trajectory
from uat.episode import Step, Trajectory
from uat.methods.vanilla import Vanilla, VanillaConfig
from uat.serving import Session
from uat.spec import Spec

STREAMS = 4
Path = Literal["fast", "cached"]
every_path = pytest.mark.parametrize("path", ["fast", "cached"])
every_lag = pytest.mark.parametrize("lag", [2, 3, 5])
WEIGHTS = replace(SPECS["vector-weights"], horizon=9)  # answers are weights: every bit of a logit shows


def episodes(spec: Spec, seed: int = 0) -> Trajectory:
    return random_trajectory(spec, episodes=STREAMS, seed=seed, masked=False, whole=True)


def act(session: Session, told: Trajectory, t: int, reward_B: Tensor | None = None, **known: Any) -> Tensor:
    """Pass step t of these episodes to the session, with the reward of the previous step or another one."""
    earned_B = None if t == 0 else told.reward[:, t - 1] if reward_B is None else reward_B
    return session.act(told.obs[:, t], reward=earned_B, action=None if t == 0 else told.action[:, t - 1], **known)


def in_time(session: Session, told: Trajectory, **known: Any) -> Tensor:
    answers = []
    for t in range(told.obs.shape[1]):
        mask = {name: mask_BT[:, t - 1] for name, mask_BT in known.items() if t}
        answers.append(act(session, told, t, **mask))
    return torch.stack(answers, 1)


@torch.no_grad()
def at_once(policy: Any, told: Trajectory) -> Tensor:
    return policy.logits(policy.spec.clock.batch(told)).softmax(-1)


def assert_all_equal(found: Tensor, expected: Tensor, parallel: Tensor) -> None:
    """Compare with a session that received it in time (exactly), and with the parallel pass of the complete log."""
    assert torch.equal(found, expected)
    torch.testing.assert_close(found, parallel, rtol=0, atol=1e-5 * largest(parallel))


# ---------------------------------------------------------------- as good as in time


@every_path
@every_lag
def test_rewards_that_come_late_count_as_if_they_had_come_in_time(lag: int, path: Path) -> None:
    """Each reward comes 1 to `lag` steps after its action, differently in each stream, by stream number or by mask."""
    spec = replace(WEIGHTS, reward_lag=lag)
    policy, told = build_random("uat", spec, dtype=torch.float32), episodes(spec)
    late_BT = torch.randint(1, lag + 1, told.reward.shape, generator=torch.Generator().manual_seed(1))
    session, answers = Session(policy, streams=STREAMS, path=path), []
    for t in range(spec.steps):
        for ago in range(2, min(lag, t) + 1):
            due_B = late_BT[:, t - ago] == ago
            chosen = due_B if t % 2 else due_B.nonzero()[:, 0].tolist()
            session.set_reward(told.reward[due_B, t - ago], steps_ago=ago, streams=chosen)
        known_B = late_BT[:, t - 1] == 1 if t else None
        nan_B = None if known_B is None else told.reward[:, t - 1].masked_fill(~known_B, torch.nan)
        answers.append(act(session, told, t, nan_B, **({} if known_B is None else {"reward_known": known_B})))
    expected = in_time(Session(policy, streams=STREAMS, path=path), told)
    assert_all_equal(torch.stack(answers, 1), expected, at_once(policy, told))


@every_path
def test_a_wrong_reward_is_corrected_in_all_streams(path: Path) -> None:
    spec = replace(WEIGHTS, reward_lag=3)
    policy, told = build_random("uat", spec, dtype=torch.float32), episodes(spec)
    session, answers = Session(policy, streams=STREAMS, path=path), []
    for t in range(spec.steps):
        if t > 2:
            session.set_reward(told.reward[:, t - 3].tolist(), steps_ago=3)
        answers.append(act(session, told, t, torch.full((STREAMS,), 3.0)))
    wrong = in_time(Session(policy, streams=STREAMS, path=path), replace(told, reward=torch.full_like(told.reward, 3)))
    expected = in_time(Session(policy, streams=STREAMS, path=path), told)
    assert_all_equal(torch.stack(answers, 1), expected, at_once(policy, told))
    assert not torch.allclose(wrong[:, 3:], expected[:, 3:])


def test_rewards_that_never_come_stay_unknown() -> None:
    spec = replace(WEIGHTS, reward_lag=3)
    policy, told = build_random("uat", spec, dtype=torch.float32), episodes(spec)
    known_BT = torch.rand(told.reward.shape, generator=torch.Generator().manual_seed(2)) < 0.5
    log = replace(told, reward=told.reward.masked_fill(~known_BT, torch.nan), reward_known=known_BT)
    session, answers, never_B = Session(policy, streams=STREAMS), [], torch.zeros(STREAMS, dtype=torch.bool)
    for t in range(spec.steps):
        if t > 1:
            known_B = known_BT[:, t - 2]
            session.set_reward(told.reward[known_B, t - 2], steps_ago=2, streams=known_B)
        answers.append(act(session, log, t, **({"reward_known": never_B} if t else {})))
    expected = in_time(Session(policy, streams=STREAMS), log, reward_known=known_BT)
    assert_all_equal(torch.stack(answers, 1), expected, at_once(policy, log))


class Attentive(Vanilla):
    """Keeps the steps that it receives."""

    def step(self, state: Any, step: Step) -> tuple[Tensor, Any]:
        self.heard = step.map(torch.clone)
        return super().step(state, step)


def test_a_late_reward_is_known_to_the_policy() -> None:
    spec = replace(SPECS["vector-discrete"], reward_lag=2, reward_scale=0.5)
    policy = Attentive(spec, VanillaConfig(d_model=8, num_heads=2, num_layers=1, d_ff=8))
    session, heard = Session(policy, path="cached"), []
    for t in range(6):
        if t == 3:
            session.set_reward(4.0, steps_ago=2)
        session.act([[0.0] * 5], **({"reward": [float("nan")], "reward_known": [False]} if t else {}))
        heard.append((policy.heard.prev_reward.item(), policy.heard.reward_known))
    assert heard[0] == (0.0, None)
    assert [(reward, mask.tolist()) for reward, mask in heard[1:]] == [
        (0.0, [False]),
        (0.0, [False]),
        (2.0, [True]),  # the reward of step 1, at step 3
        (0.0, [False]),
        (0.0, [False]),
    ]


def test_a_restarted_stream_takes_late_rewards_of_its_new_episode_alone() -> None:
    spec = replace(WEIGHTS, reward_lag=3)
    policy, old, new = build_random("uat", spec, dtype=torch.float32), episodes(spec), episodes(spec, seed=1)
    session, fresh = Session(policy, streams=STREAMS), Session(policy, streams=STREAMS)
    for t in range(4):
        act(session, old, t)
    session.restart(2)
    with pytest.raises(ValueError, match=r"steps_ago=2: stream 2 has taken 0 steps of its episode"):
        session.set_reward(old.reward[:, 2], steps_ago=2)
    session.set_reward(old.reward[[0, 1, 3], 2], steps_ago=2, streams=[0, 1, 3])
    for t in range(5):
        expected = act(fresh, new, t)
        if t > 1:
            session.set_reward(new.reward[2, t - 2].item(), steps_ago=2, streams=2)
        reward_B = torch.zeros(STREAMS)
        answer = session.act(new.obs[:, t], reward=reward_B, action=new.action[:, max(t, 1) - 1])
        assert torch.equal(answer[2], expected[2]), t


def test_copies_and_the_callers_arrays_share_no_rewards() -> None:
    spec = replace(WEIGHTS, reward_lag=2)
    policy, told = build_random("uat", spec, dtype=torch.float32), episodes(spec)
    session, late_B = Session(policy, streams=STREAMS), np.ones(STREAMS, dtype=np.float32)
    for t in range(3):
        act(session, told, t)
    given = told.reward[:, 1].clone()
    copies = [copy.copy(session), copy.deepcopy(session), pickle.loads(pickle.dumps(session))]
    session.set_reward(late_B, steps_ago=2)
    late_B[:] = 99
    answers = [act(twin, told, 3) for twin in copies]
    assert all(torch.equal(answers[0], answer) for answer in answers)
    changed = act(session, told, 3)
    assert not torch.equal(changed, answers[0])
    corrected = told.map(torch.clone)
    corrected.reward[:, 1] = 1
    assert torch.equal(changed, in_time(Session(policy, streams=STREAMS), corrected.map(lambda x: x[:, :4]))[:, 3])
    assert torch.equal(told.reward[:, 1], given)


# ---------------------------------------------------------------- refusals


def going(lag: int, steps: int = 5, streams: int = STREAMS) -> Session:
    spec = replace(WEIGHTS, reward_lag=lag)
    session = Session(build_random("uat", spec, dtype=torch.float32), streams=streams)
    told = random_trajectory(spec, episodes=streams, masked=False, whole=True)
    for t in range(steps):
        reward = None if t == 0 and lag else told.reward[:, t]
        session.act(told.obs[:, t], reward=reward)
    return session


@pytest.mark.parametrize(
    ("lag", "given", "said"),
    [
        (2, {"steps_ago": 3}, r"reward of step 2 of stream 0 was delivered at step 4 \(reward_lag=2\).* at most 2 "),
        (1, {"steps_ago": 2}, r"step 3 of stream 0 was delivered at step 4 \(reward_lag=1\).* to the call of `act`"),
        (0, {"steps_ago": 1}, r"step 4 of stream 0 was delivered at step 4 \(reward_lag=0\).* replay the episode"),
        (2, {"steps_ago": 1}, "the next call of `act` takes the reward of the last step"),
        (9, {"steps_ago": 6}, "stream 0 has taken 5 steps of its episode"),
        (2, {"steps_ago": 0}, "steps_ago=0 must"),
        (2, {"steps_ago": True}, "steps_ago=True must be int"),
        (2, {"steps_ago": 2.0}, r"steps_ago=2\.0 must be int"),
        (2, {"steps_ago": 2, "reward": [1.0] * 3}, r"reward: expected shape \(4,\), got \(3,\)"),
        (2, {"steps_ago": 2, "reward": [1.0, 2.0], "streams": [1, 2, 3]}, r"reward: expected shape \(3,\), got \(2,\)"),
        (2, {"steps_ago": 2, "reward": [0.0, float("nan"), 0, 0]}, "reward: expected finite numbers, got nan"),
        (2, {"steps_ago": 2, "reward": [1e30] * 4}, "reward: expected numbers from -2e"),
        (2, {"steps_ago": 2, "reward": ["a"] * 4}, "reward: expected numbers, got list"),
        (2, {"steps_ago": 2, "streams": [4]}, r"streams: streams must lie in \[0, 4\), got \[4\]"),
        (2, {"steps_ago": 2, "streams": [1, 1], "reward": [1.0, 2.0]}, "streams: expected different stream numbers"),
    ],
)  # fmt: skip
def test_what_cannot_be_set_says_why_and_changes_nothing(lag: int, given: dict[str, Any], said: str) -> None:
    session = going(lag)
    before = [x.copy() for x in session._rewards]
    with pytest.raises(ValueError, match=said):
        session.set_reward(**{"reward": [1.0] * STREAMS, **given})
    assert all(np.array_equal(x, y) for x, y in zip(before, session._rewards, strict=True))


def test_one_stream_takes_a_plain_number() -> None:
    one, many = going(3, streams=1), going(3)
    one.set_reward(2.5, steps_ago=3)
    many.set_reward(2.5, steps_ago=2, streams=1)
    many.set_reward(np.empty(0), steps_ago=2, streams=[])
    assert one._rewards[0].tolist() == [2.5]
    assert many._rewards[1][1] == 2.5
    assert (many._rewards[1] == 2.5).sum() == 1
