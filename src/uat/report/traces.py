"""What probes saw, over seeds: the numbers behind the figures on mechanism."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from uat.report.rows import Rows
from uat.studies.cells import SEEDS, Cell
from uat.studies.grids import STUDIES
from uat.studies.probes import Trace

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


def cells_with(rows: Rows, probe: str) -> dict[str, list[tuple[Cell, Trace]]]:
    """Method -> its cells that a probe has looked at."""
    found: dict[str, list[tuple[Cell, Trace]]] = {}
    seeds = sorted({row["seed"] for row in rows.scores} | set(SEEDS[rows.preset]))
    for cell in STUDIES["mechanism"].cells(rows.preset, seeds):
        if probe in cell.probes and (seen := rows.trace(cell, probe)) is not None:
            found.setdefault(cell.config.method_name, []).append((cell, seen))
    return found


def kinetics_of(rows: Rows) -> dict[str, Around]:
    found = {}
    for method, cells in cells_with(rows, "kinetics").items():
        accuracy, sem = (np.stack([seen.arrays[name].numpy() for _, seen in cells]) for name in ("accuracy", "sem"))
        first = cells[0][1]
        found[method] = Around(
            offset=first.arrays["offset"].numpy(),
            accuracy=accuracy.mean(0),
            sem=np.sqrt((sem**2).sum(0)) / len(cells),
            before=float(np.mean([seen.numbers["before"] for _, seen in cells])),
            after=float(np.mean([seen.numbers["after"] for _, seen in cells])),
            shifts=max(first.numbers["shifts"]),
            seeds=len(cells),
        )
    return found
