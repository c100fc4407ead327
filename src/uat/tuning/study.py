"""The trials of a sweep in an SQLite file, through Optuna, which is loaded when a sweep is opened.

Every trial's suggestion has a random generator of its own, derived from the sweep's seed and the trial's number, and is
written at once with all its settings. A sweep that was killed therefore suggests what an undisturbed one would, as long
as it has seen the same results.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sqlite3
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from uat.files import FileError
from uat.noise import derive
from uat.tuning.space import Choice, Range, Space

NAME = "uat"
WAIT_SECONDS = 60.0
"""How long a process waits for another one that writes to the file."""
RANDOM_TRIALS = 10
"""Trials with random settings, before the sampler learns from results."""

State = Literal["done", "pruned", "failed", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A trial as the file holds it."""

    number: int
    state: State
    """done, pruned, failed, or interrupted: begun by a process that has ended, or running."""
    settings: Mapping[str, Any]
    value: float | None
    """The best validation metric; of a pruned trial, the last one."""
    epoch: int | None
    """Epoch of the best validation metric."""
    run: int
    """Number of the trial whose run folder has these results: its own, or an earlier one with the same settings."""
    failure: str | None


def need_optuna() -> Any:
    if importlib.util.find_spec("optuna") is None:
        raise ValueError("uat tune needs optuna, which is not installed: pip install 'uat-transformer[tune]'")
    return importlib.import_module("optuna")


@contextlib.contextmanager
def silent(optuna: Any) -> Iterator[None]:
    """Silence Optuna's log and its warnings inside the block."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"optuna(\.|$)")
            warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


class Study:
    """The study of a sweep; several processes may open the same file."""

    def __init__(self, file: Path, optuna: Any, study: Any) -> None:
        self.file, self.optuna, self.study = file, optuna, study

    @staticmethod
    @contextlib.contextmanager
    def opened(file: Path, *, higher_is_better: bool | None = None) -> Iterator[Study]:
        """Open the file; with a direction, make it first if it is missing."""
        optuna = need_optuna()
        with silent(optuna), contextlib.ExitStack() as kept:
            if higher_is_better is not None and not file.exists():
                _create(optuna, file, higher_is_better)
            try:
                storage = kept.enter_context(_storage(optuna, file))
                pruner = optuna.pruners.MedianPruner()
                study = optuna.load_study(study_name=NAME, storage=storage, pruner=pruner)
            except (KeyError, optuna.exceptions.OptunaError, *_database_errors()) as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise FileError(f"{file} is not the study of a sweep: {reason}") from None
            yield Study(file, optuna, study)

    # ------------------------------------------------------------ trials

    def records(self) -> list[Record]:
        """Return all trials, by number."""
        return [self._record(trial) for trial in self.study.get_trials(deepcopy=False)]

    def _record(self, trial: Any) -> Record:
        states: dict[str, State] = {"COMPLETE": "done", "PRUNED": "pruned", "FAIL": "failed"}
        about = trial.user_attrs
        return Record(
            number=trial.number,
            state=states.get(trial.state.name, "interrupted"),
            settings=dict(trial.params),
            value=trial.value,
            epoch=about.get("epoch"),
            run=about.get("run", trial.number),
            failure=about.get("failure"),
        )

    def suggest(self, space: Space, seed: int) -> Record:
        """Begin the next trial, with settings that depend on the seed, its number and the results so far."""
        optuna, trials = self.optuna, self.study.get_trials(deepcopy=False)
        ranges = {name: _distribution(optuna, values) for name, values in space.items()}
        own = derive(seed, "suggestion", len(trials)) % 2**32
        sampler = optuna.samplers.TPESampler(
            seed=own, n_startup_trials=RANDOM_TRIALS, multivariate=True, constant_liar=True
        )
        drafts = optuna.create_study(direction=self.study.direction, sampler=sampler)
        drafts.add_trials(trials)
        settings = drafts.ask(ranges).params
        running = optuna.trial.TrialState.RUNNING
        self.study.add_trial(optuna.trial.create_trial(state=running, params=settings, distributions=ranges))
        return self.records()[len(trials)]

    def finish(self, number: int, value: float, epoch: int, run: int | None = None) -> None:
        """End a trial with its value; run: the earlier trial that has these results."""
        self._describe(number, epoch=epoch, **({} if run is None else {"run": run}))
        self.study.tell(number, value)

    def prune(self, number: int) -> None:
        self.study.tell(number, state=self.optuna.trial.TrialState.PRUNED)

    def fail(self, number: int, reason: str) -> None:
        self._describe(number, failure=reason)
        self.study.tell(number, state=self.optuna.trial.TrialState.FAIL)

    def _describe(self, number: int, **about: Any) -> None:
        for name, value in about.items():
            self.study._storage.set_trial_user_attr(self._id(number), name, value)

    def _id(self, number: int) -> int:
        return self.study.get_trials(deepcopy=False)[number]._trial_id

    # ------------------------------------------------------------ validations

    def report(self, number: int, values: Mapping[int, float]) -> None:
        """Add validations of a running trial, by epoch; those that are known are left as they are."""
        trial = self.study.get_trials(deepcopy=False)[number]
        for epoch, value in values.items():
            if epoch not in trial.intermediate_values:
                self.study._storage.set_trial_intermediate_value(trial._trial_id, epoch, value)

    def is_hopeless(self, number: int) -> bool:
        """Whether the best validation of a running trial is below the median of finished trials at the same epoch."""
        return bool(self.study.pruner.prune(self.study, self.study.get_trials(deepcopy=False)[number]))

    def importance(self) -> dict[str, float]:
        """Return each setting's share in how good a trial is (PED-ANOVA), the largest first; empty after few trials."""
        done = [trial for trial in self.study.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"]
        if len(done) < RANDOM_TRIALS or len({trial.value for trial in done}) < 2:
            return {}
        evaluator = self.optuna.importance.PedAnovaImportanceEvaluator()
        return dict(self.optuna.importance.get_param_importances(self.study, evaluator=evaluator))


def _distribution(optuna: Any, values: Range | Choice) -> Any:
    kinds = optuna.distributions
    if isinstance(values, Choice):
        return kinds.CategoricalDistribution(values.values)
    if values.step is None:
        return kinds.FloatDistribution(values.low, values.high, log=values.log)
    return kinds.IntDistribution(values.low, values.high, log=values.log, step=values.step)


# ---------------------------------------------------------------- the file


def _create(optuna: Any, file: Path, higher_is_better: bool) -> None:
    """Make the file under another name first, so that a kill leaves no half of it."""
    new = file.with_name(f"{file.name}.new")
    new.unlink(missing_ok=True)
    with _storage(optuna, new, check=False) as storage:
        direction = "maximize" if higher_is_better else "minimize"
        optuna.create_study(study_name=NAME, storage=storage, direction=direction)
    os.replace(new, file)  # noqa: PTH105 (as in `uat.files`)


@contextlib.contextmanager
def _storage(optuna: Any, file: Path, *, check: bool = True) -> Iterator[Any]:
    """Open the file; a function connects to it, since a path in a URL would need quoting.

    check: whether the file is one that this version of Optuna can read.
    """
    connect = partial(sqlite3.connect, file, timeout=WAIT_SECONDS, check_same_thread=False)
    storage = optuna.storages.RDBStorage(
        "sqlite:///study.db", engine_kwargs={"creator": connect}, skip_compatibility_check=not check
    )
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


def _database_errors() -> tuple[type[Exception], ...]:
    return (importlib.import_module("sqlalchemy.exc").SQLAlchemyError, RuntimeError, sqlite3.Error)
