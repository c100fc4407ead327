"""Download bars from Yahoo Finance (US, HK) and AkShare (CN), with a cache on disk.

Prices are adjusted backward from the day of the download, so a later download rescales the whole past. A cached file
is therefore never appended to: NAME.json beside NAME.parquet records when and how it was downloaded, and a different
request, or `refresh`, replaces the whole file. AkShare's `stock_zh_a_daily` adjusts by factors, which keeps returns.
Its `stock_zh_a_hist` subtracts, which distorts returns, and is not used.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from uat.data import need
from uat.data.markets.bars import COLUMNS, NUMBERS, Bars, accepted
from uat.files import FileError, read_json, write_atomically

Provider = Literal["yfinance", "akshare"]
ADJUSTMENT = {"yfinance": "auto_adjust: splits and dividends", "akshare": "qfq: multiplicative, from the last day"}


def fetch(
    name: str,
    tickers: Sequence[str],
    *,
    provider: Provider,
    start: str,
    end: str,
    cache: Path,
    refresh: bool = False,
    pull: Callable[[str, str, str], dict[str, Any]] | None = None,
) -> Bars:
    """Return the bars of a market, from the cache if it holds the same request. Dates are YYYY-MM-DD, both included.

    `pull(ticker, start, end)` returns one ticker's columns; by default it downloads them from the provider.
    """
    need("polars", "data", "the cache of market files")
    from uat.data.markets.files import read, write

    if not tickers:
        raise ValueError("tickers must name at least one stock")
    file, note = cache / f"{name}.parquet", cache / f"{name}.json"
    request = {
        "provider": provider,
        "tickers": list(tickers),
        "start": start,
        "end": end,
        "adjustment": ADJUSTMENT[provider],
    }
    if not refresh and file.exists():
        with contextlib.suppress(FileError):  # the note is missing or damaged: download again
            kept = read_json(note)
            if {key: kept.get(key) for key in request} == request:
                return read(file)
    pull = pull or (_yfinance if provider == "yfinance" else _akshare)
    bars = accepted(_stack({ticker: pull(ticker, start, end) for ticker in tickers}), f"{provider} {name}")
    cache.mkdir(parents=True, exist_ok=True)
    note.unlink(missing_ok=True)  # if we are stopped before the new note is written, the next call downloads again
    write(bars, file)
    about = {**request, "pulled": datetime.now(UTC).isoformat(timespec="seconds")}
    write_atomically(note, json.dumps(about, indent=1).encode())
    return bars


def _stack(pulled: dict[str, dict[str, Any]]) -> Bars:
    for ticker, columns in pulled.items():
        missing = [name for name in ("date", *NUMBERS) if name not in columns]
        if missing or not len(columns["date"]):
            raise ValueError(f"{ticker}: the provider gave {f'no column {missing[0]}' if missing else 'no bars'}")
    joined: dict[str, Any] = {
        name: np.concatenate([np.asarray(columns[name], dtype=float) for columns in pulled.values()])
        for name in NUMBERS
    }
    joined["date"] = np.concatenate([np.asarray(c["date"]).astype("datetime64[D]") for c in pulled.values()])
    joined["ticker"] = np.repeat(list(pulled), [len(columns["date"]) for columns in pulled.values()])
    return Bars(**{name: joined[name] for name in COLUMNS})


def _yfinance(ticker: str, start: str, end: str) -> dict[str, Any]:
    library = need("yfinance", "markets", "downloading US and HK stocks")
    after = str(np.datetime64(end) + 1)  # Yahoo excludes the end date
    frame = library.Ticker(ticker).history(start=start, end=after, auto_adjust=True)
    dates = [str(day)[:10] for day in frame.index]  # midnight of the exchange's own time zone
    return {
        "date": np.array(dates, dtype="datetime64[D]"),
        **{name: frame[name.title()].to_numpy() for name in NUMBERS},
    }


def _akshare(ticker: str, start: str, end: str) -> dict[str, Any]:
    """One ticker's columns from AkShare, which writes `000001.SZ` as `sz000001`."""
    library = need("akshare", "markets", "downloading CN stocks")
    code, _, place = ticker.partition(".")
    symbol = {"SZ": "sz", "SS": "sh", "SH": "sh"}.get(place)
    if symbol is None:
        raise ValueError(f"ticker {ticker!r} must end in .SZ, .SS or .SH")
    days = [day.replace("-", "") for day in (start, end)]
    frame = library.stock_zh_a_daily(symbol=symbol + code, start_date=days[0], end_date=days[1], adjust="qfq")
    return {"date": frame["date"].to_numpy(), **{name: frame[name].to_numpy() for name in NUMBERS}}
