"""Makes the rows of this folder: trains with the paper preset, scores, and appends one row per metric.

    python results/make_rows.py darkroom --tasks gradual abrupt cyclic --methods vanilla uat --seeds 0 --runs runs/paper

Runs that are there already are continued, not repeated; a row is written once per run and metric.
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
from uat.training.progress import Lines

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("domain", choices=sorted(DOMAINS))
    parser.add_argument("--tasks", nargs="+", default=None)
    parser.add_argument("--methods", nargs="+", default=["vanilla", "uat"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--preset", default="paper")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="FIELD=VALUE", help="settings beside the preset's, as JSON"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/paper"))
    parser.add_argument("--out", type=Path, default=None, help="file of rows; unset: results/PRESET/DOMAIN.jsonl")
    args = parser.parse_args()
    file = args.out or HERE / args.preset / f"{args.domain}.jsonl"
    changes = dict(pair.split("=", 1) for pair in args.set)
    task_field = DOMAINS[args.domain].task_field
    for task in args.tasks or DOMAINS[args.domain].tasks:
        for method in args.methods:
            for seed in args.seeds:
                config = uat.recipe(args.domain, method, args.preset, seed=seed)
                settings = {name: json.loads(value) for name, value in changes.items()}
                settings |= {task_field: task} if task_field else {}
                score(uat.override(config, settings), args.runs / f"{args.domain}-{task}-{method}-{seed}", file)


def score(config: uat.RunConfig, folder: Path, file: Path) -> None:
    started = time.perf_counter()
    run = uat.train(config, folder, resume=folder.exists(), progress=Lines)
    trained = time.perf_counter() - started
    found = uat.evaluate(run)
    print(
        f"{folder.name}: {trained:.1f} s training, {time.perf_counter() - started - trained:.1f} s scoring", flush=True
    )
    for row in found.scores:
        print(f"  {row.method:8} {row.metric:16} {row.value:.4f} (n {row.n})", flush=True)
    write_rows(file, [asdict(row) for row in found.scores])


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
