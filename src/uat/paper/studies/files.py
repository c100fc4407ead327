"""The folder of a study's results, from which everything in a report is made.

  DOMAIN.jsonl             one row per run and metric (Score), and those of the references
  intervals/DOMAIN.jsonl   one row per method, setting and metric over all seeds, with its interval (Summary)
  pairs/DOMAIN.jsonl       methods against each other on the same episodes (Pair)
  traces/                  what probes saw, PROBE.safetensors
  efficiency.jsonl         time and memory, by device
  runs/                    run folders; failures/ what went wrong, by job; progress/ where workers stand

Rows replace older ones that measure the same thing; all else stays, so that grids add up over days and machines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uat.files import check_name, read_rows, row_lines, write_atomically
from uat.rows import EFFICIENCY, INTERVALS, PAIRS, SCORES, Columns, Row, check_row

SCORE_KEY = ("domain", "task", "setting", "method", "seed", "split", "metric")
SUMMARY_KEY = ("domain", "task", "setting", "preset", "method", "split", "metric")
PAIR_KEY = ("domain", "task", "setting", "metric", "method", "other")
TIMING_KEY = ("method", "device", "metric")

KINDS: dict[str, Columns] = {"scores": SCORES, "intervals": INTERVALS, "pairs": PAIRS}
"""Kinds of rows that have a file for each domain, and their columns."""


@dataclass(frozen=True, slots=True)
class Results:
    """A folder of results."""

    path: Path
    runs_path: Path | None = None
    """Where the run folders are, if not inside."""

    @property
    def runs(self) -> Path:
        return self.runs_path or self.path / "runs"

    def file(self, kind: str, domain: str) -> Path:
        name = f"{check_name(domain, 'the domain')}.jsonl"
        return (self.path if kind == "scores" else self.path / kind) / name

    def add(self, kind: str, rows: Sequence[Mapping[str, Any]], key: Sequence[str]) -> None:
        """Put rows into the files of their domains."""
        for row in rows:
            check_row(dict(row), KINDS[kind], f"a row for {self.path}")
        for domain in dict.fromkeys(row["domain"] for row in rows):
            own = [row for row in rows if row["domain"] == domain]
            merge(self.file(kind, domain), own, key, KINDS[kind])

    def read(self, kind: str) -> list[Row]:
        """All rows of a kind, of every domain."""
        folder = self.path if kind == "scores" else self.path / kind
        files = sorted(file for file in folder.glob("*.jsonl") if file.stem != "efficiency")
        return [row for file in files for row in read(file, KINDS[kind])]

    def timings(self) -> list[Row]:
        return read(self.path / "efficiency.jsonl", EFFICIENCY)


def read(file: Path, columns: Columns) -> list[Row]:
    """The rows of a file, if all of them have these columns."""
    return [check_row(row, columns, f"{file}, row {number}") for number, row in enumerate(read_rows(file), 1)]


def merge(file: Path, rows: Iterable[Mapping[str, Any]], key: Sequence[str], columns: Columns) -> None:
    """A row replaces the one it measures anew; all else stays."""
    found = {tuple(row[name] for name in key): dict(row) for row in [*read(file, columns), *rows]}
    write_atomically(file, row_lines(found[k] for k in sorted(found, key=str)).encode())
