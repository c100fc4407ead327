"""CaDM: it learns a linear system, its context separates regimes, and its plan is the best of all plans."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.builders import SPECS, build, build_random, random_batch, stream
from tests.methods.offline import Worlds, assert_resumes, batch_of, in_the_dark, learn
from uat.acting import Behaviour
from uat.contracts import Transition
from uat.episode import Batch, Noise
from uat.methods.cadm import CaDM, CaDMConfig
from uat.nn.ensemble import Units, gaussian_nll
from uat.noise import uniform
from uat.spec import Discrete, Spec, Vector
from uat.training import train

DISCRETE = SPECS["vector-discrete"]
SMALL: dict[str, Any] = {
    "d_context": 4,
    "context_steps": 4,
    "d_encoder": 32,
    "members": 2,
    "d_hidden": 32,
    "num_hidden": 2,
    "future_steps": 3,
    "random_share": 1.0,
}


def build_cadm(spec: Spec = DISCRETE, **settings: Any) -> CaDM:
    policy = build_random("cadm", spec, **settings)
    assert isinstance(policy, CaDM)
    return policy


# ---------------------------------------------------------------- two worlds


class Linear(Worlds):
    """World o' = G o + P_a s, r = w · o + c_a, with a hidden s that is 1 unless there are two regimes."""

    spec = Spec(obs=Vector(2), action=Discrete(3), horizon=8)
    turn = torch.tensor([[0.9, 0.2], [-0.2, 0.9]])
    push = torch.tensor([[0.0, 0.0], [0.6, 0.0], [0.0, -0.6]])
    weight, bonus = torch.tensor([0.5, -0.3]), torch.tensor([0.0, 0.4, -0.4])
    regimes = 1

    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        start = uniform(seed, "linear", episode_ids, 3)
        side = torch.where((start[:, 2:] < 0.5) & (self.regimes == 2), -1.0, 1.0)
        return {"world": torch.cat([2 * start[:, :2] - 1, side, torch.zeros_like(side)], dim=1).float()}

    def reset(self, noise: Noise) -> tuple[Tensor, Tensor]:
        return noise["world"], noise["world"][:, :2]

    def move(self, obs: Tensor, action: Tensor, side: Tensor) -> Tensor:
        return obs @ self.turn.T + self.push[action] * side

    def pay(self, obs: Tensor, action: Tensor, side: Tensor) -> Tensor:
        return obs @ self.weight + self.bonus[action] * side[..., 0]

    def step(self, world: Tensor, action: Tensor) -> Transition[Tensor]:
        obs, side, time = world[:, :2], world[:, 2:3], world[:, 3:] + 1
        after = torch.cat([self.move(obs, action, side), side, time], dim=1)
        return Transition(after, after[:, :2], self.pay(obs, action, side), time[:, 0] == self.spec.horizon)

    def facts(self, world: Tensor) -> dict[str, Tensor]:
        return {"side": world[:, 2]}


class Regimes(Linear):
    """The effects and rewards of actions change their sign in half of the episodes."""

    regimes = 2


@torch.no_grad()
def predicted(policy: CaDM, batch: Batch, context_BTC: Tensor) -> tuple[Tensor, Tensor]:
    """Forward and backward errors (B, T-1) of the next observation and the present one, mean over members."""
    assert batch.trajectory is not None
    obs, action = batch.obs, policy.onehot(batch.trajectory.action)
    errors = []
    for model, known, asked, way in (
        (policy.forwards, obs[:, :-1], obs[:, 1:], 1),
        (policy.backwards, obs[:, 1:], obs[:, :-1], -1),
    ):
        told = policy.predict(model, *(x.flatten(0, 1) for x in (known, action[:, :-1], context_BTC[:, :-1]))).mean(0)
        moved = way * policy.moved_units.back(way * told[:, :2])
        errors.append((known.flatten(0, 1) + moved - asked.flatten(0, 1)).norm(dim=-1).view(len(obs), -1))
    return errors[0], errors[1]


@pytest.fixture(scope="module")
def linear() -> CaDM:
    policy = learn("cadm", Linear(), steps=300, lr=1e-2, **SMALL)
    assert isinstance(policy, CaDM)
    return policy


@pytest.fixture(scope="module")
def regimes() -> CaDM:
    policy = learn("cadm", Regimes(), steps=300, lr=1e-2, **SMALL)
    assert isinstance(policy, CaDM)
    return policy


FRESH = torch.arange(10**6, 10**6 + 300)


def test_dynamics_of_a_linear_system_are_found(linear: CaDM) -> None:
    batch = batch_of(linear, Linear(), FRESH)
    moved = (batch.obs[:, 1:] - batch.obs[:, :-1]).norm(dim=-1).mean()
    for error in predicted(linear, batch, linear.features(batch)):
        assert error.mean() < 0.05 * moved
    untaught = build("cadm", Linear.spec, dtype=torch.float32, **SMALL)
    assert isinstance(untaught, CaDM)
    for error in predicted(untaught, batch, untaught.features(batch)):
        assert error.mean() > 0.5 * moved


def test_a_context_separates_two_regimes(regimes: CaDM) -> None:
    """Tested by a linear probe and by the value of the right context; before any transition it has no information."""
    batch = batch_of(regimes, Regimes(), FRESH)
    assert batch.trajectory is not None
    side_B = batch.trajectory.facts["side"][:, 0]
    with torch.no_grad():
        context_BTC = regimes.features(batch)
    late_BC = torch.cat([context_BTC[:, 5], torch.ones(len(side_B), 1)], dim=1).double()
    probe = torch.linalg.lstsq(late_BC[:150], side_B[:150, None].double()).solution
    right = ((late_BC[150:] @ probe)[:, 0].sign() == side_B[150:]).double().mean()
    assert right > 0.95
    assert torch.equal(context_BTC[:, 0], context_BTC[:1, 0].expand(len(side_B), -1))
    # every episode with the context of another that shares its regime, or not
    order = side_B.argsort()
    wrong_BTC = torch.empty_like(context_BTC)
    wrong_BTC[order] = context_BTC[order.flip(0)]
    crossed = torch.empty_like(side_B)
    crossed[order] = side_B[order.flip(0)]
    own, others = (predicted(regimes, batch, context)[0][:, 4:] for context in (context_BTC, wrong_BTC))
    assert (crossed != side_B).double().mean() > 0.8
    assert others[crossed != side_B].mean() > 5 * own[crossed != side_B].mean()


def test_planning_finds_the_best_first_action(regimes: CaDM) -> None:
    assert_plans_well(regimes)


def assert_plans_well(regimes: CaDM) -> None:
    """The best actions in the true world, where only the past reveals the regime, except for near ties."""
    worlds, batch = Regimes(), batch_of(regimes, Regimes(), FRESH)
    assert batch.trajectory is not None
    side = batch.trajectory.facts["side"][:, 5, None]
    best = torch.full((len(side), 3), -torch.inf)
    for plan in itertools.product(range(3), repeat=regimes.config.plan_steps):
        obs, total = batch.obs[:, 5], torch.zeros(len(side))
        for a in plan:
            action = torch.full((len(side),), a)
            total, obs = total + worlds.pay(obs, action, side), worlds.move(obs, action, side)
        best[:, plan[0]] = best[:, plan[0]].maximum(total)
    top = best.topk(2, dim=1).values
    clear = top[:, 0] - top[:, 1] > 0.1
    with torch.no_grad():
        chosen = regimes.logits(batch)[:, 5].argmax(-1)
    assert clear.double().mean() > 0.5
    assert (chosen == best.argmax(-1))[clear].double().mean() > 0.97
    assert set(best.argmax(-1)[clear].tolist()) == {1, 2}  # the two regimes want opposite things


# ---------------------------------------------------------------- the plan


class Corridor(nn.Module):
    """A known model: action 0 pays 0.2 and returns to 0; action 1 moves one forward and pays 1 from 2 on."""

    def __init__(self, d_context: int) -> None:
        super().__init__()
        self.d_context = d_context

    def forward(self, x: Tensor) -> Tensor:
        place, goes_on = x[..., 0], x[..., 2]
        moved = torch.where(goes_on == 1, 1.0, -place)
        paid = torch.where(goes_on == 1, (place >= 2).to(x.dtype), 0.2)
        return torch.stack([moved, paid], dim=-1)


@pytest.mark.parametrize(("steps", "best"), [(1, 0), (2, 0), (3, 1), (4, 1)])
def test_a_plan_is_as_wise_as_it_is_long(steps: int, best: int) -> None:
    """From 0, the reward is two moves away, beyond plans of one or two steps."""
    spec = Spec(obs=Vector(1), action=Discrete(2), horizon=5)
    policy = build_cadm(spec, plan_steps=steps)
    policy.forwards = Corridor(policy.config.d_context)  # pyright: ignore[reportAttributeAccessIssue]
    scores = policy.plan(torch.zeros(3, 1).double(), torch.zeros(3, policy.config.d_context).double())
    known = {1: (0.2, 0.0), 2: (0.4, 0.2), 3: (0.6, 1.0), 4: (1.2, 2.0)}[steps]
    assert scores.tolist() == [pytest.approx(known)] * 3
    assert scores.argmax(-1).tolist() == [best] * 3


@torch.no_grad()
def test_the_plan_is_the_best_of_all_plans() -> None:
    """Each member follows its own means; returns are averaged over members before plans are compared."""
    policy = build_cadm(plan_steps=2)
    generator = torch.Generator().manual_seed(1)
    obs = torch.randn(3, 5, generator=generator).double()
    context = torch.randn(3, policy.config.d_context, generator=generator).double()
    best = torch.full((3, 4), -torch.inf).double()
    for b, plan in itertools.product(range(3), itertools.product(range(4), repeat=2)):
        returns = []
        for member in range(policy.config.members):
            now, total = obs[b], 0.0
            for a in plan:
                row = torch.cat([now, torch.eye(4).double()[a], context[b]])
                told = policy.forwards(row[None])[member, 0]
                now, total = now + told[:-1], total + told[-1].item()
            returns.append(total)
        best[b, plan[0]] = max(best[b, plan[0]].item(), sum(returns) / len(returns))
    torch.testing.assert_close(policy.plan(obs, context), best)


def test_units_are_told_apart_by_what_is_usual() -> None:
    """Units estimate mean and deviation over many batches, invert exactly, and ignore padding."""
    generator, units = torch.Generator().manual_seed(0), Units(2)
    batches = torch.randn(300, 200, 2, generator=generator) * torch.tensor([3.0, 0.02]) + torch.tensor([5.0, -1.0])
    batches[:, 100:] = torch.nan
    for x in batches:
        units.see(x, torch.arange(200) < 100)
    assert units.mean_D.tolist() == [pytest.approx(5.0, abs=0.15), pytest.approx(-1.0, abs=0.001)]
    assert units.spread_D.tolist() == [pytest.approx(3.0, rel=0.05), pytest.approx(0.02, rel=0.05)]
    torch.testing.assert_close(units.back(units(batches[0, :100])), batches[0, :100])


class Bonus(Regimes):
    """One step in fifty pays 50 more or less, whatever the action."""

    def step(self, world: Tensor, action: Tensor) -> Transition[Tensor]:
        after = super().step(world, action)
        chance = (world[:, 0] * 7919).frac().abs()
        return replace(after, reward_B=after.reward_B + 50.0 * ((chance < 0.01).float() - (chance > 0.99).float()))


def test_a_rare_bonus_hides_nothing() -> None:
    """Squared errors would fit the bonus; the plan still ranks actions by their usual rewards."""
    policy = learn("cadm", Bonus(), steps=300, lr=1e-2, **SMALL)
    assert isinstance(policy, CaDM)
    assert_plans_well(policy)


def test_members_differ() -> None:
    policy = build("cadm", DISCRETE)
    assert isinstance(policy, CaDM)
    mean = policy.forwards(torch.ones(1, 5 + 4 + policy.config.d_context).double())
    assert mean.shape == (5, 1, 6)
    assert mean.flatten(1).unique(dim=0).shape[0] == 5


def test_outputs_of_any_scale_weigh_alike() -> None:
    """Scaling an output by 100 keeps the gradient's direction and shifts the loss by a known amount."""
    generator = torch.Generator().manual_seed(0)
    found = torch.randn(500, 2, generator=generator).double()
    valid = torch.arange(500) < 400
    slopes = []
    for scale in (1.0, 0.01):
        unit = torch.tensor([1.0, scale])
        mean = torch.zeros(1, 500, 2).double().requires_grad_()
        loss = gaussian_nll(mean, found * unit, valid)
        variance = (found[:400] * unit).square().mean(0)
        assert loss[valid].mean().item() == pytest.approx(0.5 * (1 + variance.log()).mean().item())
        loss[valid].sum().backward()
        assert mean.grad is not None
        slopes.append(mean.grad * unit)
    torch.testing.assert_close(slopes[0], slopes[1])


# ---------------------------------------------------------------- the context


def test_only_the_last_transitions_are_seen() -> None:
    """With K = 2, the transition three steps ago has no influence; the one two steps ago has."""
    policy = build_cadm(context_steps=2)
    batch = random_batch(DISCRETE, whole=True)
    before = stream(policy, batch)
    for t, changes in ((3, False), (4, False), (5, True), (6, True)):  # the transition in the feedback of t
        batch.prev_reward[:, t] += 1.0
        after = stream(policy, batch)
        assert torch.equal(after[:, 6], before[:, 6]) is not changes, t
        batch.prev_reward[:, t] -= 1.0


def test_a_context_must_serve_the_steps_ahead() -> None:
    """Step i is predicted from the contexts of the last J steps within the episode."""
    policy, batch = build_cadm(future_steps=3), random_batch(DISCRETE, episodes=1)
    losses = policy.loss(batch)
    assert losses["reward"][1] == 7 + 6 + 5
    assert losses["forward"][1] == losses["backward"][1] == 6 + 5 + 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"members": 0}, "members=0 must be at least 1"),
        ({"d_encoder": 3}, "d_encoder=3"),
        ({"backward_weight": -0.5}, "backward_weight=-0.5"),
        ({"random_share": -1.0}, "random_share=-1.0"),
    ],
)
def test_a_bad_setting_is_named_with_its_value(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CaDMConfig(**settings)


def test_too_many_plans_are_refused_with_their_number() -> None:
    with pytest.raises(ValueError, match=r"are 65536 plans, and at most 20000 are supported: lower plan_steps"):
        build("cadm", DISCRETE, plan_steps=8)


def test_cadm_learns_from_logs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed and resumed training gives the same bytes."""
    config = in_the_dark("cadm", monkeypatch)
    assert build("cadm", DISCRETE).phases()[0].behaviour == Behaviour(0.3)
    assert_resumes(config, tmp_path, monkeypatch)
    rows = train(config, tmp_path / "whole", resume=True, device="cpu").rows("metrics.jsonl")
    assert {name for name in rows[0] if name.startswith("loss/")} == {"loss/forward", "loss/reward", "loss/backward"}
    assert rows[0]["phase"] == "dynamics"
