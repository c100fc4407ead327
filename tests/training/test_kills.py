"""A run resumed after any kill, crash or half-written line has the numbers of an uninterrupted run."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.small_runs import (
    Crash,
    crash_at,
    everything,
    judged,
    numbers,
    tiny,
)
from uat.config import RunConfig, to_json
from uat.methods.uat import UAT
from uat.runs import Run
from uat.tensor_files import read_tensors
from uat.training import train
from uat.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("save_always")  # so that a kill can come after any checkpoint


CHILD = """
import json, sys, torch
torch.set_num_threads(1)
sys.modules["tensorboard"] = None  # as if it were not installed: it takes long to import
import uat
from uat.config import run_config_from_json
uat.train(run_config_from_json(json.loads(sys.argv[1])), sys.argv[2], resume=True, device="cpu")
"""


def start(config: RunConfig, folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", CHILD, json.dumps(to_json(config)), str(folder)])


def kill_when(config: RunConfig, folder: Path, ready: Callable[[], bool]) -> None:
    """Train in a separate process until `ready`, then kill -9."""
    child = start(config, folder)
    try:
        deadline = time.monotonic() + 60
        while child.poll() is None and not ready() and time.monotonic() < deadline:
            time.sleep(0.002)
    finally:
        child.kill()
    assert child.wait() == -9, "training ended before it could be killed"


def test_a_run_killed_in_the_middle_and_resumed_equals_one_never_killed(tmp_path: Path) -> None:
    config, folder = tiny(train__epochs=60, train__validate_every=3, train__patience=1000), tmp_path / "killed"
    metrics = folder / "metrics.jsonl"
    kill_when(config, folder, lambda: metrics.exists() and metrics.stat().st_size > 0)
    done = read_tensors(folder / "state/train.safetensors")[1]["total"] if (folder / "state").exists() else 0
    assert done < 60
    child = start(config, folder)
    assert child.wait() == 0
    assert numbers(folder) == numbers(train(config, tmp_path / "whole", device="cpu").path)


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    config, folder = tiny(train__epochs=60, train__validate_every=60), tmp_path / "killed"
    kill_when(config, folder, lambda: (folder / "metrics.jsonl").exists())
    assert not (folder / "state").exists()
    train(config, folder, resume=True, device="cpu")
    assert numbers(folder) == numbers(train(config, tmp_path / "whole", device="cpu").path)


@pytest.mark.usefixtures("without_tensorboard")
def test_a_crash_before_any_one_write_changes_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Crash once in each gap between two files, including the one between policy and state."""
    whole = numbers(train(tiny(), tmp_path / "whole", device="cpu").path)
    crashes = 0
    for event in itertools.count():
        folder = tmp_path / f"{event}"
        with monkeypatch.context() as patch:
            crash_at(event, patch)
            try:
                train(tiny(), folder, device="cpu")
                break
            except Crash:
                crashes += 1
        train(tiny(), folder, resume=True, device="cpu")
        assert numbers(folder) == whole, f"crash before write {event}"
    assert crashes >= 10


@pytest.mark.usefixtures("without_tensorboard")
def test_a_kill_in_the_middle_of_a_line_is_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = numbers(train(tiny(), tmp_path / "whole", device="cpu").path)
    run = Run.create(tiny(), tmp_path / "cut")
    append = Run.append

    def cut_short(self: Run, name: str, rows: list[dict[str, Any]]) -> None:
        append(self, name, rows)
        if rows[-1]["epoch"] == 4:
            text = self.file(name).read_text()
            self.file(name).write_text(text[:-20])
            raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(Run, "append", cut_short)
        with pytest.raises(Crash):
            train(tiny(), run.path, resume=True, device="cpu")
    assert not run.file("metrics.jsonl").read_text().endswith("\n")
    train(tiny(), run.path, resume=True, device="cpu")
    assert numbers(run.path) == whole


@pytest.mark.usefixtures("without_tensorboard")
def test_a_policy_of_a_later_checkpoint_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill between the writes of policy and state, the resumed run still ends with a matching pair."""
    judged(monkeypatch, 0.1, 0.2)
    folder = train(tiny(), tmp_path / "run", device="cpu").path
    judged(monkeypatch, 0.1, 0.2, 0.3)
    later = train(tiny(train__epochs=6), tmp_path / "later", device="cpu").path
    whole = numbers(folder)
    shutil.copy(later / "policy.safetensors", folder / "policy.safetensors")
    assert numbers(folder) != whole
    train(tiny(), folder, resume=True, device="cpu")
    assert numbers(folder) == whole


def test_resuming_a_finished_run_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = train(tiny(), tmp_path, device="cpu").path
    before = everything(folder)
    monkeypatch.setattr(UAT, "loss", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(Trainer, "validate", lambda *_: pytest.fail("validated again"))
    train(tiny(), folder, resume=True, device="cpu")
    assert everything(folder) == before
