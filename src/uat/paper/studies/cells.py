"""The cells of a study: each is one method in one task, with one setting and one seed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from uat.config import RunConfig, current_name, oldest_name, override, setting_names
from uat.domains import DOMAINS
from uat.files import safe_name
from uat.methods import METHODS, training_name
from uat.recipes import recipe

SEEDS: dict[str, tuple[int, ...]] = {"smoke": (0,), "quick": (0,), "paper": (0, 1, 2)}
"""Default seeds of each preset."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training, with its measurements."""

    config: RunConfig
    task: str
    settings: tuple[tuple[str, Any], ...] = ()
    """Differences from the recipe, apart from the task."""
    probes: frozenset[str] = frozenset()
    """Analyses in addition to the scores; see `uat.paper.studies.probes`."""
    scored: bool = True
    """Whether the cell is scored; False for a training that only provides weights for another cell."""

    @cached_property
    def identity(self) -> str:
        return self.config.identity()

    @property
    def name(self) -> str:
        """Name of the cell's run folder: readable, and unique within a preset."""
        c = self.config
        changed = "".join(f"-{_short(oldest_name(c, name))}={_plain(value)}" for name, value in self.settings)
        return safe_name(f"{c.domain_name}-{self.task}-{c.method_name}-{c.seed}{changed}", most=240)

    def folder(self, runs: Path) -> Path:
        return runs / self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """All tasks and methods of one domain, with some settings that differ from the recipe."""

    domain: str
    methods: Callable[[str], bool]
    """Selects among the methods that support the domain."""
    tasks: tuple[str, ...] | None = None
    """Tasks of the domain; None means all."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    """Name of the settings in tables and figures."""
    probes: frozenset[str] = frozenset()
    """Analyses in addition to the scores."""
    data: str | None = None
    """Name under which a user can supply data for this sweep; None means the domain's name."""
    on_data: Mapping[str, Any] = field(default_factory=dict)
    """Additional settings if the user supplies such data."""

    def missing(self) -> str | None:
        """Why this version cannot run the sweep; None if it can."""
        if self.domain not in DOMAINS:
            return f"the domain {self.domain} is not available yet"
        config = recipe(self.domain, "uat", "smoke")
        known = setting_names(config)
        absent = [name for name in {**self.settings, **self.on_data} if current_name(config, name) not in known]
        return f"{self.domain} has no setting {absent[0]}" if absent else None

    def cells(self, preset: str, seeds: Sequence[int], chosen: Filter) -> list[Cell]:
        if self.missing():
            return []
        names = dict.fromkeys([*METHODS.own, *chosen.methods])  # methods of other packages take part if they are named
        methods = [m for m in names if METHODS[m].serves(self.domain) and self.methods(m)]
        tasks = self.tasks if self.tasks is not None else DOMAINS[self.domain].tasks
        given = chosen.data_setting(self.domain, self.data)
        settings = {**self.settings, **(self.on_data if given else {}), **chosen.settings, **given}
        return [
            build_cell(self.domain, task, method, preset, seed, settings, self.probes)
            for task in tasks
            if chosen.wants_task(self.domain, task)
            for method in methods
            if chosen.wants_method(method)
            for seed in seeds
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """The selected part of a study. Empty fields select everything."""

    domains: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    data: Mapping[str, str] = field(default_factory=dict)
    """Domain, or name of a sweep's data -> path of the user's data."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Additional settings of every cell."""

    def data_setting(self, domain: str, name: str | None) -> dict[str, Any]:
        given = self.data.get(name or domain)
        return {} if given is None else {f"domain.{data_field(domain)}": given}

    def wants_task(self, domain: str, task: str) -> bool:
        return (not self.domains or domain in self.domains) and (not self.tasks or task in self.tasks)

    def wants_method(self, method: str) -> bool:
        return not self.methods or method in self.methods


DATA_FIELDS = ("data", "path", "cohort")
"""Names that domains give to the setting with the path of a user's data."""


def data_field(domain: str) -> str:
    known = {item.name for item in fields(DOMAINS[domain].config)}
    name = next((name for name in DATA_FIELDS if name in known), None)
    if name is None:
        raise ValueError(f"{domain} reads no data, since it is simulated: remove data={domain}=PATH")
    return name


def build_cell(
    domain: str,
    task: str,
    method: str,
    preset: str,
    seed: int,
    settings: Mapping[str, Any],
    probes: frozenset[str] = frozenset(),
) -> Cell:
    """Build a cell; settings that its method's config does not have are ignored."""
    config = recipe(domain, method, preset, seed=seed)
    settings = {current_name(config, name): value for name, value in settings.items()}
    known = setting_names(config)
    own = {name: value for name, value in settings.items() if name in known or not name.startswith("method.")}
    own = {name: value for name, value in own.items() if override(config, {name: value}) != config}
    chooses = {field: task} if (field := DOMAINS[domain].task_field) else {}
    return Cell(
        config=override(config, {**own, **chooses}), task=task, settings=tuple(sorted(own.items())), probes=probes
    )


def merged(cells: Iterable[Cell]) -> list[Cell]:
    """Merge cells with the same training, which several studies may share, and unite their probes."""
    unique: dict[str, Cell] = {}
    for cell in cells:
        old = unique.get(cell.identity)
        unique[cell.identity] = cell if old is None else replace(old, probes=old.probes | cell.probes)
    return list(unique.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Cells that one worker runs together: seeds that train side by side, and methods that start from their weights."""

    cells: tuple[Cell, ...]

    @property
    def name(self) -> str:
        first, seeds = self.cells[0], sorted({cell.config.seed for cell in self.cells})
        methods = ", ".join(dict.fromkeys(cell.config.method_name for cell in self.cells if cell.scored))
        changed = " ".join(f"{_short(name)}={value}" for name, value in first.settings)
        where = f"{first.config.domain_name}/{first.task}"
        return " ".join(part for part in (where, methods, changed, f"seed {', '.join(map(str, seeds))}") if part)

    @property
    def owners(self) -> list[Cell]:
        """Cells with a training of their own."""
        return [cell for cell in self.cells if training_name(cell.config.method_name) == cell.config.method_name]


def jobs(cells: Iterable[Cell], *, seeds_together: bool) -> list[Job]:
    """Group cells into independent jobs; `seeds_together` keeps all seeds of a training in one job."""
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        c, source = cell.config, source_of(cell)
        seed = None if seeds_together else c.seed
        key = (source.config.kind(), seed)
        group = groups.setdefault(key, [])
        if source.identity not in {one.identity for one in group}:
            group.append(source)
        if source.identity != cell.identity:
            group.append(cell)
        else:
            group[[one.identity for one in group].index(cell.identity)] = cell
    return [Job(cells=tuple(group)) for group in groups.values()]


def source_of(cell: Cell) -> Cell:
    """The cell whose training provides this cell's weights, usually the cell itself."""
    c = cell.config
    name = training_name(c.method_name)
    if name == c.method_name:
        return cell
    source = build_cell(c.domain_name, cell.task, name, c.preset, c.seed, dict(cell.settings))
    return replace(source, scored=False)


def _short(name: str) -> str:
    return name.split(".", 1)[1] if name.startswith(("method.", "domain.")) else name


def _plain(value: Any) -> str:
    text = Path(value).stem if isinstance(value, str) and "/" in value else str(value)
    return re.sub(r"[^A-Za-z0-9.+]+", "+", text).strip("+")
