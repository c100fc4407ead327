"""Probes analyse trained policies beyond their scores, for the figures on mechanism.

A probe maps the runs of each method, one per seed, to arrays and rows. They are stored in traces/PROBE.safetensors,
together with the identities of the runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from uat.evaluation.scores import BLIND
from uat.paper.mechanism import attention_under_shifts, gates_of_markets, kinetics_of, terms_of_runs
from uat.rows import ATTENTION, GATE, GATE_AREAS, GATE_MEANS, KINETICS, TERMS, check_row, check_rows
from uat.runs import Run
from uat.settings import shown
from uat.tensor_files import RunError, read_tensors, write_tensors

INFORMED = "uat"
"""The method whose gates and attention are analysed and compared with the blind method."""
KINETICS_EPISODES = {"smoke": 16, "quick": 256, "paper": 1024}
TERMS_EPISODES = {"smoke": 4, "quick": 64, "paper": 256}
ATTENTION_EPISODES = {"smoke": 4, "quick": 32, "paper": 32}

Runs = Mapping[str, Sequence[Run]]
"""Method -> runs in the order of seeds."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Result of a probe."""

    rows: list[dict[str, Any]]
    arrays: dict[str, Tensor]
    runs: tuple[str, ...] = ()
    """Identities of the analysed runs."""


def probe_attention(runs: Runs, device: torch.device) -> Trace:
    """Attention maps of every layer under shifts of the goal, averaged over seeds, episodes and heads."""
    informed, blind = runs[INFORMED], runs[BLIND]
    episodes = ATTENTION_EPISODES[informed[0].config.preset]
    study = attention_under_shifts(informed, blind, episodes=episodes, device=device)
    names = [item.name for item in fields(study) if item.name.endswith("_LTT")]
    maps = {name.removesuffix("_LTT"): torch.from_numpy(getattr(study, name)).half() for name in names}
    return Trace(study.rows, {**maps, "shifts": torch.tensor(study.shifts)})


def probe_terms(runs: Runs, device: torch.device) -> Trace:
    """Sizes of the terms of UAT's attention logits, by layer."""
    rows = terms_of_runs(runs[INFORMED], episodes=TERMS_EPISODES[runs[INFORMED][0].config.preset], device=device)
    return Trace(rows, {"share": torch.tensor([row["share"] for row in rows])})


def probe_kinetics(runs: Runs, device: torch.device) -> Trace:
    """Accuracy of each method and seed around every shift of the first test episodes."""
    rows, arrays = [], {}
    for method, own in runs.items():
        results = [asdict(kinetics_of(r, episodes=KINETICS_EPISODES[r.config.preset], device=device)) for r in own]
        for name in ("offset", "accuracy", "sem"):
            arrays[f"{method}/{name}"] = torch.tensor([one[name] for one in results], dtype=torch.float64)
        for run, one in zip(own, results, strict=True):
            numbers = {name: one[name] for name in ("before", "after", "steps_to_recover")}
            rows.append({"method": method, "seed": run.config.seed, "shifts": max(one["shifts"]), **numbers})
    return Trace(rows, arrays)


def probe_gate(runs: Runs, device: torch.device) -> Trace:
    """Internal quantities of policies over the test windows of markets, with rows for every method and seed.

    The arrays are those of the first seed: for each window its last day, the value on that day and the window's mean;
    and for each day, starting one window earlier, the mean over the windows that contain it.
    """
    by_method = {method: [gates_of_markets(run, device=device) for run in own] for method, own in runs.items()}
    first = next(iter(by_method.values()))[0]
    markets = sorted(set(first.market_E.tolist()))
    arrays: dict[str, NDArray[Any]] = {
        "market": np.searchsorted(markets, first.market_E),
        "day": _day_numbers(first.date_ET[:, -1]),
        "regime": first.regime_ET[:, -1],
        "known": first.known_ET[:, -1],
        "volatility": first.volatility_ET[:, -1],
    }
    for method, own in by_method.items():
        for quantity, x_ET in own[0].norms.items():
            daily = {market: own[0].daily(quantity, market) for market in markets}
            name = f"{method}/{quantity}"
            arrays |= {f"{name}/end": x_ET[:, -1], f"{name}/window": x_ET.mean(1)}
            arrays[f"{name}/daily"] = np.concatenate([x for _, x in daily.values()])
            arrays["daily/day"] = np.concatenate([_day_numbers(day) for day, _ in daily.values()])
            arrays["daily/market"] = np.repeat(np.arange(len(markets)), [len(day) for day, _ in daily.values()])
    rows = [{**row, "markets": markets} for own in by_method.values() for one in own for row in one.rows]
    return Trace(rows, {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in arrays.items()})


def _day_numbers(date: NDArray[np.datetime64]) -> NDArray[np.int64]:
    return date.astype("datetime64[D]").astype(np.int64)


PROBES: dict[str, Callable[[Runs, torch.device], Trace]] = {
    "attention": probe_attention,
    "terms": probe_terms,
    "kinetics": probe_kinetics,
    "gate": probe_gate,
}


def file_of(folder: Path, name: str) -> Path:
    return folder / "traces" / f"{name}.safetensors"


def run_probe(name: str, runs: Runs, folder: Path, device: torch.device) -> None:
    """Run a probe and store its trace, unless the stored trace already covers all of these runs."""
    identities = sorted(run.config.identity() for own in runs.values() for run in own)
    old = read_trace(folder, name)
    if old is None or not set(identities) <= set(old.runs):
        trace = PROBES[name](runs, device)
        write_tensors(file_of(folder, name), trace.arrays, {"rows": trace.rows, "runs": identities})


def read_trace(folder: Path, name: str) -> Trace | None:
    """Read and check the trace of a probe; None if there is none."""
    if not file_of(folder, name).exists():
        return None
    file = file_of(folder, name)
    arrays, meta = read_tensors(file)
    if not {"rows", "runs"} <= meta.keys():
        raise RunError(f"{file} is not the trace of a probe: its metadata lacks rows or runs")
    runs = meta["runs"]
    if not isinstance(runs, list) or not all(isinstance(run, str) for run in runs):
        raise RunError(f"{file}: the runs must be a list of identities, got {shown(runs)}")
    trace = Trace(check_rows(meta["rows"], {}, str(file)), arrays, tuple(runs))
    if not trace.rows:
        raise RunError(f"{file} holds no rows")
    try:
        CHECKS[name](trace, str(file))
    except KeyError as missing:
        raise RunError(f"{file} has no array {missing}") from None
    return trace


def check_attention(trace: Trace, where: str) -> None:
    check_rows(trace.rows, ATTENTION, where)
    layers, steps, *_ = (*trace.arrays["told"].shape, 0, 0)
    for name in ("told", "blind", "base", "modulation_size", "difference"):
        check_array(trace, name, (layers, steps, steps), where, floating=True)
    check_array(trace, "shifts", (len(trace.arrays["shifts"].reshape(-1)),), where, floating=False)


def check_terms(trace: Trace, where: str) -> None:
    check_rows(trace.rows, TERMS, where)
    check_array(trace, "share", (len(trace.rows),), where, floating=True)


def check_kinetics(trace: Trace, where: str) -> None:
    check_rows(trace.rows, KINETICS, where)
    for method in {row["method"] for row in trace.rows}:
        seeds, offsets, *_ = (*trace.arrays[f"{method}/offset"].shape, 0, 0)
        for name in ("offset", "accuracy", "sem"):
            check_array(trace, f"{method}/{name}", (seeds, offsets), where, floating=True)


def check_gate(trace: Trace, where: str) -> None:
    for index, row in enumerate(trace.rows):
        columns = GATE_MEANS if "value" in row else GATE_AREAS if "auc" in row else GATE
        check_row(row, columns, f"{where}, row {index}")
        if not row["markets"] or row["markets"] != trace.rows[0]["markets"]:
            raise RunError(f"{where}, row {index}: the markets must be those of the first row, and not empty")
    for when, day, of in (("end", "day", "market"), ("daily", "daily/day", "daily/market")):
        length = len(trace.arrays[day].reshape(-1))
        for name in (day, of):
            check_array(trace, name, (length,), where, floating=False)
        for name in (name for name in trace.arrays if name.endswith(f"/{when}")):
            check_array(trace, name, (length,), where, floating=True)


def check_array(trace: Trace, name: str, shape: tuple[int, ...], where: str, *, floating: bool) -> None:
    """Raise RunError if an array is empty or has the wrong shape, type or range."""
    array = trace.arrays[name]
    if array.shape != shape or not array.numel() or array.dtype not in (FLOATS if floating else WHOLES):
        wanted = f"{shape} of {'floats' if floating else 'whole numbers'}, none of them empty"
        raise RunError(f"{where}: the array {name!r} is {tuple(array.shape)} of {array.dtype}, expected {wanted}")
    counts = not floating or name.endswith("/offset")
    if counts and not (array.double().abs() < MOST_DAYS).all():
        raise RunError(f"{where}: the array {name!r} holds numbers that cannot be steps or days")


FLOATS = {torch.float16, torch.float32, torch.float64}
WHOLES = {torch.int8, torch.int16, torch.int32, torch.int64}
MOST_DAYS = 10_000_000
"""Limit of day and step numbers, since matplotlib cannot draw dates far beyond any calendar."""
CHECKS: dict[str, Callable[[Trace, str], None]] = {
    "attention": check_attention,
    "terms": check_terms,
    "kinetics": check_kinetics,
    "gate": check_gate,
}
"""Checks of the arrays and rows of each probe, so that figures can rely on them."""
