"""`train.standardise`: statistics of raw observations are fitted once before training and kept with the weights."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import uat
from tests.builders import CPU, random_trajectory
from tests.training.small_runs import Crash, crash_at, numbers, saved_weights
from uat.acting import Behaviour, rollout
from uat.cli import main
from uat.contracts import Recording, Simulator, Transition
from uat.distributions import action_noise
from uat.domains import split_seed
from uat.engines import plan, plan_session
from uat.episode import Trajectory
from uat.noise import uniform
from uat.recipes import compose, recipe
from uat.serving import Session
from uat.spec import Box, Discrete, Observations, Spec, Vector, Weights
from uat.tensor_files import RunError, read_tensors, write_tensors
from uat.training import standardising, train, train_together

pytestmark = pytest.mark.usefixtures("without_tensorboard")

HORIZON = 6
TINY: dict[str, Any] = {
    "method.d_model": 8,
    "method.num_heads": 2,
    "method.num_layers": 1,
    "method.d_ff": 8,
    "train.epochs": 6,
    "train.batch_size": 16,
    "train.validate_every": 3,
    "train.validation_episodes": 8,
}
Change = Callable[[Tensor], Tensor]


def raw(cue_BT: Tensor) -> Tensor:
    """A column that is scaled by 1e4 and shifted, a plain one, and one that never changes."""
    return torch.stack([cue_BT * 1e4 + 3e4, cue_BT.square(), torch.full_like(cue_BT, 7.0)], dim=-1)


class Cues(Simulator[tuple[Tensor, int]]):
    """The sign of a cue says which of two actions pays. Actions change nothing that is observed."""

    def __init__(self, change: Change, obs: Observations = Vector(3)) -> None:  # noqa: B008 (frozen)
        self.spec, self.change = Spec(obs=obs, action=Discrete(2), horizon=HORIZON), change

    def noise(self, episode_ids: Tensor, seed: int) -> dict[str, Tensor]:
        return {"cue": uniform(seed, "cues", episode_ids, HORIZON + 1).float() * 2 - 1}

    def reset(self, noise: dict[str, Tensor]) -> tuple[tuple[Tensor, int], Tensor]:
        return (noise["cue"], 0), self.change(noise["cue"][:, 0])

    def expert(self, world: tuple[Tensor, int]) -> Tensor | None:
        cue_BT, t = world
        return (cue_BT[:, t] > 0).long()

    def step(self, world: tuple[Tensor, int], action: Tensor) -> Transition[tuple[Tensor, int]]:
        cue_BT, t = world
        after = cue_BT, t + 1
        never_B = torch.zeros(len(cue_BT), dtype=torch.bool)
        return Transition(after, self.change(cue_BT[:, t + 1]), (action == self.expert(world)).float(), never_B)


class CueDomain(uat.Domain):
    name = "cues"

    def __init__(self, setting: str = "raw", change: Change = raw, obs: Observations = Vector(3)) -> None:  # noqa: B008
        self.setting, self.change, self.spec = setting, change, Cues(change, obs).spec

    def simulator(self, split: str, device: Any) -> Cues:
        return Cues(self.change, self.spec.obs)


def by_hand(seed: int) -> CueDomain:
    """Return the domain, standardised by the statistics of its first 256 training episodes."""
    worlds = Cues(raw)
    played = rollout(None, worlds, worlds.noise(torch.arange(256), split_seed("train", seed)))
    rows = played.obs.double().flatten(0, 1)
    mean, scale = rows.mean(0), rows.std(0, correction=0)
    scale[2] = 1.0
    return CueDomain("by hand", lambda cue_BT: ((raw(cue_BT).double() - mean) / scale).float())


def config(domain: Any = None, method: str = "uat", seed: int = 0, **changes: Any) -> uat.RunConfig:
    settings = TINY | {name.replace("__", "."): value for name, value in changes.items()}
    return compose(CueDomain() if domain is None else domain, method, "smoke", seed=seed, settings=settings)


def losses(run: uat.Run) -> list[float]:
    return [row["loss/imitation"] for row in run.rows("metrics.jsonl")]


def statistics(run: uat.Run) -> dict[str, Tensor]:
    return {name: x for name, x in saved_weights(run).items() if ".normalizer." in name}


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("method", ["uat", "adt", "gtrxl"])
def test_raw_columns_train_like_columns_standardised_by_hand(method: str, tmp_path: Path) -> None:
    by_setting = train(config(method=method, train__standardise=True), tmp_path / "setting", device="cpu")
    hand = train(config(by_hand(0), method), tmp_path / "hand", device="cpu")
    plain = train(config(method=method), tmp_path / "plain", device="cpu")
    found, expected, unlike = (
        [{n: v for n, v in row.items() if n.startswith("loss/")} for row in run.rows("metrics.jsonl")]
        for run in (by_setting, hand, plain)
    )
    assert len(found) >= 6
    for mine, theirs, other in zip(found, expected, unlike, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
        assert other != pytest.approx(theirs, abs=1e-3)


def test_a_policy_and_its_session_take_raw_observations(tmp_path: Path) -> None:
    run = train(config(train__standardise=True), tmp_path / "run", device="cpu")
    hand = train(config(by_hand(0)), tmp_path / "hand", device="cpu")
    assert statistics(run).keys() == {"backbone.encoder.normalizer.mean", "backbone.encoder.normalizer.scale"}
    own, other = uat.load(run.path), uat.load(hand.path)
    cue_BT = uniform(5, "test", torch.arange(4), HORIZON).float() * 2 - 1
    change = by_hand(0).change
    mine, theirs = Session(own, streams=4), Session(other, streams=4)
    reward = None
    for t in range(HORIZON):
        answers = mine.act(raw(cue_BT[:, t]), reward=reward), theirs.act(change(cue_BT[:, t]), reward=reward)
        assert torch.equal(*answers)
        reward = torch.ones(4)
    assert (mine.engine, theirs.engine) == ("plain", "NumPy step")
    assert mine.refused is not None
    assert "normalizer" in mine.refused
    assert {score.metric for score in uat.evaluate(run, episodes=8).scores} == {"return"}


def test_engines_refuse_what_they_would_compute_wrongly(tmp_path: Path) -> None:
    """The kernels read weights without modules; on a GPU the plain engine is taken, with this reason."""
    policy = uat.load(train(config(train__standardise=True, train__epochs=1), tmp_path / "run", device="cpu").path)
    for engine in (plan(policy), plan_session(policy, 1, prefer="fast")):
        assert engine.name == "plain"
        assert engine.refused is not None
        assert "encoder.normalizer" in engine.refused


@pytest.mark.parametrize("method", ["tent", "cotta"])
def test_adapting_methods_share_the_statistics_of_their_source(method: str, tmp_path: Path) -> None:
    settings = {"train__standardise": True, "train__epochs": 3}
    source = train(config(method="vanilla", **settings), tmp_path / "source", device="cpu")
    adopted = train(config(method=method, **settings), tmp_path / "adopted", source=source, device="cpu")
    own = train(config(method=method, **settings), tmp_path / "own", device="cpu")
    for run in (adopted, own):
        assert all(torch.equal(x, saved_weights(source)[name]) for name, x in saved_weights(run).items())
    policy = uat.load(own.path)
    session = Session(policy, streams=2)
    session.act(raw(torch.tensor([0.5, -0.5])))
    with pytest.raises(RunError, match=r"train\.standardise is True, expected False"):
        train(config(method=method, train__epochs=3), tmp_path / "other", source=source, device="cpu")


def test_trainings_at_once_have_the_statistics_of_trainings_alone(tmp_path: Path) -> None:
    configs = [config(seed=seed, train__standardise=True) for seed in range(2)]
    alone = [train(c, tmp_path / f"alone{c.seed}", device="cpu") for c in configs]
    together = train_together(configs, [tmp_path / f"together{c.seed}" for c in configs], device="cpu")
    for one, other in zip(alone, together, strict=True):
        assert numbers(one.path) == numbers(other.path)
    means = [statistics(run)["backbone.encoder.normalizer.mean"] for run in alone]
    assert not torch.equal(*means)  # the episodes depend on the seed


# ---------------------------------------------------------------- resume


@pytest.mark.usefixtures("save_always")
def test_a_run_resumed_after_a_crash_has_the_same_bits(tmp_path: Path) -> None:
    """Crash before the first checkpoint, when the statistics are fitted again, and after it."""
    chosen = config(train__standardise=True)
    whole = numbers(train(chosen, tmp_path / "whole", device="cpu").path)
    for event in (1, 4, 6, 7, 10):
        folder = tmp_path / f"{event}"
        with pytest.MonkeyPatch.context() as patch:
            crash_at(event, patch)
            with pytest.raises(Crash):
                train(chosen, folder, device="cpu")
        train(chosen, folder, resume=True, device="cpu")
        assert numbers(folder) == whole, f"crash before write {event}"


@pytest.mark.usefixtures("save_always")
def test_a_resumed_run_restores_the_statistics_and_fits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = config(train__standardise=True)
    with monkeypatch.context() as patch:
        crash_at(8, patch)
        with pytest.raises(Crash):
            train(chosen, tmp_path, device="cpu")
    state = tmp_path / "state/train.safetensors"
    tensors, meta = read_tensors(state)
    monkeypatch.setattr(standardising, "episodes", lambda *_: pytest.fail("fitted again"))
    run = train(chosen, tmp_path, resume=True, device="cpu")
    for name, x in statistics(run).items():
        assert torch.equal(x, tensors[f"policy.{name}"])
    write_tensors(state, {name: x for name, x in tensors.items() if ".normalizer." not in name}, meta)
    with pytest.raises(RunError, match=r"statistics of train\.standardise=True are missing"):
        train(chosen, tmp_path, resume=True, device="cpu")


# ---------------------------------------------------------------- which episodes


class Steered(Cues):
    """Observes the previous action, so that the statistics show how the episodes were played."""

    def step(self, world: tuple[Tensor, int], action: Tensor) -> Transition[tuple[Tensor, int]]:
        after = super().step(world, action)
        after.obs[:, 2] = action.float()
        return after

    def expert(self, world: tuple[Tensor, int]) -> Tensor:
        return torch.ones(len(world[0]), dtype=torch.long)


def test_simulators_are_played_with_uniformly_random_actions() -> None:
    chosen = config(train__standardise=True, train__batch_size=100)
    batches = standardising.episodes(Steered(raw), chosen, CPU)
    assert [len(batch.obs) for batch in batches] == [100, 100, 56]
    action = torch.cat([batch.action for batch in batches])
    assert action.double().mean().item() == pytest.approx(0.5, abs=0.05)
    again = torch.cat([batch.action for batch in standardising.episodes(Steered(raw), chosen, CPU)])
    other = torch.cat(
        [b.action for b in standardising.episodes(Steered(raw), config(seed=1, train__batch_size=100), CPU)]
    )
    assert torch.equal(action, again)
    assert not torch.equal(action, other)


class NoExpert(Cues):
    def __init__(self, action: Any) -> None:
        super().__init__(raw)
        self.spec = Spec(obs=Vector(3), action=action, horizon=HORIZON)

    def expert(self, world: tuple[Tensor, int]) -> None:
        return None

    def step(self, world: tuple[Tensor, int], action: Tensor) -> Transition[tuple[Tensor, int]]:
        cue_BT, t = world
        paid_B = action.reshape(len(action), -1)[:, 0].float()
        return Transition((cue_BT, t + 1), raw(cue_BT[:, t + 1]), paid_B, torch.zeros_like(paid_B, dtype=torch.bool))


@pytest.mark.parametrize("action", [Discrete(4), Weights(4), Box(low=(-2.0,), high=(6.0,))], ids=str)
def test_wholly_random_behaviour_needs_no_expert(action: Any) -> None:
    worlds = NoExpert(action)
    drawn = action_noise(worlds.spec, 3, "test", torch.arange(200), HORIZON)
    played = rollout(Behaviour(random_share=1.0), worlds, worlds.noise(torch.arange(200), 3), drawn)
    assert played.target is None
    first = played.action.double().reshape(200, HORIZON, -1)[..., 0]
    mean, least, most = {Discrete: (1.5, 0, 3), Weights: (0.25, 0.25, 0.25), Box: (2.0, -2, 6)}[type(action)]
    assert first.mean().item() == pytest.approx(mean, abs=0.2)
    assert first.min().item() == pytest.approx(least, abs=0.1)
    assert first.max().item() == pytest.approx(most, abs=0.1)
    with pytest.raises(ValueError, match="NoExpert has no expert"):
        rollout(Behaviour(random_share=0.9), worlds, worlds.noise(torch.arange(2), 3), drawn)


class Logged(Recording):
    """Recorded episodes, the i-th of which observes i everywhere."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    def noise(self, episode_ids: Tensor, seed: int) -> dict[str, Tensor]:
        return {"id": episode_ids}

    def trajectory(self, noise: dict[str, Tensor]) -> Trajectory:
        told = random_trajectory(self.spec, episodes=len(noise["id"]), masked=False, whole=True)
        told.obs[:] = noise["id"].view(-1, *[1] * (told.obs.dim() - 1)).float()
        return told

    def judged(self, trajectory: Trajectory, noise: dict[str, Tensor], answers: Any) -> Trajectory:
        raise NotImplementedError


def test_recorded_episodes_are_taken_as_they_are() -> None:
    batches = standardising.episodes(Logged(Spec(obs=Vector(2), action=Discrete(2), horizon=4)), config(), CPU)
    assert torch.cat([batch.obs[:, 0, 0] for batch in batches]).tolist() == list(range(256))


def test_long_episodes_with_many_numbers_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standardising, "MOST_NUMBERS", 4 * HORIZON * 3)
    assert sum(len(batch.obs) for batch in standardising.episodes(Cues(raw), config(), CPU)) == 4
    monkeypatch.setattr(standardising, "MOST_NUMBERS", 1)
    assert sum(len(batch.obs) for batch in standardising.episodes(Cues(raw), config(), CPU)) == 1


# ---------------------------------------------------------------- refusals and identities


def test_methods_without_numbers_to_standardise_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for domain, method, name in (("movielens", "uat", "UAT"), ("markets", "deeptrader", "DeepTrader")):
        what = [domain, "--method", method, "--preset", "smoke", "--train.standardise", "--device", "cpu"]
        with pytest.raises(SystemExit) as stopped:
            main(["train", *what, "--out", "run"])
        said = capsys.readouterr()
        assert (stopped.value.code, said.out, said.err.count("\n")) == (2, "", 1)
        assert f"train.standardise=True is not possible: {name} has no numbers to standardise" in said.err
        assert not Path("run").exists()


def test_observations_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    broken = CueDomain("broken", lambda cue_BT: raw(cue_BT) / 0)
    with pytest.raises(ValueError, match="observations of object:CueDomain are not finite"):
        train(config(broken, train__standardise=True), tmp_path / "run", device="cpu")


def test_the_default_keeps_identities_and_the_setting_changes_them() -> None:
    plain = recipe("darkroom", "uat", "smoke")
    assert uat.override(plain, {"train.standardise": False}).identity() == plain.identity()
    assert uat.override(plain, {"train.standardise": True}).identity() != plain.identity()


# ---------------------------------------------------------------- several processes


RANK = """
import sys, torch
from tests.training.test_standardising import config
from uat.training import train, trainer
fit = trainer.standardise
def uneven(policy, worlds, config, device, ranks):
    fit(policy, worlds, uat_config(config, ranks.rank), device, ranks)
def uat_config(config, rank):
    import dataclasses
    return dataclasses.replace(config, seed=config.seed + rank)
trainer.standardise = uneven
train(config(train__standardise=True, method__dropout=0.0), sys.argv[1], device="cpu")
"""


@pytest.mark.slow
def test_every_process_has_the_statistics_of_the_first(tmp_path: Path) -> None:
    """The processes are made to fit other episodes each; the losses are still those of a single process."""
    (tmp_path / "rank.py").write_text(RANK)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    here = Path(__file__).parents[2]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{here}:{Path(uat.__file__).parents[1]}"}
    what = [str(tmp_path / "rank.py"), str(tmp_path / "two")]
    done = subprocess.run([*launch, *what], capture_output=True, text=True, env=surroundings, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    one = train(config(train__standardise=True, method__dropout=0.0), tmp_path / "one", device="cpu")
    two = saved_weights(uat.Run(tmp_path / "two", one.config))
    for name, x in statistics(one).items():
        assert torch.equal(two[name], x)
    rows = uat.Run(tmp_path / "two", one.config).rows("metrics.jsonl")
    assert [row["loss/imitation"] for row in rows] == pytest.approx(losses(one), abs=1e-5)
