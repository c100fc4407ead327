"""Traces of probes, prepared for figures and tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from uat.methods import METHODS
from uat.paper.report.rows import Rows, ordered

RECOVERED = 0.9
"""Share of the accuracy before a shift that counts as recovered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftKinetics:
    """Accuracy around shifts of regime, mean over seeds."""

    offset: np.ndarray
    accuracy: np.ndarray
    sem: np.ndarray
    """Standard error over shifts of the mean over seeds."""
    before: float
    after: float
    shifts: int
    seeds: int

    @property
    def steps_to_recover(self) -> int | None:
        later = (self.offset >= 0) & (self.accuracy >= RECOVERED * self.before)
        return int(self.offset[later][0]) if later.any() else None


def kinetics_of(rows: Rows) -> dict[str, ShiftKinetics]:
    """Kinetics of each method; empty without a trace."""
    trace, kinetics = rows.trace("kinetics"), {}
    if trace is None:
        return {}
    for method in ordered((row["method"] for row in trace.rows), METHODS):
        own = [row for row in trace.rows if row["method"] == method]
        offset, accuracy, sem = (trace.arrays[f"{method}/{name}"].numpy() for name in ("offset", "accuracy", "sem"))
        kinetics[method] = ShiftKinetics(
            offset=offset[0],
            accuracy=accuracy.mean(0),
            sem=np.sqrt((sem**2).sum(0)) / len(sem),
            before=float(np.mean([row["before"] for row in own])),
            after=float(np.mean([row["after"] for row in own])),
            shifts=max(row["shifts"] for row in own),
            seeds=len(own),
        )
    return kinetics


def gate_rows(rows: Rows, **wanted: str) -> list[dict[str, Any]]:
    """Rows of the probe of gates with these values; empty without a trace."""
    trace = rows.trace("gate")
    return [] if trace is None else [row for row in trace.rows if wanted.items() <= row.items()]
