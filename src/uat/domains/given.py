"""Domains that are handed over as objects: what a run's config says of them, and how they are found again.

A registered domain is known by its name, and one whose class can be imported and built from what the config says by
its address, `python:module:Class`. Any other object is known by its class's name and a description; whoever opens its
runs in another process hands the object in again.
"""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from typing import Any

from uat.domains.domain import Domain
from uat.domains.entry import settings_held
from uat.settings import check_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectConfig:
    """What a run's config says of a domain that was handed over as an object."""

    type: str = ""
    """Module and name of its class."""
    task: str = "default"
    """The task that it trains and evaluates."""
    setting: str = "default"
    """Its own account of what differs from its defaults."""
    spec: str = ""
    """Its spec, as Python writes it."""
    settings: str = ""
    """Its `config`, as Python writes it, where that is a dataclass."""

    def __post_init__(self) -> None:
        check_fields(self, "domain.")


_OBJECTS: dict[ObjectConfig, Any] = {}
"""What was handed over in this process. Of two objects with one description the latest counts."""


def remember(domain: Domain) -> tuple[str, ObjectConfig]:
    """The name and the description under which an object is known in this process."""
    kind, settings = type(domain), settings_held(domain)
    described = ObjectConfig(
        type=f"{kind.__module__}:{kind.__qualname__}",
        task=domain.task,
        setting=domain.setting,
        spec=repr(domain.spec),
        settings=repr(settings) if is_dataclass(settings) else "",
    )
    _OBJECTS[described] = domain
    return f"object:{kind.__name__}", described


def recall(config: ObjectConfig) -> Any:
    """The object of a description."""
    if config not in _OBJECTS:
        raise ValueError(
            f"the domain of this run was an object of the class {config.type}: hand it in again (in Python domain=...)"
        )
    return _OBJECTS[config]
