"""The folder of a study's results, the only source of a report.

  DOMAIN.jsonl             one row per run and metric (Score), and those of the references
  intervals/DOMAIN.jsonl   one row per method, setting and metric over all seeds, with its interval (Summary)
  pairs/DOMAIN.jsonl       paired comparisons of methods on the same episodes (Pair)
  curves/DOMAIN.jsonl      one row per run: its first metric on validation episodes during training
  traces/                  results of probes, PROBE.safetensors
  efficiency.jsonl         time and memory, by device
  flawed.json              runs of builds with a known flaw, whose rows do not name the build that trained them
  flawed/                  run folders of such builds that a study has set aside
  runs/                    run folders
  failures/                errors, by job
  progress/                progress of the workers

New rows replace older rows of the same measurement and leave all others, so that a study can be run in parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uat.files import FileError, check_name, read_json, read_rows, row_lines, write_atomically
from uat.numerics import flaw_of
from uat.rows import CURVES, EFFICIENCY, INTERVALS, PAIRS, SCORES, Columns, Row, check_row

SCORE_KEY = ("domain", "task", "setting", "method", "seed", "split", "metric")
SUMMARY_KEY = ("domain", "task", "setting", "preset", "method", "split", "metric")
PAIR_KEY = ("domain", "task", "setting", "metric", "method", "other")
CURVE_KEY = ("domain", "task", "setting", "method", "seed", "metric")
TIMING_KEY = ("method", "device", "metric")

FLAWED = "flawed.json"
"""File that lists flawed runs without a numerics revision: name of the flaw -> its description, and the runs."""

KINDS: dict[str, Columns] = {"scores": SCORES, "intervals": INTERVALS, "pairs": PAIRS, "curves": CURVES}
"""Kinds of rows with one file per domain, and their columns."""


@dataclass(frozen=True, slots=True)
class Results:
    """A folder of results."""

    path: Path
    runs_path: Path | None = None
    """Folder of the run folders, if it is not inside `path`."""

    @property
    def runs(self) -> Path:
        return self.runs_path or self.path / "runs"

    def file(self, kind: str, domain: str) -> Path:
        name = f"{check_name(domain, 'the domain')}.jsonl"
        return (self.path if kind == "scores" else self.path / kind) / name

    def add(self, kind: str, rows: Sequence[Mapping[str, Any]], key: Sequence[str]) -> None:
        """Merge rows into the files of their domains."""
        for row in rows:
            check_row(dict(row), KINDS[kind], f"a row for {self.path}")
        for domain in dict.fromkeys(row["domain"] for row in rows):
            own = [row for row in rows if row["domain"] == domain]
            merge(self.file(kind, domain), own, key, KINDS[kind])

    def read(self, kind: str) -> list[Row]:
        """All rows of a kind, from every domain."""
        folder = self.path if kind == "scores" else self.path / kind
        files = sorted(file for file in folder.glob("*.jsonl") if file.stem != "efficiency")
        return [row for file in files for row in read(file, KINDS[kind])]

    def flaws(self) -> dict[str, str]:
        """Run -> known flaw of the build that trained it, for the runs with rows in this folder."""
        listed, flaws = self.listed_flaws(), {}
        for row in self.read("scores"):
            if flaw := flaw_of_run(row["run"], row.get("numerics", ""), listed):
                flaws[row["run"]] = flaw
        return flaws

    def listed_flaws(self) -> dict[str, str]:
        """Run -> known flaw, for the runs in the folder's list."""
        file = self.path / FLAWED
        listed: dict[str, str] = {}
        for name, entry in (read_json(file) if file.exists() else {}).items():
            what, runs = (entry.get("what"), entry.get("runs")) if isinstance(entry, dict) else (None, None)
            if not isinstance(what, str) or not isinstance(runs, list) or not all(isinstance(r, str) for r in runs):
                raise FileError(f"{file}: {name!r:.60} must hold 'what' (text) and 'runs' (a list of identities)")
            listed |= dict.fromkeys(runs, what)
        return listed

    def timings(self) -> list[Row]:
        return read(self.path / "efficiency.jsonl", EFFICIENCY)


def flaw_of_run(run: str, numerics: str, listed: Mapping[str, str]) -> str | None:
    """The known flaw of the build that trained a run, from its numerics revision or else from the list; or None."""
    if not run:
        return None  # a reference is not trained
    return flaw_of(numerics) if numerics else listed.get(run)


def read(file: Path, columns: Columns) -> list[Row]:
    """Read the rows of a file and check their columns."""
    return [check_row(row, columns, f"{file}, row {number}") for number, row in enumerate(read_rows(file), 1)]


def merge(file: Path, rows: Iterable[Mapping[str, Any]], key: Sequence[str], columns: Columns) -> None:
    """Write rows to a file; a row replaces an older one with the same key, and all others stay."""
    by_key = {tuple(row[name] for name in key): dict(row) for row in [*read(file, columns), *rows]}
    write_atomically(file, row_lines(by_key[k] for k in sorted(by_key, key=str)).encode())
