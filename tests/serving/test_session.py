"""A session runs the same policy under the same clock as training, and names what is wrong with its inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.builders import ALL_SPECS, SIZES, SPECS, build_random, largest, random_trajectory, randomise
from uat.acting import rollout
from uat.distributions import choose
from uat.domains.darkroom import DarkRoom, DarkRoomConfig
from uat.engines import NumpyEngine
from uat.episode import Step, Trajectory
from uat.methods import Policy
from uat.methods.uat import UAT, UATConfig
from uat.serving.session import Session
from uat.spec import Discrete, Items, Named, Spec

STREAMS = 3
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
every_lag = pytest.mark.parametrize("lag", [0, 1, 3])
every_path = pytest.mark.parametrize("path", ["fast", "cached"])
Path = Literal["fast", "cached"]


class Listening:
    """A session that records its logits."""

    def __init__(self, policy: Policy, path: Path, monkeypatch: pytest.MonkeyPatch, *, streams: int = STREAMS) -> None:
        self.session, self.spec, self.logits = Session(policy, streams=streams, path=path), policy.spec, []
        engine, name = self.session._engine, "decide" if path == "fast" else "step"
        agent: Any = engine.numpy if isinstance(engine, NumpyEngine) else engine
        answer = getattr(agent, name)

        def listen(*told: Any) -> Any:
            found = answer(*told)
            self.logits.append(torch.from_numpy(found) if path == "fast" else found[0])
            return found

        monkeypatch.setattr(agent, name, listen)

    def tell(self, trajectory: Trajectory, t: int) -> Tensor:
        """Pass step t of these episodes to the session, as a user would."""
        earned = t if self.spec.reward_lag == 0 else t - 1  # logs know the present reward, simulators the last one
        return self.session.act(
            plausible(trajectory.obs[:, t]),
            reward=None if earned < 0 else trajectory.reward[:, earned],
            action=None if t == 0 else trajectory.action[:, t - 1],
            allowed=None if trajectory.allowed is None else trajectory.allowed[:, t],
        )


def plausible(obs: Tensor) -> Tensor:
    """Replace the id -1, which occurs only in padding."""
    return obs if obs.is_floating_point() else obs.clamp_min(0)


def episodes(spec: Spec, seed: int) -> Trajectory:
    trajectory = random_trajectory(spec, episodes=STREAMS, seed=seed, whole=True)
    return replace(trajectory, obs=plausible(trajectory.obs))


@torch.no_grad()
def at_once(policy: Policy, trajectory: Trajectory) -> Tensor:
    return policy.logits(policy.spec.clock.batch(trajectory))


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * largest(expected))


# ---------------------------------------------------------------- the same decisions


@every_path
@every_lag
@every_spec
def test_session_equals_the_parallel_pass(spec: Spec, lag: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(spec, reward_lag=lag, reward_scale=2.5)
    policy, trajectory = build_random("uat", spec, dtype=torch.float32), episodes(spec, seed=1)
    listening, expected = Listening(policy, path, monkeypatch), at_once(policy, trajectory)
    answers = [listening.tell(trajectory, t) for t in range(spec.steps)]
    assert_close(torch.stack(listening.logits, 1), expected)
    torch.testing.assert_close(torch.stack(answers, 1), choose(expected, spec))


@every_path
@every_lag
@every_spec
def test_restarted_stream_is_a_fresh_episode(spec: Spec, lag: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stream 1 restarts in mid-episode. The last reward of its old episode comes with its first step and is ignored."""
    spec, at = replace(spec, reward_lag=lag), 4
    policy, old, new = build_random("uat", spec, dtype=torch.float32), episodes(spec, seed=2), episodes(spec, seed=3)
    going, fresh = at_once(policy, old), at_once(policy, new)
    listening = Listening(policy, path, monkeypatch)
    for t in range(at):
        listening.tell(old, t)
    listening.session.restart(1)
    told = old.map(torch.clone)
    for name in ("obs", "reward", "allowed"):
        if getattr(told, name) is not None:
            getattr(told, name)[1, at:] = getattr(new, name)[1, : spec.steps - at]
    told.action[1, at:] = new.action[1, : spec.steps - at]
    for t in range(at, spec.steps):
        listening.tell(told, t)
    found = torch.stack(listening.logits, 1)
    assert_close(found[[0, 2]], going[[0, 2]])
    assert_close(found[1, :at], going[1, :at])
    assert_close(found[1, at:], fresh[1, : spec.steps - at])


@every_path
@pytest.mark.parametrize("method", ["vanilla", "uat"])
def test_session_equals_a_rollout(method: str, path: Path) -> None:
    """Compare a session and a rollout in the same worlds over several episodes, with the session's own actions."""
    domain = DarkRoom(DarkRoomConfig(horizon=8))
    simulator = domain.simulator("test", "cpu")
    policy = build_random(method, domain.spec, dtype=torch.float32)
    session = Session(policy, streams=STREAMS, path=path)
    for episode in range(3):
        noise = simulator.noise(torch.arange(STREAMS) + episode * STREAMS, seed=4)
        expected = rollout(policy, simulator, noise)
        (world, obs), reward = simulator.reset(noise), None
        session.restart()
        for t in range(domain.spec.steps):
            action = session.act(obs.numpy(), reward=reward)
            assert action.tolist() == expected.action[:, t].tolist()
            after = simulator.step(world, action)
            world, obs, reward = after.world, after.obs, after.reward_B.tolist()


def test_what_was_really_done_replaces_the_answer() -> None:
    spec = SPECS["vector-weights"]
    policy, obs, reward = build_random("uat", spec, dtype=torch.float32), torch.zeros(1, 5), torch.zeros(1)
    told, untold = Session(policy), Session(policy)
    answer = told.act(obs)
    assert torch.equal(answer, untold.act(obs))
    assert torch.equal(told.act(obs, reward=reward, action=answer), untold.act(obs, reward=reward))
    other = torch.eye(4)[:1]
    assert not torch.equal(told.act(obs, reward=reward, action=other), untold.act(obs, reward=reward))


def test_session_plays_without_dropout_and_without_gradients() -> None:
    policy = build_random("uat", SPECS["vector-weights"], dtype=torch.float32, dropout=0.5).train()
    action = Session(policy).act(torch.zeros(1, 5))
    assert not policy.training
    assert not action.requires_grad


@torch.no_grad()
def test_a_policy_in_bfloat16_is_told_what_it_answered() -> None:
    policy = build_random("uat", SPECS["vector-weights"], dtype=torch.float32).bfloat16()
    session, obs, earned = Session(policy), torch.ones(1, 5), torch.ones(1)
    state, history = policy.init_state(1, 3, "cpu"), policy.spec.clock.begin(policy.spec.no_action(1))
    for t in range(3):
        logits, state = policy.step(state, history.step(obs))
        expected = choose(logits, policy.spec)
        history.add(expected, earned)
        answer = session.act(obs, reward=earned if t else None)
        assert answer.dtype == torch.bfloat16
        assert torch.equal(answer, expected)


@every_lag
def test_what_is_given_is_never_written_to(lag: int) -> None:
    spec = replace(SPECS["vector-weights"], reward_lag=lag)
    session = Session(build_random("uat", spec, dtype=torch.float32), streams=2)
    kept = []
    for t in range(5):
        obs, reward, action = torch.full((2, 5), float(t)), torch.full((2,), 1.0 + t), torch.eye(4)[:2].clone()
        kept.append((obs, reward, action))
        session.act(obs, reward=reward, action=action)
        session.restart(t % 2)
    for t, (obs, reward, action) in enumerate(kept):
        assert (obs == t).all()
        assert (reward == 1.0 + t).all()
        assert torch.equal(action, torch.eye(4)[:2])


@every_lag
def test_a_reward_written_over_later_is_still_the_reward_told(lag: int) -> None:
    spec = replace(SPECS["vector-weights"], reward_lag=lag)
    policy, obs, buffer = build_random("uat", spec, dtype=torch.float32), torch.ones(2, 5), torch.zeros(2)
    reusing, session = Session(policy, streams=2), Session(policy, streams=2)
    for t in range(6):
        answer = reusing.act(obs, reward=buffer.fill_(0.1 * t))
        buffer.fill_(-7.0)
        assert torch.equal(answer, session.act(obs, reward=torch.full((2,), 0.1 * t)))


@pytest.mark.parametrize(("streams", "fresh"), [(None, [0, 1]), (1, [1]), ([0], [0]), ([False, True], [1]), ([], [])])
def test_streams_restart_by_number_or_mask(streams: object, fresh: list[int]) -> None:
    session, obs = (
        Session(build_random("uat", SPECS["vector-weights"], dtype=torch.float32), streams=2),
        torch.ones(2, 5),
    )
    start = session.act(obs)
    session.act(obs, reward=[1.0, -1.0])
    session.restart(streams)
    again = session.act(obs, reward=[0.5, 0.5])
    assert [i for i in range(2) if torch.equal(again[i], start[i])] == fresh


@pytest.mark.parametrize("streams", [2, -1, [0.5], "a", [True]])
def test_a_stream_that_is_not_there_cannot_restart(streams: object) -> None:
    session = Session(build_random("uat", SPECS["vector-weights"], dtype=torch.float32), streams=2)
    with pytest.raises(ValueError, match="restart: "):
        session.restart(streams)


def test_answers_are_the_callers_to_keep() -> None:
    policy, obs = build_random("uat", SPECS["vector-weights"], dtype=torch.float32), torch.ones(1, 5)
    session, untouched = Session(policy), Session(policy)
    for _ in range(3):
        answer, expected = session.act(obs, reward=[0.5]), untouched.act(obs, reward=[0.5])
        assert torch.equal(answer, expected)
        answer.zero_()


def test_longer_sessions_need_more_capacity_or_a_restart() -> None:
    spec = SPECS["vector-discrete"]
    policy = build_random("uat", spec, dtype=torch.float32, max_positions=20)
    session, longer = Session(policy, streams=2), Session(policy, streams=2, capacity=20)
    told: dict[str, Any] = {"obs": torch.zeros(2, 5), "reward": [0.0, 0.0]}
    for _ in range(spec.steps):
        session.act(**told)
    with pytest.raises(ValueError, match=r"stream 0 has seen 7 steps, and the session holds 7"):
        session.act(**told)
    session.restart(0)
    with pytest.raises(ValueError, match=r"stream 1 has seen 7 steps, and the session holds 7"):
        session.act(**told)
    session.restart(1)
    session.act(**told)
    for _ in range(20):
        longer.act(**told)


# ---------------------------------------------------------------- what is refused


OBS_2 = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5], [0.5, 0.4, 0.3, 0.2, 0.1]])
OBS: dict[str, Any] = {
    "vector-discrete": np.zeros((2, 5)),
    "vector-weights": np.zeros((2, 5)),
    "items-discrete": [0, 1],
    "assets-weights": np.zeros((2, 3, 2)),
}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # spec, arguments of act, the message: field, expected, got
    ("vector-discrete", {"obs": np.zeros((2, 4))}, r"obs: expected shape \(2, 5\), got \(2, 4\)"),
    ("vector-discrete", {"obs": np.zeros(5)}, r"obs: expected shape \(2, 5\), got \(5,\)"),
    ("vector-discrete", {"obs": [[0, 0, 0, 0, np.nan]] * 2}, r"obs: expected finite .* got nan at \(0, 4\)"),
    ("vector-discrete", {"obs": [["a"] * 5] * 2}, r"obs: expected numbers, got list"),
    ("vector-discrete", {"obs": [[0.0], [0.0, 1.0]]}, r"obs: expected numbers, got list"),
    ("vector-discrete", {"obs": None}, r"obs: expected numbers, got NoneType"),
    ("assets-weights", {"obs": np.zeros((2, 2, 3))}, r"obs: expected shape \(2, 3, 2\), got \(2, 2, 3\)"),
    ("items-discrete", {"obs": [0.0, 1.0]}, r"obs: expected integer ids, got torch.float64"),
    ("items-discrete", {"obs": [True, False]}, r"obs: expected integer ids, got torch.bool"),
    ("items-discrete", {"obs": [0, 11]}, r"obs: ids must lie in \[0, 11\), got 11 at"),
    ("items-discrete", {"obs": [-2, 0]}, r"obs: ids must lie in .*0, 11\), got -2 at"),
    ("items-discrete", {"obs": [[0, 1]]}, r"obs: expected shape \(2,\), got \(1, 2\)"),
    ("vector-discrete", {"reward": 1.0}, r"reward: expected shape \(2,\), got \(\)"),
    ("vector-discrete", {"reward": [1.0, np.inf]}, r"reward: expected finite numbers, got inf at \(1,\)"),
    ("vector-discrete", {"reward": ["a", "b"]}, r"reward: expected numbers, got list"),
    ("vector-discrete", {"action": [0.0, 1.0]}, r"action: expected integer ids, got torch.float64"),
    ("vector-discrete", {"action": [0, 4]}, r"action: ids must lie in \[0, 4\), got 4 at"),
    ("vector-discrete", {"action": [0]}, r"action: expected shape \(2,\), got \(1,\)"),
    ("vector-weights", {"action": np.eye(3)[:2]}, r"action: expected shape \(2, 4\), got \(2, 3\)"),
    (
        "vector-weights",
        {"action": [[0.5, 0, 0, 0], [1, 0, 0, 0]]},
        r"action: .* sum to 1, got a sum of 0.5 .* at \(0,\)",
    ),
    ("vector-weights", {"action": [[2, -1, 0, 0], [1, 0, 0, 0]]}, r"action: weights must be non-negative .* got .*-1"),
    (
        "vector-discrete",
        {"allowed": np.ones((2, 4))},
        r"allowed: expected booleans of shape \(2, 4\), got torch.float64",
    ),
    ("vector-discrete", {"allowed": np.ones((1, 4), bool)}, r"allowed: expected .*\(2, 4\), got torch.bool .*\(1, 4\)"),
    ("vector-discrete", {"allowed": [[True], [True, False]]}, r"allowed: expected booleans"),
    ("vector-discrete", {"allowed": [["yes"] * 4] * 2}, r"allowed: expected booleans"),
    ("vector-discrete", {"allowed": np.zeros((2, 4), bool)}, r"allowed: every stream needs .*(got|stream) .*0"),
]
refused = pytest.mark.parametrize(
    ("name", "told", "message"), REFUSED, ids=[f"{next(iter(told))}-{row}" for row, (_, told, _) in enumerate(REFUSED)]
)


@refused
def test_bad_input_is_refused_with_field_seen_and_expected(name: str, told: dict[str, Any], message: str) -> None:
    session = Session(build_random("uat", SPECS[name], dtype=torch.float32), streams=2)
    with pytest.raises(ValueError, match=message):
        session.act(**{"obs": OBS[name], **told})


@refused
def test_refused_input_leaves_the_session_as_it_was(name: str, told: dict[str, Any], message: str) -> None:
    policy = build_random("uat", SPECS[name], dtype=torch.float32)
    session, untouched = Session(policy, streams=2), Session(policy, streams=2)
    for reward in (None, [0.3, -0.2], [0.1, 0.4]):
        with pytest.raises(ValueError):
            session.act(**{"obs": OBS[name], "reward": [5.0, 5.0], **told})
        assert torch.equal(
            session.act(OBS[name], reward=reward),
            untouched.act(OBS[name], reward=reward),
        )


@every_path
@pytest.mark.parametrize("lag", [1, 3])
def test_a_reward_left_out_after_the_first_step_is_refused(lag: int, path: Path) -> None:
    """A missing reward is not zero: it is refused in one sentence, and the session does not change."""
    policy = build_random("uat", replace(SPECS["vector-discrete"], reward_lag=lag), dtype=torch.float32)
    session, untouched, obs = Session(policy, streams=2, path=path), Session(policy, streams=2, path=path), OBS_2
    message = r"reward: expected .* in each of 2 streams, got None: UAT sees rewards, so only the first step of all"
    assert torch.equal(session.act(obs), untouched.act(obs))
    for reward in ([0.3, -0.2], [0.1, 0.4], [0.0, 1.0]):
        with pytest.raises(ValueError, match=message):
            session.act(obs)
        assert torch.equal(session.act(obs, reward=reward), untouched.act(obs, reward=reward))
    session.restart(0)
    with pytest.raises(ValueError, match=message):  # stream 1 is not at its first step, so it has a reward
        session.act(obs)
    session.restart(1)
    session.act(obs)


def test_a_reward_told_with_the_first_step_is_ignored() -> None:
    policy = build_random("uat", SPECS["vector-weights"], dtype=torch.float32)
    session, untold = Session(policy, streams=2), Session(policy, streams=2)
    assert torch.equal(session.act(OBS_2, reward=[5.0, -5.0]), untold.act(OBS_2))
    assert torch.equal(session.act(OBS_2, reward=[1.0, 0.0]), untold.act(OBS_2, reward=[1.0, 0.0]))


def test_logs_tell_a_reward_from_the_first_step_on() -> None:
    """With no lag the reward belongs to the step just logged, so the first step has a reward too."""
    session = Session(build_random("uat", replace(SPECS["vector-weights"], reward_lag=0), dtype=torch.float32))
    with pytest.raises(ValueError, match="got None: UAT sees rewards, so no step may leave it out"):
        session.act(torch.zeros(1, 5))
    assert not torch.equal(session.act(torch.zeros(1, 5), reward=[1.0]), session.act(torch.zeros(1, 5), reward=[-1.0]))


def test_a_policy_that_sees_no_rewards_needs_none() -> None:
    policy = build_random("vanilla", SPECS["vector-discrete"], dtype=torch.float32)
    session, told = Session(policy, streams=2), Session(policy, streams=2)
    for reward in ([1.0, 2.0], [0.5, -1.0]):
        assert torch.equal(session.act(OBS_2), told.act(OBS_2, reward=reward))


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor, lambda x: x], ids=["numpy", "torch", "lists"])
def test_arrays_tensors_and_lists_are_all_welcome(kind: Any) -> None:
    session = Session(build_random("uat", SPECS["vector-discrete"], dtype=torch.float32), streams=2)
    for told in ({}, {"reward": kind([0.5, 1.0]), "action": kind([1, 2]), "allowed": kind([[True] * 3 + [False]] * 2)}):
        action = session.act(kind([[0.1, 0.2, 0.3, 0.4, 0.5]] * 2), **told)
        assert action.shape == (2,)


@pytest.mark.parametrize("streams", [2, -1, [0, 5]])
def test_restart_of_an_unknown_stream_is_refused(streams: Any) -> None:
    session = Session(build_random("uat", SPECS["vector-discrete"]), streams=2)
    with pytest.raises(ValueError, match=r"restart: streams must lie in \[0, 2\), got"):
        session.restart(streams)


def test_a_session_needs_a_stream() -> None:
    with pytest.raises(ValueError, match="streams=0 must be at least 1"):
        Session(build_random("uat", SPECS["vector-discrete"]), streams=0)


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_session_needs_room(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"capacity={capacity} must be at least 1"):
        Session(build_random("uat", SPECS["vector-discrete"]), capacity=capacity)


# ---------------------------------------------------------------- the engine, by name


def test_a_session_names_its_engine_and_why_it_is_not_faster() -> None:
    policy = build_random("uat", SPECS["vector-discrete"], dtype=torch.float32)
    few, many = Session(policy, streams=2), Session(policy, streams=64)
    assert (few.engine, few.refused) == ("NumPy step", None)
    assert (many.engine, many.refused) == ("plain", "more than 8 streams are faster all at once")
    assert Session(policy, path="cached").refused is None  # as requested
    gated = Session(build_random("gtrxl", SPECS["vector-discrete"], dtype=torch.float32))
    assert (gated.engine, gated.refused) == ("plain", "GTrXL has no fast step")


@pytest.mark.parametrize("kind", ALL_SPECS)
def test_one_stream_takes_observations_without_its_axis(kind: str) -> None:
    """As a Gymnasium environment returns them; the action can go straight into `env.step`."""
    spec = ALL_SPECS[kind]
    policy = UAT(spec, UATConfig(**SIZES)).eval()
    played = random_trajectory(spec, episodes=1, whole=True)
    batched, plain = Session(policy), Session(policy)
    for t in range(4):
        obs = played.obs[:, t].clamp_min(0) if isinstance(spec.obs, Items) else played.obs[:, t]
        both: Any = obs if not isinstance(spec.obs, Named) else spec.obs.unpack(obs)
        if isinstance(both, dict):
            both["item"] = both["item"].clamp_min(0)
        one = {k: v[0].numpy() for k, v in both.items()} if isinstance(both, dict) else both[0].numpy()
        reward = None if t == 0 else 0.3
        expected = batched.act(both, reward=reward)
        action = plain.act(one, reward=reward)
        assert isinstance(action, np.ndarray | np.generic)
        assert action.shape == expected.shape[1:]
        assert np.array_equal(action, expected[0].numpy())


def test_a_mask_and_an_action_of_one_stream_need_no_axis_either() -> None:
    spec = ALL_SPECS["vector-discrete"]
    session = Session(UAT(spec, UATConfig(**SIZES)).eval())
    assert session.act(np.zeros(5), allowed=[False, False, True, False]) == 2
    assert session.act(np.zeros(5), reward=1.0, action=1, allowed=[False, True, False, False]) == 1
    with pytest.raises(ValueError, match="expected shape"):
        session.act(np.zeros(4), reward=1.0)


@pytest.mark.parametrize("kind", ["vector-discrete", "vector-box"])
@pytest.mark.parametrize("path", ["auto", "cached"])
def test_a_seed_samples_actions(kind: str, path: Any) -> None:
    """Sessions with one seed take the same actions, and many streams show the policy's distribution."""
    spec, streams = ALL_SPECS[kind], 400
    policy = randomise(UAT(spec, UATConfig(**SIZES)), 3).eval()
    obs = np.ones((streams, 5), np.float32)
    one, same, other = (Session(policy, streams=streams, path=path, seed=seed).act(obs) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    greedy = Session(policy, streams=streams, path=path).act(obs)
    assert len(greedy.unique(dim=0)) == 1
    if isinstance(spec.action, Discrete):
        step = Step(
            obs=torch.ones(1, 5),
            prev_action=spec.no_action(1),
            prev_reward=torch.zeros(1),
            first=torch.ones(1, dtype=torch.bool),
        )
        with torch.no_grad():
            share_A = policy.step(policy.init_state(1, 7, "cpu"), step)[0].softmax(-1)[0]
        counted_A = torch.bincount(torch.cat([one, other]), minlength=4) / (2 * streams)
        assert (counted_A - share_A).abs().max() < 0.07  # four deviations
    small = Session(policy, seed=1)
    assert small.act(obs[:1]).shape[0] == 1  # the NumPy step
