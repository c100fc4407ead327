"""Validations of a phase: the best weights, the log, and checkpoints.

Where the engine lets the host run ahead (on a GPU), the host does not wait for the numbers of a validation: it launches
the next epochs first and reads the numbers later, so that the device is never idle. The host does wait if the numbers
decide whether there is a next epoch, or if a checkpoint is due. The files are therefore the same as with waiting,
except that a loss that is not finite is noticed one validation later.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from uat.config import RunConfig, TrainConfig
from uat.engines import Engine
from uat.episode import Trajectory
from uat.methods import Phase
from uat.metrics import Metric
from uat.objectives import OBJECTIVES
from uat.rows import NUMBER, check_row
from uat.runs import Run
from uat.training.checkpoint import Checkpoint, DivergedError, TrainingProgress
from uat.training.ranks import Ranks

MEASURES = ("return", "length", "entropy", "kl", "explained_variance")
"""Numbers of an epoch that the progress shows, in place of losses, if its objective measures them."""


@dataclass(frozen=True, slots=True)
class Criterion:
    """Criterion for the best weights of a phase."""

    numbers: Callable[[], dict[str, Tensor]]
    """Validate the current weights and return the numbers, still on the device."""
    metric: Metric | None
    """The metric that selects the best weights, with its direction; None: the latest weights are the best."""
    plateau: float | None = None
    """The value that the best weights must exceed before patience may end the phase; None: patience always may."""

    def left_plateau(self, best: float) -> bool:
        return self.plateau is None or self.metric is None or self.metric.better(best, self.plateau)


def loss_criterion(engine: Engine, phase: Phase, play: Callable[[], Trajectory]) -> Criterion:
    """Select the weights by a loss of the phase on validation episodes, without dropout."""

    def numbers() -> dict[str, Tensor]:
        losses = engine.evaluate(phase.selects or phase.loss, play())
        parts = [total / count.clamp_min(1) for total, count in losses.values()]
        return {"loss": torch.stack(parts).sum()}

    return Criterion(numbers, Metric(name="loss", higher_is_better=False))


@dataclass(frozen=True, slots=True)
class PendingValidation:
    """A validation, and the epochs since the previous one, whose numbers the host has not read yet."""

    epoch: int
    """Index in its phase of the epoch that was validated."""
    rows: Callable[[], list[dict[str, Any]]]
    """Wait for the device and return one row of numbers for each epoch."""
    weights: dict[str, Tensor]
    """The weights that were validated."""


class Validations:
    """Rows of a phase's epochs, and validations not read by the host yet: at most the last one and a new one."""

    def __init__(
        self,
        phase: Phase,
        criterion: Criterion,
        engine: Engine,
        train: TrainConfig,
        checkpoint: Checkpoint,
        progress: TrainingProgress,
        ranks: Ranks,
        write: Callable[[dict[str, Any]], None],
    ) -> None:
        """Begin a phase, whose best weights the criterion selects.

        train: the training settings, with the number of epochs of this phase.
        write: receives each logged row.
        """
        self.phase, self.criterion, self.engine, self.train = phase, criterion, engine, train
        self.checkpoint, self.progress, self.ranks, self.write = checkpoint, progress, ranks, write
        self.run = checkpoint.run
        self.rows: list[dict[str, Any]] = []
        """Rows of the epochs since the last validation."""
        self.waiting: list[PendingValidation] = []
        self.since = time.perf_counter()

    @property
    def ended(self) -> bool:
        """Whether the phase is over: all of its epochs are done, or patience has run out."""
        return self._all_done or (self.progress.settled and self._out_of_patience())

    @property
    def _all_done(self) -> bool:
        return self.progress.is_last(self.train, counted=self.phase.reuse is not None)

    def add(self, numbers: dict[str, Tensor]) -> None:
        """Add the numbers of an epoch. If a validation is due, validate and start copying all numbers to the host."""
        self.rows.append({"epoch": self.progress.total, "phase": self.phase.name, **numbers})
        if self.progress.settled:
            numbers = self.ranks.agreed(self.criterion.numbers())
            self.rows[-1] |= {f"validation/{name}": value for name, value in numbers.items()}
            rows, weights = self.engine.copy_to_host(self.rows), self.checkpoint.weights()
            self.waiting.append(PendingValidation(self.progress.epoch, rows, weights))
            self.rows = []

    def keep_best(self) -> str:
        """After a validation, read the numbers that have arrived, keep the best weights, and save a checkpoint once
        all numbers are read. Return a note for the progress display."""
        note = ""
        if not self.progress.settled:
            return note
        while len(self.waiting) > 1 or (self.waiting and not self._may_run_ahead()):
            validated = self.waiting.pop(0)
            rows = validated.rows()
            note, now = self._settle(rows, validated), time.perf_counter()
            self.run.append("timing.jsonl", [{"epoch": rows[-1]["epoch"], "seconds": now - self.since}])
            self.since = now
            for row in rows:
                self.write(row)
        if not self.waiting:
            self.checkpoint.save(self.progress)
        return note

    def _may_run_ahead(self) -> bool:
        """Whether the next epochs take place whatever the last validation shows, and no checkpoint is due before."""
        more = self.engine.runs_ahead and not self._all_done
        return more and not self._out_of_patience() and not self.checkpoint.due

    def _out_of_patience(self) -> bool:
        best, waited = self.progress.best_value, self.progress.epoch - self.progress.best_epoch
        return best is not None and waited >= self.train.patience and self.criterion.left_plateau(best)

    def _settle(self, rows: list[dict[str, Any]], validated: PendingValidation) -> str:
        """Keep the weights if they are the best, log the rows, and return a note for the progress display."""
        for row in rows:
            for name, number in row.items():
                if name.startswith(("loss/", "gradient")) and not math.isfinite(number):
                    what = "loss" if name.startswith("loss/") else "gradient"
                    raise DivergedError(f"the {what} is not finite at epoch {row['epoch']}", self.run)
        progress, checkpoint, metric = self.progress, self.checkpoint, self.criterion.metric
        last = rows[-1]
        shown = {name: last[name] for name in MEASURES if name in last}
        shown = shown or {f"{k.removeprefix('loss/')} loss": v for k, v in last.items() if k.startswith("loss/")}
        note = ", ".join(
            f"{name} {number:.3g}" if name in MEASURES else f"{name} {number:.3f}" for name, number in shown.items()
        )
        if metric is None:
            checkpoint.best = validated.weights
        else:
            value = last[f"validation/{metric.name}"]
            if progress.best_value is None or metric.better(value, progress.best_value):
                progress.best_value, progress.best_epoch = value, validated.epoch
                checkpoint.best = validated.weights
            when = "" if validated.epoch == progress.epoch else f" at epoch {validated.epoch}"
            note = f"{note}, validation {metric.name} {_in_words(value)}{when} (best {_in_words(progress.best_value)})"
        self.run.append("metrics.jsonl", rows)
        return note


def metric_of(config: RunConfig) -> Metric:
    """Return the metric on validation episodes that selects the best weights of a run."""
    return OBJECTIVES[config.objective_name].build.criterion(config.build_domain().metrics)


def best_epoch(run: Run) -> dict[str, Any]:
    """Return the row of the epoch whose weights were kept."""
    metric, file = metric_of(run.config), "metrics.jsonl"
    name, sign = f"validation/{metric.name}", 1 if metric.higher_is_better else -1
    rows = [check_row(row, {name: NUMBER}, str(run.file(file))) for row in run.rows(file) if name in row]
    if not rows:
        raise ValueError(f"{run.file(file)} has no row with {name}")
    rows = [row for row in rows if row.get("phase") == rows[-1].get("phase")]  # each phase selects its own weights
    return max(rows, key=lambda row: -math.inf if math.isnan(row[name]) else sign * row[name])


def _in_words(value: float | None) -> str:
    return "undefined, worse than any number" if value is None or math.isnan(value) else f"{value:.3f}"
