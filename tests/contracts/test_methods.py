"""Contract tests of every method of the registry, with random weights and every kind of spec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from tests.builders import (
    ALL_SPECS,
    LARGE,
    PAIRS,
    build,
    build_random,
    largest,
    moments,
    random_batch,
    random_observations,
    random_trajectory,
    served,
    stream,
    with_other_feedback,
)
from uat.config import TrainConfig
from uat.contracts import Agent
from uat.distributions import choose
from uat.episode import Batch, Trajectory
from uat.methods import METHODS, Policy, training_name
from uat.noise import gumbel
from uat.runs import load_policy, save_policy
from uat.spec import Box, Discrete, Spec
from uat.training.optimizing import rate_of

every_method = pytest.mark.parametrize("method", METHODS)
VARIANTS_MEET = ("vector-discrete", "items-discrete")
"""Problems that every entry meets by default; the others of an entry that only changes settings are slow."""


def marks(method: str, spec: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if METHODS[method].changes and spec not in VARIANTS_MEET else []


every_pair = pytest.mark.parametrize(
    ("method", "spec"),
    [
        pytest.param(method, ALL_SPECS[spec], id=f"{method}-{spec}", marks=marks(method, spec))
        for (method, spec), reason in PAIRS.items()
        if not reason
    ],
)
every_pair_and_precision = pytest.mark.parametrize(
    ("method", "spec", "dtype"),
    [
        *(
            pytest.param(method, ALL_SPECS[spec], torch.float64, id=f"{method}-{spec}-f64", marks=marks(method, spec))
            for (method, spec), reason in PAIRS.items()
            if not reason
        ),
        *(pytest.param(method, served(method), torch.float32, id=f"{method}-float32") for method in METHODS),
    ],
)
"""All pairs in double precision, which misses less; in single precision one problem of every method."""
positioned_methods = pytest.mark.parametrize(
    "method", [name for name in METHODS if "max_positions" in {f.name for f in fields(METHODS[name].config)}]
)

Episodes = TypeVar("Episodes", Batch, Trajectory)


def total_loss(policy: Policy, batch: Batch) -> Tensor:
    """The mean of every part of every phase, added up."""
    parts = [part for phase in policy.phases() for part in phase.loss(batch).values()]
    return torch.stack([total / count.clamp_min(1) for total, count in parts]).sum()


def gradients(policy: Policy, batch: Batch) -> dict[str, Tensor | None]:
    policy.zero_grad()
    total_loss(policy, batch).backward()
    return {name: parameter.grad for name, parameter in policy.named_parameters()}


@torch.no_grad()
def answers(policy: Policy, batch: Batch) -> Mapping[str, Tensor]:
    """Logits all at once and step by step."""
    return {"at once": policy.logits(batch), "step by step": stream(policy, batch)}


def repeated(episodes: Episodes, times: int) -> Episodes:
    """Return several copies of the episodes, one after the other."""
    return episodes.map(lambda x: x.repeat(times, *[1] * (x.dim() - 1)))


# ---------------------------------------------------------------- what is served


@pytest.mark.parametrize(("method", "spec"), [pair for pair, reason in PAIRS.items() if reason])
def test_a_problem_that_is_refused_is_refused_with_its_kind(method: str, spec: str) -> None:
    with pytest.raises(ValueError) as caught:
        build(method, ALL_SPECS[spec])
    assert str(ALL_SPECS[spec].action) in str(caught.value) or str(ALL_SPECS[spec].obs) in str(caught.value)


@every_method
def test_every_method_serves_some_problem_and_those_of_all_domains_serve_all(method: str) -> None:
    """All problems that have ids or weights to choose; a box is served where a distribution over it can be learnt."""
    reasons = {spec: reason for (name, spec), reason in PAIRS.items() if name == method}
    assert None in reasons.values()
    assert METHODS[method].domains is not None or {reasons[spec] for spec in ALL_SPECS if spec != "vector-box"} == {
        None
    }


# ---------------------------------------------------------------- learning


@every_pair
def test_loss_is_finite_and_reaches_every_parameter(method: str, spec: Spec) -> None:
    policy, batch = build_random(method, spec), random_batch(spec, episodes=8)
    assert total_loss(policy, batch).isfinite()
    for name, gradient in gradients(policy, batch).items():
        if not policy.get_parameter(name).requires_grad:
            assert gradient is None, f"{name} is not learnt, and has a gradient"
            continue
        assert gradient is not None, f"{name} has no gradient"
        assert gradient.isfinite().all(), f"{name} has a gradient that is not finite"
        assert gradient.abs().max() > 0, f"{name} has a zero gradient"


@every_pair
def test_every_parameter_learns_at_one_rate(method: str, spec: Spec) -> None:
    policy = build(method, spec)
    grouped = [id(p) for group in policy.parameter_groups().values() for p in group]
    assert sorted(grouped) == sorted(id(p) for p in policy.parameters() if p.requires_grad)
    for group in policy.parameter_groups():
        assert rate_of(group, policy, TrainConfig()) > 0


@every_method
def test_the_learner_holds_the_same_parameters(method: str) -> None:
    """The learner of a method trains the weights of the policy, before and after a move to another type."""
    spec = served(method)
    policy, batch = build_random(method, spec).to(torch.float32), random_batch(spec)
    assert type(policy.learner) is METHODS[training_name(method)].policy
    assert training_name(training_name(method)) == training_name(method)
    own, learnt = ({name: id(p) for name, p in each.named_parameters()} for each in (policy, policy.learner))
    assert own == learnt
    assert torch.equal(total_loss(policy, batch), total_loss(policy.learner, batch))


def may_mask(spec: Spec) -> bool:
    """Actions of a box have no numbers, and so no mask."""
    return not isinstance(spec.action, Box)


def garbage(spec: Spec, trajectory: Trajectory, field: str, kind: str) -> Tensor:
    """Return values for padding: random ones everywhere, or NaN in fields of floats."""
    generator, value = torch.Generator().manual_seed(99), getattr(trajectory, field)
    if kind == "nan" and value.is_floating_point():
        return torch.full_like(value, torch.nan)
    if field == "obs" and value.dtype == torch.long:
        return random_observations(spec, tuple(value.shape), generator)
    if value.dtype == torch.long:
        return torch.randint(-1, spec.action.count, value.shape, generator=generator)
    return torch.zeros_like(value) if value.dtype == torch.bool else 1e3 * torch.rand(value.shape, generator=generator)


PADDING = [("obs", "noise"), ("obs", "nan"), ("action", "noise"), ("reward", "noise"), ("reward", "nan")]
PADDING += [("target", "nan"), ("allowed", "all false")]


@every_pair
def test_padding_never_changes_a_loss(method: str, spec: Spec) -> None:
    """Each part of it, spoilt alone: neither the loss nor any gradient."""
    policy = build_random(method, spec)
    clean = random_trajectory(spec, episodes=6, masked=may_mask(spec))
    before = spec.clock.batch(clean)
    loss = total_loss(policy, before)
    expected = {name: g.clone() for name, g in gradients(policy, before).items() if g is not None}
    for field, kind in PADDING:
        if field == "allowed" and clean.allowed is None:
            continue
        value = getattr(clean, field)
        real = clean.valid.view(*clean.valid.shape, *[1] * (value.dim() - 2))
        dirty = replace(clean, **{field: torch.where(real, value, garbage(spec, clean, field, kind))})
        assert not torch.equal(value, getattr(dirty, field)), (field, kind)
        after = spec.clock.batch(dirty)
        assert torch.equal(loss, total_loss(policy, after)), (field, kind)
        found = {name: g for name, g in gradients(policy, after).items() if g is not None}
        assert found.keys() == expected.keys(), (field, kind)
        for name, gradient in found.items():
            assert torch.equal(gradient, expected[name]), (field, kind, name)


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].domains is None])
def test_large_vocabularies_are_carried(method: str) -> None:
    """By every method that serves every domain; others know theirs."""
    known = {item.name for item in fields(METHODS[method].config)}
    sizes = {name: size for name, size in {"d_model": 6, "num_heads": 2}.items() if name in known}
    policy = build_random(method, LARGE, dtype=torch.float32, **sizes)
    batch = random_batch(LARGE, episodes=2)
    assert gradients(policy, batch)["head.linear.weight"] is not None
    assert total_loss(policy, batch).item() == pytest.approx(11.0, abs=2.0)  # log 60,000 = 11.0
    with torch.no_grad():
        h_BTD = policy.features(batch)
        candidates_BTK = torch.randint(LARGE.action.count, (*batch.valid.shape, 100))
        scores = policy.head.score(h_BTD, candidates_BTK)
        expected = policy.head.logits(h_BTD).gather(-1, candidates_BTK)
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5 * largest(expected))


# ---------------------------------------------------------------- time


@every_pair_and_precision
def test_streaming_equals_all_at_once(method: str, spec: Spec, dtype: torch.dtype) -> None:
    found = answers(build_random(method, spec, dtype=dtype), random_batch(spec, episodes=5))
    atol = 1e-10 if dtype == torch.float64 else 1e-5 * largest(found["at once"])
    torch.testing.assert_close(found["step by step"], found["at once"], rtol=0, atol=atol)


@every_pair
def test_the_end_alone_equals_the_last_real_step(method: str, spec: Spec) -> None:
    policy, batch = build_random(method, spec), random_batch(spec, episodes=5)
    last_B = batch.valid.sum(1) - 1
    with torch.no_grad():
        expected = policy.features(batch)[torch.arange(5), last_B]
        torch.testing.assert_close(policy.final(batch), expected, rtol=0, atol=1e-10)


@every_pair
def test_future_changes_no_earlier_output(method: str, spec: Spec) -> None:
    """One copy of the batch for each moment from which on the future is another; all copies are answered at once."""
    policy, moments_changed = build_random(method, spec), range(1, spec.steps)
    batch, other = (random_batch(spec, seed=seed, whole=True) for seed in (1, 2))
    batch.allowed = other.allowed = None
    changed = {
        name: torch.cat(
            [torch.cat([getattr(batch, name)[:, :t], getattr(other, name)[:, t:]], 1) for t in moments_changed]
        )
        for name in ("obs", "prev_action", "prev_reward", "target")
    }
    batch = repeated(batch, len(moments_changed))
    before, after = answers(policy, batch), answers(policy, replace(batch, **changed))
    for way in before:
        copies = (logits.unflatten(0, (len(moments_changed), -1)) for logits in (before[way], after[way]))
        for t, old, new in zip(moments_changed, *copies, strict=True):
            assert torch.equal(new[:, :t], old[:, :t]), (way, t)
            assert not torch.equal(new[:, t], old[:, t]), (way, t)  # the present is seen


@pytest.mark.parametrize("lag", [1, 3])
@every_pair
def test_present_reward_and_action_change_no_output_yet(method: str, spec: Spec, lag: int) -> None:
    """action[t] is known from t + 1 on, reward[t] from t + lag on: one copy of the episodes for each part and t."""
    spec = replace(spec, reward_lag=lag)
    policy, trajectory = build_random(method, spec), random_trajectory(spec, whole=True)
    changes = [(part, t) for part in ("action", "reward") for t in range(spec.steps)]
    copies = repeated(trajectory, len(changes))
    before = answers(policy, spec.clock.batch(copies))
    other, changed = with_other_feedback(trajectory), copies.map(torch.clone)
    for index, (part, t) in enumerate(changes):
        getattr(changed, part).unflatten(0, (len(changes), -1))[index, :, t] = getattr(other, part)[:, t]
    for way, logits in answers(policy, spec.clock.batch(changed)).items():
        pairs = (x.unflatten(0, (len(changes), -1)) for x in (before[way], logits))
        for (part, t), old, new in zip(changes, *pairs, strict=True):
            known = t + (1 if part == "action" else lag)
            assert torch.equal(new[:, :known], old[:, :known]), (part, way, t)


@pytest.mark.parametrize("part", ["action", "reward"])
@every_pair
def test_feedback_is_seen_exactly_as_declared(method: str, spec: Spec, part: str) -> None:
    policy, trajectory = build_random(method, spec), random_trajectory(spec, whole=True)
    other = with_other_feedback(trajectory, action=part == "action", reward=part == "reward")
    before, after = (answers(policy, spec.clock.batch(each)) for each in (trajectory, other))
    for way, logits in after.items():
        if part in policy.sees:
            assert (logits[:, -1] != before[way][:, -1]).any(-1).all(), way
        else:
            assert torch.equal(logits, before[way]), way


# ---------------------------------------------------------------- acting


@every_pair
def test_masked_actions_have_probability_zero(method: str, spec: Spec) -> None:
    if not may_mask(spec):
        return
    policy, batch = build_random(method, spec, dtype=torch.float32), random_batch(spec, masked=True)
    assert batch.allowed is not None
    noise = gumbel(0, "play", torch.arange(batch.valid.numel()), spec.action.count).view_as(batch.allowed)
    for way, logits in answers(policy, batch).items():
        chances = logits.softmax(-1)
        assert chances[~batch.allowed].max() == 0, way
        assert chances[batch.allowed].min() > 0, way
        action = choose(logits, spec, noise)
        if isinstance(spec.action, Discrete):
            assert batch.allowed.gather(-1, action[..., None]).all(), way
        else:
            assert action[~batch.allowed].max() == 0, way


@every_pair
def test_step_reads_no_value_on_the_host(method: str, spec: Spec) -> None:
    """Meta tensors hold no values, so that whatever would block a CUDA graph raises here.

    One problem of every method is played to its end; of the others two steps show how they are encoded and decided.
    """
    policy = build(method, spec, dtype=torch.float32).to("meta")
    state = policy.init_state(3, spec.steps, "meta")
    steps = spec.horizon if spec is served(method) else 2
    with torch.no_grad():
        for moment in moments(random_batch(spec, steps=steps)):
            logits, state = policy.step(state, moment.to("meta"))
            assert logits.shape == (3, spec.action.numbers)


@every_pair
def test_acting_leaves_the_weights_alone(method: str, spec: Spec) -> None:
    policy, batch = build_random(method, spec), random_batch(spec)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    once = stream(policy, batch)
    assert torch.equal(once, stream(policy, batch))
    for name, value in policy.state_dict().items():
        assert torch.equal(value, before[name]), name


@every_pair_and_precision
def test_saved_policy_comes_back_to_the_last_bit(method: str, spec: Spec, dtype: torch.dtype, tmp_path: Path) -> None:
    policy, batch = build_random(method, spec, dtype=dtype), random_batch(spec)
    save_policy(tmp_path / "policy.safetensors", policy, method)
    loaded = load_policy(tmp_path / "policy.safetensors")
    assert (type(loaded), loaded.spec, loaded.config) == (type(policy), policy.spec, policy.config)
    expected = answers(policy, batch)
    for way, logits in answers(loaded, batch).items():
        assert torch.equal(logits, expected[way]), way


# ---------------------------------------------------------------- positions


def tables(policy: Policy) -> dict[str, Tensor]:
    return {name: p.data for name, p in policy.named_parameters() if name.endswith("positions")}


def with_table(policy: Policy, *, like: Policy, rows: Tensor) -> Policy:
    """The policy with the other's weights, and these rows of its position table."""
    weights = {name: value[rows] if name in tables(like) else value for name, value in like.state_dict().items()}
    policy.load_state_dict(weights)
    return policy


@positioned_methods
def test_too_long_an_episode_is_refused_with_both_numbers(method: str) -> None:
    spec = served(method)
    policy = build(method, spec, max_positions=5)
    with pytest.raises(ValueError, match=r"6 steps .* table of 5"):
        policy.logits(random_batch(spec, steps=6))
    with pytest.raises(ValueError, match=r"6 steps .* table of 5"):
        policy.init_state(1, 6, "cpu")
    assert policy.logits(random_batch(spec, steps=5)).isfinite().all()


@positioned_methods
def test_positions_past_the_table_clamp_to_its_last_row(method: str) -> None:
    spec = served(method)
    clamped = build_random(method, spec, max_positions=4, past_table="clamp")
    longer = build(method, spec, max_positions=7)
    longer = with_table(longer, like=clamped, rows=torch.tensor([0, 1, 2, 3, 3, 3, 3]))
    batch = random_batch(spec)
    for way, logits in answers(clamped, batch).items():
        assert torch.equal(logits, answers(longer, batch)[way]), way


@positioned_methods
def test_start_offsets_shift_positions(method: str) -> None:
    spec = served(method)
    policy, batch = build_random(method, spec, max_positions=12), random_batch(spec)
    starts = [0, 2, 5]
    shifted = policy.logits(replace(batch, start=torch.tensor(starts)))
    for episode, start in enumerate(starts):
        rolled = with_table(build(method, spec, max_positions=12), like=policy, rows=torch.arange(12).roll(-start))
        torch.testing.assert_close(shifted[episode], rolled.logits(batch)[episode], rtol=0, atol=1e-12)
    assert not torch.equal(shifted[1], policy.logits(batch)[1])


@pytest.mark.parametrize("name", METHODS)
def test_no_method_is_shown_what_the_world_hides(name: str) -> None:
    """Facts go to references that look; a policy never may."""
    assert METHODS[name].policy.look is Agent.look
