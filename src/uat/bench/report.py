"""Tables, JSON and a plot of measured rows, without naming any method or path except the baselines."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from uat import __version__
from uat.bench.cases import CASES
from uat.bench.options import Bench
from uat.bench.plot import draw, need_matplotlib
from uat.bench.run import Result, bench
from uat.bench.timing import Row
from uat.evaluation.tables import columns
from uat.files import write_atomically
from uat.terminal import say, show_json, show_page
from uat.training.surroundings import pick_device

BASELINES = ("recompute", "cached", "whole")
"""Baselines of the ratios: the first of these paths that a case has."""
COMPARED = "peer:"
"""Prefix of the paths with which every other row is compared."""
LIBRARIES = ("numpy", "transformers", "d3rlpy")


def report(options: Bench) -> None:
    """Measure, write the requested files, and print data to stdout and progress to stderr.

    The file of rows is written after each case, so that an interrupted run loses one case at most.
    """
    if options.plot is not None:
        need_matplotlib()

    def keep(so_far: Result) -> None:
        if options.out is not None:
            write_atomically(options.out, (_text(options, so_far) + "\n").encode())

    result = bench(options, say=say, keep=keep)
    if options.plot is not None:
        draw(result.rows, options.plot)
    if options.json:
        show_json(document(options, result), indent=1)
    else:
        show_page(tables(result))


def _text(options: Bench, result: Result) -> str:
    return json.dumps(document(options, result), indent=1)


def document(options: Bench, result: Result) -> dict[str, Any]:
    """The contents of the file: date, device and versions, then the rows."""
    on_cuda = pick_device(options.device).type == "cuda"
    versions = {"uat": __version__, "torch": torch.__version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if on_cuda else f"CPU, {os.cpu_count()} cores",
        "precision": options.precision,
        **versions,
        **({"quick": True} if options.quick else {}),
        "absent": result.absent,
        "rows": [asdict(row) for row in result.rows],
    }


# ---------------------------------------------------------------- tables


def tables(result: Result) -> str:
    """One table for each case, followed by the measurements that are missing."""
    parts = []
    for case in dict.fromkeys(row.case for row in result.rows):
        rows = [row for row in result.rows if row.case == case]
        device = ", ".join(dict.fromkeys(row.device for row in rows))
        parts.append(f"{case} ({device}): {CASES.get(case, '')}\n\n{columns(aligned(case_rows(rows)))}")
    lines = [
        f"  {path}: {why} ({', '.join(where)})"
        for path, reasons in result.absent.items()
        for why, where in reasons.items()
    ]
    parts.append("vs X: time or memory of X divided by that of the row, in this run; growth: ratio to shortest context")
    if lines:
        parts.append("\n".join(["not measured:", *lines]))
    return "\n\n".join(parts)


def case_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One line per path: its metrics, the ratios of the baseline and of each peer to it, and growth with context."""
    metrics = list(dict.fromkeys((row.metric, row.unit) for row in rows))
    value = {(row.method, row.path, row.batch, row.context, row.metric): row.value for row in rows}
    baseline = next((name for name in BASELINES if any(row.path == name for row in rows)), None)
    peers = list(dict.fromkeys((row.method, row.path) for row in rows if row.path.startswith(COMPARED)))
    shortest = min(row.context for row in rows)
    lines = []
    for method, path, batch, context in dict.fromkeys((r.method, r.path, r.batch, r.context) for r in rows):
        own = {name: value.get((method, path, batch, context, name)) for name, _ in metrics}
        first = next(name for name, number in own.items() if number is not None)
        line: dict[str, Any] = {"batch": batch, "context": context, "method": method, "path": path}
        line |= {f"{name} {unit}": significant(own[name]) for name, unit in metrics}
        for other_method, other in [(method, baseline), *peers]:
            if other is not None:
                reference = value.get((other_method, other, batch, context, first))
                line[f"vs {other.removeprefix(COMPARED)}"] = ratio(reference, own[first])
        if any(row.context > shortest for row in rows):
            line["growth"] = ratio(own[first], value.get((method, path, batch, shortest, first)))
        lines.append(line)
    return sorted(lines, key=lambda line: (line["batch"], line["context"]))


def ratio(baseline: float | None, value: float | None) -> str | None:
    """Baseline divided by value, as text; None if either is missing."""
    return None if not baseline or not value else f"{significant(baseline / value)}x"


def significant(value: float | None) -> str | None:
    """Format a number with three significant digits and no exponent."""
    if value is None:
        return None
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def aligned(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Align formatted numbers to the right."""
    numeric = [name for name in lines[0] if name not in ("batch", "context", "method", "path")]
    width = {name: max(len(name), *(len(line[name] or "-") for line in lines)) for name in numeric}
    return [line | {name: (line[name] or "-").rjust(width[name]) for name in numeric} for line in lines]
