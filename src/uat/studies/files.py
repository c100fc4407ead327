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

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uat.files import write_atomically

Row = dict[str, Any]

SCORE_KEY = ("domain", "task", "setting", "method", "seed", "split", "metric")
SUMMARY_KEY = ("domain", "task", "setting", "preset", "method", "split", "metric")
PAIR_KEY = ("domain", "task", "setting", "metric", "method", "other")
TIMING_KEY = ("method", "device", "metric")


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
        return (self.path if kind == "scores" else self.path / kind) / f"{domain}.jsonl"

    def add(self, kind: str, rows: Sequence[Mapping[str, Any]], key: Sequence[str]) -> None:
        """Put rows into the files of their domains."""
        for domain in dict.fromkeys(row["domain"] for row in rows):
            merge(self.file(kind, domain), [row for row in rows if row["domain"] == domain], key)

    def read(self, kind: str) -> list[Row]:
        """All rows of a kind, of every domain."""
        folder = self.path if kind == "scores" else self.path / kind
        files = sorted(file for file in folder.glob("*.jsonl") if file.stem != "efficiency")
        rows = [(file, row) for file in files for row in read(file)]
        if kind == "scores" and (wrong := next((file for file, row in rows if not row.keys() >= set(SCORE_KEY)), None)):
            raise ValueError(f"{wrong} holds rows without {', '.join(SCORE_KEY)}: {self.path} is no folder of results")
        return [row for _, row in rows]


def read(file: Path) -> list[Row]:
    if not file.exists():
        return []
    try:
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
    except ValueError as error:
        raise ValueError(f"{file} is not a file of rows: {error}") from None


def merge(file: Path, rows: Iterable[Mapping[str, Any]], key: Sequence[str]) -> None:
    """A row replaces the one it measures anew; all else stays."""
    found = {tuple(row[name] for name in key): dict(row) for row in [*read(file), *rows]}
    text = "".join(json.dumps(found[k]) + "\n" for k in sorted(found, key=str))
    write_atomically(file, text.encode())
