"""Domains: each file or folder is one column of the paper's main table."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from uat.domains.darkroom import DarkRoom, DarkRoomConfig
from uat.domains.domain import Domain, Split, split_seed
from uat.domains.entry import DomainEntry, NoSettings, as_entry, rebuilds, settings_held
from uat.domains.given import ObjectConfig, recall, remember
from uat.domains.markets import Markets, MarketsConfig
from uat.domains.movielens import MovieLens, MovieLensConfig
from uat.domains.rule import Rule, RuleConfig
from uat.domains.sepsis import Sepsis, SepsisConfig
from uat.registry import Registry, can_be_imported, is_address
from uat.settings import check_settings_class, checked, first_sentence

__all__ = [
    "DOMAINS",
    "Domain",
    "DomainEntry",
    "NoSettings",
    "Split",
    "known_as",
    "register_domain",
    "split_seed",
]


OWN: dict[str, DomainEntry] = {
    "darkroom": DomainEntry(
        build=DarkRoom,
        config=DarkRoomConfig,
        tasks=DarkRoom.train_tasks,
        summary="a grid with a hidden goal that moves from episode to episode",
        recipes="uat.paper.recipes",
        task_field="domain.schedule",
    ),
    "sepsis": DomainEntry(
        build=Sepsis,
        config=SepsisConfig,
        tasks=Sepsis.train_tasks,
        summary="treatment whose effect depends on a hidden regime that changes within the episode",
        recipes="uat.paper.recipes",
        task_field="domain.task",
        files=("cohort",),
        revision=2,
    ),
    "markets": DomainEntry(
        build=Markets,
        config=MarketsConfig,
        tasks=Markets.train_tasks,
        summary="portfolios of stocks in several markets whose regimes change",
        recipes="uat.paper.recipes",
        revision=2,
        files=("data",),
    ),
    "movielens": DomainEntry(
        build=MovieLens,
        config=MovieLensConfig,
        tasks=MovieLens.train_tasks,
        summary="recommendation from logs in which rewards of a hidden preference come late",
        recipes="uat.paper.recipes",
        files=("path",),
    ),
    "rule": DomainEntry(
        build=Rule,
        config=RuleConfig,
        tasks=Rule.train_tasks,
        summary="a contextual bandit with a hidden rule that shows through rewards alone",
        recipes="uat.paper.recipes",
        task_field="domain.task",
    ),
}


DOMAINS: Registry[DomainEntry] = Registry(
    "domain",
    "uat.domains",
    OWN,
    as_entry,
    schemes={"gym": "uat.adapters.gymnasium:entry_of", "logs": "uat.adapters.logs:entry_of"},
)
"""All domains: uat's own, those that a program registers, and those that installed packages offer."""


def register_domain(
    name: str,
    build: Callable[..., Domain],
    config: type[Any] | None = None,
    *,
    tasks: tuple[str, ...] | None = None,
    summary: str | None = None,
    task_field: str | None = None,
    revision: int = 1,
    files: tuple[str, ...] = (),
) -> DomainEntry:
    """Register a class or function as a domain, for `uat list`, `uat.train` and the command line.

    config: a frozen dataclass of settings with defaults, which `build` takes; unset: the annotation of its argument.
    tasks, task_field: the tasks, and the setting such as "domain.schedule" that chooses one; unset: only one task.
    summary: a line for `uat list`; unset: the first line of the docstring.
    revision, files: see `DomainEntry`.

    Registering the same code again under the same name, as a notebook cell does, replaces the entry.
    """
    base = (
        as_entry(build) if config is None else DomainEntry(build=build, config=config, tasks=("default",), summary="")
    )
    check_settings_class(base.config, "config")
    entry = replace(
        base,
        tasks=base.tasks if tasks is None else checked(tasks, tuple[str, ...], "tasks"),
        summary=first_sentence(build) if summary is None else checked(summary, str, "summary"),
        task_field=checked(task_field, str | None, "task_field"),
        revision=checked(revision, int, "revision"),
        files=checked(files, tuple[str, ...], "files"),
    )
    DOMAINS.register(name, entry, owner=build.__module__, identity=(build.__module__, build.__qualname__))
    return entry


def adapted(value: Any) -> Domain | None:
    """Return the domain of a Gymnasium environment, a vector of them, or a factory; None for any other value."""
    return importlib.import_module("uat.adapters.gymnasium").domain_of(value)


def as_domain(value: Any, name: str) -> Domain:
    """Return a domain object, or that of an environment; raise a ValueError that names the argument otherwise."""
    return value if isinstance(value, Domain) else adapted(value) or checked(value, Domain, name)


def known_as(domain: Any) -> tuple[str, Any]:
    """Return the name of a domain in configs, and its settings; None stands for those of its recipe.

    domain: a name, an address, whose code is imported because the caller named it, or an object: a domain, or a
        Gymnasium environment, a vector of them, or a factory.
    """
    if isinstance(domain, str):
        if is_address(domain):
            DOMAINS.adopt(domain)
        elif ":" in domain and domain in DOMAINS and (known := DOMAINS[domain].known_as) is not None:
            return known(domain)
        return domain, None
    domain = as_domain(domain, "domain")
    if domain.registered is not None:
        return domain.registered
    DOMAINS.offered_as(type(domain))  # loads the package that offers it, if there is one
    for name, entry in DOMAINS.loaded().items():
        if rebuilds(entry, domain):
            return name, settings_held(domain) or NoSettings()
    if can_be_imported(type(domain)):
        with contextlib.suppress(ValueError, TypeError):  # the class may take arguments that a config cannot hold
            if rebuilds(as_entry(type(domain)), domain):
                return DOMAINS.name_of(type(domain)), settings_held(domain) or NoSettings()
    name, described = remember(domain)
    DOMAINS[name] = DomainEntry(
        build=recall, config=ObjectConfig, tasks=(described.task,), summary=first_sentence(type(domain))
    )
    return name, described
