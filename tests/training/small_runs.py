"""Runs that take a second, access to their files, and injected events: fixed validation results, a crash before any
one write, a loss that is NaN."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import uat.files
import uat.runs
import uat.tensor_files
import uat.training.checkpoint
from uat.config import RunConfig, override
from uat.episode import Batch, Losses
from uat.methods.uat import UAT
from uat.recipes import recipe
from uat.runs import Run
from uat.tensor_files import read_tensors
from uat.training.trainer import Trainer

TINY: dict[str, Any] = {
    "domain.horizon": 5,
    "method.d_model": 8,
    "method.num_layers": 1,
    "method.d_ff": 8,
    "train.epochs": 4,
    "train.batch_size": 4,
    "train.validate_every": 2,
    "train.validation_episodes": 4,
}
NUMBERS = ("metrics.jsonl", "policy.safetensors", "state/train.safetensors")


def tiny(method: str = "uat", **changes: Any) -> RunConfig:
    """A small run; `train__lr=1.0` sets train.lr."""
    return override(
        recipe("darkroom", method, "smoke"), {**TINY, **{name.replace("__", "."): v for name, v in changes.items()}}
    )


def numbers(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in NUMBERS}


def everything(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def saved_weights(run: Run) -> dict[str, Tensor]:
    return read_tensors(run.file("policy.safetensors"))[0]


def last_weights(run: Run) -> dict[str, Tensor]:
    """Return the weights after the last epoch, best or not."""
    tensors, _ = read_tensors(run.file("state/train.safetensors"))
    return {name.removeprefix("policy."): t for name, t in tensors.items() if name.startswith("policy.")}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Crash(BaseException):
    """A simulated kill. No code catches it, so the next line never runs."""


def crash_at(event: int, patch: pytest.MonkeyPatch) -> None:
    """Crash instead of the event-th write to disk, counted from 0."""
    count = itertools.count()

    def guarded(write: Any) -> Any:
        def instead(*args: Any) -> None:
            if next(count) == event:
                raise Crash
            write(*args)

        return instead

    write = guarded(uat.files.write_atomically)
    for module in (uat.runs, uat.tensor_files):
        patch.setattr(module, "write_atomically", write)
    patch.setattr(Run, "append", guarded(Run.append))


def judged(patch: pytest.MonkeyPatch, *values: float) -> None:
    """Let validations return these accuracies in turn."""
    turn = iter(values)
    patch.setattr(Trainer, "validate", lambda _: {"accuracy": next(turn)})


def broken_at(patch: pytest.MonkeyPatch, epoch: int) -> list[int]:
    """Make UAT's loss NaN at this epoch; return a list that gets one entry for each epoch that starts."""
    begun: list[int] = []
    loss = UAT.loss

    def broken(self: UAT, batch: Batch) -> Losses:
        begun.append(len(begun) + 1)
        total, count = loss(self, batch)["imitation"]
        return {"imitation": (total * (float("nan") if begun[-1] == epoch else 1.0), count)}

    patch.setattr(UAT, "loss", broken)
    return begun
