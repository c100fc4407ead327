"""Tables of scores: methods beside each other, the published numbers, the filter, and how sure all that is.

They know metrics by their domain's account, and methods by the registry.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from uat.domains import DOMAINS
from uat.evaluation.intervals import LEVEL
from uat.evaluation.scores import BLIND, CEILING, EXPERT, RANDOM
from uat.evaluation.statistics import aggregate
from uat.methods import METHODS
from uat.metrics import Metric
from uat.paper.report.rows import Key, Number, Rows, ordered
from uat.paper.report.tables import Entry, Table, ranked
from uat.recipes import recipe

REFERENCES = {
    CEILING: "Bayes filter",
    EXPERT: "expert",
    RANDOM: "chance",
}
"""What stands beside methods, as tables call it; a domain's other references go by their own names."""
LEGEND = (
    "Beside the methods: the Bayes filter knows the generative model and sees what a policy sees; the expert sees what "
    "is hidden; chance takes every action alike."
)
OURS = "Ours: mean ± deviation over seeds. Published: the paper's tables, three seeds, another implementation."


def number(found: Number | None, digits: int = 3) -> str:
    if found is None:
        return "-"
    if found.std is None:
        return f"{found.mean:.{digits}f}"
    least = 10**-digits
    return f"{found.mean:.{digits}f} ± " + (f"{found.std:.{digits}f}" if found.std >= least else f"<{least:.{digits}f}")


def signed(value: float | None, digits: int = 3) -> str:
    """With its sign, and without one where it is nothing at so many digits."""
    if value is None:
        return ""
    return f"{value:+.{digits}f}".replace("-", "−") if round(value, digits) else f"{0:.{digits}f}"


def metrics_of(rows: Rows, domain: str) -> tuple[Metric, ...]:
    """Those of the domain; of a user's data, those that its rows have: another market has metrics of its name."""
    declared = _declared(domain, rows.preset)
    found = {key[4] for key in rows.values if key[0] == domain}
    others = sorted(found - {m.name for m in declared})
    joint = [m for m in declared if not any(m.name.startswith(f"{other.name}_") for other in declared)]
    parts = [(name.removeprefix(f"{m.name}_"), m) for m in joint for name in others if name.startswith(f"{m.name}_")]
    if not parts:
        return declared
    of_data = [replace(m, name=f"{m.name}_{part}", label=f"{m.label} {part}") for part, m in sorted(parts, key=_part)]
    return (*(m for m in declared if m.name in found), *of_data)


def _part(part_and_metric: tuple[str, Metric]) -> str:
    return part_and_metric[0]


@lru_cache(maxsize=64)
def _declared(domain: str, preset: str) -> tuple[Metric, ...]:
    return recipe(domain, "uat", preset).build_domain().metrics


def headline_metrics(rows: Rows, domain: str) -> list[Metric]:
    """Those of the paper's main table that the domain measures, and the first in any case."""
    theirs = {row["metric"] for row in rows.published if row["domain"] == domain and "setting" not in row}
    every = metrics_of(rows, domain)
    return [metric for i, metric in enumerate(every) if i == 0 or metric.name in theirs]


def there(rows: Rows, domain: str, wanted: Callable[[str], bool]) -> list[str]:
    """Methods that have rows in a domain under its recipe, in the registry's order, then its references."""
    usual = rows.usual_setting(domain)
    found = [key[3] for key in rows.values if key[0] == domain and key[2] == usual]
    named = ordered(found, [*METHODS, *REFERENCES])
    return [method for method in named if method not in METHODS or wanted(method)]


def score_table(
    rows: Rows, domain: str, metric: Metric, methods: Sequence[str], *, name: str, title: str, gaps: bool = False
) -> Table:
    """Methods down; for every task ours, published and the difference, or the interval and the gap closed."""
    tasks = [task for task in DOMAINS[domain].tasks if any(_number(rows, domain, task, m, metric) for m in methods)]
    columns: list[list[Entry | str]] = [[REFERENCES.get(m, m) for m in methods]]
    head, competes = ["method"], [m in METHODS for m in methods]
    for task in tasks:
        shown = f"{task} " if len(DOMAINS[domain].tasks) > 1 else ""
        found = [_number(rows, domain, task, m, metric) for m in methods]
        if gaps:
            head.append(f"{shown}95 % interval")
            columns.append([_interval(x) for x in found])
            if any(x is not None and x.gap is not None for x in found):
                head.append(f"{shown}gap closed")
                columns.append(["" if x is None or x.gap is None else f"{x.gap:.1%}" for x in found])
            continue
        means = [None if x is None else x.mean for x in found]
        head.append(f"{shown}ours".strip())
        columns.append([*ranked([number(x) for x in found], means, higher=metric.higher_is_better, among=competes)])
        theirs = [rows.published_number(_key(rows, domain, task, m, metric)) for m in methods]
        if any(theirs):
            head += [f"{shown}published", f"{shown}Δ"]
            columns.append(["" if x is None else f"{x[0]:.3f}" + _spread(x[1]) for x in theirs])
            columns.append(
                [
                    "" if ours is None or x is None else signed(ours.mean - x[0])
                    for ours, x in zip(found, theirs, strict=True)
                ]
            )
    if not gaps:
        head.append("seeds")
        columns.append([str(_seeds(rows, domain, tasks, m, metric) or "") for m in methods])
    sure = "95 % intervals are over seeds, where there are several, and episodes"
    to_filter = "; gap closed: from Vanilla to the filter" if any("gap closed" in column for column in head) else ""
    note = f"{sure}{to_filter}." if gaps else OURS
    return Table(name=name, title=title, note=note, head=head, rows=[list(row) for row in zip(*columns, strict=True)])


def _spread(std: float | None) -> str:
    return "" if std is None else f" ± {std:.2f}"


def _interval(found: Number | None) -> str:
    return "" if found is None or found.low is None else f"[{found.low:.3f}, {found.high:.3f}]"


def _key(rows: Rows, domain: str, task: str, method: str, metric: Metric) -> Key:
    return domain, task, rows.usual_setting(domain), method, metric.name


def _number(rows: Rows, domain: str, task: str, method: str, metric: Metric) -> Number | None:
    return rows.number(_key(rows, domain, task, method, metric))


def _seeds(rows: Rows, domain: str, tasks: Iterable[str], method: str, metric: Metric) -> int:
    found = [_number(rows, domain, task, method, metric) for task in tasks]
    return max((len(x.seeds) for x in found if x is not None), default=0)


def domain_tables(rows: Rows, domain: str, wanted: Callable[[str], bool], study: str) -> list[Table]:
    """The headline metrics of a domain: scores, then intervals and gaps."""
    methods, tables = there(rows, domain, wanted), []
    if not any(m in METHODS for m in methods):
        return []
    for metric in headline_metrics(rows, domain):
        name, title = f"{study}-{domain}-{_slug(metric.name)}", f"{domain}: {metric.label or metric.name}"
        tables.append(score_table(rows, domain, metric, methods, name=name, title=title))
        if sure := _how_sure(rows, domain, metric, methods, name, title):
            tables.append(sure)
    return tables


def _how_sure(rows: Rows, domain: str, metric: Metric, methods: Sequence[str], name: str, title: str) -> Table | None:
    """Intervals and gaps; None where no numbers of single episodes were kept."""
    table = score_table(rows, domain, metric, methods, name=f"{name}-gap", title=f"{title}, how sure", gaps=True)
    return table if any(cell for row in table.rows if row[0] in METHODS for cell in row[1:]) else None


def domain_page(rows: Rows, domain: str) -> str:
    """Every metric of a domain as Markdown: all methods, their variants and the references."""
    methods = there(rows, domain, lambda method: True)
    data = f" Data: {rows.data[domain]}." if domain in rows.data else ""
    parts = [
        f"# Results: {domain}",
        f"Made by `python results/make_table.py {domain}` from the committed rows. {OURS}{data}",
    ]
    first = headline_metrics(rows, domain)
    for metric in metrics_of(rows, domain):
        title = metric.label or metric.name
        table = score_table(rows, domain, metric, methods, name=metric.name, title=title)
        if len(table.head) > 2:
            parts.append(f"## {title}\n\n{table.markdown()}")
        if metric in first and (sure := _how_sure(rows, domain, metric, methods, metric.name, title)):
            parts.append(f"{sure.note}\n\n{sure.markdown()}")
    for held in (rivals_table(rows, domain, lambda method: True), pairs_table(rows, domain)):
        if held:
            parts.append(
                f"## {held.title.removeprefix(f'{domain}: ').capitalize()}\n\n{held.note}\n\n{held.markdown()}"
            )
    return "\n\n".join(parts) + "\n"


def diagnostics_tables(rows: Rows) -> list[Table]:
    """Every other metric of every domain."""
    tables = []
    for domain in DOMAINS:
        methods = there(rows, domain, lambda method: not METHODS[method].changes)
        first = {metric.name for metric in headline_metrics(rows, domain)}
        for metric in metrics_of(rows, domain):
            if metric.name not in first and any(m in METHODS for m in methods):
                name, title = f"diagnostics-{domain}-{_slug(metric.name)}", f"{domain}: {metric.label or metric.name}"
                tables.append(score_table(rows, domain, metric, methods, name=name, title=title))
    return tables


def aggregate_table(rows: Rows) -> Table | None:
    """One number per method over all tasks with a filter: the interquartile mean of the gap closed."""
    found: dict[str, dict[str, list[float]]] = {}
    for domain in DOMAINS:
        metric = metrics_of(rows, domain)[0]
        for task in DOMAINS[domain].tasks:
            for method in METHODS:
                key = _key(rows, domain, task, method, metric)
                gaps = [rows.gap(key, seed) for seed in rows.values.get(key, {})]
                if known := [gap for gap in gaps if gap is not None]:
                    found.setdefault(method, {})[f"{domain}/{task}"] = known
    body: list[list[Entry | str]] = []
    for method, by_task in found.items():
        middle, low, high = aggregate(by_task)
        runs = sum(len(values) for values in by_task.values())
        interval = f"[{low:.3f}, {high:.3f}]" if runs > len(by_task) else ""
        body.append([method, f"{middle:.3f}", interval, str(len(by_task)), str(runs)])
    if not body:
        return None
    return Table(
        name="main-aggregate",
        title="Over all tasks: interquartile mean of the gap closed",
        note="0 is Vanilla, 1 the Bayes filter. Intervals resample the seeds of each task, so one seed has none.",
        head=["method", "interquartile mean", "95 % interval", "tasks", "runs"],
        rows=body,
    )


def rivals_table(rows: Rows, domain: str, wanted: Callable[[str], bool]) -> Table | None:
    """Every method against Vanilla and against the domain's rivals, where it has some: is it worth its effort?"""
    metric, usual = metrics_of(rows, domain)[0], rows.usual_setting(domain)
    here = (domain, usual, rows.preset, metric.name)
    own = [r for r in rows.intervals if (r["domain"], r["setting"], r["preset"], r["metric"]) == here]
    found = {
        (r["task"], r["method"]): {held["other"]: held for held in r["differences"]}
        for r in own
        if r["differences"] and wanted(r["method"])
    }
    others = ordered({other for held in found.values() for other in held}, [BLIND])
    if set(others) <= {BLIND}:
        return None
    body: list[list[Entry | str]] = []
    clear = 0
    for task in DOMAINS[domain].tasks:
        for method in ordered((m for t, m in found if t == task), METHODS):
            line: list[Entry | str] = [method if len(DOMAINS[domain].tasks) == 1 else f"{task}: {method}"]
            for other in others:
                held = found[task, method].get(other)
                clear += held is not None and held["p"] < LEVEL
                shown = held and f"{signed(held['value'])} [{signed(held['low'])}, {signed(held['high'])}]"
                line += [shown or "", _p(held["p"]) if held else ""]
            body.append(line)
    count = sum(len(held) for held in found.values())
    return Table(
        name=f"main-{domain}-rivals",
        title=f"{domain}: {metric.label or metric.name} against {' and '.join(others)}",
        note="Paired on the same episodes, 95 % intervals, p not corrected for the number of comparisons. "
        f"{clear or 'None'} of {count} differences {'are' if clear > 1 else 'is'} significant at 5 %.",
        head=["method", *(column for other in others for column in (f"minus {other}", "p"))],
        rows=body,
    )


def pairs_table(rows: Rows, domain: str) -> Table | None:
    """Every method against the best one, on the same seeds and episodes, and in words whether anybody differs."""
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
        own = [p for p in own if not any(METHODS[p[side]].changes for side in ("method", "other"))]
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
            body.append([f"{task}: {other} against {best}", difference, interval, _p(pair["p_holm"])])
    if not body:
        return None
    return Table(
        name=f"main-{domain}-pairs",
        title=f"{domain}: paired differences from the best method",
        note="From the best by its mean, ablations left out. The same seeds and episodes for both; intervals are of "
        "each pair alone, p by Holm's rule for all pairs of a task, ablations among them. "
        f"{clear or 'None'} of these {len(body)} differences {'are' if clear > 1 else 'is'} significant at 5 %.",
        head=["task and methods", "difference", "95 % interval", "p (Holm)"],
        rows=body,
    )


def _p(value: float | None) -> str:
    return "" if value is None or value != value else "< 0.001" if value < 0.001 else f"{value:.3f}"


def _slug(name: str) -> str:
    """A metric's name as part of a file's name; markets of a user may give it any letters."""
    plain = re.sub(r"[^A-Za-z0-9.-]", "+", name.replace("@", "-at-").replace("_", "-"))
    if "+" not in plain and len(plain) < 60:
        return plain
    return f"{plain[:50]}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"
