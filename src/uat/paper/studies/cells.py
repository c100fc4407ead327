"""What a study asks for: cells, each one method in one task, under one setting and one seed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from uat.config import RunConfig, override, setting_names
from uat.domains import DOMAINS
from uat.files import safe_name
from uat.methods import METHODS, training_name
from uat.recipes import recipe

SEEDS: dict[str, tuple[int, ...]] = {"smoke": (0,), "quick": (0,), "paper": (0, 1, 2)}
"""Seeds of a preset, unless others are asked for."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training and what is measured of it."""

    config: RunConfig
    task: str
    settings: tuple[tuple[str, Any], ...] = ()
    """What differs from the recipe, beside the task."""
    probes: frozenset[str] = frozenset()
    """What is looked at beside the scores; see `uat.paper.studies.probes`."""
    scored: bool = True
    """False: a training that another cell takes over, and nobody asked about."""

    @cached_property
    def identity(self) -> str:
        return self.config.identity()

    @property
    def name(self) -> str:
        """Of its run folder: readable, and one for each cell of a preset."""
        c = self.config
        changed = "".join(f"-{_short(name)}={_plain(value)}" for name, value in self.settings)
        return safe_name(f"{c.domain_name}-{self.task}-{c.method_name}-{c.seed}{changed}", most=240)

    def folder(self, runs: Path) -> Path:
        return runs / self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Tasks x methods of one domain, under some settings beside the recipe's."""

    domain: str
    methods: Callable[[str], bool]
    """Which of the methods that serve the domain."""
    tasks: tuple[str, ...] | None = None
    """None: all."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    """What the settings are called in tables and figures."""
    probes: frozenset[str] = frozenset()
    """What is looked at beside the scores."""
    data: str | None = None
    """The name under which a user may give data for it; None: the domain's."""
    on_data: Mapping[str, Any] = field(default_factory=dict)
    """Settings beside these where the user gave such data."""

    def missing(self) -> str | None:
        """Why this version cannot run it; None if it can."""
        if self.domain not in DOMAINS:
            return f"the domain {self.domain} is not there yet"
        known = setting_names(recipe(self.domain, "uat", "smoke"))
        absent = [name for name in {**self.settings, **self.on_data} if name not in known]
        return f"{self.domain} has no setting {absent[0]}" if absent else None

    def cells(self, preset: str, seeds: Sequence[int], chosen: Filter) -> list[Cell]:
        if self.missing():
            return []
        names = dict.fromkeys([*METHODS.own, *chosen.methods])  # somebody else's methods join where they are named
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
    """Which part of a study is wanted; where nothing is named, all of it."""

    domains: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    data: Mapping[str, str] = field(default_factory=dict)
    """Domain, or name of a sweep's data -> where the user's data are."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of every cell beside the study's."""

    def data_setting(self, domain: str, name: str | None) -> dict[str, Any]:
        given = self.data.get(name or domain)
        return {} if given is None else {f"domain.{data_field(domain)}": given}

    def wants_task(self, domain: str, task: str) -> bool:
        return (not self.domains or domain in self.domains) and (not self.tasks or task in self.tasks)

    def wants_method(self, method: str) -> bool:
        return not self.methods or method in self.methods


DATA_FIELDS = ("data", "path", "cohort")
"""What domains call the setting that says where a user's data are."""


def data_field(domain: str) -> str:
    known = {item.name for item in fields(DOMAINS[domain].config)}
    found = next((name for name in DATA_FIELDS if name in known), None)
    if found is None:
        raise ValueError(f"{domain} reads no data: it is all simulated")
    return found


def build_cell(
    domain: str,
    task: str,
    method: str,
    preset: str,
    seed: int,
    settings: Mapping[str, Any],
    probes: frozenset[str] = frozenset(),
) -> Cell:
    """A cell; settings that are meant for another method's config are left out."""
    config = recipe(domain, method, preset, seed=seed)
    known = setting_names(config)
    own = {name: value for name, value in settings.items() if name in known or not name.startswith("method.")}
    own = {name: value for name, value in own.items() if override(config, {name: value}) != config}
    chooses = {field: task} if (field := DOMAINS[domain].task_field) else {}
    return Cell(
        config=override(config, {**own, **chooses}), task=task, settings=tuple(sorted(own.items())), probes=probes
    )


def merged(cells: Iterable[Cell]) -> list[Cell]:
    """Each training once, though several studies ask for it; with all that any of them looks at."""
    found: dict[str, Cell] = {}
    for cell in cells:
        old = found.get(cell.identity)
        found[cell.identity] = cell if old is None else replace(old, probes=old.probes | cell.probes)
    return list(found.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Cells that one worker does together: seeds that train side by side, and methods that take over their weights."""

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
    """What can be done independently of each other; with `seeds_together`, seeds are not taken apart."""
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
    """The cell whose training gives this one its weights: most often itself."""
    c = cell.config
    name = training_name(c.method_name)
    if name == c.method_name:
        return cell
    made = build_cell(c.domain_name, cell.task, name, c.preset, c.seed, dict(cell.settings))
    return replace(made, scored=False)


def _short(name: str) -> str:
    return name.split(".", 1)[1] if name.startswith(("method.", "domain.")) else name


def _plain(value: Any) -> str:
    text = Path(value).stem if isinstance(value, str) and "/" in value else str(value)
    return re.sub(r"[^A-Za-z0-9.+]+", "+", text).strip("+")
