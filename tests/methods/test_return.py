"""The return so far as a third channel of UAT's feedback."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.builders import ALL_SPECS, SPECS, build, build_random, random_batch, random_trajectory, stream, vanilla_of
from uat.engines import plan, plan_session
from uat.episode import Batch, Told
from uat.methods.uat import UAT, UATConfig
from uat.spec import Spec

EXACT: dict[str, Any] = {"rtol": 0, "atol": 1e-10}
every_lag = pytest.mark.parametrize("lag", [0, 1, 3])


def spec_of(name: str = "vector-discrete", lag: int = 1) -> Spec:
    return replace(ALL_SPECS[name], reward_lag=lag)


def informed(spec: Spec, **settings: Any) -> UAT:
    policy = build_random("uat", spec, **{"use_return": True, **settings})
    assert isinstance(policy, UAT)
    return policy


@torch.no_grad()
def parallel(policy: Any, batch: Batch) -> Tensor:
    return policy.logits(batch)


def first_weight(policy: UAT) -> Tensor:
    """The encoder's first matrix, whose last column reads the return."""
    return next(policy.utility.encoder.mlp.parameters())


# ---------------------------------------------------------------- what it is


@pytest.mark.parametrize("scale", [None, 0.25])
@every_lag
def test_the_third_channel_is_the_running_sum_of_what_the_clock_delivers(lag: int, scale: float | None) -> None:
    """Added up one reward at a time; the clock delays and scales them first."""
    spec = replace(spec_of(lag=lag), reward_scale=3.0)
    policy, trajectory = informed(spec, return_scale=scale), random_trajectory(spec, whole=True)
    batch = spec.clock.batch(trajectory)
    first, second = (weight.detach() for weight in policy.utility.encoder.mlp.parameters())
    with torch.no_grad():
        rho_BTD, regime = policy.gates(batch).rho, policy.utility.regime.weight
        for b in range(len(batch.obs)):
            ubar_U, earned = torch.zeros(policy.config.d_utility, dtype=torch.float64), 0.0
            for t in range(spec.steps):
                reward = 3.0 * trajectory.reward[b, t - lag].item() if t >= lag else 0.0
                earned += reward
                a = policy.utility.encoder.action(batch.prev_action[b, t])
                channels = torch.tensor([reward, earned * (scale or 1 / spec.steps)], dtype=torch.float64)
                u_U = second @ (first @ torch.cat([a, channels])).relu()
                ubar_U = policy.config.feedback_decay * ubar_U + (1 - policy.config.feedback_decay) * u_U
                # rewards are single precision before the clock
                torch.testing.assert_close(rho_BTD[b, t], torch.tanh(regime @ ubar_U), rtol=0, atol=1e-6)


def test_it_costs_one_column_and_sees_what_uat_sees() -> None:
    own, plain = (build("uat", spec_of(), use_return=on) for on in (True, False))
    size, other = (sum(p.numel() for p in policy.parameters()) for policy in (own, plain))
    assert size - other == own.config.d_hidden
    assert own.sees == plain.sees == {"action", "reward"}


def test_a_policy_that_ignores_the_channel_is_the_one_without_it() -> None:
    own, batch = informed(spec_of()), random_batch(spec_of())
    plain = build_random("uat", spec_of())
    weights = own.state_dict()
    weights["utility.encoder.mlp.0.weight"] = weights["utility.encoder.mlp.0.weight"][:, :-1]
    plain.load_state_dict(weights)
    assert not torch.allclose(parallel(own, batch)[:, 2:], parallel(plain, batch)[:, 2:])
    with torch.no_grad():
        first_weight(own)[:, -1] = 0.0
    torch.testing.assert_close(parallel(own, batch), parallel(plain, batch), **EXACT)


def test_no_feedback_is_vanilla() -> None:
    policy, batch = informed(spec_of()), random_batch(spec_of())
    batch = replace(batch, prev_action=torch.full_like(batch.prev_action, -1), prev_reward=batch.prev_reward * 0)
    assert torch.equal(parallel(policy, batch), parallel(vanilla_of(policy), batch))
    assert torch.equal(stream(policy, batch), stream(vanilla_of(policy), batch))


# ---------------------------------------------------------------- streaming and time


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"context": 3},
        {"positions": "rotary", "context": 4},
        {"tokens": "transition"},
        {"tokens": "two"},
        {"nonlinear": False},
        {"modulates_queries": False},
        {"use_action": False},
    ],
    ids=str,
)
@every_lag
def test_streaming_equals_the_parallel_pass(lag: int, settings: dict[str, Any]) -> None:
    policy = informed(spec_of(lag=lag), **settings)
    batch = random_batch(policy.spec, episodes=4)
    torch.testing.assert_close(stream(policy, batch), parallel(policy, batch), **EXACT)


@given(seed=st.integers(0, 2**31), name=st.sampled_from(sorted(ALL_SPECS)), lag=st.integers(0, 4))
def test_any_problem_streams_as_it_learns(seed: int, name: str, lag: int) -> None:
    policy = informed(spec_of(name, lag), num_layers=1)
    batch = random_batch(policy.spec, seed=seed)
    torch.testing.assert_close(stream(policy, batch), parallel(policy, batch), **EXACT)


@pytest.mark.parametrize("context", [None, 3])
@every_lag
def test_a_stream_that_restarts_has_earned_nothing(lag: int, context: int | None) -> None:
    policy = informed(spec_of(lag=lag), context=context)
    batch = random_batch(policy.spec, episodes=2, whole=True, seed=3)
    expected, state = parallel(policy, batch), policy.init_state(2, 7, "cpu")
    with torch.no_grad():
        for t in range(4):
            _, state = policy.step(state, batch.step(t))
        for t in range(4, policy.spec.steps):
            both, again = batch.step(t).map(torch.clone), batch.step(t - 4)
            for name in ("obs", "prev_action", "prev_reward", "first"):
                getattr(both, name)[1] = getattr(again, name)[1]
            logits, state = policy.step(state, both)
            torch.testing.assert_close(logits[0], expected[0, t], **EXACT)
            torch.testing.assert_close(logits[1], expected[1, t - 4], **EXACT)


def test_streams_are_taken_and_put_with_their_returns() -> None:
    policy, batch = informed(spec_of()), random_batch(spec_of(), episodes=3, whole=True)
    expected, state, rows = parallel(policy, batch), policy.init_state(3, 7, "cpu"), torch.tensor([2, 0])
    with torch.no_grad():
        for t in range(4):
            _, state = policy.step(state, batch.step(t))
        other = policy.init_state(3, 7, "cpu")
        other.put(torch.tensor([1, 2]), state.take(rows))
        for t in range(4, 7):
            logits, other = policy.step(other, batch.map(lambda x: x[[1, 2, 0]]).step(t))
            torch.testing.assert_close(logits[1:], expected[rows, t], **EXACT)


@pytest.mark.parametrize("way", [parallel, stream])
@every_lag
def test_a_reward_changes_no_output_before_it_arrives_and_all_later_ones(lag: int, way: Any) -> None:
    """Later ones also far behind: the sum keeps what the regime state forgets."""
    spec = spec_of(lag=lag)
    policy = informed(spec, feedback_decay=0.0, modulates_keys_values=False)
    trajectory = random_trajectory(spec, whole=True)
    before = way(policy, spec.clock.batch(trajectory))
    for t in range(spec.steps):
        changed = replace(trajectory, reward=trajectory.reward.clone())
        changed.reward[:, t] += 1.0
        after = way(policy, spec.clock.batch(changed))
        assert torch.equal(after[:, : t + lag], before[:, : t + lag])
        seen = max(t + lag, 1)  # queries choose nothing among a single key
        assert (after[:, seen:] != before[:, seen:]).any(-1).all()


def test_the_return_is_that_of_the_corrupted_channel() -> None:
    """A channel that carries other rewards leaves the true ones without influence."""
    spec = spec_of()
    policy, trajectory = informed(spec), random_trajectory(spec, whole=True)
    told = Told(action=trajectory.action, reward=-trajectory.reward)
    found = parallel(policy, spec.clock.batch(replace(trajectory, told=told)))
    expected = parallel(policy, spec.clock.batch(replace(trajectory, reward=-trajectory.reward)))
    assert torch.equal(found, expected)
    assert not torch.equal(found, parallel(policy, spec.clock.batch(trajectory)))


def test_the_loss_reaches_the_channel() -> None:
    policy, batch = informed(spec_of()), random_batch(spec_of(), episodes=8)
    total, count = policy.loss(batch)["imitation"]
    (total / count).backward()
    gradient = first_weight(policy).grad
    assert gradient is not None
    assert (gradient[:, -1] != 0).any()


# ---------------------------------------------------------------- engines and bad input


def test_engines_say_why_they_take_the_plain_step() -> None:
    policy = build_random("uat", spec_of(), dtype=torch.float32, use_return=True)
    reason = "gates that know the return so far are computed by the plain engine alone"
    assert (plan_session(policy, 1).name, plan_session(policy, 1).refused) == ("plain", reason)
    assert plan(policy).refused == f"no fused step: {reason}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_reward": False}, "the return so far is a sum of rewards"),
        ({"binding": "late"}, "late gates hold the feedback on one step"),
        ({"tokens": "transition", "token_feedback": "encoder"}, "the encoder of tokens has no channel for the return"),
        ({"return_scale": 0.0}, "return_scale=0.0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        UATConfig(use_return=True, **settings)


def test_an_endless_problem_needs_a_scale() -> None:
    spec = replace(SPECS["vector-discrete"], horizon=None)
    settings: dict[str, Any] = {"positions": "rotary", "context": 4, "d_model": 12}
    with pytest.raises(ValueError, match="return_scale is unset, which means one over the horizon"):
        UAT(spec, UATConfig(use_return=True, **settings, num_heads=2))
    assert UAT(spec, UATConfig(use_return=True, return_scale=0.1, **settings, num_heads=2)).endless
