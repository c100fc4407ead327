"""`python -m uat.bench`: the same flags as `uat bench`, without the command line's libraries."""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import sys
import typing
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from uat.bench.options import Bench
from uat.bench.report import report


def parser() -> argparse.ArgumentParser:
    """A flag for each field."""
    made = argparse.ArgumentParser(prog="python -m uat.bench", description=Bench.__doc__)
    hints, said = typing.get_type_hints(Bench), sentences()
    for item in fields(Bench):
        flag, hint = f"--{item.name}", hints[item.name]
        arguments = typing.get_args(hint)
        if hint is bool:
            made.add_argument(flag, action="store_true", help=said[item.name])
            continue
        several = typing.get_origin(hint) is tuple
        kind = arguments[0] if arguments and typing.get_origin(hint) is not typing.Literal else hint
        how: dict[str, Any] = {"nargs": "+"} if several else {}
        if typing.get_origin(kind) is typing.Literal:
            how["choices"] = typing.get_args(kind)
        elif kind in (int, Path):
            how["type"] = kind
        made.add_argument(flag, default=item.default, help=said[item.name], **how)
    return made


def sentences() -> dict[str, str]:
    """The text under each field."""
    [body] = [node.body for node in ast.parse(inspect.getsource(Bench)).body if isinstance(node, ast.ClassDef)]
    return {
        here.target.id: str(below.value.value)
        for here, below in itertools.pairwise(body)
        if isinstance(here, ast.AnnAssign) and isinstance(here.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }


def main(argv: Sequence[str] | None = None) -> None:
    given: dict[str, Any] = vars(parser().parse_args(argv))
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    try:
        report(Bench(**given))
    except (ValueError, OSError) as error:
        print(f"uat.bench: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
