"""DT: order of tokens, their attention, and the content of feedback tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests import reference
from tests.builders import (
    PRECISIONS,
    SPECS,
    build,
    build_random,
    crossed,
    largest,
    moments,
    random_batch,
    random_trajectory,
    stream,
    with_other_feedback,
)
from uat.episode import Batch, Trajectory
from uat.methods.dt import DT
from uat.spec import Discrete, Spec, Vector

every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
LENGTHS = {"2T": False, "3T": True}
both_lengths = pytest.mark.parametrize("include_actions", LENGTHS.values(), ids=LENGTHS)
seeds = st.integers(0, 2**31)
POISON = 1e18


def random_dt(spec: Spec, include_actions: bool, **settings: Any) -> DT:
    policy = build_random("dt", spec, include_actions=include_actions, **settings)
    assert isinstance(policy, DT)
    return policy


def assert_same_logits(found: Tensor, expected: Tensor) -> None:
    atol = 1e-10 if found.dtype == torch.float64 else 1e-5 * largest(expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


# ---------------------------------------------------------------- the equations


def tokens_of(w: reference.Weights, policy: DT, batch: Batch, b: int) -> tuple[list[Tensor], list[int]]:
    """Return x of every token of one episode, and the indices of observations."""
    start, earned = 0 if batch.start is None else int(batch.start[b]), torch.zeros((), dtype=torch.float64)
    x, seen_at = [], []
    for t in range(batch.valid.shape[1]):
        if policy.config.include_actions and t > 0:
            x.append(action_of(w, batch.prev_action[b, t]) + w["backbone.positions"][start + t - 1])
        r = batch.prev_reward[b, t].double()
        earned = earned + r
        x.append(w["feedback.weight"][:, 0] * r + w["feedback.weight"][:, 1] * earned * policy.return_scale)
        x[-1] = x[-1] + w["feedback.bias"] + w["backbone.positions"][start + t]
        seen_at.append(len(x))
        x.append(reference.embed(w, batch.obs[b, t]) + w["backbone.positions"][start + t])
    return [reference.layer_norm(w, "backbone.norm", x_i) for x_i in x], seen_at


def action_of(w: reference.Weights, a: Tensor) -> Tensor:
    if "action.weight" in w:
        return reference.one_hot(a, len(w["action.weight"])) @ w["action.weight"]
    return w["action.linear.weight"] @ a.double()


def expected_logits(policy: DT, batch: Batch) -> Tensor:
    w, rows = {name: p.double() for name, p in policy.named_parameters()}, []
    for b in range(len(batch.valid)):
        x, seen_at = tokens_of(w, policy, batch, b)
        for layer in range(policy.config.num_layers):
            x = reference.block(w, layer, policy.config.num_heads, x, None, None)
        h = [reference.layer_norm(w, "backbone.last_norm", x[i]) for i in seen_at]
        rows.append(torch.stack([w["head.linear.weight"] @ h_t + w["head.linear.bias"] for h_t in h]))
    logits = torch.stack(rows)
    return logits if batch.allowed is None else logits.masked_fill(~batch.allowed, -torch.inf)


@every_spec
@both_lengths
@given(seed=seeds, steps=st.integers(1, 7), start=st.integers(0, 4))
def test_parallel_pass_equals_the_equations(
    include_actions: bool, spec: Spec, seed: int, steps: int, start: int
) -> None:
    policy = random_dt(spec, include_actions, seed=seed, max_positions=12, return_scale=0.5)
    batch = random_batch(spec, episodes=2, steps=steps, seed=seed)
    batch.start = torch.tensor([start, 5 - start])
    assert_same_logits(policy.logits(batch), expected_logits(policy, batch))


# ---------------------------------------------------------------- who sees whom


def moved(before: Tensor, after: Tensor) -> list[int]:
    """Indices along the second axis with a change, which must be equal in all episodes."""
    changed_BT = (before != after).any(-1)
    assert (changed_BT == changed_BT[:1]).all()
    return changed_BT[0].nonzero()[:, 0].tolist()


def with_another(batch: Batch, name: str, t: int) -> Batch:
    """Return a copy of the batch with another observation, reward or action at t."""
    value = getattr(batch, name)
    other = value[:, t] + 0.5 if value.is_floating_point() else (value[:, t] + 1) % 4
    return replace(batch, **{name: torch.cat([value[:, :t], other[:, None], value[:, t + 1 :]], 1)})


def test_tokens_are_interleaved_as_told() -> None:
    """Each input changes its own token; a reward also changes later returns."""
    spec = SPECS["vector-discrete"]
    batch, steps = random_batch(spec, whole=True), range(spec.steps)
    for include_actions, per_step in ((False, 2), (True, 3)):
        policy = random_dt(spec, include_actions)
        before = policy.sequence(batch)
        assert before.shape[1] == (2 * spec.steps if per_step == 2 else 3 * spec.steps - 1)
        for t in steps:
            assert moved(before, policy.sequence(with_another(batch, "obs", t))) == [per_step * t + 1]
            later_returns = [per_step * s for s in steps[t:]]
            assert moved(before, policy.sequence(with_another(batch, "prev_reward", t))) == later_returns
            its_action = [3 * t - 1] if include_actions and t > 0 else []  # the first step has none before it
            assert moved(before, policy.sequence(with_another(batch, "prev_action", t))) == its_action


@every_spec
@both_lengths
def test_every_token_is_seen_from_itself_on_and_by_none_before(include_actions: bool, spec: Spec) -> None:
    policy = random_dt(spec, include_actions)
    x = policy.sequence(random_batch(spec, whole=True))
    before = policy.backbone.attend(x)
    for i in range(x.shape[1]):
        other = x.clone()
        other[:, i] += torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype)
        assert moved(before, policy.backbone.attend(other)) == list(range(i, x.shape[1]))


@both_lengths
@pytest.mark.parametrize("way", ["at once", "step by step"])
def test_every_input_changes_exactly_the_decisions_that_may_know_it(include_actions: bool, way: str) -> None:
    spec = SPECS["vector-discrete"]
    policy, batch = random_dt(spec, include_actions), random_batch(spec, whole=True)

    @torch.no_grad()
    def decide(told: Batch) -> Tensor:
        return policy.logits(told) if way == "at once" else stream(policy, told)

    before = decide(batch)
    for t in range(spec.steps):
        from_now = list(range(t, spec.steps))
        assert moved(before, decide(with_another(batch, "obs", t))) == from_now
        assert moved(before, decide(with_another(batch, "prev_reward", t))) == from_now
        knows_it = include_actions and t > 0
        assert moved(before, decide(with_another(batch, "prev_action", t))) == (from_now if knows_it else [])


@both_lengths
def test_oldest_reward_is_seen_at_the_end(include_actions: bool) -> None:
    """This holds even if the next reward cancels it, so that no later return shows it."""
    policy = random_dt(SPECS["vector-discrete"], include_actions)
    batch = random_batch(policy.spec, whole=True)
    other = batch.prev_reward.clone()
    other[:, 1] += 0.5
    other[:, 2] -= 0.5
    assert not torch.equal(policy.logits(batch)[:, -1], policy.logits(replace(batch, prev_reward=other))[:, -1])


@every_spec
@both_lengths
def test_dt_sees_actions_when_it_includes_them(include_actions: bool, spec: Spec) -> None:
    policy, trajectory = random_dt(spec, include_actions), random_trajectory(spec, whole=True)
    assert policy.sees == ({"action", "reward"} if include_actions else {"reward"})
    before, after = (
        policy.logits(spec.clock.batch(each)) for each in (trajectory, with_other_feedback(trajectory, reward=False))
    )
    assert torch.equal(before, after) != include_actions
    assert torch.equal(before[:, 0], after[:, 0])


@every_spec
@both_lengths
def test_attention_runs_over_tokens(include_actions: bool, spec: Spec) -> None:
    policy, batch = random_dt(spec, include_actions), random_batch(spec)
    seen = policy.trace(batch).attention_LBHTT
    tokens = policy.sequence(batch).shape[1]
    assert seen.shape == (2, len(batch.valid), 3, tokens, tokens)
    torch.testing.assert_close(seen.sum(-1), torch.ones_like(seen[..., 0]), rtol=0, atol=1e-12)
    assert seen.triu(1).abs().max() == 0


# ---------------------------------------------------------------- what feedback says


def told_by(spec: Spec, trajectory: Trajectory) -> list[list[tuple[float, float]]]:
    """Return the reward that arrives at each step and the running sum, from the clock's definition."""
    rows = []
    for rewards in trajectory.reward.double().tolist():
        arrived = [0.0] * spec.reward_lag + [r * spec.reward_scale for r in rewards]
        arrived = arrived[: len(rewards)]
        rows.append([(arrived[t], sum(arrived[: t + 1])) for t in range(len(rewards))])
    return rows


@pytest.mark.parametrize(
    ("include_actions", "spec", "return_scale"), crossed(pytest.mark.slow, LENGTHS, SPECS, (0.25, 1.0, None))
)
def test_return_so_far_is_the_running_sum(include_actions: bool, spec: Spec, return_scale: float | None) -> None:
    policy = random_dt(spec, include_actions, return_scale=return_scale)
    trajectory = random_trajectory(spec, whole=True)
    received: list[Tensor] = []
    policy.feedback.register_forward_pre_hook(lambda _, inputs: received.append(inputs[0]))
    batch = spec.clock.batch(trajectory)
    policy.features(batch)
    stream(policy, batch)
    expected = torch.tensor(told_by(spec, trajectory), dtype=torch.float64)
    expected[..., 1] *= return_scale or 1 / spec.steps
    torch.testing.assert_close(received[0], expected, rtol=0, atol=1e-5)  # feedback has rewards in single precision
    torch.testing.assert_close(torch.stack(received[1:], 1), received[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_return_scale_must_be_positive(scale: float) -> None:
    with pytest.raises(ValueError, match=f"return_scale={scale}"):
        build("dt", SPECS["vector-discrete"], return_scale=scale)


# ---------------------------------------------------------------- streaming


@pytest.mark.parametrize(
    ("include_actions", "spec", "dtype", "streams"), crossed(pytest.mark.slow, LENGTHS, SPECS, PRECISIONS, (3, 1, 65))
)
def test_streaming_equals_the_parallel_pass(
    include_actions: bool, spec: Spec, dtype: torch.dtype, streams: int
) -> None:
    policy = random_dt(spec, include_actions, dtype=dtype)
    batch = random_batch(spec, episodes=streams)
    with torch.no_grad():
        assert_same_logits(stream(policy, batch), policy.logits(batch))


@both_lengths
@pytest.mark.parametrize("at", [1, 2, 5])
def test_stream_restarted_in_mid_episode_is_a_fresh_episode(include_actions: bool, at: int) -> None:
    """Stream 1 restarts at step `at`, over slots with its past; the other streams continue."""
    spec = SPECS["items-weights"]
    policy = random_dt(spec, include_actions)
    going, fresh = (random_batch(spec, seed=seed, whole=True) for seed in (1, 2))
    restarted, logits, state = torch.tensor([False, True, False]), [], policy.init_state(3, spec.steps, "cpu")
    anew = list(moments(fresh))
    with torch.no_grad():
        for t, step in enumerate(moments(going)):
            if t >= at:
                for name in ("obs", "prev_action", "prev_reward", "first", "allowed"):
                    getattr(step, name)[restarted] = getattr(anew[t - at], name)[restarted]
            logits_BA, state = policy.step(state, step)
            logits.append(logits_BA)
        found, ours = torch.stack(logits, 1), policy.logits(random_batch(spec, seed=1, whole=True))
        theirs = policy.logits(random_batch(spec, seed=2, whole=True))
    assert_same_logits(found[[0, 2]], ours[[0, 2]])
    assert_same_logits(found[1, :at], ours[1, :at])
    assert_same_logits(found[1, at:], theirs[1, : spec.steps - at])


@both_lengths
def test_slots_past_the_length_are_never_read(include_actions: bool) -> None:
    policy = random_dt(SPECS["vector-discrete"], include_actions, max_positions=20)
    batch, found = random_batch(policy.spec), []
    for filling in (0.0, POISON):
        state, logits = policy.init_state(len(batch.valid), 10, "cpu"), []
        state.cache.kv_L2BHSE.fill_(filling)
        with torch.no_grad():
            for step in moments(batch):
                logits_BA, state = policy.step(state, step)
                logits.append(logits_BA)
        found.append(torch.stack(logits, 1))
    assert torch.equal(*found)


@both_lengths
def test_cache_holds_the_tokens_of_each_step(include_actions: bool) -> None:
    policy = random_dt(SPECS["vector-discrete"], include_actions)
    batch = random_batch(policy.spec)
    state, per_step = policy.init_state(len(batch.valid), policy.spec.steps, "cpu"), 3 if include_actions else 2
    assert state.cache.capacity == per_step * policy.spec.steps
    with torch.no_grad():
        for t, step in enumerate(moments(batch), start=1):
            _, state = policy.step(state, step)
            assert state.cache.length_B.tolist() == [per_step * t - include_actions] * len(batch.valid)


# ---------------------------------------------------------------- positions, with action tokens


def test_tokens_of_a_step_share_its_position() -> None:
    """With all other weights zero, tokens of one step are equal, and those of different steps differ."""
    policy = random_dt(SPECS["vector-discrete"], include_actions=True, max_positions=12)
    batch = replace(random_batch(policy.spec), start=torch.tensor([0, 2, 5]))
    assert policy.action is not None
    with torch.no_grad():
        for part in (policy.feedback, policy.action, policy.backbone.encoder):
            for parameter in part.parameters():
                parameter.zero_()
        sequence = policy.sequence(batch)
        for b, start in enumerate((0, 2, 5)):
            rows = policy.backbone.norm(policy.backbone.positions)[start : start + policy.spec.steps]
            assert torch.equal(sequence[b], rows.repeat_interleave(3, 0)[:-1])


# ---------------------------------------------------------------- parameters


def count(policy: torch.nn.Module) -> int:
    return sum(p.numel() for p in policy.parameters())


@every_spec
@both_lengths
def test_overhead_over_vanilla_is_the_formula(include_actions: bool, spec: Spec) -> None:
    vanilla, d = build("vanilla", spec), 12
    actions = spec.action.count * d if include_actions else 0
    assert count(random_dt(spec, include_actions)) - count(vanilla) == 3 * d + actions


def test_parameter_counts() -> None:
    """The count differs from the published 102,660, which leaves no room for 61 learned positions."""
    spec = Spec(obs=Vector(10), action=Discrete(4), horizon=60)
    sizes: dict[str, Any] = {"d_model": 64, "num_heads": 4, "num_layers": 3, "d_ff": 128}
    policy = random_dt(spec, include_actions=False, **sizes)
    assert count(policy) == 105_156
    assert count(random_dt(spec, include_actions=True, **sizes)) == 105_156 + 4 * 64
    left = 102_660 - count(policy.backbone.blocks) - count(policy.head)
    assert left == 40 * 64 < policy.backbone.positions.numel() == 61 * 64
