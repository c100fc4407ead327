"""Processes that a test starts and kills by their ids."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uat
from tests.robustness import killed

SECONDS = 240.0
"""Timeout, longer than any of these processes should take."""
ROOT = Path(killed.__file__).parents[2]


class Started:
    """A process that runs `killed.main` with these arguments and writes its two output streams to a file.

    fresh: a new interpreter, which imports everything first. Otherwise the process is forked from a server that has
    imported everything, so that most kills come in the middle of the work.
    """

    def __init__(self, arguments: Sequence[Any], log: Path, *, fresh: bool) -> None:
        self.log, words = log, [str(one) for one in arguments]
        self.process: Any
        if fresh:
            command = [sys.executable, "-m", "tests.robustness.killed", *words]
            with log.open("wb") as file:
                self.process = subprocess.Popen(command, cwd=ROOT, env=surroundings(), stdout=file, stderr=file)
            self.pid: int = self.process.pid
        else:
            self.process = _forks().Process(target=killed.main, args=(words, str(log)))
            self.process.start()
            self.pid = self.process.pid

    @property
    def code(self) -> int | None:
        """The exit code, minus the signal's number after a kill; None while the process runs."""
        return self.process.poll() if isinstance(self.process, subprocess.Popen) else self.process.exitcode

    def wait(self) -> int:
        """Wait for the process to end; return its exit code."""
        wait_for(f"the end of process {self.pid}", lambda: self.code is not None)
        assert self.code is not None
        return self.code

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self.code is None:
            os.kill(self.pid, number)

    def kill(self) -> bool:
        """Kill the process; return whether the kill ended it."""
        self.send(signal.SIGKILL)
        return self.wait() == -signal.SIGKILL

    @property
    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


def surroundings() -> dict[str, str]:
    """The environment of a new interpreter that finds this package and its tests."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(uat.__file__).parents[1]), str(ROOT)])}


def _forks() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.robustness.killed", "uat.cli"])
    return context


# ---------------------------------------------------------------- other processes


def wait_for(what: str, condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited in vain: {what}")
        time.sleep(0.005)


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the name: state, parent, ...; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def alive(pid: int) -> bool:
    return (_stat(pid) or "Z")[0] != "Z"


def born(pid: int) -> str:
    """Start time of a process, which identifies it together with its id, since ids are reused."""
    return (_stat(pid) or [""] * 20)[19]


def children(pid: int) -> dict[int, str]:
    """Living child processes of a process: their ids and start times."""
    every = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    return {one: born(one) for one in every if alive(one) and (_stat(one) or ["", ""])[1] == str(pid)}


def workers(pid: int) -> list[int]:
    """Child processes of a study that run its jobs."""
    return sorted(one for one in children(pid) if b"spawn_main" in _command(one))


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
