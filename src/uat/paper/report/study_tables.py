"""Tables of the other studies: corrupted feedback, settings, costs, and mechanism."""

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
from uat.paper.studies.grids import BOUNDARY, STUDIES, TIMED

LABELS = {
    "parameters": "parameters",
    "optimize_ms": "ms per optimize pass",
    "epoch_ms": "ms per epoch",
    "step_ms": "ms per step",
    "training_peak_mib": "peak MiB in training",
    "acting_peak_mib": "peak MiB in acting",
}
LEAST_GAP = 0.02
"""Gap between Vanilla and the filter above which its share is meaningful."""
INSIDE = {"rho_norm": "‖ρ_T‖", "h_norm": "‖h_T‖"}


def sweep_points(rows: Rows, sweep: Sweep, method: str, metric: str) -> Number | None:
    """A metric of one method or reference under a sweep's settings."""
    if sweep.missing():
        return None
    task, setting = _place(rows, sweep, method)
    return rows.number((sweep.domain, task, setting, method, metric))


def sweep_curves(rows: Rows, sweep: Sweep, method: str) -> list[dict[str, Any]]:
    """Learning curves of one method under a sweep's settings, one per seed."""
    place = (sweep.domain, *_place(rows, sweep, method), method)
    own = [row for row in rows.curves if (row["domain"], row["task"], row["setting"], row["method"]) == place]
    own = [row for row in own if row["points"]]
    return sorted(own, key=lambda row: row["seed"])


def _place(rows: Rows, sweep: Sweep, method: str) -> tuple[str, str]:
    """Task and setting of the rows of one method or reference under a sweep's settings."""
    task = (sweep.tasks or DOMAINS[sweep.domain].tasks)[0]
    if method in METHODS:
        return task, setting_of(build_cell(sweep.domain, task, method, rows.preset, 0, sweep.settings).config)
    of_worlds = {name: value for name, value in sweep.settings.items() if name.startswith(("domain.", "feedback."))}
    cell = build_cell(sweep.domain, task, "uat", rows.preset, 0, of_worlds)
    return task, setting_of(cell.config)


def boundary_levels(rows: Rows, domain: str, metric: str) -> dict[str, dict[str, Number | None]]:
    """Label -> method or filter -> number, for each kind of feedback that was measured with at least one method."""
    levels = {}
    for sweep in boundary_sweeps(domain):
        numbers = {name: sweep_points(rows, sweep, name, metric) for name in (*BOUNDARY, CEILING) if is_shown(name)}
        if any(numbers[name] for name in numbers if name != CEILING):
            levels[sweep.label] = numbers
    return levels


def boundary_sweeps(domain: str) -> list[Sweep]:
    return [s for s in STUDIES["boundary"].sweeps if s.domain == domain and s.label and not s.missing()]


def is_shown(name: str) -> bool:
    """Whether the registry has the method, or the name is that of the filter."""
    return name in METHODS or name == CEILING


def boundary_tables(rows: Rows, domain: str) -> list[Table]:
    """Every method and the filter under each kind of feedback, and the share of the gap that each method closes."""
    metric = metrics_of(rows, domain)[0]
    levels = boundary_levels(rows, domain, metric.name)
    if len(levels) < 2:
        return []  # clean feedback alone is already in the main table
    sweeps = {sweep.label: sweep for sweep in boundary_sweeps(domain)}
    methods = [name for name in BOUNDARY if any(numbers.get(name) for numbers in levels.values())]
    scores, shares = [], []
    for label, numbers in levels.items():
        own = [number(numbers[name]) for name in methods]
        uat, vanilla, ceiling = (numbers[name] for name in ("uat", "vanilla", CEILING))
        gap = None if uat is None or vanilla is None else uat.mean - vanilla.mean
        filtered = "" if ceiling is None else number(ceiling)
        scores.append([label, *own, signed(gap), signed(_published_gap(rows, sweeps[label])), filtered])
        closed = [None if (x := numbers[name]) is None else x.gap for name in methods if name != "vanilla"]
        wide = vanilla is not None and ceiling is not None and ceiling.mean - vanilla.mean > LEAST_GAP
        shares.append([label, *("" if x is None or not wide else _share(x) for x in closed)])
    tables = [
        Table(
            name=f"boundary-{domain}",
            title=f"{domain}: {metric.label or metric.name} under degraded feedback",
            note="All methods are trained with each kind of feedback. The filter receives the same feedback as the "
            "policies and knows how it is corrupted. Difference: uat − vanilla. " + OURS,
            head=["feedback", *methods, "difference", "published difference", "Bayes filter"],
            rows=scores,
        )
    ]
    if any(any(share[1:]) for share in shares):
        tables.append(
            Table(
                name=f"boundary-gap-{domain}",
                title=f"{domain}: share of the gap between Vanilla and the filter under degraded feedback",
                note=f"Empty if the gap is at most {LEAST_GAP}, or if Vanilla or the filter is missing.",
                head=["feedback", *(name for name in methods if name != "vanilla")],
                rows=[share for share in shares if any(share[1:])],
            )
        )
    return tables


def _share(value: float) -> str:
    """Format a share as a percentage, without a sign if it rounds to zero."""
    return f"{round(value, 3) + 0.0:.1%}".replace("-", "−")


def _published_gap(rows: Rows, sweep: Sweep) -> float | None:
    task = (sweep.tasks or DOMAINS[sweep.domain].tasks)[0]
    cell = build_cell(sweep.domain, task, "uat", rows.preset, 0, sweep.settings)
    usual, setting = rows.usual_setting(sweep.domain), setting_of(cell.config)
    settings = {"default" if setting == usual else setting, setting}
    own = [r for r in rows.published if r["domain"] == sweep.domain and r.get("setting") in settings]
    by_method = {row["method"]: row["mean"] for row in own}
    if "uat minus vanilla" in by_method:
        return by_method["uat minus vanilla"]
    return by_method["uat"] - by_method["vanilla"] if {"uat", "vanilla"} <= by_method.keys() else None


def sensitivity_table(rows: Rows) -> Table | None:
    body = []
    metrics = headline_metrics(rows, "sepsis")
    for sweep in STUDIES["sensitivity"].sweeps:
        value = next(iter(sweep.settings.values()))
        numbers = [sweep_points(rows, sweep, "uat", metric.name) for metric in metrics]
        if any(numbers):
            body.append([f"{sweep.label} = {value}", *(number(x) for x in numbers)])
    if not body:
        return None
    title = "Sensitivity on sepsis: one setting at a time"
    head = ["setting", *(metric.label for metric in metrics)]
    return Table(name="sensitivity", title=title, note="Mean ± standard deviation over seeds.", head=head, rows=body)


def efficiency_table(rows: Rows) -> Table | None:
    """Time and memory, with the published numbers."""
    values = {(row["method"], row["metric"]): row["value"] for row in rows.timings}
    if not values:
        return None
    methods = [method for method in TIMED if any(m == method for m, _ in values)]
    metrics = ordered([metric for _, metric in values], LABELS)
    published = rows.published_costs
    head, columns = ["method"], [list(methods)]
    for metric in metrics:
        digits = 0 if metric == "parameters" else 2 if metric.endswith("_ms") else 1
        head.append(LABELS.get(metric, metric))
        columns.append([_plain(values.get((m, metric)), digits) for m in methods])
        if any((m, metric) in published for m in methods):
            head.append("published")
            columns.append([_plain(published.get((m, metric)), 0 if metric == "parameters" else 1) for m in methods])
    devices = ", ".join(dict.fromkeys(row["device"] for row in rows.timings))
    batch = rows.timings[0]["batch"]
    note = f"Batches of {batch} episodes on {devices}; the published numbers were measured on another GPU."
    body = [list(row) for row in zip(*columns, strict=True)]
    return Table(name="efficiency", title="Efficiency on darkroom", note=note, head=head, rows=body)


def _plain(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def kinetics_table(rows: Rows) -> Table | None:
    """Accuracy before and after shifts, means over seeds."""
    body: list[list[Entry | str]] = []
    for method, around in kinetics_of(rows).items():
        recover = around.steps_to_recover
        ends = [around.before, around.after]
        body.append(
            [
                method,
                *(f"{x:.3f}" for x in ends),
                signed(ends[1] - ends[0]),
                "never" if recover is None else str(recover),
                str(around.seeds),
            ]
        )
    if not body:
        return None
    head = ["method", "before [−10, −1]", "after [+1, +15]", "difference", "steps to 90 %", "seeds"]
    note = "Published: UAT has 0.90 before a shift and recovers within 5 steps."
    return Table(name="mechanism-kinetics", title="sepsis: accuracy around shifts", note=note, head=head, rows=body)


def attention_table(rows: Rows) -> Table | None:
    """Share of the attention after a shift that goes to steps after that shift."""
    trace = rows.trace("attention")
    if trace is None:
        return None
    body: list[list[Entry | str]] = [
        [
            f"{row['method']}, shift {row['shift']}{', first 15 steps' if row['quantity'].startswith('early') else ''}",
            f"{row['value']:.3f}",
            _bounds(row),
            f"{row['even']:.3f}",
        ]
        for row in trace.rows
    ]
    return Table(
        name="mechanism-attention",
        title=f"darkroom, {trace.rows[0]['task']}: attention of steps after a shift to steps after that shift",
        note="Mean over layers and heads. Even: the value of uniform attention to the whole past.",
        head=["policy and shift", "mass", "95 % interval", "even"],
        rows=body,
    )


def terms_table(rows: Rows) -> Table | None:
    """Sizes of the terms of UAT's attention logits, by layer."""
    trace = rows.trace("terms")
    if trace is None:
        return None
    by_layer: dict[int, dict[str, str]] = {}
    for row in trace.rows:
        by_layer.setdefault(row["layer"], {})[row["term"]] = f"{row['value']:.3f} {_bounds(row)} ({row['share']:.0%})"
    names = list(dict.fromkeys(row["term"] for row in trace.rows))
    return Table(
        name="mechanism-terms",
        title=f"{trace.rows[0]['domain']}, {trace.rows[0]['task']}: sizes of the terms of UAT's attention logits",
        note="Mean absolute value, centred over the keys that a query sees, with a 95 % interval and the share of all "
        "terms. ℓ0: observations alone; ℓ1: gated keys; ℓ2: gated queries; ℓ3: both; offsets: terms with U_Q or U_K.",
        head=["layer", *names],
        rows=[[str(layer), *(own.get(name, "") for name in names)] for layer, own in by_layer.items()],
    )


def gate_table(rows: Rows) -> Table | None:
    """Norms of the regime gate by regime and volatility, and the effect of the gates on decisions."""
    norms = gate_rows(rows, quantity="rho_norm", where="window")
    body: list[list[Entry | str]] = [
        [
            f"{row['group']} ({row['by']}), seed {row['seed']}",
            f"{row['value']:.3g}",
            f"[{row['low']:.3g}, {row['high']:.3g}]",
            f"{row['over_calmest']:+.1%}",
            str(row["n"]),
        ]
        for row in norms
        if row["by"] in ("regime", "volatility") and "value" in row
    ]
    if not body:
        return None
    moved = gate_rows(rows, quantity="weights_moved", where="step", by="all")
    changes = ", ".join(f"{row['value']:.2g} (seed {row['seed']})" for row in moved)
    return Table(
        name="mechanism-gate",
        title=f"markets ({', '.join(norms[0]['markets'])}): the regime gate",
        note="Means over windows, by their last day. Without feedback, UAT's portfolio weights would differ by "
        f"{changes} in total (sum of absolute differences, mean over steps).",
        head=["group", "mean norm", "95 % interval", "over the calmest quartile", "windows"],
        rows=body,
    )


def shocks_table(rows: Rows) -> Table | None:
    """How well the internal quantities separate days of shock from calm days."""
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
    note = "At the end of windows. AUC: probability that the value is larger on a day of shock than of bull or chop."
    head = ["what", "regimes by", "AUC", "95 % interval", "shocks"]
    return Table(name="mechanism-shocks", title="markets: shocks against calm", note=note, head=head, rows=body)


def _bounds(row: Mapping[str, Any]) -> str:
    return f"[{row['low']:.3f}, {row['high']:.3f}]"
