"""Makes the rows of this folder: trains with the paper preset, scores, and keeps one row per metric.

    python results/make_rows.py darkroom --tasks gradual abrupt cyclic --methods vanilla uat --seeds 0 1 2

One domain, any methods and settings; `python -m uat.studies` runs the paper's studies, and does the work of both. Runs
that are there already are continued, not repeated.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from uat.domains import DOMAINS
from uat.evaluation.tables import columns
from uat.methods import METHODS
from uat.studies.cells import Filter, Sweep, jobs
from uat.studies.executors import InProcess
from uat.studies.files import SCORE_KEY, Results, merge, read
from uat.studies.grids import among
from uat.studies.options import settings_of
from uat.studies.reproduce import Summing, conclude, measured, references, run

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
    parser.add_argument("--runs", type=Path, default=None, help="folder of the runs; unset: OUT/runs")
    parser.add_argument("--out", type=Path, default=None, help="folder, or file of rows; unset: results/PRESET")
    args = parser.parse_args()
    folder: Path = args.out or HERE / args.preset
    results = Results(folder.with_suffix(""), args.runs)
    sweep = Sweep(domain=args.domain, methods=among(*(args.methods or METHODS)), settings=settings_of(args.set))
    chosen = Filter(tasks=tuple(args.tasks or ()))
    cells = sweep.cells(args.preset, args.seeds, chosen)
    summing = Summing()
    run([*references(cells, measured(results)), *jobs(cells, seeds_together=True)], InProcess(), results, summing)
    conclude(results)
    rows = read(results.file("scores", args.domain))
    if folder.suffix == ".jsonl":
        merge(folder, rows, SCORE_KEY)
    print(
        columns(
            [{name: row[name] for name in ("task", "setting", "method", "seed", "metric", "value")} for row in rows]
        )
    )
    if summing.failed:
        parser.exit(1, "".join(f"failed: {name}: {why}\n" for name, why in summing.failed.items()))


if __name__ == "__main__":
    main()
