"""The result of a sweep: its trials, the best of them, and the command that trains it again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uat.config import RunConfig, override, setting_names
from uat.evaluation.tables import columns
from uat.metrics import Metric
from uat.recipes import recipe, usual_objective
from uat.tuning.space import Space, as_text, get
from uat.tuning.study import Record

MOST_ROWS = 10
"""Trials in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Trials of a sweep; printed as a table of the best ones."""

    path: Path
    config: RunConfig
    """The settings that all trials share."""
    space: Space
    metric: Metric
    """The metric on validation episodes that is compared."""
    trials: tuple[Record, ...]
    """All trials, by number."""
    importance: Mapping[str, float]
    """Each setting's share in how good a trial is, the largest first; empty if too few trials are done."""

    def folder(self, trial: Record) -> Path:
        """Return the run folder of a trial."""
        return trial_folder(self.path, trial.run)

    def config_of(self, trial: Record) -> RunConfig:
        return override(self.config, trial.settings)

    @property
    def ranked(self) -> list[Record]:
        """All trials: the finished ones from the best to the worst, then the others by number."""
        sign = -1 if self.metric.higher_is_better else 1

        def key(trial: Record) -> tuple[bool, float, int]:
            done = trial.state == "done" and trial.value is not None
            return (not done, sign * trial.value if done and trial.value is not None else 0.0, trial.number)

        return sorted(self.trials, key=key)

    @property
    def best(self) -> Record:
        """The best finished trial."""
        best = self.ranked[0]
        if best.state != "done":
            why = next((trial.failure for trial in self.trials if trial.failure), "they were interrupted")
            raise ValueError(f"no trial of {self.path} has finished: {why}")
        return best

    @property
    def command(self) -> str:
        """The command that trains the best trial again; in Python, for a domain or a method without an address."""
        return command_of(self.config_of(self.best))

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per trial, the best first."""
        return [
            {
                "trial": trial.number,
                "state": trial.state,
                "metric": self.metric.name,
                "value": trial.value,
                "epoch": trial.epoch,
                "settings": dict(trial.settings),
                "run": str(self.folder(trial)),
                "command": command_of(self.config_of(trial)),
                "failure": trial.failure,
            }
            for trial in self.ranked
        ]

    def __str__(self) -> str:
        rows = [
            {
                "trial": trial.number,
                "state": trial.state,
                f"validation {self.metric.name}": trial.value,
                "epoch": trial.epoch,
                **{name: _short(value) for name, value in trial.settings.items()},
                "run": str(self.folder(trial)),
            }
            for trial in self.ranked[:MOST_ROWS]
        ]
        lines = [columns(rows), f"\n{self._counts()}"]
        if self.importance:
            shares = ", ".join(f"{name} {share:.0%}" for name, share in self.importance.items())
            lines.append(f"importance: {shares}")
        if self.ranked[0].state == "done":
            lines.append(f"\ntrain the best one again:\n  {self.command}")
        return "\n".join(lines)

    def _counts(self) -> str:
        states = [trial.state for trial in self.trials]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))
        return f"{len(states)} trials: {counts}"


def trial_folder(path: Path, number: int) -> Path:
    return path / "trials" / f"{number:03d}"


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else as_text(value)


# ---------------------------------------------------------------- commands


def command_of(config: RunConfig) -> str:
    """Return the command that trains a config; in Python, for a domain or a method without an address."""
    usual = recipe(config.domain_name, config.method_name, config.preset, objective=config.objective_name)
    changed = {
        name: get(config, name)
        for name in setting_names(config)
        if name != "seed" and get(config, name) != get(usual, name)
    }
    if config.domain_name.startswith("object:"):
        own = {name: value for name, value in changed.items() if not name.startswith("domain.")}
        about = f"method={config.method_name!r}, preset={config.preset!r}, seed={config.seed}"
        return f"uat.train(domain, {about}, objective={config.objective_name!r}, settings={own})"
    words = ["uat", "train", config.domain_name, "--method", config.method_name, "--preset", config.preset]
    if config.objective_name != usual_objective(config.domain_name, config.method_name):
        words += ["--objective", config.objective_name]
    words += ["--seed", str(config.seed)]
    for name, value in changed.items():
        words += flag_of(name, value)
    return shlex.join(words)


def flag_of(name: str, value: Any) -> list[str]:
    """Return the flag of `uat train` for a setting, with its value."""
    section, _, field = name.replace("_", "-").rpartition(".")
    if isinstance(value, bool):
        return [f"--{section}.{'' if value else 'no-'}{field}"]
    values = value if isinstance(value, tuple) else (value,)
    return [f"--{section}.{field}", *(str(one) for one in values)]
