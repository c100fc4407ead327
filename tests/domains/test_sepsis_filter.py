"""The Bayes filters of the sepsis domain against enumeration, and against what they must do."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.domains import sepsis_twin as twin
from uat.acting import rollout
from uat.contracts import Agent
from uat.domains.domain import split_seed
from uat.domains.sepsis import Sepsis, SepsisConfig
from uat.domains.sepsis.filter import HazardFilter, SegmentFilter
from uat.domains.sepsis.schedule import SegmentLaw
from uat.episode import Step, Trajectory
from uat.noise import gumbel
from uat.paper.calibrate_sepsis import GOALS, calibrate, meets_goals, scores

TINY = [
    SepsisConfig(horizon=7, min_segments=2, max_segments=3, min_length=1, response=0.3, state_noise=0.1),
    SepsisConfig(horizon=8, min_segments=1, max_segments=3, min_length=2, evenness=2.5, response=0.5, state_noise=0.2),
]
"""So strong a treatment meets the limits of the state, and so much noise leaves doubt."""
BOTH = [replace(config, task=task) for config in TINY for task in Sepsis.train_tasks]
EXPERT = [3, 4, 0]


def play_at_random(config: SepsisConfig, episodes: int) -> Trajectory:
    domain, ids = Sepsis(config), torch.arange(episodes)
    simulator = domain.simulator("test", "cpu")
    gumbel_BTA = gumbel(1, "actions", ids, config.horizon * 5).view(episodes, config.horizon, 5)
    return rollout(domain.references()["random"], simulator, simulator.noise(ids, 5), gumbel_BTA)


def listen(agent: HazardFilter, state_BT3: Tensor, action_BT: Tensor) -> Tensor:
    """(B, T, A) what a filter believes while it watches these states and actions."""
    streams, steps = action_BT.shape
    belief, said = agent.init_state(streams, steps, "cpu"), []
    for t in range(steps):
        before_B = action_BT[:, t - 1] if t else torch.full((streams,), -1)
        step = Step(
            obs=torch.zeros(streams, 20),
            prev_action=before_B,
            prev_reward=torch.zeros(streams),
            first=torch.full((streams,), t == 0),
        )
        logits_BA, belief = agent.step(agent.look(belief, {"state": state_BT3[:, t]}), step)
        said.append(logits_BA.exp())
    return torch.stack(said, dim=1)


@pytest.mark.parametrize("config", BOTH)
def test_the_filter_is_enumeration(config: SepsisConfig) -> None:
    played = play_at_random(config, 4)
    state_BT3 = played.facts["state"].double()
    limits = (state_BT3 <= 0) | (state_BT3 >= 1)
    assert limits.any()
    believed_BTA = listen(SegmentFilter(config), state_BT3, played.action)
    for b in range(4):
        states: list[Any] = state_BT3[b].tolist()
        for t in range(config.horizon):
            by_hand = twin.posterior(states[: t + 1], played.action[b, :t].tolist(), config)
            assert believed_BTA[b, t, EXPERT].tolist() == pytest.approx(by_hand, abs=1e-6)
    assert (believed_BTA.max(-1).values < 0.99).any()


@pytest.mark.parametrize("config", BOTH[:2])
def test_a_constant_hazard_is_a_filter_over_three_states(config: SepsisConfig) -> None:
    played = play_at_random(config, 2)
    believed_BTA = listen(HazardFilter(config, hazard=0.2), played.facts["state"], played.action)
    for b in range(2):
        states: list[Any] = played.facts["state"][b].double().tolist()
        actions, weight = played.action[b].tolist(), [1 / 3] * 3
        for t in range(config.horizon):
            if t:
                mean = [twin.expected(states[t - 1], r, actions[:t], config) for r in range(3)]
                weight = [w * twin.chance(states[t], m, config.state_noise) for w, m in zip(weight, mean, strict=True)]
                weight = [w / sum(weight) for w in weight]
                weight = [0.8 * w + 0.1 * (1 - w) for w in weight]
            assert believed_BTA[b, t, EXPERT].tolist() == pytest.approx(weight, abs=1e-5)


def test_a_stream_that_starts_anew_forgets() -> None:
    config = TINY[0]
    played = play_at_random(config, 3)
    agent, state_BT3 = SegmentFilter(config), played.facts["state"]
    alone = listen(agent, state_BT3, played.action)
    belief = agent.init_state(3, config.horizon, "cpu")
    for t in (0, 1, 2, 0, 1, 2):
        step = Step(
            obs=torch.zeros(3, 20),
            prev_action=played.action[:, t - 1] if t else torch.full((3,), -1),
            prev_reward=torch.zeros(3),
            first=torch.full((3,), t == 0),
        )
        logits_BA, belief = agent.step(agent.look(belief, {"state": state_BT3[:, t]}), step)
        torch.testing.assert_close(logits_BA.exp(), alone[:, t])


def test_hazards_are_those_of_all_splits() -> None:
    """Chance of a first segment of every length, from the hazards and from a list of all splits."""
    law = SegmentLaw(horizon=9, least=3, most=3, min_length=2, evenness=1.5)
    by_hand = torch.zeros(10, dtype=torch.float64)
    for lengths in twin.compositions(9, 3, 2):
        by_hand[lengths[0]] += twin.dirichlet_multinomial([n - 2 for n in lengths], 1.5)
    torch.testing.assert_close(law.lengths()[3, 9], by_hand)
    hazard_T, lasting = law.hazards()[2, 0], 1.0
    for t in range(1, 9):
        assert hazard_T[t].item() * lasting == pytest.approx(by_hand[t].item(), abs=1e-12)
        lasting *= 1 - hazard_T[t].item()


def test_equal_states_and_different_actions_call_for_different_treatment() -> None:
    """The paper's feedback-informative histories: what was seen is the same, what was done is not."""
    config, steps = SepsisConfig(state_noise=0.004), 4
    state_BT3 = torch.full((1, steps, 3), 0.5, dtype=torch.float64)
    for t in range(1, steps):
        state_BT3[0, t] = state_BT3[0, t - 1] + torch.tensor([-0.7, -1.0, 1.0]) * 0.25 * config.response
    done = {action: torch.full((1, steps), action) for action in (0, 4)}
    decided = {
        action: listen(SegmentFilter(config), state_BT3, action_BT)[0, -1].argmax().item()
        for action, action_BT in done.items()
    }
    assert decided == {0: 0, 4: 4}


def test_padding_leaves_the_belief_a_number() -> None:
    config = SepsisConfig()
    state_BT3 = torch.zeros(2, 90, 3)
    state_BT3[1] = 1.0
    believed_BTA = listen(SegmentFilter(config), state_BT3, torch.full((2, 90), 4))
    torch.testing.assert_close(believed_BTA.sum(-1), torch.ones(2, 90, dtype=torch.float64))


# ---------------------------------------------------------------- how hard the domain is


@pytest.fixture(scope="module", params=Sepsis.train_tasks)
def at_defaults(request: pytest.FixtureRequest) -> dict[str, dict[str, float]]:
    domain = Sepsis(SepsisConfig(task=request.param))
    agents: dict[str, Agent[Any] | None] = {**domain.references(), "expert": None}
    return {name: scores(domain, agent, 768) for name, agent in agents.items()}


def test_the_defaults_are_as_hard_as_they_are_meant_to_be(at_defaults: dict[str, dict[str, float]]) -> None:
    simple, ceiling = at_defaults["constant-hazard"], at_defaults["ceiling"]
    assert meets_goals(simple)
    if at_defaults["planner"]["accuracy"] < 1:  # the paper's labels; where benefits last, both filters are equally good
        assert ceiling["accuracy"] > simple["accuracy"] + 0.01
    assert ceiling["accuracy"] > simple["accuracy"] - 0.005
    assert ceiling["post_shift_accuracy"] >= simple["post_shift_accuracy"] - 0.005
    assert at_defaults["expert"]["return"] >= ceiling["return"] > at_defaults["random"]["return"]


def test_chance_is_one_in_five_and_the_expert_is_right(at_defaults: dict[str, dict[str, float]]) -> None:
    for name in ("accuracy", "post_shift_accuracy"):
        assert at_defaults["random"][name] == pytest.approx(0.2, abs=0.01)
        assert at_defaults["expert"][name] == 1.0


def test_calibration_says_what_it_found() -> None:
    found = calibrate(responses=(0.06,), noises=(0.002, 0.012), episodes=128)
    easy, default = found["grid"]
    assert set(found["goals"]) == set(GOALS)
    assert easy["accuracy"] > default["accuracy"]
    assert not easy["meets_goals"]
    assert found["at_defaults"]["constant-hazard"]["accuracy"] == default["accuracy"]
    assert set(found["at_defaults"]) == {"ceiling", "constant-hazard", "planner", "random", "expert"}
    for name, values in found["test"].items():
        assert values["return"]["low"] <= values["return"]["mean"] <= values["return"]["high"], name


def test_the_filter_beats_one_that_does_not_know_how_long_segments_last() -> None:
    """On the same test episodes, with room to spare where segments are alike."""
    domain = Sepsis(SepsisConfig(evenness=8.0, min_length=8))
    simulator = domain.simulator("test", "cpu")
    noise = simulator.noise(torch.arange(192), split_seed("test", 0))
    found = {n: domain.measure(rollout(a, simulator, noise))["accuracy"].mean() for n, a in domain.references().items()}
    assert found["ceiling"] > found["constant-hazard"] + 0.04


COMMITTED = {"regimes": "sepsis.json", "aligned": "sepsis-aligned.json"}


def committed(task: Any) -> dict[str, Any]:
    return json.loads((Path(__file__).parents[2] / "results/calibration" / COMMITTED[task]).read_text())


@pytest.mark.parametrize("task", COMMITTED)
def test_the_committed_calibration_is_of_these_defaults(task: Any) -> None:
    said = committed(task)
    assert said["defaults"] == asdict(SepsisConfig(task=task))
    assert said["defaults_meet_goals"]
    simple, ceiling = said["at_defaults"]["constant-hazard"], said["at_defaults"]["ceiling"]
    assert all(ceiling[name] >= simple[name] for name in GOALS)
    assert said["test"]["expert"]["accuracy"]["mean"] == 1.0
    planner = said["test"]["planner"]
    assert (planner["accuracy"]["mean"] == 1.0) == (task == "aligned")


@pytest.mark.slow
@pytest.mark.parametrize("task", COMMITTED)
def test_calibrating_again_gives_the_committed_numbers(task: Any) -> None:
    found, said = calibrate(task, responses=(), noises=()), committed(task)
    for part in ("at_defaults", "test"):
        for name, metrics in said[part].items():
            for metric, value in metrics.items():
                assert found[part][name][metric] == pytest.approx(value, abs=0.002), (part, name, metric)
