"""Entries of the registry of domains, and how a user's class or function becomes one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
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
    """Setting that chooses the task; None: there is only one task."""
    revision: int = 1
    """Revision, raised when worlds, metrics or references change under the same config."""
    files: tuple[str, ...] = ()
    """Settings that are paths of a user's files."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of every run in the domain that differ from the defaults."""
    objective: str = "imitation"
    """Name of the objective by which policies learn in the domain unless another is named."""
    settle: Callable[[Any], Any] | None = None
    """Fill settings that depend on the worlds and are unset, once, before a training; None: no setting does."""
    digest: Callable[[str], str | None] = checksum
    """Checksum of the contents of a user's file; None: the path enters the identity of a run by name."""
    short_flags: tuple[str, ...] = ()
    """Settings that the command line also takes without the prefix `domain.`."""
    known_as: Callable[[str], tuple[str, Any]] | None = None
    """Return the name in configs, and the settings, for which a user's name stands; None: the name itself."""
    check: Callable[[Any], Any] | None = None
    """Check the data of a config for `uat data check`; None: see `uat.data.SOURCES`."""
    recipes: str | None = None
    """Module whose RECIPES maps the domain's name to published settings; None: use the default recipes."""

    def content(self, config: Any) -> dict[str, str]:
        """Return checksums of a config's files for the identity of a run; those without one enter by name."""
        named = {name: getattr(config, name) for name in self.files}
        return {name: digest for name, path in named.items() if path and (digest := self.digest(path))}


@dataclass(frozen=True, kw_only=True, slots=True)
class NoSettings:
    """Settings of a domain without settings."""


def as_entry(value: Any) -> DomainEntry:
    """Return the entry of an object that a package offers: a `DomainEntry`, or a class or function that makes a domain.

    The class or function takes no argument, or one whose annotation is a dataclass of settings.
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
    """Builds a domain whose class or function takes no argument."""

    maker: Callable[[], Any]

    def __call__(self, config: NoSettings) -> Any:
        return self.maker()


def tasks_of(maker: Callable[..., Any]) -> tuple[str, ...]:
    """Return the tasks of a domain's class; the domain of a function has one task."""
    return tuple(maker.train_tasks) if isinstance(maker, type) and issubclass(maker, Domain) else Domain.train_tasks


def settings_of(maker: Callable[..., Any]) -> type | None:
    """Return the class of settings that a domain's class or function takes; None: it takes no argument."""
    takes = list(inspect.signature(maker).parameters.values())
    needed = [p for p in takes if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(needed) > 1:
        raise TypeError(
            f"{shown(maker)} takes {len(needed)} arguments ({', '.join(p.name for p in needed)}): a domain that is "
            "built by name takes none, or one dataclass of settings"
        )
    try:
        hints = get_type_hints(maker.__init__ if isinstance(maker, type) else maker)
    except Exception as error:  # such as names imported for type checkers alone
        raise TypeError(f"{shown(maker)}: the annotations of its arguments cannot be read: {error}") from None
    kind = hints.get(takes[0].name) if takes else None
    if isinstance(kind, type) and is_dataclass(kind):
        check_settings_class(kind, takes[0].name)
        return kind
    if needed:
        raise TypeError(f"{shown(maker)}: annotate {needed[0].name} with the dataclass of its settings")
    return None


def rebuilds(entry: DomainEntry, domain: Domain) -> bool:
    """Whether the entry can rebuild this domain from its `config` alone, because its class takes no other argument."""
    kind, takes = type(domain), len(inspect.signature(type(domain)).parameters)
    if isinstance(entry.build, WithoutSettings):
        return entry.build.maker is kind and takes == 0
    return entry.build is kind and takes == 1 and type(settings_held(domain)) is entry.config


def settings_held(domain: Domain) -> Any:
    """Return the settings that a domain keeps as its `config`; None if it has none."""
    return vars(domain).get("config")
