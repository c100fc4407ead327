"""Run the campaign: inputs of all families, each in a worker with limits of time and memory.

A worker is a fork of this process. An alarm stops an input that takes too long, and a limit on memory one that takes
too much; a worker that does not answer at all is killed, and another goes on behind the input that it was at.
"""

from __future__ import annotations

import json
import os
import random
import resource
import select
import shutil
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tests.robustness.fuzz.verdict import Input, TooSlowError, Verdict

SECONDS, SILENCE = 20, 120
"""Limits of an input's CPU time, and of the time without an answer of its worker (asleep, or on a busy machine)."""
BYTES = 2 * 2**30
"""Limit of the memory that one input may take in addition to the worker's own."""


class Family(Protocol):
    name: str
    share: float
    """Share of all inputs."""

    def prepare(self, folder: Path) -> None:
        """Create the material of its inputs, once."""
        ...

    def draw(self, random: random.Random, folder: Path) -> Input:
        """Draw an input; `folder` is its own empty folder."""
        ...


@dataclass(frozen=True, slots=True)
class Case:
    """Identifies an input, so that it can be reproduced."""

    family: str
    seed: int
    number: int

    def __str__(self) -> str:
        return f"--family {self.family} --seed {self.seed} --number {self.number}"


@dataclass(frozen=True, slots=True)
class Judged:
    case: Case
    what: str
    verdict: Verdict
    seconds: float


def cases(families: Sequence[Family], inputs: int, seeds: int) -> list[Case]:
    """Distribute this number of inputs over families and seeds."""
    total, found = sum(family.share for family in families), []
    for family in families:
        count = max(1, round(inputs * family.share / total))
        found += [Case(family.name, place % seeds, place // seeds) for place in range(count)]
    return found


# ---------------------------------------------------------------- one input


def judge(family: Family, case: Case, home: Path) -> tuple[str, Verdict]:
    """Draw and run an input, and check that only its own folder changes."""
    folder = home / "input" / "inside"
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.mkdir(parents=True)
    before, what = everything(home, folder), "drawing the input"
    os.chdir(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd values are made in odd ways
            drawn = family.draw(random.Random(str(case)), folder)
        what = drawn.what
        verdict = drawn.judge()
    except TooSlowError as late:
        verdict = Verdict("broken", f"took longer than {SECONDS} s: {late}")
    except BaseException:
        verdict = Verdict("broken", f"the check itself failed: {traceback.format_exc()[-600:]}")
    os.chdir(home)
    if after := sorted(set(before.items()) ^ set(everything(home, folder).items())):
        verdict = Verdict("broken", f"changed files outside its folder: {after[0][0]}")
    return what, verdict


def everything(home: Path, but: Path) -> dict[str, tuple[int, int]]:
    """Size and modification time of all files except those of one folder."""
    found: dict[str, tuple[int, int]] = {}
    for place, folders, files in os.walk(home):
        folders[:] = [name for name in folders if os.path.join(place, name) != str(but)]  # noqa: PTH118
        for name in files:
            about = os.lstat(f"{place}/{name}")
            found[f"{place}/{name}"] = (about.st_size, about.st_mtime_ns)
    return found


# ---------------------------------------------------------------- workers


def run(families: Sequence[Family], wanted: Sequence[Case], home: Path, bytes_: int = BYTES) -> Iterator[Judged]:
    """Run the inputs in order, and yield their verdicts."""
    by_name, at = {family.name: family for family in families}, 0
    while at < len(wanted):
        worker, answers = start(partial(work, by_name, wanted[at:], home, bytes_))
        since = time.monotonic()
        with answers:
            while at < len(wanted):
                ready = select.select([answers], [], [], SILENCE)[0]
                line = answers.readline() if ready else b""
                if not line:
                    break
                what, kind, said, seconds = json.loads(line)
                yield Judged(wanted[at], what, Verdict(kind, said), seconds)
                at, since = at + 1, time.monotonic()
        if at < len(wanted):
            os.kill(worker, signal.SIGKILL)
        status = os.waitpid(worker, 0)[1]
        if at < len(wanted):
            how = f"the process ended or hung (status {status})"
            yield Judged(wanted[at], "", Verdict("broken", how), time.monotonic() - since)
            at += 1


def start(what: Callable[[], Iterator[list[Any]]]) -> tuple[int, Any]:
    """Fork a process that runs this; return its id and the connection for its answers."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, os.fdopen(reading, "rb", buffering=0)
    os.close(reading)
    try:
        for answer in what():
            os.write(writing, (json.dumps(answer) + "\n").encode())
    finally:
        os._exit(0)


def work(families: dict[str, Family], wanted: Sequence[Case], home: Path, bytes_: int) -> Iterator[list[Any]]:
    """A worker's answers to each input."""
    signal.signal(signal.SIGPROF, too_slow)
    limit_memory(bytes_)
    for case in wanted:
        since = time.monotonic()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            what, verdict = judge(families[case.family], case, home)
        except TooSlowError as late:
            what, verdict = "", Verdict("broken", f"took longer than {SECONDS} s: {late}")
        signal.setitimer(signal.ITIMER_PROF, 0)
        yield [what, *verdict, time.monotonic() - since]


def too_slow(_: int, frame: Any) -> None:
    said = traceback.extract_stack(frame)
    own = [f"{Path(one.filename).name}:{one.lineno}" for one in said if "/src/uat/" in one.filename]
    raise TooSlowError(" < ".join(reversed(own[-4:])))


def limit_memory(bytes_: int) -> None:
    """Limit the memory of this process to its present size plus this many bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + bytes_
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
