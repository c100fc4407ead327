"""Generate three synthetic markets, the built-in default, so that nothing needs a download or a licence.

Each market passes through four regimes with known labels:

  regime   lasts (days)   drift per day   volatility   what leads
  bull     120            +0.09 %         0.8          cyclical sectors
  bear      60            -0.10 %         1.4          defensive sectors
  chop      60             0.00 %         1.0          no sector
  shock      8            -0.70 %         2.8          defensive sectors

Lengths are geometric. The log return of asset i is

  beta_i * market + sector + own,   each a normal draw times a clustered volatility

with σ²_t = 0.04 + 0.08 x²_{t-1} + 0.88 σ²_{t-1} for the draws x (GARCH), times the regime's level. Assets are therefore
correlated through market and sectors, large moves follow large moves, and tails are heavier than normal. A regime
shifts the market's drift and tilts the sectors. Opens differ from the last close by a gap, highs and lows enclose open
and close, and volume grows with the size of the move.

Not modelled: dividends, splits, suspensions, listings, links between the three markets.

Axes: T days, N assets, K sectors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from uat.data.markets.bars import Bars, Floats
from uat.noise import uniform

REGIMES = ("bull", "bear", "chop", "shock")
MEAN_DAYS = np.array([120.0, 60.0, 60.0, 8.0])
DRIFT = np.array([9e-4, -1e-3, 0.0, -7e-3])
LEVEL = np.array([0.8, 1.4, 1.0, 2.8])
NEXT = np.array([[0.0, 0.3, 0.5, 0.2], [0.35, 0.0, 0.5, 0.15], [0.55, 0.35, 0.0, 0.1], [0.25, 0.45, 0.3, 0.0]])
"""Transition probabilities between regimes: row = current regime, column = next."""
SECTORS = 5
TILT = np.array([1.0, 0.5, 0.0, -0.5, -1.0])
"""Cyclicality of each sector, from cyclical (1) to defensive (-1)."""
LEAD = np.array([6e-4, -6e-4, 0.0, -3e-3])
"""Extra drift of the most cyclical sector, by regime; the most defensive sector has the opposite drift."""
MARKET_VOL, SECTOR_VOL, OWN_VOL = 0.009, 0.005, 0.012
SHOCK_WEIGHT, MEMORY = 0.08, 0.88


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of a market, and its first day."""

    assets: int
    days: int
    start: str


SIZES = {
    "us": Size(assets=30, days=3420, start="2013-01-02"),
    "hk": Size(assets=45, days=2859, start="2015-01-02"),
    "cn": Size(assets=30, days=2049, start="2018-01-02"),
}
"""The sizes of the panels of the paper's three indices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticMarket:
    """Bars of a generated market, and the regime of each day."""

    bars: Bars
    date_T: NDArray[np.datetime64]
    regime_T: NDArray[np.int64]
    """Index into REGIMES."""


def generate(name: str, size: Size, seed: int = 0) -> SyntheticMarket:
    """Generate a market that depends only on (name, size, seed); its first days do not depend on `size.days`."""
    days, assets = size.days, size.assets
    draw = _Draws(f"markets.{name}", seed, days)
    regime_T = _regimes(draw)
    sector_N = np.arange(assets) % SECTORS
    beta_N = 0.7 + 0.6 * draw.uniform("beta", assets)[:, 0]
    level_T1 = LEVEL[regime_T][:, None]

    market_T1 = _clustered(draw.normal("market", 1), MARKET_VOL * level_T1) + DRIFT[regime_T][:, None]
    sector_TK = _clustered(draw.normal("sector", SECTORS), SECTOR_VOL * level_T1) + LEAD[regime_T][:, None] * TILT
    own_TN = _clustered(draw.normal("own", assets), OWN_VOL * np.sqrt(level_T1))
    return_TN = beta_N * market_T1 + sector_TK[:, sector_N] + own_TN

    close_TN = (20 + 80 * draw.uniform("price", assets)[:, 0]) * np.exp(return_TN.cumsum(0))
    scale_TN = np.sqrt(level_T1) * OWN_VOL
    before_TN = close_TN / np.exp(return_TN)
    open_TN = before_TN * np.exp(0.3 * return_TN + 0.3 * scale_TN * draw.normal("gap", assets))
    high_TN = np.maximum(open_TN, close_TN) * np.exp(0.6 * scale_TN * np.abs(draw.normal("high", assets)))
    low_TN = np.minimum(open_TN, close_TN) * np.exp(-0.6 * scale_TN * np.abs(draw.normal("low", assets)))
    volume_TN = np.exp(14 + 0.35 * draw.normal("volume", assets) + 0.4 * np.abs(return_TN) / scale_TN)

    date_T = np.busday_offset(size.start, np.arange(days), roll="forward").astype("datetime64[D]")
    tickers = [f"{name.upper()}{i:02d}" for i in range(assets)]
    bars = Bars(
        date=np.repeat(date_T, assets),
        ticker=np.tile(np.array(tickers), days),
        open=open_TN.ravel(),
        high=high_TN.ravel(),
        low=low_TN.ravel(),
        close=close_TN.ravel(),
        volume=volume_TN.round().ravel(),
    )
    return SyntheticMarket(bars=bars, date_T=date_T, regime_T=regime_T)


@dataclass(frozen=True, slots=True)
class _Draws:
    """Random numbers by name: adding a name does not change the numbers of the others."""

    name: str
    seed: int
    days: int

    def uniform(self, what: str, count: int, per: int = 1) -> Floats:
        """Uniform numbers (count, per) in (0, 1)."""
        return uniform(self.seed, f"{self.name}.{what}", torch.arange(count), per).numpy()

    def normal(self, what: str, count: int) -> Floats:
        """Standard normal numbers (days, count), by the Box-Muller transform."""
        u = self.uniform(what, count, 2 * self.days).reshape(count, self.days, 2)
        return (np.sqrt(-2 * np.log(u[..., 0])) * np.cos(2 * math.pi * u[..., 1])).T


def _regimes(draw: _Draws) -> NDArray[np.int64]:
    """Regime of each day (T,): a Markov chain that starts in a bull market."""
    leave_T, where_T = draw.uniform("regime", 1, 2 * draw.days).reshape(draw.days, 2).T
    regime_T, now = np.zeros(draw.days, np.int64), 0
    for t in range(draw.days):
        if t and leave_T[t] < 1 / MEAN_DAYS[now]:
            now = min(int(np.searchsorted(NEXT[now].cumsum(), where_T[t], side="right")), len(REGIMES) - 1)
        regime_T[t] = now
    return regime_T


def _clustered(normal_TX: Floats, scale_T1: Floats) -> Floats:
    """Scale normal draws to clustered volatility (GARCH) with the given long-run volatility."""
    out_TX, variance_X = np.empty_like(normal_TX), np.ones(normal_TX.shape[1])
    for t, normal_X in enumerate(normal_TX):
        part_X = np.sqrt(variance_X) * normal_X
        out_TX[t] = part_X
        variance_X = (1 - SHOCK_WEIGHT - MEMORY) + SHOCK_WEIGHT * part_X**2 + MEMORY * variance_X
    return out_TX * scale_T1
