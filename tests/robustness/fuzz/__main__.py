"""`python -m tests.robustness.fuzz`: run the campaign, print its table, and exit with 1 if an input found a fault."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.robustness.fuzz.campaign import Case, Family, Judged, cases, run
from tests.robustness.fuzz.commands import Commands
from tests.robustness.fuzz.data_files import DataFiles
from tests.robustness.fuzz.entrances import Entrances
from tests.robustness.fuzz.result_folders import ResultFolders
from tests.robustness.fuzz.run_folders import RunFolders
from uat.paper.report.writing import write_report

FAMILIES: tuple[type[Family], ...] = (Commands, RunFolders, ResultFolders, DataFiles, Entrances)


def prepared(names: Sequence[str], home: Path) -> list[Family]:
    """All families, with the material of their inputs."""
    found = [kind() for kind in FAMILIES if not names or kind.name in names]
    for family in found:
        folder = home / "made" / family.name
        folder.mkdir(parents=True)
        family.prepare(folder)
        if isinstance(family, ResultFolders):  # what drawing loads and caches is there from now on
            write_report(family.folder, folder / "report")
    return found


def table(judged: Sequence[Judged]) -> str:
    """Numbers of inputs per family and in total: tried, refused, accepted, broken."""
    count = Counter((name, one.verdict.kind) for one in judged for name in (one.case.family, "in total"))
    names = [*dict.fromkeys(one.case.family for one in judged), "in total"]
    seconds = {name: sum(one.seconds for one in judged if name in (one.case.family, "in total")) for name in names}
    lines = [f"{'family':16}{'tried':>8}{'refused':>9}{'taken':>8}{'broken':>8}{'seconds':>9}"]
    for name in names:
        kinds = [count[name, kind] for kind in ("refused", "taken", "broken")]
        lines.append(f"{name:16}{sum(kinds):>8}{kinds[0]:>9}{kinds[1]:>8}{kinds[2]:>8}{seconds[name]:>9.0f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.robustness.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000, help="how many in all")
    parser.add_argument("--seeds", type=int, default=5, help="among how many seeds they are shared out")
    parser.add_argument("--family", action="append", default=[], choices=[kind.name for kind in FAMILIES])
    parser.add_argument("--seed", type=int, help="with --number: this one input alone")
    parser.add_argument("--number", type=int)
    parser.add_argument("--slowest", type=int, default=0, help="list so many inputs that took longest")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    since = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder).resolve()
        os.environ["HOME"] = str(home)
        families = prepared(options.family, home)
        wanted = cases(families, options.inputs, options.seeds)
        if options.number is not None:
            wanted = [Case(family.name, options.seed or 0, options.number) for family in families]
        judged = []
        for one in run(families, wanted, home):
            judged.append(one)
            if one.verdict.kind == "broken" or options.number is not None:
                print(f"{one.verdict.kind}: {one.case}\n  {one.what[:500]}\n  {one.verdict.said}", flush=True)
            if len(judged) % 500 == 0:
                print(f"{len(judged)} of {len(wanted)}, {time.monotonic() - since:.0f} s", file=sys.stderr, flush=True)
    for one in sorted(judged, key=lambda one: -one.seconds)[: options.slowest]:
        print(f"{one.seconds:.1f} s: {one.case}: {one.what[:200]}")
    print(table(judged))
    print(f"{time.monotonic() - since:.0f} s")
    return int(any(one.verdict.kind == "broken" for one in judged))


if __name__ == "__main__":
    sys.exit(main())
