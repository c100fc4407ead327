"""The dark room against what is known of it: shortest paths, stationary laws, rewards by hand."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor

from uat.acting import rollout
from uat.domains.darkroom import DarkRoom, DarkRoomConfig
from uat.domains.darkroom.world import DarkRoomSimulator
from uat.domains.domain import Domain, split_seed
from uat.episode import Noise, Trajectory
from uat.noise import gumbel

STAY, UP, DOWN, LEFT, RIGHT = range(5)
SCHEDULES = ("gradual", "abrupt", "cyclic")
TIE_BREAKS = ("larger-axis", "row-first", "random")


def simulator(**settings: Any) -> DarkRoomSimulator:
    return DarkRoomSimulator(DarkRoomConfig(**settings), "cpu")


def scripted_noise(start: Tensor, goal: Tensor, horizon: int, cue: float = 0.0) -> Noise:
    tie = torch.rand(len(start), horizon, generator=torch.Generator().manual_seed(0))
    return {"start": start, "goal": goal, "cue": torch.full((len(start), horizon + 1), cue), "tie": tie}


def cells(*places: tuple[int, int], size: int = 10) -> Tensor:
    return torch.tensor([row * size + column for row, column in places])


def manhattan(a: Tensor, b: Tensor, size: int = 10) -> Tensor:
    return (a // size - b // size).abs() + (a % size - b % size).abs()


def play(sim: DarkRoomSimulator, noise: Noise, actions: list[int]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Positions, observations and rewards along a script that every world follows."""
    world, obs = sim.reset(noise)
    positions, observations, rewards = [world.position_B], [obs], []
    for action in actions:
        after = sim.step(world, torch.full_like(world.position_B, action))
        world, obs, reward = after.world, after.obs, after.reward_B
        positions.append(world.position_B)
        observations.append(obs)
        rewards.append(reward)
    return positions, observations, rewards


# ---------------------------------------------------------------- goals, starts, cues


def goals_by_index(schedule: str, seed: int, indices: int, num_worlds: int = 64, size: int = 10) -> Tensor:
    """(index, world) goal cells."""
    sim = simulator(schedule=schedule, num_worlds=num_worlds, size=size, horizon=1)
    return sim.noise(torch.arange(indices * num_worlds), seed)["goal"].view(indices, num_worlds)


def test_gradual_goals_walk_one_cell_per_episode() -> None:
    goal = goals_by_index("gradual", seed=1, indices=80, num_worlds=200)
    assert (manhattan(goal[1:], goal[:-1]) == 1).all()
    at_top_wall = goal[:-1] // 10 == 0
    went_down = goal[1:] // 10 == 1
    assert went_down[at_top_wall].float().mean().item() == pytest.approx(0.5, abs=0.05)  # a mirror: -1 is 1


@pytest.mark.parametrize("index", [0, 1, 30])
def test_gradual_goals_are_stationary(index: int) -> None:
    worlds = 20_000
    sim = simulator(num_worlds=worlds, horizon=1)
    goal = sim.noise(index * worlds + torch.arange(worlds), seed=2)["goal"][:, 0]
    axis = torch.tensor([1.0, *[2.0] * 8, 1.0]) / 18
    expected = torch.outer(axis, axis).flatten()
    seen = torch.bincount(goal, minlength=100) / worlds
    chi2 = (worlds * (seen - expected) ** 2 / expected).sum().item()
    assert chi2 < 150  # 99 degrees of freedom: below 149 with probability 0.999


def test_abrupt_goals_last_six_episodes() -> None:
    goal = goals_by_index("abrupt", seed=3, indices=60, num_worlds=400).view(10, 6, 400)
    assert (goal == goal[:, :1]).all()
    assert (goal[1:, 0] == goal[:-1, 0]).float().mean() < 0.03  # a new draw: the same cell once in a hundred
    assert len(goal.unique()) == 100


@pytest.mark.parametrize("seed", [4, 5])
def test_cyclic_goals_visit_the_waypoints_in_turn(seed: int) -> None:
    waypoints = cells((2, 2), (2, 7), (7, 7), (7, 2))
    goal = goals_by_index("cyclic", seed, indices=9, num_worlds=100)
    phase = (goal[..., None] == waypoints).int().argmax(-1)
    assert torch.equal(waypoints[phase], goal)
    assert torch.equal(phase[1:], (phase[:-1] + 1) % 4)
    assert torch.bincount(phase[0], minlength=4).min() > 10


@pytest.mark.parametrize("size", [2, 3, 5, 10])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_starts_are_uniform_off_the_goal(schedule: str, size: int) -> None:
    noise = simulator(schedule=schedule, size=size, horizon=1).noise(torch.arange(20_000), seed=6)
    assert (noise["start"] != noise["goal"][:, 0]).all()
    ahead = (noise["start"] - noise["goal"][:, 0]) % size**2  # uniform over 1 .. size^2 - 1
    share = torch.bincount(ahead, minlength=size**2)[1:] / 20_000
    assert (share - 1 / (size**2 - 1)).abs().max() < 0.015


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_noise_depends_on_seed_and_id_alone(schedule: str) -> None:
    sim = simulator(schedule=schedule, num_worlds=7, shift_steps=(20, 40))
    ids = torch.arange(100)
    shuffled = torch.tensor([93, 5, 41, 5, 0])
    whole, some, other = sim.noise(ids, 8), sim.noise(shuffled, 8), sim.noise(ids, 9)
    for name, value in whole.items():
        assert torch.equal(some[name], value[shuffled]), name
        assert not torch.equal(other[name], value), name
    shapes = {name: tuple(value.shape[1:]) for name, value in whole.items()}
    assert shapes == {"goal": (3,), "start": (), "cue": (61,), "tie": (60,)}


def test_cue_fires_half_the_time_within_two_cells_and_never_beyond() -> None:
    sim = simulator()
    noise = sim.noise(torch.arange(512), seed=10)
    random_play = gumbel(11, "play", torch.arange(512), 60 * 5).view(512, 60, 5)
    trajectory = rollout(DarkRoom(sim.config).references()["random"], sim, noise, random_play)
    near = manhattan(trajectory.facts["position"], trajectory.facts["goal"]) <= 2
    cue = trajectory.obs[..., 9]
    assert cue[~near].max() == 0
    assert cue[near].mean().item() == pytest.approx(0.5, abs=0.02)


# ---------------------------------------------------------------- the order of events


def test_walls_and_rewards_by_hand() -> None:
    noise = scripted_noise(start=cells((0, 1)), goal=cells((2, 1))[:, None], horizon=60)
    script = [UP, LEFT, RIGHT, DOWN, STAY, DOWN, STAY, RIGHT]
    positions, observations, rewards = play(simulator(), noise, script)
    path = cells((0, 1), (0, 1), (0, 0), (0, 1), (1, 1), (1, 1), (2, 1), (2, 1), (2, 2))
    assert torch.equal(torch.cat(positions), path)
    earned = [-0.01, -0.51, 0.49, 0.49, -0.01, 2.49, 1.99, -0.51]  # bump, away, back, down, wait, arrive, rest, leave
    torch.testing.assert_close(torch.cat(rewards), torch.tensor(earned))
    assert observations[0][0].tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0, 1]  # a wall above; the cue at distance 2
    assert observations[2][0].tolist() == [1, 1, 1, 1, 0, 0, 1, 0, 0, 0]  # a corner; no cue at distance 3
    assert observations[4][0].tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 0, 1]


def test_walls_on_the_far_sides() -> None:
    noise = scripted_noise(start=cells((9, 9)), goal=cells((0, 0))[:, None], horizon=60)
    positions, observations, _ = play(simulator(), noise, [DOWN, RIGHT])
    assert torch.cat(positions).tolist() == [99, 99, 99]
    assert observations[2][0].tolist() == [0, 0, 1, 0, 0, 1, 1, 1, 1, 0]


def test_goal_shifts_before_the_observation_and_after_the_reward() -> None:
    sim = simulator(horizon=6, shift_steps=(2, 4))
    goal = cells((5, 5), (5, 9), (0, 0))[None]
    noise = scripted_noise(start=cells((5, 3)), goal=goal, horizon=6)
    trajectory = rollout(None, sim, noise)
    assert trajectory.facts["goal"].tolist() == [goal[0, [0, 0, 1, 1, 2, 2]].tolist()]
    assert trajectory.required_target.tolist() == [[RIGHT, RIGHT, RIGHT, RIGHT, LEFT, LEFT]]
    assert trajectory.obs[0, :, 9].tolist() == [1, 1, 0, 0, 0, 0]  # at (5,5), t = 2: the goal has just left for (5,9)
    torch.testing.assert_close(trajectory.reward[0], torch.tensor([0.49, 2.49, 0.49, 0.49, 0.49, 0.49]))
    assert trajectory.done.tolist() == [[False] * 5 + [True]]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shifts_move_on_along_the_schedule(schedule: str) -> None:
    shifting = simulator(schedule=schedule, num_worlds=16, shift_steps=(20, 40))
    goal = shifting.noise(torch.arange(16 * 24), seed=12)["goal"].view(24, 16, 3)
    along = goals_by_index(schedule, seed=12, indices=40, num_worlds=16)
    stride = 6 if schedule == "abrupt" else 1
    for shift in range(3):
        assert torch.equal(goal[..., shift], along[shift * stride : shift * stride + 24])


def test_no_step_reads_a_value_on_the_host() -> None:
    """Meta tensors hold no values, so that whatever would block a CUDA graph raises here."""
    config = DarkRoomConfig(tie_break="random", shift_steps=(3,), horizon=5)
    real = DarkRoomSimulator(config, "cpu").noise(torch.arange(4), seed=0)
    noise = {name: value.to("meta") for name, value in real.items()}
    trajectory = rollout(None, DarkRoomSimulator(config, "meta"), noise)
    assert trajectory.obs.shape == (4, 5, 10)


# ---------------------------------------------------------------- the expert


def breadth_first(size: int) -> Tensor:
    """(C, C) number of moves between cells, by search."""
    moves = torch.full((size**2, size**2), -1)
    for source in range(size**2):
        moves[source, source] = 0
        queue = deque([source])
        while queue:
            row, column = divmod(cell := queue.popleft(), size)
            for r, c in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
                if 0 <= r < size and 0 <= c < size and moves[source, r * size + c] < 0:
                    moves[source, r * size + c] = moves[source, cell] + 1
                    queue.append(r * size + c)
    return moves


@pytest.mark.parametrize("tie_break", TIE_BREAKS)
def test_expert_takes_a_shortest_path_from_everywhere(tie_break: str) -> None:
    start, goal = torch.cartesian_prod(torch.arange(100), torch.arange(100)).unbind(1)
    sim = simulator(tie_break=tie_break, horizon=20)
    trajectory = rollout(None, sim, scripted_noise(start, goal[:, None], horizon=20))
    away = trajectory.facts["position"] != trajectory.facts["goal"]
    assert torch.equal(away.sum(1), breadth_first(10)[start, goal])
    assert torch.equal(away.sum(1), away.long().cumprod(1).sum(1))  # once there, it stays


def test_expert_breaks_ties_as_told() -> None:
    start, goal = cells((5, 5), (5, 5), (5, 5), (5, 5), (5, 5)), cells((3, 3), (7, 6), (4, 8), (5, 0), (5, 5))
    noise = scripted_noise(start, goal[:, None], horizon=60)
    labels = {}
    for tie_break in TIE_BREAKS:
        sim = simulator(tie_break=tie_break)
        world, _ = sim.reset(noise)
        labels[tie_break] = sim.expert(world).tolist()
    assert labels["larger-axis"] == [UP, DOWN, RIGHT, LEFT, STAY]
    assert labels["row-first"] == [UP, DOWN, UP, LEFT, STAY]
    optimal = [(UP, LEFT), (DOWN, RIGHT), (UP, RIGHT), (LEFT,), (STAY,)]
    assert all(label in either for label, either in zip(labels["random"], optimal, strict=True))


def test_random_ties_are_tossed_evenly() -> None:
    sim = simulator(tie_break="random")
    count = 4000
    noise = scripted_noise(cells((5, 5)).expand(count), cells((4, 9)).expand(count)[:, None], horizon=60)
    world, _ = sim.reset(noise)
    label = sim.expert(world)
    assert (label == UP).float().mean().item() == pytest.approx(0.5, abs=0.03)
    assert ((label == UP) | (label == RIGHT)).all()


@pytest.mark.parametrize("tie_break", TIE_BREAKS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_expert_scores_full_marks(schedule: str, tie_break: str) -> None:
    domain = DarkRoom(DarkRoomConfig(schedule=schedule, tie_break=tie_break))  # pyright: ignore[reportArgumentType]
    sim = domain.simulator("test", "cpu")
    scores = domain.measure(rollout(None, sim, sim.noise(torch.arange(64), split_seed("test", 0))))
    for name in ("accuracy", "optimal_accuracy", "efficiency"):
        assert (scores[name] == 1).all(), name


# ---------------------------------------------------------------- the domain


def hand_trajectory() -> Trajectory:
    """Start (0,0), goal (1,1), horizon 6: right, down (arrives after 2 moves), stay, left, stay, padding."""
    position = cells((0, 0), (0, 1), (1, 1), (1, 1), (1, 0), (1, 0), size=4)[None]
    action = torch.tensor([[RIGHT, DOWN, STAY, LEFT, STAY, STAY]])
    return Trajectory(
        obs=torch.zeros(1, 6, 10),
        action=action,
        reward=torch.tensor([[0.49, 2.49, 1.99, -0.51, -0.01, 100.0]]),
        terminated=torch.zeros(1, 6, dtype=torch.bool),
        target=torch.tensor([[DOWN, DOWN, STAY, STAY, RIGHT, STAY]]),
        valid=torch.tensor([[True] * 5 + [False]]),
        facts={"position": position, "goal": torch.full((1, 6), 5)},
    )


def test_metrics_by_hand() -> None:
    domain = DarkRoom(DarkRoomConfig(size=4, horizon=6))
    scores = {name: value.item() for name, value in domain.measure(hand_trajectory()).items()}
    assert scores == pytest.approx({"accuracy": 2 / 5, "optimal_accuracy": 3 / 5, "efficiency": 1.0, "return": 4.45})
    assert list(scores) == [metric.name for metric in domain.metrics]


@pytest.mark.parametrize(("arrives", "expected"), [(2, 1.0), (4, 0.5), (5, 2 / 6), (None, 2 / 6)])
def test_efficiency_counts_moves_until_first_on_the_goal(arrives: int | None, expected: float) -> None:
    trajectory = hand_trajectory()  # the last step is padding: an arrival there does not count
    trajectory.facts["position"] = torch.zeros(1, 6, dtype=torch.long)
    if arrives is not None:
        trajectory.facts["position"][0, arrives] = 5
    scores = DarkRoom(DarkRoomConfig(size=4, horizon=6)).measure(trajectory)
    assert scores["efficiency"].item() == pytest.approx(expected)


def test_random_reference_plays_every_action() -> None:
    domain: Domain = DarkRoom(DarkRoomConfig())
    sim = domain.simulator("test", "cpu")
    agent = domain.references()["random"]
    noise = gumbel(13, "play", torch.arange(128), 60 * 5).view(128, 60, 5)
    trajectory = rollout(agent, sim, sim.noise(torch.arange(128), seed=13), noise)
    share = torch.bincount(trajectory.action.flatten(), minlength=5) / trajectory.action.numel()
    assert (share - 0.2).abs().max() < 0.02
    assert domain.measure(trajectory)["accuracy"].mean() < 0.25


def test_only_the_random_reference_is_sampled() -> None:
    sampled = {name: type(agent).sampled for name, agent in DarkRoom(DarkRoomConfig()).references().items()}
    assert sampled == {"ceiling": False, "random": True}


def test_setting_names_what_differs() -> None:
    assert DarkRoom(DarkRoomConfig(schedule="cyclic")).setting == "default"
    assert DarkRoom(DarkRoomConfig(schedule="cyclic")).task == "cyclic"
    assert DarkRoom(DarkRoomConfig(tie_break="row-first", size=8)).setting == "tie_break=row-first,size=8"
    shifting = DarkRoom(DarkRoomConfig(horizon=150, shift_steps=(50, 100)))
    assert shifting.setting == "horizon=150,shift_steps=50+100"
    assert shifting.spec.horizon == 150


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "weekly"}, "schedule='weekly'"),
        ({"tie_break": "none"}, "tie_break='none'"),
        ({"size": 1}, "size=1"),
        ({"horizon": 0}, "horizon=0"),
        ({"num_worlds": 0}, "num_worlds=0"),
        ({"shift_steps": (0,)}, "shift_steps=0 must be at least 1"),
        ({"shift_steps": (60,)}, r"shift_steps=\(60,\)"),
        ({"shift_steps": (5, 5)}, r"shift_steps=\(5, 5\)"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DarkRoomConfig(**settings)
