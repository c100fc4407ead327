"""One trial of a sweep: train a run, and stop it early if it is hopeless."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from uat.config import RunConfig, override
from uat.executors import Note
from uat.runs import Run, adopt_named
from uat.training.progress import Progress
from uat.training.trainer import train
from uat.training.validation import best_epoch, metric_of
from uat.tuning.study import Study


class HopelessError(Exception):
    """The trial's validations are worse than those of most trials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A trial to run."""

    number: int
    base: RunConfig
    settings: Mapping[str, Any]
    """Changes to the base, which may refuse their combination."""
    folder: Path

    @property
    def name(self) -> str:
        return f"trial {self.number}"


def train_trial(trial: Trial, device: torch.device, progress: Note, *, study: Path | None) -> list[dict[str, Any]]:
    """Train or resume the run of a trial; return a row with its best validation, or an empty one if it was stopped.

    study: file of the study in which the run is compared with others after each validation; None: it is not.
    """
    adopt_named({"domain_name": trial.base.domain_name, "method_name": trial.base.method_name})
    config = override(trial.base, trial.settings)
    run, metric = Run(trial.folder, config), metric_of(config)
    with contextlib.ExitStack() as kept:
        compared = None if study is None else kept.enter_context(Study.opened(study))

        def show(label: str, total: int) -> Progress:
            own = progress.begin(label, total)
            return own if compared is None else Compared(own, compared, trial.number, run, metric.name)

        try:
            train(config, trial.folder, resume=True, device=device, progress=show)
        except HopelessError:
            return [{}]
    best = best_epoch(run)
    return [{"epoch": best["epoch"], "value": best[f"validation/{metric.name}"]}]


class Compared(Progress):
    """Progress that reports validations to the study, and ends a hopeless training."""

    def __init__(self, shown: Progress, study: Study, number: int, run: Run, metric: str) -> None:
        self.shown, self.study, self.number, self.run, self.column = shown, study, number, run, f"validation/{metric}"

    def update(self, epoch: int, note: str = "") -> None:
        self.shown.update(epoch, note)
        if not note:
            return
        rows = self.run.rows("metrics.jsonl")
        self.study.report(self.number, {row["epoch"]: row[self.column] for row in rows if self.column in row})
        if self.study.is_hopeless(self.number):
            raise HopelessError
