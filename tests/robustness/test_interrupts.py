"""Ctrl-C at any moment: one line, no traceback, exit code 130, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.robustness.kill import Campaign, survivors
from tests.robustness.processes import ROOT, Started, children, surroundings, wait_for, workers

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes in /proc")


def mapped(pid: int, library: str) -> bool:
    """Whether a process has loaded a library; False if there is no process."""
    try:
        return library in Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def stopped(said: str) -> bool:
    """Whether progress is followed by one line about the interruption, and by nothing else."""
    *before, last = said.splitlines()
    progress = all(": epoch " in line or line.startswith(("[", "  worker ")) for line in before)
    return last.startswith("uat: stopped") and progress


@pytest.mark.parametrize("library", ["libtorch_cpu", "_multiarray_umath"])
def test_while_the_command_line_is_imported(library: str, tmp_path: Path) -> None:
    """The training would take hours, so only the signal can end it, at any moment."""
    command = ["-m", "uat", "train", "darkroom", "--train.epochs", "100000", "--out", str(tmp_path / "run")]
    child = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=surroundings(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for("the import", lambda: mapped(child.pid, library) or child.poll() is not None)
        child.send_signal(signal.SIGINT)
        out, said = child.communicate()
    finally:
        child.kill()
    assert (child.returncode, out) == (130, "")
    assert said == "uat: stopped\n"


def test_in_a_training(tmp_path: Path) -> None:
    with Campaign(tmp_path, 0) as campaign:
        run = tmp_path / "run"
        process = campaign.start(campaign.train("uat", run, epochs=100000), fresh=False)
        wait_for("an epoch", lambda: (run / "metrics.jsonl").exists() or process.code is not None)
        process.send(signal.SIGINT)
        assert process.wait() == 130
    assert stopped(process.said), process.said
    assert "--resume" in process.said


@pytest.mark.parametrize("when", ["workers start", "workers train"])
def test_in_a_grid(when: str, tmp_path: Path) -> None:
    """As on a terminal, the signal goes to the workers as well."""
    with Campaign(tmp_path, 0) as campaign:
        folder = tmp_path / "grid"
        process = campaign.start(campaign.reproduce(folder, epochs=100000), fresh=False)
        is_ready = {
            "workers start": lambda: len(workers(process.pid)) == 2,
            "workers train": lambda: any(folder.rglob("metrics.jsonl")),
        }
        wait_for(when, lambda: is_ready[when]() or process.code is not None)
        others = children(process.pid)
        interrupt(process, list(others))
        assert process.wait() == 130
        wait_for("the end of the workers", lambda: not survivors(others))
    assert stopped(process.said), process.said


def interrupt(process: Started, others: list[int]) -> None:
    for pid in others:
        os.kill(pid, signal.SIGINT)
    process.send(signal.SIGINT)
