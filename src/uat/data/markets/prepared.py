"""Markets in one file that NumPy alone can read: for machines without a reader of parquet, and to name data by content.

    uat data prepare markets FOLDER --out panels.npz

The file holds the bars that passed their check, as they were: calendars, indicators and splits are still worked out
by whoever reads it, so that every setting of the domain serves it too. Per market NAME

  NAME/date       (T,) days on which anybody traded         NAME/ticker   (N,)
  NAME/bars       (T, N, 5) open, high, low, close, volume; NaN where there is no bar
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from uat.data.markets.bars import NUMBERS, Bars, Floats, accepted

SUFFIX = ".npz"
PARTS = ("date", "ticker", "bars")


def is_prepared(path: Path | str) -> bool:
    return Path(path).suffix == SUFFIX


def write(markets: Mapping[str, Bars], path: Path) -> None:
    """All of it or nothing: a temporary name, then renamed."""
    if not is_prepared(path):
        raise ValueError(f"{path} must be a {SUFFIX} file")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(pack(markets))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def pack(markets: Mapping[str, Bars]) -> bytes:
    """The file's content: the same for the same bars, in whatever order their rows came."""
    arrays: dict[str, np.ndarray] = {}
    for name, bars in markets.items():
        days, day = np.unique(bars.date, return_inverse=True)
        tickers, asset = np.unique(bars.ticker, return_inverse=True)
        table_TNC = np.full((len(days), len(tickers), len(NUMBERS)), np.nan)
        table_TNC[day, asset] = np.stack([getattr(bars, column) for column in NUMBERS], axis=-1)
        arrays |= {f"{name}/date": days.astype("datetime64[D]"), f"{name}/ticker": tickers, f"{name}/bars": table_TNC}
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)  # pyright: ignore[reportArgumentType]
    return content.getvalue()


def read(path: Path) -> dict[str, Bars]:
    """The bars of every market, checked as those of any file are."""
    arrays = _arrays(path)
    return {name: accepted(_bars(path, name, arrays), f"{path}, {name}") for name in _names(path, arrays)}


def names(path: Path) -> tuple[str, ...]:
    """What the markets are called."""
    return _names(path, _arrays(path))


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None


def _names(path: Path, arrays: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(name.rpartition("/")[0] for name in arrays))
    lacking = [f"{name}/{part}" for name in found for part in PARTS if f"{name}/{part}" not in arrays]
    if not found or lacking:
        missing = lacking[0] if lacking else "every market"
        raise ValueError(f"{path} was not made by `uat data prepare markets`: {missing} is not in it")
    return found


def _bars(path: Path, name: str, arrays: Mapping[str, np.ndarray]) -> Bars:
    date_T, ticker_N, table_TNC = (arrays[f"{name}/{part}"] for part in PARTS)
    if table_TNC.shape != (len(date_T), len(ticker_N), len(NUMBERS)):
        raise ValueError(
            f"{path}: {name}/bars has shape {table_TNC.shape}, expected {(len(date_T), len(ticker_N), len(NUMBERS))}"
        )
    day, asset = np.nonzero(~np.isnan(table_TNC).all(-1))
    columns: dict[str, Floats] = dict(zip(NUMBERS, table_TNC[day, asset].astype(np.float64).T, strict=True))
    return Bars(date=date_T[day], ticker=ticker_N[asset], **columns)
