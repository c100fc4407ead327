"""Off-policy estimates: known answers, exact expectations over all logs of a tiny problem, refusals, and coverage."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.off_policy import LOGGING, TARGET, Row, measure, play, true_values
from uat.evaluation.intervals import Spread
from uat.evaluation.off_policy import Estimate, LoggedSteps, OffPolicyConfig, Values, as_table, deployment, one_step
from uat.evaluation.off_policy.estimates import deployment_ratios, one_step_ratios
from uat.evaluation.off_policy.ratios import Ratios, effective_size
from uat.evaluation.off_policy.values import fit_rewards, fit_values

ROWS = Path(__file__).parents[3] / "benchmarks" / "results" / "off-policy.json"
EASY = OffPolicyConfig(least_ess=1.0, most_weight_errors=1e9, resamples=50)
"""Settings that refuse nothing."""


def by_name(estimates: list[Estimate]) -> dict[str, Estimate]:
    return {e.name: e for e in estimates}


def values_of(estimates: list[Estimate]) -> dict[str, float | None]:
    return {e.name: e.value for e in estimates}


def random_steps(episodes: int = 40, horizon: int = 3, seed: int = 0, **changes: Any) -> LoggedSteps:
    """Logged steps of two actions, with features and rewards that depend on the action."""
    generator = torch.Generator().manual_seed(seed)
    features_BTF = torch.randn(episodes, horizon, 2, generator=generator)
    action_BT = torch.randint(2, (episodes, horizon), generator=generator)
    first_BT = 0.2 + 0.6 * torch.rand(episodes, horizon, generator=generator).double()
    target_BTA = torch.stack([first_BT, 1 - first_BT], dim=-1)
    fields = {
        "reward_BT": features_BTF[..., 0] + action_BT + 0.1 * torch.randn(episodes, horizon, generator=generator),
        "target_BT": target_BTA.gather(-1, action_BT[..., None])[..., 0],
        "propensity_BT": torch.full((episodes, horizon), 0.5),
        "target_BTA": target_BTA,
        "action_BT": action_BT,
        "features_BTF": features_BTF,
    }
    return LoggedSteps(**{**fields, **changes})


# ---------------------------------------------------------------- known answers


def test_the_logging_policy_itself_is_worth_the_mean_return() -> None:
    """All weights are 1. Values ignore the action here, so that they cancel exactly in every episode."""
    steps = random_steps(target_BT=torch.full((40, 3), 0.5), target_BTA=None)
    config = OffPolicyConfig(discount=0.9, least_ess=39.0, resamples=50)
    estimates = by_name(deployment(steps, config))
    expected = (steps.reward_BT * torch.tensor([1.0, 0.9, 0.81], dtype=torch.float64)).sum(1).mean().item()
    assert set(estimates) == {"log", "ips", "wis", "pdis", "pdwis", "dm", "dr", "wdr"}
    for name, e in estimates.items():
        assert e.ess == pytest.approx(40)
        if name != "dm":
            assert e.value == pytest.approx(expected, abs=1e-12), name
    for e in one_step(steps, config):
        assert e.value == pytest.approx(steps.reward_BT.mean().item(), abs=1e-12), e.name


def test_two_episodes_of_two_steps_by_hand() -> None:
    """Ratios (2, 0.5) and (0.5, 1), so weights (2, 1) and (0.5, 0.5); rewards (1, 3) and (2, 4); discount 0.5."""
    steps = LoggedSteps(
        reward_BT=torch.tensor([[1.0, 3.0], [2.0, 4.0]]),
        target_BT=torch.tensor([[0.8, 0.25], [0.25, 0.5]]),
        propensity_BT=torch.tensor([[0.4, 0.5], [0.5, 0.5]]),
    )
    values = Values(torch.tensor([[1.0, 2.0], [1.0, 2.0]]), torch.tensor([[3.0, 1.0], [3.0, 1.0]]))
    config = replace(EASY, discount=0.5)
    found = values_of(deployment(steps, config, values=values))
    assert found["log"] == pytest.approx((2.5 + 4) / 2)
    assert found["ips"] == pytest.approx((1 * 2.5 + 0.5 * 4) / 2)
    assert found["wis"] == pytest.approx((1 * 2.5 + 0.5 * 4) / 1.5)
    assert found["pdis"] == pytest.approx(((2 * 1 + 0.5 * 1 * 3) + (0.5 * 2 + 0.5 * 0.5 * 4)) / 2)
    assert found["pdwis"] == pytest.approx((2 * 1 + 0.5 * 2) / 2.5 + 0.5 * (1 * 3 + 0.5 * 4) / 1.5)
    assert found["dm"] == pytest.approx(3)
    first = (3 + 2 * (1 - 1)) + 0.5 * (2 * 1 + 1 * (3 - 2))
    second = (3 + 0.5 * (2 - 1)) + 0.5 * (0.5 * 1 + 0.5 * (4 - 2))
    assert found["dr"] == pytest.approx((first + second) / 2)
    weighted = 3 + (2 * 0 + 0.5 * 1) / 2.5 + 0.5 * ((2 + 0.5) / 2.5 + (1 * 1 + 0.5 * 2) / 1.5)
    assert found["wdr"] == pytest.approx(weighted)
    now = values_of(one_step(steps, config, values=values))
    assert now["ips"] == pytest.approx((2 * 1 + 0.5 * 3 + 0.5 * 2 + 1 * 4) / 4)
    assert now["snips"] == pytest.approx((2 * 1 + 0.5 * 3 + 0.5 * 2 + 1 * 4) / 4.0)
    assert now["dr"] == pytest.approx((3 + 2 * 0 + 1 + 0.5 * 1 + 3 + 0.5 * 1 + 1 + 1 * 2) / 4)
    assert by_name(deployment(steps, config))["wis"].ess == pytest.approx(2.5**2 / 4.25)  # the least one over steps


def test_self_normalised_estimates_follow_shifted_and_scaled_rewards() -> None:
    """Plain weights follow a shift only on average, since their mean is 1 only on average."""
    steps = random_steps()
    moved = replace(steps, reward_BT=2 * steps.reward_BT + 3)
    for judge, length in ((deployment, 3), (one_step, 1)):
        before, after = values_of(judge(steps, EASY)), values_of(judge(moved, EASY))
        for name in {"wis", "pdwis", "snips", "log"} & before.keys():
            assert after[name] == pytest.approx(2 * (before[name] or 0) + 3 * length), name
        assert after["ips"] != pytest.approx(2 * (before["ips"] or 0) + 3 * length)


def test_the_order_of_episodes_changes_no_value() -> None:
    steps = replace(random_steps(), features_BTF=None)
    assert steps.valid_BT is not None
    shuffled = steps.map(lambda x: x.flip(0))
    for judge in (deployment, one_step):
        assert values_of(judge(shuffled, EASY)) == pytest.approx(values_of(judge(steps, EASY)))


def test_ended_episodes_keep_their_weight_and_padding_holds_anything() -> None:
    valid_BT = torch.tensor([[True, True, True], [True, False, False]])
    full = {"target_BT": torch.full((2, 3), 0.3), "propensity_BT": torch.full((2, 3), 0.5)}
    steps = LoggedSteps(reward_BT=torch.ones(2, 3), valid_BT=valid_BT, **full)
    hostile = {name: torch.where(valid_BT, x, torch.nan) for name, x in full.items()}
    rewards_BT = torch.where(valid_BT, 1.0, torch.nan)
    assert deployment(LoggedSteps(reward_BT=rewards_BT, valid_BT=valid_BT, **hostile), EASY) == deployment(steps, EASY)
    assert steps.ratio_BT.cumprod(1)[1].tolist() == pytest.approx([0.6, 0.6, 0.6])
    assert values_of(deployment(steps, EASY))["pdwis"] == pytest.approx(1 + 0.36 / 0.96 + 0.216 / 0.816)


# ---------------------------------------------------------------- exact expectations


def policy(salt: int, history: tuple[tuple[int, int], ...]) -> Tensor:
    """Probabilities of two actions that differ from history to history."""
    share = 0.15 + 0.7 * ((37 * salt + sum(5**i * (2 * a + r + 1) for i, (a, r) in enumerate(history))) % 11) / 10
    return torch.tensor([share, 1 - share], dtype=torch.float64)


def all_logs(acting: int) -> Iterator[tuple[float, tuple[tuple[int, int], ...]]]:
    """Every history of two steps with its probability. A hidden regime decides which action pays: 0 or 1, each with
    probability one half."""
    steps = list(itertools.product((0, 1), (0, 1)))
    for regime, pairs in itertools.product((0, 1), itertools.product(steps, steps)):
        chance = 0.5
        for t, (action, reward) in enumerate(pairs):
            pays = 0.9 if action == regime else 0.2
            chance *= policy(acting, pairs[:t])[action].item() * (pays if reward else 1 - pays)
        yield chance, pairs


def enumerated() -> tuple[Tensor, LoggedSteps, Values]:
    """Probability of each log under policy 1, the logs with target 2, and arbitrary values of histories."""
    chances, logs = zip(*all_logs(1), strict=True)
    rows = {"action_BT": [], "target_BTA": [], "behaviour_BTA": [], "logged_BT": [], "mean_BT": []}
    for log in logs:
        before = [log[:t] for t in range(2)]
        target_TA = torch.stack([policy(2, history) for history in before])
        q_TA = torch.stack([3 * policy(7, history) - t for t, history in enumerate(before)])
        action_T = torch.tensor([a for a, _ in log])
        rows["action_BT"].append(action_T)
        rows["target_BTA"].append(target_TA)
        rows["behaviour_BTA"].append(torch.stack([policy(1, history) for history in before]))
        rows["logged_BT"].append(q_TA.gather(1, action_T[:, None])[:, 0])
        rows["mean_BT"].append((target_TA * q_TA).sum(-1))
    x = {name: torch.stack(values) for name, values in rows.items()}
    index_BT1 = x["action_BT"][..., None]
    steps = LoggedSteps(
        reward_BT=torch.tensor([[r for _, r in log] for log in logs]),
        target_BT=x["target_BTA"].gather(-1, index_BT1)[..., 0],
        propensity_BT=x["behaviour_BTA"].gather(-1, index_BT1)[..., 0],
        **{name: x[name] for name in ("target_BTA", "behaviour_BTA", "action_BT")},
    )
    return torch.tensor(chances, dtype=torch.float64), steps, Values(x["logged_BT"], x["mean_BT"])


@pytest.mark.parametrize("name", ["ips", "pdis", "dr"])
def test_the_mean_over_all_logs_is_the_target_s_worth(name: str) -> None:
    """The expectation is exact: 32 logs (16 histories in two regimes) with their probabilities."""
    chance_B, steps, values = enumerated()
    truth = sum(chance * (log[0][1] + 0.9 * log[1][1]) for chance, log in all_logs(2))
    ratios = deployment_ratios(steps, steps.ratio_BT.cumprod(1), 0.9, values)[name]
    assert chance_B.sum().item() == pytest.approx(1)
    assert (chance_B * ratios.top_BK.sum(1)).sum().item() == pytest.approx(truth, abs=1e-12)
    wrong = deployment_ratios(steps, (1.1 * steps.ratio_BT).cumprod(1), 0.9, values)[name]
    assert abs((chance_B * wrong.top_BK.sum(1)).sum().item() - truth) > 0.01


def test_self_normalised_weights_converge_to_the_target_s_worth() -> None:
    """Ratios of exact expectations: the limit for many episodes."""
    chance_B, steps, values = enumerated()
    truth = sum(chance * (log[0][1] + log[1][1]) for chance, log in all_logs(2))
    ratios = deployment_ratios(steps, steps.ratio_BT.cumprod(1), 1.0, values)
    for name in ("wis", "pdwis", "wdr"):
        counted = Ratios(chance_B[:, None] * ratios[name].top_BK, chance_B[:, None] * ratios[name].bottom_BK)
        assert counted.value == pytest.approx(truth, abs=1e-12), name


def test_one_step_estimates_average_the_target_s_action_after_histories_of_the_log() -> None:
    chance_B, steps, values = enumerated()
    truth = 0.0
    for regime in (0, 1):
        pays_A = torch.tensor([0.9, 0.2] if regime == 0 else [0.2, 0.9], dtype=torch.float64)
        truth += 0.5 * (policy(2, ()) * pays_A).sum().item() / 2
        for action, reward in itertools.product((0, 1), (0, 1)):
            seen = 0.5 * policy(1, ())[action] * (pays_A[action] if reward else 1 - pays_A[action])
            truth += (seen * (policy(2, ((action, reward),)) * pays_A).sum()).item() / 2
    for name, ratios in one_step_ratios(steps, steps.ratio_BT, values).items():
        counted = Ratios(chance_B[:, None] * ratios.top_BK, chance_B[:, None] * ratios.bottom_BK)
        assert counted.value == pytest.approx(truth, abs=1e-12), name


def test_the_simulator_s_exact_truth_is_the_mean_of_many_episodes() -> None:
    generator = torch.Generator().manual_seed(0)
    deployed, logged = true_values(TARGET, LOGGING["far"], 5)
    played = play(TARGET, 40_000, 5, generator).reward_BT.sum(1)
    assert played.mean().item() == pytest.approx(deployed, abs=4 * played.std().item() / 200)
    log = play(LOGGING["far"], 40_000, 5, generator)
    score_B = (log.steps(TARGET, LOGGING["far"]).ratio_BT * log.reward_BT).mean(1)
    assert score_B.mean().item() == pytest.approx(logged, abs=4 * score_B.std().item() / 200)
    assert abs(deployed / 5 - logged) > 0.02  # two questions, two answers


# ---------------------------------------------------------------- intervals


def test_a_mean_has_the_interval_of_student_where_rewards_are_normal() -> None:
    score_B = torch.randn(400, generator=torch.Generator().manual_seed(0)).double()
    low, high = Ratios.mean(score_B).interval(resamples=4000, seed=0)
    expected = Spread.of(score_B[None])
    assert Ratios.mean(score_B).standard_error == pytest.approx(expected.by_episode * (399 / 400) ** 0.5, rel=2e-3)
    assert (low, high) == pytest.approx(expected.interval(), abs=0.01)
    assert (low, high) == Ratios.mean(score_B).interval(resamples=4000, seed=0)


def test_the_interval_of_skewed_scores_reaches_further_towards_their_tail() -> None:
    score_B = torch.randn(100, generator=torch.Generator().manual_seed(0)).double().mul(1.2).exp()
    ratios = Ratios.mean(score_B)
    low, high = ratios.interval(resamples=2000, seed=0)
    assert high - ratios.value > 1.3 * (ratios.value - low)


def test_the_standard_error_of_a_ratio_is_that_of_leaving_out_episodes() -> None:
    weight_B = torch.rand(200, generator=torch.Generator().manual_seed(0)).double() + 0.2
    score_B = torch.randn(200, generator=torch.Generator().manual_seed(1)).double() + weight_B
    ratios = Ratios((weight_B * score_B)[:, None], weight_B[:, None])
    left_B = torch.stack([(weight_B * score_B).sum() - weight_B * score_B, weight_B.sum() - weight_B])
    jackknife = ((left_B[0] / left_B[1]).var(correction=0) * 199).sqrt().item()
    assert ratios.standard_error == pytest.approx(jackknife, rel=0.02)


def test_intervals_of_one_episode_and_of_equal_episodes() -> None:
    one = LoggedSteps(reward_BT=[[1.0]], target_BT=[[0.5]], propensity_BT=[[0.5]])  # pyright: ignore[reportArgumentType]
    first = deployment(one, EASY)[0]
    assert first.value == 1.0
    assert first.low is not None
    assert first.low != first.low  # NaN
    assert Ratios.mean(torch.ones(5).double()).interval(resamples=10, seed=0) == (1.0, 1.0)


def test_effective_sizes() -> None:
    assert effective_size(torch.ones(7)) == pytest.approx(7)
    assert effective_size(torch.tensor([1.0, 0.0, 0.0])) == pytest.approx(1)
    assert effective_size(torch.zeros(3)) == 0
    assert effective_size(torch.tensor([[1.0, 1.0], [1.0, 3.0]])) == pytest.approx(16 / 10)


# ---------------------------------------------------------------- fitted values


def test_values_of_an_episode_do_not_depend_on_its_rewards() -> None:
    steps, settings = random_steps(), {"folds": 4, "penalty": 1.0, "seed": 0}
    rewards_BT = steps.reward_BT.clone()
    rewards_BT[7] += 100
    other = random_steps(reward_BT=rewards_BT)
    for fit in (lambda x: fit_values(x, discount=0.9, **settings), lambda x: fit_rewards(x, **settings)):
        before, after = fit(steps), fit(other)
        changed_B = (before.mean_BT != after.mean_BT).any(1) | (before.logged_BT != after.logged_BT).any(1)
        assert not changed_B[7]
        assert changed_B.sum() >= 25  # episodes of the other folds


def test_ridge_recovers_linear_rewards_and_backwards_values() -> None:
    """Rewards are x + action up to noise, so the value of the last step is x + P(action 1), and so on before it."""
    steps = random_steps(episodes=2000)
    values = fit_values(steps, discount=1.0, folds=2, penalty=1e-3, seed=0)
    assert steps.target_BTA is not None
    assert steps.features_BTF is not None
    now_BT = steps.features_BTF[..., 0] + steps.target_BTA[..., 1]
    assert (values.mean_BT[:, 2] - now_BT[:, 2]).abs().max() < 0.05
    assert (values.mean_BT[:, 1] - now_BT[:, 1] - 0.5).abs().mean() < 0.1
    assert (fit_rewards(steps, folds=2, penalty=1e-3, seed=0).mean_BT - now_BT).abs().max() < 0.05


def test_a_value_makes_the_interval_narrower() -> None:
    steps = random_steps(episodes=400)
    found = by_name(deployment(steps, replace(EASY, resamples=200)))
    widths = {name: e.high - e.low for name, e in found.items() if e.high is not None and e.low is not None}
    assert widths["dr"] < 0.8 * widths["pdis"]
    assert "dm" not in widths
    assert "no interval" in found["dm"].sentence()


# ---------------------------------------------------------------- refusals and notes


def test_no_number_below_the_least_effective_sample_size() -> None:
    log = play(LOGGING["far"], 300, 8, torch.Generator().manual_seed(0))
    estimates = deployment(log.steps(TARGET, LOGGING["far"]), OffPolicyConfig(resamples=20))
    assert [e.name for e in estimates if e.value is not None] == ["log"]
    for e in estimates[1:]:
        assert (e.value, e.low, e.high) == (None, None, None)
        assert "below 150: log about" in e.sentence()
        assert "one_step" in str(e)
    assert "refused" in as_table(estimates)
    assert all(e.value is not None for e in one_step(log.steps(TARGET, LOGGING["far"]), OffPolicyConfig(resamples=20)))


def test_without_any_matching_episode_nothing_is_estimated() -> None:
    steps = LoggedSteps(
        reward_BT=torch.ones(300, 2), target_BT=torch.zeros(300, 2), propensity_BT=torch.full((300, 2), 0.5)
    )
    for e in (*deployment(steps)[1:], *one_step(steps)):
        assert e.ess == 0
        assert e.value is None


def test_wrong_propensities_are_refused_by_the_mean_weight() -> None:
    log = play(LOGGING["near"], 1000, 4, torch.Generator().manual_seed(0))
    steps = log.steps(TARGET, LOGGING["near"])
    wrong = replace(steps, propensity_BT=(1.1 * steps.propensity_BT).clamp(max=1), behaviour_BTA=None)
    for e in (*deployment(wrong)[1:], *one_step(wrong)):
        assert e.refused is not None
        assert "should be 1" in e.refused
    assert all(e.value is not None for e in (*deployment(steps), *one_step(steps)))


def test_actions_that_the_log_can_never_hold_are_refused() -> None:
    probabilities_BTA = torch.tensor([0.7, 0.2, 0.1]).expand(400, 1, 3)
    never_BTA = torch.tensor([0.5, 0.5, 0.0]).expand(400, 1, 3)
    action_BT = torch.arange(400)[:, None] % 2
    steps = LoggedSteps(
        reward_BT=torch.ones(400, 1),
        target_BT=probabilities_BTA.gather(-1, action_BT[..., None])[..., 0],
        propensity_BT=torch.full((400, 1), 0.5),
        target_BTA=probabilities_BTA,
        behaviour_BTA=never_BTA,
        action_BT=action_BT,
    )
    assert steps.unsupported() == pytest.approx(0.1)
    for e in (*deployment(steps)[1:], *one_step(steps)):
        assert e.refused is not None
        assert "propensity 0" in e.refused


def test_clipped_weights_are_reported_and_bounded() -> None:
    log = play(LOGGING["uniform"], 500, 4, torch.Generator().manual_seed(0))
    steps = log.steps(TARGET, LOGGING["uniform"])
    plain, clipped = (by_name(deployment(steps, replace(EASY, clip=clip))) for clip in (None, 2.0))
    assert clipped["wis"].ess > plain["wis"].ess
    assert "exceed clip=2" in clipped["wis"].sentence()
    assert plain["wis"].notes == ()
    weight_BT = steps.ratio_BT.cumprod(1).clamp(max=2)
    expected = (weight_BT[:, -1] * steps.reward_BT.sum(1)).sum() / weight_BT[:, -1].sum()
    assert clipped["wis"].value == pytest.approx(expected.item())


def test_unknown_rewards_are_left_out_of_one_step_and_refused_by_deployment() -> None:
    known_BT = torch.ones(40, 3, dtype=torch.bool)
    known_BT[3, 1] = known_BT[5, 2] = False
    whole = random_steps()
    holes_BT = torch.where(known_BT, whole.reward_BT, torch.nan)
    steps = random_steps(reward_BT=holes_BT, reward_known_BT=known_BT)
    with pytest.raises(ValueError, match="2 of 120 rewards are unknown"):
        deployment(steps, EASY)
    found = by_name(one_step(steps, EASY))
    assert "2 of 120 steps have unknown rewards" in found["ips"].sentence()
    expected = (whole.ratio_BT * whole.reward_BT)[known_BT].sum() / 118
    assert found["ips"].value == pytest.approx(expected.item())
    none_BT = torch.zeros_like(known_BT)
    with pytest.raises(ValueError, match="no reward is known"):
        one_step(random_steps(reward_known_BT=none_BT), EASY)


def test_every_estimate_names_its_question() -> None:
    estimates = [*deployment(random_steps(), EASY), *one_step(random_steps(), EASY)]
    assert {e.question for e in estimates} == {
        "the logging policy as it acted",
        "deployment by full-trajectory weights",
        "one-step deviation under the logged history",
    }
    assert all(e.question in e.sentence() and e.question in as_table(estimates) for e in estimates)


# ---------------------------------------------------------------- coverage


@pytest.mark.parametrize("logging", ["near", "moderate", "uniform"])
def test_intervals_cover_in_a_few_repetitions(logging: str) -> None:
    rows = {
        row.estimate: row
        for row in measure(logging, 3, 300, 20, config=OffPolicyConfig(least_ess=100.0, resamples=100))
    }
    for name in ("wis", "dr"):
        assert rows[name].refused == 0
        assert 0.85 <= (rows[name].coverage_unrefused or 0) <= 1, rows[name]


@pytest.mark.slow
@pytest.mark.parametrize("logging", ["moderate"])  # one takes a minute; the committed rows have all
def test_intervals_cover_in_300_repetitions(logging: str) -> None:
    rows = {row.estimate: row for row in measure(logging, 4, 1000, 300) if row.question.startswith("deployment")}
    for name in ("wis", "dr"):
        assert rows[name].refused <= 3
        assert 0.9 <= (rows[name].coverage or 0) <= 0.98, rows[name]


def committed() -> list[Row]:
    return [Row(**row) for row in json.loads(ROWS.read_text(encoding="utf-8"))["rows"]]


def test_the_committed_rows_cover_where_numbers_are_given_and_refuse_where_coverage_fails() -> None:
    rows = [row for row in committed() if row.question.startswith("deployment") and row.estimate in ("wis", "dr")]
    assert {(row.logging, row.propensities) for row in rows} >= {(x, "known") for x in ("near", "moderate", "uniform")}
    assert all(row.repetitions == 300 for row in rows)
    for row in rows:
        if row.refused < row.repetitions / 2:
            assert row.coverage is not None
            assert 0.9 <= row.coverage <= 0.98, row
        assert row.coverage_unrefused is not None
        if row.coverage_unrefused < 0.9:
            assert row.refused > 0.9 * row.repetitions, row
    assert any(row.refused == row.repetitions and (row.coverage_unrefused or 1) < 0.9 for row in rows)
