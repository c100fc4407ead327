"""Tables of scores: methods, references and published numbers, with their intervals.

Metrics come from the domains, and methods from the registry; none is named here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from uat.config import override
from uat.domains import DOMAINS
from uat.evaluation.intervals import LEVEL
from uat.evaluation.scores import BLIND, CEILING, EXPERT, RANDOM
from uat.evaluation.statistics import aggregate
from uat.methods import METHODS
from uat.metrics import Metric
from uat.paper.report.rows import DAGGER, Key, Number, Rows, ordered
from uat.paper.report.tables import Entry, Table, ranked
from uat.recipes import recipe

REFERENCES = {
    CEILING: "Bayes filter",
    EXPERT: "expert",
    RANDOM: "chance",
}
"""Names of the references in tables; other references of a domain keep their own names."""
NOT_IN_THE_PAPER = (
    "Mean ± standard deviation over seeds. The paper does not have this domain: there are no published numbers."
)
LEGEND = (
    "References: the Bayes filter knows the generative model and sees what a policy sees; the expert also sees the "
    "hidden state; chance takes every action with equal probability."
)
OURS = (
    "Ours: mean ± standard deviation over seeds. Published: the paper's tables (three seeds, another implementation)."
)


def number(x: Number | None, digits: int = 3) -> str:
    """Format a number as mean ± standard deviation."""
    if x is None:
        return "-"
    mark = f" {DAGGER}" if x.flawed else ""
    if x.std is None:
        return f"{x.mean:.{digits}f}{mark}"
    least = 10**-digits
    return f"{x.mean:.{digits}f} ± " + (f"{x.std:.{digits}f}" if x.std >= least else f"<{least:.{digits}f}") + mark


def signed(value: float | None, digits: int = 3) -> str:
    """Format a value with its sign, or without one if it rounds to zero."""
    if value is None:
        return ""
    return f"{value:+.{digits}f}".replace("-", "−") if round(value, digits) else f"{0:.{digits}f}"


def metrics_of(rows: Rows, domain: str) -> tuple[Metric, ...]:
    """Metrics of the domain; with a user's data those in its rows, since some contain the name of a market."""
    declared = _declared(domain, rows.preset)
    measured = {key[4] for key in rows.values if key[0] == domain}
    others = sorted(measured - {m.name for m in declared})
    joint = [m for m in declared if not any(m.name.startswith(f"{other.name}_") for other in declared)]
    parts = [(name.removeprefix(f"{m.name}_"), m) for m in joint for name in others if name.startswith(f"{m.name}_")]
    if not parts:
        return declared
    of_data = [replace(m, name=f"{m.name}_{part}", label=f"{m.label} {part}") for part, m in sorted(parts, key=_part)]
    return (*(m for m in declared if m.name in measured), *of_data)


def _part(part_and_metric: tuple[str, Metric]) -> str:
    return part_and_metric[0]


@lru_cache(maxsize=64)
def _declared(domain: str, preset: str) -> tuple[Metric, ...]:
    """Metrics of all tasks of a domain, in the order of the first task that has them."""
    config, field = recipe(domain, "uat", preset), DOMAINS[domain].task_field
    tasks = [{field: task} for task in DOMAINS[domain].tasks] if field else [{}]
    of_tasks = [metric for task in tasks for metric in override(config, task).build_domain().metrics]
    return tuple({metric.name: metric for metric in of_tasks}.values())


def headline_metrics(rows: Rows, domain: str) -> list[Metric]:
    """The domain's first metric, and its other metrics in the paper's main table."""
    published = {row["metric"] for row in rows.published if row["domain"] == domain and "setting" not in row}
    every = metrics_of(rows, domain)
    return [metric for i, metric in enumerate(every) if i == 0 or metric.name in published]


def measured_methods(rows: Rows, domain: str, wanted: Callable[[str], bool]) -> list[str]:
    """Methods with rows in a domain under its recipe, in the registry's order, then its references."""
    usual = rows.usual_setting(domain)
    measured = [key[3] for key in rows.values if key[0] == domain and key[2] == usual]
    names = ordered(measured, [*METHODS, *REFERENCES])
    return [method for method in names if method not in METHODS or wanted(method)]


def score_table(
    rows: Rows, domain: str, metric: Metric, methods: Sequence[str], *, name: str, title: str, gaps: bool = False
) -> Table:
    """One line per method, with our number, the published one and the difference for every task.

    With `gaps`, the columns are the interval and the gap closed instead.
    """
    tasks = [task for task in DOMAINS[domain].tasks if any(_number(rows, domain, task, m, metric) for m in methods)]
    columns: list[list[Entry | str]] = [[REFERENCES.get(m, m) for m in methods]]
    head, competes = ["method"], [m in METHODS for m in methods]
    unpublished: list[str] = []
    for task in tasks:
        shown = f"{task} " if len(DOMAINS[domain].tasks) > 1 else ""
        numbers = [_number(rows, domain, task, m, metric) for m in methods]
        if gaps:
            head.append(f"{shown}95 % interval")
            columns.append([_interval(x) for x in numbers])
            if any(x is not None and x.gap is not None for x in numbers):
                head.append(f"{shown}gap closed")
                columns.append(["" if x is None or x.gap is None else f"{x.gap:.1%}" for x in numbers])
            continue
        means = [None if x is None else x.mean for x in numbers]
        head.append(f"{shown}ours".strip())
        columns.append([*ranked([number(x) for x in numbers], means, higher=metric.higher_is_better, among=competes)])
        published = [rows.published_number(_key(rows, domain, task, m, metric)) for m in methods]
        if any(published):
            head += [f"{shown}published", f"{shown}Δ"]
            columns.append(["" if x is None else f"{x[0]:.3f}" + _spread(x[1]) for x in published])
            columns.append(
                [
                    "" if ours is None or x is None else signed(ours.mean - x[0])
                    for ours, x in zip(numbers, published, strict=True)
                ]
            )
        elif not rows.has_published(domain, task):
            unpublished.append(task)
    if not gaps:
        head.append("seeds")
        columns.append([str(_seeds(rows, domain, tasks, m, metric) or "") for m in methods])
    intervals = "95 % intervals are over episodes and, with several seeds, over seeds"
    gap = "; the gap closed is counted from Vanilla to the filter" if any("gap closed" in name for name in head) else ""
    has_published = any(name.endswith("published") for name in head)
    ours = about_numbers(rows, domain)
    if unpublished and has_published:
        ours = f"{ours} {no_published_number(unpublished)}"
    note = f"{intervals}{gap}." if gaps else ours
    return Table(name=name, title=title, note=note, head=head, rows=[list(row) for row in zip(*columns, strict=True)])


def about_numbers(rows: Rows, domain: str) -> str:
    """A sentence about the numbers of a domain, which says so if the paper has none."""
    return OURS if any(row["domain"] == domain for row in rows.published) else NOT_IN_THE_PAPER


def no_published_number(tasks: Sequence[str]) -> str:
    """Say which tasks are not the paper's, beside tasks that are."""
    return f"No published number: {', '.join(tasks)} (ours, not in the paper)."


def _spread(std: float | None) -> str:
    return "" if std is None else f" ± {std:.2f}"


def _interval(x: Number | None) -> str:
    return "" if x is None or x.low is None else f"[{x.low:.3f}, {x.high:.3f}]"


def _key(rows: Rows, domain: str, task: str, method: str, metric: Metric) -> Key:
    return domain, task, rows.usual_setting(domain), method, metric.name


def _number(rows: Rows, domain: str, task: str, method: str, metric: Metric) -> Number | None:
    return rows.number(_key(rows, domain, task, method, metric))


def _seeds(rows: Rows, domain: str, tasks: Iterable[str], method: str, metric: Metric) -> int:
    numbers = [_number(rows, domain, task, method, metric) for task in tasks]
    return max((len(x.seeds) for x in numbers if x is not None), default=0)


def domain_tables(rows: Rows, domain: str, wanted: Callable[[str], bool], study: str) -> list[Table]:
    """The headline metrics of a domain: scores, then intervals and gaps."""
    methods, tables = measured_methods(rows, domain, wanted), []
    if not any(m in METHODS for m in methods):
        return []
    for metric in headline_metrics(rows, domain):
        name, title = f"{study}-{domain}-{_slug(metric.name)}", f"{domain}: {metric.label or metric.name}"
        tables.append(score_table(rows, domain, metric, methods, name=name, title=title))
        if intervals := interval_table(rows, domain, metric, methods, name, title):
            tables.append(intervals)
    return tables


def interval_table(
    rows: Rows, domain: str, metric: Metric, methods: Sequence[str], name: str, title: str
) -> Table | None:
    """Intervals and gaps; None if no values per episode were kept."""
    table = score_table(rows, domain, metric, methods, name=f"{name}-gap", title=f"{title}, intervals", gaps=True)
    return table if any(cell for row in table.rows if row[0] in METHODS for cell in row[1:]) else None


def diagnostics_tables(rows: Rows) -> list[Table]:
    """Tables of all other metrics of every domain."""
    tables = []
    for domain in DOMAINS:
        methods = measured_methods(rows, domain, lambda method: not METHODS[method].ablation)
        first = {metric.name for metric in headline_metrics(rows, domain)}
        for metric in metrics_of(rows, domain):
            if metric.name not in first and any(m in METHODS for m in methods):
                name, title = f"diagnostics-{domain}-{_slug(metric.name)}", f"{domain}: {metric.label or metric.name}"
                table = score_table(rows, domain, metric, methods, name=name, title=title)
                if len(table.head) > 2:  # some metrics belong to a task without rows
                    tables.append(table)
    return tables


def aggregate_table(rows: Rows) -> Table | None:
    """One number per method over all tasks with a filter: the interquartile mean of the gap closed."""
    gaps_by_task: dict[str, dict[str, list[float]]] = {}
    for domain in DOMAINS:
        metric = metrics_of(rows, domain)[0]
        for task in DOMAINS[domain].tasks:
            for method in METHODS:
                key = _key(rows, domain, task, method, metric)
                gaps = [rows.gap(key, seed) for seed in rows.values.get(key, {})]
                if known := [gap for gap in gaps if gap is not None]:
                    gaps_by_task.setdefault(method, {})[f"{domain}/{task}"] = known
    body: list[list[Entry | str]] = []
    for method, by_task in gaps_by_task.items():
        middle, low, high = aggregate(by_task)
        runs = sum(len(values) for values in by_task.values())
        interval = f"[{low:.3f}, {high:.3f}]" if runs > len(by_task) else ""
        body.append([method, f"{middle:.3f}", interval, str(len(by_task)), str(runs)])
    if not body:
        return None
    return Table(
        name="main-aggregate",
        title="Over all tasks: interquartile mean of the gap closed",
        note="0 is Vanilla, 1 is the Bayes filter. Intervals resample the seeds of each task, if there are several.",
        head=["method", "interquartile mean", "95 % interval", "tasks", "runs"],
        rows=body,
    )


def rivals_table(rows: Rows, domain: str, wanted: Callable[[str], bool]) -> Table | None:
    """Compare every method with Vanilla and with the domain's rivals; None if the domain has no rivals."""
    metric, usual = metrics_of(rows, domain)[0], rows.usual_setting(domain)
    here = (domain, usual, rows.preset, metric.name)
    own = [r for r in rows.intervals if (r["domain"], r["setting"], r["preset"], r["metric"]) == here]
    by_method = {
        (r["task"], r["method"]): {difference["other"]: difference for difference in r["differences"]}
        for r in own
        if r["differences"] and wanted(r["method"])
    }
    others = ordered({other for differences in by_method.values() for other in differences}, [BLIND])
    if set(others) <= {BLIND}:
        return None
    body: list[list[Entry | str]] = []
    clear = 0
    for task in DOMAINS[domain].tasks:
        for method in ordered((m for t, m in by_method if t == task), METHODS):
            line: list[Entry | str] = [method if len(DOMAINS[domain].tasks) == 1 else f"{task}: {method}"]
            for other in others:
                difference = by_method[task, method].get(other)
                clear += difference is not None and difference["p"] < LEVEL
                line += [_difference(difference), p_text(difference["p"]) if difference else ""]
            body.append(line)
    count = sum(len(differences) for differences in by_method.values())
    return Table(
        name=f"main-{domain}-rivals",
        title=f"{domain}: {metric.label or metric.name} against {' and '.join(others)}",
        note="Paired on the same episodes, with 95 % intervals; p is not corrected for multiple comparisons. "
        f"{clear or 'None'} of {count} differences {'are' if clear > 1 else 'is'} significant at 5 %.",
        head=["method", *(column for other in others for column in (f"minus {other}", "p"))],
        rows=body,
    )


def pairs_table(rows: Rows, domain: str) -> Table | None:
    """Compare every method with the best one, on the same seeds and episodes."""
    body: list[list[Entry | str]] = []
    clear = 0
    for task in DOMAINS[domain].tasks:
        setting = rows.usual_setting(domain)
        own = [p for p in rows.pairs if (p["domain"], p["task"], p["setting"]) == (domain, task, setting)]
        if not own:
            continue
        metric = metrics_of(rows, domain)[0].name
        own = [p for p in own if p["metric"] == metric]
        own = [p for p in own if all(p[side] in METHODS for side in ("method", "other"))]
        own = [p for p in own if not any(METHODS[p[side]].ablation for side in ("method", "other"))]
        names = {name for pair in own for name in (pair["method"], pair["other"])}
        means = {name: x.mean for name in names if (x := rows.number((domain, task, setting, name, metric)))}
        best = max(means, key=lambda name: means[name], default="")
        for pair in own:
            if best not in (pair["method"], pair["other"]):
                continue
            sign = 1 if pair["other"] == best else -1
            other = pair["method"] if sign == 1 else pair["other"]
            low, high = sorted((sign * pair["low"], sign * pair["high"]))
            difference = signed(sign * pair["difference"])
            interval = f"[{signed(low)}, {signed(high)}]"
            clear += pair["p_holm"] < LEVEL
            body.append([f"{task}: {other} against {best}", difference, interval, p_text(pair["p_holm"])])
    if not body:
        return None
    return Table(
        name=f"main-{domain}-pairs",
        title=f"{domain}: paired differences from the best method",
        note="Differences from the method with the best mean, without ablations, paired on the same seeds and "
        "episodes. Intervals are those of single pairs; p is corrected by Holm's method for all pairs of a task, "
        "including ablations. "
        f"{clear or 'None'} of these {len(body)} differences {'are' if clear > 1 else 'is'} significant at 5 %.",
        head=["task and methods", "difference", "95 % interval", "p (Holm)"],
        rows=body,
    )


def _difference(row: dict[str, Any] | None) -> str:
    return "" if not row else f"{signed(row['value'])} [{signed(row['low'])}, {signed(row['high'])}]"


def p_text(value: float | None) -> str:
    """Format a p value; empty if there is none."""
    return "" if value is None or value != value else "< 0.001" if value < 0.001 else f"{value:.3f}"


def _slug(name: str) -> str:
    """Turn a metric's name into part of a file name; names of a user's markets may hold any characters."""
    plain = re.sub(r"[^A-Za-z0-9.-]", "+", name.replace("@", "-at-").replace("_", "-"))
    if "+" not in plain and len(plain) < 60:
        return plain
    return f"{plain[:50]}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"
