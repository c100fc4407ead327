"""Compare the structure of a live network with that of a new one of its class.

Fast engines read weights without calling modules, so their results are right only if the policy has the modules that
they were written for. A new instance of the policy (its twin), built on the meta device without memory, shows the
expected classes, settings and shapes. The values of weights and buffers may differ. A change of the class itself goes
unnoticed, since the twin has it too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode

from uat.nn.encoders import Normalizer, VectorEncoder

INTERNAL = frozenset(vars(nn.Module()))
"""Attributes that torch keeps in every module. Only hooks, parameters, buffers and submodules are compared."""
FREE = frozenset({"_compiled_call_impl"})
"""Attributes that have no influence on results."""
HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}


def difference(network: nn.Module, *arguments: Any, normalised: bool = False) -> str | None:
    """Describe the first difference between a network and a new one of its class with these arguments, or return None.

    normalised: accept encoders that standardise observations, which new ones do not.
    The first comparison builds the twin (about 3 ms); later ones of the same class and arguments reuse it.
    """
    for name, hook in HOOKS.items():
        if getattr(torch_module, f"_global{name}", None):
            return f"torch has a global {hook}"
    try:
        expected = _built(Recipe(type(network), repr(arguments), arguments))
    except Exception as error:  # a foreign class may raise anything
        message = str(error).strip().split("\n")[0]
        return f"the policy cannot be built again to compare with ({type(error).__name__}: {message})"
    return next(_Comparison(normalised).modules("", network, expected), None)


@dataclass(frozen=True)
class Recipe:
    """A class and its arguments. Arguments may be unhashable, so they are compared by their repr."""

    kind: type[nn.Module]
    text: str
    arguments: tuple[Any, ...] = field(compare=False)


@lru_cache(maxsize=32)
def _built(recipe: Recipe) -> nn.Module:
    arguments = copy.deepcopy(recipe.arguments)  # so that forced changes to a frozen config do not reach the twin
    with torch.device("meta"), _WithoutValues():
        return recipe.kind(*arguments)


class _WithoutValues(TorchFunctionMode):
    """Skip random initialisation: on the meta device, torch imports modules for almost a second to do it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if getattr(func, "__name__", None) in ("normal_", "uniform_"):
            return args[0] if args else given["tensor"]
        return (torch.empty if func is torch.randn else func)(*args, **given)


class _Comparison:
    """Walks through two networks side by side; each method yields sentences about differences."""

    def __init__(self, normalised: bool = False) -> None:
        self.normalised = normalised
        self.first: tuple[str, Tensor] | None = None
        """Path and tensor of the first floating-point parameter, whose type and device all others must share."""
        self.seen: dict[int, str] = {}

    def modules(self, path: str, actual: nn.Module, expected: nn.Module) -> Iterator[str]:
        if type(actual) is not type(expected):
            yield f"{path or 'the policy'} is of class {_kind(actual, expected)}, expected {_kind(expected, actual)}"
            return
        actual_vars, expected_vars = vars(actual), vars(expected)
        for name, hook in HOOKS.items():
            if actual_vars.get(name):
                yield f"{path or 'the policy'} has a {hook}"
        yield from self._attributes(path, actual, expected)
        for group, word in (("_parameters", "parameter"), ("_buffers", "buffer")):
            yield from _names(path, word, actual_vars[group], expected_vars[group], ordered=False)
            for name, tensor in expected_vars[group].items():
                yield from self._tensors(_join(path, name), actual_vars[group][name], tensor)
        yield from _names(path, "module", actual_vars["_modules"], expected_vars["_modules"], ordered=True)
        for name, module in expected_vars["_modules"].items():
            inner, at = actual_vars["_modules"][name], _join(path, name)
            if self.normalised and name == "normalizer" and module is None and isinstance(expected, VectorEncoder):
                module = None if inner is None else Normalizer(expected.linear.in_features)
            if inner is None or module is None:
                if inner is not module:
                    kinds = [None if one is None else type(one).__name__ for one in (inner, module)]
                    yield f"{at} is {kinds[0]}, expected {kinds[1]}"
            else:
                yield from self.modules(at, inner, module)

    def _attributes(self, path: str, actual: nn.Module, expected: nn.Module) -> Iterator[str]:
        actual_vars, expected_vars = vars(actual), vars(expected)
        for name, value in expected_vars.items():
            if name in INTERNAL or name in FREE:
                continue
            if name not in actual_vars:
                yield f"{path or 'the policy'} lacks {name}"
            elif not _same(actual_vars[name], value):
                yield f"{_join(path, name)} is {_brief(actual_vars[name])}, expected {_brief(value)}"
        tensors_and_modules = {*actual_vars["_parameters"], *actual_vars["_buffers"], *actual_vars["_modules"]}
        for name in sorted(actual_vars.keys() - expected_vars.keys() - FREE):
            if name in tensors_and_modules or hasattr(type(actual), name):  # no code reads other attributes
                yield f"{path or 'the policy'} has its own {name}"

    def _tensors(self, path: str, actual: Tensor | None, expected: Tensor | None) -> Iterator[str]:
        if actual is None or expected is None:
            if actual is not expected:
                yield f"{path} is {_brief(actual)}, expected {_brief(expected)}"
            return
        if type(actual) is not type(expected) or actual.layout != torch.strided:
            kinds = _kind(actual, expected), _kind(expected, actual)
            yield f"{path} is of class {kinds[0]} and layout {actual.layout}, expected a strided {kinds[1]}"
            return
        if actual.shape != expected.shape:
            yield f"{path} has the shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        if not actual.is_contiguous():
            yield f"{path} is not contiguous"
        if (same := self.seen.setdefault(id(actual), path)) != path:
            yield f"{path} is the same tensor as {same}"
        if self.first is None and actual.is_floating_point():
            self.first = path, actual
        if self.first is not None:
            where, like = self.first
            dtype = like.dtype if expected.is_floating_point() else expected.dtype
            if (actual.dtype, actual.device) != (dtype, like.device):
                yield f"{path} is {actual.dtype} on {actual.device}, expected {dtype} on {like.device} as {where}"


def _names(path: str, word: str, actual: Iterable[str], expected: Iterable[str], *, ordered: bool) -> Iterator[str]:
    mine, other = list(actual), list(expected)
    for name in other:
        if name not in mine:
            yield f"{path or 'the policy'} has no {word} {name}"
            return
    for name in mine:
        if name not in other:
            yield f"{path or 'the policy'} has one more {word}, {name}"
            return
    if ordered and mine != other:
        yield f"{path or 'the policy'} has the {word}s {', '.join(mine)}, expected {', '.join(other)}"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _same(actual: Any, expected: Any) -> bool:
    try:
        return actual is expected or (type(actual) is type(expected) and bool(actual == expected))
    except Exception:  # values that cannot be compared did not come from the class
        return False


def _kind(one: Any, other: Any) -> str:
    """Name of the class of `one`, with its module if both classes have the same name."""
    kind = type(one)
    return kind.__name__ if kind.__name__ != type(other).__name__ else f"{kind.__module__}.{kind.__qualname__}"


def _brief(value: Any) -> str:
    """The repr of a value for an error message, cut to 80 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
