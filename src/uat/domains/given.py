"""Domains that are passed as objects: their description in a run's config, and how a run finds them again.

A config names a registered domain by its name. It names a domain by the address of its class, `python:module:Class`, if
the class can be imported and built from the config. Any other object is described by its class and its settings; to
open such a run in another process, pass the object again.
"""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from typing import Any

from uat.domains.domain import Domain
from uat.domains.entry import settings_held
from uat.settings import check_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectConfig:
    """Description, in a run's config, of a domain that was passed as an object."""

    type: str = ""
    """Module and name of the domain's class."""
    task: str = "default"
    """Task that the domain trains and evaluates."""
    setting: str = "default"
    """The domain's own text of the settings that differ from its defaults."""
    spec: str = ""
    """`repr` of the domain's spec."""
    settings: str = ""
    """`repr` of the domain's `config`, if that is a dataclass."""

    def __post_init__(self) -> None:
        check_fields(self, "domain.")


_OBJECTS: dict[ObjectConfig, Any] = {}
"""Objects passed in this process. Of two objects with the same description, the later one is kept."""


def remember(domain: Domain) -> tuple[str, ObjectConfig]:
    """Keep an object for `recall`, and return its name and its description."""
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
    """Return the object of a description."""
    if config not in _OBJECTS:
        raise ValueError(
            f"the domain of this run was an object of the class {config.type}: pass it again (in Python domain=...)"
        )
    return _OBJECTS[config]
