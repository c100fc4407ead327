"""Sepsis worlds against a slow twin, their schedules, and what is measured of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.domains import sepsis_twin as twin
from uat.acting import rollout
from uat.contracts import Agent
from uat.domains.sepsis import Sepsis, SepsisConfig
from uat.domains.sepsis.cohort import prepare
from uat.domains.sepsis.domain import since_shift
from uat.domains.sepsis.kinetics import kinetics
from uat.domains.sepsis.treatment import ACTIONS, EFFECTS
from uat.episode import Trajectory
from uat.noise import gumbel

STRONG = SepsisConfig(response=0.4, state_noise=0.05, obs_noise=0.0)
"""Patients swing from one limit to the other, so that many die or recover."""
ALIGNED = SepsisConfig(task="aligned")
TASKS = Sepsis.train_tasks


def play(config: SepsisConfig, episodes: int, name: str = "random", seed: int = 3) -> Trajectory:
    domain, ids = Sepsis(config), torch.arange(episodes)
    simulator = domain.simulator("test", "cpu")
    agents: dict[str, Agent[Any] | None] = {**domain.references(), "expert": None}
    gumbel_BTA = gumbel(seed, "actions", ids, config.horizon * 5).view(episodes, -1, 5) if name == "random" else None
    return rollout(agents[name], simulator, simulator.noise(ids, seed), gumbel_BTA)


# ---------------------------------------------------------------- worlds


def test_five_actions_in_the_order_of_their_intensity() -> None:
    assert list(ACTIONS) == twin.LEVELS
    assert sum(ACTIONS[0]) == min(map(sum, ACTIONS))
    assert sum(ACTIONS[4]) == max(map(sum, ACTIONS))


@pytest.mark.parametrize("name", ["random", "expert"])
@pytest.mark.parametrize("config", [SepsisConfig(), STRONG, ALIGNED, replace(STRONG, task="aligned")])
def test_every_step_is_the_slow_twins(config: SepsisConfig, name: str) -> None:
    """The expert repeats itself, so that treatments wear off; the strong response ends episodes."""
    episodes = 24
    played = play(config, episodes, name)
    noise = Sepsis(config).simulator("test", "cpu").noise(torch.arange(episodes), 3)
    for b in range(episodes):
        actions, regimes = played.action[b].tolist(), played.facts["regime"][b].tolist()
        states: list[Any] = played.facts["state"][b].double().tolist()
        for t in range(int(played.valid[b].sum()) - 1):
            mean = twin.expected(states[t], regimes[t], actions[: t + 1], config)
            shock = noise["state"][b, t].tolist()
            new: Any = tuple(min(max(m + e, 0.0), 1.0) for m, e in zip(mean, shock, strict=True))
            assert states[t + 1] == pytest.approx(new, abs=1e-5)
            earned, over = twin.reward(states[t], new, noise["fate"][b, t].item())
            assert played.reward[b, t].item() == pytest.approx(earned, abs=1e-5)
            assert not over
    assert torch.equal(played.required_target, torch.tensor([3, 4, 0])[played.facts["regime"]])


def test_episodes_end_with_recovery_or_death_and_stay_as_they_are() -> None:
    played = play(STRONG, 400)
    ended_B = ~played.valid.all(1)
    assert 0.05 < ended_B.float().mean() < 0.95
    last_B = played.valid.sum(1) - 1
    reward_B = played.reward.gather(1, last_B[:, None])[:, 0][ended_B]
    assert ((reward_B.abs() > 0.8) & (reward_B.abs() < 1.2)).all()
    assert (reward_B > 0).any()
    assert (reward_B < 0).any()
    sofa_BT, lactate_BT = played.facts["state"][..., 0], played.facts["state"][..., 1]
    final = torch.stack([sofa_BT[ended_B, -1], lactate_BT[ended_B, -1]], dim=1)
    well_B = (final < 0.3).all(1)
    assert torch.equal(well_B, reward_B > 0)
    assert ((final[~well_B, 0] > 0.85) & (final[~well_B, 1] > 0.7)).all()
    assert (played.reward[~played.valid] == 0).all()


def test_chances_of_death_and_recovery_per_step() -> None:
    played = play(STRONG, 3000)
    state_BT3, last = played.facts["state"][:, 1:], played.valid[:, :-1]  # the state that action t led to
    well = last & (state_BT3[..., :2] < 0.3).all(-1)
    bad = last & (state_BT3[..., 0] > 0.85) & (state_BT3[..., 1] > 0.7)
    reward_BT = played.reward[:, :-1]
    assert (reward_BT[well] > 0.5).float().mean().item() == pytest.approx(0.02, abs=0.004)
    assert (reward_BT[bad] < -0.5).float().mean().item() == pytest.approx(0.01, abs=0.003)
    assert (reward_BT[last & ~well & ~bad].abs() < 0.5).all()


def test_observations_are_components_of_the_clinical_columns() -> None:
    """The fast projection against the plain one: states written back into 46 columns, times the components."""
    played, cohort = play(STRONG, 20), prepare(None)
    clinical_BTF = played.facts["clinical"]
    torch.testing.assert_close(played.obs, clinical_BTF @ cohort.components_FO, rtol=0, atol=1e-5)
    start_BF = cohort.clinical_PF[played.facts["patient"][:, 0]]
    moving = cohort.dynamic
    still = [i for i in range(46) if i not in moving]
    assert (clinical_BTF[:, :, still] == start_BF[:, None, still]).all()
    torch.testing.assert_close(clinical_BTF[:, 0, moving], start_BF[:, moving].clamp(-2.5, 2.5), rtol=0, atol=1e-5)
    assert [cohort.columns[i] for i in moving] == ["sofa", "LACTATE", "MeanBP"]


def test_observations_are_noisy_as_told() -> None:
    simulators = [Sepsis(SepsisConfig(obs_noise=x)).simulator("test", "cpu") for x in (0.0, 0.1)]
    noise = [simulator.noise(torch.arange(500), 0) for simulator in simulators]
    clear, blurred = (simulator.reset(one)[1] for simulator, one in zip(simulators, noise, strict=True))
    assert (blurred - clear).std().item() == pytest.approx(0.1, abs=0.004)


def test_patients_of_the_splits_are_apart() -> None:
    ids, domain = torch.arange(600), Sepsis(SepsisConfig())
    of = {split: domain.simulator(split, "cpu").noise(ids, 0)["patient"] for split in ("train", "validation", "test")}
    assert max(of["train"].max(), of["validation"].max()) < 20_000 <= of["test"].min()
    assert of["test"].max() < 25_000


# ---------------------------------------------------------------- labels and rewards


def test_the_label_of_aligned_has_the_largest_effect_in_every_regime() -> None:
    for regime, label in enumerate((3, 4, 0)):
        effects = [twin.effect(regime, action, "aligned") for action in range(5)]
        others = effects[:label] + effects[label + 1 :]
        assert effects[label] > max(others) + 0.19
        assert effects[label] > 0.2
    papers = [twin.effect(1, action) for action in range(5)]
    assert papers[4] == pytest.approx(0.246)
    assert max(papers) == papers[2] == pytest.approx(0.546)


@pytest.mark.parametrize("repeats", [1, 3, 4, 40])
def test_the_label_of_aligned_stays_the_best_however_often_it_was_given(repeats: int) -> None:
    physiology = ALIGNED.physiology(torch.float64)
    worn_RA = physiology.worn(physiology.effect_RA, torch.full((3, 5), repeats))
    assert worn_RA.argmax(1).tolist() == [3, 4, 0]


def test_a_planner_on_rewards_follows_the_labels_where_they_are_aligned() -> None:
    """It knows the regime. On the paper's labels it takes another pressor, and changes treatment when one wears off."""
    configs = {task: SepsisConfig(task=task) for task in EFFECTS}
    found = {task: Sepsis(c).measure(play(c, 512, "planner")) for task, c in configs.items()}
    expert = {task: Sepsis(c).measure(play(c, 512, "expert")) for task, c in configs.items()}
    mean = {task: {name: x.nanmean().item() for name, x in one.items()} for task, one in found.items()}
    for name, value in found["aligned"].items():
        assert torch.equal(value.nan_to_num(-1), expert["aligned"][name].nan_to_num(-1)), name
    regimes = [mean["regimes"][f"{name}_accuracy"] for name in ("fluid", "vasopressor", "conservative")]
    assert sum(regimes) / 3 == pytest.approx(0.63, abs=0.01)
    assert mean["regimes"]["return"] - expert["regimes"]["return"].mean() > 0.5
    assert mean["aligned"]["accuracy"] == 1.0


def test_the_planner_takes_the_best_effect_of_each_step() -> None:
    """Against the slow twin, from the actions that it took."""
    played = play(SepsisConfig(), 4, "planner")
    for b in range(4):
        actions, regimes = played.action[b].tolist(), played.facts["regime"][b].tolist()
        for t in range(int(played.valid[b].sum())):
            helps = [pressure_gain(regimes[t], [*actions[:t], action]) for action in range(5)]
            assert actions[t] == max(range(5), key=helps.__getitem__)


def pressure_gain(regime: int, actions: list[int]) -> float:
    return twin.expected((0.5, 0.5, 0.5), regime, actions, SepsisConfig())[2]


@pytest.mark.parametrize("action", range(5))
def test_under_aligned_no_action_brings_a_better_state_than_the_label(action: int) -> None:
    """With the same noise, the states of the label are at least as good at every step."""
    simulator = Sepsis(ALIGNED).simulator("test", "cpu")
    noise = simulator.noise(torch.arange(64), 3)
    noise["fate"] = torch.ones_like(noise["fate"])  # no episode ends
    expert, _ = simulator.reset(noise)
    other = expert
    for _ in range(ALIGNED.horizon - 1):
        expert = simulator.step(expert, simulator.expert(expert)).world
        other = simulator.step(other, torch.full((64,), action)).world
        assert (expert.state_B3[:, :2] <= other.state_B3[:, :2] + 1e-6).all()


# ---------------------------------------------------------------- schedules


def segments(regime_T: Tensor) -> tuple[list[int], list[int]]:
    values, counts = torch.unique_consecutive(regime_T, return_counts=True)
    return values.tolist(), counts.tolist()


def test_regimes_come_in_four_to_six_segments_as_the_law_says() -> None:
    config, episodes = SepsisConfig(), 6000
    regime_BT = config.segments.draw(1, torch.arange(episodes))
    split = [segments(row) for row in regime_BT]
    counts = torch.tensor([len(lengths) for _, lengths in split])
    for count in (4, 5, 6):
        assert (counts == count).float().mean().item() == pytest.approx(1 / 3, abs=0.02)
    assert counts.min() == 4
    assert counts.max() == 6
    assert min(min(lengths) for _, lengths in split) == config.min_length
    law = config.segments.lengths()
    for count in (4, 6):
        first = torch.tensor([lengths[0] for _, lengths in split if len(lengths) == count]).double()
        last = torch.tensor([lengths[-1] for _, lengths in split if len(lengths) == count]).double()
        mean = (law[count, 90] * torch.arange(91)).sum().item()
        assert mean == pytest.approx(90 / count)
        assert first.mean().item() == pytest.approx(mean, abs=1.0)
        assert last.mean().item() == pytest.approx(mean, abs=1.0)  # no segment is favoured
        short = law[count, 90, :10].sum().item()
        assert (first < 10).double().mean().item() == pytest.approx(short, abs=0.03)
    starts = torch.tensor([regimes[0] for regimes, _ in split])
    assert torch.bincount(starts) / episodes == pytest.approx([1 / 3] * 3, abs=0.02)
    seconds = torch.tensor([(regimes[1] - regimes[0]) % 3 for regimes, _ in split])
    assert torch.bincount(seconds) / episodes == pytest.approx([0, 0.5, 0.5], abs=0.02)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"horizon": 10}, "horizon=10 is too short for max_segments=6 segments of min_length=3"),
        ({"min_segments": 0}, "min_segments=0 must be at least 1"),
        ({"max_segments": 3}, "max_segments=3 must be at least min_segments=4"),
        ({"state_noise": 0.0}, "state_noise=0.0 must be positive"),
        ({"response": float("nan")}, "response=nan must be positive"),
        ({"obs_noise": -1.0}, "obs_noise=-1.0 must not be negative"),
        ({"resistance": 1.5}, "resistance=1.5 must lie in (0, 1]"),
        ({"task": "rewards"}, "task='rewards' must be one of 'regimes', 'aligned'"),
        ({"task": "aligned", "resistance": 0.9}, "resistance=0.9 has no effect in task='aligned'"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as error:
        SepsisConfig(**settings)
    assert said in str(error.value)


def test_the_setting_names_what_differs_and_the_scale_reaches_the_spec() -> None:
    domain = Sepsis(SepsisConfig(reward_scale=5.0, state_noise=0.01))
    assert domain.setting == "state_noise=0.01,reward_scale=5.0"
    assert domain.spec.reward_scale == 5.0
    assert Sepsis(replace(domain.config, task="aligned")).setting == domain.setting  # a task is no setting


# ---------------------------------------------------------------- metrics


def made_up(regimes: list[list[int]], right: list[list[int]], ends: list[int] | None = None) -> Trajectory:
    """Episodes with these regimes, and right or wrong decisions; `ends` says how many steps are real."""
    regime_BT, right_BT = torch.tensor(regimes), torch.tensor(right)
    target_BT = torch.tensor([3, 4, 0])[regime_BT]
    steps = regime_BT.shape[1]
    end_B = torch.tensor(ends or [steps] * len(regimes))
    valid_BT = torch.arange(steps) < end_B[:, None]
    done_BT = torch.arange(steps) == end_B[:, None] - 1
    return Trajectory(
        obs=torch.zeros(*regime_BT.shape, 20),
        action=torch.where(right_BT == 1, target_BT, 1),
        reward=torch.zeros(regime_BT.shape),
        terminated=done_BT,
        target=target_BT,
        valid=valid_BT,
        facts={"regime": regime_BT},
    )


def test_since_shift_counts_from_each_regime() -> None:
    assert since_shift(torch.tensor([[0, 0, 1, 1, 1, 2, 0]])).tolist() == [[0, 1, 0, 1, 2, 0, 0]]


def test_accuracies_by_hand() -> None:
    regimes = [[0] * 7 + [1] * 3, [2] * 10]
    right = [[0, 0, 1, 1, 1, 1, 1, 0, 1, 1], [0] * 5 + [1] * 5]
    found = Sepsis(SepsisConfig()).measure(made_up(regimes, right, ends=[9, 10]))
    assert found["accuracy"].tolist() == pytest.approx([6 / 9, 0.5])
    assert found["post_shift_accuracy"].tolist() == pytest.approx([4 / 7, 0.0])  # five, and the two real of three
    assert found["fluid_accuracy"][0].item() == pytest.approx(5 / 7)
    assert found["vasopressor_accuracy"][0].item() == pytest.approx(1 / 2)
    assert found["conservative_accuracy"][1].item() == 0.5
    assert found["conservative_accuracy"][0].isnan()
    assert found["fluid_accuracy"][1].isnan()


def test_outcomes_by_hand() -> None:
    trajectory = made_up([[0] * 4] * 4, [[1] * 4] * 4, ends=[2, 3, 4, 4])
    trajectory.reward = torch.tensor([[0, 1.01, 5, 5], [0.1, 0, -0.97, 9], [0.1, 0, 0, 0.02], [0, 0, 0, 1.0]])
    found = Sepsis(SepsisConfig()).measure(trajectory)
    assert found["recovery_rate"].tolist() == [1, 0, 0, 1]
    assert found["death_rate"].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("task", TASKS)
def test_the_return_is_the_improvement_and_the_outcome(task: Any) -> None:
    """Improvements add up to the first state minus the last one, which the outcome's step reaches as well."""
    config = replace(STRONG, task=task, obs_noise=0.0)
    played = play(config, 200)
    found = Sepsis(config).measure(played)
    assert torch.equal(found["return"], torch.where(played.valid, played.reward, 0.0).sum(1))
    ended_B = ~played.valid.all(1)
    better_B2 = (played.facts["state"][:, 0] - played.facts["state"][:, -1])[ended_B, :2]
    outcome_B = (found["recovery_rate"] - found["death_rate"])[ended_B]
    torch.testing.assert_close(
        found["return"][ended_B], better_B2 @ torch.tensor([0.1, 0.05]) + outcome_B, rtol=0, atol=1e-5
    )


def test_outcomes_are_those_of_the_worlds() -> None:
    played = play(STRONG, 400)
    found = Sepsis(STRONG).measure(played)
    assert torch.equal(
        found["recovery_rate"] + found["death_rate"] == 1, ~played.valid.all(1) | (played.reward[:, -1].abs() > 0.5)
    )


def test_kinetics_by_hand() -> None:
    """A shift at 3 in both; the second episode ends before its shift at 5 and never sees it."""
    regimes = [[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 2, 2, 0, 0]]
    right = [[1, 1, 1, 0, 0, 1, 1], [0, 1, 1, 0, 1, 1, 1]]
    found = kinetics([made_up(regimes, right, ends=[7, 5])])
    at = dict(zip(found.offset, zip(found.accuracy, found.shifts, strict=True), strict=True))
    assert at[-1] == (1.0, 2)
    assert at[-3] == (0.5, 2)
    assert at[0] == (0.0, 2)
    assert at[1] == (0.5, 2)
    assert at[2] == (1.0, 1)
    assert at[-4][1] == at[4][1] == 0
    assert found.before == pytest.approx((0.5 + 1 + 1) / 3)
    assert found.after == pytest.approx((0.5 + 1 + 1) / 3)
    assert found.steps_to_recover == 2
    assert found.sem[found.offset.index(1)] == pytest.approx((0.25 / 1) ** 0.5)


def test_kinetics_add_up_over_batches_and_fall_at_a_shift() -> None:
    played = play(SepsisConfig(), 128, "constant-hazard")
    whole = kinetics([played])
    halves = kinetics([played.map(lambda x: x[:50]), played.map(lambda x: x[50:])])
    assert whole.accuracy == pytest.approx(halves.accuracy)
    assert whole.shifts[10] == sum(
        (row[1:][real[1:]] != row[:-1][real[1:]]).sum().item()
        for row, real in zip(played.facts["regime"], played.valid, strict=True)
    )
    assert whole.accuracy[10] < 0.2 < 0.8 < whole.before
    assert whole.after > 0.6
    assert all(sem < 0.1 for sem in whole.sem)


def test_an_expert_never_falls() -> None:
    found = kinetics([play(SepsisConfig(), 32, "expert")])
    assert (found.before, found.after, found.steps_to_recover) == (1.0, 1.0, 0)


def test_the_horizon_and_the_number_of_segments_are_settings() -> None:
    config = replace(SepsisConfig(), horizon=30, min_segments=2, max_segments=2, min_length=10)
    played = play(config, 16)
    assert played.obs.shape == (16, 30, 20)
    assert all(len(segments(row)[0]) == 2 for row in played.facts["regime"])
