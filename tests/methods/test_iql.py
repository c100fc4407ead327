"""IQL: expectiles with known values, losses as the paper writes them, and a small world with known best actions."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.builders import SPECS, build, build_random, random_batch, random_trajectory, stream
from tests.methods.offline import Worlds, assert_resumes, batch_of, in_the_dark, learn
from uat.acting import Behaviour, rollout
from uat.contracts import Transition
from uat.episode import Noise
from uat.methods.iql import IQL, IQLConfig, expectile_loss
from uat.methods.vanilla import Vanilla, VanillaConfig
from uat.nn.encoders import VectorEncoder
from uat.noise import integers
from uat.spec import Discrete, Spec, Vector
from uat.training import train

DISCRETE = SPECS["vector-discrete"]


def build_iql(spec: Spec = DISCRETE, **settings: Any) -> IQL:
    policy = build_random("iql", spec, **settings)
    assert isinstance(policy, IQL)
    return policy


# ---------------------------------------------------------------- expectiles


def expectile_of(x: Tensor, tau: float) -> float:
    """Find the minimum of the mean loss by bisection on its slope."""
    low, high = x.min().item(), x.max().item()
    for _ in range(60):
        v = torch.tensor((low + high) / 2, dtype=x.dtype, requires_grad=True)
        [slope] = torch.autograd.grad(expectile_loss(x - v, tau).mean(), v)
        low, high = (v.item(), high) if slope < 0 else (low, v.item())
    return low


@pytest.mark.parametrize("tau", [0.1, 0.5, 0.7, 0.9])
def test_the_expectile_of_a_uniform_law_is_the_known_one(tau: float) -> None:
    """τ (1 - v)² = (1 - τ) v²."""
    x = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    assert expectile_of(x, tau) == pytest.approx(1 / (1 + math.sqrt((1 - tau) / tau)), abs=1e-6)


@pytest.mark.parametrize("tau", [0.5, 0.7, 0.99])
def test_the_expectile_of_two_values_is_their_weighted_mean(tau: float) -> None:
    """For 0 with probability 3/4 and 1 with probability 1/4: τ/4 over τ/4 + (1 - τ) 3/4."""
    x = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    assert expectile_of(x, tau) == pytest.approx(tau / (tau + 3 * (1 - tau)), abs=1e-9)


# ---------------------------------------------------------------- the losses


@torch.no_grad()
def test_losses_equal_the_equations() -> None:
    """Compute the losses one step at a time, with rewards scaled by the clock."""
    spec = replace(DISCRETE, reward_scale=2.0)
    policy, trajectory = build_iql(spec, largest_weight=1.5), random_trajectory(spec, episodes=4)
    batch, c = spec.clock.batch(trajectory), policy.config
    h_BTD, slow_BTD = policy.features(batch), policy.target.backbone(batch.obs)
    expected = {"value": 0.0, "critic": 0.0, "policy": 0.0}
    clipped = 0
    for b, length in enumerate(batch.valid.sum(1).tolist()):
        for t in range(length):
            h, a = h_BTD[b, t], int(trajectory.action[b, t])
            slow = policy.target.critic
            q_hat = min(float(slow.first(slow_BTD[b, t])[a]), float(slow.second(slow_BTD[b, t])[a]))
            advantage = q_hat - float(policy.value(h))
            expected["value"] += abs(0.7 - (advantage < 0)) * advantage**2
            weight = math.exp(c.temperature * advantage)
            clipped += weight > 1.5
            expected["policy"] -= min(weight, 1.5) * float(policy.head.logits(h).log_softmax(-1)[a])
            future = 0.0 if t == length - 1 else float(policy.value(h_BTD[b, t + 1]))
            wanted = 2.0 * float(trajectory.reward[b, t]) + 0.99 * future
            expected["critic"] += sum(
                (wanted - float(q(h)[a])) ** 2 for q in (policy.critic.first, policy.critic.second)
            )
    found = policy.loss(batch)
    assert 0 < clipped < batch.valid.sum()
    for name, (total, count) in found.items():
        assert total.item() == pytest.approx(expected[name], rel=1e-6), name
        assert count == batch.valid.sum(), name


def test_what_ends_has_no_future() -> None:
    """A truncated last step is not in the critic's loss; the target of a terminal step is its reward."""
    policy, trajectory = build_iql(), random_trajectory(DISCRETE, episodes=5)
    clock = DISCRETE.clock
    cut = policy.loss(clock.batch(replace(trajectory, terminated=torch.zeros_like(trajectory.terminated))))
    assert cut["critic"][1] == trajectory.valid.sum() - 5
    assert cut["value"][1] == trajectory.valid.sum()
    value_BT = torch.full(trajectory.valid.shape, 10.0)
    wanted_BT, known_BT = policy._critic_target(clock.batch(trajectory), value_BT)
    assert torch.equal(known_BT, trajectory.valid)
    ends = trajectory.done
    torch.testing.assert_close(wanted_BT[ends], trajectory.reward[ends])
    goes_on = trajectory.valid & ~ends
    torch.testing.assert_close(wanted_BT[goes_on], trajectory.reward[goes_on] + 9.9)


def test_gradients_stay_where_they_belong() -> None:
    """The value learns from the target, the critic from values, the policy from both, without gradients into them."""
    policy, batch = build_iql(), random_batch(DISCRETE)
    own = {"value": "value.", "critic": "critic.", "policy": "head."}
    for part, prefix in own.items():
        policy.zero_grad()
        policy.loss(batch)[part][0].backward()
        moved = {name for name, p in policy.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
        assert {name for name in moved if not name.startswith("backbone.")} == {
            name for name, _ in policy.named_parameters() if name.startswith(prefix)
        }


# ---------------------------------------------------------------- the target network


def test_the_target_starts_as_the_critic_and_follows_it() -> None:
    policy = build("iql", DISCRETE, target_rate=0.25)
    assert isinstance(policy, IQL)
    pairs = [
        (policy.target.backbone.positions, policy.backbone.positions),
        (policy.target.critic.second.weight, policy.critic.second.weight),
    ]
    for slow, fast in pairs:
        assert torch.equal(slow, fast)
        assert not slow.requires_grad
    before = [slow.clone() for slow, _ in pairs]
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
        policy.follow()
        policy.follow()
    for old, (slow, _) in zip(before, pairs, strict=True):
        torch.testing.assert_close(slow, old + 1 - 0.75**2)


def test_nothing_is_dropped_in_the_target() -> None:
    policy, batch = build_iql(dropout=0.5).train(), random_batch(DISCRETE)
    action = torch.zeros_like(batch.prev_action)
    assert torch.equal(policy.target(batch, action), policy.target(batch, action))
    assert not torch.equal(policy.features(batch), policy.features(batch))


# ---------------------------------------------------------------- acting


def test_iql_acts_as_vanilla_with_its_weights() -> None:
    policy, batch = build_iql(), random_batch(DISCRETE)
    vanilla = Vanilla(
        DISCRETE, VanillaConfig(**{f.name: getattr(policy.config, f.name) for f in fields(VanillaConfig)})
    )
    own = policy.state_dict()
    vanilla.double().load_state_dict({name: own[name] for name in vanilla.state_dict()})
    assert torch.equal(stream(policy, batch), stream(vanilla.eval(), batch))


def test_weights_are_refused() -> None:
    with pytest.raises(ValueError, match=r"IQL takes ids as actions, not Weights\(count=4\)"):
        IQL(SPECS["vector-weights"], IQLConfig())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"expectile": 1.0}, r"expectile=1.0 must lie in \(0, 1\)"),
        ({"temperature": -1.0}, "temperature=-1.0 must not be negative"),
        ({"largest_weight": math.inf}, "largest_weight=inf"),
        ({"discount": 1.5}, "discount=1.5"),
        ({"target_rate": 0.0}, "target_rate=0.0"),
        ({"random_share": 2.0}, "random_share=2.0"),
        ({"num_heads": 5}, "num_heads=5 must divide"),
    ],
)
def test_a_bad_setting_is_named_with_its_value(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        IQLConfig(**settings)


# ---------------------------------------------------------------- a world with known answers


class Chain(Worlds):
    """Four rooms in a row. Left (0) pays 0.2 and leads back to the first; right (1) leads on, and pays 1 in the last.

    Walking right is worth it while there is time to arrive; after that, left is. Room and time are observed.
    """

    spec = Spec(obs=Vector(11), action=Discrete(2), horizon=6)

    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        return {"room": integers(seed, "chain", episode_ids, 1, below=4)[:, 0]}

    def reset(self, noise: Noise) -> tuple[Tensor, Tensor]:
        world = torch.stack([noise["room"], torch.zeros_like(noise["room"])], dim=1)
        return world, self._observe(world)

    def step(self, world: Tensor, action: Tensor) -> Transition[Tensor]:
        room, time = world.unbind(1)
        reward = torch.where(action == 0, 0.2, (room == 3).float())
        after = torch.stack([torch.where(action == 0, 0, (room + 1).clamp_max(3)), time + 1], dim=1)
        return Transition(after, self._observe(after), reward, time + 1 == self.spec.horizon)

    def _observe(self, world: Tensor) -> Tensor:
        room, time = world.unbind(1)
        return torch.cat([torch.eye(4)[room], torch.eye(7)[time]], dim=1)


GAMMA, TAU = 0.9, 0.9


def known_values(best: bool) -> Tensor:
    """Q (T, rooms, actions) by induction from the end; V is the best of Q, or its τ-expectile under even odds."""
    value, q_T = [0.0] * 4, []
    for _ in range(Chain.spec.steps):
        q = [[0.2 + GAMMA * value[0], (room == 3) + GAMMA * value[min(room + 1, 3)]] for room in range(4)]
        value = [max(pair) if best else TAU * max(pair) + (1 - TAU) * min(pair) for pair in q]
        q_T.insert(0, q)
    return torch.tensor(q_T)


def test_values_and_policy_of_a_chain_are_the_known_ones() -> None:
    """On uniformly random logs, Q is the fixed point, and the policy plays the best action at every step."""
    policy = learn(
        "iql",
        Chain(),
        steps=600,
        episodes=96,
        d_model=32,
        num_heads=2,
        num_layers=1,
        d_ff=64,
        dropout=0.0,
        expectile=TAU,
        discount=GAMMA,
        target_rate=0.1,
        random_share=1.0,
    )
    assert isinstance(policy, IQL)
    batch = batch_of(policy, Chain(), torch.arange(10**6, 10**6 + 200))
    rooms_BT, t = batch.obs[..., :4].argmax(-1), torch.arange(6)
    expected_BTA, best_BTA = known_values(best=False)[t, rooms_BT], known_values(best=True)[t, rooms_BT]
    with torch.no_grad():
        found_BTA = policy.critic.first(policy.features(batch))
        played_BT = policy.logits(batch).argmax(-1)
    assert (found_BTA - expected_BTA).abs().mean() < 0.08  # of values from 0 to 3.7
    assert (found_BTA - expected_BTA).abs().max() < 0.3
    clear_BT = (best_BTA[..., 0] - best_BTA[..., 1]).abs() > 0.1
    assert clear_BT.double().mean() > 0.5
    assert (played_BT == best_BTA.argmax(-1))[clear_BT].double().mean() > 0.98
    assert {0, 1} == set(best_BTA.argmax(-1)[clear_BT].tolist())
    worlds = Chain()
    noise = worlds.noise(torch.arange(400), 1)
    earned = {name: rollout(who, worlds, noise).reward.sum(1).mean() for name, who in (("iql", policy), ("log", None))}
    assert earned["iql"] > earned["log"] + 0.5  # without noise, the log goes left for ever


def test_iql_learns_from_logs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed and resumed training gives the same bytes, target network included."""
    config = in_the_dark("iql", monkeypatch)
    assert build("iql", DISCRETE).phases()[0].behaviour == Behaviour(0.3)
    assert build("iql", DISCRETE, random_share=0.6, random_steps=12).phases()[0].behaviour == Behaviour(0.6, 12)
    assert_resumes(config, tmp_path, monkeypatch)
    rows = train(config, tmp_path / "whole", resume=True, device="cpu").rows("metrics.jsonl")
    assert {name for name in rows[0] if name.startswith("loss/")} == {"loss/value", "loss/critic", "loss/policy"}
    assert rows[0]["phase"] == "offline"


def test_the_target_network_sees_standardised_observations_too() -> None:
    """Raw observations give the losses of a policy that receives them standardised by hand."""
    policy, twin = build_iql(), build_iql()
    played = random_trajectory(DISCRETE, episodes=6, masked=False)
    raw = replace(played, obs=played.obs.double() * 30 + 200)
    policy.standardise(raw)
    encoder = policy.backbone.encoder
    assert isinstance(encoder, VectorEncoder)
    assert encoder.normalizer is not None
    by_hand = replace(raw, obs=encoder.normalizer(raw.obs))
    found, expected = (p.loss(DISCRETE.clock.batch(x)) for p, x in ((policy, raw), (twin, by_hand)))
    for name, (total, count) in expected.items():
        torch.testing.assert_close(found[name][0], total, rtol=0, atol=1e-8)
        assert found[name][1] == count
