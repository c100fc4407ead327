"""Read bars from parquet or CSV files and write them as parquet. The only module in this folder that needs polars."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import polars as pl

from uat.data import Report
from uat.data.frames import reading, silenced
from uat.data.markets.bars import COLUMNS, NUMBERS, SUFFIXES, Bars, accepted, inspect, market_files
from uat.data.markets.features import Protocol, calendar
from uat.data.markets.panel import align
from uat.files import FileError, replacing
from uat.settings import shown


def read(path: Path) -> Bars:
    """Read and check the bars of a file; raise ValueError with row and column if they cannot be used."""
    return accepted(_read(path), str(path))


def check(path: Path) -> list[Report]:
    """One report per market, with the number of days and windows under the default settings."""
    return [_check(_read(file), str(file)) for file in market_files(path)]


def _check(bars: Bars, path: str) -> Report:
    report = inspect(bars, path)
    if report.unsupported_reason is None:
        with contextlib.suppress(ValueError):  # too few days for a window, which is not an error of the file
            date_T = align(bars.take(bars.complete)).date_T
            windows = {f"{split} windows": count for split, count in calendar(date_T, Protocol()).items()}
            report.facts.update({"days on which all traded": len(date_T), **windows})
    return report


def write(bars: Bars, path: Path) -> None:
    """Write the bars as parquet, in the same schema."""
    with replacing(path) as file:
        pl.DataFrame({name: getattr(bars, name) for name in COLUMNS}).write_parquet(file)


def _read(path: Path) -> Bars:
    if path.suffix not in SUFFIXES:
        raise FileError(f"{path} must be a {' or '.join(SUFFIXES)} file")
    with reading(path):
        return _bars(_frame(path), path)


def _bars(frame: pl.DataFrame, path: Path) -> Bars:
    missing = [name for name in COLUMNS if name not in frame.columns]
    if missing:
        columns = shown(", ".join(frame.columns) or "none", 200)
        raise FileError(
            f"{path}: row 1, column {missing[0]} is not there; needed: {', '.join(COLUMNS)}; found: {columns}"
        )
    for name in COLUMNS:
        if frame[name].dtype.is_nested() or frame[name].dtype == pl.Binary:
            raise FileError(f"{path}: row 1, column {name}: {frame[name].dtype} is not a type of bars")
    numbers = {name: _numbers(frame[name], path) for name in NUMBERS}
    return Bars(date=_dates(frame["date"], path), ticker=_tickers(frame["ticker"], path), **numbers)


def _frame(path: Path) -> pl.DataFrame:
    if path.suffix == ".parquet":
        with silenced():
            return pl.read_parquet(path)
    return pl.read_csv(path, infer_schema=False)  # as text: 000001 is a ticker, and bad numbers are reported below


def _numbers(column: pl.Series, path: Path) -> np.ndarray:
    return _cast(column, column.cast(pl.Float64, strict=False), path, "a number").fill_null(float("nan")).to_numpy()


def _dates(column: pl.Series, path: Path) -> np.ndarray:
    if column.dtype == pl.String:
        dates = column.str.slice(0, 10).str.to_date("%Y-%m-%d", strict=False)
    elif column.dtype == pl.Date:
        dates = column
    elif isinstance(column.dtype, pl.Datetime):
        dates = column.dt.date()
    else:
        raise FileError(f"{path}: row 1, column date: {column.dtype} is not a type of dates; write YYYY-MM-DD")
    return _full(_cast(column, dates, path, "a date; write YYYY-MM-DD"), path).to_numpy().astype("datetime64[D]")


def _tickers(column: pl.Series, path: Path) -> np.ndarray:
    return np.asarray(_full(column.cast(pl.String), path).to_list(), dtype=np.str_)


def _cast(before: pl.Series, after: pl.Series, path: Path, what: str) -> pl.Series:
    """Return `after`, the converted column, or raise FileError at the first value that could not be converted."""
    lost = (after.is_null() & before.is_not_null()).arg_true()
    if len(lost):
        raise FileError(f"{path}: row {lost[0] + 1}, column {before.name}: {before[int(lost[0])]!r} is not {what}")
    return after


def _full(column: pl.Series, path: Path) -> pl.Series:
    """Return the column, or raise FileError at its first empty value."""
    blank = column.is_null().arg_true()
    if len(blank):
        raise FileError(f"{path}: row {blank[0] + 1}, column {column.name} is empty")
    return column
