"""Revisions of the numbers that training makes on each kind of device.

The config names a run, and the revisions of its method and domain are part of that name. The config does not say which
build trained it, or where. So a checkpoint and its rows also hold a numerics revision, such as "cuda-2", which is
raised when a flaw in the numbers of a kind of device is fixed. Reports mark rows of a flawed revision, and a study
trains exactly these again.

Checkpoints and rows without a revision were written before revisions existed. Among them, only the runs listed in the
`flawed.json` of a folder of results count as flawed.
"""

from __future__ import annotations

REVISIONS = {"cpu": 1, "cuda": 2}
"""Kind of device -> current revision of the numbers of a training on it."""
FLAWS = {
    ("cuda", 1): "CUDA graphs of trainings side by side shared a workspace, which put noise into some gradients",
}
"""Revision with a known flaw -> description of the flaw."""


def current(device_type: str) -> str:
    """Return the revision of this build's trainings on a kind of device: "cuda-2"."""
    return f"{device_type}-{REVISIONS.get(device_type, 1)}"


def joined(before: str | None, now: str) -> str | None:
    """Return the revisions of a resumed training, old and new: "cuda-1+cuda-2". An unknown one (None) stays unknown."""
    return None if before is None else "+".join(sorted({*before.split("+"), now}))


def flaw_of(numerics: str) -> str | None:
    """Return the flaw of a revision, or of the first flawed one of several; None if no flaw is known."""
    parts = {tuple(part.rpartition("-")[::2]) for part in numerics.split("+")}
    return next((what for (kind, revision), what in FLAWS.items() if (kind, str(revision)) in parts), None)
