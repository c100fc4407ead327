"""Tables of the families of hypotheses: UAT, UAT-late and UAT-plus against every baseline.

A family is one task, or one kind of feedback: all comparisons of `GATED` with the baselines in the primary endpoint of
the study. Holm's method corrects within it, and counts comparisons that have not been measured yet, so that a p value
does not depend on how much of the family is there. Effects and their intervals come first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from uat.domains import DOMAINS
from uat.evaluation.intervals import LEVEL
from uat.evaluation.scores import setting_of
from uat.evaluation.statistics import holm_corrected, rank_test
from uat.methods import METHODS
from uat.paper.report.binding_tables import PRIMARY, Reached, ratio, reached
from uat.paper.report.rows import DAGGER, Rows
from uat.paper.report.score_tables import metrics_of, p_text, signed
from uat.paper.report.study_tables import boundary_sweeps
from uat.paper.report.tables import Entry, Table
from uat.paper.studies.binding import WAYS, WIDTHS, Way, gated_way, main_sweep
from uat.paper.studies.cells import build_cell
from uat.paper.studies.grids import BOUNDARY, GATED, is_baseline

Comparison = tuple[str, str]
"""One of `GATED`, and a baseline."""
HEAD = ["difference", "95 % interval", "p", "p (Holm)", "seeds"]
WHERE = {"task": "in one task", "feedback": "under one kind of feedback"}


def planned(domain: str, among: Iterable[str]) -> list[Comparison]:
    """Every comparison of a family, measured or not."""
    served = [name for name in among if name in METHODS and METHODS[name].serves(domain)]
    baselines = [name for name in served if is_baseline(name)]
    return [(own, other) for own in GATED if own in served for other in baselines]


def main_family_table(rows: Rows, domain: str) -> Table | None:
    """The families of a domain's tasks, on test episodes under its recipe."""
    settings = {task: (task, rows.usual_setting(domain)) for task in DOMAINS[domain].tasks}
    return _score_table(rows, domain, settings, METHODS.own, f"family-{domain}", "task")


def boundary_family_table(rows: Rows, domain: str) -> Table | None:
    """The families for each kind of degraded feedback."""
    settings = {}
    for sweep in boundary_sweeps(domain):
        task = (sweep.tasks or DOMAINS[domain].tasks)[0]
        cell = build_cell(domain, task, "uat", rows.preset, 0, sweep.settings)
        settings[sweep.label] = (task, setting_of(cell.config))
    if not any(_pairs(rows, domain, *place) for label, place in settings.items() if label != "clean"):
        return None
    return _score_table(rows, domain, settings, BOUNDARY, f"family-boundary-{domain}", "feedback")


def _score_table(
    rows: Rows, domain: str, settings: Mapping[str, tuple[str, str]], among: Iterable[str], name: str, unit: str
) -> Table | None:
    family, metric = planned(domain, among), metrics_of(rows, domain)[0]
    body: list[list[Entry | str]] = []
    clear = 0
    for label, (task, setting) in settings.items():
        found = _pairs(rows, domain, task, setting)
        own = [(pair, found[pair]) for pair in family if pair in found]
        corrected = holm_corrected([row["p"] for _, row in own], len(family))
        clear += sum(p < LEVEL for p in corrected)
        for (pair, row), p in zip(own, corrected, strict=True):
            keys = ((domain, task, setting, method, metric.name) for method in pair)
            mark = f" {DAGGER}" if any(key in rows.flawed for key in keys) else ""
            effect = f"{signed(row['difference'])}{mark}"
            numbers = [
                effect,
                f"[{signed(row['low'])}, {signed(row['high'])}]",
                p_text(row["p"]),
                p_text(p),
                str(len(row["seeds"])),
            ]
            body.append([f"{label}: {pair[0]} against {pair[1]}", *numbers])
    if not body:
        return None
    return Table(
        name=name,
        title=f"{domain}: {metric.label or metric.name} of UAT against every baseline"
        + (" under degraded feedback" if unit == "feedback" else ""),
        note=f"The primary endpoint, paired on the same seeds and episodes. {_about(len(family), WHERE[unit])} "
        f"{_significant(clear, len(body))} With one seed, intervals and p are over its test episodes alone.",
        head=[f"{unit} and methods", *HEAD],
        rows=body,
    )


def _about(count: int, where: str) -> str:
    return (
        f"A family is the {count} comparisons of {', '.join(GATED[:-1])} and {GATED[-1]} with every baseline "
        f"{where}; Holm's method corrects for all of them, also for those that are not measured yet."
    )


def _significant(clear: int, count: int) -> str:
    return f"{clear or 'None'} of these {count} differences {'are' if clear > 1 else 'is'} significant at 5 %."


def _pairs(rows: Rows, domain: str, task: str, setting: str) -> dict[Comparison, dict[str, Any]]:
    """Paired differences, method minus other, in both directions."""
    metric, found = metrics_of(rows, domain)[0].name, {}
    for row in rows.pairs:
        if (row["domain"], row["task"], row["setting"], row["metric"]) == (domain, task, setting, metric):
            found[row["method"], row["other"]] = row
            turned = {"difference": -row["difference"], "low": -row["high"], "high": -row["low"]}
            found[row["other"], row["method"]] = {**row, **turned}
    return found


# ---------------------------------------------------------------- binding


BASELINES = {
    "vanilla": Way("observation", "none"),
    "adt": Way("feedback", "none"),
    "adt-prev": Way("transition", "none"),
    "dpt": Way("two", "none"),
}
"""The ways of binding without gates that are methods of the registry."""


def binding_family_table(rows: Rows) -> Table | None:
    """The families of each width: how many times as many updates a baseline takes."""
    gated = [name for name in GATED if name in METHODS]
    count, clear = len(gated) * len(BASELINES), 0
    body: list[list[Entry | str]] = []
    for width in WIDTHS:
        times = {way: reached(rows, main_sweep(way, width), way.method, PRIMARY) for way in WAYS}
        own = [
            (f"{a} against {b}", x, y)
            for a in gated
            for b, way in BASELINES.items()
            if (x := times[gated_way(a)]) is not None and (y := times[way]) is not None
        ]
        values = [rank_test(x.updates, y.updates) for _, x, y in own]
        corrected = holm_corrected(values, count)
        clear += sum(p < LEVEL for p in corrected)
        for (name, x, y), p, p_holm in zip(own, values, corrected, strict=True):
            body.append([f"width {width}: {name}", ratio(x, y), p_text(p), p_text(p_holm), _seeds(x, y)])
    if not body:
        return None
    return Table(
        name="family-binding",
        title=f"Updates to {PRIMARY:.0%}, UAT against every baseline",
        note="How many times as many updates the baseline takes (geometric means, 95 % bootstrap interval from three "
        "seeds on); p of Wilcoxon's rank sum test over seeds, in which a training that never got there is the last. "
        f"{_about(count, 'at one width')} {_significant(clear, len(body))}{_least(body, count)}",
        head=["width and methods", "ratio", "p", "p (Holm)", "seeds"],
        rows=body,
    )


def _seeds(x: Reached, y: Reached) -> str:
    sizes: Sequence[int] = sorted({len(x.updates), len(y.updates)})
    return " and ".join(map(str, sizes))


def _least(body: Sequence[Sequence[Entry | str]], count: int) -> str:
    """Say so if the seeds are too few for any significant difference."""
    most = max(int(str(line[-1]).split(" ")[-1]) for line in body)
    least = min(1.0, 2 / math.comb(2 * most, most) * count)
    return f" The least p (Holm) that {most} seeds can give is {least:.3f}." if least >= LEVEL else ""
