"""Daily bars in one tidy schema, and what a look at them finds.

A bar is a row `date, ticker, open, high, low, close, volume`. Whatever the source, bars pass through `inspect` before
anything is computed from them. What no calculation survives is refused with its row and column: prices that are not
positive, numbers that are infinite, a day that a ticker has twice, a high below the low, a negative volume. What real
markets do is told and kept: opens and closes outside the day's range (the source's rounding or adjustment), days
without volume, jumps, days that a ticker lacks. A bar without one of its numbers is no bar: it counts as missing.
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
"""A close that moves by more than this share within one bar is worth a look: a split that was not adjusted?"""
ROUNDING = 1e-6
"""Relative slack of the day's range: adjusted prices are products that were rounded one by one."""

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Columns of equal length, in the file's order of rows."""

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
        """True for rows that have all their numbers."""
        return ~np.any([np.isnan(getattr(self, name)) for name in NUMBERS], axis=0)

    def row(self, i: int) -> str:
        return f"row {i + 1} ({self.ticker[i]}, {self.date[i]})"


def market_files(path: Path) -> list[Path]:
    """The file itself, or the market files of a folder in the order of their names; a file is a market."""
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    found = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.suffix in SUFFIXES)
    if not found:
        raise ValueError(f"{path} holds no {' or '.join(SUFFIXES)} file")
    return found


def inspect(bars: Bars, path: str) -> Report:
    """Look at every bar; rows are counted from 1, without the header."""
    whole = bars.complete
    facts = {"rows": len(bars), "tickers": len(np.unique(bars.ticker))}
    if len(bars):
        days = np.unique(bars.date)
        facts |= {"days": len(days), "from": str(days[0]), "to": str(days[-1])}
    findings = [_empty(bars), *_broken(bars), _twice(bars)]
    findings += [
        _finding(bars, "without a number", ~whole, lambda i: f"column {_blank(bars, i)} is empty: no bar"),
        _outside(bars, "open"),
        _outside(bars, "close"),
        _finding(bars, "zero volume", whole & (bars.volume == 0), lambda i: "column volume is 0"),
    ]
    if not any(f.refused and f.count for f in findings):
        findings += [_jumps(bars), _missing(bars)]
    return Report(path=path, facts=facts, findings=[f for f in findings if f.count or not f.refused])


def accepted(bars: Bars, path: str) -> Bars:
    """The bars that have all their numbers; a sentence with row and column if they cannot be used."""
    if refusal := inspect(bars, path).refusal:
        raise ValueError(refusal)
    return bars.take(bars.complete)


# ---------------------------------------------------------------- one look each


def _finding(bars: Bars, what: str, where: Flags, say: Callable[[int], str], *, refused: bool = False) -> Finding:
    count, first = int(where.sum()), ""
    if count:
        i = int(where.argmax())
        first = f"{bars.row(i)}, {say(i)}"
    return Finding(what=what, count=count, first=first, refused=refused)


def _empty(bars: Bars) -> Finding:
    nothing = not bars.complete.any()
    return Finding(what="no bars", count=int(nothing), first="there is not one complete bar in it", refused=True)


def _broken(bars: Bars) -> list[Finding]:
    """Numbers that no calculation survives, column by column."""
    found = []
    for name in NUMBERS:
        x = getattr(bars, name)
        bad = np.isinf(x) | ((x <= 0) if name in PRICES else (x < 0))
        must = "a positive price" if name in PRICES else "a volume"
        found.append(
            _finding(
                bars,
                f"bad {name}",
                bad,
                lambda i, x=x, n=name, m=must: f"column {n}: {x[i]:g} is not {m}",
                refused=True,
            )
        )
    upside_down = bars.high < bars.low
    say = lambda i: f"column high: {bars.high[i]:g} is below low {bars.low[i]:g}"  # noqa: E731
    return [*found, _finding(bars, "high below low", upside_down, say, refused=True)]


def _twice(bars: Bars) -> Finding:
    order = np.lexsort((np.arange(len(bars)), bars.date, bars.ticker))
    day, ticker = bars.date[order], bars.ticker[order]
    again = np.zeros(len(bars), bool)
    again[order[1:]] = (day[1:] == day[:-1]) & (ticker[1:] == ticker[:-1])
    return _finding(
        bars, "the same day twice", again, lambda i: "column date: the ticker has this day already", refused=True
    )


def _outside(bars: Bars, name: str) -> Finding:
    x, slack = getattr(bars, name), ROUNDING * bars.high
    where = (x > bars.high + slack) | (x < bars.low - slack)
    say = lambda i: f"column {name}: {x[i]:g} is outside [{bars.low[i]:g}, {bars.high[i]:g}]"  # noqa: E731
    return _finding(bars, f"{name} outside the range", where, say)


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
    """Days on which some ticker traded and another, between its own first and last day, did not."""
    kept = bars.take(bars.complete)
    days, day = np.unique(kept.date, return_inverse=True)
    count, first = 0, ""
    for name in np.unique(kept.ticker):
        own = day[kept.ticker == name]
        lacks = np.setdiff1d(np.arange(own.min(), own.max() + 1), own)
        count += len(lacks)
        if len(lacks) and not first:
            first = f"{name} has no bar on {days[lacks[0]]}"
    return Finding(what="missing days", count=count, first=first)


def _blank(bars: Bars, i: int) -> str:
    return next(name for name in NUMBERS if np.isnan(getattr(bars, name)[i]))
