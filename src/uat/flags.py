"""Command-line flags from a frozen dataclass, with argparse only: for machines without tyro and rich."""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

Options = TypeVar("Options")


def parse_flags(
    kind: type[Options], prog: str, argv: Sequence[str] | None = None, *, positional: Sequence[str] = ()
) -> Options:
    """Parse arguments into a dataclass; `positional` names the fields that are positional arguments."""
    given: dict[str, Any] = vars(parser(kind, prog, positional).parse_args(argv))
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


class Parser(argparse.ArgumentParser):
    """A parser that raises ValueError for bad arguments."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def parser(kind: type[Any], prog: str, positional: Sequence[str] = ()) -> argparse.ArgumentParser:
    """A parser with one flag for each field; the docstring under the field is its help text."""
    result = Parser(prog=prog, description=kind.__doc__)
    hints, help_texts = typing.get_type_hints(kind), sentences(kind)
    for item in fields(kind):
        hint, text = _without_none(hints[item.name]), help_texts[item.name]
        flag = item.name if item.name in positional else f"--{item.name.replace('_', '-')}"
        if hint is bool:
            options: dict[str, Any] = {"action": argparse.BooleanOptionalAction if item.default else "store_true"}
            result.add_argument(flag, default=item.default, help=text, **options)
            continue
        several = typing.get_origin(hint) is tuple
        one = typing.get_args(hint)[0] if several else hint
        options = {"nargs": "+"} if several else {}
        options |= {} if item.default is MISSING else {"default": item.default}
        if typing.get_origin(one) is typing.Literal:
            options["choices"] = typing.get_args(one)
        elif one in (int, float, Path):
            options["type"] = one
        result.add_argument(flag, help=text, **options)
    return result


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint


def sentences(kind: type[Any]) -> dict[str, str]:
    """The docstring under each field."""
    [body] = [node.body for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef)]
    return {
        here.target.id: str(below.value.value)
        for here, below in itertools.pairwise(body)
        if isinstance(here, ast.AnnAssign) and isinstance(here.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }
