"""Patients, synthetic or the user's own: 46 clinical columns each, and their principal components.

Means, deviations and components are fitted on the training patients.

Axes: P patients, F clinical columns, O principal components.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from uat.archives import read_arrays
from uat.domains.sepsis.copula import draw_cohort, summary
from uat.domains.sepsis.marginals import Array
from uat.files import FileError
from uat.noise import derive, uniform

NUM_TRAIN, NUM_TEST = 20_000, 5_000
NUM_COMPONENTS = 20
KEY = "sepsis_starting_states"
LEAST_PATIENTS = 100
DYNAMIC = ("sofa", "LACTATE", "MeanBP")
"""Columns that treatment changes, in the order of the physiological state; all others stay constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cohort:
    """Standardised patients, training patients first."""

    columns: tuple[str, ...]
    clinical_PF: Tensor
    """z-scores."""
    num_train: int
    components_FO: Tensor
    """Orthonormal directions by falling explained variance."""
    explained: float
    """Share of the training patients' variance that the components explain."""

    @property
    def dynamic(self) -> list[int]:
        """Indices of the columns that treatment changes."""
        return [self.columns.index(name) for name in DYNAMIC]


def prepare(path: str | None) -> Cohort:
    """Return the cohort of a file, or the embedded one; computed once per process."""
    return _prepare(path, None if path is None or not Path(path).exists() else Path(path).stat().st_mtime_ns)


@cache
def _prepare(path: str | None, changed: int | None) -> Cohort:
    if path is None:
        return standardise(draw_cohort(NUM_TRAIN + NUM_TEST, derive(0, "sepsis", "cohort")), NUM_TRAIN)
    table = load(path)
    order = uniform(0, "sepsis.split", torch.arange(len(table)), 1)[:, 0].argsort().numpy()
    order = order[: NUM_TRAIN + NUM_TEST]
    return standardise(table[order], len(order) * NUM_TRAIN // (NUM_TRAIN + NUM_TEST))


def standardise(table: Array, num_train: int) -> Cohort:
    """Standardise by the training patients, and compute the eigenvectors of their covariance."""
    train = table[:num_train]
    z_PF = (table - train.mean(0)) / train.std(0)
    values, vectors = np.linalg.eigh(np.cov(z_PF[:num_train].T))
    components_FO = vectors[:, ::-1][:, :NUM_COMPONENTS]
    largest = np.abs(components_FO).argmax(0)
    components_FO = components_FO * np.sign(components_FO[largest, range(NUM_COMPONENTS)])  # eigh leaves signs open
    return Cohort(
        columns=summary().columns,
        clinical_PF=torch.from_numpy(z_PF).float(),
        num_train=num_train,
        components_FO=torch.from_numpy(components_FO.copy()).float(),
        explained=float(values[::-1][:NUM_COMPONENTS].sum() / values.sum()),
    )


def load(path: str) -> Array:
    """(P, 46) clinical columns of a user's gym-sepsis starting states; any other file raises a FileError."""
    columns = summary().columns
    expected = f"expected gym-sepsis' sepsis_starting_states.npz with the key {KEY!r}"
    try:
        arrays = read_arrays(Path(path))
    except FileError as error:
        raise FileError(f"cohort={path!r}: {error}; {expected}") from None
    if KEY not in arrays:
        names = ", ".join(map(repr, arrays)) or "none"
        raise FileError(f"cohort={path!r} has no key {KEY!r} but {names:.200}; {expected}")
    return _checked(arrays[KEY], path, columns)


def _checked(table: np.ndarray, path: str, columns: tuple[str, ...]) -> Array:
    width = len(columns) + 1
    if table.ndim != 2 or table.shape[1] != width:
        raise FileError(
            f"cohort={path!r}: {KEY} has the shape {table.shape}, expected (patients, {width}): "
            f"{len(columns)} clinical columns from {columns[0]} to {columns[-1]}, then the action"
        )
    if table.dtype.kind not in "iuf":
        raise FileError(f"cohort={path!r}: {KEY} holds {table.dtype}, expected numbers")
    if len(table) < LEAST_PATIENTS:
        raise FileError(f"cohort={path!r} has {len(table)} patients, expected at least {LEAST_PATIENTS}")
    clinical = table[:, :-1].astype(np.float64)
    if (wrong := ~np.isfinite(clinical)).any():
        row, column = np.argwhere(wrong)[0]
        what = f"{clinical[row, column]} in row {row}, column {columns[column]}"
        raise FileError(f"cohort={path!r} has {what}; expected finite numbers: {wrong.sum()} are not")
    for name, mean, std in zip(columns, clinical.mean(0), clinical.std(0), strict=True):
        if abs(mean) > 1 or not 1e-3 < std < 3:
            raise FileError(
                f"cohort={path!r}: column {name} has mean {mean:.3g} and deviation {std:.3g}, "
                "expected z-scores as gym-sepsis stores them (mean near 0, deviation near 1)"
            )
    return clinical
