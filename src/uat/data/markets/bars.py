"""Daily bars in one tidy schema, and the checks that every bar passes before use.

A bar is a row `date, ticker, open, high, low, close, volume`. Bars from every source pass through `inspect` before
anything is computed from them. Values that would break a calculation are refused with their row and column: prices
that are not positive, infinite numbers, two bars of one ticker on one day, a high below the low, a negative volume.
Values that occur in real markets are reported and kept: opens and closes outside the day's range (rounding or
adjustment by the source), days without volume, jumps, missing days. A bar that lacks one of its numbers counts as
missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from uat.data import Finding, Report

PRICES = ("open", "high", "low", "close")
NUMBERS = (*PRICES, "volume")
SUFFIXES = (".parquet", ".csv")
COLUMNS = ("date", "ticker", *NUMBERS)
JUMP = 0.25
"""A close that moves by more than this share in one bar is reported: it may be a split that was not adjusted."""
ROUNDING = 1e-6
"""Relative tolerance around the day's range, since sources round each adjusted price separately."""

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Columns of equal length, with rows in the order of the file."""

    date: NDArray[np.datetime64]
    ticker: NDArray[np.str_]
    open: Floats
    high: Floats
    low: Floats
    close: Floats
    volume: Floats

    def __len__(self) -> int:
        return len(self.date)

    def take(self, rows: NDArray[np.integer] | Flags) -> Self:
        return replace(self, **{name: getattr(self, name)[rows] for name in COLUMNS})

    @property
    def complete(self) -> Flags:
        """True for rows in which no number is missing."""
        return ~np.any([np.isnan(getattr(self, name)) for name in NUMBERS], axis=0)

    def row(self, i: int) -> str:
        return f"row {i + 1} ({self.ticker[i]}, {self.date[i]})"


def market_files(path: Path) -> list[Path]:
    """Return the file itself, or the market files of a folder sorted by name; each file is one market."""
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.suffix in SUFFIXES)
    if not files:
        raise ValueError(f"{path} holds no {' or '.join(SUFFIXES)} file")
    return files


def inspect(bars: Bars, path: str) -> Report:
    """Check every bar. Row numbers start at 1 and do not count the header."""
    complete = bars.complete
    facts = {"rows": len(bars), "tickers": len(np.unique(bars.ticker))}
    if len(bars):
        days = np.unique(bars.date)
        facts |= {"days": len(days), "from": str(days[0]), "to": str(days[-1])}
    findings = [_empty(bars), *_broken(bars), _twice(bars)]
    findings += [
        _finding(bars, "without a number", ~complete, lambda i: f"column {_blank(bars, i)} is empty: no bar"),
        _outside(bars, "open"),
        _outside(bars, "close"),
        _finding(bars, "zero volume", complete & (bars.volume == 0), lambda i: "column volume is 0"),
    ]
    if not any(f.refused and f.count for f in findings):
        findings += [_jumps(bars), _missing(bars)]
    return Report(path=path, facts=facts, findings=[f for f in findings if f.count or not f.refused])


def accepted(bars: Bars, path: str) -> Bars:
    """Return the complete bars; raise ValueError with row and column if the bars cannot be used."""
    if reason := inspect(bars, path).unsupported_reason:
        raise ValueError(reason)
    return bars.take(bars.complete)


# ---------------------------------------------------------------- one check each


def _finding(bars: Bars, what: str, where: Flags, describe: Callable[[int], str], *, refused: bool = False) -> Finding:
    count, first = int(where.sum()), ""
    if count:
        i = int(where.argmax())
        first = f"{bars.row(i)}, {describe(i)}"
    return Finding(what=what, count=count, first=first, refused=refused)


def _empty(bars: Bars) -> Finding:
    empty = not bars.complete.any()
    return Finding(what="no bars", count=int(empty), first="there is not one complete bar in it", refused=True)


def _broken(bars: Bars) -> list[Finding]:
    """Numbers that would break a calculation, column by column."""
    findings = []
    for name in NUMBERS:
        x = getattr(bars, name)
        bad = np.isinf(x) | ((x <= 0) if name in PRICES else (x < 0))
        expected = "a positive price" if name in PRICES else "a volume"
        findings.append(
            _finding(
                bars,
                f"bad {name}",
                bad,
                lambda i, x=x, n=name, e=expected: f"column {n}: {x[i]:g} is not {e}",
                refused=True,
            )
        )
    inverted = bars.high < bars.low
    describe = lambda i: f"column high: {bars.high[i]:g} is below low {bars.low[i]:g}"  # noqa: E731
    return [*findings, _finding(bars, "high below low", inverted, describe, refused=True)]


def _twice(bars: Bars) -> Finding:
    order = np.lexsort((np.arange(len(bars)), bars.date, bars.ticker))
    day, ticker = bars.date[order], bars.ticker[order]
    repeated = np.zeros(len(bars), bool)
    repeated[order[1:]] = (day[1:] == day[:-1]) & (ticker[1:] == ticker[:-1])
    return _finding(
        bars, "the same day twice", repeated, lambda i: "column date: the ticker has this day already", refused=True
    )


def _outside(bars: Bars, name: str) -> Finding:
    x, slack = getattr(bars, name), ROUNDING * bars.high
    where = (x > bars.high + slack) | (x < bars.low - slack)
    describe = lambda i: f"column {name}: {x[i]:g} is outside [{bars.low[i]:g}, {bars.high[i]:g}]"  # noqa: E731
    return _finding(bars, f"{name} outside the range", where, describe)


def _jumps(bars: Bars) -> Finding:
    rows = np.flatnonzero(bars.complete)
    rows = rows[np.lexsort((bars.date[rows], bars.ticker[rows]))]
    move = bars.close[rows[1:]] / bars.close[rows[:-1]] - 1
    same = bars.ticker[rows[1:]] == bars.ticker[rows[:-1]]
    size = np.zeros(len(bars))
    size[rows[1:]] = np.where(same, move, 0.0)
    return _finding(
        bars, f"jumps over {JUMP:.0%}", np.abs(size) > JUMP, lambda i: f"column close moved by {size[i]:+.0%}"
    )


def _missing(bars: Bars) -> Finding:
    """Days on which a ticker has no bar although it lies between its first and last day and another ticker traded."""
    kept = bars.take(bars.complete)
    days, day = np.unique(kept.date, return_inverse=True)
    count, first = 0, ""
    for name in np.unique(kept.ticker):
        own = day[kept.ticker == name]
        missing = np.setdiff1d(np.arange(own.min(), own.max() + 1), own)
        count += len(missing)
        if len(missing) and not first:
            first = f"{name} has no bar on {days[missing[0]]}"
    return Finding(what="missing days", count=count, first=first)


def _blank(bars: Bars, i: int) -> str:
    return next(name for name in NUMBERS if np.isnan(getattr(bars, name)[i]))
