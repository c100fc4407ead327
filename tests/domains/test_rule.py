"""Worlds with a hidden rule: their laws, rewards and metrics against known answers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.builders import build_random
from uat.acting import rollout
from uat.domains.rule import Rule, RuleConfig
from uat.domains.rule.domain import since_flip
from uat.domains.rule.law import drifting, rows, rules, simplex, turns
from uat.episode import Trajectory
from uat.noise import gumbel

TASKS = ("fixed", "flip", "drift")


def play(config: RuleConfig, episodes: int = 64, seed: int = 3, reference: str | None = "random") -> Trajectory:
    """Episodes of a reference, or of the expert."""
    domain, ids = Rule(config), torch.arange(episodes)
    simulator, agent = domain.simulator("test", "cpu"), domain.references()[reference] if reference else None
    noise_BTA = gumbel(seed, "play", ids, config.horizon * config.num_actions).view(episodes, config.horizon, -1)
    sampled = agent is not None and agent.sampled
    return rollout(agent, simulator, simulator.noise(ids, seed), noise_BTA if sampled else None)


def scores_by_hand(config: RuleConfig, obs_BTO: Tensor, seed: int = 3) -> Tensor:
    """(B, T, K) scores from the laws, one step after the other."""
    ids, count, steps = torch.arange(len(obs_BTO)), config.num_actions, config.horizon
    z = rules(seed, ids, count, config.d_obs)[:, None].expand(-1, steps, -1, -1)
    if config.task == "drift":
        z = drifting(seed, ids, count, config.d_obs, steps, config.drift)
    w_BTKO = simplex(count) @ z
    if config.task == "flip":
        turn_BT = turns(seed, ids, count, steps, config.flip_chance)
        w_BTKO = torch.stack(
            [
                torch.stack([w_BTKO[b, t].roll(-int(turn_BT[b, t]), 0) for t in range(steps)])
                for b in range(len(obs_BTO))
            ]
        )
    return (w_BTKO @ obs_BTO.double()[..., None])[..., 0]


# ---------------------------------------------------------------- laws


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_the_corners_of_the_simplex_are_unit_vectors_and_all_pairs_are_alike(count: int) -> None:
    corner_KJ = simplex(count)
    expected_KK = torch.full((count, count), -1 / (count - 1), dtype=torch.float64).fill_diagonal_(1)
    torch.testing.assert_close(corner_KJ @ corner_KJ.T, expected_KK, rtol=0, atol=1e-12)
    torch.testing.assert_close(corner_KJ.sum(0), torch.zeros(count - 1, dtype=torch.float64), rtol=0, atol=1e-12)


def test_two_actions_have_opposite_rows() -> None:
    assert simplex(2).tolist() == [[1], [-1]]


@pytest.mark.parametrize("count", [2, 4])
def test_rows_have_an_expected_squared_length_of_one(count: int) -> None:
    w_BKO = rows(simplex(count), rules(5, torch.arange(20_000), count, 6))
    torch.testing.assert_close(w_BKO.square().sum(-1).mean(0), torch.ones(count).double(), rtol=0, atol=0.02)
    assert w_BKO.sum(1).abs().max() < 1e-12
    assert w_BKO.mean().abs() < 0.01


def test_directions_of_a_rule_are_uniform() -> None:
    """The first coordinate of a uniform direction has mean 0, variance 1 / d and fourth moment 3 / (d (d + 2))."""
    w_BO = rules(6, torch.arange(50_000), 2, 4)[:, 0]
    first_B = (w_BO / w_BO.norm(dim=1, keepdim=True))[:, 0]
    for power, expected in ((1, 0.0), (2, 1 / 4), (4, 3 / (4 * 6))):
        assert first_B.pow(power).mean().item() == pytest.approx(expected, abs=0.005)


def test_drift_is_stationary_and_forgets_as_stated() -> None:
    z_BPJO = drifting(7, torch.arange(20_000), 3, 4, 30, 0.1)
    assert torch.equal(z_BPJO[:, 0], rules(7, torch.arange(20_000), 3, 4))
    torch.testing.assert_close(z_BPJO.var(0), torch.full((30, 2, 4), 0.25).double(), rtol=0, atol=0.02)
    for lag in (1, 5, 20):
        correlation = 4 * (z_BPJO[:, lag] * z_BPJO[:, 0]).mean().item()
        assert correlation == pytest.approx(0.9 ** (lag / 2), abs=0.02)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_flips_come_at_their_rate_and_leave_no_action_its_row(count: int) -> None:
    turn_BT = turns(8, torch.arange(4000), count, 40, 0.1)
    assert (turn_BT[:, 0] == 0).all()
    move_BT = (turn_BT[:, 1:] - turn_BT[:, :-1]) % count
    assert (move_BT > 0).float().mean().item() == pytest.approx(0.1, abs=0.005)
    share = torch.bincount(move_BT[move_BT > 0], minlength=count)[1:] / (move_BT > 0).sum()
    assert (share - 1 / (count - 1)).abs().max() < 0.02


def test_a_flip_of_two_actions_changes_the_sign() -> None:
    config = RuleConfig(task="flip", flip_chance=0.3)
    trajectory = play(config)
    w_B1O = rules(3, torch.arange(64), 2, config.d_obs)
    sign_BT = 1 - 2 * trajectory.facts["turn"]
    score_BT = sign_BT * (w_B1O * trajectory.obs).sum(-1)
    torch.testing.assert_close(trajectory.facts["score"][..., 0], score_BT.float())


# ---------------------------------------------------------------- worlds


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("count", [2, 4])
def test_scores_and_the_right_action_follow_from_the_laws(task: Any, count: int) -> None:
    config = RuleConfig(task=task, num_actions=count, d_obs=3, horizon=12, flip_chance=0.3, drift=0.3)
    trajectory = play(config)
    score_BTK = scores_by_hand(config, trajectory.obs)
    torch.testing.assert_close(trajectory.facts["score"], score_BTK.float(), rtol=0, atol=1e-5)
    assert torch.equal(trajectory.required_target, score_BTK.argmax(-1))
    assert trajectory.obs.mean().abs() < 0.05
    assert trajectory.obs.std().item() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_signs_are_right_or_wrong_and_flipped_at_their_rate(noise: float) -> None:
    trajectory = play(RuleConfig(num_actions=3, label_noise=noise), episodes=500)
    right_BT = trajectory.action == trajectory.required_target
    clean_BT = torch.where(right_BT, 1.0, -1.0)
    assert (trajectory.reward != clean_BT).float().mean().item() == pytest.approx(noise, abs=0.01)
    assert torch.equal(trajectory.reward.abs(), torch.ones_like(clean_BT))


def test_payoffs_are_scores_with_noise() -> None:
    trajectory = play(RuleConfig(reward="payoff", num_actions=3, payoff_noise=0.5), episodes=500)
    earned_BT = trajectory.facts["score"].gather(-1, trajectory.action[..., None])[..., 0]
    noise_BT = trajectory.reward - earned_BT
    assert noise_BT.mean().abs() < 0.01
    assert noise_BT.std().item() == pytest.approx(0.5, abs=0.01)
    assert ((noise_BT * earned_BT).mean() / noise_BT.std() / earned_BT.std()).abs() < 0.02


def test_actions_change_neither_observations_nor_rules() -> None:
    config = RuleConfig(task="flip")
    expert, random = play(config, reference=None), play(config)
    for name in ("obs", "target"):
        assert torch.equal(getattr(expert, name), getattr(random, name))
    assert not torch.equal(expert.action, random.action)


@pytest.mark.parametrize("reward", ["sign", "payoff"])
def test_a_random_log_is_what_policies_see_and_their_own_actions_are_what_counts(reward: Any) -> None:
    own, logged = (RuleConfig(reward=reward, actions=actions) for actions in ("own", "random"))
    first, second = play(logged, reference="hebbian"), play(logged)
    assert first.told is not None
    assert second.told is not None
    assert torch.equal(first.told.action, second.told.action)  # independent of the policy
    assert torch.equal(first.told.reward, second.told.reward)
    assert first.told.action.float().mean().item() == pytest.approx(0.5, abs=0.03)
    repeated = play(own)
    same_BT = first.told.action == repeated.action
    assert torch.equal(first.told.reward[same_BT], repeated.reward[same_BT])
    assert torch.equal(second.reward, repeated.reward)  # earned by the actions of the policy
    batch = logged.spec.clock.batch(first)
    assert torch.equal(batch.prev_action[:, 1:], first.told.action[:, :-1])
    assert torch.equal(batch.prev_reward[:, 1:], first.told.reward[:, :-1])


@pytest.mark.parametrize("task", TASKS)
def test_longer_episodes_begin_with_the_shorter_ones(task: Any) -> None:
    """Numbers of a step do not depend on the horizon, except that one more observation is drawn."""
    short, long = (play(RuleConfig(task=task, horizon=steps), episodes=8, reference=None) for steps in (10, 25))
    assert torch.equal(short.obs, long.obs[:, :10])
    assert torch.equal(short.action, long.action[:, :10])


def test_no_agent_reads_hidden_facts() -> None:
    """The opposite rule with negated signs gives the same feedback, and calls for the opposite actions."""
    domain = Rule(RuleConfig(horizon=12))
    simulator = domain.simulator("test", "cpu")
    noise = simulator.noise(torch.arange(32), 3)
    opposite = {**noise, "score": -noise["score"], "reward": -noise["reward"], "turn": 1 - noise["turn"]}
    policies = {method: build_random(method, domain.spec, dtype=torch.float32) for method in ("uat", "adt", "vanilla")}
    for name, agent in {**policies, **domain.references()}.items():
        draws_BTA = gumbel(1, "draws", torch.arange(32), 24).view(32, 12, 2).float() if agent.sampled else None
        first, second = (rollout(agent, simulator, hidden, draws_BTA) for hidden in (noise, opposite))
        assert torch.equal(first.required_target, 1 - second.required_target)
        for field in ("obs", "action", "reward"):
            assert torch.equal(getattr(first, field), getattr(second, field)), name


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("reward", "actions", "count"), [("sign", "own", 2), ("sign", "random", 3), ("payoff", "own", 3)]
)
def test_no_task_reads_values_on_the_host(task: Any, reward: Any, actions: Any, count: int) -> None:
    """Meta tensors hold no values, so that everything that a CUDA graph cannot capture raises."""
    config = RuleConfig(task=task, reward=reward, actions=actions, num_actions=count, d_obs=2, horizon=4)
    domain = Rule(config)
    noise = domain.simulator("test", "cpu").noise(torch.arange(3), 1)
    for agent in (None, *domain.references().values()):
        played = rollout(agent, domain.simulator("test", "meta"), {name: x.to("meta") for name, x in noise.items()})
        assert all(value.shape == (3,) for value in domain.measure(played).values())


@pytest.mark.parametrize("settings", [{}, {"task": "flip"}, {"task": "drift", "num_actions": 3, "reward": "payoff"}])
def test_episodes_depend_on_seed_and_id_alone(settings: dict[str, Any]) -> None:
    simulator, some = Rule(RuleConfig(actions="random", **settings)).simulator("test", "cpu"), torch.tensor([17, 3, 17])
    whole, part, other = (simulator.noise(ids, seed) for ids, seed in ((torch.arange(20), 1), (some, 1), (some, 2)))
    for name, value in whole.items():
        assert torch.equal(part[name], value[some]), name
        assert name in ("turn", "reward") or not torch.equal(part[name], other[name]), name


# ---------------------------------------------------------------- metrics


def test_metrics_by_hand() -> None:
    config = RuleConfig(task="flip", horizon=30, label_noise=0.1)
    domain, trajectory = Rule(config), play(config)
    right_BT = (trajectory.action == trajectory.required_target).double()
    measured = domain.measure(trajectory)
    torch.testing.assert_close(measured["accuracy"].double(), right_BT.mean(1))
    torch.testing.assert_close(measured["late_accuracy"].double(), right_BT[:, 10:].mean(1))
    torch.testing.assert_close(measured["return"], trajectory.reward.sum(1))
    torch.testing.assert_close(measured["regret"], 1.6 * (1 - right_BT.float()).sum(1))
    for b in range(20):
        turn = trajectory.facts["turn"][b].tolist()
        counted = {t + i for t in range(1, 30) if turn[t] != turn[t - 1] for i in range(5) if t + i < 30}
        value = measured["post_flip_accuracy"][b].item()
        if counted:
            assert value == pytest.approx(sum(right_BT[b, t].item() for t in counted) / len(counted))
        else:
            assert math.isnan(value)


def test_steps_since_a_flip_by_hand() -> None:
    assert since_flip(torch.tensor([[0, 0, 1, 1, 0, 0]])).tolist() == [[6, 7, 0, 1, 0, 1]]


def test_regret_of_payoffs_is_the_lost_score() -> None:
    config = RuleConfig(reward="payoff", num_actions=3)
    trajectory = play(config)
    score_BTK, action_BT = trajectory.facts["score"], trajectory.action
    lost_BT = score_BTK.max(-1).values - score_BTK.gather(-1, action_BT[..., None])[..., 0]
    torch.testing.assert_close(Rule(config).measure(trajectory)["regret"], lost_BT.sum(1))
    assert (Rule(config).measure(play(config, reference=None))["regret"] == 0).all()


def test_only_flips_have_an_accuracy_after_flips() -> None:
    for task in TASKS:
        names = [metric.name for metric in Rule(RuleConfig(task=task)).metrics]
        assert ("post_flip_accuracy" in names) == (task == "flip")
        assert names[0] == "accuracy"


def test_settings_are_named() -> None:
    assert Rule(RuleConfig(task="flip")).setting == "default"
    assert Rule(RuleConfig(task="drift", d_obs=5, reward="payoff")).setting == "reward=payoff,d_obs=5"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"d_obs": 0}, "d_obs=0 must be at least 1"),
        ({"num_actions": 1}, "num_actions=1 must be at least 2"),
        ({"label_noise": 0.5}, r"label_noise=0\.5 must lie in \[0, 0\.5\)"),
        ({"label_noise": -0.1}, r"label_noise=-0\.1 must lie in"),
        ({"payoff_noise": 0.0}, r"payoff_noise=0\.0 must be positive"),
        ({"flip_chance": 0.0}, r"flip_chance=0\.0 must lie in \(0, 1\)"),
        ({"drift": 1.0}, r"drift=1\.0 must lie in \(0, 1\)"),
        ({"horizon": 0}, "horizon=0 must be at least 1"),
        ({"task": "jump"}, "task='jump' must be one of 'fixed', 'flip', 'drift'"),
        ({"reward": "click"}, "reward='click' must be one of 'sign', 'payoff'"),
        ({"actions": "logged"}, "actions='logged' must be one of 'own', 'random'"),
    ],
)
def test_settings_out_of_range_are_refused_in_a_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        RuleConfig(**settings)
