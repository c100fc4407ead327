"""All markets of a run as lookup tables of the simulator: one row per decision day, one market after the other.

Markets are padded to the same number of assets, and cash is the first column.

Axes: X decision days of all markets, M markets, N assets, F indicators, A cash and assets, W windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from uat.data import need
from uat.data.markets import prepared
from uat.data.markets.bars import Bars, market_files
from uat.data.markets.features import Market, Protocol, prepare
from uat.data.markets.panel import align
from uat.data.markets.synthetic import SIZES, Size, generate
from uat.episode import TensorFields
from uat.files import FileError
from uat.memory import check_fits

Suspensions = Literal["common", "mask"]


@dataclass(slots=True, kw_only=True)
class Tables(TensorFields):
    """Observations, returns, allowed assets and hindsight labels of all decision days."""

    feature_XNF: Tensor
    relative_XA: Tensor
    """Value of one unit of money at the next close; 1 for cash."""
    allowed_XA: Tensor
    target_XA: Tensor
    """Hindsight label: softmax((relative - 1) / temperature) over cash, whose logit is 0, and the allowed assets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Windows of a split in order of time, with the markets taking turns."""

    market_W: Tensor
    start_W: Tensor
    """The window's first row in the tables."""
    counts: tuple[int, ...]
    """Number of windows of each market."""


def names(data: str) -> tuple[str, ...]:
    """Return the names of the markets without reading them."""
    if prepared.is_prepared(data):
        return prepared.names(Path(data))
    return tuple(file.stem for file in market_files(Path(data))) if data else tuple(SIZES)


BYTES_PER_BAR = 400
"""Memory for each generated bar while its features are computed."""


@lru_cache(maxsize=8)
def load(data: str, suspensions: Suspensions, days: int, protocol: Protocol) -> tuple[Market, ...]:
    """Return the markets of a file or folder, or the embedded ones if `data` is empty; cached for further runs.

    days: use only the latest `days` days; 0: all.
    """
    if not data:
        return tuple(prepare(name, align(bars, suspensions), protocol) for name, bars in _embedded(days).items())
    markets = []
    for name, bars in read(data).items():
        kept = bars.take(np.isin(bars.date, np.unique(bars.date)[-days:])) if days else bars
        try:
            markets.append(prepare(name, align(kept, suspensions), protocol))
        except ValueError as error:
            raise FileError(f"{data}: {error}") from None
    return tuple(markets)


def read(data: str) -> dict[str, Bars]:
    """Return the checked bars of every market of a file or folder."""
    if prepared.is_prepared(data):
        return prepared.read(Path(data))
    need("polars", "data", "reading market files")
    from uat.data.markets.files import read

    return {file.stem: read(file) for file in market_files(Path(data))}


def _embedded(days: int) -> dict[str, Bars]:
    bars = sum(size.assets * (days or size.days) for size in SIZES.values())
    check_fits(BYTES_PER_BAR * bars, f"days={days} of all embedded markets")
    sizes = {name: Size(assets=s.assets, days=days or s.days, start=s.start) for name, s in SIZES.items()}
    return {name: generate(name, size).bars for name, size in sizes.items()}


def build(markets: tuple[Market, ...], max_assets: int, temperature: float) -> Tables:
    rows, width = sum(market.feature_TNF.shape[0] for market in markets), markets[0].feature_TNF.shape[2]
    check_fits(20 * rows * max_assets * (width + 2), f"max_assets={max_assets} on {rows} days of all markets")
    parts = [_padded(market, max_assets) for market in markets]
    feature, relative, allowed = (torch.from_numpy(np.concatenate(x)) for x in zip(*parts, strict=True))
    logits = ((relative - 1) / temperature).masked_fill(~allowed, -torch.inf)
    return Tables(
        feature_XNF=feature.float(),
        relative_XA=relative.float(),
        allowed_XA=allowed,
        target_XA=logits.softmax(-1).float(),
    )


def _padded(market: Market, max_assets: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    days, assets, width = market.feature_TNF.shape
    if assets > max_assets:
        raise ValueError(f"max_assets={max_assets} is below the {assets} assets of {market.name}")
    feature, relative = np.zeros((days, max_assets, width)), np.ones((days, max_assets + 1))
    allowed = np.zeros((days, max_assets + 1), bool)
    feature[:, :assets] = market.feature_TNF
    relative[:, 1 : assets + 1] = market.relative_TN
    allowed[:, 0], allowed[:, 1 : assets + 1] = True, market.tradable_TN
    return feature, relative, allowed


def windows(markets: tuple[Market, ...], split: str, protocol: Protocol) -> Windows:
    first = np.cumsum([0, *(len(market.date_T) for market in markets)])
    starts = [protocol.windows(market.splits[split]) + first[m] for m, market in enumerate(markets)]
    turn = np.concatenate([np.arange(len(start)) for start in starts])
    market = np.repeat(np.arange(len(markets)), [len(start) for start in starts])
    order = np.lexsort((market, turn))
    return Windows(
        market_W=torch.from_numpy(market[order]),
        start_W=torch.from_numpy(np.concatenate(starts)[order]),
        counts=tuple(len(start) for start in starts),
    )


def grown(markets: tuple[Market, ...], relative_XA: Tensor, split: str, protocol: Protocol) -> Tensor:
    """(X, A) growth of one unit of cash and of each asset since the first scored day of the split."""
    grown_XA, begin = torch.ones_like(relative_XA), 0
    for market in markets:
        part, end = market.splits[split], begin + len(market.date_T)
        first = begin + part.start + protocol.window - 1
        grown_XA[first + 1 : end] = relative_XA[first : end - 1].double().cumprod(0).to(grown_XA.dtype)
        begin = end
    return grown_XA
