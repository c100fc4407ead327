"""`uat.tune`: a sweep over settings, whose folder is its only state.

sweep.json      what is varied, and all other settings      study.db    every trial, through Optuna
trials/007/     the run folder of a trial                   failures/   errors of trials
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from uat import lock
from uat.config import RunConfig, to_json
from uat.domains import Domain
from uat.executors import Executor, ExecutorName, Outcome, check_executor, executor_for, keep_failure
from uat.files import check_path, is_temporary, read_json, write_atomically
from uat.methods import Policy
from uat.recipes import default_folder
from uat.runs import first_difference
from uat.settings import MOST_COUNT, checked, shown
from uat.tensor_files import RunError
from uat.threads import thread_count
from uat.training.progress import Board
from uat.training.start import resolved
from uat.training.surroundings import pick_device
from uat.training.validation import metric_of
from uat.tuning.space import Space, default_space, parse_space
from uat.tuning.study import Record, Study, need_optuna
from uat.tuning.sweep import Sweep, trial_folder
from uat.tuning.trials import Trial, train_trial

FILE, STUDY = "sweep.json", "study.db"


class Silent(Board):
    """A board that prints nothing."""

    def say(self, line: str) -> None:
        pass

    def watch(self, notes: Path) -> None:
        pass


def tune(
    config: RunConfig | Domain | str,
    out: Path | str | None = None,
    *,
    space: Sequence[str] | Mapping[str, Any] | None = None,
    trials: int = 20,
    prune: bool = False,
    method: str | type[Policy] | Any = None,
    preset: str | None = None,
    seed: int | None = None,
    settings: Mapping[str, Any] | None = None,
    objective: str | None = None,
    workers: int = 1,
    executor: ExecutorName = "local",
    address: str | None = None,
    device: str | None = None,
    threads: int | None = None,
    progress: Callable[[int], Board] = Silent,
) -> Sweep:
    """Train with several settings, and return the trials; the best one has the best metric on validation episodes.

    The same call again resumes the sweep in its folder: finished trials are kept, interrupted ones are resumed, and a
    larger number of trials adds some. Test episodes are not played.

    config, method, preset, seed, settings, objective: as in `uat.train`. All trials train with the same seed.
    out: folder of the sweep; unset: runs/tune-DOMAIN-METHOD-PRESET-SEED.
    space: what varies, as {"train.lr": "1e-4..3e-3:log", "method.d_model": [32, 64, 128]}, or as a list of texts such
      as "train.lr=1e-4..3e-3:log"; unset: learning rates, width, context, and the entropy bonus of PPO.
    trials: number of trials in the folder, whatever became of them.
    prune: stop a trial when its best validation so far is worse than the median of earlier trials at the same epoch.
    workers: trials at a time. With one, the same call gives the same trials again. With more, suggestions after the
      first 10 depend on which trials have finished.
    executor: "local" for processes on this machine, or "ray"; address: that of a running Ray cluster.
    device, threads: as in `uat.train`, for each worker.
    progress: makes a display from the number of trials, such as `uat.training.progress.show_board`.
    """
    about = {"method": method, "preset": preset, "seed": seed, "settings": settings, "objective": objective}
    whole = resolved(config, about)
    if not 1 <= checked(trials, int, "trials") <= MOST_COUNT:
        raise ValueError(f"trials={shown(trials)} must be at least 1 and at most {MOST_COUNT}")
    checked(prune, bool, "prune")
    checked(executor, ExecutorName, "executor")
    check_executor(executor, workers=checked(workers, int, "workers"), address=checked(address, str | None, "address"))
    pick_device(device)
    thread_count(threads)
    need_optuna()
    _check_workers(whole, workers, executor, address, prune=prune)
    parsed = default_space(whole) if space is None else parse_space(whole, space)
    path = check_path(default_path(whole) if out is None else out, "out")
    own = Folder(path, whole, parsed, prune)
    own.check()
    with lock.locked(path, f"a sweep of {whole.method_name} on {whole.domain_name}"):
        own.check()
        own.write()
        how = executor_for(executor, workers=workers, address=address, device=device, threads=threads)
        return own.run(trials, how, progress)


def default_path(config: RunConfig) -> Path:
    """Return the default folder of a sweep: runs/tune-DOMAIN-METHOD-PRESET-SEED."""
    usual = default_folder(config)
    return usual.with_name(f"tune-{usual.name}")


def _check_workers(config: RunConfig, workers: int, executor: str, address: str | None, *, prune: bool) -> None:
    """Refuse what processes of their own cannot do."""
    if prune and address is not None:
        raise ValueError("prune compares trials in an SQLite file, which the machines of a cluster cannot share safely")
    local = next((name for name in (config.domain_name, config.method_name) if name.startswith("object:")), None)
    if local is not None and (workers > 1 or executor != "local"):
        raise ValueError(
            f"{local} is an object of this process, which workers cannot make: save its class or factory in a module, "
            "or use workers=1"
        )


@dataclass(frozen=True, slots=True)
class Folder:
    """The folder of a sweep."""

    path: Path
    config: RunConfig
    space: Space
    prune: bool

    def described(self) -> dict[str, Any]:
        """Return everything that decides what the trials are, but for their number."""
        space = {name: str(values) for name, values in self.space.items()}
        return {"space": space, "prune": self.prune, "config": to_json(self.config)}

    def check(self) -> None:
        """Raise a RunError if the folder holds anything but this sweep."""
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path} is a file; choose another folder with --out (in Python out=...)")
        names = {file.name for file in self.path.iterdir() if not is_temporary(file)} if self.path.exists() else set()
        if names <= {lock.FILE}:
            return
        if FILE not in names:
            raise RunError(
                f"{self.path} holds other files; choose an empty or new folder with --out (in Python out=...)"
            )
        found = read_json(self.path / FILE)
        if difference := first_difference(found, json.loads(json.dumps(self.described())), ""):
            raise RunError(
                f"{self.path} holds another sweep: {difference}; choose another folder with --out (in Python out=...)"
            )

    def write(self) -> None:
        if not (self.path / FILE).exists():
            write_atomically(self.path / FILE, (json.dumps(self.described(), indent=2) + "\n").encode())

    def run(self, trials: int, executor: Executor, board: Callable[[int], Board]) -> Sweep:
        """Run the missing trials, and return all."""
        metric, file, notes = metric_of(self.config), self.path / STUDY, self.path / "progress"
        do = partial(train_trial, study=file.absolute() if self.prune else None)
        with Study.opened(file, higher_is_better=metric.higher_is_better) as study:
            ended = sum(record.state != "interrupted" for record in study.records())
            if ended < trials:
                begun: list[Record] = []
                with board(trials - ended) as shown, _removed(notes):
                    jobs = self.jobs(study, trials, begun)
                    for index, outcome in executor.outcomes(jobs, do, notes, lambda: shown.watch(notes)):
                        self.settle(study, begun[index], outcome, shown, metric.name)
            records, importance = tuple(study.records()), study.importance()
        return Sweep(
            path=self.path, config=self.config, space=self.space, metric=metric, trials=records, importance=importance
        )

    def jobs(self, study: Study, trials: int, begun: list[Record]) -> Iterator[Trial]:
        """Yield interrupted trials, then new ones, and append them to `begun`; the results so far decide the next."""
        for record in study.records()[:trials]:
            if record.state == "interrupted":
                begun.append(record)
                yield self.trial(record)
        while len(study.records()) < trials:
            record = study.suggest(self.space, self.config.seed)
            if (twin := _twin(record, study.records())) is not None:
                assert twin.value is not None
                study.finish(record.number, twin.value, twin.epoch or 0, run=twin.run)
                continue
            begun.append(record)
            yield self.trial(record)

    def trial(self, record: Record) -> Trial:
        folder = trial_folder(self.path, record.number).absolute()
        return Trial(number=record.number, base=self.config, settings=dict(record.settings), folder=folder)

    def settle(self, study: Study, record: Record, outcome: Outcome, shown: Board, metric: str) -> None:
        """Write the outcome of a trial; one whose worker was killed stays interrupted."""
        name = f"trial {record.number}"
        if outcome.failure is not None:
            file = keep_failure(self.path / "failures", replace(outcome, name=name))
            shown.say(f"failed: {name}: {outcome.failure} ({file})")
            if not outcome.died:
                study.fail(record.number, outcome.failure)
        elif not (row := outcome.rows[0]):
            name += ", stopped early"
            study.prune(record.number)
        elif row["value"] != row["value"]:
            study.fail(record.number, f"validation {metric} is undefined")
        else:
            study.finish(record.number, row["value"], row["epoch"])
            name += f", validation {metric} {row['value']:.3f}"
        shown.done(name, outcome.seconds, failed=outcome.failure is not None)


def _twin(record: Record, records: Sequence[Record]) -> Record | None:
    """Return an earlier finished trial with the same settings, whose training would be the same."""
    done = (other for other in records if other.state == "done" and other.number != record.number)
    return next((other for other in done if other.settings == record.settings), None)


@contextlib.contextmanager
def _removed(folder: Path) -> Iterator[None]:
    """Remove a folder before and after the block: progress of killed workers is meaningless."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
