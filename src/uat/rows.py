"""Columns of each kind of row in .jsonl files, checked once when a row is read.

Unknown columns are accepted, since later versions may add some. Code that receives checked rows can rely on the types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from uat.files import NAME, FileError
from uat.settings import shown

Row = dict[str, Any]
ENTRY_ADDRESS = re.compile(r"python:\w+(\.\w+)*:\w+(\.\w+)*|object:\w+")
LARGEST = 1e100
"""Limit of a measured number, such that differences and squares are still finite."""
MOST_TEXT = 500


@dataclass(frozen=True, slots=True)
class Column:
    """The type of a column's values."""

    what: str
    """Description that completes "must be ...": "a whole number"."""
    holds: Callable[[Any], bool]
    required: bool = True


Columns = Mapping[str, Column]


def check_row(row: Row, columns: Columns, where: str) -> Row:
    """Return the row if it has these columns with values of their types; otherwise raise FileError."""
    for name, column in columns.items():
        if name not in row:
            if column.required:
                raise FileError(f"{where} has no {name!r}: expected a row with {', '.join(columns)}")
        elif not column.holds(row[name]):
            raise FileError(f"{where}: {name}={shown(row[name])} must be {column.what}")
    return row


def check_rows(rows: Any, columns: Columns, where: str) -> list[Row]:
    """Check rows that are part of another file, such as a trace."""
    if not isinstance(rows, list):
        raise FileError(f"{where}: the rows must be a list, got {shown(rows)}")
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise FileError(f"{where}, row {index} must be a JSON object, got {shown(row)}")
        check_row(row, columns, f"{where}, row {index}")
    return rows


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and (value != value or abs(value) <= LARGEST)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and len(value) <= MOST_TEXT


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and NAME.fullmatch(value) is not None


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**63


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value >= 0


def _optional(column: Column) -> Column:
    return Column(column.what, column.holds, required=False)


def _or_null(column: Column) -> Column:
    return Column(f"{column.what} or null", lambda value: value is None or column.holds(value))


def _list_of(column: Column) -> Column:
    def holds(value: Any) -> bool:
        return isinstance(value, list | tuple) and all(column.holds(one) for one in value)

    return Column(f"a list, each {column.what}", holds)


def _pair_of(first: Column, second: Column) -> Column:
    def holds(value: Any) -> bool:
        return isinstance(value, list | tuple) and len(value) == 2 and first.holds(value[0]) and second.holds(value[1])

    return Column(f"a pair of {first.what} and {second.what}", holds)


def _rows_of(columns: Columns) -> Column:
    def holds(value: Any) -> bool:
        return isinstance(value, list | tuple) and all(
            isinstance(row, dict) and all(name in row and one.holds(row[name]) for name, one in columns.items())
            for row in value
        )

    return Column(f"a list of rows with {', '.join(columns)}", holds)


NUMBER = Column(f"a number between -{LARGEST:g} and {LARGEST:g}, or NaN", _is_number)
TEXT = Column(f"printable text of at most {MOST_TEXT} characters", _is_text)
NAME_COLUMN = Column("a name of letters, digits and . _ + = @ -", _is_name)
ENTRY = Column(
    "a name of letters, digits and . _ + = @ -, or an address such as python:module:name",
    lambda value: _is_name(value) or (_is_text(value) and ENTRY_ADDRESS.fullmatch(value) is not None),
)
"""The name of a method or a domain."""
WHOLE = Column("a whole number", _is_whole)
COUNT = Column("a whole number, not negative", _is_count)
FLAG = Column("true or false", lambda value: isinstance(value, bool))

PLACE: Columns = {"domain": ENTRY, "task": NAME_COLUMN, "setting": TEXT}
SCORES: Columns = {
    **PLACE,
    "run": TEXT,
    "method": ENTRY,
    "split": TEXT,
    "seed": WHOLE,
    "metric": TEXT,
    "value": NUMBER,
    "n": COUNT,
    "numerics": _optional(TEXT),
}
DIFFERENCE: Columns = {"other": ENTRY, "value": NUMBER, "low": NUMBER, "high": NUMBER, "p": NUMBER}
"""A difference from another method, inside a row of intervals."""
INTERVALS: Columns = {
    **PLACE,
    "method": ENTRY,
    "preset": TEXT,
    "split": TEXT,
    "metric": TEXT,
    "value": NUMBER,
    "std": _or_null(NUMBER),
    "low": NUMBER,
    "high": NUMBER,
    "gap_closed": _or_null(NUMBER),
    "differences": _rows_of(DIFFERENCE),
    "n": COUNT,
    "seeds": _list_of(WHOLE),
}
PAIRS: Columns = {
    **PLACE,
    "metric": TEXT,
    "method": ENTRY,
    "other": ENTRY,
    "difference": NUMBER,
    "low": NUMBER,
    "high": NUMBER,
    "p": NUMBER,
    "p_holm": NUMBER,
    "n": COUNT,
    "seeds": _list_of(WHOLE),
}
CURVES: Columns = {
    **PLACE,
    "run": TEXT,
    "method": ENTRY,
    "seed": WHOLE,
    "metric": TEXT,
    "points": _list_of(_pair_of(COUNT, NUMBER)),
}
"""A metric of one run on validation episodes: pairs of the number of epochs so far and the value."""
EFFICIENCY: Columns = {
    "method": ENTRY,
    "domain": ENTRY,
    "batch": COUNT,
    "preset": TEXT,
    "device": TEXT,
    "precision": _optional(TEXT),
    "metric": TEXT,
    "value": NUMBER,
}
EPOCHS: Columns = {"epoch": COUNT}
"""Required column of metrics.jsonl; every other number is a loss, a norm or a metric."""
SECONDS: Columns = {"epoch": COUNT, "seconds": NUMBER}
NOTE: Columns = {"name": TEXT, "epoch": COUNT, "total": COUNT, "note": Column("text", lambda x: isinstance(x, str))}
"""Progress of a grid's worker."""

ATTENTION: Columns = {
    "task": NAME_COLUMN,
    **dict.fromkeys(("method", "quantity", "shift"), TEXT),
    **dict.fromkeys(("value", "low", "high", "even"), NUMBER),
}
TERMS: Columns = {
    **dict.fromkeys(("domain", "task", "method"), NAME_COLUMN),
    "term": TEXT,
    "layer": COUNT,
    **dict.fromkeys(("value", "low", "high", "share"), NUMBER),
    "n": COUNT,
}
KINETICS: Columns = {
    "method": ENTRY,
    "seed": WHOLE,
    "shifts": COUNT,
    "before": NUMBER,
    "after": NUMBER,
}
GATE: Columns = {
    **dict.fromkeys(("method", "quantity", "where", "by", "group"), TEXT),
    "seed": WHOLE,
    "low": NUMBER,
    "high": NUMBER,
    "n": COUNT,
    "markets": _list_of(TEXT),
}
GATE_MEANS: Columns = {**GATE, "value": NUMBER, "over_calmest": NUMBER}
GATE_AREAS: Columns = {**GATE, "auc": NUMBER, "calm": COUNT}
