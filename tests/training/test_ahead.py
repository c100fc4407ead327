"""A host that does not wait for validations: it launches the next epochs before reading the numbers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import uat.training.checkpoint
from tests.training.small_runs import Crash, broken_at, crash_at, judged, numbers, tiny
from uat.config import RunConfig
from uat.engines import Engine
from uat.engines.graph import copy_to_host
from uat.methods import Phase
from uat.methods.uat import UAT
from uat.runs import Run
from uat.tensor_files import read_tensors
from uat.training import train
from uat.training.epoch import Epoch

pytestmark = pytest.mark.usefixtures("without_tensorboard")


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run ahead as on a GPU, with no checkpoint between the first and the last."""
    monkeypatch.setattr("uat.training.checkpoint.SAVE_SECONDS", 1e9)
    monkeypatch.setattr(Engine, "runs_ahead", True)


@pytest.mark.usefixtures("ahead")
def test_numbers_of_a_validation_are_read_after_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    run = Epoch.run

    def playing(self: Epoch, index: int, epoch: int) -> Any:
        happened.append(f"epoch {epoch}")
        return run(self, index, epoch)

    def sending(_: Engine, rows: list[dict[str, Any]]) -> Callable[[], list[dict[str, Any]]]:
        read, last = copy_to_host(rows), rows[-1]["epoch"]

        def reading() -> list[dict[str, Any]]:
            happened.append(f"read {last}")
            return read()

        return reading

    monkeypatch.setattr(Epoch, "run", playing)
    monkeypatch.setattr(Engine, "copy_to_host", sending)
    train(tiny(train__epochs=8, train__validate_every=2), tmp_path, device="cpu")
    assert happened == [
        *("epoch 1", "epoch 2", "read 2"),  # the first checkpoint
        *("epoch 3", "epoch 4", "epoch 5", "epoch 6", "read 4"),
        *("epoch 7", "epoch 8", "read 6", "read 8"),
    ]  # fmt: skip


def both_ways(config: RunConfig, values: tuple[float, ...], folder: Path, request: pytest.FixtureRequest) -> list[Run]:
    """Return two runs of a training with these validation results: one waits for them, one runs ahead."""
    runs = []
    for name in ("waiting", "ahead"):
        if name == "ahead":
            request.getfixturevalue("ahead")
        with pytest.MonkeyPatch.context() as patch:
            judged(patch, *values)
            runs.append(train(config, folder / name, device="cpu"))
    return runs


@pytest.mark.parametrize("values", [(0.1, 0.3, 0.2, 0.3, 0.29, 0.1, 0.9), (0.3, 0.1, 0.2, 0.4, 0.1, 0.2, 0.5)])
@pytest.mark.parametrize("patience", [2, 4, 100])
def test_all_is_as_if_it_had_waited(
    values: tuple[float, ...], patience: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    config = tiny(train__epochs=7, train__validate_every=1, train__patience=patience)
    plain, run = both_ways(config, values, tmp_path, request)
    assert numbers(run.path) == numbers(plain.path)
    assert [row["epoch"] for row in run.rows("timing.jsonl")] == [row["epoch"] for row in plain.rows("timing.jsonl")]


def test_the_first_validations_of_a_later_phase_are_all_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """No weights are the best before the first validation, and patience may end with the second."""
    monkeypatch.setattr(UAT, "phases", lambda self: (Phase("first", self.loss), Phase("second", self.loss)))
    config, values = tiny(train__epochs=6, train__validate_every=2, train__patience=2), (0.3, 0.2, 0.1, 0.4, 0.3, 0.2)
    plain, run = both_ways(config, values, tmp_path, request)
    assert [row["epoch"] for row in run.rows("metrics.jsonl")] == list(range(1, 11))  # two validations, then three
    assert numbers(run.path) == numbers(plain.path)


@pytest.mark.parametrize("event", range(4, 16, 2))
def test_a_crash_changes_no_number(event: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    config = tiny(train__epochs=8, train__validate_every=2)
    plain = train(config, tmp_path / "plain", device="cpu")
    request.getfixturevalue("ahead")
    with pytest.MonkeyPatch.context() as patch:
        crash_at(event, patch)
        with pytest.raises(Crash):
            train(config, tmp_path / "run", device="cpu")
    run = train(config, tmp_path / "run", resume=True, device="cpu")
    assert numbers(run.path) == numbers(plain.path)


@pytest.mark.usefixtures("ahead")
def test_a_checkpoint_that_is_due_waits_for_all_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint holds the weights of the epoch that it names, so a resumed run repeats the rest."""
    config = tiny(train__epochs=8, train__validate_every=2)
    plain = train(config, tmp_path / "plain", device="cpu")
    due = iter([True, True, False, True, True, False])  # asked after a validation, and again on saving
    saved: list[int] = []
    write = uat.training.checkpoint.write_tensors

    def saving(file: Path, tensors: Any, meta: Any) -> None:
        write(file, tensors, meta)
        saved.append(meta["total"])
        if meta["total"] == 6:
            shutil.copytree(tmp_path / "run", tmp_path / "killed")

    monkeypatch.setattr(uat.training.checkpoint.Checkpoint, "due", property(lambda _: next(due)))
    monkeypatch.setattr(uat.training.checkpoint, "write_tensors", saving)
    run = train(config, tmp_path / "run", device="cpu")
    assert saved == [2, 6, 8]
    assert [row["epoch"] for row in Run.open(tmp_path / "killed").rows("metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    monkeypatch.undo()
    resumed = train(config, tmp_path / "killed", resume=True, device="cpu")
    assert numbers(resumed.path) == numbers(run.path) == numbers(plain.path)


@pytest.mark.usefixtures("ahead")
def test_a_loss_that_is_not_finite_stops_the_run_a_validation_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = broken_at(monkeypatch, epoch=3)
    with pytest.raises(ValueError, match="loss is not finite at epoch 3"):
        train(tiny(train__epochs=8), tmp_path, device="cpu")
    assert len(begun) == 6
    assert [row["epoch"] for row in Run.open(tmp_path).rows("metrics.jsonl")] == [1, 2]
    assert read_tensors(tmp_path / "state/train.safetensors")[1]["total"] == 2
