"""Makes the rows of this folder: trains with the paper preset, scores, and appends one row per metric.

    python results/make_rows.py darkroom --tasks gradual abrupt cyclic --methods vanilla uat --seeds 0 1 2

Seeds train side by side. A method that trains as another (TENT, CoTTA) takes over that method's run. Runs that are
there already are continued, not repeated; a row is written once per run and metric. `make_table.py` makes tables of
the rows.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uat
from uat.domains import DOMAINS
from uat.methods import METHODS, training_name
from uat.training.progress import Lines

HERE = Path(__file__).parent


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
        for index, method in enumerate(args.methods or [name for name in METHODS if METHODS[name].serves(args.domain)]):
            score(group, method, file, references=index == 0)


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


def score(group: Group, method: str, file: Path, *, references: bool) -> None:
    """The references belong to the task, and are scored once."""
    started = time.perf_counter()
    runs = group.train(method)
    trained = time.perf_counter()
    rows = []
    for index, run in enumerate(runs):
        rows += [asdict(row) for row in uat.evaluate(run, references=references and index == 0).scores]
    print(f"{group.task} {method}: {trained - started:.1f} s training, {time.perf_counter() - trained:.1f} s scoring")
    for row in rows:
        print(f"  {row['method']:14} {row['seed']} {row['metric']:16} {row['value']:.4f} (n {row['n']})", flush=True)
    write_rows(file, rows)


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    """A row replaces the one it measures anew; all else stays."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("domain", "task", "setting", "method", "seed", "split", "metric"))

    old = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    merged = {key(row): row for row in [*old, *rows]}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(merged[k]) + "\n" for k in sorted(merged, key=str)))


if __name__ == "__main__":
    main()
