"""The flags of `uat reproduce` and of `python -m uat.paper.studies`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uat.config import PRESETS, lookup
from uat.domains import DOMAINS
from uat.executors import ExecutorName, check_executor
from uat.files import parse_json
from uat.methods import METHODS
from uat.paper.studies.cells import Filter
from uat.paper.studies.files import Results
from uat.paper.studies.grids import NAMED_DATA, STUDIES
from uat.settings import shown
from uat.threads import thread_count


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Run a study of the paper: train and score its cells, skip those that are done, and write rows."""

    study: str
    """main, ablation, boundary, mechanism, sensitivity, efficiency, diagnostics, or all."""
    preset: str = "quick"
    """smoke (seconds per cell), quick (minutes per cell on two cores) or paper (the published settings)."""
    domains: tuple[str, ...] = ()
    """Run only these domains; by default all."""
    tasks: tuple[str, ...] = ()
    """Run only these tasks; by default all."""
    methods: tuple[str, ...] = ()
    """Run only these methods; by default all."""
    seeds: tuple[int, ...] = ()
    """Seeds of every cell; by default 0 1 2 with the paper preset, and 0 otherwise."""
    data: tuple[str, ...] = ()
    """Your own data instead of the built-in data, as DOMAIN=PATH; hsi=PATH is the market in the figure of the gate."""
    set: tuple[str, ...] = ()
    """Additional settings of every cell, as FIELD=VALUE with a JSON value."""
    out: Path | None = None
    """Folder of results, by default runs/reproduce/PRESET. Running again with the same folder resumes the study."""
    runs: Path | None = None
    """Folder of the run folders; by default OUT/runs."""
    executor: ExecutorName = "local"
    """Run cells in processes on this machine (local), or on a Ray cluster."""
    workers: int | None = None
    """Number of cells at a time; by default one per GPU, or one per core without GPUs."""
    address: str | None = None
    """Address of a running Ray cluster; by default a local one is started."""
    retries: int = 0
    """Number of immediate retries of a failed cell; running the study again retries it in any case."""
    device: str | None = None
    """Device, cpu or cuda; by default CUDA if available."""
    threads: int | None = None
    """CPU threads of each worker; by default UAT_THREADS, or one."""
    references_only: bool = False
    """Score only the references (filters, expert and chance) under each setting, and train nothing."""
    dry_run: bool = False
    """List the cells with a time estimate, and stop."""
    json: bool = False
    """Print JSON instead of a table."""

    def __post_init__(self) -> None:
        lookup("study", self.study, [*STUDIES, "all"])
        lookup("preset", self.preset, PRESETS)
        for domain in self.domains:
            lookup("domain", domain, DOMAINS)
        for method in self.methods:
            lookup("method", method, METHODS)
        for task in self.tasks:
            lookup("task", task, [task for domain in DOMAINS.values() for task in domain.tasks])
        _ = self.filter
        if self.retries < 0:
            raise ValueError(f"retries={self.retries} must not be negative")
        thread_count(self.threads)
        check_executor(self.executor, workers=self.workers, address=self.address, runs=not self.dry_run)

    @property
    def filter(self) -> Filter:
        data = _pairs("data", self.data)
        for name in data:
            lookup("data", name, [*DOMAINS, *NAMED_DATA])
        chosen = {"domains": self.domains, "tasks": self.tasks, "methods": self.methods}
        return Filter(**chosen, data=data, settings=settings_of(self.set))

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / "reproduce" / self.preset

    @property
    def results(self) -> Results:
        return Results(self.folder, self.runs)


def settings_of(texts: Sequence[str]) -> dict[str, Any]:
    """Parse texts FIELD=VALUE, with values in JSON."""
    return {name: _json(name, value) for name, value in _pairs("set", texts).items()}


def _pairs(flag: str, texts: Sequence[str]) -> dict[str, str]:
    """Parse texts NAME=VALUE; a name may occur only once."""
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"{flag} {shown(text)} must be NAME=VALUE")
        if values.setdefault(name, value) != value:
            raise ValueError(f"{flag} {shown(name)} is given twice: {shown(values[name])} and {shown(value)}")
    return values


def _json(name: str, value: str) -> Any:
    try:
        return parse_json(value, name)
    except ValueError:
        raise ValueError(
            f"set {name}={shown(value)}: the value must be JSON, such as 0.5, true or '\"text\"'"
        ) from None
