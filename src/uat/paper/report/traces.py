"""What probes saw, as figures and tables need it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from uat.methods import METHODS
from uat.paper.report.rows import Rows, ordered

RECOVERED = 0.9
"""Share of the accuracy before a shift that counts as recovered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """Accuracy around shifts of regime, mean over seeds."""

    offset: np.ndarray
    accuracy: np.ndarray
    sem: np.ndarray
    """Over shifts, of the mean over seeds."""
    before: float
    after: float
    shifts: int
    seeds: int

    @property
    def steps_to_recover(self) -> int | None:
        later = (self.offset >= 0) & (self.accuracy >= RECOVERED * self.before)
        return int(self.offset[later][0]) if later.any() else None


def kinetics_of(rows: Rows) -> dict[str, Around]:
    """By method; empty where nobody has looked."""
    seen, found = rows.trace("kinetics"), {}
    if seen is None:
        return {}
    for method in ordered((row["method"] for row in seen.rows), METHODS):
        own = [row for row in seen.rows if row["method"] == method]
        offset, accuracy, sem = (seen.arrays[f"{method}/{name}"].numpy() for name in ("offset", "accuracy", "sem"))
        found[method] = Around(
            offset=offset[0],
            accuracy=accuracy.mean(0),
            sem=np.sqrt((sem**2).sum(0)) / len(sem),
            before=float(np.mean([row["before"] for row in own])),
            after=float(np.mean([row["after"] for row in own])),
            shifts=max(row["shifts"] for row in own),
            seeds=len(own),
        )
    return found


def gate_rows(rows: Rows, **wanted: str) -> list[dict[str, Any]]:
    """Rows on what policies carry inside in markets that have these values; empty where nobody has looked."""
    seen = rows.trace("gate")
    return [] if seen is None else [row for row in seen.rows if wanted.items() <= row.items()]
