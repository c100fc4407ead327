"""How a live network differs in structure from the one that its class builds.

Fast engines read weights and do not call modules, so they compute what a policy computes only while its modules are
those that they were written for. A freshly built twin of the policy, on the meta device and so without memory, says
what is expected: classes, settings and shapes. Values of weights and buffers are free. A class that was changed as a
whole, its twin's as well, is not seen.
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

INTERNAL = frozenset(vars(nn.Module()))
"""What torch itself keeps in every module; of this only hooks, parameters, buffers and submodules are compared."""
FREE = frozenset({"_compiled_call_impl"})
"""Attributes that change no number."""
HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}


def difference(network: nn.Module, *arguments: Any) -> str | None:
    """The first difference between a network and what its class builds from these arguments, in words; None: there is
    none. The first comparison builds the twin (about 3 ms), later ones of the same class and arguments do not."""
    for name, hook in HOOKS.items():
        if getattr(torch_module, f"_global{name}", None):
            return f"torch has a global {hook}"
    try:
        expected = _built(Recipe(type(network), repr(arguments), arguments))
    except Exception as error:  # a class of somebody else may raise anything
        said = str(error).strip().split("\n")[0]
        return f"the policy cannot be built again to compare with ({type(error).__name__}: {said})"
    return next(_Comparison().modules("", network, expected), None)


@dataclass(frozen=True)
class Recipe:
    """A class and its arguments. Those may be unhashable, so recipes are the same if their arguments read the same."""

    kind: type[nn.Module]
    text: str
    arguments: tuple[Any, ...] = field(compare=False)


@lru_cache(maxsize=32)
def _built(recipe: Recipe) -> nn.Module:
    arguments = copy.deepcopy(recipe.arguments)  # a config that is changed by force must not change its twin's
    with torch.device("meta"), _WithoutValues():
        return recipe.kind(*arguments)


class _WithoutValues(TorchFunctionMode):
    """Skips random values: on the meta device torch imports nearly a second's worth of modules for them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if getattr(func, "__name__", None) in ("normal_", "uniform_"):
            return args[0] if args else given["tensor"]
        return (torch.empty if func is torch.randn else func)(*args, **given)


class _Comparison:
    """One walk through two networks; each method yields differences in words."""

    def __init__(self) -> None:
        self.first: tuple[str, Tensor] | None = None
        """The first parameter of floats: all others are of its type, and everything lies on its device."""
        self.seen: dict[int, str] = {}

    def modules(self, path: str, found: nn.Module, expected: nn.Module) -> Iterator[str]:
        if type(found) is not type(expected):
            yield f"{path or 'the policy'} is of class {_kind(found, expected)}, expected {_kind(expected, found)}"
            return
        mine, other = vars(found), vars(expected)
        for name, hook in HOOKS.items():
            if mine.get(name):
                yield f"{path or 'the policy'} has a {hook}"
        yield from self._attributes(path, found, expected)
        for group, word in (("_parameters", "parameter"), ("_buffers", "buffer")):
            yield from _names(path, word, mine[group], other[group], ordered=False)
            for name, tensor in other[group].items():
                yield from self._tensors(_join(path, name), mine[group][name], tensor)
        yield from _names(path, "module", mine["_modules"], other["_modules"], ordered=True)
        for name, module in other["_modules"].items():
            inner, at = mine["_modules"][name], _join(path, name)
            if inner is None or module is None:
                if inner is not module:
                    kinds = [None if one is None else type(one).__name__ for one in (inner, module)]
                    yield f"{at} is {kinds[0]}, expected {kinds[1]}"
            else:
                yield from self.modules(at, inner, module)

    def _attributes(self, path: str, found: nn.Module, expected: nn.Module) -> Iterator[str]:
        mine, other = vars(found), vars(expected)
        for name, value in other.items():
            if name in INTERNAL or name in FREE:
                continue
            if name not in mine:
                yield f"{path or 'the policy'} lacks {name}"
            elif not _same(mine[name], value):
                yield f"{_join(path, name)} is {_brief(mine[name])}, expected {_brief(value)}"
        tensors_and_modules = {*mine["_parameters"], *mine["_buffers"], *mine["_modules"]}
        for name in sorted(mine.keys() - other.keys() - FREE):
            if name in tensors_and_modules or hasattr(type(found), name):  # all else is a note that no code reads
                yield f"{path or 'the policy'} has its own {name}"

    def _tensors(self, path: str, found: Tensor | None, expected: Tensor | None) -> Iterator[str]:
        if found is None or expected is None:
            if found is not expected:
                yield f"{path} is {_brief(found)}, expected {_brief(expected)}"
            return
        if type(found) is not type(expected) or found.layout != torch.strided:
            kinds = _kind(found, expected), _kind(expected, found)
            yield f"{path} is of class {kinds[0]} and layout {found.layout}, expected a strided {kinds[1]}"
            return
        if found.shape != expected.shape:
            yield f"{path} has the shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
        if not found.is_contiguous():
            yield f"{path} is not contiguous"
        if (same := self.seen.setdefault(id(found), path)) != path:
            yield f"{path} is the same tensor as {same}"
        if self.first is None and found.is_floating_point():
            self.first = path, found
        if self.first is not None:
            where, like = self.first
            dtype = like.dtype if expected.is_floating_point() else expected.dtype
            if (found.dtype, found.device) != (dtype, like.device):
                yield f"{path} is {found.dtype} on {found.device}, expected {dtype} on {like.device} as {where}"


def _names(path: str, word: str, found: Iterable[str], expected: Iterable[str], *, ordered: bool) -> Iterator[str]:
    mine, other = list(found), list(expected)
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


def _same(found: Any, expected: Any) -> bool:
    try:
        return found is expected or (type(found) is type(expected) and bool(found == expected))
    except Exception:  # what cannot be compared is not what the class put there
        return False


def _kind(one: Any, other: Any) -> str:
    """The name of the class, with its module where both have the same name."""
    kind = type(one)
    return kind.__name__ if kind.__name__ != type(other).__name__ else f"{kind.__module__}.{kind.__qualname__}"


def _brief(value: Any) -> str:
    """A value in an error, cut where it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
