"""How far the gates open, by regime (paper, figure "Regime gate on HSI").

‖ρ_t‖ is the norm of the regime gate of a step, over all heads, and ‖g_t‖ that of a layer's token gate.

Axes: E windows in the order of time, L layers, B episodes, T time, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from uat.data.markets.features import Market
from uat.data.markets.regimes import UNKNOWN, label
from uat.data.markets.synthetic import REGIMES
from uat.domains import episode_count, split_seed
from uat.domains.markets import Markets
from uat.domains.markets.tables import load, windows
from uat.evaluation.intervals import interval
from uat.methods import Policy
from uat.runs import Run, load_policy
from uat.training.playing import Player
from uat.training.surroundings import pick_device
from uat.types import Batch, Trajectory

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

AT_ONCE = 256
VOLATILITY_DAYS = 21
"""Days over which the market's volatility is realised."""
QUARTILES = ("calmest", "calm", "rough", "roughest")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateNorms:
    rho_BT: Floats
    g_LBT: Floats


@torch.no_grad()
def gate_norms(policy: Policy, batch: Batch) -> GateNorms:
    """‖ρ_t‖ and ‖g_t‖ of every layer, at every step."""
    gates = policy.eval().trace(batch).gates
    if gates is None:
        raise ValueError(f"{type(policy).__name__} has no gates")
    g_LBT = torch.stack(gates.g).norm(dim=-1)
    return GateNorms(rho_BT=gates.rho.norm(dim=-1).double().cpu().numpy(), g_LBT=g_LBT.double().cpu().numpy())


def gates_by_regime(
    norm_BT: Floats, regime_BT: Ints, valid_BT: NDArray[np.bool_], names: Sequence[str], *, block: float = 1.0
) -> list[dict[str, Any]]:
    """A row per regime: the mean norm over its steps in each episode, and over episodes, with a 95 % interval."""
    rows = []
    for r, name in enumerate(names):
        here_BT = (regime_BT == r) & valid_BT
        count_B = here_BT.sum(1)
        mean_B = np.where(count_B, np.where(here_BT, norm_BT, 0).sum(1) / np.maximum(count_B, 1), np.nan)
        rows.append({"regime": name, **_mean(mean_B, block)})
    return rows


def gates_of(
    run: Run, names: Sequence[str], *, episodes: int = 64, device: torch.device | str | None = None
) -> list[dict[str, Any]]:
    """‖ρ_t‖ by the regime that the domain's facts name, in the run's first test episodes."""
    norms, regimes, real = [], [], []
    for trajectory, policy in _played(run, episodes, device):
        if "regime" not in trajectory.facts:
            raise ValueError(f"{run.path}: {run.config.domain_name} does not say its regimes step by step")
        norms.append(gate_norms(policy, policy.spec.clock.batch(trajectory)).rho_BT)
        regimes.append(trajectory.facts["regime"].cpu().numpy())
        real.append(trajectory.valid.cpu().numpy())
    head = {"domain": run.config.domain_name, "method": run.config.method_name, "seed": run.config.seed}
    rows = gates_by_regime(np.concatenate(norms), np.concatenate(regimes), np.concatenate(real), names)
    return [{**head, "quantity": "rho_norm", **row} for row in rows]


# ---------------------------------------------------------------- markets


@dataclass(frozen=True, slots=True, kw_only=True)
class MarketGates:
    """Every test window of the markets, named by its last day."""

    date_E: NDArray[np.datetime64]
    market_E: NDArray[np.str_]
    regime_E: Ints
    """Index into the names of regimes, told afterwards; -1 where too few days follow."""
    volatility_E: Floats
    """Deviation of the market's daily log returns over the month that ends then; NaN where it begins too early."""
    rho_E: Floats
    """‖ρ_T‖ at the last day."""
    within_E: Floats
    """Mean of ‖ρ_t‖ over the window."""
    hidden_E: Floats
    """‖h_T‖ of the blind policy at the last day."""
    rows: list[dict[str, Any]]
    """Mean of `within_E` by regime and by quartile of volatility, and how far it lies above the calmest quartile."""


def gates_of_markets(told: Run, blind: Run, *, device: torch.device | str | None = None) -> MarketGates:
    """Gates of a policy, and representations of a blind one, over the test windows of the same markets."""
    domain = told.config.build_true_domain()
    if not isinstance(domain, Markets) or blind.config.domain != told.config.domain:
        raise ValueError(f"{told.path} and {blind.path} must be runs of the same markets")
    c = domain.config
    markets = load(c.data, c.suspensions, c.days, c.protocol)
    found = windows(markets, "test", c.protocol)
    day_E, market_E = (found.start_W + c.horizon - 1).numpy(), found.market_W.numpy()
    regime_X, volatility_X = (
        np.concatenate(x) for x in zip(*(_days(m, c.execution_lag) for m in markets), strict=True)
    )
    rho_ET = np.concatenate(
        [gate_norms(policy, policy.spec.clock.batch(played)).rho_BT for played, policy in _played(told, None, device)]
    )
    hidden_E = np.concatenate([_hidden(policy, played) for played, policy in _played(blind, None, device)])
    within_E, regime_E, volatility_E = rho_ET.mean(1), regime_X[day_E], volatility_X[day_E]
    return MarketGates(
        date_E=np.concatenate([market.date_T for market in markets])[day_E],
        market_E=np.array([market.name for market in markets])[market_E],
        regime_E=regime_E,
        volatility_E=volatility_E,
        rho_E=rho_ET[:, -1],
        within_E=within_E,
        hidden_E=hidden_E,
        rows=_market_rows(told, within_E, regime_E, volatility_E, float(c.horizon * len(markets))),
    )


def _days(market: Market, lag: int) -> tuple[Ints, Floats]:
    """Regime and realised volatility of every decision day, from what one unit of money became.

    With an execution lag, relatives are of later days: the first ones have neither.
    """
    relative_TN, days = market.relative_TN, len(market.relative_TN)
    close_TN = np.concatenate([np.ones((1, relative_TN.shape[1])), relative_TN.cumprod(0)])
    volatility_T = np.full(days + 1, np.nan)
    if days >= VOLATILITY_DAYS:
        log_T = np.log(relative_TN.mean(1))
        volatility_T[VOLATILITY_DAYS:] = sliding_window_view(log_T, VOLATILITY_DAYS).std(-1, ddof=1)
    regime_T = np.concatenate([np.full(lag, UNKNOWN), label(close_TN)])
    return regime_T[:days], np.concatenate([np.full(lag, np.nan), volatility_T])[:days]


def _market_rows(
    run: Run, within_E: Floats, regime_E: Ints, volatility_E: Floats, block: float
) -> list[dict[str, Any]]:
    """Windows a day apart share all days but one: intervals resample blocks of a window's length."""
    known = ~np.isnan(volatility_E)
    edges = np.quantile(volatility_E[known], [0.25, 0.5, 0.75]) if known.any() else np.zeros(3)
    quartile_E = np.where(known, np.searchsorted(edges, volatility_E), UNKNOWN)
    groups = {"regime": (REGIMES, regime_E), "volatility": (QUARTILES, quartile_E)}
    calmest = within_E[quartile_E == 0]
    level = float(calmest.mean()) if len(calmest) else np.nan
    head = {"domain": run.config.domain_name, "method": run.config.method_name, "seed": run.config.seed}
    rows = []
    for by, (names, index_E) in groups.items():
        for i, name in enumerate(names):
            found = _mean(np.where(index_E == i, within_E, np.nan), block)
            over = {"over_calmest": found["value"] / level - 1}
            rows.append({**head, "quantity": "rho_norm", "by": by, "group": name, **found, **over})
    return rows


# ---------------------------------------------------------------- playing


def _played(run: Run, episodes: int | None, device: torch.device | str | None) -> Iterator[tuple[Trajectory, Policy]]:
    """So many test episodes of a run (None: what its config says, or all that there are), played greedily in parts."""
    chosen, domain = pick_device(device), run.config.build_domain()
    policy = load_policy(run.path).to(chosen)
    player = Player(policy, domain.simulator("test", chosen), device=chosen, sampled=policy.sampled)
    count = episode_count(domain, "test", episodes or run.config.evaluation.episodes)
    at_once = min(AT_ONCE, count)
    for begin in range(0, count, at_once):
        played = player.play(torch.arange(begin, begin + at_once), split_seed("test", 0))
        yield played.map(lambda x, kept=count - begin: x[:kept]), policy


@torch.no_grad()
def _hidden(policy: Policy, played: Trajectory) -> Floats:
    """‖h_T‖ at the last real step of each window."""
    h_BTD, valid_BT = policy.eval().features(policy.spec.clock.batch(played)), played.valid
    row_B = torch.arange(len(h_BTD), device=h_BTD.device)
    return h_BTD[row_B, valid_BT.sum(1) - 1].norm(dim=-1).double().cpu().numpy()


def _mean(x_B: Floats, block: float) -> dict[str, Any]:
    """The mean over what is defined, its 95 % interval, and how many are."""
    n = int((~np.isnan(x_B)).sum())
    if n < 2:
        return {"value": float(np.nanmean(x_B)) if n else np.nan, "low": np.nan, "high": np.nan, "n": n}
    low, high = interval(torch.from_numpy(x_B)[None], block)
    return {"value": float(np.nanmean(x_B)), "low": low, "high": high, "n": n}
