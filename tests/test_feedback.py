"""Corruption of the feedback channel: each setting on a known stream; only feedback may change."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import uat
from tests.builders import (
    SPECS,
    build_random,
    build_uat,
    random_trajectory,
    randomise,
    vanilla_of,
    with_other_feedback,
)
from uat.acting import Behaviour, rollout
from uat.clock import NO_ACTION
from uat.config import override, run_config_from_json, to_json
from uat.contracts import Answers, Logits, Recording, Simulator, Transition
from uat.domains.darkroom.world import DarkRoomConfig, DarkRoomSimulator
from uat.episode import Noise, Trajectory
from uat.feedback import CorruptedRecording, CorruptedSimulator, FeedbackConfig, corrupt, corrupted_worlds
from uat.noise import gumbel
from uat.recipes import recipe
from uat.spec import Discrete, Spec, Vector

STEPS, WORLDS = 6, 500
SETTINGS: dict[str, dict[str, Any]] = {
    "noise": {"noise": 0.5},
    "null": {"reward": "null"},
    "null both": {"reward": "null", "action": "null"},
    "shuffled": {"reward": "shuffled"},
    "inverted": {"reward": "inverted"},
    "delay": {"delay": 2},
    "all": {"reward": "shuffled", "noise": 1.0, "delay": 1, "action": "null"},
}
every_setting = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


class Counting(Simulator[tuple[Tensor, int]]):
    """Step t earns t + 1, whatever is done: every reward says when it was earned."""

    spec = Spec(obs=Vector(1), action=Discrete(2), horizon=STEPS)

    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        return {"id": episode_ids}

    def reset(self, noise: Noise) -> tuple[tuple[Tensor, int], Tensor]:
        assert set(noise) == {"id"}, "a simulator is handed its own noise alone"
        return (noise["id"], 0), noise["id"][:, None].float()

    def expert(self, world: tuple[Tensor, int]) -> Tensor:
        return (world[0] + world[1]) % 2

    def step(self, world: tuple[Tensor, int], action: Tensor) -> Transition[tuple[Tensor, int]]:
        ids_B, t = world[0], world[1] + 1
        return Transition(
            (ids_B, t),
            ids_B[:, None].float(),
            torch.full_like(ids_B, t).float(),
            torch.full_like(ids_B, t == STEPS).bool(),
        )


def told_rewards(worlds: int = WORLDS, seed: int = 0, **settings: Any) -> Tensor:
    """(B, T) rewards that a policy sees of a stream 1, 2, 3, ..."""
    simulator = corrupt(Counting(), **settings)
    told = rollout(None, simulator, simulator.noise(torch.arange(worlds), seed)).told
    assert told is not None
    return told.reward


# ---------------------------------------------------------------- laws


def test_null_inverted_and_late_rewards_on_a_known_stream() -> None:
    one_to_six = torch.arange(1.0, STEPS + 1)
    assert (told_rewards(reward="null") == 0).all()
    assert (told_rewards(reward="inverted") == -one_to_six).all()
    assert (told_rewards(delay=2) == torch.tensor([0.0, 0, 1, 2, 3, 4])).all()
    assert (told_rewards(delay=STEPS + 1) == 0).all()
    assert (told_rewards(reward="inverted", delay=4) == torch.tensor([0.0, 0, 0, 0, -1, -2])).all()


def test_noise_is_normal_with_its_deviation_and_independent_from_step_to_step() -> None:
    error = told_rewards(worlds=20_000, noise=0.5) - torch.arange(1.0, STEPS + 1)
    assert error.mean().abs() < 0.005
    assert (error.std(0) - 0.5).abs().max() < 0.01
    assert ((error.abs() < 0.5).float().mean() - 0.6827).abs() < 0.005  # a normal law, not any law
    assert (torch.corrcoef(error.T) - torch.eye(STEPS)).abs().max() < 0.03


def test_shuffled_rewards_are_uniform_over_those_earned_so_far() -> None:
    told_BT = told_rewards(worlds=20_000, reward="shuffled")
    for t in range(STEPS):
        counts = torch.bincount(told_BT[:, t].long(), minlength=STEPS + 1)
        assert counts[1 : t + 2].sum() == len(told_BT), f"step {t} sees a reward that was not yet earned"
        expected = len(told_BT) / (t + 1)
        assert (counts[1 : t + 2] - expected).abs().max() < 5 * expected**0.5
    late = (told_BT - told_BT.mean(0))[:, 3:]
    assert (torch.corrcoef(late.T) - torch.eye(3)).abs().max() < 0.03, "draws of two steps hang together"


@every_setting
def test_draws_depend_on_seed_episode_and_step_alone(settings: dict[str, Any]) -> None:
    whole = told_rewards(**settings)
    assert torch.equal(whole[:7], told_rewards(worlds=7, **settings))
    random = "noise" in settings or settings.get("reward") == "shuffled"
    assert torch.equal(whole, told_rewards(seed=1, **settings)) != random


@every_setting
def test_logs_are_told_what_the_simulator_tells(settings: dict[str, Any]) -> None:
    """The channel step by step, and its twin that corrupts whole logs."""
    room = DarkRoomSimulator(DarkRoomConfig(horizon=9, num_worlds=4), "cpu")
    ids, seed = torch.arange(3, 11), 5
    corrupted = corrupt(room, **settings)
    told = rollout(None, corrupted, corrupted.noise(ids, seed))
    logged = corrupt(rollout(None, room, room.noise(ids, seed)), episode_ids=ids, seed=seed, **settings)
    assert told.told is not None
    assert logged.told is not None
    assert torch.equal(told.told.reward, logged.told.reward)
    assert torch.equal(told.told.action, logged.told.action)


class Recorded(Recording):
    """A recording of the expert's episodes in a room."""

    def __init__(self) -> None:
        self.room = DarkRoomSimulator(DarkRoomConfig(horizon=6), "cpu")
        self.spec = self.room.spec

    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        return self.room.noise(episode_ids, seed)

    def trajectory(self, noise: Noise) -> Trajectory:
        assert not any(name.startswith("feedback") for name in noise)
        return rollout(None, self.room, noise)

    def judged(self, trajectory: Trajectory, noise: Noise, answers: Answers) -> Trajectory:
        return replace(trajectory, facts={"answers": answers.every(slice(None))})


def test_recorded_episodes_stay_recorded_and_are_told_as_played_ones() -> None:
    recording = corrupted_worlds(Recorded(), FeedbackConfig(**SETTINGS["all"]))
    played = corrupt(Recorded().room, **SETTINGS["all"])
    noise = recording.noise(torch.arange(5), 3)
    assert isinstance(recording, CorruptedRecording)
    told, expected = recording.trajectory(noise), rollout(None, played, noise)
    assert told.told is not None
    assert expected.told is not None
    assert torch.equal(told.told.reward, expected.told.reward)
    judged = recording.judged(told, noise, Logits(torch.ones(5)))
    assert judged.facts["answers"].sum() == 5
    assert judged.told is told.told


# ---------------------------------------------------------------- nothing else changes


def happened(trajectory: Trajectory) -> dict[str, Tensor]:
    names = ("obs", "action", "reward", "done", "target", "valid")
    return {name: getattr(trajectory, name) for name in names} | trajectory.facts


@pytest.mark.parametrize(("domain", "name"), [*(("darkroom", name) for name in SETTINGS), ("sepsis", "all")])
def test_nothing_but_the_told_feedback_changes(domain: str, name: str) -> None:
    """Behaviour and a blind policy, sampled: the world, the targets and the metrics are the same bits."""
    settings = SETTINGS[name]
    config = recipe(domain, "vanilla", "smoke")
    clean = config.build_domain()
    other = replace(config, feedback=FeedbackConfig(**settings)).build_domain()
    assert clean.setting == "default"
    assert other.setting == FeedbackConfig(**settings).setting
    assert other.metrics == clean.metrics
    spec, ids = clean.spec, torch.arange(4)
    policy = build_random("vanilla", spec, dtype=torch.float32)
    gumbel_BTA = gumbel(0, "test", ids, spec.horizon * spec.action.count).view(4, spec.horizon, -1).float()
    for agent in (policy, Behaviour()):
        played = []
        for simulator in (clean.simulator("test", "cpu"), other.simulator("test", "cpu")):
            played.append(rollout(agent, simulator, simulator.noise(ids, 0), gumbel_BTA))
        for name, value in happened(played[0]).items():
            assert torch.equal(value, happened(played[1])[name]), name
        assert played[0].told is None
        for name, value in clean.measure(played[0]).items():
            assert torch.equal(value.nan_to_num(), other.measure(played[1])[name].nan_to_num()), name


@every_setting
def test_the_policy_is_told_in_acting_what_it_is_told_in_training(settings: dict[str, Any]) -> None:
    """Streaming under corruption equals the parallel pass over the trajectory's batch."""
    simulator = corrupt(DarkRoomSimulator(DarkRoomConfig(horizon=7, num_worlds=8), "cpu"), **settings)
    policy = build_random("uat", simulator.spec, dtype=torch.float32)
    played = rollout(policy, simulator, simulator.noise(torch.arange(16), 0))
    assert torch.equal(policy.logits(simulator.spec.clock.batch(played)).argmax(-1), played.action)


def test_the_channel_reads_nothing_back_to_the_host() -> None:
    """On a device without numbers nothing can be read: what is could not be captured as a CUDA graph."""
    here, there = (
        corrupt(DarkRoomSimulator(DarkRoomConfig(horizon=5), device), **SETTINGS["all"]) for device in ("cpu", "meta")
    )
    noise = {name: value.to("meta") for name, value in here.noise(torch.arange(4), 0).items()}
    policy = build_random("uat", there.spec, dtype=torch.float32).to("meta")
    played = rollout(policy, there, noise)
    assert played.told is not None
    assert played.told.reward.is_meta
    with pytest.raises(RuntimeError, match="item"):
        noise["start"][0].item()


def test_null_action_and_reward_make_uat_vanilla() -> None:
    """No feedback at all: all gates are exactly zero."""
    for spec in (SPECS["vector-discrete"], SPECS["assets-weights"]):
        batch = spec.clock.batch(corrupt(random_trajectory(spec), reward="null", action="null"))
        assert (batch.prev_reward == 0).all()
        assert (batch.prev_action == (NO_ACTION if isinstance(spec.action, Discrete) else 0)).all()
        policy = randomise(build_uat(spec), 0)
        gates = policy.utility(batch.prev_action, batch.prev_reward)
        assert max(gate.abs().max() for gate in (gates.rho, *gates.g)) == 0
        other = spec.clock.batch(corrupt(with_other_feedback(random_trajectory(spec)), reward="null", action="null"))
        assert torch.equal(policy.logits(batch), policy.logits(other))
        assert torch.equal(policy.logits(batch), vanilla_of(policy).logits(batch))


# ---------------------------------------------------------------- a setting of a run


def test_runs_under_the_truth_keep_their_names_and_others_have_their_own() -> None:
    config = recipe("darkroom", "uat", "smoke")
    names = {config.identity()}
    for settings in SETTINGS.values():
        other = override(config, {f"feedback.{name}": value for name, value in settings.items()})
        assert run_config_from_json(to_json(other)) == other
        names.add(other.identity())
    assert len(names) == 1 + len(SETTINGS)
    old = {name: value for name, value in to_json(config).items() if name != "feedback"}
    assert run_config_from_json(old).identity() == config.identity() == "776c86d1a5542758"


def test_a_run_is_trained_and_scored_under_its_channel(tmp_path: Path) -> None:
    """Rows name the setting of the channel, and the filter knows it: without any feedback it is far from perfect."""
    null = {"feedback.reward": "null", "feedback.action": "null", "train.epochs": 2}
    run = uat.train(override(recipe("darkroom", "vanilla", "smoke"), null), tmp_path / "null", device="cpu")
    found = uat.evaluate(run, device="cpu")
    channel = "feedback.reward=null,feedback.action=null"
    assert {score.setting for score in found.scores} == {channel, f"{channel},train.epochs=2"}
    means = {name: metrics["accuracy"].mean() for name, metrics in found.episodes.items()}
    assert means["random"] < means["ceiling"] < 0.6, "the filter received true feedback, or took the channel's for true"
    assert means["expert"] == 1
    with pytest.raises(ValueError, match="feedback"):
        uat.train(override(recipe("darkroom", "tent", "smoke"), {"train.epochs": 2}), tmp_path / "t", source=run)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"noise": -1.0}, "feedback.noise=-1.0"),
        ({"delay": -1}, "feedback.delay=-1"),
        ({"reward": "upside-down"}, "reward='upside-down'"),
        ({"sigma": 1.0}, "sigma"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        corrupt(Counting(), **settings)


def test_a_corrupted_channel_is_not_corrupted_again_and_a_domain_can_be_sent() -> None:
    simulator = corrupt(Counting(), noise=1.0)
    with pytest.raises(ValueError, match="already"):
        corrupt(simulator, reward="null")
    domain = override(recipe("darkroom", "uat", "smoke"), {"feedback.noise": 1.0}).build_domain()
    copy = pickle.loads(pickle.dumps(domain))
    assert copy.setting == domain.setting
    assert isinstance(copy.simulator("test", "cpu"), CorruptedSimulator)
