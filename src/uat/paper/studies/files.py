"""The folder of a study's results, the only source of a report.

  DOMAIN.jsonl             one row per run and metric (Score), and those of the references
  intervals/DOMAIN.jsonl   one row per method, setting and metric over all seeds, with its interval (Summary)
  pairs/DOMAIN.jsonl       paired comparisons of methods on the same episodes (Pair)
  traces/                  results of probes, PROBE.safetensors
  efficiency.jsonl         time and memory, by device
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

from uat.files import check_name, read_rows, row_lines, write_atomically
from uat.rows import EFFICIENCY, INTERVALS, PAIRS, SCORES, Columns, Row, check_row

SCORE_KEY = ("domain", "task", "setting", "method", "seed", "split", "metric")
SUMMARY_KEY = ("domain", "task", "setting", "preset", "method", "split", "metric")
PAIR_KEY = ("domain", "task", "setting", "metric", "method", "other")
TIMING_KEY = ("method", "device", "metric")

KINDS: dict[str, Columns] = {"scores": SCORES, "intervals": INTERVALS, "pairs": PAIRS}
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

    def timings(self) -> list[Row]:
        return read(self.path / "efficiency.jsonl", EFFICIENCY)


def read(file: Path, columns: Columns) -> list[Row]:
    """Read the rows of a file and check their columns."""
    return [check_row(row, columns, f"{file}, row {number}") for number, row in enumerate(read_rows(file), 1)]


def merge(file: Path, rows: Iterable[Mapping[str, Any]], key: Sequence[str], columns: Columns) -> None:
    """Write rows to a file; a row replaces an older one with the same key, and all others stay."""
    by_key = {tuple(row[name] for name in key): dict(row) for row in [*read(file, columns), *rows]}
    write_atomically(file, row_lines(by_key[k] for k in sorted(by_key, key=str)).encode())
