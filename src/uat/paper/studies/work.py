"""Run one job of a study: train and score its cells, and skip finished work."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from uat.config import RunConfig, to_json
from uat.evaluation.scores import evaluate, reference_episodes, rows_of, what_is_unfinished
from uat.executors import Note
from uat.files import safe_name
from uat.methods import training_name
from uat.paper.studies.cells import Cell, Job, source_of
from uat.runs import Run, describe
from uat.tensor_files import RunError
from uat.training.surroundings import precision
from uat.training.together import train_together
from uat.training.trainer import train


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The job of scoring a task's references (filter, expert and chance), which depend on no training."""

    cell: Cell

    @property
    def name(self) -> str:
        return (
            f"{self.cell.config.domain_name}/{self.cell.task} references{'' if self.is_usual else f' {self.setting}'}"
        )

    @property
    def setting(self) -> str:
        """The column "setting" of the rows."""
        return self.cell.config.build_domain().setting

    @property
    def is_usual(self) -> bool:
        return self.setting == "default"

    @property
    def key(self) -> str:
        """A key that is equal for cells with the same worlds and the same feedback."""
        c = self.cell.config
        return json.dumps([c.domain_name, to_json(c.domain), c.evaluation.episodes, c.feedback.setting], sort_keys=True)

    def folder(self, runs: Path) -> Path:
        c = self.cell.config
        name = f"{c.domain_name}-{self.cell.task}-references{'' if self.is_usual else f'-{self.setting}'}"
        return runs / safe_name(name, most=240)


Task = Job | Reference


def task_rows(task: Task, device: torch.device, progress: Note, *, runs: Path) -> list[dict[str, Any]]:
    """Do a job of a study and return its rows."""
    if isinstance(task, Reference):
        return reference_rows(task, runs, device)
    return cell_rows(task, runs, device, progress)


def cell_rows(job: Job, runs: Path, device: torch.device, progress: Note) -> list[dict[str, Any]]:
    """Train the owners side by side, let the other cells start from their weights, then score all."""
    waiting = [cell for cell in job.cells if cell.scored and scores_of(cell, runs) is None]
    needed = {source_of(cell).identity for cell in waiting}
    owners = [cell for cell in job.owners if cell.identity in needed]
    folders = {cell.identity: cell.folder(runs) for cell in job.cells}
    train_together(
        [cell.config for cell in owners],
        [folders[cell.identity] for cell in owners],
        resume=True,
        device=device,
        progress=progress.begin,
    )
    scores = []
    for cell in (cell for cell in job.cells if cell.scored):
        folder = folders[cell.identity]
        if (rows := scores_of(cell, runs)) is None:
            if training_name(cell.config.method_name) != cell.config.method_name:
                source = None if folder.exists() else folders[source_of(cell).identity]
                train(cell.config, folder, resume=True, source=source, device=device)
            rows = [asdict(row) for row in evaluate(folder, references=False, device=device).scores]
        scores += rows
    return scores


def scores_of(cell: Cell, runs: Path) -> list[dict[str, Any]] | None:
    """Rows of a run that is completely trained and scored in every metric; None if there is work left."""
    folder = cell.folder(runs)
    if not (folder / "config.json").exists():
        return None
    run = Run.open(folder)
    if run.config.identity() != cell.identity:
        raise RunError(f"{folder} holds another run ({describe(run.config)}); choose another folder with --out")
    rows = run.rows("scores.jsonl")
    complete = {row["metric"] for row in rows} >= {metric.name for metric in run.config.build_true_domain().metrics}
    return rows if rows and complete and what_is_unfinished(run) is None else None


def reference_rows(task: Reference, runs: Path, device: torch.device) -> list[dict[str, Any]]:
    config: RunConfig = task.cell.config
    domain, run = config.build_domain(), Run(task.folder(runs), config)
    count = domain.episode_count("test", config.evaluation.episodes)
    with precision(config.train.precision):
        values = reference_episodes(run, count, device)
    rows = [row for method, metrics in values.items() for row in rows_of(config, domain, method, metrics)]
    return [asdict(row) for row in rows]
