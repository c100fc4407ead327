"""The regime diagnostic: trains UAT and Vanilla, and sorts what they carry inside by regime and volatility of the day.

    python results/make_regimes.py hsi --set 'domain.data="hsi.npz"' 'domain.test_from="2020-01-01"' --seeds 0 1 2
    python results/make_regimes.py generator

Rows go to results/PRESET/regimes/NAME.jsonl, arrays for a figure to NAME.npz beside them (METHOD-SEED/ARRAY). Runs that
are there already are continued, not repeated.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

import uat
from uat.evaluation.regimes import diagnose
from uat.training.progress import Lines

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="what the rows are called")
    parser.add_argument("--methods", nargs="+", default=["uat", "vanilla"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--preset", default="paper")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="FIELD=VALUE", help="settings beside the preset's, as JSON"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/regimes"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=None, help="file of rows")
    args = parser.parse_args()
    settings = {name: json.loads(value) for name, value in (pair.split("=", 1) for pair in args.set)}
    rows, arrays = [], {}
    for method in args.methods:
        configs = [uat.override(uat.recipe("markets", method, args.preset, seed=seed), settings) for seed in args.seeds]
        folders = [args.runs / f"{args.name}-{method}-{seed}" for seed in args.seeds]
        for run in uat.train_together(configs, folders, resume=True, progress=Lines):
            found = diagnose(run)
            rows += found.rows
            arrays |= {f"{method}-{run.config.seed}/{name}": array for name, array in found.arrays.items()}
    file = args.out or HERE / args.preset / "regimes" / f"{args.name}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    np.savez_compressed(file.with_suffix(".npz"), **arrays)
    for row in rows:
        told = f"auc {row['auc']:.3f}" if "auc" in row else f"{row['mean']:.4f} ± {row['std']:.4f}"
        what = f"{row['method']:8} {row['seed']} {row['quantity']:4} {row['where']:7} {row['by']:9} {row['group']:19}"
        print(f"{what} {told} (n {row['n']})")


if __name__ == "__main__":
    main()
