"""Domains: one file or folder is one column of the table."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, get_type_hints

from uat.data.contents import checksum
from uat.domains.darkroom import DarkRoom, DarkRoomConfig
from uat.domains.domain import Domain, Split, split_seed
from uat.domains.markets import Markets, MarketsConfig
from uat.domains.movielens import MovieLens, MovieLensConfig
from uat.domains.sepsis import Sepsis, SepsisConfig
from uat.registry import Registry
from uat.settings import check_settings_class, checked, first_sentence, shown

__all__ = [
    "DOMAINS",
    "Domain",
    "DomainEntry",
    "NoSettings",
    "Split",
    "register_domain",
    "split_seed",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainEntry:
    """An entry of the registry: how to build the domain from its config."""

    build: Callable[[Any], Domain]
    config: type[Any]
    tasks: tuple[str, ...]
    summary: str
    task_field: str | None = None
    """The setting that chooses the task; None: there is one task."""
    revision: int = 1
    """Raised when the same config starts to mean other worlds, metrics or references."""
    files: tuple[str, ...] = ()
    """Settings that name files of a user's."""

    def content(self, config: Any) -> dict[str, str]:
        """What stands for the files of a config in the identity of a run; folders, and other kinds, count by name."""
        named = {name: getattr(config, name) for name in self.files}
        return {name: found for name, path in named.items() if path and (found := checksum(path))}


OWN: dict[str, DomainEntry] = {
    "darkroom": DomainEntry(
        build=DarkRoom,
        config=DarkRoomConfig,
        tasks=DarkRoom.train_tasks,
        summary="a grid with a hidden goal that moves from episode to episode",
        task_field="domain.schedule",
    ),
    "sepsis": DomainEntry(
        build=Sepsis,
        config=SepsisConfig,
        tasks=Sepsis.train_tasks,
        summary="treatment whose effect depends on a hidden regime that changes within the episode",
        files=("cohort",),
        revision=2,
    ),
    "markets": DomainEntry(
        build=Markets,
        config=MarketsConfig,
        tasks=Markets.train_tasks,
        summary="portfolios of stocks in several markets whose regimes change",
        revision=2,
        files=("data",),
    ),
    "movielens": DomainEntry(
        build=MovieLens,
        config=MovieLensConfig,
        tasks=MovieLens.train_tasks,
        summary="recommendation from logs in which rewards of a hidden preference come late",
        files=("path",),
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class NoSettings:
    """The settings of a domain that has none."""


def as_entry(value: Any) -> DomainEntry:
    """The entry that a package offers: a `DomainEntry`, or a class or function that makes the domain.

    It takes nothing, or one argument whose annotation is a dataclass of settings.
    """
    if isinstance(value, DomainEntry):
        check_settings_class(value.config, "config")
        return value
    if not callable(value):
        raise TypeError(f"expected a class or function that makes a domain, or a uat.DomainEntry, got {shown(value)}")
    maker: Callable[..., Any] = value
    if (kind := settings_of(maker)) is not None:
        return DomainEntry(build=maker, config=kind, tasks=tasks_of(maker), summary=first_sentence(maker))
    return DomainEntry(
        build=lambda config: maker(), config=NoSettings, tasks=tasks_of(maker), summary=first_sentence(maker)
    )


def tasks_of(maker: Callable[..., Any]) -> tuple[str, ...]:
    """The tasks that a domain's class names; a function's domain has one."""
    classes = inspect.getmro(maker) if isinstance(maker, type) else ()
    return next((tuple(vars(kind)["train_tasks"]) for kind in classes if "train_tasks" in vars(kind)), ("default",))


def settings_of(maker: Callable[..., Any]) -> type | None:
    """The class of settings that a domain's class or function takes; None: it takes nothing."""
    takes = list(inspect.signature(maker).parameters.values())
    needed = [p for p in takes if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(needed) > 1:
        raise TypeError(
            f"{shown(maker)} takes {len(needed)} arguments ({', '.join(p.name for p in needed)}): a domain that is "
            "built by name takes none, or one dataclass of settings"
        )
    try:
        hints = get_type_hints(maker.__init__ if isinstance(maker, type) else maker)
    except Exception as error:  # names that only a type checker can see
        raise TypeError(f"{shown(maker)}: the annotations of its arguments cannot be read: {error}") from None
    kind = hints.get(takes[0].name) if takes else None
    if isinstance(kind, type) and is_dataclass(kind):
        check_settings_class(kind, takes[0].name)
        return kind
    if needed:
        raise TypeError(f"{shown(maker)}: annotate {needed[0].name} with the dataclass of its settings")
    return None


DOMAINS: Registry[DomainEntry] = Registry("domain", "uat.domains", OWN, as_entry)
"""Every domain: uat's own, those that a program registers, and those that installed packages offer."""


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
    """Make a class or function a domain: a row of `uat list`, and a name for `uat.train` and the command line.

    config: a frozen dataclass of settings with defaults, which `build` takes; unset: the annotation of its argument.
    tasks, task_field: the tasks, and the setting such as "domain.schedule" that chooses one; unset: there is one task.
    summary: a line for `uat list`; unset: the first line of the docstring.
    revision, files: see `DomainEntry`.

    Registering the same code under the same name again, as a notebook's cell does, replaces the entry.
    """
    found = (
        as_entry(build) if config is None else DomainEntry(build=build, config=config, tasks=("default",), summary="")
    )
    check_settings_class(found.config, "config")
    entry = replace(
        found,
        tasks=found.tasks if tasks is None else checked(tasks, tuple[str, ...], "tasks"),
        summary=first_sentence(build) if summary is None else checked(summary, str, "summary"),
        task_field=checked(task_field, str | None, "task_field"),
        revision=checked(revision, int, "revision"),
        files=checked(files, tuple[str, ...], "files"),
    )
    DOMAINS.register(name, entry, owner=build.__module__, identity=(build.__module__, build.__qualname__))
    return entry
