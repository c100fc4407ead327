"""What can be asked of a study: the flags of `uat reproduce` and of `python -m uat.paper.studies`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from uat.config import PRESETS, lookup
from uat.domains import DOMAINS
from uat.files import parse_json
from uat.methods import METHODS
from uat.paper.studies.cells import Filter
from uat.paper.studies.executors import need_ray
from uat.paper.studies.files import Results
from uat.paper.studies.grids import NAMED_DATA, STUDIES
from uat.settings import shown
from uat.threads import thread_count


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Run a study of the paper: train and score its cells, skipping those that are done, and write rows."""

    study: str
    """main, ablation, boundary, mechanism, sensitivity, efficiency, diagnostics, or all."""
    preset: str = "quick"
    """smoke (seconds a cell), quick (minutes on two cores) or paper (the published settings)."""
    domains: tuple[str, ...] = ()
    """Only these domains; unset: all."""
    tasks: tuple[str, ...] = ()
    """Only these tasks; unset: all."""
    methods: tuple[str, ...] = ()
    """Only these methods; unset: all."""
    seeds: tuple[int, ...] = ()
    """Seeds of every cell; unset: 0 1 2 with the paper preset, 0 otherwise."""
    data: tuple[str, ...] = ()
    """Your own data in place of the embedded ones, as DOMAIN=PATH; hsi=PATH is the market of the gate's figure."""
    set: tuple[str, ...] = ()
    """Settings of every cell beside the study's, as FIELD=VALUE with a JSON value."""
    out: Path | None = None
    """Folder of results; unset: runs/reproduce/PRESET. The same folder again goes on where it stopped."""
    runs: Path | None = None
    """Folder of the run folders; unset: OUT/runs."""
    executor: Literal["local", "ray"] = "local"
    """Who does the work: processes on this machine, or a Ray cluster."""
    workers: int | None = None
    """How many cells at a time; unset: one for each GPU, or for each core without one."""
    address: str | None = None
    """Address of a running Ray cluster; unset: a small one on this machine."""
    retries: int = 0
    """How often a cell that fails is tried again at once; a later run tries it again in any case."""
    device: str | None = None
    """Where to run, cpu or cuda; unset: CUDA if there is one."""
    threads: int | None = None
    """CPU threads of each worker; unset: UAT_THREADS, or one."""
    dry_run: bool = False
    """List the cells and about how long they take, and stop."""
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
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers={self.workers} must be at least 1")
        if self.retries < 0:
            raise ValueError(f"retries={self.retries} must not be negative")
        thread_count(self.threads)
        if self.address is not None and self.executor != "ray":
            raise ValueError(f"address={self.address!r} is for --executor ray")
        if self.executor == "ray" and not self.dry_run:
            need_ray()

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
    """FIELD=VALUE, the value as JSON."""
    return {name: _json(name, value) for name, value in _pairs("set", texts).items()}


def _pairs(flag: str, texts: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE, each name once."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"{flag} {shown(text)} must be NAME=VALUE")
        if found.setdefault(name, value) != value:
            raise ValueError(f"{flag} {shown(name)} is given twice: {shown(found[name])} and {shown(value)}")
    return found


def _json(name: str, value: str) -> Any:
    try:
        return parse_json(value, name)
    except ValueError:
        raise ValueError(
            f"set {name}={shown(value)}: the value must be JSON, such as 0.5, true or '\"text\"'"
        ) from None
