"""Train recommenders on next-item prediction of ML-1M with published settings (docs/next_item.md).

First, on a machine with polars, make the table of sequences from a folder of MovieLens files:

    PYTHONPATH=src python results/next_item.py --prepare FOLDER --data ml1m_next.npz

Then train on any machine with torch:

    PYTHONPATH=src python results/next_item.py --data ml1m_next.npz --method sasrec --device cuda --out rows.jsonl
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from uat.paper.next_item import NextItemConfig, Outcome, Sequences, learn
from uat.paper.studies.files import SCORE_KEY, merge
from uat.rows import SCORES
from uat.training.surroundings import pick_device

SHARED = {"d_model": 64, "num_layers": 2, "dropout": 0.1}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sasrec": ({**SHARED, "num_heads": 1, "d_ff": 64}, {"epochs": 100, "patience": 10}),
    "bert4rec": ({**SHARED, "num_heads": 2, "d_ff": 256, "last_share": 0.0}, {"epochs": 200, "patience": 20}),
}
"""Settings of Klenitskiy and Vasilev (2023): those of the method, and those of its training."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the table of sequences, .npz")
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="make the table from these MovieLens files")
    parser.add_argument("--dataset", default="ml-1m", help="name of the data set in the rows")
    parser.add_argument("--method", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--device", default=None, help="cpu or cuda; by default CUDA if available")
    parser.add_argument("--precision", choices=("fp32", "tf32", "bf16"), default="tf32")
    parser.add_argument("--epochs", type=int, default=None, help="limit of passes; by default the published one")
    parser.add_argument("--out", type=Path, default=None, help="file of rows, JSON lines")
    args = parser.parse_args()
    if args.prepare is not None:
        prepare(args.prepare, args.data)
        return
    sequences = Sequences.load(args.data)
    print(f"{sequences.num_users} users, {sequences.num_items} items, {len(sequences.item_N)} interactions", flush=True)
    for method in args.method:
        for seed in args.seeds:
            score(method, seed, sequences, args)


def prepare(folder: Path, file: Path) -> None:
    from uat.data.movielens.sources import read

    ratings = read(folder)
    sequences = Sequences.of(ratings.user_N, ratings.item_N, ratings.time_N)
    sequences.save(file)
    print(f"{file}: {sequences.num_users} users, {sequences.num_items} items, {len(sequences.item_N)} interactions")


def score(method: str, seed: int, sequences: Sequences, args: argparse.Namespace) -> None:
    settings, training = SETTINGS[method]
    chosen = {**training, **({} if args.epochs is None else {"epochs": args.epochs})}
    config = NextItemConfig(**chosen, precision=args.precision, seed=seed)
    for progress in learn(method, settings, sequences, config, pick_device(args.device)):
        if isinstance(progress, Outcome):
            rows = [asdict(row) for row in progress.rows(method, args.dataset, seed, sequences.num_users)]
            for row in rows:
                print(f"  {method} {seed} {row['split']:10} {row['metric']:10} {row['value']:.4f}", flush=True)
            if args.out is not None:
                merge(args.out, rows, SCORE_KEY, SCORES)
        else:
            print(f"{method} {seed} {progress}", flush=True)


if __name__ == "__main__":
    main()
