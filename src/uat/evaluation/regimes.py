"""Does what a policy carries inside follow the market's regime? The paper's diagnostic on the Hang Seng, for any run.

Two numbers of every step of every test window:
  rho   ‖ρ_t‖, the gate that the regime state puts on queries (UAT and its ablations)
  h     ‖h_t‖, the last representation (every method); the paper shows Vanilla's

beside what is told of the day afterwards: its regime by the paper's rules, the generator's own where it made the
market, and the quartile of the market's volatility over the last month. No policy sees any of these.

A window's end is one number per day and market. Within windows every step that has feedback counts, so that a day
counts once for each window that holds it.

Axes: E test windows, T steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from uat.domains import episode_count, split_seed
from uat.domains.markets import MarketsSimulator
from uat.domains.markets.days import REGIMES, UNKNOWN, Days, days_of
from uat.methods import Policy
from uat.methods.policy import TransformerPolicy
from uat.runs import Run, load_policy
from uat.training.playing import Player, play_all
from uat.training.surroundings import pick_device, precision
from uat.types import Batch, Trajectory

CALM = ("bull", "chop")
"""Regimes that a shock is told from."""
QUARTILES = ("calmest quartile", "second quartile", "third quartile", "wildest quartile")

Row = dict[str, Any]
Floats = NDArray[np.floating]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Rows for a table, and the arrays behind them for a figure."""

    rows: list[Row]
    arrays: dict[str, NDArray[Any]]
    """date, market, regime, known, quartile (E,) of each window's end; day, rho and h (E, T) of every step."""


def diagnose(run: Run | Path | str, *, device: torch.device | str | None = None) -> Diagnosis:
    """Let the run's policy play the test windows greedily, and sort what it carries inside by what was going on."""
    run = run if isinstance(run, Run) else Run.open(run)
    chosen, domain = pick_device(device), run.config.build_domain()
    simulator = domain.simulator("test", chosen)
    if not isinstance(simulator, MarketsSimulator):
        raise ValueError(f"{run.path} is a run of {run.config.domain_name}: regimes of days are told of markets alone")
    policy = load_policy(run.path).to(chosen)
    player = Player(policy, simulator, device=chosen, sampled=False)
    with torch.no_grad(), precision(run.config.train.precision):
        count = episode_count(domain, "test", 0)
        found = play_all(player, count, split_seed("test", 0), lambda played: _norms(policy, played), 512)
    norms = {name: values.float().cpu().numpy() for name, values in found.items()}
    start_E = simulator.windows.start_W.cpu().numpy()
    day_ET = start_E[:, None] + np.arange(domain.spec.horizon)
    told = _told(days_of(run.config.domain), day_ET)
    head = {"run": run.config.identity(), "method": run.config.method_name, "seed": run.config.seed}
    rows = [{**head, **row} for name, norm_ET in norms.items() for row in _rows(name, norm_ET, told)]
    ends = {name: group_ET[:, -1] for name, group_ET in told.items()}
    market_E = np.array(domain.markets)[simulator.windows.market_W.cpu().numpy()]
    return Diagnosis(rows=rows, arrays={**ends, "market": market_E, "day": told["date"], **norms})


def _norms(policy: Policy, played: Trajectory) -> dict[str, Tensor]:
    """(B, T) of every quantity that the policy has."""
    batch: Batch = policy.spec.clock.batch(played)
    found = {"h": policy.features(batch).norm(dim=-1)}
    gates = policy.gates if isinstance(policy, TransformerPolicy) else None
    if gates is not None:
        found["rho"] = gates(batch.prev_action, batch.prev_reward).rho.norm(dim=-1)
    return found


def _told(days: Days, day_ET: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """What is known of every step's day; quartiles are those of the days that end a window."""
    volatility_ET = days.volatility_X[day_ET]
    edges = np.nanquantile(volatility_ET[:, -1], [0.25, 0.5, 0.75])
    quartile_ET = np.where(np.isnan(volatility_ET), UNKNOWN, np.searchsorted(edges, volatility_ET))
    names = {"regime": REGIMES, "known": REGIMES, "quartile": QUARTILES}
    index = {"regime": days.regime_X[day_ET], "known": days.known_X[day_ET], "quartile": quartile_ET}
    words = {by: np.array([*names[by], ""])[index_ET] for by, index_ET in index.items()}  # -1 is the last: nothing
    return {"date": days.date_X[day_ET], **words}


def _rows(quantity: str, norm_ET: Floats, told: dict[str, NDArray[Any]]) -> list[Row]:
    """Mean, deviation and count in every group, the increase over the calmest quartile, and how shocks stand out."""
    rows: list[Row] = []
    for where, steps in (("end", slice(-1, None)), ("within", slice(1, None))):
        norm = norm_ET[:, steps]
        calm = norm[told["quartile"][:, steps] == QUARTILES[0]].mean()
        for by, names in (("regime", REGIMES), ("known", REGIMES), ("quartile", QUARTILES)):
            group = told[by][:, steps]
            head = {"quantity": quantity, "where": where, "by": by}
            for name in (name for name in names if (group == name).any()):
                own = norm[group == name]
                increase = float(own.mean() / calm - 1) if calm > 0 else None
                value = {"mean": float(own.mean()), "std": float(own.std()), "n": len(own), "increase": increase}
                rows.append({**head, "group": name, **value})
            shock, quiet = norm[group == "shock"], norm[np.isin(group, CALM)]
            if by != "quartile" and len(shock) and len(quiet):
                rows.append({**head, "group": "shock against calm", "auc": auc(shock, quiet), "n": len(shock)})
    return rows


def auc(high: Floats, low: Floats) -> float:
    """How often a number of the first kind is above one of the second; ties count half."""
    low = np.sort(low)
    below, upto = np.searchsorted(low, high, side="left"), np.searchsorted(low, high, side="right")
    return float((below + upto).mean() / (2 * len(low)))
