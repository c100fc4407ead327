"""What is looked at in trained policies beside their scores: the numbers behind the figures on mechanism.

A probe takes the runs of each method, one per seed, and gives arrays and rows. They are kept in one file,
traces/PROBE.safetensors: the arrays, and beside them the rows and the identities of the runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from uat.evaluation.mechanism import attention_under_shifts, gates_of_markets, kinetics_of
from uat.evaluation.scores import BLIND
from uat.runs import Run, RunError, read_tensors, write_tensors

TOLD = "uat"
"""The method whose gates and attention are looked at, beside the blind one."""
KINETICS_EPISODES = {"smoke": 16, "quick": 256, "paper": 1024}
ATTENTION_EPISODES = {"smoke": 4, "quick": 32, "paper": 32}

Runs = Mapping[str, Sequence[Run]]
"""By method, in the order of seeds."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What a probe saw."""

    rows: list[dict[str, Any]]
    """Plain numbers."""
    arrays: dict[str, Tensor]
    runs: tuple[str, ...] = ()
    """Identities of the runs that were looked at."""


def probe_attention(runs: Runs, device: torch.device) -> Trace:
    """Maps under shifts of the goal: of every layer, means over seeds, episodes and heads."""
    told, blind = runs[TOLD], runs[BLIND]
    episodes = ATTENTION_EPISODES[told[0].config.preset]
    found = attention_under_shifts(told, blind, episodes=episodes, device=device)
    names = [item.name for item in fields(found) if item.name.endswith("_LTT")]
    maps = {name.removesuffix("_LTT"): torch.from_numpy(getattr(found, name)).half() for name in names}
    return Trace(found.rows, {**maps, "shifts": torch.tensor(found.shifts)})


def probe_kinetics(runs: Runs, device: torch.device) -> Trace:
    """Accuracy around every shift of the first test episodes, of each method and seed."""
    rows, arrays = [], {}
    for method, own in runs.items():
        seen = [asdict(kinetics_of(r, episodes=KINETICS_EPISODES[r.config.preset], device=device)) for r in own]
        for name in ("offset", "accuracy", "sem"):
            arrays[f"{method}/{name}"] = torch.tensor([one[name] for one in seen], dtype=torch.float64)
        for run, one in zip(own, seen, strict=True):
            numbers = {name: one[name] for name in ("before", "after", "steps_to_recover")}
            rows.append({"method": method, "seed": run.config.seed, "shifts": max(one["shifts"]), **numbers})
    return Trace(rows, arrays)


def probe_gate(runs: Runs, device: torch.device) -> Trace:
    """Gates over the test windows of markets, of the first seed, and rows of every seed."""
    seen = [gates_of_markets(*pair, device=device) for pair in zip(runs[TOLD], runs[BLIND], strict=True)]
    first = seen[0]
    names = ("regime_E", "volatility_E", "rho_E", "within_E", "hidden_E")
    arrays = {name.removesuffix("_E"): torch.from_numpy(np.asarray(getattr(first, name))) for name in names}
    arrays["day"] = torch.from_numpy(first.date_E.astype("datetime64[D]").astype(np.int64))
    markets = sorted(set(first.market_E.tolist()))
    arrays["market"] = torch.tensor([markets.index(name) for name in first.market_E.tolist()])
    return Trace([{**row, "markets": markets} for one in seen for row in one.rows], arrays)


PROBES: dict[str, Callable[[Runs, torch.device], Trace]] = {
    "attention": probe_attention,
    "kinetics": probe_kinetics,
    "gate": probe_gate,
}


def file_of(folder: Path, name: str) -> Path:
    return folder / "traces" / f"{name}.safetensors"


def look(name: str, runs: Runs, folder: Path, device: torch.device) -> None:
    """Let a probe look at these runs, unless it has looked at all of them before, perhaps beside others."""
    identities = sorted(run.config.identity() for own in runs.values() for run in own)
    old = seen(folder, name)
    if old is None or not set(identities) <= set(old.runs):
        found = PROBES[name](runs, device)
        write_tensors(file_of(folder, name), found.arrays, {"rows": found.rows, "runs": identities})


def seen(folder: Path, name: str) -> Trace | None:
    """What a probe saw; None if it has not looked."""
    if not file_of(folder, name).exists():
        return None
    arrays, meta = read_tensors(file_of(folder, name))
    if not {"rows", "runs"} <= meta.keys():
        raise RunError(f"{file_of(folder, name)} is not what a probe saw")
    return Trace(meta["rows"], arrays, tuple(meta["runs"]))
