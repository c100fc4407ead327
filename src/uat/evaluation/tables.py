"""Tables from rows. They know no method and no metric by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from uat.domains import DOMAINS
from uat.evaluation.scores import BLIND, CEILING, Evaluation, gap_closed
from uat.methods import METHODS
from uat.recipes import recipe

Row = Mapping[str, Any]


def print_rows(rows: Sequence[Row], *, as_json: bool) -> None:
    """To stdout: a JSON list, or columns."""
    print(json.dumps(list(rows), indent=2) if as_json else columns(rows))


def columns(rows: Sequence[Row]) -> str:
    """Rows as aligned text, one column per key, numbers to the right."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    body = [[_text(row.get(name)) for name in names] for row in rows]
    right = [all(not isinstance(row.get(name), str | list) for row in rows) for name in names]
    widths = [max(len(cell) for cell in column) for column in zip(names, *body, strict=True)]
    lines = [names, ["-" * width for width in widths], *body]
    return "\n".join(
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)).rstrip()
        for line in lines
    )


def method_rows() -> list[dict[str, Any]]:
    """Every method: what it sees, how large it is under each domain's published settings, where it serves."""
    rows = []
    for name, method in METHODS.items():
        configs = {domain: recipe(domain, name) for domain in DOMAINS}
        policies = {domain: method.build(c.build_domain().spec, c.method) for domain, c in configs.items()}
        sizes = {f"parameters:{d}": sum(p.numel() for p in policy.parameters()) for d, policy in policies.items()}
        sees = sorted(next(iter(policies.values())).sees)
        rows.append({"method": name, "sees": sees, "domains": list(policies), **sizes, "what": method.summary})
    return rows


def score_rows(found: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """One line per method, task and seed: every metric with its 95 % interval, and the gap closed in the first."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    first: dict[tuple[Any, ...], float] = {}
    for one in found:
        for score in one.scores:
            place = (score.domain, score.task, score.setting)
            key = (*place, score.method, score.seed, score.n, score.run)
            head = {"task": f"{score.domain}/{score.task}", "setting": score.setting, "method": score.method}
            row = rows.setdefault(key, {**head, "seed": score.seed, "episodes": score.n})
            low, high = one.interval(score.method, score.metric)
            row[score.metric] = f"{score.value:.3f} ± {(high - low) / 2:.3f}"
            first.setdefault(key, score.value)
            first.setdefault((*place, score.method), score.value)
    for key, row in rows.items():
        blind, ceiling = first.get((*key[:3], BLIND)), first.get((*key[:3], CEILING))
        if blind is not None and ceiling is not None:
            row["gap closed"] = gap_closed(first[key], blind, ceiling)
    return [rows[key] for key in sorted(rows, key=str)]


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    return ", ".join(map(str, value)) or "nothing" if isinstance(value, list) else str(value)
