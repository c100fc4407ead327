"""An entry of the registry of domains, and how one is made of somebody's class or function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from typing import Any, get_type_hints

from uat.data.contents import checksum
from uat.domains.domain import Domain
from uat.settings import check_settings_class, first_sentence, shown


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
    recipes: str | None = None
    """A module whose RECIPES has the domain's published settings by the domain's name; None: there are none."""

    def content(self, config: Any) -> dict[str, str]:
        """What stands for the files of a config in the identity of a run; folders, and other kinds, count by name."""
        named = {name: getattr(config, name) for name in self.files}
        return {name: found for name, path in named.items() if path and (found := checksum(path))}


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
    kind = settings_of(maker)
    about = {"tasks": tasks_of(maker), "summary": first_sentence(maker)}
    if kind is None:
        return DomainEntry(build=WithoutSettings(maker), config=NoSettings, **about)
    return DomainEntry(build=maker, config=kind, **about)


@dataclass(frozen=True, slots=True)
class WithoutSettings:
    """Builds a domain that takes nothing."""

    maker: Callable[[], Any]

    def __call__(self, config: NoSettings) -> Any:
        return self.maker()


def tasks_of(maker: Callable[..., Any]) -> tuple[str, ...]:
    """The tasks that a domain's class names; a function's domain has one."""
    return tuple(maker.train_tasks) if isinstance(maker, type) and issubclass(maker, Domain) else Domain.train_tasks


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


def rebuilds(entry: DomainEntry, domain: Domain) -> bool:
    """Whether the entry builds a domain like this one from the settings that the domain keeps as its `config`: its
    class takes nothing else."""
    kind, takes = type(domain), len(inspect.signature(type(domain)).parameters)
    if isinstance(entry.build, WithoutSettings):
        return entry.build.maker is kind and takes == 0
    return entry.build is kind and takes == 1 and type(settings_held(domain)) is entry.config


def settings_held(domain: Domain) -> Any:
    """The settings that a domain keeps as its `config`; None if it keeps none."""
    return vars(domain).get("config")
