"""Every dataclass of settings, collected automatically, refuses invalid values and names the field."""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
import re
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch

import uat
from uat.settings import Between, checked, field_types, shown

NOT_LOADED = re.compile(r"triton|kernel|\.files$|__main__")
"""Modules that need more than the core dependencies and have no settings."""


def settings_classes() -> list[type[Any]]:
    """Dataclasses whose fields users set: configs, and the flags of every command."""
    found: dict[type[Any], None] = {}
    for module in pkgutil.walk_packages(uat.__path__, "uat."):
        if NOT_LOADED.search(module.name):
            continue
        for value in vars(importlib.import_module(module.name)).values():
            own = isinstance(value, type) and value.__module__ == module.name and dataclasses.is_dataclass(value)
            if own and (value.__name__.endswith("Config") or "check_fields" in vars(module_of(value))):
                found[value] = None
    return [kind for kind in found if hasattr(kind, "__post_init__") and buildable(kind) is not None]


def module_of(kind: type[Any]) -> Any:
    return importlib.import_module(kind.__module__)


REQUIRED: dict[str, dict[str, Any]] = {
    "RunConfig": {},
    "Phase": {"name": "clone", "loss": len},
    "Reproduce": {"study": "main"},
    "ReproduceAndReport": {"study": "main"},
}
"""Values for fields without defaults."""


def buildable(kind: type[Any]) -> Any:
    """An instance of this class with default settings."""
    if kind is uat.RunConfig:
        return uat.recipe("darkroom", "uat", "smoke")
    try:
        return kind(**REQUIRED.get(kind.__name__, {}))
    except TypeError:
        return None


CLASSES = settings_classes()
FIELDS = [(kind, name) for kind in CLASSES for name, hint in field_types(kind).items() if "Callable" not in str(hint)]

WRONG: dict[type[Any], list[Any]] = {
    bool: [None, 0, 1.0, "yes", []],
    int: [
        "1",
        1.5,
        True,
        math.nan,
        math.inf,
        10**12,
        -(10**12),
        10**5000,
        [],
        (1,),
        {},
        object(),
        1j,
        b"1",
        np.array([1, 2]),
        torch.tensor(1),
    ],
    float: ["1", True, math.nan, math.inf, -math.inf, 1e39, -1e39, 10**400, [], (1.0,), {}, object(), 1j, b"1"],
    Path: [1, 1.0, True, "x", b"x", []],
    str: [1, 1.0, True, b"x", [], ("x",), "a\0b", torch.empty(0)],
}
NO_SECTION = [None, 5, "x", {}, torch.zeros(2), uat.FeedbackConfig]


def bare(hint: Any) -> Any:
    """The type without bounds; for tuples and optional types, the type inside."""
    while typing.get_args(hint) and typing.get_origin(hint) is not Literal:
        hint = typing.get_args(hint)[0]
    return hint


def wrong_values(hint: Any, name: str) -> list[Any]:
    inner = bare(hint)
    if typing.get_origin(inner) is Literal:
        return ["no such choice", 17, 1.5, [], {}, None, np.array(["a", "b"]), torch.zeros(2), b"x"]
    if inner is Any or dataclasses.is_dataclass(inner):
        return [value for value in NO_SECTION if value is not None or type(None) not in typing.get_args(hint)]
    values = [*WRONG.get(inner, []), *([] if type(None) in typing.get_args(hint) else [None])]
    if name.endswith("seed"):  # any number of 64 bits serves
        values = [value for value in values if type(value) is not int or abs(value) > 2**64]
    if name == "num_worlds":
        values.remove(10**12)
    return [5, "word", {1: 2}, *((value,) for value in values)] if typing.get_origin(hint) is tuple else values


def test_the_classes_are_found() -> None:
    names = {kind.__name__ for kind in CLASSES}
    assert {"TrainConfig", "RunConfig", "UATConfig", "DarkRoomConfig", "FeedbackConfig"} <= names
    assert len({entry.config.__name__ for entry in uat.METHODS.values()} - names) == 0
    assert len({entry.config.__name__ for entry in uat.DOMAINS.values()} - names) == 0


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=lambda part: getattr(part, "__name__", part))
def test_a_wrong_value_is_refused_by_its_name(kind: type[Any], name: str) -> None:
    good = buildable(kind)
    for value in wrong_values(field_types(kind)[name], name):
        with pytest.raises(ValueError, match=name) as caught:
            dataclasses.replace(good, **{name: value})
        assert type(caught.value) is ValueError
        assert len(str(caught.value)) < 400
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_number_has_bounds(kind: type[Any]) -> None:
    def bounds(hint: Any) -> list[Between]:
        own = [part for part in typing.get_args(hint)[1:] if isinstance(part, Between)]
        inner = typing.get_args(hint) if typing.get_origin(hint) is not Literal else ()
        return own + [b for part in inner if not isinstance(part, Between) for b in bounds(part)]

    for hint in field_types(kind).values():
        if bare(hint) in (int, float):
            [bound] = bounds(hint)
            assert math.isfinite(bound.low)
            assert math.isfinite(bound.high)
            if bare(hint) is float:
                assert abs(bound.high) < torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Between(1, 10), "must be at least 1 and at most 10"),
        (Between(0, 10), "must not be negative and at most 10"),
        (Between(0, 1, without_high=True), "must lie in [0, 1)"),
        (Between(1e-30, 1e12), "must be positive, from 1e-30 to 1e+12"),
    ],
)
def test_bounds_say_what_they_allow(kind: Between, said: str) -> None:
    assert str(kind) == said
    assert not kind.holds(math.nan)


def test_bounds_with_and_without_their_ends() -> None:
    half = Between(0, 1, without_high=True)
    assert half.holds(0)
    assert not half.holds(1)
    assert not Between(0, 1, without_low=True).holds(0)
    assert Between(0, 1).holds(1)


def test_a_list_becomes_the_tuple_that_is_meant() -> None:
    config: Any = uat.DOMAINS["darkroom"].config(shift_steps=[10, 20])
    assert config.shift_steps == (10, 20)
    hash(config)


def test_whole_numbers_serve_as_numbers() -> None:
    assert checked(1, Annotated[float, Between(0, 2)], "x") == 1.0
    assert isinstance(checked(1, float, "x"), float)


class Rude:
    def __repr__(self) -> str:
        raise RuntimeError("no")


ODD = [Rude(), "x" * 1000, torch.zeros(100, 100), 10**5000, "a\nb\x1b[31m", [["y"] * 50] * 50]


@pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__)
def test_what_is_shown_of_a_value_is_one_short_line(value: Any) -> None:
    text = shown(value)
    assert len(text) <= 60
    assert text.isprintable()


@pytest.mark.parametrize("day", ["today", "now", "NaT", "2020-13-01", "2020-02-30", "x", "20200101", "9" * 30])
def test_days_that_are_none(day: str) -> None:
    with pytest.raises(ValueError, match="test_from"):
        uat.DOMAINS["markets"].config(test_from=day)


@pytest.mark.parametrize("value", [None, 5, b"x", ["darkroom"], {}, torch.zeros(2)])
@pytest.mark.parametrize("place", ["domain", "method", "preset"])
def test_names_that_are_none(place: str, value: Any) -> None:
    names: dict[str, Any] = {"domain": "darkroom", "method": "uat", "preset": "smoke"}
    with pytest.raises(ValueError, match=place):
        uat.recipe(**{**names, place: value})
