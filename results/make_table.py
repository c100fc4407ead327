"""Makes docs/results/DOMAIN.md from the committed rows, with the published numbers beside ours.

    python results/make_table.py darkroom

Ours is the mean over seeds ± their deviation; published numbers are from the paper's tables (published.jsonl), which
are means over three seeds of another implementation of the domain. What has no row yet is left out. Where make_rows.py
left intervals, a second table has them, with the differences from Vanilla and from the domain's rivals.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import uat
from uat.domains import DOMAINS
from uat.evaluation.intervals import LEVEL
from uat.methods import METHODS

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs" / "results"
REFERENCES = {
    "expert": "the expert, who sees what is hidden",
    "ceiling": "Bayes filter: the best that what is seen allows",
    "equal-weight": "the same weight for every asset, every day",
    "buy-and-hold": "the same money in every asset on the first day, and nothing traded since",
    "no-feedback": "the best without feedback",
    "random": "every action as likely as the next",
}
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("domain")
    parser.add_argument("--preset", default="paper")
    args = parser.parse_args()
    file = HERE / args.preset / f"{args.domain}.jsonl"
    if not file.exists():
        parser.error(f"{file} does not exist: make_rows.py makes it")
    text = page(args.domain, args.preset, read(file), read(HERE / "published.jsonl"))
    DOCS.mkdir(parents=True, exist_ok=True)
    (DOCS / f"{args.domain}.md").write_text(text)


def read(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def page(domain: str, preset: str, rows: list[Row], published: list[Row]) -> str:
    """One table for each metric: methods down, tasks across, ours beside the published number."""
    metrics = ordered(rows, "metric", [m.name for m in uat.recipe(domain, "uat").build_domain().metrics])
    tasks = ordered(rows, "task", DOMAINS[domain].tasks)
    parts = [
        f"# Results: {domain}",
        f"Made by `python results/make_table.py {domain}` from `results/{preset}/{domain}.jsonl`. Ours: mean ± "
        "deviation over seeds (how many stands in the last column). Published: the paper's tables, three seeds, "
        "another implementation of the domain.",
    ]
    whose = [in_our_words(row) for row in published if row["domain"] == domain]
    file = HERE / preset / "intervals" / f"{domain}.jsonl"
    sure = read(file) if file.exists() else []
    for metric in metrics:
        chosen = [row for row in rows if row["metric"] == metric]
        theirs = [row for row in whose if row["metric"] == metric]
        parts.append(f"## {metric.replace('_', ' ').capitalize()}\n\n" + table(chosen, theirs, tasks))
        if metric == metrics[0] or theirs:
            parts += [certainty([row for row in sure if (row["metric"], row["task"]) == (metric, t)]) for t in tasks]
    return "\n\n".join(part for part in parts if part) + "\n"


def in_our_words(row: Row) -> Row:
    """A published row; what is a task there and a part of a task here (a market) is part of our metric's name."""
    tasks = DOMAINS[row["domain"]].tasks
    if row["task"] in tasks:
        return row
    part = "" if row["task"] == row["domain"] else f"_{row['task']}"
    return {**row, "task": tasks[0], "metric": f"{row['metric']}{part}"}


def certainty(rows: list[Row]) -> str:
    """Intervals of one metric in one task, who differs from whom, and in plain words whether anybody does."""
    others = list(dict.fromkeys(d["other"] for row in rows for d in row["differences"]))
    if not others:
        return ""
    head = ["method", "95 % interval", *(x for other in others for x in (f"less *{other}*", "p"))]
    lines, clear = [head, ["---", *["---:"] * (len(head) - 1)]], []
    for method in ordered(rows, "method", [*METHODS, *REFERENCES]):
        row = next(row for row in rows if row["method"] == method)
        by = {d["other"]: d for d in row["differences"]}
        cells = [f"[{row['low']:.3f}, {row['high']:.3f}]"]
        for other in others:
            d = by.get(other)
            cells += [f"{d['value']:+.3f} [{d['low']:+.3f}, {d['high']:+.3f}]", f"{d['p']:.3f}"] if d else ["", ""]
            clear += [f"`{method}` and {other}"] if d and d["p"] < LEVEL else []
        lines.append([f"`{method}`" if method in METHODS else f"*{method}*", *cells])
    counted = sum(len(row["differences"]) for row in rows)
    said = (
        f"Of {counted} differences in {rows[0]['task']}, {len(clear)} are significant at 5 %: {', '.join(clear)}."
        if clear
        else f"None of the {counted} differences in {rows[0]['task']} is significant at 5 %."
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n\n" + said


def table(rows: list[Row], published: list[Row], tasks: list[str]) -> str:
    methods = ordered(rows, "method", [*METHODS, *REFERENCES])
    theirs = {(row["method"], row["task"]): row for row in published}
    head = ["method", *(x for task in tasks for x in ((task, "published") if theirs else (task,))), "seeds"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for method in methods:
        cells, seeds = [], 0
        for task in tasks:
            values = [row["value"] for row in rows if (row["method"], row["task"]) == (method, task)]
            seeds = max(seeds, len(values))
            cells.append(spread(values))
            if theirs:
                other = theirs.get((method, task))
                cells.append(f"{other['mean']:.3f} ± {other['std']:.2f}" if other else "")
        what = f"*{method}* ({REFERENCES[method]})" if method in REFERENCES else f"`{method}`"
        lines.append([what, *cells, "" if method in REFERENCES else str(seeds)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(values: list[float]) -> str:
    if not values:
        return "-"
    mean = f"{statistics.fmean(values):.3f}"
    return f"{mean} ± {statistics.stdev(values):.3f}" if len(values) > 1 else mean


def ordered(rows: list[Row], name: str, first: Iterable[str]) -> list[str]:
    """Values of a column: known ones in their order, then others as they come."""
    there = dict.fromkeys(row[name] for row in rows)
    return [value for value in dict.fromkeys([*first, *there]) if value in there]


if __name__ == "__main__":
    main()
