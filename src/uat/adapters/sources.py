"""Sources of environments: an id of Gymnasium's registry, a factory, or an environment that is copied.

A source is called to make one more environment. Sources are sent to worker processes, and need no torch.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from uat.registry import import_package, split_packaged
from uat.settings import shown

INSTALL = "pip install 'uat-transformer[gym]'"


def imported_gymnasium() -> Any:
    """Return the module `gymnasium`; raise a ValueError that says how to install it."""
    try:
        return importlib.import_module("gymnasium")
    except ModuleNotFoundError as error:
        if error.name != "gymnasium":
            raise
        raise ValueError(f"domains of the name gym:... need gymnasium: {INSTALL}") from None


@dataclass(frozen=True, slots=True)
class Registered:
    """Makes the environment of an id, such as `CartPole-v1`."""

    name: str
    """The domain's name, `gym:ID` or `gym:PACKAGE:ID`."""
    arguments: str = "{}"
    """Arguments of the environment as JSON."""

    @property
    def label(self) -> str:
        return self.name

    def __call__(self) -> Any:
        package, env_id = split_packaged(self.name)
        if package:
            import_package(package, self.name)
        arguments: Mapping[str, Any] = json.loads(self.arguments)
        try:
            return imported_gymnasium().make(env_id, disable_env_checker=True, **arguments)
        except Exception as error:  # an environment may raise anything
            given = f" with the arguments {self.arguments}" if arguments else ""
            raise ValueError(f"{self.name} cannot be made{given}: {in_words(error)}") from error


@dataclass(frozen=True, slots=True)
class Factory:
    """Calls a function that makes an environment."""

    label: str
    make: Callable[[], Any]

    def __call__(self) -> Any:
        try:
            env = self.make()
        except Exception as error:
            raise ValueError(f"the factory {self.label} raised {in_words(error)}") from error
        if not isinstance(env, imported_gymnasium().Env):
            raise ValueError(f"the factory {self.label} must return a gymnasium.Env, got {shown(env)}")
        return env


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies an environment."""

    label: str
    env: Any

    def __call__(self) -> Any:
        try:
            return copy.deepcopy(self.env)
        except Exception as error:
            raise ValueError(
                f"{self.label} cannot be copied ({in_words(error)}), and every stream needs an environment of its own: "
                "pass a factory, such as lambda: MyEnv()"
            ) from None


@dataclass(frozen=True, slots=True)
class GivenVector:
    """A vector of environments, which steps all of them itself."""

    label: str
    vector: Any


def unshared_spec(source: Any) -> Any:
    """Return the registry's entry of an id that the user's own program may have registered; None if there is none."""
    if not isinstance(source, Registered) or split_packaged(source.name)[0]:
        return None
    return imported_gymnasium().registry.get(split_packaged(source.name)[1])


def share_spec(spec: Any) -> None:
    """Add an entry of another process's registry, unless this one has it."""
    if spec is not None:
        imported_gymnasium().registry.setdefault(spec.id, spec)


Source = Registered | Factory | Copies | GivenVector


def in_words(error: BaseException) -> str:
    """Return the type and the message of an error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200] or 'no message'}"


def check_registered(name: str) -> None:
    """Raise a ValueError with suggestions unless Gymnasium knows the id of a domain `gym:ID` or `gym:PACKAGE:ID`."""
    package, env_id = split_packaged(name)
    gymnasium = imported_gymnasium()
    try:
        gymnasium.spec(env_id)
    except Exception as error:  # Gymnasium has an error for each way of being unknown
        hint = _other_package(env_id) if not package else None
        close = difflib.get_close_matches(env_id, list(gymnasium.registry), n=1)
        if hint is None and close:
            hint = f"did you mean gym:{f'{package}:' if package else ''}{close[0]}?"
        if hint is None:
            hint = "name the package that registers it: gym:PACKAGE:ID" if not package else in_words(error)
        raise ValueError(f"Gymnasium has no environment {env_id!r}; {hint}") from None


def _other_package(env_id: str) -> str | None:
    """Return a suggestion if an installed package has the name with which the id begins."""
    for end in ("/", "-"):
        head, found, _ = env_id.partition(end)
        package = head.lower().replace("-", "_")
        if found and package.isidentifier() and package != "gymnasium" and importlib.util.find_spec(package):
            return f"if the package {package} registers it, write gym:{package}:{env_id}"
    return None
