"""Workers fail without affecting others and end with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import uat
from tests.executors.small_jobs import answer, begin
from uat.executors import workers
from uat.executors.workers import WorkerDied, run_jobs

SECONDS = 60
"""Timeout, longer than any of these tests should take."""


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_killed_worker_fails_its_own_job_alone(tmp_path: Path) -> None:
    found = dict(run_jobs(["a", "die", "b"], answer, 1, lambda: None, 0.1, partial(begin, folder=tmp_path)))
    assert (found[0], found[2]) == ("a, done", "b, done")
    assert isinstance(found[1], WorkerDied)
    assert str(found[1]) == "exit code -9"
    assert len(list(tmp_path.iterdir())) == 2  # another took the place of the first


def test_an_interrupt_while_a_worker_is_started_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = workers._context.Process.start

    def interrupted(self: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        start(self)

    monkeypatch.setattr(workers._context.Process, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(run_jobs(["a"], answer, 1, lambda: None, 0.1, partial(begin, folder=tmp_path)))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT], ids=str)
def test_workers_end_with_their_parent(tmp_path: Path, sent: signal.Signals) -> None:
    """SIGINT goes to the whole group, as Ctrl-C on a terminal does; SIGKILL to the parent alone."""
    root = str(Path(__file__).parents[2])
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(uat.__file__).parents[1]), root])}
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.executors.small_jobs", str(tmp_path)],
        env=surroundings,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for("two workers", lambda: len(list(tmp_path.glob("*.worker"))) == 2)
        there = [int(file.stem) for file in tmp_path.glob("*.worker")]
        (os.killpg if sent == signal.SIGINT else os.kill)(parent.pid, sent)
        _, said = parent.communicate(timeout=SECONDS)
        wait_for("the end of the workers", lambda: not any(map(alive, there)))
    finally:
        parent.kill()
    if sent == signal.SIGINT:
        assert (parent.returncode, said) == (130, "stopped\n")
    else:
        assert parent.returncode == -sent
