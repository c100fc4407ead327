"""Sweeps: the same trials again, whatever interrupted them, and a sentence for every mistake."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import uat
from tests.test_cli import call, refused
from tests.test_contracts import Bandit
from tests.training.small_runs import TINY, Crash, judged, tiny
from uat.config import override, run_config_from_json
from uat.domains.darkroom import DarkRoom
from uat.executors import Outcome
from uat.recipes import recipe
from uat.training.progress import show_board
from uat.tuning import Sweep, tune
from uat.tuning.study import Study
from uat.tuning.sweep import command_of
from uat.tuning.trials import Trial

SPACE = ["train.lr=1e-4..1e-1:log", "method.d_model=8,16"]
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
COMMAND = ["tune", "darkroom", "--preset", "smoke", "--device", "cpu", *FLAGS, "--space", *SPACE]
Answer = Callable[[Trial], float | None]


def small(folder: Path, **changes: Any) -> Sweep:
    """A sweep over three tiny trainings."""
    return tune(tiny(), folder, **{"space": SPACE, "trials": 3, "device": "cpu", **changes})


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], list[int]]:
    """Let a function of the trial stand for its training; None: stopped early. The list gets each trial's number."""

    def install(answer: Answer) -> list[int]:
        begun: list[int] = []

        def train_trial(trial: Trial, *_: Any, **__: Any) -> list[dict[str, Any]]:
            begun.append(trial.number)
            value = answer(trial)
            return [{}] if value is None else [{"epoch": 2, "value": value}]

        monkeypatch.setattr("uat.tuning.start.train_trial", train_trial)
        return begun

    return install


def peak(trial: Trial) -> float:
    """A value with its maximum at a learning rate of 0.01 and a width of 16."""
    return -abs(math.log10(trial.settings["train.lr"]) + 2) + 0.1 * (trial.settings["method.d_model"] == 16)


def numbers(sweep: Sweep) -> list[tuple[Any, ...]]:
    return [(t.number, t.state, t.settings, t.value, t.epoch) for t in sweep.trials]


# ---------------------------------------------------------------- trainings


def test_a_sweep_trains_run_folders_on_validation_episodes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    splits, simulator = set(), DarkRoom.simulator

    def noted(self: DarkRoom, split: Any, device: Any) -> Any:
        splits.add(split)
        return simulator(self, split, device)

    monkeypatch.setattr(DarkRoom, "simulator", noted)
    folder = tmp_path / "a?b {x} #%41"
    code, out, err = call(capsys, *COMMAND, "--trials", "2", "--out", str(folder), "--json")
    assert code == 0
    assert "[2/2" in err
    assert "A new study" not in err
    assert splits == {"train", "validation"}
    rows = json.loads(out)
    assert [row["value"] for row in rows] == sorted((row["value"] for row in rows), reverse=True)
    for row in rows:
        run = uat.Run.open(row["run"])
        best = max(one["validation/accuracy"] for one in run.rows("metrics.jsonl") if "validation/accuracy" in one)
        assert (row["state"], row["metric"], row["value"], row["failure"]) == ("done", "accuracy", best, None)
        assert run.config == override(tiny(), row["settings"])
        dry = call(capsys, *shlex.split(row["command"])[1:], "--dry-run")[1]
        assert run_config_from_json(json.loads(dry)) == run.config

    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.name != ".lock"}
    code, out, err = call(capsys, *COMMAND, "--trials", "1", "--out", str(folder))
    assert (code, err) == (0, "")
    assert out.splitlines()[0].split()[:2] == ["trial", "state"]
    assert "2 trials: 2 done" in out
    assert rows[0]["command"] in out
    assert {file: file.stat().st_mtime_ns for file in before} == before


def test_a_trial_that_diverges_fails_and_the_others_go_on(tmp_path: Path) -> None:
    sweep = small(tmp_path, space={"train.lr": [1e-3, 1e12]}, trials=4)
    assert {t.state for t in sweep.trials} == {"done", "failed"}
    for trial in sweep.trials:
        assert (trial.state == "failed") == (trial.settings["train.lr"] == 1e12)
        assert (trial.failure or "DivergedError: the loss is not finite").startswith("DivergedError")
    assert sweep.best.settings == {"train.lr": 1e-3}
    assert len(list((tmp_path / "failures").iterdir())) == sum(t.state == "failed" for t in sweep.trials)


def test_hopeless_trials_are_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five trials run to their end; the sixth is below their median after its first validation, the seventh above."""
    judged(monkeypatch, *[0.5, 0.6] * 5, 0.1, 0.7, 0.2)
    sweep = tune(tiny(train__epochs=2, train__validate_every=1), tmp_path, space=SPACE, trials=7, prune=True)
    assert [t.state for t in sweep.trials] == ["done"] * 5 + ["pruned", "done"]
    assert (sweep.trials[5].value, sweep.best.number, sweep.best.value) == (0.1, 6, 0.7)


# ---------------------------------------------------------------- the same trials again


def test_an_interrupted_sweep_gives_the_trials_of_an_undisturbed_one(
    tmp_path: Path, answered: Callable[[Answer], list[int]]
) -> None:
    answered(peak)
    undisturbed = small(tmp_path / "a", trials=12)
    assert sum(undisturbed.importance.values()) == pytest.approx(1)
    assert "importance: " in str(undisturbed)
    assert undisturbed.best.value == max(t.value for t in undisturbed.trials if t.value is not None)

    def stopped(trial: Trial) -> float:
        if trial.number == 10:
            raise Crash
        return peak(trial)

    answered(stopped)
    with pytest.raises(Crash):
        small(tmp_path / "b", trials=12)
    with Study.opened(tmp_path / "b" / "study.db") as study:
        assert [record.state for record in study.records()] == ["done"] * 10 + ["interrupted"]
    begun = answered(peak)
    assert numbers(small(tmp_path / "b", trials=12)) == numbers(undisturbed)
    assert begun == [10, 11]


def test_another_seed_suggests_other_trials_and_the_metric_has_a_direction(
    tmp_path: Path, answered: Callable[[Answer], list[int]]
) -> None:
    answered(peak)
    one, other = (tune(tiny(seed=seed), tmp_path / str(seed), space=SPACE, trials=2) for seed in (0, 1))
    assert [t.settings for t in one.trials] != [t.settings for t in other.trials]
    turned = replace(one, metric=replace(one.metric, higher_is_better=False))
    assert {one.best.number, turned.best.number} == {0, 1}


def test_a_crash_before_the_first_trial_leaves_a_folder_that_resumes(
    tmp_path: Path, answered: Callable[[Answer], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    answered(peak)

    def crash(*_: Any) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr("uat.tuning.study.os.replace", crash)
        with pytest.raises(Crash):
            small(tmp_path)
    assert not (tmp_path / "study.db").exists()
    assert len(small(tmp_path).trials) == 3


def test_settings_that_were_tried_are_not_trained_again(
    tmp_path: Path, answered: Callable[[Answer], list[int]]
) -> None:
    begun = answered(lambda trial: float(trial.settings["method.d_model"]))
    sweep = small(tmp_path, space=["method.d_model=8,16"], trials=4)
    assert len(begun) == 2
    assert [t.value for t in sweep.trials] == [float(t.settings["method.d_model"]) for t in sweep.trials]
    assert {sweep.folder(t).name for t in sweep.trials} == {f"{number:03d}" for number in begun}


def test_a_killed_worker_leaves_its_trial_for_the_next_call(
    tmp_path: Path, answered: Callable[[Answer], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Deadly:
        workers = 1

        def outcomes(self, jobs: Any, *_: Any) -> Iterator[tuple[int, Outcome]]:
            for index, job in enumerate(jobs):
                gone = {"failure": "its worker was killed", "died": True} if job.number == 1 else {}
                yield index, Outcome(name=job.name, rows=[{"epoch": 2, "value": 0.5}], seconds=0.0, **gone)

    with monkeypatch.context() as patch:
        patch.setattr("uat.tuning.start.executor_for", lambda *_, **__: Deadly())
        assert [t.state for t in small(tmp_path).trials] == ["done", "interrupted", "done"]
    begun = answered(peak)
    assert [t.state for t in small(tmp_path).trials] == ["done", "done", "done"]
    assert begun == [1]


def test_a_sweep_without_a_finished_trial_says_why(tmp_path: Path, answered: Callable[[Answer], list[int]]) -> None:
    answered(lambda trial: math.nan if trial.number else None)
    sweep = small(tmp_path)
    assert "3 trials: 2 failed, 1 pruned" in str(sweep)
    with pytest.raises(ValueError, match=r"no trial of .* has finished: validation accuracy is undefined"):
        _ = sweep.best


def test_optuna_is_silent_inside_and_as_before_outside(
    tmp_path: Path, answered: Callable[[Answer], list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    import optuna

    answered(peak)
    before = optuna.logging.get_verbosity()
    small(tmp_path, progress=show_board)
    assert optuna.logging.get_verbosity() == before
    assert all(line.startswith("[") and "done trial" in line for line in capsys.readouterr().err.splitlines())


# ---------------------------------------------------------------- commands


def test_every_kind_of_setting_survives_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"method.context": 3, "method.use_action": False, "domain.shift_steps": (2, 4), "train.lr": 1 / 3}
    changes |= {"train.lr_schedule": "cosine", "train.random_start": True, "seed": 5}
    for objective in ("imitation", "ppo"):
        config = override(recipe("darkroom", "uat", "smoke", objective=objective), changes)
        words = shlex.split(command_of(config))
        found = json.loads(call(capsys, *words[1:], "--dry-run")[1])
        assert run_config_from_json(found) == config
    config = override(recipe("darkroom", "uat", "smoke", objective="ppo"), {"objective.target_kl": None})
    found = json.loads(call(capsys, *shlex.split(command_of(config))[1:], "--dry-run")[1])
    assert run_config_from_json(found) == config


def test_an_object_is_tuned_in_this_process_alone(tmp_path: Path, answered: Callable[[Answer], list[int]]) -> None:
    class Own(Bandit):
        """A domain that no other process can import."""

    answered(lambda trial: trial.settings["train.lr"])
    about: dict[str, Any] = {"space": ["train.lr=1e-3,1e-2"], "preset": "smoke", "objective": "ppo"}
    sweep = tune(Own(), tmp_path / "a", trials=2, **about)
    assert sweep.command.startswith("uat.train(domain, method='uat', preset='smoke', seed=0, objective='ppo'")
    with pytest.raises(ValueError, match="is an object of this process, which workers cannot make"):
        tune(Own(), tmp_path / "b", workers=2, **about)
    assert not (tmp_path / "b").exists()


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--space train.lrr=1..2", "unknown setting 'train.lrr'; did you mean 'train.lr'?"),
        ("--space train.lr=3..1", "the range must begin below its end"),
        ("--trials 0", "trials=0 must be at least 1"),
        ("--workers 0", "workers=0 must be at least 1"),
        ("--workers 2 --address x", "address='x' is for --executor ray"),
        ("--executor rya", "'ray'"),
        ("--method uta", "unknown method 'uta'; did you mean 'uat'?"),
        ("--train.lrr 1", "did you mean --train.lr?"),
        ("--device gpu", "'gpu'"),
        ("--threads 0", "threads=0"),
    ],
)
def test_a_mistake_gets_one_sentence_and_makes_nothing(
    flags: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in refused(capsys, "tune", "darkroom", "--preset", "smoke", *flags.split())
    assert list(tmp_path.iterdir()) == []


def test_a_domain_is_asked_for_by_this_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "name a domain first: uat tune DOMAIN" in refused(capsys, "tune")


def test_the_folder_of_another_sweep_is_refused(tmp_path: Path, answered: Callable[[Answer], list[int]]) -> None:
    answered(peak)
    small(tmp_path, trials=1)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"space": ["train.lr=1e-4..2e-1:log"]}, "its space.train.lr is 0.0001..0.1:log, expected 0.0001..0.2:log"),
        ({"prune": True}, "its prune is False, expected True"),
        ({"config": tiny(train__clip=0.5)}, "its config.train.clip is 1.0, expected 0.5"),
        ({"config": tiny(seed=3)}, "its config.seed is 0, expected 3"),
    ]
    for changes, said in wrong:
        about = {"config": tiny(), "space": SPACE, **changes}
        with pytest.raises(ValueError, match="holds another sweep") as caught:
            tune(about.pop("config"), tmp_path, trials=1, **about)
        assert said in str(caught.value)


def test_other_folders_and_damaged_files_are_refused(tmp_path: Path, answered: Callable[[Answer], list[int]]) -> None:
    answered(peak)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file"):
        small(tmp_path / "file")
    with pytest.raises(ValueError, match="holds other files"):
        small(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    small(tmp_path / "sweep", trials=1)
    (tmp_path / "sweep" / "study.db").write_bytes(b"no database" * 100)
    with pytest.raises(ValueError, match=r"study\.db is not the study of a sweep"):
        small(tmp_path / "sweep")


def test_without_optuna_a_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "optuna" else find(name))
    with pytest.raises(ValueError, match=r"pip install 'uat-transformer\[tune\]'"):
        small(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_pruning_is_refused_on_a_cluster_of_several_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uat.executors.kinds.need_ray", lambda: None)
    with pytest.raises(ValueError, match="the machines of a cluster cannot share"):
        small(tmp_path / "a", prune=True, executor="ray", address="auto")


# ---------------------------------------------------------------- processes


@pytest.mark.slow
@pytest.mark.parametrize("prune", [False, True])
def test_two_workers_give_the_trials_of_one(prune: bool, tmp_path: Path) -> None:
    """The first suggestions are random, so that they do not depend on the order in which trials end."""
    one, two = (small(tmp_path / str(w), trials=4, workers=w, prune=prune) for w in (1, 2))
    assert numbers(two) == numbers(one)


@pytest.mark.slow
def test_a_sweep_whose_processes_are_killed_resumes_to_the_same_trials(tmp_path: Path) -> None:
    """SIGKILL to the command and its workers, while two trials are trained."""
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "uat", *COMMAND, "--train.epochs", "60", "--trials", "5", "--out", str(out)]
    command += ["--workers", "2", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(uat.__file__).parents[1]), "UAT_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not (out / "trials" / "003" / "metrics.jsonl").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with Study.opened(out / "study.db") as study:
        states = [record.state for record in study.records()]
    assert "interrupted" in states
    assert "done" in states
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    rows = {row["trial"]: row for row in json.loads(done.stdout)}
    straight = tune(tiny(train__epochs=60), tmp_path / "straight", space=SPACE, trials=5, device="cpu")
    assert [(rows[n]["settings"], rows[n]["value"]) for n in range(5)] == [
        (t.settings, t.value) for t in straight.trials
    ]
