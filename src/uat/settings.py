"""Check the types and bounds of settings.

A field's annotation declares both: `d_model: Width = 64` is a whole number from 1 to MOST_WIDTH. A dataclass of
settings calls `check_fields` when it is created; `checked` checks one value, such as a function's argument. The bounds
are far beyond any sensible use. They reject typing errors, infinities, and numbers that do not fit the types in which
they are used (float32, int64).
"""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import numbers
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal

MOST_WIDTH = 65_536
"""Limit of a layer's width."""
MOST_LAYERS = 1_000
MOST_STEPS = 1_000_000
"""Limit of an episode's steps."""
MOST_COUNT = 10_000_000
"""Limit of episodes, users, assets and other counts."""
MOST_EPISODES = 1_000_000
"""Limit of the episodes of a validation or an evaluation, each of which is played."""
MOST_EPOCHS = 1_000_000_000
LEAST_SCALE, MOST_SCALE = 1e-30, 1e12
"""Bounds of rates, factors and deviations, such that products with weights and rewards stay within float32."""


@dataclass(frozen=True, slots=True)
class Between:
    """The numbers from `low` to `high`, without NaN."""

    low: float
    high: float
    without_low: bool = False
    without_high: bool = False

    def holds(self, value: float) -> bool:
        above = self.low < value if self.without_low else self.low <= value
        return above and (value < self.high if self.without_high else value <= self.high)

    def __str__(self) -> str:
        """The bound in words, to follow "name=value": "must be at least 1 and at most 10"."""
        low, high = shown(self.low), shown(self.high)
        if self.low == LEAST_SCALE:
            return f"must be positive, from {low} to {high}"
        if self.without_low or self.without_high or self.low < 0 or self.high == 1:
            return f"must lie in {'(' if self.without_low else '['}{low}, {high}{')' if self.without_high else ']'}"
        return f"must {f'be at least {low}' if self.low else 'not be negative'} and at most {high}"


Seed = Annotated[int, Between(-(2**63), 2**63 - 1)]
Width = Annotated[int, Between(1, MOST_WIDTH)]
Layers = Annotated[int, Between(1, MOST_LAYERS)]
Steps = Annotated[int, Between(1, MOST_STEPS)]
Delay = Annotated[int, Between(0, MOST_STEPS)]
Count = Annotated[int, Between(1, MOST_COUNT)]
Episodes = Annotated[int, Between(1, MOST_EPISODES)]
Epochs = Annotated[int, Between(1, MOST_EPOCHS)]
Warmup = Annotated[int, Between(0, MOST_EPOCHS)]
Share = Annotated[float, Between(0, 1)]
Inner = Annotated[float, Between(0, 1, without_low=True, without_high=True)]
"""A share between 0 and 1, both excluded."""
Decay = Annotated[float, Between(0, 1, without_high=True)]
Scale = Annotated[float, Between(LEAST_SCALE, MOST_SCALE)]
"""A positive number."""
Amount = Annotated[float, Between(0, MOST_SCALE)]
Number = Annotated[float, Between(-MOST_SCALE, MOST_SCALE)]


def check_fields(config: Any, prefix: str = "") -> None:
    """Raise ValueError for a field whose value violates the type or the bounds of its annotation.

    Every dataclass of settings calls this on creation. A list in place of a tuple is converted to one, and a NumPy
    number to a Python number.
    """
    for name, hint in field_types(type(config)).items():
        value = getattr(config, name)
        converted = checked(value, hint, prefix + name)
        if converted is not value and type(value) is not int:
            object.__setattr__(config, name, converted)


@lru_cache(maxsize=256)
def field_types(kind: type[Any]) -> dict[str, Any]:
    """Types of a dataclass's fields, including bounds. Cached, since reading the annotations is slow."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {item.name: hints[item.name] for item in dataclasses.fields(kind)}


def check_settings_class(kind: Any, name: str) -> None:
    """Refuse what is no class of settings: a frozen dataclass whose fields all have defaults."""
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise TypeError(f"{name}={shown(kind)} must be a frozen dataclass of settings")
    if not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise TypeError(f"{name}={kind.__name__} must be frozen: write @dataclass(frozen=True, kw_only=True)")
    for item in dataclasses.fields(kind):
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise TypeError(f"{kind.__name__}.{item.name} needs a default: write '{item.name}: TYPE = VALUE'")


def first_sentence(value: Any) -> str:
    """First line of the docstring of a class or function, without its full stop; empty if there is none."""
    return (inspect.getdoc(value) or "").split("\n")[0].rstrip(".")


def renamed(*old: str) -> dict[str, Any]:
    """Metadata of a field that had other names, the oldest first: `field(default=0.7, metadata=renamed("decay"))`.

    Files and command lines may still use the old names. Identities of runs, names of run folders and the settings in
    rows keep the oldest one, so that a new name orphans nothing on disk.
    """
    return {"renamed": old}


def execution() -> dict[str, Any]:
    """Metadata of a field that changes how a run is executed but none of its numbers, and so not its identity."""
    return {"execution": True}


def execution_fields(kind: type[Any]) -> set[str]:
    """Names of the fields that change how a run is executed but none of its numbers."""
    return {item.name for item in dataclasses.fields(kind) if item.metadata.get("execution")}


@lru_cache(maxsize=256)
def current_names(kind: type[Any]) -> dict[str, str]:
    """Old name -> current name, of the fields that were renamed."""
    return {old: item.name for item in dataclasses.fields(kind) for old in item.metadata.get("renamed", ())}


@lru_cache(maxsize=256)
def original_names(kind: type[Any]) -> dict[str, str]:
    """Current name -> oldest name, of all fields."""
    return {item.name: (*item.metadata.get("renamed", ()), item.name)[0] for item in dataclasses.fields(kind)}


def with_current_names(kind: type[Any], data: Mapping[str, Any], dot: str = "") -> dict[str, Any]:
    """Settings read from a file, under the names that they have now."""
    names = current_names(kind)
    for old, new in names.items():
        if old in data and new in data:
            raise ValueError(f"{dot}{old} is the old name of {dot}{new}, and both are set: keep {dot}{new}")
    return {names.get(name, name): value for name, value in data.items()}


def changed_fields(config: Any) -> dict[str, Any]:
    """The fields that are not at their defaults, under their oldest names."""
    oldest = original_names(type(config))
    return {
        oldest[item.name]: getattr(config, item.name)
        for item in dataclasses.fields(config)
        if getattr(config, item.name) != item.default
    }


def checked(value: Any, hint: Any, name: str) -> Any:
    """Return the value, converted to its type; raise a ValueError that names field and value if it is invalid."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is Annotated:
        converted = checked(value, args[0], name)
        for bound in args[1:]:
            if isinstance(bound, Between) and not bound.holds(converted):
                raise ValueError(f"{name}={shown(value)} {bound}")
        return converted
    if origin is Literal:
        if not isinstance(value, str | int) or value not in args:
            raise ValueError(f"{name}={shown(value)} must be one of {', '.join(map(repr, args))}")
        return value
    if origin in (typing.Union, types.UnionType):
        kinds = [arg for arg in args if arg is not type(None)]
        if value is None and len(kinds) < len(args):
            return None
        if len(kinds) == 1:
            return checked(value, kinds[0], name)
        if isinstance(value, tuple(kinds)):
            return value
        raise ValueError(f"{name}={shown(value)} must be {' or '.join(map(_described, kinds))}")
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(checked(item, args[0], name) for item in value)
    if origin is collections.abc.Callable and callable(value):
        return value
    if hint is int and isinstance(value, numbers.Integral) and not isinstance(value, int):
        return int(value)
    if hint is float and isinstance(value, numbers.Real) and not isinstance(value, bool | float):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{name}={shown(value)} is too large for a floating-point number") from None
    if isinstance(origin or hint, type) and isinstance(value, origin or hint):
        if isinstance(value, bool) != (hint is bool):
            raise ValueError(f"{name}={value} must be {hint.__name__}")
        if isinstance(value, str) and "\0" in value:
            raise ValueError(f"{name}={shown(value)} holds a null character")
        return value
    raise ValueError(f"{name}={shown(value)} must be {_described(hint)}")


def _described(hint: Any) -> str:
    """The type in a few words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _described(args[0])
    if origin is tuple:
        return f"a tuple of {_described(args[0])}"
    return getattr(hint, "__name__", str(hint))


def shown(value: Any, most: int = 60) -> str:
    """The value's repr on one line, cut to `most` characters."""
    if type(value) is int and abs(value) >= 10**most:
        return "a number with too many digits"
    if isinstance(value, int | float | str | bool | type(None)):
        text = f"{value:g}" if isinstance(value, float) and abs(value) >= 1e6 else repr(value)
    else:
        try:
            text = " ".join(repr(value).split())
        except Exception:  # the __repr__ of a foreign class may raise anything
            text = f"<{type(value).__name__}>"
    return text if len(text) <= most else f"{text[: most - 3]}..."
