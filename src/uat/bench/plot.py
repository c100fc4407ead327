"""Plot the cost of a step against its context length."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from uat.bench.timing import Row
from uat.files import replacing

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette for the colour-blind; one colour for each path."""
DASHES = ("-", "--", ":", "-.")
"""Line style of each method; peers use the first."""
MARKERS = "osD^vP*"


def need_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the plot needs matplotlib, which is not installed: pip install 'uat-transformer[bench]'")


def draw(rows: Sequence[Row], file: Path) -> None:
    """Plot the median milliseconds of a step with one stream by context length, on logarithmic axes."""
    shown = [row for row in rows if (row.case, row.batch, row.metric) == ("step", 1, "p50")]
    lines = list(dict.fromkeys((row.method, row.path) for row in shown))
    paths, methods = list(dict.fromkeys(p for _, p in lines)), list(dict.fromkeys(m for m, p in lines if ":" not in p))
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for method, path in sorted(lines, key=lambda line: paths.index(line[1])):
        own = sorted((row.context, row.value) for row in shown if (row.method, row.path) == (method, path))
        at, dash = paths.index(path), DASHES[methods.index(method) % len(DASHES)] if method in methods else "-"
        name = path.removeprefix("peer:")
        label = ", ".join(dict.fromkeys([method, name]))
        style = {"color": COLOURS[at % len(COLOURS)], "marker": MARKERS[at % len(MARKERS)], "linestyle": dash}
        axes.plot(*zip(*own, strict=True), label=label, markersize=5, **style)
    contexts = sorted({row.context for row in shown})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(contexts, labels=[str(context) for context in contexts])
    axes.set_xlabel("context (steps seen)")
    axes.set_ylabel("one step, median (ms)")
    axes.set_title(f"Cost of one decision, one stream ({shown[0].device})")
    axes.grid(alpha=0.3, which="major")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    with replacing(file) as image:
        figure.savefig(image, format=file.suffix.removeprefix(".") or None, dpi=150)
