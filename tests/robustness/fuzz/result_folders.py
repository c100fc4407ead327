"""Fuzz damaged folders of results: read, report, merge with new rows, and resume."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.robustness.fuzz.hostile import damage_file
from tests.robustness.fuzz.verdict import Input, ask, ask_command
from uat.paper.report import writing
from uat.paper.report.figures import DRAWINGS
from uat.paper.report.rows import Rows
from uat.paper.studies.files import PAIR_KEY, SCORE_KEY, SUMMARY_KEY, Results
from uat.paper.studies.grids import STUDIES
from uat.paper.studies.probes import read_trace

COMMITTED = Path(__file__).parents[3] / "results" / "paper"
MOST = 30
"""Number of rows kept of each file: enough for every table, and fast to read."""


class ResultFolders:
    name, share = "result folders", 0.13

    def prepare(self, folder: Path) -> None:
        self.folder = folder / "paper"
        for kind in ("intervals", "pairs", "traces"):
            (self.folder / kind).mkdir(parents=True)
        for file in [*COMMITTED.glob("*.jsonl"), *COMMITTED.glob("[ip]*/*.jsonl")]:
            lines = file.read_text().splitlines()
            kept = lines[:: max(1, len(lines) // MOST)][:MOST]
            (self.folder / file.relative_to(COMMITTED)).write_text("\n".join(kept) + "\n")
        shutil.copy(COMMITTED / "traces" / "kinetics.safetensors", self.folder / "traces")

    def draw(self, random: Random, folder: Path) -> Input:
        results, done = folder / "paper", []
        shutil.copytree(self.folder, results)
        for _ in range(random.choice([1, 1, 2])):
            files = sorted(file for file in results.rglob("*") if file.is_file())
            done.append(damage_file(random.choice(files), random))
        name = random.choices(list(ASKED), [weight for weight, _ in ASKED.values()])[0]
        return Input(f"{name} with {', '.join(done)}", lambda: ASKED[name][1](results))


def read_all(results: Path) -> None:
    found = Results(results)
    for kind in ("scores", "intervals", "pairs"):
        found.read(kind)
    found.timings()
    for probe in ("attention", "gate", "kinetics"):
        read_trace(results, probe)


def tables(results: Path) -> None:
    """All tables and numbers of a report, without its figures."""
    rows = Rows.of(results, "paper")
    for study in STUDIES:
        for table in writing.tables_of(rows, study):
            assert table.markdown()
            assert table.csv()
            assert table.latex()
    writing.numbers(rows)


def figure(results: Path) -> None:
    """Draw one figure, chosen by the folder's rows."""
    rows = Rows.of(results, "paper")
    drawing = DRAWINGS[len(rows.scores) % len(DRAWINGS)]
    figure = drawing.draw(rows)
    figure.savefig(io.BytesIO(), format="svg")
    figure.clear()


def merge(results: Path) -> None:
    """Merge new rows into the existing ones."""
    first = {kind: _first_row(COMMITTED / file) for kind, file in FILES.items()}
    for kind, key in (("scores", SCORE_KEY), ("intervals", SUMMARY_KEY), ("pairs", PAIR_KEY)):
        Results(results).add(kind, [first[kind]], key)


FILES = {"scores": "darkroom.jsonl", "intervals": "intervals/darkroom.jsonl", "pairs": "pairs/darkroom.jsonl"}


def _first_row(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text().splitlines()[0])


def reproduce(results: Path) -> list[str]:
    """Resume a study whose filters select no cell, so that only existing results are read and nothing is trained."""
    return ["reproduce", "main", "--preset", "smoke", "--domains", "darkroom", "--out", str(results), "--dry-run"]


ASKED: dict[str, tuple[float, Callable[[Path], Any]]] = {
    "read": (4, lambda results: ask(lambda: read_all(results), (str(results),))),
    "tables": (4, lambda results: ask(lambda: tables(results), (str(results),))),
    "merge": (2, lambda results: ask(lambda: merge(results), (str(results),))),
    "figures": (0.8, lambda results: ask(lambda: figure(results), (str(results), "uat reproduce"))),
    "uat report": (0.06, lambda results: ask_command(["report", str(results)])),
    "uat reproduce": (1, lambda results: ask_command(reproduce(results))),
}
