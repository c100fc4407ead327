"""DarkRoom's filters under corrupted feedback, against enumeration of all starts, goals, rewards and draws."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.domains.test_darkroom_filter import (
    expert_law,
    filter_posterior,
    goal_paths,
    goal_prior,
    moved,
    reward,
    seen_chance,
)
from uat.acting import rollout
from uat.channel import FeedbackConfig
from uat.clock import NO_ACTION
from uat.domains.darkroom import DarkRoom, DarkRoomConfig
from uat.domains.darkroom.channel_filter import ChannelFilter
from uat.domains.darkroom.filter import DarkRoomFilter
from uat.episode import Step, Trajectory
from uat.feedback import CorruptedDomain, corrupt
from uat.noise import gumbel

Channel = dict[str, Any]


# ---------------------------------------------------------------- the slow twin


def density(received: float, sent: float, sigma: float) -> float:
    if sigma == 0:
        return float(abs(received - sent) < 1e-3)
    return math.exp(-0.5 * ((received - sent) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))


def received_chance(received: list[float], earned: list[float], channel: FeedbackConfig) -> float:
    """Probability (or density) of the numbers that a channel has delivered, given all rewards that were earned.

    Of shuffled rewards, every sequence of draws is enumerated.
    """
    delivered = received[channel.delay :]
    sent = {"null": [0.0] * len(earned), "inverted": [-r for r in earned]}.get(channel.reward, earned)
    picks = product(*(range(s + 1) for s in range(len(delivered)))) if channel.reward == "shuffled" else [None]
    total = 0.0
    for pick in picks:
        chance = 1.0
        for s, number in enumerate(delivered):
            chance *= density(number, sent[s if pick is None else pick[s]], channel.noise)
            chance /= 1 if pick is None else s + 1
        total += chance
    return total


def enumerate_posterior(config: DarkRoomConfig, channel: FeedbackConfig, told: Trajectory, b: int) -> Tensor:
    """(T, A) posterior of the expert's action after each observation of one episode."""
    assert told.told is not None
    obs, actions, received = (x[b].tolist() for x in (told.obs, told.action, told.told.reward))
    mass = torch.zeros(len(obs), 5, dtype=torch.float64)
    places = list(product(range(config.size), range(config.size)))
    for start, goal in product(places, places):
        for path, chance in goal_paths(goal, len(config.shift_steps), config) if start != goal else ():
            seen, at, earned = goal_prior(goal, config) * chance, start, []
            for t in range(len(obs)):
                now = path[sum(s <= t for s in config.shift_steps)]
                if t > 0:
                    then = path[sum(s <= t - 1 for s in config.shift_steps)]
                    before, at = at, moved(at, actions[t - 1], config.size)
                    earned.append(float(np.float32(reward(before, at, then))))  # the world earns in float32
                seen *= seen_chance(obs[t], at, now, config.size)
                weight = seen * received_chance(received[:t], earned, channel)
                for action, share in expert_law(at, now, config.tie_break).items():
                    mass[t, action] += weight * share
    return mass / mass.sum(1, keepdim=True)


# ---------------------------------------------------------------- the filter along given episodes


def random_play(config: DarkRoomConfig, channel: FeedbackConfig, episodes: int, seed: int = 1) -> Trajectory:
    """Episodes with random actions under a channel."""
    domain, ids = DarkRoom(config), torch.arange(episodes)
    sim = corrupt(domain.simulator("test", "cpu"), channel)
    noise = gumbel(seed, "play", ids, config.horizon * 5).view(episodes, config.horizon, 5)
    return rollout(domain.references()["random"], sim, sim.noise(ids, seed), noise)


def posterior(config: DarkRoomConfig, channel: FeedbackConfig, played: Trajectory) -> Tensor:
    """(B, T, A) what the filter answers along these episodes."""
    batch, agent = config.spec.clock.batch(played), ChannelFilter(config, channel)
    state, answers = agent.init_state(len(played.obs), config.horizon, "cpu"), []
    for t in range(config.horizon):
        logits, state = agent.step(state, batch.step(t))
        answers.append(logits.exp())
    return torch.stack(answers, dim=1)


@pytest.mark.parametrize(
    "settings",
    [
        {"noise": 0.3},
        {"noise": 1.0},
        {"noise": 5.0},
        {"delay": 1},
        {"delay": 3},
        {"delay": 9},
        {"reward": "shuffled"},
        {"reward": "null"},
        {"reward": "null", "noise": 1.0},
        {"reward": "inverted"},
        {"reward": "inverted", "noise": 0.5, "delay": 2},
        {"reward": "shuffled", "noise": 0.5},
        {"reward": "shuffled", "delay": 2},
        {"reward": "shuffled", "noise": 1.0, "delay": 1},
    ],
    ids=lambda settings: FeedbackConfig(**settings).setting,
)
@pytest.mark.parametrize("schedule", ["gradual", "abrupt"])
def test_the_filter_equals_enumeration(schedule: Any, settings: Channel) -> None:
    config, channel = DarkRoomConfig(size=3, horizon=6, schedule=schedule), FeedbackConfig(**settings)
    played = random_play(config, channel, episodes=3)
    found = posterior(config, channel, played)
    assert found.dtype == torch.float64
    for b in range(3):
        torch.testing.assert_close(found[b], enumerate_posterior(config, channel, played, b), rtol=0, atol=2e-9)


@pytest.mark.parametrize("settings", [{"noise": 1.0}, {"reward": "inverted"}, {"reward": "null", "delay": 2}])
def test_goals_that_move_inside_an_episode_are_enumerated_as_well(settings: Channel) -> None:
    config, channel = DarkRoomConfig(size=3, horizon=7, shift_steps=(2, 5)), FeedbackConfig(**settings)
    played = random_play(config, channel, episodes=2)
    found = posterior(config, channel, played)
    for b in range(2):
        torch.testing.assert_close(found[b], enumerate_posterior(config, channel, played, b), rtol=0, atol=2e-9)


# ---------------------------------------------------------------- channels that equal another


@pytest.mark.parametrize("reward", ["true", "inverted"])
@pytest.mark.parametrize("shift_steps", [(), (7, 20)])
def test_true_and_inverted_rewards_give_the_posterior_of_the_clean_filter(reward: Any, shift_steps: Any) -> None:
    config, channel = DarkRoomConfig(horizon=30, shift_steps=shift_steps), FeedbackConfig(reward=reward)
    played = random_play(config, channel, episodes=8)
    clean = filter_posterior(config, played)
    torch.testing.assert_close(posterior(config, channel, played), clean, rtol=0, atol=2e-9)


def test_inverted_rewards_change_no_decision_of_the_filter() -> None:
    domain, ids = DarkRoom(DarkRoomConfig()), torch.arange(64)
    channel = FeedbackConfig(reward="inverted")
    inverted = CorruptedDomain(domain, channel)
    played = []
    for one, agent in ((domain, domain.references()), (inverted, domain.references_under(channel))):
        simulator = one.simulator("test", "cpu")
        played.append(rollout(agent["ceiling"], simulator, simulator.noise(ids, 0)))
    assert torch.equal(played[0].action, played[1].action)
    for name, value in domain.measure(played[0]).items():
        assert torch.equal(value, inverted.measure(played[1])[name]), name


def test_null_rewards_tell_the_filter_nothing() -> None:
    """The clean filter whose rewards all look alike: every reward explains every hypothesis."""
    config, channel = DarkRoomConfig(horizon=30), FeedbackConfig(reward="null")
    played = random_play(config, channel, episodes=8)
    without = DarkRoomFilter(config)
    without.model.reward_ACG = torch.zeros_like(without.model.reward_ACG)
    batch, state = config.spec.clock.batch(played), without.init_state(8, 30, "cpu")
    found = posterior(config, channel, played)
    for t in range(30):
        logits, state = without.step(state, batch.step(t))
        torch.testing.assert_close(found[:, t], logits.exp(), rtol=0, atol=2e-9)


def test_hidden_actions_are_remembered() -> None:
    """The filter knows what it decided, so that a channel without actions has the same ceiling."""
    domain, ids, actions = DarkRoom(DarkRoomConfig()), torch.arange(32), []
    for action in ("true", "null"):
        channel = FeedbackConfig(noise=0.5, action=action)
        simulator = corrupt(domain.simulator("test", "cpu"), channel)
        actions.append(rollout(ChannelFilter(domain.config, channel), simulator, simulator.noise(ids, 0)).action)
    assert torch.equal(*actions)


# ---------------------------------------------------------------- streams, order, errors


@pytest.mark.parametrize("settings", [{"noise": 0.5}, {"reward": "shuffled", "delay": 2}])
def test_restarted_stream_equals_a_fresh_one(settings: Channel) -> None:
    """Stream 1 starts again at step 4 while streams 0 and 2 continue; nothing is left of its first episode."""
    config, channel = DarkRoomConfig(horizon=10), FeedbackConfig(**settings)
    played = random_play(config, channel, episodes=4, seed=2)
    expected, batch = posterior(config, channel, played), config.spec.clock.batch(played)
    agent = ChannelFilter(config, channel)
    state = agent.init_state(3, 10, "cpu")
    episode, age = torch.tensor([0, 1, 2]), torch.zeros(3, dtype=torch.long)
    for t in range(10):
        if t == 4:
            episode[1], age[1] = 3, 0
        step = Step(
            obs=batch.obs[episode, age],
            prev_action=torch.where(age > 0, batch.prev_action[episode, age], NO_ACTION),
            prev_reward=torch.where(age > 0, batch.prev_reward[episode, age], 0.0),
            first=age == 0,
        )
        logits, state = agent.step(state, step)
        torch.testing.assert_close(logits.exp(), expected[episode, age], rtol=0, atol=2e-9)
        age += 1


@pytest.mark.parametrize("settings", [{"noise": 1.0}, {"reward": "shuffled", "delay": 2, "action": "null"}])
def test_the_filter_reads_nothing_back_to_the_host(settings: Channel) -> None:
    """On a device without numbers nothing can be read, so that the filter can be captured as a CUDA graph."""
    config, channel = DarkRoomConfig(size=4, horizon=5), FeedbackConfig(**settings)
    here, there = (corrupt(DarkRoom(config).simulator("test", device), channel) for device in ("cpu", "meta"))
    noise = {name: value.to("meta") for name, value in here.noise(torch.arange(4), 0).items()}
    assert rollout(ChannelFilter(config, channel), there, noise).action.is_meta


def test_less_is_known_under_worse_channels() -> None:
    domain, ids, scores = DarkRoom(DarkRoomConfig()), torch.arange(128), {}
    for name, settings in {
        "clean": {},
        "σ = 0.5": {"noise": 0.5},
        "σ = 2": {"noise": 2.0},
        "null": {"reward": "null"},
    }.items():
        channel = FeedbackConfig(**settings)
        simulator = corrupt(domain.simulator("test", "cpu"), channel)
        played = rollout(ChannelFilter(domain.config, channel), simulator, simulator.noise(ids, 0))
        scores[name] = domain.measure(played)["accuracy"].mean().item()
    assert scores["clean"] > scores["σ = 0.5"] > scores["σ = 2"] > scores["null"]


def test_a_channel_without_an_exact_filter_is_refused() -> None:
    config, channel = DarkRoomConfig(shift_steps=(20,)), FeedbackConfig(delay=2)
    with pytest.raises(ValueError, match=r"feedback.delay=2 has no exact filter .* shift_steps=\(20,\) must be empty"):
        ChannelFilter(config, channel)
    assert DarkRoom(config).references_under(channel) == {}
