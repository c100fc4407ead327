"""Trajectories and batches, the clock, and sums over real steps, against loops and numbers by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.builders import SPECS, random_trajectory
from uat.clock import NO_ACTION, Clock, nothing, shift
from uat.episode import Step, episode_mean, masked_mean, masked_sum
from uat.metrics import Metric
from uat.spec import Assets, Discrete, Items, Spec, Vector, Weights

every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


# ---------------------------------------------------------------- specs


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Vector(0), "Vector.width=0 must be at least 1"),
        (lambda: Vector(2.0), "Vector.width=2.0 must be int"),  # pyright: ignore[reportArgumentType]
        (lambda: Vector(True), "Vector.width=True must be int"),
        (lambda: Items(-3), "Items.count=-3 must be at least 1"),
        (lambda: Items(10**9), "Items.count=1000000000 must be at least 1 and at most 10000000"),
        (lambda: Assets(3, 0), "Assets.features=0 must be at least 1"),
        (lambda: Discrete("4"), "Discrete.count='4' must be int"),  # pyright: ignore[reportArgumentType]
        (lambda: Weights(0), "Weights.count=0 must be at least 1"),
    ],
)
def test_impossible_spaces_are_refused_by_field_and_value(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"horizon": 0}, "Spec.horizon=0 must be at least 1"),
        ({"horizon": 6.5}, "Spec.horizon=6.5 must be int"),
        ({"horizon": True}, "Spec.horizon=True must be int"),
        ({"horizon": 10**9}, "Spec.horizon=1000000000 must be at least 1 and at most 1000000"),
        ({"reward_lag": -1}, "Spec.reward_lag=-1 must not be negative"),
        ({"reward_scale": math.nan}, "Spec.reward_scale=nan must lie in"),
        ({"reward_scale": math.inf}, "Spec.reward_scale=inf must lie in"),
        ({"reward_scale": 1e39}, r"Spec.reward_scale=1e\+39 must lie in"),
        ({"reward_scale": "1"}, "Spec.reward_scale='1' must be float"),
        ({"obs": Discrete(3)}, r"Spec.obs=Discrete\(count=3\) must be Vector or Items or Assets"),
        ({"action": None}, "Spec.action=None must be Discrete or Weights"),
        ({"facts": [("price", ())]}, "Spec.facts=.* must be Mapping"),
        ({"facts": {1: ()}}, "the name in Spec.facts=1 must be str"),
        ({"facts": {"price": 3}}, r"Spec.facts\['price'\]=3 must be a tuple of int"),
        ({"facts": {"price": (0,)}}, r"Spec.facts\['price'\]=\(0,\) must be a shape"),
    ],
)
def test_impossible_specs_are_refused_by_field_and_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SPECS["vector-discrete"], **changes)


def test_numbers_of_numpy_are_taken_as_pythons() -> None:
    width, scale = np.int32(3), np.float32(0.5)
    spec = Spec(obs=Vector(width), action=Discrete(2), horizon=np.int64(5), reward_scale=scale)  # pyright: ignore[reportArgumentType]
    assert spec == Spec(obs=Vector(3), action=Discrete(2), horizon=5, reward_scale=0.5)
    assert json.loads(json.dumps([spec.horizon, spec.reward_scale])) == [5, 0.5]


def test_a_spec_carries_its_clock() -> None:
    spec = Spec(obs=Vector(1), action=Discrete(2), horizon=3, reward_lag=4, reward_scale=20.0)
    assert spec.clock == Clock(reward_lag=4, reward_scale=20.0)


def test_metrics_know_their_direction() -> None:
    assert Metric(name="accuracy").better(0.9, than=0.8)
    assert not Metric(name="accuracy").better(0.8, than=0.8)
    assert Metric(name="drawdown", higher_is_better=False).better(0.1, than=0.2)


# ---------------------------------------------------------------- tensors that travel together


def test_map_reaches_every_tensor_and_leaves_the_rest() -> None:
    trajectory = random_trajectory(SPECS["vector-discrete"])
    trajectory.facts = {"goal": torch.ones(3, 7)}
    cut = trajectory.map(lambda x: x[:2])
    assert (cut.obs.shape, cut.valid.shape, cut.facts["goal"].shape) == ((2, 7, 5), (2, 7), (2, 7))
    assert cut.allowed is None
    assert trajectory.obs.shape == (3, 7, 5)


def test_to_moves_every_tensor() -> None:
    step = Step(obs=torch.ones(1, 2), prev_action=torch.ones(1), prev_reward=torch.ones(1), first=torch.ones(1))
    moved = step.to("meta")
    assert {moved.obs.device.type, moved.prev_action.device.type, moved.first.device.type} == {"meta"}


# ---------------------------------------------------------------- the clock


@given(steps=st.integers(1, 6), lag=st.integers(0, 9), ids=st.booleans(), wide=st.booleans())
def test_shift_tells_what_was(steps: int, lag: int, ids: bool, wide: bool) -> None:
    """Shifting equals a loop, even if the lag is longer than the episode."""
    shape = (2, steps, 3) if wide else (2, steps)
    x = torch.arange(1, 1 + 6 * steps)[: 2 * steps * (3 if wide else 1)].view(shape)
    x = x if ids else x.double()
    shifted = shift(x, lag)
    assert (shifted.shape, shifted.dtype) == (x.shape, x.dtype)
    for t in range(steps):
        expected = x[:, t - lag] if t >= lag else torch.full_like(x[:, t], -1 if ids and not wide else 0)
        assert torch.equal(shifted[:, t], expected)


def test_past_by_hand() -> None:
    ids, numbers = torch.tensor([[5, 6, 7]]), torch.tensor([[0.5, 0.6, 0.7]])
    assert shift(ids, 1)[0].tolist() == [NO_ACTION, 5, 6]
    assert shift(numbers, 2)[0].tolist() == pytest.approx([0, 0, 0.5])
    assert (nothing(ids), nothing(numbers)) == (-1, 0)


@pytest.mark.parametrize("lag", [0, 1, 3])
@every_spec
def test_clock_tells_the_past_and_nothing_else(spec: Spec, lag: int) -> None:
    trajectory, clock = random_trajectory(spec, whole=True), Clock(reward_lag=lag, reward_scale=2.0)
    batch = clock.batch(trajectory)
    for name in ("obs", "target", "valid"):
        assert torch.equal(getattr(batch, name), getattr(trajectory, name)), name
    history = clock.begin(spec.no_action(3)) if lag else None  # logs are never played
    for t in range(spec.steps):
        step = history.step(trajectory.obs[:, t]) if history else None
        for told in (batch.prev_action[:, t], *([step.prev_action] if step else [])):
            nothing_yet = torch.full_like(told, 0 if isinstance(spec.action, Weights) else NO_ACTION)
            assert torch.equal(told, nothing_yet if t == 0 else trajectory.action[:, t - 1])
        for told in (batch.prev_reward[:, t], *([step.prev_reward] if step else [])):
            assert torch.equal(told, torch.zeros(3) if t < lag else 2.0 * trajectory.reward[:, t - lag])
        if step and history:
            assert step.first.tolist() == [t == 0] * 3
            history.add(trajectory.action[:, t], trajectory.reward[:, t])


@every_spec
def test_clock_tells_nothing_in_padding(spec: Spec) -> None:
    trajectory = random_trajectory(spec, episodes=6)
    whole = replace(trajectory, valid=torch.ones_like(trajectory.valid))
    trajectory.reward = trajectory.reward.masked_fill(~trajectory.valid, torch.nan)
    batch, unpadded, real = spec.clock.batch(trajectory), spec.clock.batch(whole), trajectory.valid
    for name in ("obs", "prev_action", "prev_reward"):
        told = getattr(batch, name)
        assert torch.equal(told[real], getattr(unpadded, name)[real]), name
        assert (told[~real] == nothing(told)).all(), name


# ---------------------------------------------------------------- sums over real steps


def masked() -> tuple[Tensor, Tensor]:
    x = torch.tensor([[1.0, 2.0, torch.nan], [5.0, torch.inf, torch.nan]])
    return x, torch.tensor([[True, True, False], [True, False, False]])


def test_sums_and_means_ignore_padding_whatever_it_holds() -> None:
    x, valid = masked()
    total, number = masked_sum(x, valid)
    assert (total.item(), number.item()) == (8.0, 3)
    assert masked_mean(x, valid).item() == pytest.approx(8 / 3)
    assert episode_mean(x, valid).tolist() == [1.5, 5.0]


def test_padding_sends_no_gradient() -> None:
    x, valid = masked()
    x.requires_grad_()
    masked_mean(x, valid).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, valid / 3)


def test_nothing_but_padding_has_mean_zero() -> None:
    none = torch.zeros(2, 3, dtype=torch.bool)
    assert masked_mean(torch.full((2, 3), torch.nan), none).item() == 0
    assert episode_mean(torch.full((2, 3), torch.nan), none).tolist() == [0, 0]


@given(cut=st.integers(1, 7), seed=st.integers(0, 2**31))
def test_sums_of_parts_add_up_to_the_whole(cut: int, seed: int) -> None:
    """So that ranks and micro-batches of unequal lengths weigh every step the same."""
    generator = torch.Generator().manual_seed(seed)
    x, valid = torch.randn(8, 5, generator=generator).double(), torch.rand(8, 5, generator=generator) < 0.5
    whole = masked_sum(x, valid)
    parts = [masked_sum(x[part], valid[part]) for part in (slice(cut), slice(cut, None))]
    torch.testing.assert_close(sum(total for total, _ in parts), whole[0])
    assert sum(number for _, number in parts) == whole[1]
