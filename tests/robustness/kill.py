"""Kill trainings, studies and sessions at random moments, resume each, and compare with undisturbed twins.

    python -m tests.robustness.kill --kills 100 --seed 0

  training  `uat train`, killed up to three times in a row, then resumed to its end
  grid      `uat reproduce` with two workers: the parent is killed, and no worker may live on
  worker    the same, but one worker alone is killed: at most its own job fails, the rest of the grid is done
  session   a process that plays a session and saves it every few steps

Everything must be equal to the last bit: weights, checkpoints, metric rows, result rows, decisions. The seed decides
what is started, in which order, and how long after its start each kill comes. Where the process is by then is up to
the machine: two campaigns with one seed try the same things, and meet different moments.

Every process is ended by its id alone. Exit code 1 if there was any difference.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import uat
from tests.builders import build_random
from tests.robustness.killed import prepare
from tests.robustness.processes import Started, alive, born, children, wait_for, workers
from uat.files import is_temporary
from uat.spec import Discrete, Spec, Vector

SHARES = {"training": 0.45, "session": 0.25, "grid": 0.15, "worker": 0.15}
"""Share of each kind of kill."""
IN_A_ROW = 3
"""Maximum number of kills of one training, study or session before it may finish."""
FRESH = 0.15
"""Share of kills of new interpreters, which may happen during imports."""
OWN = {"manifest.json", "timing.jsonl", ".lock", "session.pickle"}
"""Files that contain process ids or wall times, and pickles, which depend on object identity."""
SMALL = ["domain.horizon=5", "domain.size=4", "train.batch_size=4", "train.validate_every=1"]
SMALL += ["train.validation_episodes=4", "train.patience=1000"]
TRAININGS = {"uat": 25, "vanilla": 40, "adt": 30, "uat-no-kv": 25}
"""Methods, with the number of epochs that each trains in a second or less."""
GRID = [*SMALL, "evaluation.episodes=4"]
SESSIONS = (2, 9)
"""Numbers of streams: few use the fast step, many the cached one."""


@dataclass(slots=True)
class Row:
    """Results of the kills of one kind."""

    kind: str
    kills: int = 0
    resumed: int = 0
    differences: list[str] = field(default_factory=list)
    left_over: int = 0
    """Temporary files left behind by a kill."""


def content(folder: Path) -> dict[str, bytes]:
    """All files of a folder that must not depend on interruptions."""
    files = [file for file in folder.rglob("*") if file.is_file() and not is_temporary(file)]
    names = {str(file.relative_to(folder)): file for file in files if file.name not in OWN}
    return {name: file.read_bytes() for name, file in sorted(names.items()) if not name.startswith("failures")}


def left_over(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if is_temporary(file))


def difference(folder: Path, twin: Path) -> str | None:
    """Describe the first file that differs from the twin's."""
    own, other = content(folder), content(twin)
    for name in sorted(own.keys() | other.keys()):
        if own.get(name) != other.get(name):
            sizes = [f"{len(files[name])} bytes" if name in files else "none" for files in (own, other)]
            return f"{folder.name}: {name} differs from its twin's ({sizes[0]}, {sizes[1]})"
    return None


class Campaign:
    """Runs kills of every kind in one folder; `rows` holds the results."""

    def __init__(self, folder: Path, seed: int, say: Callable[[str], None] = lambda line: None) -> None:
        self.folder, self.seed, self.say = folder, seed, say
        self.rows = {kind: Row(kind) for kind in SHARES}
        self.twins: dict[str, tuple[Path, float]] = {}
        self._started: list[Started] = []

    def __enter__(self) -> Campaign:
        return self

    def __exit__(self, *_: object) -> None:
        """Make sure that none of the processes survives."""
        for process in self._started:
            if process.code is None:
                process.kill()

    def run(self, kind: str, kills: int) -> None:
        """Run this number of kills of one kind."""
        rng, row = random.Random(f"{self.seed} {kind}"), self.rows[kind]
        for _ in range(5 + 3 * kills):  # some end before the kill comes: another one is started
            if row.kills >= kills:
                return
            most = min(rng.randint(1, IN_A_ROW), kills - row.kills)
            getattr(self, kind)(rng, row, most)
            self.say(f"{kind}: {row.kills}/{kills} kills, {len(row.differences)} differences")
        if row.kills < kills:
            row.differences.append(f"{kind}: only {row.kills} of {kills} kills met a process that was still running")

    # ------------------------------------------------------------ kinds of kills

    def training(self, rng: random.Random, row: Row, most: int) -> None:
        method = rng.choice(list(TRAININGS))
        self._chain(rng, row, most, f"training-{method}", lambda folder: self.train(method, folder))

    def session(self, rng: random.Random, row: Row, most: int) -> None:
        streams = rng.choice(SESSIONS)
        self._chain(rng, row, most, f"session-{streams}", lambda folder: self.play(streams, folder))

    def grid(self, rng: random.Random, row: Row, most: int) -> None:
        self._chain(rng, row, most, "grid", self.reproduce)

    def worker(self, rng: random.Random, row: Row, most: int) -> None:
        """Kill one worker of each study and let the study finish; the same command then does the rest."""
        twin, seconds = self.twin("grid", self.reproduce)
        folder = self._new_folder("worker")
        for _ in range(most):
            process = self.start(self.reproduce(folder), fresh=False)
            wait_for("two workers", lambda p=process: len(workers(p.pid)) == 2 or p.code is not None)
            time.sleep(rng.uniform(0, seconds / 2))
            chosen = rng.randrange(2)
            found = workers(process.pid)
            killed = len(found) == 2 and process.code is None and kill_by_id(found[chosen])
            code = process.wait()
            row.kills += killed
            if said := complaint(code, process.said, killed):
                row.differences.append(f"{folder.name}: {said}")
            if not killed:
                break
        self._finish(row, folder, twin, self.reproduce)

    def _chain(
        self, rng: random.Random, row: Row, most: int, name: str, arguments: Callable[[Path], Sequence[Any]]
    ) -> None:
        """Start, kill, start again, ..., and compare the final results."""
        twin, seconds = self.twin(name, arguments)
        folder, done = self._new_folder(name), False
        for _ in range(most):
            fresh = rng.random() < FRESH
            process = self.start(arguments(folder), fresh=fresh)
            time.sleep(rng.uniform(0, seconds * (2 if fresh else 1)))
            others = children(process.pid)
            done = not process.kill()
            row.kills += not done
            try:
                wait_for("the end of the workers", lambda o=others: not survivors(o), 60)
            except TimeoutError:
                row.differences.append(f"{folder.name}: processes {survivors(others)} outlived their parent")
            if done:
                if process.code != 0:
                    row.differences.append(f"{folder.name}: exit code {process.code}: {process.said[-300:]}")
                break
        self._finish(row, folder, twin, arguments)

    def _finish(self, row: Row, folder: Path, twin: Path, arguments: Callable[[Path], Sequence[Any]]) -> None:
        process = self.start(arguments(folder), fresh=False)
        if process.wait() == 0:
            row.resumed += 1
            said = difference(folder, twin)
        else:
            said = f"{folder.name} was not resumed: exit code {process.code}: {process.said[-300:]}"
        row.differences += [said] if said else []
        row.left_over += len(left_over(folder))

    # ------------------------------------------------------------ commands

    def train(self, method: str, folder: Path, *, epochs: int | None = None, seed: int = 0) -> list[Any]:
        settings = [word for one in SMALL for word in ("--" + one.replace("_", "-")).split("=")]
        flags = ["--train.epochs", epochs or TRAININGS[method], "--seed", seed, "--resume", "--device", "cpu"]
        return ["uat", "train", "darkroom", "--method", method, "--preset", "smoke", *settings, *flags, "--out", folder]

    def reproduce(self, folder: Path, *, workers: int = 2, epochs: int = 12) -> list[Any]:
        what = ["main", "--preset", "smoke", "--domains", "darkroom", "--tasks", "cyclic", "--seeds", 0, 1]
        how = ["--methods", "vanilla", "tent", "uat", "--workers", workers, "--no-report", "--json", "--device", "cpu"]
        return ["uat", "reproduce", *what, *how, "--set", *GRID, f"train.epochs={epochs}", "--out", folder]

    def play(self, streams: int, folder: Path, *, steps: int = 300) -> list[Any]:
        policy = self.folder / "policy.safetensors"
        if not policy.exists():
            spec = Spec(obs=Vector(5), action=Discrete(4), horizon=400)
            uat.save(policy, build_random("uat", spec, dtype=torch.float32), "uat")
        return ["session", folder, policy, streams, steps]

    # ------------------------------------------------------------ processes and folders

    def start(self, arguments: Sequence[Any], *, fresh: bool) -> Started:
        self._started.append(Started(arguments, self.folder / f"{len(self._started)}.log", fresh=fresh))
        return self._started[-1]

    def twin(self, name: str, arguments: Callable[[Path], Sequence[Any]]) -> tuple[Path, float]:
        """The folder that the same command writes without kills, and how many seconds that took."""
        if name not in self.twins:
            self.start(["uat", "--version"], fresh=False).wait()  # the server of forks has imported everything by now
            folder, since = self.folder / "twins" / name, time.monotonic()
            folder.mkdir(parents=True)
            process = self.start(arguments(folder), fresh=False)
            if process.wait() != 0:
                raise RuntimeError(f"the twin of {name} failed: {process.said}")
            self.twins[name] = folder, time.monotonic() - since
            self.say(f"{name}: its twin took {self.twins[name][1]:.1f} s")
        return self.twins[name]

    def _new_folder(self, name: str) -> Path:
        folder = self.folder / f"{name}-{len(self._started)}"
        folder.mkdir()
        return folder


def survivors(processes: dict[int, str]) -> list[int]:
    return [pid for pid, when in processes.items() if alive(pid) and born(pid) == when]


def kill_by_id(pid: int) -> bool:
    """Kill a process; return False if it had already ended."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def complaint(code: int, said: str, killed: bool) -> str | None:
    """Describe what is wrong after a study whose worker was killed; None if nothing is."""
    try:
        summary = json.loads(said[said.index("\n{\n") :] if not said.startswith("{") else said)
    except ValueError:
        return f"exit code {code} and no summary: {said[-300:]}"
    failed = summary["failed"]
    if any("its worker was killed" not in why for why in failed.values()):
        return f"something else failed: {failed}"
    if len(failed) > killed:
        return f"{len(failed)} jobs failed after {int(killed)} kills: {', '.join(failed)}"
    return None if code == bool(failed) else f"exit code {code} with {len(failed)} failures"


# ---------------------------------------------------------------- the command


def shares(kills: int) -> dict[str, int]:
    """Number of kills of each kind; the first kind takes the remainder."""
    found = {kind: int(kills * share) for kind, share in SHARES.items()}
    found["training"] += kills - sum(found.values())
    return found


def table(rows: Sequence[Row]) -> str:
    total = Row("all", differences=[said for row in rows for said in row.differences])
    for name in ("kills", "resumed", "left_over"):
        setattr(total, name, sum(getattr(row, name) for row in rows))
    lines = [f"{'kind':10}{'kills':>7}{'resumed':>9}{'differences':>13}{'left over':>11}"]
    lines += [f"{r.kind:10}{r.kills:7}{r.resumed:9}{len(r.differences):13}{r.left_over:11}" for r in [*rows, total]]
    return "\n".join([*lines, *total.differences])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.robustness.kill", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="how many in all")
    parser.add_argument("--seed", type=int, default=0, help="what is started, in which order, and when it is killed")
    parser.add_argument("--kinds", nargs="+", choices=list(SHARES), default=list(SHARES), help="only these kinds")
    options, since = parser.parse_args(argv), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that a stopped campaign ends its processes, too
    with (
        tempfile.TemporaryDirectory(prefix="uat-kill-") as folder,
        Campaign(Path(folder), options.seed, say=lambda line: print(line, file=sys.stderr, flush=True)) as campaign,
    ):
        rows = [campaign.rows[kind] for kind in options.kinds]
        try:
            for row in rows:
                campaign.run(row.kind, shares(options.kills)[row.kind])
        finally:  # also if it is stopped
            print(table(rows))
            print(f"{sum(row.kills for row in rows)} kills in {time.monotonic() - since:.0f} s, seed {options.seed}")
    return 1 if any(row.differences or row.left_over for row in rows) else 0


if __name__ == "__mp_main__":  # a worker of a grid
    prepare()
if __name__ == "__main__":
    sys.exit(main())
