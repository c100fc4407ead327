"""Distributions over actions against integrals and counts; dictionary observations; actions in a box, end to end."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import uat
from tests.builders import CPU, OPEN_SPECS, build_random, random_trajectory
from uat.acting import Behaviour, rollout
from uat.config import TrainConfig, spec_from_json, spec_to_json
from uat.contracts import Simulator, Transition
from uat.distributions import Categorical, Shares, SquashedGaussian, action_noise, distribution
from uat.engines.update import optimize
from uat.episode import Noise
from uat.methods import METHODS
from uat.noise import uniform
from uat.serving import Session
from uat.spec import Assets, Box, Discrete, Items, Named, Spec, Vector, Weights
from uat.training.optimizing import build_optimizer
from uat.training.surroundings import seeded

WRONG: Any = Discrete(3)
NAMED, BOX = OPEN_SPECS["named-discrete"], OPEN_SPECS["vector-box"]
IDS = torch.arange(20_000)


# ---------------------------------------------------------------- distributions


def gaussian(*numbers: float, low: float = -1.0, high: float = 3.0) -> SquashedGaussian:
    sides = (torch.tensor([side], dtype=torch.float64) for side in (low, high))
    return SquashedGaussian(torch.tensor(numbers, dtype=torch.float64), *sides)


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (0.7, -1.0), (-1.5, 0.5), (0.3, -2.0)])
def test_the_density_of_a_squashed_gaussian_integrates_to_one_and_to_its_entropy(mean: float, log_std: float) -> None:
    law = gaussian(mean, log_std)
    share_N = (torch.arange(400_000, dtype=torch.float64) + 0.5) / 400_000
    action_N1 = (-1 + 4 * share_N)[:, None]
    density_N = law.log_prob(action_N1).exp()
    assert (density_N.mean() * 4).item() == pytest.approx(1, abs=1e-4)
    surprise_N = torch.where(density_N > 0, -density_N * density_N.log(), 0.0)
    assert law.entropy.item() == pytest.approx((surprise_N.mean() * 4).item(), abs=1e-3)


def test_samples_of_a_squashed_gaussian_have_its_density_and_keep_its_limits() -> None:
    law = gaussian(0.5, 0.2)
    noise = action_noise(BOX, 3, "test", IDS, 1)
    assert noise is not None
    sample_N = law.sample(noise[:, 0, :1].double())[:, 0]
    assert sample_N.min() >= -1
    assert sample_N.max() <= 3
    assert law.mode.item() == pytest.approx(sample_N.median().item(), abs=0.05)
    assert law.entropy.item() == pytest.approx(-law.log_prob(sample_N[:, None]).mean().item(), abs=0.02)
    wild = gaussian(50.0, 2.0)
    assert wild.sample(torch.tensor([9.0]).double()).item() == wild.mode.item() == 3
    assert wild.log_prob(torch.tensor([3.0]).double()).isfinite()


def test_ids_and_weights_are_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.5, -1.0, -torch.inf])
    ids, weights = Categorical(logits), Shares(logits)
    assert ids.mode == 1
    torch.testing.assert_close(ids.log_prob(torch.tensor(2)), logits.log_softmax(0)[2])
    p = logits.softmax(0)
    expected = -(p[:3] * p[:3].log()).sum()
    for law in (ids, weights):
        torch.testing.assert_close(law.entropy, expected)
    torch.testing.assert_close(weights.mode, p)
    torch.testing.assert_close(weights.sample(torch.ones(4)), p)
    torch.testing.assert_close(-weights.log_prob(p), expected)
    masked = distribution(NAMED, torch.zeros(4), torch.tensor([True, False, True, False]))
    assert isinstance(masked, Categorical)
    assert masked.entropy.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("spec", OPEN_SPECS.values(), ids=OPEN_SPECS)
def test_a_policy_says_the_distribution_of_its_answers(spec: Spec) -> None:
    policy, batch = build_random("uat", spec), spec.clock.batch(random_trajectory(spec))
    law = policy.distribution(policy.logits(batch))
    assert law.log_prob(law.mode).shape == law.entropy.shape == batch.valid.shape
    batch.target = law.mode  # imitating it costs what the distribution says
    loss = policy.loss(batch)["imitation"][0]
    torch.testing.assert_close(loss, -torch.where(batch.valid, law.log_prob(law.mode), 0.0).sum(), rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- dictionary observations


def test_parts_are_packed_by_name_and_come_back() -> None:
    space = Named({"b": Items(9), "a": Vector(2), "c": Assets(2, 3)})
    assert space.names == ("a", "b", "c")
    assert space.shape == (9,)
    parts = {"c": torch.randn(4, 5, 2, 3), "b": torch.randint(-1, 9, (4, 5)), "a": torch.randn(4, 5, 2)}
    row = space.pack(parts)
    assert row.shape == (4, 5, 9)
    for name, value in space.unpack(row).items():
        assert torch.equal(value, parts[name])
        assert value.dtype == parts[name].dtype
    nothing = space.unpack(torch.zeros(9))
    assert nothing["b"] == -1
    with pytest.raises(ValueError, match="obs: expected the parts a, b, c, got a, d"):
        space.pack({"a": parts["a"], "d": parts["b"]})


@pytest.mark.parametrize("method", ["uat", "dt"])
def test_a_named_vector_alone_is_a_vector(method: str) -> None:
    """With the same weights, to the last bit."""
    plain = replace(NAMED, obs=Vector(3))
    named = replace(NAMED, obs=Named({"place": Vector(3)}))
    policy, twin = build_random(method, plain), build_random(method, named)
    weights = {name.replace("encoder.parts.0.", "encoder."): x for name, x in twin.state_dict().items()}
    policy.load_state_dict(weights)
    trajectory = random_trajectory(plain)
    batch, other = plain.clock.batch(trajectory), named.clock.batch(trajectory)
    assert torch.equal(policy.logits(batch), twin.logits(other))


def test_sessions_and_logs_take_dictionaries() -> None:
    policy = build_random("uat", NAMED, dtype=torch.float32)
    space = NAMED.obs
    assert isinstance(space, Named)
    obs = {"place": [[0.0, 1.0, 2.0]], "item": [3], "rows": np.ones((1, 2, 2))}
    row = space.pack({"place": torch.tensor([[0.0, 1, 2]]), "item": torch.tensor([3]), "rows": torch.ones(1, 2, 2)})
    session, twin = Session(policy), Session(policy)
    assert session.path == "cached"
    assert torch.equal(session.act(obs), twin.act(row))
    log = uat.episodes(
        NAMED,
        obs={"place": np.zeros((1, 2, 3)), "item": [[0, 5]], "rows": np.zeros((1, 2, 2, 2))},
        action=[[0, 1]],
        reward=[[0.0, 1.0]],
    )
    assert space.unpack(log.obs)["item"].tolist() == [[0, 5]]
    for wrong, said in (
        ({**obs, "item": [6]}, r"obs\['item'\]: ids must lie in \[0, 6\), got 6"),
        ({"place": obs["place"]}, "obs: expected a dictionary of the parts item, place, rows, got the parts place"),
        ([[1.0]], "obs: expected a dictionary of the parts item, place, rows, got list"),
    ):
        with pytest.raises(ValueError, match=said):
            session.act(wrong, reward=[0.0])


# ---------------------------------------------------------------- actions in a box


class Reach(Simulator[Tensor]):
    """One sees a target and should go there: what one earns is minus the distance."""

    spec = Spec(obs=Vector(2), action=Box(low=(-1.0, 0.0), high=(1.0, 4.0)), horizon=4)

    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        return {
            "target": uniform(seed, "reach", episode_ids, 2).float() * torch.tensor([1.6, 3.2])
            + torch.tensor([-0.8, 0.4])
        }

    def reset(self, noise: Noise) -> tuple[Tensor, Tensor]:
        return noise["target"], noise["target"]

    def expert(self, world: Tensor) -> Tensor:
        return world

    def step(self, world: Tensor, action: Tensor) -> Transition[Tensor]:
        return Transition(world, world, -(action - world).norm(dim=-1), torch.zeros(len(world), dtype=torch.bool))


@pytest.mark.parametrize("method", ["uat", "vanilla"])
def test_a_box_is_cloned(method: str) -> None:
    """The clone goes where the expert goes, and its actions stay in the box when they are sampled."""
    reach = Reach()
    sizes: dict[str, Any] = {"d_model": 16, "num_heads": 2, "num_layers": 1, "d_ff": 32, "dropout": 0.0}
    with seeded(0, CPU):
        policy = METHODS[method].build(reach.spec, METHODS[method].configure(**sizes))
    optimizer = build_optimizer(policy, TrainConfig(lr=1e-2))
    phase = policy.phases()[0]
    for index in range(80):
        trajectory = rollout(None, reach, reach.noise(torch.arange(64) + 64 * index, 0))
        optimize(phase, reach.spec.clock.batch(trajectory), optimizer, 1.0)
    noise = reach.noise(torch.arange(64), 1)
    played = rollout(policy.eval(), reach, noise)
    assert played.reward.mean() > -0.15
    drawn = rollout(policy, reach, noise, action_noise(reach.spec, 0, "actions", torch.arange(64), 4))
    assert not torch.equal(drawn.action, played.action)
    low, high = torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 4.0])
    assert ((drawn.action >= low) & (drawn.action <= high)).all()
    noisy = rollout(Behaviour(0.5), reach, noise, action_noise(reach.spec, 0, "behaviour", torch.arange(64), 4))
    assert ((noisy.action >= low) & (noisy.action <= high)).all()
    assert (noisy.action - played.required_target).abs().max() > 0.1


def test_a_box_is_acted_audited_saved_and_loaded(tmp_path: Path) -> None:
    policy = build_random("uat", BOX, dtype=torch.float32)
    uat.save(tmp_path / "box.safetensors", policy, "uat")
    session, again = Session(policy, streams=2), Session(uat.load(tmp_path / "box.safetensors"), streams=2)
    obs, last = torch.ones(2, 5), None
    for reward in (None, [0.1, 0.2], [0.0, -1.0]):
        last = session.act(obs, reward=reward)
        assert torch.equal(last, again.act(obs, reward=reward))
        assert last.shape == (2, 2)
    other = session.act(obs, reward=[0.0, 0.0], action=[[0.5, 0.5], [-1.0, 5.0]])
    assert not torch.equal(other, again.act(obs, reward=[0.0, 0.0]))
    with pytest.raises(ValueError, match="action: expected numbers from 0 to 5, the limits of the box, got -1"):
        session.act(obs, reward=[0.0, 0.0], action=[[0.0, -1.0], [0.0, 0.0]])
    with pytest.raises(ValueError, match=r"allowed: actions of Box.* cannot be masked"):
        session.act(obs, reward=[0.0, 0.0], allowed=[[True, True], [True, True]])
    found = uat.audit(policy, episodes=4, draws=1)
    assert {c.channel for c in found.channels if c.seen} == {"observation", "action", "reward"}
    assert all(0 <= c.divergence <= 1 and 0 <= c.changed <= 1 for c in found.channels)
    assert uat.audit(build_random("vanilla", BOX, dtype=torch.float32), episodes=4, draws=1).blind


# ---------------------------------------------------------------- what is refused, and files


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Box(low=(0.0,), high=(0.0,)), r"Box.low=\(0.0,\) must lie below Box.high=\(0.0,\)"),
        (lambda: Box(low=(), high=()), "must have equally many limits, at least one"),
        (lambda: Box(low=(0.0, 0.0), high=(1.0,)), "must have equally many limits"),
        (lambda: Box(low=(-math.inf,), high=(1.0,)), "Box.low=-inf must lie in"),
        (lambda: Named({}), "must name at least one part"),
        (
            lambda: Named({"a": WRONG}),
            r"Named.parts\['a'\]=Discrete\(count=3\) must be Vector or Items or Assets",
        ),  # pyright: ignore[reportArgumentType]
        (lambda: Named({1: Vector(3)}), "the name in Named.parts=1 must be str"),  # pyright: ignore[reportArgumentType]
        (lambda: Spec(obs=Vector(1), action=Vector(2), horizon=3), r"a Box .*such as Box\(low=\(-1.0,\) \* 2"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_spaces_that_mean_nothing_are_refused(build: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build()


@pytest.mark.parametrize("method", ["tent", "cotta", "iql", "cadm"])
def test_methods_that_choose_among_ids_refuse_a_box(method: str) -> None:
    with pytest.raises(ValueError, match="Box"):
        build_random(method, BOX)


def test_specs_of_every_space_are_read_as_they_were_written() -> None:
    spaces = [Vector(2), Items(3), Assets(2, 3), NAMED.obs]
    for obs, action in itertools.product(spaces, [Discrete(3), Weights(2), BOX.action]):
        spec = Spec(obs=obs, action=action, horizon=3)
        assert spec_from_json(spec_to_json(spec)) == spec
