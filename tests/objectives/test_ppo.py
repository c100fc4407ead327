"""PPO: its laws, its update beside a plain reference, its statistics, and the refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import uat
from tests.builders import ALL_SPECS, SIZES, random_trajectory, randomise, stream
from uat.config import RunConfig
from uat.distributions import Categorical
from uat.engines import Engine
from uat.engines.update import alone
from uat.episode import Trajectory
from uat.evaluation.scores import variant_of
from uat.methods import METHODS, Policy
from uat.noise import integers
from uat.objectives import OBJECTIVES
from uat.objectives.ppo import PPO, PPOConfig
from uat.objectives.returns import with_last_observation
from uat.settings import MOST_EPOCHS
from uat.training.reusing import ReusingUpdates
from uat.training.surroundings import seeded
from uat.training.validation import best_epoch

CPU = torch.device("cpu")
LEARNERS = ("vanilla", "gtrxl", "uat", "uat-late", "adt", "adt-prev", "dpt", "dt", "dt-actions")
PLAIN = PPOConfig(scale_rewards=False, scale_observations=False, target_kl=None)


def policy_of(method: str, spec: str = "vector-discrete") -> Policy:
    entry = METHODS[method]
    known = {name: value for name, value in SIZES.items() if name in entry.config.__dataclass_fields__}
    with seeded(0, CPU):
        policy = entry.build(ALL_SPECS[spec], entry.configure(**known))
    return randomise(policy.double(), 1)


def cut_episodes(policy: Policy, episodes: int = 5) -> Trajectory:
    """Return random episodes of several lengths in double precision, every second one truncated."""
    played = random_trajectory(policy.spec, episodes=episodes)
    cut_B1 = (torch.arange(episodes) % 2 == 0)[:, None]
    final = random_trajectory(policy.spec, episodes=episodes, seed=9).obs[:, 0]
    played = replace(
        played,
        terminated=played.terminated & ~cut_B1,
        truncated=played.terminated & cut_B1,
        final_obs=final,
        target=None,
    )
    return played.map(lambda x: x.double() if x.is_floating_point() else x)


def prepared(objective: PPO, played: Trajectory) -> Any:
    ready = objective.prepare(played, alone, 0.0)
    assert ready is not None
    return ready


# ---------------------------------------------------------------- laws


@pytest.mark.parametrize("method", LEARNERS)
def test_the_ratio_is_one_before_the_first_update(method: str) -> None:
    policy = policy_of(method)
    objective, played = PPO(policy, PLAIN), cut_episodes(policy)
    ready = prepared(objective, played)
    for row_R in objective.minibatches(3, len(played.valid)):
        own = ready.rows(row_R)
        logits = policy.logits(policy.spec.clock.batch(own.episodes))
        change_BT = policy.distribution(logits).log_prob(own.episodes.action) - own.log_prob_BT
        assert change_BT[own.episodes.valid].exp().sub(1).abs().max() < 1e-10
        _, measures = objective.loss(ready, row_R)
        assert measures["kl"][0].abs() < 1e-10
        assert measures["clipped"][0] == 0


@pytest.mark.parametrize("method", LEARNERS)
def test_old_probabilities_are_those_of_acting(method: str) -> None:
    """The policy that played step by step and the parallel pass agree, also where an episode was truncated."""
    policy = policy_of(method)
    played = cut_episodes(policy)
    logits = stream(policy, policy.spec.clock.batch(played))
    acted_BT = policy.distribution(logits).log_prob(played.action)
    ready = prepared(PPO(policy, PLAIN), played)
    assert (acted_BT - ready.log_prob_BT)[played.valid].abs().max() < 1e-10


def test_actions_in_a_box_have_the_probabilities_of_acting() -> None:
    policy = policy_of("uat", "vector-box")
    played = cut_episodes(policy)
    acted_BT = policy.distribution(stream(policy, policy.spec.clock.batch(played))).log_prob(played.action)
    assert (acted_BT - prepared(PPO(policy, PLAIN), played).log_prob_BT)[played.valid].abs().max() < 1e-10


def plain_reference(policy: Policy, critic: Any, played: Trajectory, config: PPOConfig) -> Tensor:
    """Return PPO's loss by loops over episodes and steps, at the first update (ratio 1), for its gradient."""
    log_probs, values, entropies = [], [], []
    for row in range(len(played.valid)):
        length = int(played.valid[row].sum())
        one = played.map(lambda x, row=row: x[row : row + 1])
        batch = policy.spec.clock.batch(with_last_observation(one))
        h_TD = policy.features(batch)[0]
        answer = policy.distribution(policy.head.logits(h_TD[:length]))
        log_probs.append(answer.log_prob(played.action[row, :length]))
        entropies.append(answer.entropy)
        value_T = critic(h_TD[None])[0]
        cut = bool(played.truncated is not None and played.truncated[row].any())
        values.append((value_T[:length], value_T[length].detach() if cut else torch.zeros(())))
    advantage, target = [], []
    for row, (value_T, after) in enumerate(values):
        v, gain, own = [*value_T.detach().tolist(), float(after)], 0.0, []
        for t in reversed(range(len(value_T))):
            error = float(played.reward[row, t]) + config.discount * v[t + 1] - v[t]
            gain = error + config.discount * config.gae_decay * gain
            own.append(gain)
        advantage.append(torch.tensor(own[::-1], dtype=torch.float64))
        target.append(advantage[-1] + value_T.detach())
    every = torch.cat(advantage)
    spread = every.std(correction=0) + 1e-8
    loss = torch.zeros((), dtype=torch.float64)
    for row, (value_T, _) in enumerate(values):
        ratio = (log_probs[row] - log_probs[row].detach()).exp()
        standard = (advantage[row] - every.mean()) / spread
        loss = loss - (ratio * standard).sum() + config.value_weight * 0.5 * (value_T - target[row]).square().sum()
        loss = loss - config.entropy * entropies[row].sum()
    return loss / len(every)


@pytest.mark.parametrize("method", ["uat", "adt-prev"])
def test_one_update_equals_a_plain_reference(method: str) -> None:
    policy = policy_of(method)
    objective, played = PPO(policy, PLAIN), cut_episodes(policy)
    randomise(objective.critic.value, 2)
    weights = [*policy.parameters(), *objective.critic.parameters()]
    ready = prepared(objective, played)
    losses, _ = objective.loss(ready, torch.arange(len(played.valid)))
    count = played.valid.sum()
    ours = torch.autograd.grad(
        torch.stack([total / count for total, _ in losses.values()]).sum(), weights, allow_unused=True
    )
    theirs = torch.autograd.grad(plain_reference(policy, objective.critic, played, PLAIN), weights, allow_unused=True)
    reached = 0
    for own, other in zip(ours, theirs, strict=True):
        assert (own is None) == (other is None)
        if own is not None and other is not None:
            torch.testing.assert_close(own, other, atol=1e-10, rtol=1e-8)
            reached += int(bool(own.abs().max() > 0))
    assert reached > len(weights) // 2


def test_padding_changes_nothing() -> None:
    policy = policy_of("uat")
    objective, played = PPO(policy, PLAIN), cut_episodes(policy)
    other = replace(
        played,
        reward=torch.where(played.valid, played.reward, 1e6),
        obs=torch.where(played.valid[..., None], played.obs, math.nan),
    )
    losses = [objective.loss(prepared(objective, x), torch.arange(5))[0] for x in (played, other)]
    for name, (total, count) in losses[0].items():
        assert torch.equal(total, losses[1][name][0])
        assert torch.equal(count, losses[1][name][1])


def test_minibatches_hold_every_episode_once_in_each_pass() -> None:
    objective = PPO(policy_of("vanilla"), replace(PLAIN, passes=2, minibatches=3))
    parts = list(objective.minibatches(7, 10))
    assert [sorted(torch.cat(parts[i : i + 3]).tolist()) for i in (0, 3)] == [list(range(10))] * 2
    assert not torch.equal(torch.cat(parts[:3]), torch.cat(parts[3:]))
    again = list(objective.minibatches(7, 10))
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))
    assert len(list(objective.minibatches(7, 2))) == 4  # not more minibatches than episodes


# ---------------------------------------------------------------- statistics and stopping


def test_rewards_are_scaled_in_the_loss_alone() -> None:
    policy = policy_of("uat")
    played = cut_episodes(policy)
    large = replace(played, reward=1000 * played.reward)
    ready = [prepared(PPO(policy, replace(PLAIN, scale_rewards=True)), x) for x in (played, large)]
    assert ready[1].return_BT.abs().max() < 100
    assert torch.equal(ready[1].episodes.reward, large.reward)
    unscaled = prepared(PPO(policy, PLAIN), large)
    assert unscaled.return_BT.abs().max() > 500


def test_statistics_change_after_the_updates() -> None:
    """The first rollout only fits the statistics, and no rollout meets statistics that change under it."""
    policy = policy_of("uat")
    objective = PPO(policy, replace(PLAIN, scale_observations=True))
    part = objective.parts[0]
    assert part.normalizer is not None
    played = cut_episodes(policy)
    assert objective.prepare(played, alone, 0.0) is None
    objective.finish(played, alone)
    seen = played.obs[played.valid]
    torch.testing.assert_close(part.normalizer.mean, seen.mean(0))
    torch.testing.assert_close(part.normalizer.scale, seen.std(0, correction=0))
    other = replace(played, obs=played.obs + 10)
    before = part.normalizer.mean.clone()
    prepared(objective, other)
    assert torch.equal(part.normalizer.mean, before)
    objective.finish(other, alone)
    torch.testing.assert_close(part.normalizer.mean, before + 5)


def test_updates_stop_at_the_target_divergence() -> None:
    counts = []
    for target in (None, 1e-6):
        policy = policy_of("uat")
        objective, played = PPO(policy, replace(PLAIN, target_kl=target)), cut_episodes(policy)
        optimizer = torch.optim.Adam([*policy.parameters(), *objective.critic.parameters()], lr=1e-2)
        updates = ReusingUpdates(Engine(policy), objective, optimizer, 0.5, alone)
        numbers = updates.update(played, 0, place=0, episodes=5, share_done=0.0)
        counts.append(numbers["updates"].item())
    assert counts == [12, 1]


def test_the_entropy_bonus_fades() -> None:
    policy = policy_of("vanilla")
    objective = PPO(policy, replace(PLAIN, entropy=0.5, last_entropy=0.1))
    objective.prepare(cut_episodes(policy), alone, 0.25)
    assert objective.entropy_weight == pytest.approx(0.4)


def test_unknown_rewards_count_as_zero() -> None:
    policy = policy_of("uat")
    played = cut_episodes(policy)
    known = torch.rand(played.valid.shape, generator=torch.Generator().manual_seed(3)) < 0.5
    missing = replace(played, reward=torch.where(known, played.reward, math.nan), reward_known=known)
    zeros = replace(played, reward=torch.where(known, played.reward, 0.0))
    ready = [prepared(PPO(policy, PLAIN), x) for x in (missing, zeros)]
    assert torch.equal(ready[0].return_BT, ready[1].return_BT)


def test_an_impossible_action_leaves_the_loss_finite() -> None:
    """A mask may exclude an action after it was taken, as in a world with an error."""
    policy = policy_of("vanilla")
    played = cut_episodes(policy)
    objective = PPO(policy, PLAIN)
    ready = prepared(objective, played)
    ready.log_prob_BT[0, 0] = -1000.0
    losses, _ = objective.loss(ready, torch.arange(5))
    assert all(total.isfinite() for total, _ in losses.values())


# ---------------------------------------------------------------- a whole training


class Arms(uat.Simulator):
    """One of three arms pays; which one is hidden. The episode ends when it has paid."""

    spec = uat.Spec(obs=uat.Vector(1), action=uat.Discrete(3), horizon=4)

    def noise(self, episode_ids: Tensor, seed: int) -> dict[str, Tensor]:
        return {"arm": integers(seed, "arms", episode_ids, 1, below=3)[:, 0]}

    def reset(self, noise: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return noise["arm"], torch.ones(len(noise["arm"]), 1)

    def step(self, world: Tensor, action: Tensor) -> uat.Transition:
        paid_B = action == world
        return uat.Transition(world, torch.ones(len(world), 1), paid_B.float() - 0.1, terminated_B=paid_B)


class Bandit(uat.Domain):
    name, spec = "bandit", Arms.spec

    def simulator(self, split: str, device: torch.device | str) -> Arms:
        return Arms()


class Logged(uat.Domain):
    name, spec = "logged", Arms.spec

    def simulator(self, split: str, device: torch.device | str) -> Any:
        raise NotImplementedError


SMALL = {
    "train.epochs": 30,
    "train.lr": 3e-3,
    "train.utility_lr": 1e-2,
    "train.batch_size": 64,
    "train.validate_every": 10,
    "objective.entropy": 0.02,
}


def test_a_policy_learns_from_rewards_alone(tmp_path: Path) -> None:
    """Trying one arm after the other takes two steps on average and returns 0.8; the same arm always, less than 0.2;
    arms at random, 0.75 at most in the long run."""
    run = uat.train(Bandit(), tmp_path / "run", method="uat", preset="smoke", objective="ppo", settings=SMALL)
    rows = run.rows("metrics.jsonl")
    assert rows[-1]["validation/return"] > 0.78
    assert rows[0]["updates"] == 0  # it only fits statistics
    assert {"return", "length", "entropy", "kl", "explained_variance", "steps"} <= rows[-1].keys()
    action = uat.Session(uat.load(run.path)).act([[1.0]])
    assert 0 <= int(action[0]) < 3


def test_an_interrupted_training_resumes_to_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from uat.training import checkpoint
    from uat.training.epoch import Epoch

    monkeypatch.setattr(checkpoint, "SAVE_SECONDS", 0.0)
    how: dict[str, Any] = {"method": "uat", "preset": "smoke", "objective": "ppo"}
    how["settings"] = {**SMALL, "train.epochs": 6, "train.validate_every": 2, "train.batch_size": 8}
    whole = uat.train(Bandit(), tmp_path / "whole", **how)
    run, begun = Epoch.run, []

    def crashing(self: Epoch, index: int, *rest: Any) -> Any:
        begun.append(index)
        if index == 4:
            raise KeyboardInterrupt
        return run(self, index, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Epoch, "run", crashing)
        with pytest.raises(KeyboardInterrupt):
            uat.train(Bandit(), tmp_path / "part", **how)
    part = uat.train(Bandit(), tmp_path / "part", **how, resume=True)
    for name in ("metrics.jsonl", "policy.safetensors", "state/train.safetensors"):
        assert whole.file(name).read_bytes() == part.file(name).read_bytes(), name


def test_training_ends_after_a_number_of_steps(tmp_path: Path) -> None:
    settings = {**SMALL, "train.steps": 500, "train.batch_size": 64, "train.validate_every": 100}
    run = uat.train(Bandit(), tmp_path / "run", method="vanilla", preset="smoke", objective="ppo", settings=settings)
    steps = [row["steps"] for row in run.rows("metrics.jsonl")]
    assert sum(steps) >= 500 > sum(steps[:-1])
    assert "validation/return" in run.rows("metrics.jsonl")[-1]


def test_cloning_comes_first_and_rewards_after_it(tmp_path: Path) -> None:
    settings = {"objective.clone_epochs": 3, "train.epochs": 2, "domain.horizon": 5, "train.validate_every": 1}
    run = uat.train("darkroom", tmp_path / "run", preset="smoke", objective="ppo", settings=settings)
    assert [row["phase"] for row in run.rows("metrics.jsonl")] == ["imitation"] * 3 + ["ppo"] * 2


# ---------------------------------------------------------------- settings and refusals


def test_the_objective_is_part_of_a_runs_identity() -> None:
    plain, learnt = (uat.recipe("darkroom", "uat", "smoke", objective=name) for name in (None, "ppo"))
    assert plain == uat.recipe("darkroom", "uat", "smoke", objective="imitation")
    assert learnt.train.patience == MOST_EPOCHS
    assert learnt.method.dropout == 0
    other = uat.override(learnt, {"objective.clip": 0.1})
    assert len({plain.identity(), learnt.identity(), other.identity()}) == 3
    assert isinstance(learnt, RunConfig)
    assert uat.config.run_config_from_json(uat.config.to_json(other)) == other


def test_a_row_names_the_objective_and_what_differs_from_its_recipe() -> None:
    config = uat.recipe("darkroom", "uat", "smoke", objective="ppo")
    assert variant_of(config) == ["ppo"]
    other = uat.override(config, {"objective.clip": 0.1, "train.lr": 1e-3})
    assert variant_of(other) == ["ppo", "train.lr=0.001", "objective.clip=0.1"]
    assert variant_of(uat.recipe("darkroom", "uat", "smoke")) == []


def test_every_objective_is_described() -> None:
    assert all(entry.summary for entry in OBJECTIVES.values())


@pytest.mark.parametrize(
    ("domain", "method", "changes", "why"),
    [
        ("markets", "uat", {}, "are not random"),
        ("movielens", "uat", {}, "recorded episodes cannot be played"),
        ("sepsis", "iql", {}, "defines its own training"),
        ("darkroom", "uat", {"train.random_start": True}, "goes with imitation alone"),
    ],
)
def test_what_cannot_learn_by_ppo_is_refused(
    domain: str, method: str, changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=why):
        uat.train(domain, tmp_path / "run", method=method, preset="smoke", objective="ppo", settings=changes)


def test_an_unknown_objective_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match="unknown objective 'pro'; did you mean 'ppo'"):
        uat.recipe("darkroom", "uat", objective="pro")


# ---------------------------------------------------------------- masks, constant rewards, cloning, long episodes


class Masked(Arms):
    """Arms of which one is not allowed, another at each step."""

    def reset(self, noise: dict[str, Tensor]) -> tuple[Any, Tensor]:
        self.t = 0
        return super().reset(noise)

    def allowed(self, world: Tensor) -> Tensor:
        return (torch.arange(3) != self.t % 3).expand(len(world), 3)

    def step(self, world: Tensor, action: Tensor) -> uat.Transition:
        assert (action != self.t % 3).all()
        self.t += 1
        return super().step(world, action)


class Flat(Arms):
    """One-step episodes that all earn the same."""

    def step(self, world: Tensor, action: Tensor) -> uat.Transition:
        every_B = torch.ones(len(world), dtype=torch.bool)
        return uat.Transition(world, torch.ones(len(world), 1), -torch.ones(len(world)), terminated_B=every_B)


class Other(Bandit):
    def __init__(self, worlds: type[Arms]) -> None:
        self.worlds, self.setting = worlds, worlds.__name__

    def simulator(self, split: str, device: torch.device | str) -> Arms:
        return self.worlds()


def test_entropy_of_masked_actions_has_a_finite_gradient() -> None:
    logits = torch.zeros(4, requires_grad=True)
    Categorical(logits.masked_fill(torch.tensor([False, True, False, False]), -math.inf)).entropy.backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_policies_learn_under_masks(tmp_path: Path) -> None:
    run = uat.train(Other(Masked), tmp_path / "run", preset="smoke", objective="ppo", settings=SMALL)
    assert all(math.isfinite(row["gradient_norm"]) for row in run.rows("metrics.jsonl") if row["updates"])


@pytest.mark.parametrize("discount", [0.0, 0.99])
def test_constant_rewards_leave_losses_small(discount: float, tmp_path: Path) -> None:
    settings = {**SMALL, "train.epochs": 4, "objective.discount": discount}
    run = uat.train(Other(Flat), tmp_path / "run", preset="smoke", objective="ppo", settings=settings)
    rows = run.rows("metrics.jsonl")
    assert all(abs(row["loss/value"]) < 10 for row in rows if row["updates"])
    assert "explained_variance" not in rows[1]


def test_rewards_do_not_change_the_inputs_of_a_clone(tmp_path: Path) -> None:
    """PPO begins with exactly the policy that was cloned, and the summary names an epoch of its own phase."""
    settings = {"objective.clone_epochs": 3, "train.epochs": 1, "domain.horizon": 5, "train.validate_every": 1}
    settings |= {"objective.target_kl": 1e-30, "objective.passes": 1, "train.lr": 1e-30, "train.utility_lr": 1e-30}
    run = uat.train("darkroom", tmp_path / "run", preset="smoke", objective="ppo", settings=settings)
    rows = run.rows("metrics.jsonl")
    assert rows[-1]["phase"] == "ppo"
    assert rows[-1]["validation/return"] == rows[-2]["validation/return"]
    assert best_epoch(run)["phase"] == "ppo"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"objective.clone_epochs": 2}, "imitates an expert, and there is none"),
        ({"method.max_positions": 4}, r"method\.max_positions=4 must be at least 5"),
        ({"train.standardise": True}, "both standardise: choose one"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_training(
    changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=why):
        uat.train(Bandit(), tmp_path / "run", preset="smoke", objective="ppo", settings=changes)


def test_steps_are_for_objectives_that_count_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.steps=100 is for objectives that count environment steps"):
        uat.train("darkroom", tmp_path / "run", preset="smoke", settings={"train.steps": 100})


def test_epochs_may_end_a_training_before_its_steps(tmp_path: Path) -> None:
    settings = {**SMALL, "train.steps": 100_000, "train.epochs": 2}
    run = uat.train(Bandit(), tmp_path / "run", preset="smoke", objective="ppo", settings=settings)
    assert len(run.rows("metrics.jsonl")) == 2


def test_validation_may_sample_actions(tmp_path: Path) -> None:
    settings = {**SMALL, "train.epochs": 2, "evaluation.sampled": True}
    run = uat.train(Bandit(), tmp_path / "run", preset="smoke", objective="ppo", settings=settings)
    sampled = uat.evaluate(run).scores[0].value
    greedy = uat.override(run.config, {"evaluation.sampled": False})
    assert greedy.identity() != run.config.identity()
    other = uat.train(greedy, tmp_path / "greedy")
    assert uat.evaluate(other).scores[0].value != sampled
