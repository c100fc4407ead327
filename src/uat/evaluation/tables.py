"""Tables from rows, without naming any method or metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from uat.domains import DOMAINS
from uat.evaluation.comparison import Summary
from uat.methods import METHODS, Policy
from uat.recipes import pairs, recipe
from uat.terminal import plain, show_json, show_page

Row = Mapping[str, Any]


def print_rows(rows: Sequence[Row], *, as_json: bool) -> None:
    """Print rows to stdout, as a JSON list or as aligned columns."""
    if as_json:
        show_json(list(rows))
    else:
        show_page(columns(rows))


def columns(rows: Sequence[Row]) -> str:
    """Rows as aligned text: one column per key, with numbers aligned to the right."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    body = [[plain(_text(row.get(name))) for name in names] for row in rows]
    right = [all(not isinstance(row.get(name), str | list) for row in rows) for name in names]
    head = [plain(name) for name in names]
    widths = [max(len(cell) for cell in column) for column in zip(head, *body, strict=True)]
    lines = [head, ["-" * width for width in widths], *body]
    return "\n".join(
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)).rstrip()
        for line in lines
    )


def method_rows() -> list[dict[str, Any]]:
    """One row per method: its visible feedback, domains, sizes under each domain's settings, and source package."""
    rows = []
    for name, method in METHODS.items():
        policies = {d: policy for d, other in pairs() if other == name and (policy := policy_in(d, name)) is not None}
        sizes = {f"parameters:{d}": sum(p.numel() for p in policy.parameters()) for d, policy in policies.items()}
        sees = sorted(next(iter(policies.values()), method.policy).sees)
        row = {"method": name, "sees": sees, "domains": list(policies), **sizes, "what": method.summary}
        rows.append({**row, "from": METHODS.owner(name)})
    return rows


def policy_in(domain: str, method: str) -> Policy | None:
    """The policy under the recipe of a domain.

    None if the method or the domain comes from another package and the method does not support the domain or fails.
    """
    try:
        config = recipe(domain, method)
        return METHODS[method].build(config.build_domain().spec, config.method)
    except Exception:
        if domain in DOMAINS.own and method in METHODS.own:
            raise
        return None


LEGEND = "mean ± deviation over seeds [95 % interval over seeds and episodes]; without seeds over episodes alone"
"""Explanation of the cells of `score_rows`."""


def score_rows(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    """One line per method and task, or per run: one cell per metric, and the gap closed in the first metric.

    A metric that is undefined in every line, such as the success where the world reports none, has no column.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    gaps: dict[tuple[Any, ...], float | None] = {}
    defined = {s.metric for s in summaries if not math.isnan(s.value)}
    for s in summaries:
        key = (s.domain, s.task, s.setting, s.n, s.method, s.runs)
        row = rows.setdefault(key, score_head(s))
        if s.metric in defined:
            row[s.metric] = score_cell(s)
        gaps.setdefault(key, s.gap_closed)
    return [{**row, "gap closed": gaps[key]} for key, row in rows.items()]


def score_head(s: Summary) -> dict[str, Any]:
    """Return the first columns of a line: what was scored, and on how many seeds and episodes."""
    head = {"task": f"{s.domain}/{s.task}", "setting": s.setting, "preset": s.preset or "-", "method": s.method}
    return {**head, "seeds": list(s.seeds) or None, "episodes": s.n}


def score_cell(s: Summary) -> str | None:
    """Return the cell of a metric; None if no episode defines it."""
    if math.isnan(s.value):
        return None
    deviation = "" if s.std is None else f" ± {s.std:.3f}"
    return f"{s.value:.3f}{deviation} [{s.low:.3f}, {s.high:.3f}]"


def difference_rows(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    """One line per method, task and compared method, in the first metric; `--json` has all metrics."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for s in summaries:
        for d in s.differences:
            head = {"task": f"{s.domain}/{s.task}", "setting": s.setting, "preset": s.preset, "method": s.method}
            tail = {"less": d.other, "metric": s.metric, "difference": f"{d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}]"}
            rows.setdefault((*head.values(), s.runs, d.other), {**head, "seeds": list(s.seeds), **tail, "p": d.p})
    return list(rows.values())


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    return ", ".join(map(str, value)) or "nothing" if isinstance(value, list) else str(value)
