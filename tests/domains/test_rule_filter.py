"""References of the hidden rule against brute force: normal conditioning, enumeration and importance sampling."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from uat.acting import rollout
from uat.clock import NO_ACTION
from uat.contracts import Agent
from uat.domains.domain import split_seed
from uat.domains.rule import Rule, RuleConfig
from uat.domains.rule.baselines import Hebbian, LinTS, LinUCB
from uat.domains.rule.domain import bayes_filter
from uat.domains.rule.filter import Belief, KalmanFilter, PointFilter, ProbitFilter, RuleFilter, fixed_points, probit
from uat.domains.rule.law import rows, simplex
from uat.episode import Step, Trajectory
from uat.noise import gumbel

Phi = torch.special.ndtr


def play(config: RuleConfig, episodes: int, seed: int = 5) -> Trajectory:
    """Episodes of a uniformly random player."""
    domain, ids = Rule(config), torch.arange(episodes)
    simulator = domain.simulator("test", "cpu")
    draws_BTA = gumbel(seed, "play", ids, config.horizon * config.num_actions).view(episodes, config.horizon, -1)
    return rollout(domain.references()["random"], simulator, simulator.noise(ids, seed), draws_BTA)


def answers(agent: Agent[Any], trajectory: Trajectory) -> Tensor:
    """(B, T, K) logits of an agent along these episodes."""
    streams, steps = trajectory.valid.shape
    state, batch = agent.init_state(streams, steps, "cpu"), agent.spec.clock.batch(trajectory)
    logits = []
    for t in range(steps):
        now_BK, state = agent.step(state, batch.step(t))
        logits.append(now_BK)
    return torch.stack(logits, dim=1)


def accuracy(agent: Agent[Any], trajectory: Trajectory) -> Tensor:
    """(B, T) whether the arg-max of the agent is right."""
    return (answers(agent, trajectory).argmax(-1) == trajectory.required_target).double()


def conditioned(
    config: RuleConfig, trajectory: Trajectory, b: int, t: int, turn_T: Tensor
) -> tuple[Tensor, Tensor, float]:
    """Mean and covariance of all scores at step t of one episode, given t payoffs and all turns, and log-evidence.

    No filter: the joint normal law of payoffs and scores, conditioned at once.
    """
    corner_KJ, count = simplex(config.num_actions), config.num_actions
    obs, action = trajectory.obs[b].double(), trajectory.action[b]
    row_T = (action + turn_T) % count
    feature = [(corner_KJ[row_T[j]], obs[j], j) for j in range(t)]
    asked = [(corner_KJ[(a + int(turn_T[t])) % count], obs[t], t) for a in range(count)]
    keep = math.sqrt(1 - config.drift) if config.task == "drift" else 1.0

    def covariance(left: Any, right: Any) -> Tensor:
        entries = [
            (u @ v) * (x @ y) / config.d_obs * keep ** abs(i - j)
            for (u, x, i), (v, y, j) in itertools.product(left, right)
        ]
        return (
            torch.stack(entries).view(len(left), len(right)) if entries else torch.zeros(len(left), len(right)).double()
        )

    paid = covariance(feature, feature) + config.payoff_noise**2 * torch.eye(t, dtype=torch.float64)
    reward, across = trajectory.reward[b, :t].double(), covariance(asked, feature)
    gain = across @ torch.linalg.inv(paid)
    law = torch.distributions.MultivariateNormal(torch.zeros(t, dtype=torch.float64), paid) if t else None
    evidence = law.log_prob(reward).item() if law else 0.0
    return gain @ reward, covariance(asked, asked) - gain @ across.T, evidence


# ---------------------------------------------------------------- Kalman


def test_one_payoff_by_hand() -> None:
    """d = 2, o = (1, 2), action 1 earned 3 with σ = 1: w ~ N(0, I / 2), so -o·w has variance 2.5 and gain 2.5 / 3.5."""
    config = RuleConfig(reward="payoff", d_obs=2)
    agent = KalmanFilter(config)
    state = agent.init_state(1, 2, "cpu")
    start = Step(
        obs=torch.tensor([[1.0, 2.0]]),
        prev_action=torch.tensor([NO_ACTION]),
        prev_reward=torch.zeros(1),
        first=torch.tensor([True]),
    )
    logits, state = agent.step(state, start)
    assert logits.exp().tolist() == [[0.5, 0.5]]
    belief = agent.learn(state, torch.tensor([1]), torch.tensor([3.0], dtype=torch.float64))
    mean = -torch.tensor([1.0, 2.0]).double() / 2 * 3 / 3.5
    cov = torch.eye(2).double() / 2 - torch.tensor([[1.0, 2.0], [2.0, 4.0]]).double() / 4 / 3.5
    torch.testing.assert_close(belief.mean_BMN[0, 0], mean)
    torch.testing.assert_close(belief.cov_BMNN[0, 0], cov)


@pytest.mark.parametrize("task", ["fixed", "drift"])
@pytest.mark.parametrize("count", [2, 3])
def test_the_kalman_filter_is_normal_conditioning(task: Any, count: int) -> None:
    config = RuleConfig(task=task, reward="payoff", num_actions=count, d_obs=3, horizon=8, payoff_noise=0.7, drift=0.2)
    trajectory, agent = play(config, 4), Watched(KalmanFilter(config))
    answers(agent, trajectory)
    for b, t in itertools.product(range(4), range(8)):
        mean_K, cov_KK, _ = conditioned(config, trajectory, b, t, torch.zeros(8, dtype=torch.long))
        found_mean, found_cov = agent.scores(t, b, 0)
        torch.testing.assert_close(found_mean, mean_K, rtol=0, atol=1e-9)
        torch.testing.assert_close(found_cov, cov_KK, rtol=0, atol=1e-9)


class Watched(Agent[Belief]):
    """A filter whose beliefs are kept."""

    def __init__(self, agent: RuleFilter) -> None:
        self.agent, self.spec, self.beliefs = agent, agent.spec, list[Belief]()

    def init_state(self, streams: int, capacity: int, device: Any) -> Belief:
        return self.agent.init_state(streams, capacity, device)

    def step(self, state: Belief, step: Step) -> tuple[Tensor, Belief]:
        logits_BK, belief = self.agent.step(state, step)
        self.beliefs.append(belief.map(torch.clone))
        return logits_BK, belief

    def scores(self, t: int, b: int, m: int) -> tuple[Tensor, Tensor]:
        """Mean and covariance of the scores of all actions, from the belief about Z."""
        x, corner_KJ = self.beliefs[t], self.agent.corners(self.beliefs[t])[b, m]
        to_scores = torch.einsum("kj,o->kjo", corner_KJ, x.obs_BO[b]).flatten(1)
        return to_scores @ x.mean_BMN[b, m], to_scores @ x.cov_BMNN[b, m] @ to_scores.T


@pytest.mark.parametrize("count", [2, 3])
def test_the_filter_of_flips_is_the_enumeration_of_all_histories(count: int) -> None:
    steps = 5
    config = RuleConfig(
        task="flip", reward="payoff", num_actions=count, d_obs=2, horizon=steps, flip_chance=0.3, payoff_noise=0.5
    )
    trajectory, histories = play(config, 3), count ** (steps - 1)
    found_BTK = answers(KalmanFilter(config, hypotheses=histories), trajectory).exp()
    for b in range(3):
        weights, chances = [], []
        for moves in itertools.product(range(count), repeat=steps - 1):
            turn_T = torch.tensor([0, *moves]).cumsum(0) % count
            mean_K, cov_KK, evidence = conditioned(config, trajectory, b, steps - 1, turn_T)
            prior = sum(math.log(0.7) if move == 0 else math.log(0.3 / (count - 1)) for move in moves)
            weights.append(prior + evidence)
            chances.append(chance_of_each(mean_K, cov_KK))
        expected_K = torch.tensor(weights).double().softmax(0) @ torch.stack(chances)
        torch.testing.assert_close(found_BTK[b, -1], expected_K, rtol=0, atol=1e-6 if count == 2 else 0.02)


def chance_of_each(mean_K: Tensor, cov_KK: Tensor) -> Tensor:
    """(K,) probability that each score is the highest: exact for two, by sampling for more."""
    if len(mean_K) == 2:
        first = Phi((mean_K[0] - mean_K[1]) / (cov_KK[0, 0] + cov_KK[1, 1] - 2 * cov_KK[0, 1]).sqrt())
        return torch.stack([first, 1 - first])
    values, vectors = torch.linalg.eigh(cov_KK)
    draws = torch.randn(20_000, len(mean_K), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    best = (mean_K + draws @ (vectors * values.clamp_min(0).sqrt()).T).argmax(-1)
    return torch.bincount(best, minlength=len(mean_K)).double() / len(draws)


def test_more_histories_change_little() -> None:
    config = RuleConfig(task="flip", reward="payoff", d_obs=5)
    trajectory = play(config, 128)
    few, many = (accuracy(KalmanFilter(config, hypotheses=m), trajectory).mean() for m in (32, 128))
    assert (few - many).abs() < 0.006


# ---------------------------------------------------------------- signs


def test_moments_of_a_reported_sign_by_integration() -> None:
    e_Q = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    density_Q = (-0.5 * e_Q.square()).exp() / math.sqrt(2 * math.pi) * (e_Q[1] - e_Q[0])
    for ratio, noise in itertools.product((-3.0, -0.5, 0.0, 2.0), (0.0, 0.2)):
        likelihood_Q = torch.where(e_Q + ratio > 0, 1 - noise, noise) * density_Q
        total = likelihood_Q.sum()
        mean = (likelihood_Q * e_Q).sum() / total
        variance = (likelihood_Q * e_Q.square()).sum() / total - mean**2
        log, pull, shrink = probit(torch.tensor(ratio, dtype=torch.float64), noise)
        torch.testing.assert_close(
            torch.stack([log.exp(), pull, 1 - shrink]), torch.stack([total, mean, variance]), rtol=0, atol=3e-4
        )


def test_one_sign_by_hand() -> None:
    """After one right sign the mean of w is along o, with length √(2 / π) / √d."""
    config = RuleConfig(d_obs=4)
    for agent in (ProbitFilter(config), PointFilter(config)):
        state = agent.init_state(1, 2, "cpu")
        start = Step(
            obs=torch.tensor([[2.0, 0.0, 0.0, 0.0]]),
            prev_action=torch.tensor([NO_ACTION]),
            prev_reward=torch.zeros(1),
            first=torch.tensor([True]),
        )
        _, state = agent.step(state, start)
        belief = agent.learn(state, torch.tensor([1]), torch.ones(1, dtype=torch.float64))
        expected = torch.tensor([-math.sqrt(2 / math.pi) / 2, 0, 0, 0], dtype=torch.float64)
        torch.testing.assert_close(belief.mean_BMN[0, 0], expected, rtol=0, atol=0.01)
        variance = torch.tensor([1 - 2 / math.pi, 1, 1, 1], dtype=torch.float64) / 4
        torch.testing.assert_close(belief.cov_BMNN[0, 0].diagonal(), variance, rtol=0, atol=0.01)


def importance(config: RuleConfig, trajectory: Trajectory, samples: int) -> Tensor:
    """(B, T) whether the posterior mode is right, by importance sampling with the same draws of the rule everywhere."""
    draws, count = torch.Generator().manual_seed(1), config.num_actions
    w_KSO = rows(simplex(count).float(), torch.randn(samples, count - 1, config.d_obs, generator=draws)).movedim(1, 0)
    right, likely, unlikely = [], 1 - config.label_noise, config.label_noise
    for b in range(len(trajectory.valid)):
        score_KTS = [trajectory.obs[b] @ w_SO.T for w_SO in w_KSO]
        best_TS = score_KTS[0] < score_KTS[1] if count == 2 else torch.stack(score_KTS).argmax(0)
        agrees_TS = (best_TS == trajectory.action[b, :, None]) == (trajectory.reward[b, :, None] > 0)
        after_TS = torch.where(agrees_TS, likely, unlikely).cumprod(0)
        weight_TS = torch.cat([torch.ones(1, samples), after_TS[:-1]])
        mass_TK = torch.stack([((best_TS == a) * weight_TS).sum(1) for a in range(count)], dim=1)
        right.append(mass_TK.argmax(1) == trajectory.required_target[b])
    return torch.stack(right).double()


@pytest.mark.parametrize(("width", "noise"), [(2, 0.0), (3, 0.0), (3, 0.1)])
def test_ep_is_within_half_a_percent_of_importance_sampling(width: int, noise: float) -> None:
    """On the same episodes, with room for what their number leaves open."""
    config = RuleConfig(d_obs=width, label_noise=noise)
    trajectory = play(config, 200)
    sampled_BT = importance(config, trajectory, 24_000)
    difference_B = (accuracy(ProbitFilter(config), trajectory) - sampled_BT).mean(1)
    error = difference_B.std().item() / math.sqrt(len(difference_B))
    assert abs(difference_B.mean().item()) < 0.005
    assert error < 0.004


def test_ep_is_better_than_matching_once() -> None:
    config = RuleConfig(d_obs=5)
    trajectory = play(config, 512)
    once, again = (accuracy(ProbitFilter(config, sweeps=sweeps), trajectory).mean() for sweeps in (0, 1))
    assert again > once + 0.001


def test_points_follow_importance_sampling_with_three_actions() -> None:
    config = RuleConfig(d_obs=2, num_actions=3, horizon=20)
    trajectory = play(config, 80)
    difference = accuracy(PointFilter(config), trajectory).mean() - importance(config, trajectory, 6_000).mean()
    assert difference.abs() < 0.02


def particles(config: RuleConfig, trajectory: Trajectory, count: int) -> Tensor:
    """(B, T) whether the arg-max of a bootstrap particle filter is right, for signs of two actions."""
    draws, right = torch.Generator().manual_seed(2), torch.zeros(trajectory.valid.shape, dtype=torch.float64)
    for b in range(len(right)):
        w_SO = torch.randn(count, config.d_obs, generator=draws)
        for t in range(config.horizon):
            if t and config.task == "drift":
                fresh_SO = torch.randn(count, config.d_obs, generator=draws)
                w_SO = math.sqrt(1 - config.drift) * w_SO + math.sqrt(config.drift) * fresh_SO
            elif t and config.task == "flip":
                w_SO = torch.where(torch.rand(count, 1, generator=draws) < config.flip_chance, -w_SO, w_SO)
            best_S = (w_SO @ trajectory.obs[b, t] < 0).long()
            right[b, t] = float((best_S.float().mean() > 0.5) == trajectory.required_target[b, t])
            agrees_S = (best_S == trajectory.action[b, t]) == (trajectory.reward[b, t] > 0)
            weight_S = torch.where(agrees_S, 1 - config.label_noise, config.label_noise).double().cumsum(0)
            place_S = (torch.arange(count) + 0.5) / count * weight_S[-1]
            w_SO = w_SO[torch.searchsorted(weight_S, place_S).clamp_max(count - 1)]
    return right


@pytest.mark.parametrize("task", ["drift", "flip"])
def test_ep_follows_a_particle_filter_where_the_rule_changes(task: Any) -> None:
    config = RuleConfig(task=task, d_obs=2, label_noise=0.05)
    trajectory = play(config, 60)
    difference_B = (accuracy(ProbitFilter(config), trajectory) - particles(config, trajectory, 4000)).mean(1)
    assert abs(difference_B.mean().item()) < 0.012
    assert difference_B.std().item() / math.sqrt(60) < 0.006


def test_two_filters_of_two_actions_agree() -> None:
    """Assumed-density filtering in closed form, and by a sum over points."""
    config = RuleConfig(d_obs=4, label_noise=0.1)
    trajectory = play(config, 32)
    exact, points = (answers(f, trajectory).exp() for f in (ProbitFilter(config, sweeps=0), PointFilter(config)))
    assert (exact - points).abs().mean() < 0.01


@pytest.mark.parametrize("task", ["fixed", "flip", "drift"])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_long_episodes_leave_beliefs_sound(task: Any, noise: float) -> None:
    """Histories of flips that contradict the rewards must not drive a variance below zero."""
    config = RuleConfig(task=task, d_obs=2, label_noise=noise, horizon=60, flip_chance=0.2)
    trajectory, agent = play(config, 8), Watched(ProbitFilter(config, hypotheses=8))
    chances_BTK = answers(agent, trajectory).exp()
    torch.testing.assert_close(chances_BTK.sum(-1), torch.ones(8, 60).double())
    kept = agent.beliefs[-1].log_BM > -20
    assert torch.linalg.eigvalsh(agent.beliefs[-1].cov_BMNN)[kept].min() > -1e-9
    assert accuracy(ProbitFilter(config, hypotheses=8), trajectory)[:, 10:].mean() > 0.55


# ---------------------------------------------------------------- what filters cover


@pytest.mark.parametrize(
    ("kind", "settings", "sentence"),
    [
        (KalmanFilter, {"reward": "sign"}, "KalmanFilter covers reward='payoff', not 'sign': use ProbitFilter"),
        (ProbitFilter, {"reward": "payoff"}, "ProbitFilter covers reward='sign', not 'payoff': use KalmanFilter"),
        (ProbitFilter, {"num_actions": 3}, "ProbitFilter covers two actions, not 3: use PointFilter"),
        (PointFilter, {"reward": "payoff"}, "PointFilter covers reward='sign', not 'payoff': use KalmanFilter"),
    ],
)
def test_a_filter_refuses_what_it_does_not_cover(kind: Any, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        kind(RuleConfig(**settings))


@pytest.mark.parametrize("task", ["fixed", "flip", "drift"])
@pytest.mark.parametrize(("reward", "count"), [("sign", 2), ("sign", 3), ("payoff", 2), ("payoff", 3)])
def test_every_problem_has_a_filter_between_chance_and_the_expert(task: Any, reward: Any, count: int) -> None:
    config = RuleConfig(task=task, reward=reward, num_actions=count, d_obs=2, horizon=15)
    domain, simulator = Rule(config), Rule(config).simulator("test", "cpu")
    noise = simulator.noise(torch.arange(64), split_seed("test", 0))
    filtered, expert = (domain.measure(rollout(agent, simulator, noise)) for agent in (bayes_filter(config), None))
    assert 1 / count + 0.05 < filtered["accuracy"].mean() < 1
    assert (expert["accuracy"] == 1).all()
    assert expert["regret"].sum() == 0


def test_beliefs_that_cannot_fit_are_refused_by_their_settings() -> None:
    with pytest.raises(ValueError, match=r"beliefs of 4096 streams about d_obs=1000 and num_actions=100 would take"):
        bayes_filter(RuleConfig(d_obs=1000, num_actions=100)).init_state(4096, 40, "cpu")


# ---------------------------------------------------------------- streams and feedback


@pytest.mark.parametrize("settings", [{}, {"task": "flip"}, {"reward": "payoff", "num_actions": 3}])
def test_restarted_streams_equal_fresh_ones(settings: dict[str, Any]) -> None:
    """Stream 1 starts another episode at step 4."""
    config = RuleConfig(d_obs=3, horizon=8, **settings)
    trajectory = play(config, 4)
    for agent in Rule(config).references().values():
        expected = answers(agent, trajectory)
        state, batch = agent.init_state(3, 12, "cpu"), config.spec.clock.batch(trajectory)
        episode, age = torch.tensor([0, 1, 2]), torch.zeros(3, dtype=torch.long)
        for t in range(8):
            if t == 4:
                episode[1], age[1] = 3, 0
            step = Step(
                obs=batch.obs[episode, age],
                prev_action=batch.prev_action[episode, age],
                prev_reward=batch.prev_reward[episode, age],
                first=age == 0,
            )
            logits_BK, state = agent.step(state, step)
            torch.testing.assert_close(logits_BK, expected[episode, age], rtol=0, atol=1e-9)
            age += 1


def test_equal_observations_and_different_feedback_decide_differently() -> None:
    """The paper's feedback-informative histories, for every reference that learns."""
    domain = Rule(RuleConfig(d_obs=3))
    for name, agent in domain.references().items():
        if name == "random":
            continue
        state = agent.init_state(2, 2, "cpu")
        obs = torch.tensor([[1.0, -0.5, 2.0]]).expand(2, -1)
        start = Step(
            obs=obs,
            prev_action=torch.full((2,), NO_ACTION),
            prev_reward=torch.zeros(2),
            first=torch.ones(2, dtype=torch.bool),
        )
        _, state = agent.step(state, start)
        after = Step(
            obs=obs,
            prev_action=torch.zeros(2, dtype=torch.long),
            prev_reward=torch.tensor([1.0, -1.0]),
            first=torch.zeros(2, dtype=torch.bool),
        )
        decisions = agent.step(state, after)[0].argmax(-1).tolist()
        assert decisions == ([0, 1] if name != "lin-ucb" else decisions), name
        assert decisions[1] == 1, name


# ---------------------------------------------------------------- baselines


@pytest.mark.parametrize("reward", ["sign", "payoff"])
def test_the_hebbian_rule_is_its_formula(reward: Any) -> None:
    config = RuleConfig(reward=reward, d_obs=3, horizon=10)
    trajectory = play(config, 16)
    y_BT = trajectory.reward.double() * (1 - 2 * trajectory.action)
    obs_BTO = trajectory.obs.double()
    score_BTT = torch.einsum("bj,bjo,bto->btj", y_BT, obs_BTO, obs_BTO)
    sum_BT = score_BTT.tril(-1).sum(-1)
    found_BTK = answers(Hebbian(config), trajectory)
    torch.testing.assert_close(found_BTK[..., 0], sum_BT)
    torch.testing.assert_close(found_BTK[..., 1], -sum_BT)


@pytest.mark.parametrize(("width", "expected"), [(5, 0.869), (10, 0.811), (20, 0.746)])
def test_hebbian_accuracy_is_the_one_known_of_random_logs(width: int, expected: float) -> None:
    """Measured independently, over the last 20 of 40 steps."""
    config = RuleConfig(d_obs=width, actions="random")
    domain, simulator = Rule(config), Rule(config).simulator("test", "cpu")
    played = rollout(Hebbian(config), simulator, simulator.noise(torch.arange(2048), split_seed("test", 0)))
    assert domain.measure(played)["late_accuracy"].mean().item() == pytest.approx(expected, abs=0.008)


@pytest.mark.parametrize("count", [2, 3])
def test_linucb_is_ridge_regression_with_a_bonus(count: int) -> None:
    config = RuleConfig(reward="payoff", num_actions=count, d_obs=3, horizon=10)
    trajectory = play(config, 4)
    found_BTK = answers(LinUCB(config), trajectory)
    for b, a in itertools.product(range(4), range(count)):
        own_T = trajectory.action[b] == a
        for t in range(10):
            x = trajectory.obs[b, :t][own_T[:t]].double()
            inverse = torch.linalg.inv(torch.eye(3).double() + x.T @ x)
            estimate = inverse @ x.T @ trajectory.reward[b, :t][own_T[:t]].double()
            now = trajectory.obs[b, t].double()
            expected = estimate @ now + (now @ inverse @ now).sqrt()
            torch.testing.assert_close(found_BTK[b, t, a], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("count", [2, 4])
def test_thompson_sampling_plays_the_probability_of_being_best(count: int) -> None:
    agent = LinTS(RuleConfig(num_actions=count))
    mean_BK = torch.tensor([[0.3, -0.2, 1.0, 0.9][:count]], dtype=torch.float64)
    std_BK = torch.tensor([[1.0, 0.5, 0.4, 2.0][:count]], dtype=torch.float64)
    chance_K = agent.preferences(mean_BK, std_BK).exp()[0]
    draws = torch.randn(400_000, count, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    best = (mean_BK + std_BK * draws).argmax(-1)
    torch.testing.assert_close(
        chance_K, torch.bincount(best, minlength=count) / len(best), rtol=0, atol=0.004, check_dtype=False
    )
    assert chance_K.sum().item() == pytest.approx(1, abs=0.003)


def test_references_stand_in_their_order() -> None:
    config = RuleConfig(d_obs=5)
    domain, simulator = Rule(config), Rule(config).simulator("test", "cpu")
    ids = torch.arange(512)
    noise, scores = simulator.noise(ids, split_seed("test", 0)), {}
    for name, agent in domain.references().items():
        draws_BTA = gumbel(2, "draws", ids, 80).view(-1, 40, 2).float() if agent.sampled else None
        scores[name] = domain.measure(rollout(agent, simulator, noise, draws_BTA))["accuracy"].mean().item()
    assert scores["ceiling"] > scores["lin-ucb"] + 0.03
    assert scores["ceiling"] > scores["hebbian"] + 0.03
    assert scores["lin-ucb"] > scores["lin-ts"] > scores["random"] + 0.1
    assert scores["random"] == pytest.approx(0.5, abs=0.02)


def test_fixed_points_have_the_moments_of_a_standard_normal() -> None:
    for width in (1, 2, 5):
        points_QJ = fixed_points(width)
        torch.testing.assert_close(points_QJ.mean(0), torch.zeros(width).double(), rtol=0, atol=1e-12)
        torch.testing.assert_close(points_QJ.T @ points_QJ / len(points_QJ), torch.eye(width).double())
