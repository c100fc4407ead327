"""Tables of the studies beyond scores: corrupted feedback, settings, costs, and what happens inside policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from uat.domains import DOMAINS
from uat.evaluation.scores import CEILING, setting_of
from uat.methods import METHODS
from uat.paper.mechanism.markets import SHOCKS
from uat.paper.report.rows import Number, Rows, ordered
from uat.paper.report.score_tables import OURS, headline_metrics, metrics_of, number, signed
from uat.paper.report.tables import Entry, Table
from uat.paper.report.traces import gate_rows, kinetics_of
from uat.paper.studies.cells import Sweep, build_cell
from uat.paper.studies.grids import STUDIES, TIMED

LABELS = {
    "parameters": "parameters",
    "optimize_ms": "ms per optimize pass",
    "epoch_ms": "ms per epoch",
    "step_ms": "ms per step",
    "training_peak_mib": "peak MiB in training",
    "acting_peak_mib": "peak MiB in acting",
}
INSIDE = {"rho_norm": "‖ρ_T‖", "h_norm": "‖h_T‖"}


def sweep_points(rows: Rows, sweep: Sweep, method: str, metric: str) -> Number | None:
    """A metric of one method, or of a reference, under a sweep's settings."""
    if sweep.missing():
        return None
    task = (sweep.tasks or DOMAINS[sweep.domain].tasks)[0]
    cell = build_cell(sweep.domain, task, method if method in METHODS else "uat", rows.preset, 0, sweep.settings)
    return rows.number((sweep.domain, task, setting_of(cell.config), method, metric))


def boundary_table(rows: Rows, domain: str) -> Table | None:
    """UAT and Vanilla under each kind of feedback, and the difference beside the published one."""
    sweeps = [s for s in STUDIES["boundary"].sweeps if s.domain == domain and s.label and not s.missing()]
    if not sweeps:
        return None
    metric, body = metrics_of(rows, domain)[0], []
    for sweep in sweeps:
        uat, vanilla = (sweep_points(rows, sweep, method, metric.name) for method in ("uat", "vanilla"))
        if uat is None and vanilla is None:
            continue
        gap = None if uat is None or vanilla is None else uat.mean - vanilla.mean
        ceiling = sweep_points(rows, sweep, CEILING, metric.name)
        numbers = [number(uat), number(vanilla), signed(gap), signed(_published_gap(rows, sweep))]
        body.append([sweep.label, *numbers, "" if ceiling is None else number(ceiling)])
    if len(body) < 2:
        return None  # the clean channel alone is the main table's
    return Table(
        name=f"boundary-{domain}",
        title=f"{domain}: {metric.label or metric.name} under degraded feedback",
        note="Both trained anew under each. The filter is told the truth, as late as the policies. " + OURS,
        head=["feedback", "uat", "vanilla", "difference", "published difference", "Bayes filter"],
        rows=[list(row) for row in body],
    )


def _published_gap(rows: Rows, sweep: Sweep) -> float | None:
    task = (sweep.tasks or DOMAINS[sweep.domain].tasks)[0]
    cell = build_cell(sweep.domain, task, "uat", rows.preset, 0, sweep.settings)
    usual, setting = rows.usual_setting(sweep.domain), setting_of(cell.config)
    said = {"default" if setting == usual else setting, setting}
    own = [r for r in rows.published if r["domain"] == sweep.domain and r.get("setting") in said]
    by_method = {row["method"]: row["mean"] for row in own}
    if "uat minus vanilla" in by_method:
        return by_method["uat minus vanilla"]
    return by_method["uat"] - by_method["vanilla"] if {"uat", "vanilla"} <= by_method.keys() else None


def sensitivity_table(rows: Rows) -> Table | None:
    body = []
    metrics = headline_metrics(rows, "sepsis")
    for sweep in STUDIES["sensitivity"].sweeps:
        value = next(iter(sweep.settings.values()))
        found = [sweep_points(rows, sweep, "uat", metric.name) for metric in metrics]
        if any(found):
            body.append([f"{sweep.label} = {value}", *(number(x) for x in found)])
    if not body:
        return None
    title = "Sensitivity on sepsis: one setting at a time"
    head = ["setting", *(metric.label for metric in metrics)]
    return Table(name="sensitivity", title=title, note="Mean ± deviation over seeds.", head=head, rows=body)


def efficiency_table(rows: Rows) -> Table | None:
    """Time and memory, ours beside the published."""
    values = {(row["method"], row["metric"]): row["value"] for row in rows.timings}
    if not values:
        return None
    methods = [method for method in TIMED if any(m == method for m, _ in values)]
    metrics = ordered([metric for _, metric in values], LABELS)
    theirs = rows.published_costs
    head, columns = ["method"], [list(methods)]
    for metric in metrics:
        digits = 0 if metric == "parameters" else 2 if metric.endswith("_ms") else 1
        head.append(LABELS.get(metric, metric))
        columns.append([_plain(values.get((m, metric)), digits) for m in methods])
        if any((m, metric) in theirs for m in methods):
            head.append("published")
            columns.append([_plain(theirs.get((m, metric)), 0 if metric == "parameters" else 1) for m in methods])
    devices = ", ".join(dict.fromkeys(row["device"] for row in rows.timings))
    batch = rows.timings[0]["batch"]
    note = f"Batches of {batch} episodes on {devices}; published numbers, where given, are of another GPU."
    body = [list(row) for row in zip(*columns, strict=True)]
    return Table(name="efficiency", title="Efficiency on darkroom", note=note, head=head, rows=body)


def _plain(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def kinetics_table(rows: Rows) -> Table | None:
    """Accuracy before and after shifts, means over seeds."""
    body: list[list[Entry | str]] = []
    for method, found in kinetics_of(rows).items():
        recover = found.steps_to_recover
        ends = [found.before, found.after]
        body.append(
            [
                method,
                *(f"{x:.3f}" for x in ends),
                signed(ends[1] - ends[0]),
                "never" if recover is None else str(recover),
                str(found.seeds),
            ]
        )
    if not body:
        return None
    head = ["method", "before [−10, −1]", "after [+1, +15]", "difference", "steps to 90 %", "seeds"]
    note = "Published: UAT 0.90 before a shift, and back within 5 steps."
    return Table(name="mechanism-kinetics", title="sepsis: accuracy around shifts", note=note, head=head, rows=body)


def attention_table(rows: Rows) -> Table | None:
    """How much of the attention after a shift goes to what came after it."""
    seen = rows.trace("attention")
    if seen is None:
        return None
    body: list[list[Entry | str]] = [
        [
            f"{row['method']}, shift {row['shift']}{', first 15 steps' if row['quantity'].startswith('early') else ''}",
            f"{row['value']:.3f}",
            _bounds(row),
            f"{row['even']:.3f}",
        ]
        for row in seen.rows
    ]
    return Table(
        name="mechanism-attention",
        title=f"darkroom, {seen.rows[0]['task']}: attention that steps after a shift pay to steps after it",
        note="Mean over layers and heads. Even: what equal attention to all of the past would give.",
        head=["policy and shift", "mass", "95 % interval", "even"],
        rows=body,
    )


def gate_table(rows: Rows) -> Table | None:
    """Norms of the regime gate by regime and volatility, and what the gates decide."""
    found = gate_rows(rows, quantity="rho_norm", where="window")
    body: list[list[Entry | str]] = [
        [
            f"{row['group']} ({row['by']}), seed {row['seed']}",
            f"{row['value']:.3g}",
            f"[{row['low']:.3g}, {row['high']:.3g}]",
            f"{row['over_calmest']:+.1%}",
            str(row["n"]),
        ]
        for row in found
        if row["by"] in ("regime", "volatility") and "value" in row
    ]
    if not body:
        return None
    moved = gate_rows(rows, quantity="weights_moved", where="step", by="all")
    told = ", ".join(f"{row['value']:.2g} (seed {row['seed']})" for row in moved)
    return Table(
        name="mechanism-gate",
        title=f"markets ({', '.join(found[0]['markets'])}): the regime gate",
        note="Means over windows, by their last day. Without its feedback UAT's portfolio weights would differ by "
        f"{told} in all: sum of absolute differences, mean over steps.",
        head=["group", "mean norm", "95 % interval", "over the calmest quartile", "windows"],
        rows=body,
    )


def shocks_table(rows: Rows) -> Table | None:
    """How well the numbers inside tell days of shock from calm ones."""
    body: list[list[Entry | str]] = [
        [
            f"{row['method']} {INSIDE[row['quantity']]}, seed {row['seed']}",
            "the generator" if row["by"] == "known" else "the paper's rules",
            f"{row['auc']:.3f}",
            _bounds(row),
            f"{row['n']} of {row['n'] + row['calm']}",
        ]
        for row in gate_rows(rows, where="end", group=SHOCKS)
        if row["quantity"] in INSIDE
    ]
    if not body:
        return None
    note = "At the end of windows. AUC: how often the number is larger on a day of shock than on one of bull or chop."
    head = ["what", "regimes by", "AUC", "95 % interval", "shocks"]
    return Table(name="mechanism-shocks", title="markets: shocks against calm", note=note, head=head, rows=body)


def _bounds(row: Mapping[str, Any]) -> str:
    return f"[{row['low']:.3f}, {row['high']:.3f}]"
