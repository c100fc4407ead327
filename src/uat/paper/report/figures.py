"""The paper's figures, drawn from rows and traces. A figure without measurements raises MissingError.

Colours are Okabe and Ito's palette for the colour-blind; markers, dashes and hatches distinguish the same in print.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from uat.domains import DOMAINS
from uat.evaluation.scores import CEILING
from uat.methods import METHODS
from uat.paper.report.binding_tables import binding_lines
from uat.paper.report.rows import Number, Rows
from uat.paper.report.score_tables import headline_metrics, measured_methods, metrics_of, signed
from uat.paper.report.study_tables import LABELS, boundary_levels, boundary_sweeps, is_shown, sweep_curves, sweep_points
from uat.paper.report.traces import gate_rows, kinetics_of
from uat.paper.studies.binding import GATES, TOKENS, WIDTHS, Way
from uat.paper.studies.cells import Filter, Sweep
from uat.paper.studies.grids import BOUNDARY, STUDIES, TIMED
from uat.recipes import recipe

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS, DASHES, HATCHES = "osD^vPX", ("-", "--", "-.", ":"), ("", "///", "...", "xxx", "\\\\\\", "++", "ooo")
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "uat",
    "figure.dpi": 100,
}
BEST, TWIN = "uat", "vanilla"
"""The two methods whose difference is written at each kind of feedback."""


class MissingError(ValueError):
    """The figure has no measurements yet; the message is the command that makes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A figure of the report."""

    name: str
    title: str
    caption: str
    draw: Callable[[Rows], Any]


def need_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("a report needs matplotlib, which is not installed: pip install 'uat-transformer[report]'")


def new_figure(width: float, height: float) -> Any:
    return importlib.import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def style_of(method: str) -> dict[str, Any]:
    """Colour, marker and dash of a method, equal in every figure."""
    known = ["vanilla", "uat", "adt", "dt", "gtrxl", "tent", "cotta"]
    at = known.index(method) if method in known else len(known) + sorted(METHODS).index(method)
    return {"color": COLOURS[at % 7], "marker": MARKERS[at % 7], "linestyle": DASHES[at % 4]}


def _letter(axes: Sequence[Any], titles: Sequence[str]) -> None:
    for letter, (axis, title) in zip("abcdefgh", zip(axes, titles, strict=True), strict=False):
        axis.set_title(f"({letter}) {title}", loc="left", fontsize=9)


# ---------------------------------------------------------------- boundary


def draw_boundary(rows: Rows) -> Any:
    """Left, the dark room with increasing corruption of rewards; right, recommendation with increasing delay."""
    by_domain = {d: boundary_levels(rows, d, metrics_of(rows, d)[0].name) for d in ("darkroom", "movielens")}
    by_domain = {domain: levels for domain, levels in by_domain.items() if len(levels) > 1}
    if not by_domain:
        raise MissingError("uat reproduce boundary")
    figure = new_figure(4.2 * len(by_domain) + 1, 3.2)
    axes = figure.subplots(1, len(by_domain), squeeze=False)[0]
    for axis, (domain, levels) in zip(axes, by_domain.items(), strict=True):
        at = np.arange(len(levels))
        fading = np.array([label != "inverted" for label in levels])  # inverted rewards are fully informative
        for method in reversed(BOUNDARY):
            points = [numbers.get(method) for numbers in levels.values()]
            if not any(points):
                continue
            mean = np.array([np.nan if x is None else x.mean for x in points])
            std = np.array([0.0 if x is None or x.std is None else x.std for x in points])
            style = style_of(method)
            for part, label in ((fading, method), (~fading, None)):
                axis.plot(at[part], mean[part], label=label, markersize=5, **style)
            low, high = (mean - std)[fading], (mean + std)[fading]
            axis.fill_between(at[fading], low, high, color=style["color"], alpha=0.2, linewidth=0)
            axis.errorbar(
                at[~fading], mean[~fading], yerr=std[~fading], color=style["color"], capsize=3, linestyle="none"
            )
        ceiling = np.array([np.nan if (x := numbers[CEILING]) is None else x.mean for numbers in levels.values()])
        if np.isfinite(ceiling).any():
            style = {"color": "#000000", "linestyle": ":", "marker": "_", "markersize": 12}
            for part, label in ((fading, "Bayes filter"), (~fading, None)):
                axis.plot(at[part], ceiling[part], label=label, **style)
        for x, top, numbers in zip(at, ceiling, levels.values(), strict=True):
            means = [number.mean for method in (TWIN, BEST) if (number := numbers[method]) is not None]
            if len(means) == 2:
                text = signed(means[1] - means[0], 2 if abs(means[1] - means[0]) >= 0.1 else 3)
                above = top if 0 <= top - max(means) < 0.02 else max(means)  # avoid the filter's marker
                axis.annotate(text, (x, above), (0, 7), textcoords="offset points", ha="center", fontsize=7)
        axis.set_xticks(at, list(levels), rotation=35, ha="right")
        axis.set_ylabel(metrics_of(rows, domain)[0].label)
        axis.margins(y=0.15)
        axis.legend(loc="best", fontsize=8)
    _letter(axes, list(by_domain))
    return figure


SHOWN_CURVES = {"clean": "true rewards", "σ = 1": "reward noise σ = 1"}
"""Kinds of feedback with learning curves in the report, with their titles."""


def draw_curves(rows: Rows) -> Any:
    """Accuracy on validation episodes against updates in the dark room, with true and with noisy rewards."""
    sweeps = {sweep.label: sweep for sweep in boundary_sweeps("darkroom")}
    panels: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for label in SHOWN_CURVES:
        by_method = {method: sweep_curves(rows, sweeps[label], method) for method in BOUNDARY if is_shown(method)}
        if by_method := {method: curves for method, curves in by_method.items() if curves}:
            panels[label] = by_method
    if "σ = 1" not in panels:
        raise MissingError("uat reproduce boundary --domains darkroom")
    figure = new_figure(4.2 * len(panels) + 1, 3.2)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    metric = metrics_of(rows, "darkroom")[0]
    for axis, (label, by_method) in zip(axes, panels.items(), strict=True):
        for method in reversed(by_method):
            style = {**style_of(method), "marker": ""}
            for index, curve in enumerate(by_method[method]):
                name = method if index == 0 else None
                epochs, values = zip(*curve["points"], strict=True)
                axis.plot(epochs, values, linewidth=1, alpha=0.8, label=name, **style)
        ceiling = sweep_points(rows, sweeps[label], CEILING, metric.name)
        if ceiling is not None:
            axis.axhline(ceiling.mean, color="#000000", linestyle=":", label="Bayes filter, test episodes")
        axis.set_xlabel("updates")
        axis.set_ylabel(f"{metric.label}, validation")
        axis.legend(loc="best", fontsize=7)
    _letter(axes, [SHOWN_CURVES[label] for label in panels])
    return figure


def draw_binding(rows: Rows) -> Any:
    """Updates until 80 % of the way to the filter against the width of observations, for every way of binding."""
    lines = binding_lines(rows)
    if not lines:
        raise MissingError("uat reproduce binding")
    figure = new_figure(9.2, 3.4)
    axes = figure.subplots(1, len(GATES), sharey=True)
    most = max(reached.most for line in lines.values() for _, reached in line)
    for axis, gates in zip(axes, GATES, strict=True):
        for colour, tokens in zip(COLOURS, TOKENS, strict=False):
            line = lines.get(Way(tokens, gates), [])
            if not line:
                continue
            width = np.array([w for w, _ in line])
            median = np.array([np.median(r.updates) for _, r in line])
            there = np.isfinite(median)
            axis.plot(width[there], median[there], marker="o", color=colour, label=tokens)
            if not there.all():
                axis.plot(width[~there], np.full((~there).sum(), 1.3 * most), "x", color=colour)
        axis.set_yscale("log")
        axis.set_xticks(WIDTHS)
        axis.set_xlabel("width of the observation")
    axes[0].set_ylabel("updates to 80 % of the way")
    axes[-1].legend(title="tokens", fontsize=7, title_fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _letter(axes, [f"gates: {gates}" for gates in GATES])
    return figure


# ---------------------------------------------------------------- mechanism


def draw_terms(rows: Rows) -> Any:
    """Sizes of the terms of UAT's attention logits, one group of bars per layer."""
    trace = rows.trace("terms")
    if trace is None:
        raise MissingError("uat reproduce mechanism --domains darkroom")
    names = list(dict.fromkeys(row["term"] for row in trace.rows))
    layers = sorted({row["layer"] for row in trace.rows})
    figure = new_figure(5.2, 3.0)
    axis = figure.subplots()
    for index, (name, colour) in enumerate(zip(names, COLOURS, strict=False)):
        own = {row["layer"]: row for row in trace.rows if row["term"] == name}
        value = np.array([own[layer]["value"] for layer in layers])
        error = [value - [own[k]["low"] for k in layers], np.array([own[k]["high"] for k in layers]) - value]
        at = np.arange(len(layers)) + (index - len(names) / 2) * 0.16
        axis.bar(at, value, 0.15, yerr=np.maximum(error, 0), color=colour, label=name, capsize=2)
    axis.set_xticks(np.arange(len(layers)), [f"layer {layer}" for layer in layers])
    axis.set_ylabel("mean absolute value")
    axis.set_title(f"{trace.rows[0]['domain']}, {trace.rows[0]['task']}", fontsize=9)
    axis.legend(fontsize=7)
    return figure


def draw_attention(rows: Rows) -> Any:
    """Four maps of the last layer: Vanilla, UAT, UAT's base and modulation, and the difference of logits."""
    trace = rows.trace("attention")
    if trace is None:
        raise MissingError("uat reproduce mechanism --domains darkroom")
    maps = {name: x[-1].double().numpy() for name, x in trace.arrays.items() if name != "shifts"}
    lower = ~np.isnan(maps["told"])
    figure = new_figure(8.2, 7.2)
    axes = figure.subplots(2, 2).ravel()
    steps = np.arange(1, len(lower) + 1)[:, None]
    relative = {name: maps[name] * steps for name in ("blind", "told")}  # 1: uniform attention
    top = float(np.nanquantile(np.stack(list(relative.values())), 0.995))
    for axis, shown_map in zip(axes[:2], relative.values(), strict=True):
        shown = axis.imshow(shown_map, cmap="cividis", vmin=0, vmax=top)
        figure.colorbar(shown, ax=axis, shrink=0.8, label="attention × steps seen (1: even)")
    split = np.where(lower, _unit(maps["base"], lower), _unit(maps["modulation_size"], lower).T)
    shown = axes[2].imshow(split, cmap="cividis", vmin=0, vmax=1)
    figure.colorbar(shown, ax=axes[2], shrink=0.8, label="share of the largest")
    most = float(np.nanquantile(np.abs(maps["difference"]), 0.995))
    shown = axes[3].imshow(maps["difference"], cmap="PuOr_r", vmin=-most, vmax=most)
    figure.colorbar(shown, ax=axes[3], shrink=0.8, label="logit, UAT − Vanilla")
    for axis in axes:
        axis.grid(visible=False)
        axis.set_xlabel("attended step")
        axis.set_ylabel("deciding step")
        for shift in trace.arrays["shifts"].tolist():
            axis.axhline(shift - 0.5, color="#D55E00", linewidth=0.8, linestyle="--")
            axis.axvline(shift - 0.5, color="#D55E00", linewidth=0.8, linestyle="--")
    axes[2].set_xlabel("attended step (above the diagonal: deciding)")
    _letter(axes, ["Vanilla", "UAT", "UAT: base below, modulation above", "difference of logits"])
    return figure


def _unit(x_TT: np.ndarray, lower_TT: np.ndarray) -> np.ndarray:
    """Rescale to 0 for the smallest and 1 for (nearly) the largest value."""
    low, high = np.nanquantile(x_TT[lower_TT], [0.005, 0.995])
    return np.clip((x_TT - low) / max(high - low, 1e-12), 0, 1)


def draw_kinetics(rows: Rows) -> Any:
    """Accuracy around shifts, and its means before and after a shift."""
    kinetics = kinetics_of(rows)
    if not kinetics:
        raise MissingError("uat reproduce mechanism --domains sepsis")
    figure = new_figure(8.4, 3.2)
    axes = figure.subplots(1, 2, width_ratios=[3, 2])
    for method, curve in kinetics.items():
        style = style_of(method)
        axes[0].plot(curve.offset, curve.accuracy, label=method, markersize=3, **style)
        low, high = curve.accuracy - curve.sem, curve.accuracy + curve.sem
        axes[0].fill_between(curve.offset, low, high, color=style["color"], alpha=0.2, linewidth=0)
    axes[0].axvline(0, color="#555555", linewidth=0.8, linestyle="--")
    axes[0].set_xlabel("steps from the shift")
    axes[0].set_ylabel("accuracy")
    axes[0].legend(fontsize=8)
    at = np.arange(len(kinetics))
    for i, (name, hatch) in enumerate((("before", ""), ("after", "///"))):
        values = [getattr(curve, name) for curve in kinetics.values()]
        bars = axes[1].bar(at + (i - 0.5) * 0.38, values, 0.36, color=COLOURS[i], hatch=hatch, label=name)
        axes[1].bar_label(bars, fmt="%.2f", fontsize=7)
    axes[1].set_xticks(at, list(kinetics))
    axes[1].margins(y=0.2)
    axes[1].legend(fontsize=8, ncols=2)
    shifts = max(curve.shifts for curve in kinetics.values())
    _letter(axes, [f"accuracy around {shifts} shifts", "means over [−10, −1] and [+1, +15]"])
    return figure


OVER_TIME = {
    "uat/rho_norm": {"end": "UAT ‖ρ_T‖", "daily": "UAT ‖ρ_t‖, mean over windows"},
    "vanilla/h_norm": {"end": "Vanilla ‖h_T‖", "daily": "Vanilla ‖h_t‖, mean over windows"},
}
"""Curves over time: at the end of each window, and by day within windows, which starts one window earlier."""


def draw_gate(rows: Rows) -> Any:
    """The regime gate in a market: over time, by regime, by volatility, and relative to the calmest quartile."""
    trace = rows.trace("gate")
    if trace is None:
        raise MissingError("uat reproduce mechanism --domains markets --data hsi=FILE")
    markets = trace.rows[0]["markets"]
    figure = new_figure(9.2, 6.2)
    axes = figure.subplots(2, 2).ravel()
    market = markets.index("hk" if "hk" in markets else markets[0])
    for when, day, of in (("end", "day", "market"), ("daily", "daily/day", "daily/market")):
        own = trace.arrays[of].numpy() == market
        days = trace.arrays[day].numpy()[own].astype("datetime64[D]")
        for i, (quantity, label) in enumerate(OVER_TIME.items()):
            if f"{quantity}/{when}" in trace.arrays:
                x = trace.arrays[f"{quantity}/{when}"].numpy()[own]
                style = {"color": COLOURS[i], "label": label[when], "linestyle": "-" if when == "end" else ":"}
                axes[0].plot(days, x / (np.mean(x) or 1), linewidth=0.9, **style)
    axes[0].set_ylabel("share of its mean")
    axes[0].margins(y=0.25)
    axes[0].legend(fontsize=6.5, ncols=2, loc="upper center")
    axes[0].tick_params(axis="x", rotation=25)
    groups = gate_rows(rows, quantity="rho_norm", where="window")
    for axis, by, title in ((axes[1], "regime", "mean ‖ρ_t‖"), (axes[2], "volatility", "mean ‖ρ_t‖")):
        names, values = _gate_groups(groups, by, "value")
        low, high = (_gate_groups(groups, by, end)[1] for end in ("low", "high"))
        around = np.abs(np.stack([values - low, high - values]))
        axis.bar(names, values, yerr=np.nan_to_num(around), capsize=3, color=COLOURS[0], hatch="///", edgecolor="white")
        axis.set_ylabel(title)
        axis.margins(y=0.15)
    names, values = _gate_groups(groups, "regime", "over_calmest")
    bars = axes[3].bar(names, 100 * values, color=COLOURS[1], hatch="...", edgecolor="white")
    axes[3].bar_label(bars, fmt="%+.1f %%", fontsize=8)
    axes[3].axhline(0, color="#555555", linewidth=0.8)
    axes[3].set_ylabel("over the calmest quartile, %")
    axes[3].margins(y=0.2)
    _letter(axes, ["gate and representation over time", "by regime", "by volatility", "increase by regime"])
    return figure


def _gate_groups(rows: Sequence[dict[str, Any]], by: str, name: str) -> tuple[list[str], np.ndarray]:
    """Groups, and their values averaged over seeds."""
    groups = list(dict.fromkeys(row["group"] for row in rows if row["by"] == by and "value" in row))
    values = [np.mean([r[name] for r in rows if (r["by"], r["group"]) == (by, group)]) for group in groups]
    return groups, np.array(values, dtype=float)


# ---------------------------------------------------------------- sensitivity, diagnostics, efficiency


def draw_sensitivity(rows: Rows) -> Any:
    """Accuracy overall and after shifts by setting; a dotted line marks the default."""
    sweeps: dict[str, list[Sweep]] = {}
    for sweep in STUDIES["sensitivity"].sweeps:
        sweeps.setdefault(sweep.label, []).append(sweep)
    labels = {m.name: m.label for m in metrics_of(rows, "sepsis")}
    names = ["accuracy", "post_shift_accuracy"]
    by_label: dict[str, list[tuple[Sweep, list[Number]]]] = {}
    for label, own in sweeps.items():
        for sweep in own:
            numbers = [x for name in names if (x := sweep_points(rows, sweep, BEST, name)) is not None]
            by_label.setdefault(label, []).extend([(sweep, numbers)] if len(numbers) == len(names) else [])
    if not any(len(points) > 1 for points in by_label.values()):
        raise MissingError("uat reproduce sensitivity")
    figure = new_figure(8.2, 3.2)
    axes = figure.subplots(1, 2)
    for axis, (label, points) in zip(axes, by_label.items(), strict=True):
        x = np.array([next(iter(sweep.settings.values())) for sweep, _ in points], dtype=float)
        for i, name in enumerate(names):
            mean = np.array([numbers[i].mean for _, numbers in points])
            std = np.array([numbers[i].std or 0.0 for _, numbers in points])
            axis.plot(x, mean, DASHES[i], color=COLOURS[i], marker=MARKERS[i], markersize=4, label=labels[name])
            axis.fill_between(x, mean - std, mean + std, color=COLOURS[i], alpha=0.2, linewidth=0)
        for sweep, _ in points:
            if _is_default(rows, sweep):
                axis.axvline(next(iter(sweep.settings.values())), color="#555555", linewidth=0.8, linestyle=":")
        if label == "d_u":
            axis.set_xscale("log", base=2)
            axis.set_xticks(x, [f"{v:g}" for v in x])
        axis.set_xlabel({"λ": "decay λ", "d_u": "utility width"}.get(label, label))
        axis.set_ylabel("accuracy")
        axis.legend(fontsize=8)
    _letter(axes, ["memory of the regime state", "width of the utility"])
    return figure


def _is_default(rows: Rows, sweep: Sweep) -> bool:
    cells = sweep.cells(rows.preset, [0], Filter())
    return any(not cell.settings for cell in cells)


def draw_diagnostics(rows: Rows) -> Any:
    """One panel per domain, with bars in ascending order and standard deviations over seeds."""
    panels = {"darkroom": ["efficiency"], "markets": _starting(rows, "markets", "cagr_")}
    panels["sepsis"] = [m.name for m in metrics_of(rows, "sepsis") if m.partial]
    panels["movielens"] = ["hr@20", *_starting(rows, "movielens", "hr@10_")]
    bars = {domain: _bars(rows, domain, names) for domain, names in panels.items() if domain in DOMAINS}
    bars = {domain: by_label for domain in DOMAINS if (by_label := bars.get(domain))}
    if not bars:
        raise MissingError("uat reproduce diagnostics")
    figure = new_figure(8.6, 2.9 * len(bars))
    axes = figure.subplots(len(bars), 1, squeeze=False)[:, 0]
    for axis, by_label in zip(axes, bars.values(), strict=True):
        for i, (label, by_method) in enumerate(by_label.items()):
            at = np.arange(len(by_method)) + (i - (len(by_label) - 1) / 2) * 0.8 / len(by_label)
            means = [x.mean for x in by_method.values()]
            stds = [x.std or 0.0 for x in by_method.values()]
            width = 0.74 / len(by_label)
            axis.bar(at, means, width, yerr=stds, capsize=2, color=COLOURS[i % 7], hatch=HATCHES[i % 7], label=label)
            axis.set_xticks(np.arange(len(by_method)), list(by_method), rotation=20, ha="right")
        axis.legend(
            fontsize=7, ncols=min(5, len(by_label)), loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.1
        )
        axis.axhline(0, color="#555555", linewidth=0.8)
    _letter(axes, [f"{domain}" for domain in bars])
    return figure


def _starting(rows: Rows, domain: str, start: str) -> list[str]:
    if domain not in DOMAINS:
        return []
    return [metric.name for metric in metrics_of(rows, domain) if metric.name.startswith(start)]


def _bars(rows: Rows, domain: str, names: Sequence[str]) -> dict[str, dict[str, Number]]:
    """Label -> method -> number, with methods in ascending order of the first label. Each task has its own label."""
    labels = {metric.name: metric.label or metric.name for metric in metrics_of(rows, domain)}
    methods = [m for m in measured_methods(rows, domain, lambda m: not METHODS[m].ablation) if m in METHODS]
    by_label: dict[str, dict[str, Number]] = {}
    for name in names:
        for task in DOMAINS[domain].tasks:
            several = len(DOMAINS[domain].tasks) > 1
            label = f"{labels[name]}, {task}" if several else labels[name]
            setting = rows.usual_setting(domain)
            numbers = {m: rows.number((domain, task, setting, m, name)) for m in methods}
            by_label[label] = {m: x for m, x in numbers.items() if x is not None}
    by_label = {label: by_method for label, by_method in by_label.items() if by_method}
    if not by_label:
        return {}
    first = next(iter(by_label.values()))
    order = sorted(first, key=lambda m: first[m].mean)
    return {
        label: {m: own[m] for m in order if m in own} for label, own in by_label.items() if own.keys() >= set(order)
    }


def draw_efficiency(rows: Rows) -> Any:
    """Parameters, time and memory as bars, and published values as marks."""
    values = {(row["method"], row["metric"]): row["value"] for row in rows.timings}
    metrics = [metric for metric in LABELS if any(m == metric for _, m in values)]
    if not metrics:
        raise MissingError("uat reproduce efficiency")
    published_costs = rows.published_costs
    columns = min(3, len(metrics))
    lines = -(-len(metrics) // columns)
    figure = new_figure(3.0 * columns, 2.6 * lines)
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for axis, metric in zip(axes, metrics, strict=False):
        methods = [method for method in TIMED if (method, metric) in values]
        at = np.arange(len(methods))
        unit = 1e3 if metric == "parameters" else 1.0
        axis.barh(at, [values[m, metric] / unit for m in methods], color=COLOURS[0], label="ours")
        published = [
            (i, published_costs[m, metric] / unit) for i, m in enumerate(methods) if (m, metric) in published_costs
        ]
        if published:
            y, x = zip(*published, strict=True)
            axis.plot(x, y, "D", color=COLOURS[1], markersize=5, linestyle="none", label="published")
        axis.set_yticks(at, methods)
        axis.invert_yaxis()
        axis.set_xlabel("thousand parameters" if metric == "parameters" else LABELS[metric])
        axis.tick_params(axis="x", labelsize=7)
    axes[0].legend(fontsize=7, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderaxespad=0.1)
    for axis in axes[len(metrics) :]:
        axis.remove()
    _letter(axes[: len(metrics)], [""] * len(metrics))
    devices = ", ".join(dict.fromkeys(row["device"] for row in rows.timings))
    figure.supxlabel(f"batches of {rows.timings[0]['batch']} episodes on {devices}", fontsize=8)
    return figure


def draw_main(rows: Rows) -> Any:
    """The first metric of every method in every domain with intervals, and references as lines."""
    shown = [domain for domain in DOMAINS if any(m in METHODS for m in measured_methods(rows, domain, _is_main_method))]
    if not shown:
        raise MissingError("uat reproduce main")
    figure = new_figure(8.6, 2.7 * len(shown))
    axes = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
    for axis, domain in zip(axes, shown, strict=True):
        metric = headline_metrics(rows, domain)[0]
        methods = [m for m in measured_methods(rows, domain, _is_main_method) if m in METHODS]
        for i, task in enumerate(DOMAINS[domain].tasks):
            setting = rows.usual_setting(domain)
            numbers = [rows.number((domain, task, setting, m, metric.name)) for m in methods]
            at = np.arange(len(methods)) + (i - (len(DOMAINS[domain].tasks) - 1) / 2) * 0.2
            mean = [np.nan if x is None else x.mean for x in numbers]
            style = {"color": COLOURS[i], "marker": MARKERS[i], "linestyle": "none"}
            axis.errorbar(at, mean, yerr=reach(numbers), capsize=2, markersize=5, label=task, **style)
            published = [rows.published_number((domain, task, setting, m, metric.name)) for m in methods]
            axis.plot(
                at, [np.nan if x is None else x[0] for x in published], "_", color=COLOURS[i], markersize=9, alpha=0.6
            )
            for name in (CEILING, *recipe(domain, TWIN, rows.preset).build_domain().rivals):
                if line := rows.number((domain, task, setting, name, metric.name)):
                    axis.axhline(line.mean, color=COLOURS[i], linewidth=0.8, linestyle=DASHES[1 + i])
        axis.set_xticks(np.arange(len(methods)), methods, rotation=20, ha="right")
        axis.set_ylabel(metric.label)
        axis.legend(fontsize=7, loc="best")
    _letter(axes, shown)
    return figure


def reach(numbers: Sequence[Number | None]) -> list[list[float]]:
    """Lengths of error bars below and above: the 95 % interval, or else the standard deviation over seeds."""
    ends: list[tuple[float, float]] = []
    for x in numbers:
        if x is not None and x.low is not None and x.high is not None:
            ends.append((max(0.0, x.mean - x.low), max(0.0, x.high - x.mean)))
        else:
            ends.append((0.0, 0.0) if x is None or x.std is None else (x.std, x.std))
    return [[low for low, _ in ends], [high for _, high in ends]]


def _is_main_method(method: str) -> bool:
    return not METHODS[method].ablation


DRAWINGS: tuple[Drawing, ...] = (
    Drawing(
        name="main",
        title="Main results",
        caption="First metric of each domain. Points: our results with the 95 % interval over seeds and episodes (or "
        "the standard deviation over seeds, if values per episode were not kept). Short bars: published numbers. "
        "Lines: the Bayes filter, on markets the equal-weight portfolio, and on rule the Hebbian rule.",
        draw=draw_main,
    ),
    Drawing(
        name="boundary",
        title="Boundary analysis",
        caption="Methods trained with feedback that is noisy, absent, false or late. Bands: standard deviation over "
        "seeds; numbers: UAT − Vanilla. The filter receives the same feedback and knows how it is corrupted.",
        draw=draw_boundary,
    ),
    Drawing(
        name="curves",
        title="Learning under noise",
        caption="DarkRoom (gradual): accuracy on validation episodes during training, one line per seed.",
        draw=draw_curves,
    ),
    Drawing(
        name="binding",
        title="Binding feedback to observations",
        caption="Rule (fixed): updates until validation accuracy has gone 80 % of the way from chance to the Bayes "
        "filter, median over seeds. Crosses: the median training never got there.",
        draw=draw_binding,
    ),
    Drawing(
        name="attention",
        title="Attention under shifts of the goal",
        caption="Episodes of 150 steps with two shifts (dashed), on which no policy was trained. Last layer, mean over "
        "heads, episodes and seeds.",
        draw=draw_attention,
    ),
    Drawing(
        name="terms",
        title="Terms of the attention logits",
        caption="DarkRoom, UAT: size of each term of the logit, centred over the keys that a query sees, with 95 % "
        "intervals.",
        draw=draw_terms,
    ),
    Drawing(
        name="gate",
        title="Regime gate on the Hang Seng",
        caption="Norms of the regime gate over held-out windows. The regime is that of a window's last day, labelled "
        "with hindsight by the paper's rules. Error bars: 95 % intervals over blocks of days.",
        draw=draw_gate,
    ),
    Drawing(
        name="kinetics",
        title="Adaptation kinetics on sepsis",
        caption="Accuracy around shifts of the regime. Bands: standard error over shifts.",
        draw=draw_kinetics,
    ),
    Drawing(
        name="sensitivity",
        title="Sensitivity on sepsis",
        caption="One setting at a time. Bands: standard deviation over seeds; dotted line: the default.",
        draw=draw_sensitivity,
    ),
    Drawing(
        name="diagnostics",
        title="Further metrics",
        caption="Methods in ascending order of the first metric. Error bars: standard deviation over seeds.",
        draw=draw_diagnostics,
    ),
    Drawing(
        name="efficiency",
        title="Efficiency",
        caption="Bars: our measurements. Diamonds: published numbers, measured on another GPU.",
        draw=draw_efficiency,
    ),
)
