"""The settings that a sweep varies, each with a range or a list of values.

train.lr=1e-4..3e-3:log      numbers between two ends, here drawn on a logarithmic scale
method.num_layers=1..4       whole numbers, since the setting is one; 32..128:32 has steps of 32
method.d_model=32,64,128     a list of values
method.context=none,64       none: unset
"""

from __future__ import annotations

import itertools
import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from uat.config import RunConfig, current_name, lookup, override, setting_names
from uat.methods import METHODS
from uat.recipes import recipe
from uat.runs import empty_policy
from uat.settings import checked, field_types, shown
from uat.spec import Spec

MOST_COMBINATIONS = 1000
"""Combinations of other settings' values with which a value is tried before it is refused."""
EXAMPLES = "1e-4..3e-3:log, 1..4, 32..128:32 or 32,64,128"


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers between two ends, which are included."""

    low: float
    high: float
    log: bool = False
    step: int | None = None
    """Distance of whole numbers; None: the numbers are not whole."""

    @property
    def values(self) -> tuple[float, ...]:
        """The values that stand for the range in checks: its ends."""
        return (self.low, self.high)

    def __str__(self) -> str:
        scale = ":log" if self.log else "" if self.step in (None, 1) else f":{self.step}"
        return f"{self.low}..{self.high}{scale}"


@dataclass(frozen=True, slots=True)
class Choice:
    """A list of values, in no order."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return ",".join(as_text(value) for value in self.values)


Space = Mapping[str, Range | Choice]
"""Dotted name of a setting -> its values."""


def as_text(value: Any) -> str:
    """Return a value as `--space` and tables write it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def parse_space(config: RunConfig, given: Sequence[str] | Mapping[str, Any]) -> Space:
    """Return the space of texts NAME=VALUES, or of a dictionary from names to texts or lists of values."""
    space: dict[str, Range | Choice] = {}
    for name, values in _pairs(given):
        name = current_name(config, name.replace("-", "_"))
        lookup("setting", name, setting_names(config))
        if name == "seed":
            raise ValueError("space seed: a sweep compares settings under one seed; train its winner with several")
        if name in space:
            raise ValueError(f"space {name} is given twice: {space[name]} and {shown(values)}")
        section, _, field = name.partition(".")
        hint = field_types(type(getattr(config, section)))[field]
        space[name] = _parsed(name, values, hint)
    if not space:
        raise ValueError("space is empty: name at least one setting, such as train.lr=1e-4..3e-3:log")
    check_space(config, space)
    return space


def _pairs(given: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(given, Mapping):
        for name, values in given.items():
            yield checked(name, str, "space"), values
        return
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ValueError(f"space={shown(given)} must map names of settings to values, or list texts NAME=VALUES")
    for text in given:
        name, equals, values = checked(text, str, "space").partition("=")
        if not equals:
            raise ValueError(f"space {shown(text)} must be NAME=VALUES, such as train.lr=1e-4..3e-3:log")
        yield name.strip(), values


def _parsed(name: str, values: Any, hint: Any) -> Range | Choice:
    kind = base_type(hint)
    if kind is None:
        raise ValueError(f"space {name}: this setting holds several values, and a sweep varies single ones")
    if isinstance(values, str) and ".." in values and kind is not str:
        return _range(name, values, hint, kind)
    if isinstance(values, str):
        texts = values.split(",")
        listed = [_value(name, text.strip(), hint, kind) for text in texts]
    elif isinstance(values, Sequence):
        listed = [checked(value, hint, name) for value in values]
    else:
        raise ValueError(f"space {name}={shown(values)} must be text or a list of values: {EXAMPLES}")
    if not listed:
        raise ValueError(f"space {name}: the list of values is empty")
    if repeated := next((value for i, value in enumerate(listed) if value in listed[:i]), None):
        raise ValueError(f"space {name} lists {shown(repeated)} twice")
    return Choice(tuple(listed))


def base_type(hint: Any) -> Any:
    """Return bool, int, float, str or a Literal, without bounds and None; None for settings of other types."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return base_type(args[0])
    if origin is Literal:
        return hint
    kinds = [arg for arg in args if arg is not type(None)]
    if len(kinds) < len(args):
        return base_type(kinds[0]) if len(kinds) == 1 else None
    return hint if hint in (bool, int, float, str) else None


def _value(name: str, text: str, hint: Any, kind: Any) -> Any:
    """Read one value."""
    if not text:
        raise ValueError(f"space {name}: a value is empty; write {EXAMPLES}")
    if text.lower() == "none" and type(None) in typing.get_args(hint):
        return None
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"space {name}={shown(text)} must be true or false")
        return text.lower() == "true"
    return checked(_number(name, text, kind) if kind in (int, float) else text, hint, name)


def _number(name: str, text: str, kind: Any) -> Any:
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"space {name}={shown(text)} must be {what}, a range or a list: {EXAMPLES}") from None


def _range(name: str, text: str, hint: Any, kind: Any) -> Range:
    ends, _, scale = text.partition(":")
    if kind not in (int, float):
        raise ValueError(f"space {name}={shown(text)}: this setting is not a number; list its values")
    low_text, _, high_text = ends.partition("..")
    low, high = (checked(_number(name, end.strip(), kind), hint, name) for end in (low_text, high_text))
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"space {name}={shown(text)}: the range must begin below its end")
    if scale == "log":
        if low <= 0:
            raise ValueError(f"space {name}={shown(text)}: a logarithmic range must begin above 0")
        return Range(low, high, log=True, step=1 if kind is int else None)
    if not scale:
        return Range(low, high, step=1 if kind is int else None)
    if kind is not int or not scale.isascii() or not scale.isdigit() or not int(scale):
        steps = ", or by a step of whole numbers" if kind is int else ""
        raise ValueError(f"space {name}={shown(text)}: a range may end in :log{steps}, not in :{scale}")
    if (high - low) % int(scale):
        raise ValueError(f"space {name}={shown(text)}: the step {scale} must divide {high} - {low} = {high - low}")
    return Range(low, high, step=int(scale))


# ---------------------------------------------------------------- checks


def check_space(config: RunConfig, space: Space) -> None:
    """Raise a ValueError if a listed value or the end of a range fits no combination of the others."""
    varies_domain = any(name.startswith("domain.") for name in space)
    spec = None if varies_domain else config.build_domain().spec
    for name, values in space.items():
        others = {other: own.values for other, own in space.items() if other != name}
        combinations = itertools.product(*others.values())
        for value in values.values:
            if (problem := refusal(config, {name: value}, spec)) is None:
                continue
            tried = itertools.islice(combinations, MOST_COMBINATIONS)
            rest = (dict(zip(others, combination, strict=True)) for combination in tried)
            if all(refusal(config, {name: value, **other}, spec) for other in rest):
                raise ValueError(f"space {name}={values}: the value {as_text(value)} is refused: {problem}")
            combinations = itertools.product(*others.values())


def refusal(config: RunConfig, settings: Mapping[str, Any], spec: Spec | None) -> str | None:
    """Return why a policy with these settings cannot be made; None if it can."""
    try:
        own = override(config, settings)
        empty_policy(METHODS[own.method_name], spec or own.build_domain().spec, own.method)
    except ValueError as error:
        return str(error)
    return None


# ---------------------------------------------------------------- defaults


def default_space(config: RunConfig) -> Space:
    """Return the usual settings to vary: learning rates, width, context, and entropy for objectives that have it.

    Values surround those of the config. Settings that differ from the recipe were chosen by the user, and are kept.
    """
    usual = recipe(config.domain_name, config.method_name, config.preset, objective=config.objective_name)
    spec, space = config.build_domain().spec, dict[str, Range | Choice]()
    for name in ("train.lr", "train.utility_lr"):
        rate = get(config, name)
        space[name] = Range(round_to(rate / 10), round_to(rate * 3), log=True)
    if not METHODS[config.method_name].policy.sees:
        del space["train.utility_lr"]
    known = setting_names(config)
    if "method.d_model" in known:
        width = get(config, "method.d_model")
        space["method.d_model"] = Choice((width // 2, width, 2 * width))
    if "method.context" in known and spec.horizon is not None and spec.horizon >= 4:
        space["method.context"] = Choice((None, spec.horizon // 4))
    if "objective.entropy" in known:
        space["objective.entropy"] = Range(1e-4, 3e-2, log=True)
    own = {name: x for name, x in space.items() if get(config, name) == get(usual, name)}
    return {name: values for name, values in own.items() if not unfit(config, name, values, spec)}


def unfit(config: RunConfig, name: str, values: Range | Choice, spec: Spec) -> bool:
    return any(refusal(config, {name: value}, spec) for value in values.values)


def get(config: RunConfig, name: str) -> Any:
    """Return the value of a setting."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def round_to(value: float) -> float:
    """Return the number with two significant digits."""
    return float(f"{value:.2g}")
