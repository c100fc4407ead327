"""Internal quantities of policies by market regime (paper, figure "Regime gate on HSI").

Quantities at every step of every test window:
  h_norm         ‖h_t‖, the last representation (every method; the paper shows Vanilla's)
  rho_norm       ‖ρ_t‖, the gate that the regime state applies to queries, over all heads (methods with gates)
  weights_moved  Σ |w_t - w⁰_t|, where w⁰_t are the portfolio weights without any feedback in this window (methods with
                 gates): a gate may distinguish regimes and still be too small to change decisions

They are grouped by labels that are assigned to days with hindsight and that no policy sees: the regime by the paper's
rules, the generator's own regime for a synthetic market, and the quartile of the market's volatility over a month.

Column "where":
  end      the last step of a window, by its day: one number per day and market
  window   the mean over a window, by its last day: the paper's "within-window"
  step     every step with feedback, by its own day: a day counts once for each window that contains it

Axes: E windows in the order of time, T steps, S those that count (one, or all with feedback), X days of all markets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from uat.distributions import choose
from uat.domains.markets import Markets
from uat.domains.markets.days import REGIMES, UNKNOWN, days_of
from uat.domains.markets.tables import load, windows
from uat.episode import Batch
from uat.evaluation.intervals import interval
from uat.methods import Policy
from uat.paper.mechanism.gates import gates_in, played
from uat.runs import Run, load_policy
from uat.threads import cpu_threads
from uat.training.surroundings import pick_device

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Row = dict[str, Any]

CALM = ("bull", "chop")
"""Regimes with which shocks are compared."""
QUARTILES = ("calmest", "calm", "rough", "roughest")
SHOCKS = "shock against calm"
"""Group of rows with the probability that a quantity is larger in a shock than on a calm day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarketGates:
    """Labels and quantities of every step of every test window of a run."""

    market_E: NDArray[np.str_]
    date_ET: NDArray[np.datetime64]
    regime_ET: Ints
    """Regime by the paper's rules, an index into REGIMES; -1 near the ends of the data."""
    known_ET: Ints
    """Regime of the generator; -1 in real markets."""
    volatility_ET: Floats
    """Standard deviation of the market's daily log returns over the preceding month; NaN near the start of the data."""
    quartile_ET: Ints
    """Quartile of volatility, an index into QUARTILES, with edges from the windows' last days; -1 if unknown."""
    norms: dict[str, Floats]
    """Values (E, T) of each quantity."""
    rows: list[Row]
    """Means by group with standard deviation, interval and increase over the calmest quartile; and AUCs of shocks."""

    def daily(self, quantity: str, market: str) -> tuple[NDArray[np.datetime64], Floats]:
        """Days of a market, and for each the mean over the windows that contain it at a step with feedback."""
        own_E = self.market_E == market
        day_X, place = np.unique(self.date_ET[own_E, 1:].ravel(), return_inverse=True)
        return day_X, np.bincount(place, self.norms[quantity][own_E, 1:].ravel()) / np.bincount(place)


@cpu_threads()
def gates_of_markets(run: Run, *, device: torch.device | str | None = None) -> MarketGates:
    """Play all test windows with the run's policy, and group its internal quantities by the labels of the days."""
    domain = run.config.build_true_domain()
    if not isinstance(domain, Markets):
        raise ValueError(f"{run.path} is a run of {run.config.domain_name}: only markets have regimes of days")
    c = domain.config
    markets = load(c.data, c.suspensions, c.days, c.protocol)
    test_windows, days = windows(markets, "test", c.protocol), days_of(c)
    day_ET = test_windows.start_W.numpy()[:, None] + np.arange(c.horizon)
    volatility_ET = days.volatility_X[day_ET]
    labels = {
        "regime": (REGIMES, days.regime_X[day_ET]),
        "known": (REGIMES, days.known_X[day_ET]),
        "volatility": (QUARTILES, _quartiles(volatility_ET)),
        "all": (("all",), np.zeros_like(day_ET)),
    }
    norms = _norms(run, device)
    head = {"run": run.config.identity(), "domain": run.config.domain_name}
    head |= {"method": run.config.method_name, "seed": run.config.seed}
    block = float(c.horizon * len(markets))  # windows that start one day apart share all days but one
    return MarketGates(
        market_E=np.array([market.name for market in markets])[test_windows.market_W.numpy()],
        date_ET=days.date_X[day_ET],
        regime_ET=labels["regime"][1],
        known_ET=labels["known"][1],
        volatility_ET=volatility_ET,
        quartile_ET=labels["volatility"][1],
        norms=norms,
        rows=[{**head, "quantity": name, **row} for name, x_ET in norms.items() for row in _rows(x_ET, labels, block)],
    )


def _quartiles(volatility_ET: Floats) -> Ints:
    known_ET, end_E = ~np.isnan(volatility_ET), volatility_ET[:, -1]
    edges = np.quantile(end_E[known_ET[:, -1]], [0.25, 0.5, 0.75]) if known_ET[:, -1].any() else np.zeros(3)
    return np.where(known_ET, np.searchsorted(edges, volatility_ET), UNKNOWN)


# ---------------------------------------------------------------- quantities


@torch.no_grad()
def _norms(run: Run, device: torch.device | str | None) -> dict[str, Floats]:
    """Every quantity (E, T), in double precision: single precision may not show the gates' effect on weights."""
    policy = load_policy(run.path).to(pick_device(device)).double().eval()
    parts = [_quantities(policy, policy.spec.clock.batch(trajectory)) for trajectory, _ in played(run, None, device)]
    return {name: np.concatenate([part[name].cpu().numpy() for part in parts]) for name in parts[0]}


def _quantities(policy: Policy, batch: Batch) -> dict[str, Tensor]:
    """Values (B, T) of every quantity that the policy has."""
    batch = replace(batch, trajectory=None).map(lambda x: x.double() if x.is_floating_point() else x)
    h_BTD = policy.features(batch)
    values = {"h_norm": h_BTD.norm(dim=-1)}
    if (utility := gates_in(policy)) is not None:
        values["rho_norm"] = utility(batch.prev_action, batch.prev_reward).rho.norm(dim=-1)
        zeros = {name: torch.zeros_like(getattr(batch, name)) for name in ("prev_action", "prev_reward")}
        informed, blind = (choose(policy.logits(one), policy.spec) for one in (batch, replace(batch, **zeros)))
        values["weights_moved"] = (informed - blind).abs().sum(-1)
    return values


# ---------------------------------------------------------------- rows


def _rows(x_ET: Floats, labels: dict[str, tuple[tuple[str, ...], Ints]], block: float) -> Iterator[Row]:
    places = {"end": x_ET[:, -1:], "window": x_ET.mean(1, keepdims=True), "step": x_ET[:, 1:]}
    for where, x_ES in places.items():
        steps = slice(1, None) if where == "step" else slice(-1, None)
        calmest_ES = labels["volatility"][1][:, steps] == 0
        level = float(x_ES[calmest_ES].mean()) if calmest_ES.any() else np.nan
        for by, (names, index_ET) in labels.items():
            index_ES, head = index_ET[:, steps], {"where": where, "by": by}
            for i, name in enumerate(names):
                if (index_ES == i).any():
                    mean = group_mean(x_ES, index_ES == i, block)
                    over = mean["value"] / level - 1 if level > 0 else np.nan
                    yield {**head, "group": name, **mean, "over_calmest": over}
            shock_ES, calm_ES = (
                np.isin(index_ES, [i for i, name in enumerate(names) if name in some]) for some in (("shock",), CALM)
            )
            if shock_ES.any() and calm_ES.any():
                yield {**head, "group": SHOCKS, **auc(x_ES, shock_ES, calm_ES, block)}


def group_mean(x_ES: Floats, own_ES: Bools, block: float) -> Row:
    """Mean and standard deviation over a group's steps, and the mean's interval over blocks of windows."""
    own, mean = x_ES[own_ES], float(x_ES[own_ES].mean())
    linear_E = mean + ((x_ES - mean) * own_ES).sum(1) / own_ES.sum(1).mean()  # the linear part of a ratio of sums
    return {"value": mean, "std": float(own.std()), **_ends(linear_E, own_ES, block), "n": len(own)}


def auc(x_ES: Floats, high_ES: Bools, low_ES: Bools, block: float) -> Row:
    """Probability that a value of the first group exceeds one of the second (ties count half), and its interval."""
    below_ES = np.zeros_like(x_ES)
    below_ES[high_ES] = _share_below(x_ES[high_ES], x_ES[low_ES])
    below_ES[low_ES] = 1 - _share_below(x_ES[low_ES], x_ES[high_ES])
    area = float(below_ES[high_ES].mean())
    weight_ES = high_ES / high_ES.sum(1).mean() + low_ES / low_ES.sum(1).mean()
    linear_E = area + ((below_ES - area) * weight_ES).sum(1)  # linear part of the area, since both groups are samples
    return {"auc": area, **_ends(linear_E, high_ES, block), "n": int(high_ES.sum()), "calm": int(low_ES.sum())}


def _share_below(x: Floats, others: Floats) -> Floats:
    others = np.sort(others)
    return (np.searchsorted(others, x, side="left") + np.searchsorted(others, x, side="right")) / (2 * len(others))


def _ends(linear_E: Floats, own_ES: Bools, block: float) -> Row:
    """The 95 % interval; NaN for a single window."""
    several = own_ES.any(1).sum() > 1
    low, high = interval(torch.from_numpy(linear_E)[None], block) if several else (np.nan, np.nan)
    return {"low": low, "high": high}
