"""Makes the rows of this folder: trains with the paper preset, scores, and appends one row per metric.

    python results/make_rows.py darkroom --tasks gradual abrupt cyclic --methods vanilla uat --seeds 0 1 2

Seeds train side by side. A method that trains as another (TENT, CoTTA) takes over that method's run. Runs that are
there already are continued, not repeated; a row is written once per run and metric. Intervals, and differences from
Vanilla and from the domain's rivals, need all runs at a time: those of one call stand in intervals/DOMAIN.jsonl beside
the rows. `make_table.py` makes tables of both.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uat
from uat.config import to_json
from uat.domains import DOMAINS
from uat.evaluation.comparison import compare
from uat.evaluation.scores import Evaluation
from uat.methods import METHODS, training_name
from uat.training.progress import Lines

HERE = Path(__file__).parent
KEY_OF_SCORE = ("domain", "task", "setting", "method", "seed", "split", "metric")
KEY_OF_SUMMARY = ("domain", "task", "setting", "method", "preset", "split", "metric")
"""What makes a row another one than the next."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("domain", choices=sorted(DOMAINS))
    parser.add_argument("--tasks", nargs="+", default=None, help="unset: all")
    parser.add_argument("--methods", nargs="+", default=None, help="unset: all that serve the domain")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--preset", default="paper")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="FIELD=VALUE", help="settings beside the preset's, as JSON"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/paper"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=None, help="file of rows; unset: results/PRESET/DOMAIN.jsonl")
    args = parser.parse_args()
    file = args.out or HERE / args.preset / f"{args.domain}.jsonl"
    for task in args.tasks or DOMAINS[args.domain].tasks:
        group = Group(
            args.domain, task, args.preset, args.seeds, dict(pair.split("=", 1) for pair in args.set), args.runs
        )
        found: list[Evaluation] = []
        for method in args.methods or [name for name in METHODS if METHODS[name].serves(args.domain)]:
            found += score(group, method, file, references=not found)
            summaries = [to_json(summary) for summary in compare(found)]
            write_rows(file.parent / "intervals" / file.name, summaries, KEY_OF_SUMMARY)


class Group:
    """The runs of one task: a folder for each method and seed."""

    def __init__(
        self, domain: str, task: str, preset: str, seeds: list[int], changes: dict[str, str], runs: Path
    ) -> None:
        self.domain, self.task, self.preset, self.seeds, self.runs = domain, task, preset, seeds, runs
        self.settings = {name: json.loads(value) for name, value in changes.items()}
        self.settings |= {field: task} if (field := DOMAINS[domain].task_field) else {}

    def config(self, method: str, seed: int) -> uat.RunConfig:
        return uat.override(uat.recipe(self.domain, method, self.preset, seed=seed), self.settings)

    def folder(self, method: str, seed: int) -> Path:
        return self.runs / f"{self.domain}-{self.task}-{method}-{seed}"

    def train(self, method: str) -> list[uat.Run]:
        """One run for each seed."""
        configs = [self.config(method, seed) for seed in self.seeds]
        folders = [self.folder(method, seed) for seed in self.seeds]
        if training_name(method) == method:
            return uat.train_together(configs, folders, resume=True, progress=Lines)
        sources = self.train(training_name(method))
        return [
            uat.train(config, folder, resume=folder.exists(), source=None if folder.exists() else source)
            for config, folder, source in zip(configs, folders, sources, strict=True)
        ]


def score(group: Group, method: str, file: Path, *, references: bool) -> list[Evaluation]:
    """The references belong to the task, and are scored once."""
    started = time.perf_counter()
    runs = group.train(method)
    trained = time.perf_counter()
    found = [uat.evaluate(run, references=references and index == 0) for index, run in enumerate(runs)]
    rows = [asdict(row) for one in found for row in one.scores]
    print(f"{group.task} {method}: {trained - started:.1f} s training, {time.perf_counter() - trained:.1f} s scoring")
    for row in rows:
        print(f"  {row['method']:14} {row['seed']} {row['metric']:16} {row['value']:.4f} (n {row['n']})", flush=True)
    write_rows(file, rows)
    return found


def write_rows(file: Path, rows: list[dict[str, Any]], names: tuple[str, ...] = KEY_OF_SCORE) -> None:
    """A row replaces the one it measures anew; all else stays."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in names)

    old = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    merged = {key(row): row for row in [*old, *rows]}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(merged[k]) + "\n" for k in sorted(merged, key=str)))


if __name__ == "__main__":
    main()
