"""Tables and the figure of the study of binding: updates until accuracy has gone part of the way to the filter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from uat.domains import DOMAINS
from uat.evaluation.scores import CEILING
from uat.methods import METHODS
from uat.paper.report.rows import Rows
from uat.paper.report.study_tables import sweep_curves, sweep_points
from uat.paper.report.tables import Entry, Table
from uat.paper.studies.binding import (
    ELSEWHERE,
    GATES,
    OTHER_WORLDS,
    PLUS_SEEDS,
    PLUS_WAYS,
    RATE_SEED,
    RATES,
    SHARES,
    TOKENS,
    WAYS,
    WIDTHS,
    Way,
    main_sweep,
    rate_sweep,
    world_sweep,
)
from uat.paper.studies.cells import Sweep, build_cell

PRIMARY = SHARES[-1]
REFERENCE = Way("observation", "early")
"""The paper's UAT, to which others are compared."""
CHOOSING = (RATE_SEED, *PLUS_SEEDS)
"""Seeds that choose a setting, and are in no other number."""
DRAWS = 2000
"""Bootstrap draws of a ratio's interval."""
ABOUT = (
    "Updates until the validation accuracy has gone {share:.0%} of the way from chance to the Bayes filter's; in "
    "brackets the least and the most over seeds, and how many seeds got there, if not all did. > N: none did in N "
    "updates. Gates: none; none with UAT's encoder of feedback in the tokens; the paper's (early); late (ours)."
)


class Reached(NamedTuple):
    """Updates until a share of the way, of each seed; infinite: never."""

    updates: tuple[float, ...]
    most: int
    """Updates of the longest training."""

    def __str__(self) -> str:
        there = [x for x in self.updates if math.isfinite(x)]
        if not there:
            return f"> {self.most:,}"
        median = float(np.median(self.updates))
        text = f"{median:,.0f}" if math.isfinite(median) else f"> {self.most:,}"
        if len(self.updates) == 1:
            return text
        missing = "" if len(there) == len(self.updates) else f"; {len(there)} of {len(self.updates)}"
        return f"{text} [{min(there):,.0f}, {max(there):,.0f}{missing}]"


def reached(rows: Rows, sweep: Sweep, method: str, share: float, *, chooses: Sequence[int] = ()) -> Reached | None:
    """Return the updates that each seed took; None if nothing was measured, or the filter was not.

    chooses: take these seeds, which choose a setting; otherwise all seeds that choose nothing, which judge.
    """
    curves, ceiling = _curves(rows, sweep, method, chooses), sweep_points(rows, sweep, CEILING, "accuracy")
    if not curves or ceiling is None:
        return None
    goal = _chance(sweep) + share * (ceiling.mean - _chance(sweep))
    updates = [next((float(epoch) for epoch, value in curve["points"] if value >= goal), math.inf) for curve in curves]
    return Reached(tuple(updates), max(int(curve["points"][-1][0]) for curve in curves))


def _curves(rows: Rows, sweep: Sweep, method: str, chooses: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Return the curves of the seeds that choose, or of those that judge: settings may be the same in both."""
    curves = sweep_curves(rows, sweep, method)
    return [c for c in curves if (c["seed"] in chooses if chooses else c["seed"] not in CHOOSING)]


def _chance(sweep: Sweep) -> float:
    return 1 / sweep.settings.get("domain.num_actions", DOMAINS["rule"].config().num_actions)


def ratio(own: Reached, other: Reached) -> str:
    """Return how many times as many updates the other takes, by geometric means, with a bootstrap interval over seeds.

    A seed that never got there counts with its whole training, so the ratio is then a bound, and the interval is open
    on that side. It is unknown if both have such seeds.
    """
    logs = [np.log(np.minimum(r.updates, r.most)) for r in (own, other)]
    above, below = (any(math.isinf(x) for x in r.updates) for r in (other, own))
    if above and below:
        return "?"
    mark = "≥ " if above else "≤ " if below else ""
    value = math.exp(logs[1].mean() - logs[0].mean())
    if min(map(len, logs)) < 3:
        return f"{mark}{value:.1f}"
    draws = np.random.default_rng(0)
    means = [x[draws.integers(len(x), size=(DRAWS, len(x)))].mean(1) for x in logs]
    low, high = np.exp(np.quantile(means[1] - means[0], [0.025, 0.975]))
    return f"{mark}{value:.1f} {'(0' if below else f'[{low:.1f}'}, {'∞)' if above else f'{high:.1f}]'}"


def binding_tables(rows: Rows) -> list[Table]:
    """One table of tokens by gates for each width and share, ratios for the primary endpoint, and other worlds."""
    tables = []
    for width in WIDTHS:
        for share in SHARES:
            found = {way: reached(rows, main_sweep(way, width), way.method, share) for way in WAYS}
            if not any(found.values()):
                continue
            name = f"binding-{width}-{share:.0%}".rstrip("%")
            title = f"Updates to {share:.0%}, observations of width {width}"
            tables.append(_product(name, title, ABOUT.format(share=share), {w: str(r or "") for w, r in found.items()}))
            paper = found[REFERENCE]
            if share == PRIMARY and paper is not None:
                times = {way: ratio(own, paper) for way, own in found.items() if own is not None} | {REFERENCE: "1.0"}
                note = (
                    "How many times as many updates the paper's UAT takes (geometric means over seeds, 95 % bootstrap "
                    "interval from three seeds on). ≥ and ≤: a training that never got there counts in full. ?: both "
                    "have such trainings."
                )
                tables.append(_product(f"binding-ratio-{width}", f"{title}, as ratios to UAT", note, times))
    tables += [table for label in OTHER_WORLDS if (table := _other_world(rows, label))]
    sizes = {way: f"{parameters(way):,}" for way in WAYS} if tables else {}
    if sizes:
        tables.append(_product("binding-parameters", "Parameters of each way of binding", "At a width of 10.", sizes))
    return tables


def _product(name: str, title: str, note: str, entries: dict[Way, str]) -> Table:
    body: list[list[Entry | str]] = [
        [tokens, *(entries.get(Way(tokens, gates), "") for gates in GATES)] for tokens in TOKENS
    ]
    return Table(name=name, title=title, note=note, head=["tokens", *GATES], rows=body)


def _other_world(rows: Rows, label: str) -> Table | None:
    found = {way: [reached(rows, world_sweep(way, label), way.method, share) for share in SHARES] for way in ELSEWHERE}
    if not any(any(times) for times in found.values()):
        return None
    body: list[list[Entry | str]] = [
        [way.tokens, way.gates, *(str(times or "") for times in found[way])] for way in ELSEWHERE
    ]
    return Table(
        name=f"binding-{label.replace(' ', '-')}",
        title=f"Updates with {label}",
        note=ABOUT.format(share=PRIMARY),
        head=["tokens", "gates", *(f"to {share:.0%}" for share in SHARES)],
        rows=body,
    )


def rates_table(rows: Rows) -> Table | None:
    """Each way at every rate, and its best one: the fewest updates to 80 %, else to 50 %, else the best end."""
    body: list[list[Entry | str]] = []
    for width in WIDTHS:
        for way in WAYS:
            at = {rate: rate_sweep(way, width, rate) for rate in RATES}
            times = {
                rate: [reached(rows, sweep, way.method, share, chooses=(RATE_SEED,)) for share in SHARES]
                for rate, sweep in at.items()
            }
            if not any(any(pair) for pair in times.values()):
                continue
            best = min(RATES, key=lambda rate: _order(rows, at[rate], way, times[rate]))
            body.append([str(width), way.tokens, way.gates, *(str(times[r][-1] or "") for r in RATES), f"{best:g}"])
    if not body:
        return None
    return Table(
        name="binding-rates",
        title="Learning rates of each way of binding",
        note=ABOUT.format(share=PRIMARY),
        head=["width", "tokens", "gates", *(f"{rate:g}" for rate in RATES), "best"],
        rows=body,
    )


def _order(rows: Rows, sweep: Sweep, way: Way, times: Sequence[Reached | None]) -> tuple[float, float, float]:
    """Smaller is better: updates to 80 %, then to 50 %, then the last accuracy."""
    curves = _curves(rows, sweep, way.method, (RATE_SEED,))
    to = [math.inf if r is None else float(np.median(r.updates)) for r in times]
    return to[1], to[0], -curves[0]["points"][-1][1] if curves else math.inf


def plus_table(rows: Rows) -> Table | None:
    """The ways among which `uat-plus` is chosen, at each width the one with the fewest updates to 80 % first.

    Trainings may be shorter than the recipe's, or judged more often, as long as all of them are.
    """
    rows = replace(rows, curves=[{**row, "setting": _at_any_length(row["setting"])} for row in rows.curves])
    body: list[list[Entry | str]] = []
    for width in WIDTHS:
        measured: list[tuple[float, list[Entry | str]]] = []
        for way in PLUS_WAYS:
            sweep = main_sweep(way, width)
            times = [reached(rows, sweep, way.method, share, chooses=PLUS_SEEDS) for share in SHARES]
            if (last := times[-1]) is None:
                continue
            ends = [100 * curve["points"][-1][1] for curve in _curves(rows, sweep, way.method, PLUS_SEEDS)]
            mean = float(np.minimum(last.updates, last.most).mean())
            bound = "≥ " if any(map(math.isinf, last.updates)) else ""
            end = f"{np.mean(ends):.1f} [{min(ends):.1f}, {max(ends):.1f}]"
            line: list[Entry | str] = [f"{bound}{mean:,.0f}", *(str(t) for t in reversed(times)), end]
            measured.append((mean, [f"width {width}: {way.gates} gates, {way.tokens}", *line]))
        body += [line for _, line in sorted(measured, key=lambda pair: pair[0])]
    if not body:
        return None
    return Table(
        name="plus",
        title="Gates and tokens among which uat-plus is chosen",
        note=f"Seeds {' and '.join(map(str, PLUS_SEEDS))}, which are in no other number. {ABOUT.format(share=PRIMARY)} "
        "Mean: over seeds; ≥: a training that never got there counts in full. End: the last validation accuracy.",
        head=["gates and tokens", "mean", *(f"to {share:.0%}" for share in reversed(SHARES)), "end, %"],
        rows=body,
    )


def _at_any_length(setting: str) -> str:
    """Remove the length of training and the interval of validations from a column "setting"."""
    kept = [part for part in setting.split(",") if not part.startswith(("train.epochs=", "train.validate_every="))]
    return ",".join(kept) or "default"


@lru_cache(maxsize=64)
def parameters(way: Way) -> int:
    """Number of parameters of a way's policy, at the domain's own width."""
    cell = build_cell("rule", "fixed", way.method, "paper", 0, way.settings)
    with torch.device("meta"):
        policy = METHODS[way.method].build(cell.config.build_domain().spec, cell.config.method)
    return sum(p.numel() for p in policy.parameters())


def binding_lines(rows: Rows) -> dict[Way, list[tuple[int, Reached]]]:
    """Return, for each measured way, its updates to the primary endpoint at each width."""
    lines: dict[Way, list[tuple[int, Reached]]] = {}
    for way in WAYS:
        own: list[Any] = [(width, reached(rows, main_sweep(way, width), way.method, PRIMARY)) for width in WIDTHS]
        if any(x for _, x in own):
            lines[way] = [(width, x) for width, x in own if x is not None]
    return lines
