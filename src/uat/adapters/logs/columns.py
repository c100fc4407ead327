"""Columns of a log as arrays, in the order of its rows: numbers, flags, and codes of categories.

Axes: N rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from uat.adapters.logs.files import Log
from uat.archives import Array
from uat.data import need
from uat.files import FileError

AT_ONCE = 2**26
"""Most numbers of observations in memory as float64 at a time."""
TRUE, FALSE = ("true", "t", "yes", "y", "1"), ("false", "f", "no", "n", "0")


def numbers(log: Log, columns: Sequence[str], rows: int) -> Iterator[tuple[str, Array, Array]]:
    """Yield each column as float64, NaN where it is missing or not a number, and a mask of missing values.

    A few columns are read at a time, so that never more than AT_ONCE numbers are in memory.
    """
    pl = need("polars", "data", "reading logs")
    size = max(1, AT_ONCE // max(1, rows))
    for begin in range(0, len(columns), size):
        some = columns[begin : begin + size]
        frame = log.select(
            *(_text(pl, log, name).cast(pl.Float64, strict=False).alias(f"{i} value") for i, name in enumerate(some)),
            *(pl.col(name).is_null().alias(f"{i} missing") for i, name in enumerate(some)),
        )
        for i, name in enumerate(some):
            value, missing = frame.drop_in_place(f"{i} value"), frame.drop_in_place(f"{i} missing")
            yield name, value.to_numpy(writable=True), missing.to_numpy()


def _text(pl: Any, log: Log, name: str) -> Any:
    return pl.col(name).cast(pl.String) if log.kinds[name] == "text" else pl.col(name)


def flags(log: Log, column: str) -> Array:
    """Return a column as booleans: booleans, 0 and 1, or words such as true and no."""
    pl = need("polars", "data", "reading logs")
    x = pl.col(column)
    if log.kinds[column] != "flag":
        word = x.cast(pl.String).str.strip_chars().str.to_lowercase().str.strip_suffix(".0")
        x = pl.when(word.is_in(TRUE)).then(True).when(word.is_in(FALSE)).then(False)
    read = log.select(x.alias("flag"))["flag"]
    if read.null_count():
        row = int(read.is_null().arg_max() or 0)
        raise FileError(
            f"{log.place(row, column)}: {log.value(row, column)!r:.60} is neither true nor false; write booleans, or 0 "
            "and 1"
        )
    return read.to_numpy()


def codes(log: Log, column: str) -> tuple[Array, list[str]]:
    """Return the code (N,) of each value, -1 where it is missing, and the sorted names of the codes."""
    pl = need("polars", "data", "reading logs")
    if log.kinds[column] == "integer":
        return _integer_codes(log, column)
    text = pl.col(column).cast(pl.String)
    if log.kinds[column] == "number":
        text = text.str.strip_suffix(".0")
    names = log.select(text.unique().drop_nulls().sort().alias("names"))["names"].to_list()
    names = _in_order(names)
    if not names:
        return np.full(log.select(pl.len()).item(), -1, dtype=np.int32), []
    code = text.cast(pl.Enum(names)).to_physical().cast(pl.Int32).fill_null(-1)
    return log.select(code.alias("code"))["code"].to_numpy(), names


def _in_order(names: list[str]) -> list[str]:
    """Return sorted names; by value if all are integers, so that text and numbers give the same codes."""
    try:
        values = [int(name) for name in names]
    except ValueError:
        return names
    return [str(value) for value in sorted(values)] if list(map(str, values)) == names else names


def _integer_codes(log: Log, column: str) -> tuple[Array, list[str]]:
    pl = need("polars", "data", "reading logs")
    frame = log.select(
        pl.col(column).cast(pl.Int64).fill_null(0).alias("id"), pl.col(column).is_null().alias("missing")
    )
    id_N, missing_N = frame["id"].to_numpy(), frame["missing"].to_numpy()
    kept = id_N[~missing_N] if missing_N.any() else id_N
    low, high = (int(kept.min()), int(kept.max())) if len(kept) else (0, -1)
    if high - low < 4 * len(id_N):  # a table of all ids is faster than sorting
        seen = np.zeros(high - low + 1, dtype=bool)
        seen[kept - low] = True
        names_I = np.flatnonzero(seen) + low
        place = np.cumsum(seen, dtype=np.int32) - np.int32(1)
        code_N = place[np.where(missing_N, low, id_N) - low] if len(kept) else np.zeros(len(id_N), dtype=np.int32)
    else:
        names_I = np.unique(kept)
        code_N = np.searchsorted(names_I, id_N).astype(np.int32)
    code_N = code_N.astype(np.int32, copy=False)
    code_N[missing_N] = -1
    return code_N, [str(name) for name in names_I.tolist()]


def in_training(code_N: Array, names: list[str], train_N: Array) -> tuple[Array, tuple[str, ...], Array]:
    """Return ids among the names that occur in training, these names, and a mask of rows with other names."""
    seen = np.bincount(code_N[train_N & (code_N >= 0)], minlength=len(names)) > 0
    place = np.append(np.where(seen, np.cumsum(seen) - 1, -1), -1).astype(np.int32)
    id_N = place[code_N]
    return id_N, tuple(names[i] for i in np.flatnonzero(seen)), (id_N < 0) & (code_N >= 0)
