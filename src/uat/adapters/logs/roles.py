"""The role of each column: patterns are matched, kinds are decided, and missing columns are named with a suggestion."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from uat.adapters.logs.config import LogsConfig
from uat.adapters.logs.files import Log
from uat.adapters.logs.findings import Findings
from uat.data import need
from uat.files import FileError
from uat.settings import shown

MAGIC = "*?["


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The columns of a log by role."""

    numbers: tuple[str, ...]
    """Observed numbers."""
    categories: tuple[str, ...]
    """Observed categories and item ids."""
    action: tuple[str, ...]
    action_kind: Literal["ids", "numbers", "weights"]
    action_integers: bool
    """Whether the names of actions are integers."""
    allowed: dict[str, str]
    """Column -> name of its action; one column with an empty name holds lists."""
    unused: tuple[str, ...]
    """Columns without a role."""


def roles_of(config: LogsConfig, log: Log, findings: Findings) -> Roles:
    """Resolve the columns that the settings name; raise FileError if one is missing or of an unsuitable kind."""
    single = {
        name: getattr(config, name)
        for name in ("episode", "time", "target", "reward", "propensity", "done", "split_column")
    }
    for setting, column in single.items():
        if column:
            _check_column(column, setting, log)
    if not config.action:
        raise FileError(
            f"domain.action is empty: name the column of the action by --action COLUMN; {log.path} has the columns "
            f"{_listed(log.kinds)}"
        )
    action = matched(config.action, "action", log)
    allowed = _allowed(config, log)
    taken = {*single.values(), *action, *allowed}
    if config.observations:
        observed = matched(config.observations, "observations", log)
        if twice := [name for name in observed if name in {*action, config.target, config.reward, config.propensity}]:
            raise FileError(
                f"domain.observations matches {twice[0]}, which is the action, target, reward or propensity"
            )
    else:
        observed = tuple(name for name in log.kinds if name not in taken)
    forced = matched(config.categories, "categories", log) if config.categories else ()
    surveyed = _survey(log, [name for name in {*observed, *action} if log.kinds[name] == "text"])
    numbers, categories = _observed(observed, forced, log, surveyed, findings)
    kind, integers = _action_kind(config, action, log, surveyed)
    unused = tuple(name for name in log.kinds if name not in {*taken, *observed})
    return Roles(
        numbers=numbers,
        categories=categories,
        action=action,
        action_kind=kind,
        action_integers=integers,
        allowed=allowed,
        unused=unused,
    )


def matched(patterns: Iterable[str], setting: str, log: Log) -> tuple[str, ...]:
    """Return the columns that names and patterns select, in the order of the patterns and then of the file."""
    found: list[str] = []
    for pattern in patterns:
        if pattern in log.kinds:
            here = [pattern]
        elif set(pattern) & set(MAGIC):
            here = [name for name in log.kinds if fnmatchcase(name, pattern)]
            if not here:
                raise FileError(f"{log.path}: no column matches {pattern!r} of domain.{setting}; {_near(pattern, log)}")
        else:
            _check_column(pattern, setting, log)
            here = []
        found += [name for name in here if name not in found]
    for name in found:
        if log.kinds[name] == "other" or (log.kinds[name] in ("list", "time") and setting != "allowed"):
            raise FileError(
                f"{log.path}: row 1, column {name} holds {_described(log.kinds[name])}, which domain.{setting} does "
                "not take"
            )
    return tuple(found)


def _described(kind: str) -> str:
    return {"list": "lists", "time": "dates or times"}.get(kind, "nested values")


def _check_column(column: str, setting: str, log: Log) -> None:
    if column not in log.kinds:
        raise FileError(f"{log.path} has no column {column!r} (domain.{setting}); {_near(column, log)}")


def _near(word: str, log: Log) -> str:
    close = difflib.get_close_matches(word, log.kinds, n=1)
    return f"did you mean {close[0]!r}?" if close else f"its columns are {_listed(log.kinds)}"


def _listed(names: Iterable[str]) -> str:
    return shown(", ".join(names), 300).strip("'")


def _allowed(config: LogsConfig, log: Log) -> dict[str, str]:
    """Return the columns of allowed actions, with the name of the action of each."""
    if not config.allowed:
        return {}
    columns = matched(config.allowed, "allowed", log)
    if len(columns) == 1 and log.kinds[columns[0]] in ("list", "text") and config.allowed[0] in log.kinds:
        return {columns[0]: ""}
    names = {}
    for name in columns:
        pattern = next(p for p in config.allowed if p == name or fnmatchcase(name, p))
        before, star, after = pattern.partition("*")
        names[name] = name[len(before) : len(name) - len(after)] if star else name
    return names


def _survey(log: Log, columns: list[str]) -> dict[str, tuple[int, int, int]]:
    """Count the values of text columns: all, those that are numbers, and those that are integers."""
    if not columns:
        return {}
    pl = need("polars", "data", "reading logs")
    text = {name: pl.col(name).cast(pl.String) for name in columns}
    counts = [
        part
        for i, (name, x) in enumerate(text.items())
        for part in (
            pl.col(name).is_not_null().sum().alias(f"{i} all"),
            x.cast(pl.Float64, strict=False).is_not_null().sum().alias(f"{i} numbers"),
            x.cast(pl.Int64, strict=False).is_not_null().sum().alias(f"{i} integers"),
        )
    ]
    row = log.select(*counts).row(0)
    return {name: tuple(row[3 * i : 3 * i + 3]) for i, name in enumerate(columns)}  # pyright: ignore[reportReturnType]


def _observed(
    observed: tuple[str, ...],
    forced: tuple[str, ...],
    log: Log,
    surveyed: dict[str, tuple[int, int, int]],
    findings: Findings,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Divide observed columns into numbers and categories; text that is partly numbers is an error."""
    numbers, categories = [], []
    for name in observed:
        kind = log.kinds[name]
        if kind in ("list", "time", "other"):
            raise FileError(
                f"{log.path}: row 1, column {name} holds {_described(kind)}, which cannot be observed: leave it out by "
                "domain.observations, or give it a role, such as domain.time"
            )
        every, parsed, _ = surveyed.get(name, (0, 0, 0))
        if name in forced:
            categories.append(name)
        elif kind != "text" or (every and parsed == every):
            numbers.append(name)
        else:
            categories.append(name)
            if parsed:
                row, value = _first_text(log, name)
                findings.error(
                    "mixed-types",
                    every - parsed,
                    f"{log.place(row, name)}: {value!r:.60} is not a number, but {parsed:,} of {every:,} values of the "
                    f"column are: correct it, or name the column in domain.categories",
                )
    return tuple(numbers), tuple(categories)


def _first_text(log: Log, column: str) -> tuple[int, Any]:
    """Return row and value of the first text that is not a number."""
    pl = need("polars", "data", "reading logs")
    text = pl.col(column).cast(pl.String)
    wrong = text.is_not_null() & text.cast(pl.Float64, strict=False).is_null()
    first = log.frame.select(column).with_row_index("uat row").filter(wrong).head(1)
    return log.collect(first).row(0)


def _action_kind(
    config: LogsConfig, action: tuple[str, ...], log: Log, surveyed: dict[str, tuple[int, int, int]]
) -> tuple[Literal["ids", "numbers", "weights"], bool]:
    """Return the kind of the action, and whether names of actions are integers."""
    kinds = {log.kinds[name] for name in action}
    every, parsed, whole = surveyed.get(action[0], (0, 0, 0))
    integers = kinds == {"integer"} or (kinds == {"text"} and 0 < every == whole)
    named = kinds <= {"integer", "flag"} or (kinds == {"text"} and (whole == every or parsed < every))
    kind = config.action_kind
    if kind == "auto":
        kind = "ids" if len(action) == 1 and named else "numbers"
    if kind == "ids" and len(action) > 1:
        raise FileError(f"{log.path}: actions that are ids have one column, not {len(action)} ({_listed(action)})")
    return kind, integers
