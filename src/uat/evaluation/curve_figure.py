"""Figure of adaptation curves: one row of panels per task, one panel per curve, one line per method."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from uat.evaluation.curves import STEPS, Part
from uat.evaluation.scores import CEILING, EXPERT, RANDOM
from uat.evaluation.tables import score_head
from uat.files import replacing

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's palette for the colour-blind, without black, which references have."""
DASHES = {CEILING: "--", EXPERT: "-.", RANDOM: ":"}
FORMATS = (".svg", ".png", ".pdf")


def check_figure(file: Path) -> Path:
    """Return the file if a figure can be written there; call it before anything is computed."""
    if file.suffix.lower() not in FORMATS:
        raise ValueError(f"curves={file} must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if file.is_dir():
        raise ValueError(f"curves={file} is a folder; name a file in it")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the figure needs matplotlib, which is not installed: pip install 'uat-transformer[report]'")
    return file


def draw_curves(parts: Sequence[Part], file: Path) -> None:
    """Draw each curve against the step, with its 95 % interval as a band."""
    shown = [part for part in parts if part.part == STEPS]
    tasks = list(dict.fromkeys(_task(part) for part in shown))
    curves = list(dict.fromkeys(part.curve for part in shown))
    matplotlib, figures = importlib.import_module("matplotlib"), importlib.import_module("matplotlib.figure")
    size = (4.4 * len(curves) + 1.6, 3.2 * len(tasks) + 0.3)
    with matplotlib.rc_context({"svg.hashsalt": "uat", "font.size": 9}):
        figure = figures.Figure(figsize=size, layout="constrained")
        panels = figure.subplots(len(tasks), len(curves), squeeze=False)
        for task, row in zip(tasks, panels, strict=True):
            for curve, axis in zip(curves, row, strict=True):
                own = [part for part in shown if (_task(part), part.curve) == (task, curve)]
                shared = len({part.summary.setting for part in own}) == 1
                _draw(own, axis, with_setting=not shared)
                setting = f", {own[0].summary.setting}" if shared and own[0].summary.setting != "default" else ""
                axis.set_ylabel(f"{curve} per step")
                axis.set_title(f"{task[0]}{setting}, {task[1]} test episodes", fontsize=9)
            row[-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        with replacing(file) as image:
            figure.savefig(image, format=file.suffix.lower().removeprefix("."), dpi=150, metadata=_undated(file))


def _draw(parts: Sequence[Part], axis: Any, *, with_setting: bool) -> None:
    """Draw the lines of one panel, references in black."""
    colours, lines = iter(COLOURS * (len(parts) + 1)), dict[str, list[Part]]()
    for part in parts:
        lines.setdefault(_label(part, with_setting=with_setting), []).append(part)
    for label, own in lines.items():
        method, is_run = own[0].summary.method, bool(own[0].summary.runs)
        style = {"color": next(colours)} if is_run else {"color": "#000000", "linestyle": DASHES.get(method, "--")}
        # the middle of the range, with steps counted from 1
        x = [((part.begin or 0) + 1 + (part.end or 0)) / 2 for part in own]
        low, mean, high = zip(*((p.summary.low, p.summary.value, p.summary.high) for p in own), strict=True)
        axis.plot(x, mean, label=label, linewidth=1.4 if is_run else 1.0, **style)
        axis.fill_between(x, low, high, color=style["color"], alpha=0.15 if is_run else 0.07, linewidth=0)
    axis.set_xlabel("step of the episode")
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


def _task(part: Part) -> tuple[str, int]:
    head = score_head(part.summary)
    return head["task"], part.summary.n


def _label(part: Part, *, with_setting: bool) -> str:
    """Return the name of a line: the method, its settings if lines differ in them, and its seeds."""
    s = part.summary
    setting = f", {s.setting}" if with_setting and s.setting != "default" else ""
    seeds = f", seed {s.seeds[0]}" if len(s.seeds) == 1 else f", {len(s.seeds)} seeds" if s.seeds else ""
    return f"{s.method}{setting}{seeds}"


def _undated(file: Path) -> dict[str, None]:
    """Return metadata without a date, so that equal numbers give equal files."""
    return {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(file.suffix.lower(), {})
