"""MovieLens's filters under corrupted feedback, against enumeration of courses and draws."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.domains.test_movielens_references import SMALL, schedules
from uat.acting import rollout
from uat.channel import FeedbackConfig
from uat.clock import Clock
from uat.domains.movielens import MovieLens, MovieLensConfig
from uat.domains.movielens.references import every_regime, filtered, informed
from uat.domains.movielens.regime import MISS, Catalogue, RegimeLaw, rewards
from uat.domains.movielens.shuffled import Courses, count_courses
from uat.episode import Batch, Trajectory
from uat.feedback import CorruptedDomain, corrupt

HORIZON, DELAY = 5, 1
CATALOGUE = Catalogue.of(torch.arange(30) % 3, 3)


def logged(channel: FeedbackConfig, episodes: int, horizon: int = HORIZON) -> Batch:
    generator, ids = torch.Generator().manual_seed(0), torch.arange(episodes)
    item_BT = torch.randint(30, (episodes, horizon), generator=generator)
    rating_BT = torch.randint(1, 6, (episodes, horizon), generator=generator).float()
    regime_BT = SMALL.draw(5, ids, horizon)
    trajectory = Trajectory(
        obs=item_BT,
        action=item_BT,
        reward=rewards(CATALOGUE.group_I[item_BT], rating_BT, regime_BT),
        terminated=torch.zeros_like(item_BT, dtype=torch.bool),
        target=item_BT,
        valid=torch.ones_like(item_BT, dtype=torch.bool),
        facts={"regime": regime_BT, "rating": rating_BT},
    )
    return Clock(reward_lag=DELAY).batch(corrupt(trajectory, channel))


def density(received: float, sent: float, sigma: float) -> float:
    return math.exp(-0.5 * ((received - sent) / sigma) ** 2) if sigma else float(abs(received - sent) < 1e-3)


def enumerate_posterior(batch: Batch, channel: FeedbackConfig, b: int) -> Tensor:
    """(G,) the last regime, given all that has arrived, over every course and every sequence of draws."""
    assert batch.trajectory is not None
    group_T, rating_T = CATALOGUE.group_I[batch.obs[b]].tolist(), batch.trajectory.facts["rating"][b].tolist()
    received = batch.prev_reward[b].tolist()[DELAY + channel.delay :]
    mass = torch.zeros(SMALL.num_groups, dtype=torch.float64)
    sign = -1 if channel.reward == "inverted" else 1
    for course, chance in schedules(SMALL, HORIZON):
        sent = [rating_T[j] / 5 if group_T[j] == course[j] else MISS for j in range(HORIZON)]
        orders = [range(len(received))]
        if channel.reward == "shuffled":
            orders = product(*(range(s + 1) for s in range(len(received))))
        for order in orders:
            fits = [density(z, sign * sent[j], channel.noise) for z, j in zip(received, order, strict=True)]
            mass[course[-1]] += chance * math.prod(fits)
    return mass / mass.sum()


@pytest.mark.parametrize(
    "settings",
    [
        {"delay": 1},
        {"delay": 9},
        {"reward": "inverted"},
        {"reward": "inverted", "delay": 2},
        {"noise": 0.5},
        {"noise": 0.3, "delay": 1, "reward": "inverted"},
        {"reward": "shuffled"},
        {"reward": "shuffled", "delay": 1},
        {"reward": "shuffled", "delay": 9},
        {"reward": "shuffled", "noise": 0.5},
    ],
    ids=lambda settings: FeedbackConfig(**settings).setting,
)
def test_the_filter_equals_enumeration(settings: dict[str, Any]) -> None:
    channel = FeedbackConfig(**settings)
    batch = logged(channel, episodes=8)
    found_BG = informed(SMALL, DELAY, HORIZON, channel)["ceiling"](batch, CATALOGUE)
    for b in range(8):
        torch.testing.assert_close(found_BG[b], enumerate_posterior(batch, channel, b), rtol=0, atol=1e-7)


def test_inverted_rewards_give_the_clean_posterior_and_null_rewards_that_without_feedback() -> None:
    inverted, null = FeedbackConfig(reward="inverted"), FeedbackConfig(reward="null", noise=1.0)
    batch = logged(inverted, episodes=30)
    clean_BG = filtered(SMALL, DELAY)(batch, CATALOGUE)
    assert torch.equal(informed(SMALL, DELAY, HORIZON, inverted)["ceiling"](batch, CATALOGUE), clean_BG)
    assert informed(SMALL, DELAY, HORIZON, null) == {"ceiling": every_regime}


def test_late_channels_add_to_the_domains_own_delay() -> None:
    batch = logged(FeedbackConfig(delay=2), episodes=30)
    late_BG = informed(SMALL, DELAY, HORIZON, FeedbackConfig(delay=2))["ceiling"](batch, CATALOGUE)
    assert torch.equal(late_BG, filtered(SMALL, DELAY + 2)(batch, CATALOGUE))


def test_the_filter_of_shuffled_rewards_reads_nothing_back_to_the_host() -> None:
    channel = FeedbackConfig(reward="shuffled", delay=1)
    belief = informed(SMALL, DELAY, HORIZON, channel)["ceiling"]
    assert belief(logged(channel, episodes=3).to("meta"), CATALOGUE.to("meta")).is_meta


@pytest.mark.parametrize(("law", "horizon"), [(SMALL, 6), (RegimeLaw(num_groups=4, shortest=1, longest=2), 5)])
def test_courses_are_every_way_a_regime_can_run(law: RegimeLaw, horizon: int) -> None:
    expected: dict[tuple[int, ...], float] = {}
    for course, chance in schedules(law, horizon):
        expected[tuple(course)] = expected.get(tuple(course), 0.0) + chance
    courses = Courses.of(law, horizon)
    found = dict(zip(map(tuple, courses.group_PT.tolist()), courses.chance_P.tolist(), strict=True))
    assert found == pytest.approx(expected)
    assert count_courses(law, horizon) == len(courses.chance_P) == len(expected)


def test_courses_of_the_domain_can_be_enumerated_and_those_of_long_episodes_cannot() -> None:
    assert count_courses(RegimeLaw(), 50) == 52_920
    assert informed(RegimeLaw(), 1, 500, FeedbackConfig(reward="shuffled")) == {}


def test_a_late_channel_has_the_ceiling_of_a_late_domain() -> None:
    small = MovieLensConfig(users=200, items=300, horizon=30, draws=2)
    channel, later = FeedbackConfig(delay=2), MovieLens(replace(small, delay=3))
    late = CorruptedDomain(MovieLens(small), channel)
    scores = []
    for domain, references in ((late, late.references_under(channel)), (later, later.references())):
        recording = domain.simulator("test", "cpu")
        played = rollout(references["ceiling"], recording, recording.noise(torch.arange(40), 0))
        scores.append(domain.measure(played)["hr@10"])
    assert torch.equal(*scores)
