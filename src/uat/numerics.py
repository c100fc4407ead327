"""Revisions of the numbers that training makes on each kind of device.

The config names a run, and the revisions of its method and domain are part of that name. The config does not say which
build trained it, or where. So a checkpoint and its rows also hold a numerics revision, such as "cuda-2", which is
raised when a flaw in the numbers of a kind of device is mended. Reports mark rows of a flawed revision, and a study
trains exactly these again.

Checkpoints and rows without a revision are older than revisions. Of these, only the runs that a folder of results lists
in `flawed.json` count as flawed.
"""

from __future__ import annotations

REVISIONS = {"cpu": 1, "cuda": 2}
"""Kind of device -> revision of the numbers that training makes there now."""
FLAWS = {
    ("cuda", 1): "CUDA graphs of trainings side by side shared a workspace, which put noise into some gradients",
}
"""Revisions with a known flaw, and what it was."""


def current(device_type: str) -> str:
    """The revision of what this build trains on a kind of device: "cuda-2"."""
    return f"{device_type}-{REVISIONS.get(device_type, 1)}"


def joined(before: str | None, now: str) -> str | None:
    """The revisions of a training that goes on: all that had a part in it. None, for an unknown one, stays unknown."""
    return None if before is None else "+".join(sorted({*before.split("+"), now}))


def flaw_of(numerics: str) -> str | None:
    """The flaw of a revision, or of one of several; None if none is known."""
    parts = {tuple(part.rpartition("-")[::2]) for part in numerics.split("+")}
    return next((what for (kind, revision), what in FLAWS.items() if (kind, str(revision)) in parts), None)
