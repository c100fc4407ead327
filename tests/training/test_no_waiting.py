"""On a GPU the host launches epochs and validations, and waits only to read the numbers of an earlier validation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.small_runs import tiny
from uat.config import override
from uat.recipes import recipe
from uat.training import train
from uat.training.checkpoint import Checkpoint
from uat.training.epoch import Epoch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("without_tensorboard"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),  # torch says so once: a prototype
]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make every wait for the device an error from the third epoch, when all is captured, to the second and last
    checkpoint."""
    monkeypatch.setattr("uat.training.checkpoint.SAVE_SECONDS", 1e9)
    run, save = Epoch.run, Checkpoint.save

    def refusing(self: Epoch, index: int, epoch: int) -> Any:
        if epoch == 3:
            torch.cuda.set_sync_debug_mode("error")
        return run(self, index, epoch)

    def waiting(self: Checkpoint, progress: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        save(self, progress)

    monkeypatch.setattr(Epoch, "run", refusing)
    monkeypatch.setattr(Checkpoint, "save", waiting)
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("method", ["uat", "vanilla"])
@pytest.mark.parametrize("schedule", ["gradual", "abrupt", "cyclic"])
def test_darkroom(tmp_path: Path, method: str, schedule: str) -> None:
    run = train(tiny(method, domain__schedule=schedule, train__epochs=12), tmp_path / "run", device="cuda")
    assert len(run.rows("metrics.jsonl")) == 12


@pytest.mark.usefixtures("refused")
def test_sepsis(tmp_path: Path) -> None:
    changes = {"train.epochs": 12, "train.batch_size": 4, "train.validate_every": 2, "train.validation_episodes": 4}
    run = train(override(recipe("sepsis", "uat", "smoke"), changes), tmp_path / "run", device="cuda")
    assert len(run.rows("metrics.jsonl")) == 12
