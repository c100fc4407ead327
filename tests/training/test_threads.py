"""Training, evaluation and sessions use one CPU thread by default; a setting or UAT_THREADS overrides this, and a run
records the number."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import uat
from tests.training.small_runs import TINY, Crash, crash_at, numbers, tiny
from uat.cli import main
from uat.engines.rollout import RolloutRunner
from uat.executors import run_job
from uat.methods.policy import Policy
from uat.paper.demo import demo
from uat.paper.mechanism import kinetics_of
from uat.paper.next_item import NextItemConfig, Sequences, learn
from uat.paper.studies import efficiency
from uat.paper.studies.cells import Cell
from uat.paper.studies.work import Reference, task_rows
from uat.runs import Run
from uat.tensor_files import read_tensors
from uat.threads import MOST, VARIABLE, ThreadsWarning, cpu_threads, thread_count
from uat.training.checkpoint import STATE

pytestmark = pytest.mark.usefixtures("without_tensorboard", "save_always")

STEP = {"obs": torch.zeros(9, 10), "reward": torch.zeros(9)}
"""A step of nine streams, one more than the fast step accepts."""


@pytest.fixture(autouse=True)
def two_threads_outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set two threads, as torch does by default on a machine with two cores."""
    monkeypatch.delenv(VARIABLE, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2, "the number was not put back"
    torch.set_num_threads(before)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of threads whenever a policy's network runs or episodes are played."""
    found: list[int] = []
    for kind, name in ((Policy, "loss"), (RolloutRunner, "play"), (uat.UAT, "step"), (uat.Vanilla, "step")):
        whole = getattr(kind, name)

        def looking(*args: Any, whole: Callable[..., Any] = whole, **named: Any) -> Any:
            found.append(torch.get_num_threads())
            return whole(*args, **named)

        monkeypatch.setattr(kind, name, looking)
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return uat.train(tiny(), tmp_path_factory.mktemp("trained") / "run", device="cpu")


# ---------------------------------------------------------------- the number


def test_it_is_one_unless_a_setting_or_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (thread_count(), thread_count(3)) == (1, 3)
    monkeypatch.setenv(VARIABLE, "4")
    assert (thread_count(), thread_count(3)) == (4, 3)
    with cpu_threads(2):
        assert (thread_count(), thread_count(3)) == (2, 3)
        with cpu_threads(), cpu_threads(5):
            assert (thread_count(), torch.get_num_threads()) == (5, 5)
        assert torch.get_num_threads() == 2
    assert thread_count() == 4


@pytest.mark.parametrize("said", ["abc", "0", "-1", "1.5", "", "²", str(MOST + 1), " 2"])
def test_an_environment_that_is_no_number_is_one_sentence(
    said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, said)
    with pytest.raises(ValueError, match=f"^{VARIABLE}="):
        thread_count()
    with pytest.raises(SystemExit) as stop:
        main(["list"])
    assert stop.value.code == 2
    assert capsys.readouterr() == ("", f"uat: {VARIABLE}={said!r} must be a whole number from 1 to {MOST}\n")


@pytest.mark.parametrize("asked", [0, True, 1.5, "two", MOST + 1])
def test_a_setting_that_is_no_number_is_refused_before_anything_is_done(
    asked: Any, trained: Run, tmp_path: Path
) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: uat.train(tiny(), tmp_path / "run", threads=asked),
        lambda: uat.train_together([tiny()], [tmp_path / "run"], threads=asked),
        lambda: uat.evaluate(trained, threads=asked),
        lambda: uat.audit(uat.load(trained.path), threads=asked),
        lambda: uat.Session(uat.load(trained.path), threads=asked),
        lambda: demo(tmp_path / "demo", threads=asked),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"^threads=.* must be a whole number from 1 to"):
            call()
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- who keeps to it


def session(trained: Run, threads: int | None) -> None:
    live = uat.Session(uat.load(trained.path), streams=9, path="cached", threads=threads)
    live.act(**STEP)


EVERYTHING: dict[str, Callable[[Run, Path, int | None], Any]] = {
    "train": lambda run, out, n: uat.train(tiny(), out / "a", device="cpu", threads=n),
    "train_together": lambda run, out, n: uat.train_together([tiny()], [out / "a"], device="cpu", threads=n),
    "evaluate": lambda run, out, n: uat.evaluate(run, episodes=4, device="cpu", threads=n),
    "audit": lambda run, out, n: uat.audit(uat.load(run.path), episodes=4, threads=n),
    "session": lambda run, out, n: session(run, n),
    "job of a grid": lambda run, out, n: run_job(
        Reference(cell=Cell(config=tiny(), task="gradual")), partial(task_rows, runs=out), out / "note", "cpu", n
    ),
}


@pytest.mark.parametrize("what", EVERYTHING)
@pytest.mark.parametrize(("asked", "environment", "expected"), [(None, None, 1), (None, "3", 3), (4, "3", 4)])
def test_everything_that_computes_keeps_to_the_number(
    what: str,
    asked: int | None,
    environment: str | None,
    expected: int,
    trained: Run,
    counted: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if environment is not None:
        monkeypatch.setenv(VARIABLE, environment)
    EVERYTHING[what](trained, tmp_path, asked)
    assert set(counted) == {expected}


def test_what_has_no_setting_keeps_to_the_number_around_it(counted: list[int], tmp_path: Path) -> None:
    run = uat.train(uat.recipe("sepsis", "vanilla", "smoke"), tmp_path / "run", device="cpu")
    found = NextItemConfig(epochs=1, length=4, batch_size=4)
    when_N = np.arange(60)
    items = Sequences.of(when_N // 10, when_N % 10, when_N)
    for expected in (1, 3):
        counted.clear()
        with cpu_threads(expected) if expected > 1 else warnings.catch_warnings():
            kinetics_of(run, episodes=4, device="cpu")
            efficiency.measure("vanilla", "smoke", "cpu")
            list(learn("sasrec", {"d_model": 8, "num_heads": 1}, items, found, torch.device("cpu")))
        assert set(counted) == {expected}


@pytest.mark.parametrize("flags", [[], ["--threads", "3"]], ids=str)
def test_commands_keep_to_the_number(flags: list[str], trained: Run, counted: list[int], tmp_path: Path) -> None:
    main(["evaluate", str(trained.path), "--episodes", "4", *flags])
    main(["audit", str(trained.path), "--episodes", "4", *flags])
    main(["train", "darkroom", "--preset", "smoke", "--train.epochs", "2", "--out", str(tmp_path / "run"), *flags])
    assert set(counted) == {3 if flags else 1}


# ---------------------------------------------------------------- a run records it


def test_a_run_records_the_number_and_is_the_same_run_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run continues and warns that the last bits may differ; with the same number there is no warning."""
    whole = uat.train(tiny(), tmp_path / "whole", device="cpu")
    assert json.loads(whole.file("manifest.json").read_text())["threads"] == 1
    assert read_tensors(whole.file(STATE))[1]["threads"] == 1
    folder = tmp_path / "crashed"
    with monkeypatch.context() as patch:
        crash_at(8, patch)
        with pytest.raises(Crash):
            uat.train(tiny(), folder, device="cpu")
    assert not read_tensors(folder / STATE)[1]["finished"]
    with pytest.warns(ThreadsWarning, match=r"crashed was trained with 1 CPU thread so far and goes on with 3"):
        uat.train(tiny(), folder, resume=True, device="cpu", threads=3)
    assert read_tensors(folder / STATE)[1]["threads"] == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        uat.train(tiny(), folder, resume=True, device="cpu")  # it is finished: no number will change
        uat.train(tiny(), tmp_path / "again", device="cpu")
    assert numbers(tmp_path / "again") == numbers(whole.path)


def test_the_command_line_says_it_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    command = ["train", "darkroom", "--preset", "smoke", "--device", "cpu", *sizes, "--out", str(tmp_path)]
    with monkeypatch.context() as patch:
        crash_at(8, patch)
        with pytest.raises(Crash):
            main(command)
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        main([*command, "--resume", "--threads", "2"])
    said = [line for line in capsys.readouterr().err.splitlines() if "CPU thread" in line]
    assert [line.split(" was trained")[0] for line in said] == [f"uat: warning: {tmp_path}"]
