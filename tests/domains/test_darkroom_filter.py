"""The dark room's Bayes filter against enumeration by hand, and against what it must do."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from uat.acting import rollout
from uat.clock import NO_ACTION
from uat.domains.darkroom import DarkRoom, DarkRoomConfig
from uat.domains.darkroom.filter import DarkRoomFilter
from uat.domains.domain import split_seed
from uat.episode import Step, Trajectory
from uat.noise import gumbel

STAY, UP, DOWN, LEFT, RIGHT = range(5)
Place = tuple[int, int]


# ---------------------------------------------------------------- the slow twin: every start and every goal path


def reflected(x: int, size: int) -> int:
    return -x if x < 0 else 2 * (size - 1) - x if x >= size else x


def goal_prior(goal: Place, config: DarkRoomConfig) -> float:
    if config.schedule == "abrupt":
        return 1 / config.size**2
    if config.schedule == "cyclic":
        return 0.25 if goal in waypoints(config.size) else 0.0
    at_wall = [1.0 if x in (0, config.size - 1) else 2.0 for x in goal]
    return at_wall[0] * at_wall[1] / (2 * config.size - 2) ** 2


def waypoints(size: int) -> list[Place]:
    a, b = {4: (0, 3), 5: (1, 3)}[size]
    return [(a, a), (a, b), (b, b), (b, a)]


def goal_moves(goal: Place, config: DarkRoomConfig) -> Iterator[tuple[Place, float]]:
    size = config.size
    if config.schedule == "abrupt":
        yield from ((place, 1 / size**2) for place in product(range(size), range(size)))
    elif config.schedule == "cyclic":
        yield waypoints(size)[(waypoints(size).index(goal) + 1) % 4], 1.0
    else:
        for r, c in ((-1, 0), (1, 0), (0, -1), (0, 1)):
            yield (reflected(goal[0] + r, size), reflected(goal[1] + c, size)), 0.25


def goal_paths(goal: Place, shifts: int, config: DarkRoomConfig) -> Iterator[tuple[list[Place], float]]:
    """Every sequence of goals that starts here, with its chance."""
    if shifts == 0:
        yield [goal], 1.0
        return
    for after, chance in goal_moves(goal, config):
        for path, rest in goal_paths(after, shifts - 1, config):
            yield [goal, *path], chance * rest


def moved(at: Place, action: int, size: int) -> Place:
    r, c = {STAY: (0, 0), UP: (-1, 0), DOWN: (1, 0), LEFT: (0, -1), RIGHT: (0, 1)}[action]
    return min(max(at[0] + r, 0), size - 1), min(max(at[1] + c, 0), size - 1)


def distance(a: Place, b: Place) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def reward(before: Place, after: Place, goal: Place) -> float:
    d, d_after = distance(before, goal), distance(after, goal)
    return -0.01 + 0.5 * (d_after < d) - 0.5 * (d_after > d) + 2.0 * (d_after == 0)


def seen_chance(obs: list[float], at: Place, goal: Place, size: int) -> float:
    around = [(at[0] + r, at[1] + c) for r in (-1, 0, 1) for c in (-1, 0, 1)]
    if obs[:9] != [0.0 if 0 <= r < size and 0 <= c < size else 1.0 for r, c in around]:
        return 0.0
    fires = 0.5 if distance(at, goal) <= 2 else 0.0
    return fires if obs[9] == 1.0 else 1 - fires


def expert_law(at: Place, goal: Place, tie_break: str) -> dict[int, float]:
    down, right = goal[0] - at[0], goal[1] - at[1]
    vertical, horizontal = DOWN if down > 0 else UP, RIGHT if right > 0 else LEFT
    if down == right == 0:
        return {STAY: 1.0}
    if down == 0 or right == 0:
        return {vertical if down else horizontal: 1.0}
    if tie_break == "random":
        return {vertical: 0.5, horizontal: 0.5}
    return {horizontal if tie_break == "larger-axis" and abs(right) > abs(down) else vertical: 1.0}


def enumerate_posterior(config: DarkRoomConfig, obs: list[Any], actions: list[int], rewards: list[float]) -> Tensor:
    """(T, A) posterior of the expert's action after each observation of one episode."""
    mass = torch.zeros(len(obs), 5, dtype=torch.float64)
    places = list(product(range(config.size), range(config.size)))
    for start, goal in product(places, places):
        if start == goal or goal_prior(goal, config) == 0:
            continue
        for path, chance in goal_paths(goal, len(config.shift_steps), config):
            weight, at = goal_prior(goal, config) * chance / (len(places) - 1), start
            for t, seen in enumerate(obs):
                now = path[sum(s <= t for s in config.shift_steps)]
                if t > 0:
                    before, at = at, moved(at, actions[t - 1], config.size)
                    then = path[sum(s <= t - 1 for s in config.shift_steps)]
                    weight *= abs(reward(before, at, then) - rewards[t - 1]) < 1e-3
                weight *= seen_chance(seen, at, now, config.size)
                if weight == 0:
                    break
                for action, share in expert_law(at, now, config.tie_break).items():
                    mass[t, action] += weight * share
    return mass / mass.sum(1, keepdim=True)


def filter_posterior(config: DarkRoomConfig, trajectory: Trajectory) -> Tensor:
    """(B, T, A) what the filter answers along these episodes."""
    agent = DarkRoomFilter(config)
    state = agent.init_state(len(trajectory.obs), config.horizon, "cpu")
    posterior, history = [], config.spec.clock.begin(config.spec.no_action(len(trajectory.obs)))
    for t in range(config.horizon):
        logits, state = agent.step(state, history.step(trajectory.obs[:, t]))
        posterior.append(logits.exp())
        history.add(trajectory.action[:, t], trajectory.reward[:, t])
    return torch.stack(posterior, dim=1)


def random_play(config: DarkRoomConfig, episodes: int, seed: int) -> Trajectory:
    domain = DarkRoom(config)
    sim, ids = domain.simulator("test", "cpu"), torch.arange(episodes)
    noise = gumbel(seed, "play", ids, config.horizon * 5).view(episodes, config.horizon, 5)
    return rollout(domain.references()["random"], sim, sim.noise(ids, seed), noise)


@pytest.mark.parametrize("schedule", ["gradual", "abrupt", "cyclic"])
@pytest.mark.parametrize(
    ("tie_break", "size", "shift_steps"),
    [
        ("larger-axis", 5, ()),
        ("larger-axis", 5, (4,)),
        ("row-first", 4, ()),
        ("row-first", 4, (3, 6)),
        ("random", 4, ()),
        ("random", 4, (1,)),
    ],
)
def test_filter_equals_enumeration(schedule: Any, tie_break: Any, size: int, shift_steps: tuple[int, ...]) -> None:
    config = DarkRoomConfig(schedule=schedule, tie_break=tie_break, size=size, horizon=10, shift_steps=shift_steps)
    trajectory = random_play(config, episodes=3, seed=1)
    fast = filter_posterior(config, trajectory)
    for b in range(3):
        slow = enumerate_posterior(
            config, trajectory.obs[b].tolist(), trajectory.action[b].tolist(), trajectory.reward[b].tolist()
        )
        torch.testing.assert_close(fast[b], slow, rtol=0, atol=1e-9)


# ---------------------------------------------------------------- streams


def test_restarted_stream_equals_a_fresh_one() -> None:
    """Stream 1 starts again at step 4 while streams 0 and 2 continue; shifts count from each stream's own start."""
    config = DarkRoomConfig(horizon=10, shift_steps=(3, 6))
    trajectory = random_play(config, episodes=4, seed=2)
    expected = filter_posterior(config, trajectory)
    agent = DarkRoomFilter(config)
    state = agent.init_state(3, 10, "cpu")
    episode, age = torch.tensor([0, 1, 2]), torch.zeros(3, dtype=torch.long)
    for t in range(10):
        if t == 4:
            episode[1], age[1] = 3, 0
        before = (age - 1).clamp_min(0)
        step = Step(
            obs=trajectory.obs[episode, age],
            prev_action=torch.where(age > 0, trajectory.action[episode, before], NO_ACTION),
            prev_reward=torch.where(age > 0, trajectory.reward[episode, before], 0.0),
            first=age == 0,
        )
        logits, state = agent.step(state, step)
        torch.testing.assert_close(logits.exp(), expected[episode, age], rtol=0, atol=1e-12)
        age += 1


def test_batch_composition_changes_no_bit() -> None:
    config = DarkRoomConfig(horizon=30)
    trajectory = random_play(config, episodes=9, seed=3)
    together = filter_posterior(config, trajectory)
    alone = filter_posterior(config, trajectory.map(lambda x: x[4:5]))
    assert torch.equal(together[4:5], alone)


def test_impossible_evidence_is_loud_until_the_next_episode() -> None:
    config = DarkRoomConfig()
    agent = DarkRoomFilter(config)
    state = agent.init_state(1, 60, "cpu")
    obs, first, later = torch.zeros(1, 10), torch.tensor([True]), torch.tensor([False])
    none, zero = torch.tensor([NO_ACTION]), torch.zeros(1)
    fresh, state = agent.step(state, Step(obs=obs, prev_action=none, prev_reward=zero, first=first))
    lost, state = agent.step(state, Step(obs=obs, prev_action=torch.tensor([UP]), prev_reward=zero + 7, first=later))
    again, state = agent.step(state, Step(obs=obs, prev_action=none, prev_reward=zero, first=first))
    assert lost.isnan().all()
    assert torch.equal(again, fresh)


# ---------------------------------------------------------------- what feedback tells


def decisions_after(action: int, rewards: list[float]) -> Tensor:
    """Decisions after one action in the open room that earned this or that; nothing else is seen or differs."""
    agent = DarkRoomFilter(DarkRoomConfig())
    streams = len(rewards)
    state = agent.init_state(streams, 60, "cpu")
    obs = torch.zeros(streams, 10)
    start = Step(
        obs=obs,
        prev_action=torch.full((streams,), NO_ACTION),
        prev_reward=torch.zeros(streams),
        first=torch.ones(streams, dtype=torch.bool),
    )
    _, state = agent.step(state, start)
    after = Step(
        obs=obs,
        prev_action=torch.full((streams,), action),
        prev_reward=torch.tensor(rewards),
        first=torch.zeros(streams, dtype=torch.bool),
    )
    return agent.step(state, after)[0].argmax(-1)


def test_equal_observations_and_different_feedback_decide_differently() -> None:
    """The feedback-informative definition: closer means go on, farther means turn back."""
    assert decisions_after(UP, [0.49, -0.51]).tolist() == [UP, DOWN]
    assert decisions_after(LEFT, [0.49, -0.51]).tolist() == [LEFT, RIGHT]


def test_standing_on_the_goal_is_known_by_its_reward() -> None:
    assert decisions_after(UP, [2.49]).tolist() == [STAY]
    assert decisions_after(UP, [0.49]).tolist() != [STAY]


def test_greedy_accuracy_on_gradual_goals() -> None:
    domain = DarkRoom(DarkRoomConfig())
    sim = domain.simulator("test", "cpu")
    trajectory = rollout(domain.references()["ceiling"], sim, sim.noise(torch.arange(128), split_seed("test", 0)))
    scores = {name: value.mean().item() for name, value in domain.measure(trajectory).items()}
    assert 0.92 <= scores["accuracy"] <= 0.96
    assert 0.60 <= scores["efficiency"] <= 0.74
