"""Markets in one .npz file that NumPy alone can read, for machines without polars; its contents identify the data.

    uat data prepare markets FOLDER --out panels.npz

The file holds the checked bars unchanged. Calendars, indicators and splits are computed when the file is read, so that
every setting of the domain still applies. For each market NAME it holds

  NAME/date       (T,) days on which any asset traded       NAME/ticker   (N,)
  NAME/bars       (T, N, 5) open, high, low, close, volume; NaN where there is no bar
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from uat.archives import SUFFIX, is_archive, read_arrays, required, write_into
from uat.data.markets.bars import NUMBERS, Bars, Floats, accepted
from uat.files import FileError, write_atomically

PARTS = ("date", "ticker", "bars")


def is_prepared(path: Path | str) -> bool:
    return is_archive(path)


def write(markets: Mapping[str, Bars], path: Path) -> None:
    """Write the markets to a .npz file atomically."""
    if not is_prepared(path):
        raise ValueError(f"{path} must be a {SUFFIX} file")
    write_atomically(path, pack(markets))


def pack(markets: Mapping[str, Bars]) -> bytes:
    """The contents of the file. They do not depend on the order of the rows."""
    arrays: dict[str, np.ndarray] = {}
    for name, bars in markets.items():
        days, day = np.unique(bars.date, return_inverse=True)
        tickers, asset = np.unique(bars.ticker, return_inverse=True)
        table_TNC = np.full((len(days), len(tickers), len(NUMBERS)), np.nan)
        table_TNC[day, asset] = np.stack([getattr(bars, column) for column in NUMBERS], axis=-1)
        arrays |= {f"{name}/date": days.astype("datetime64[D]"), f"{name}/ticker": tickers, f"{name}/bars": table_TNC}
    content = io.BytesIO()
    write_into(content, arrays)
    return content.getvalue()


def read(path: Path) -> dict[str, Bars]:
    """Read the bars of every market, with the same checks as for any other file."""
    arrays = read_arrays(path)
    return {name: accepted(_bars(path, name, arrays), f"{path}, {name}") for name in _names(path, arrays)}


def names(path: Path) -> tuple[str, ...]:
    """Names of the markets in the file."""
    return _names(path, read_arrays(path))


def _names(path: Path, arrays: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    markets = tuple(dict.fromkeys(name.rpartition("/")[0] for name in arrays))
    missing = [f"{name}/{part}" for name in markets for part in PARTS if f"{name}/{part}" not in arrays]
    if not markets or missing:
        what = missing[0] if missing else "every market"
        raise FileError(f"{path} was not made by `uat data prepare markets`: it lacks {what}")
    return markets


def _bars(path: Path, name: str, arrays: Mapping[str, np.ndarray]) -> Bars:
    date_T = required(path, arrays, f"{name}/date", "M", (None,)).astype("datetime64[D]")
    ticker_N = required(path, arrays, f"{name}/ticker", "U", (None,))
    table_TNC = required(path, arrays, f"{name}/bars", "f", (len(date_T), len(ticker_N), len(NUMBERS)))
    if np.isnat(date_T).any():
        raise FileError(f"{path}: {name}/date has an empty day in row {int(np.isnat(date_T).argmax()) + 1}")
    day, asset = np.nonzero(~np.isnan(table_TNC).all(-1))
    columns: dict[str, Floats] = dict(zip(NUMBERS, table_TNC[day, asset].astype(np.float64).T, strict=True))
    return Bars(date=date_T[day], ticker=ticker_N[asset], **columns)
