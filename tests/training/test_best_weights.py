"""A validation that is NaN is worse than any number, and weights that are not finite are neither saved nor loaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import uat
from tests.builders import SPECS, build_random
from tests.training.small_runs import Crash, crash_at, judged, last_weights, numbers, same, saved_weights, tiny
from uat.engines.update import UpdateRunner
from uat.evaluation import evaluate
from uat.metrics import Metric
from uat.runs import Run, load_policy
from uat.tensor_files import RunError, read_tensors, write_tensors
from uat.training import train
from uat.training.checkpoint import STATE, DivergedError, read_state
from uat.training.progress import Progress

NAN = math.nan
pytestmark = pytest.mark.usefixtures("without_tensorboard")


class Notes(Progress):
    """Progress that records its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def update(self, epoch: int, note: str = "") -> None:
        self.notes.append(note)


@pytest.mark.parametrize("higher", [True, False])
def test_no_number_is_worse_than_any_number(higher: bool) -> None:
    metric = Metric(name="m", higher_is_better=higher)
    for number in (-math.inf, -1.0, 0.0, 1.0, math.inf):
        assert metric.better(number, than=NAN)
        assert not metric.better(NAN, than=number)
    assert not metric.better(NAN, than=NAN)


@pytest.mark.parametrize(
    ("values", "best"), [((NAN, 0.1, 0.3, 0.2), 3), ((NAN, 0.1, NAN, NAN), 2), ((0.2, NAN, 0.1, 0.1), 1)]
)
def test_the_best_weights_are_those_of_the_best_number(
    values: tuple[float, ...], best: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Notes()
    judged(monkeypatch, *values)
    run = train(tiny(train__validate_every=1), tmp_path / "run", device="cpu", progress=lambda label, total: notes)
    judged(monkeypatch, *values)
    short = train(tiny(train__validate_every=1, train__epochs=best), tmp_path / "short", device="cpu")
    assert same(saved_weights(run), last_weights(short))
    for value, note in zip(values, notes.notes, strict=True):
        assert ("accuracy undefined, worse than any number (best " in note) == math.isnan(value)
    assert notes.notes[-1].endswith(f"(best {values[best - 1]:.3f})")


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_training_stopped_before_the_first_number_resumes_to_the_same_files(
    epochs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN survives saving and loading the state file."""
    config, values = tiny(train__validate_every=1), (NAN, NAN, 0.1, 0.2)
    judged(monkeypatch, *values)
    whole = train(config, tmp_path / "whole", device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr("uat.training.checkpoint.SAVE_SECONDS", 0)
        judged(patch, *values)
        crash_at(4 + 4 * epochs, patch)  # four writes when a run begins, and four for each epoch
        with pytest.raises(Crash):
            train(config, tmp_path / "stopped", device="cpu")
    progress = read_state(Run.open(tmp_path / "stopped")).progress
    assert (progress.epoch, progress.best_epoch) == (epochs, 1)
    assert progress.best_value is not None
    assert math.isnan(progress.best_value)
    judged(monkeypatch, *values[epochs:])
    assert numbers(train(config, tmp_path / "stopped", resume=True, device="cpu").path) == numbers(whole.path)


# ---------------------------------------------------------------- weights that are no numbers


def test_weights_that_diverge_in_the_last_step_end_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of an epoch belongs to the weights before its step, so it stays finite."""
    plain = UpdateRunner.plain

    def diverging(self: UpdateRunner, *told: Any) -> Any:
        found = plain(self, *told)
        if found_at(self) == 4:
            cast(Any, self.engine.policy.head).linear.bias.data[1] = NAN
        return found

    count: list[int] = []

    def found_at(updates: UpdateRunner) -> int:
        count.append(1)
        return len(count)

    monkeypatch.setattr(UpdateRunner, "plain", diverging)
    monkeypatch.setattr("uat.training.checkpoint.SAVE_SECONDS", 0)
    with pytest.raises(
        DivergedError, match=r"weight head\.linear\.bias holds nan after epoch 4; .*train\.lr="
    ) as caught:
        train(tiny(), tmp_path, device="cpu")
    assert str(tmp_path) in str(caught.value)
    assert all(weight.isfinite().all() for weight in load_policy(tmp_path).state_dict().values())
    assert read_state(Run.open(tmp_path)).progress.total == 2  # the checkpoint before is whole


def broken(file: Path, *names: str, value: float = NAN) -> None:
    """Write a non-finite value into these tensors of a file, with a matching checksum."""
    tensors, meta = read_tensors(file)
    for name in names:
        tensors[name].view(-1)[-1] = value
    write_tensors(file, tensors, {name: said for name, said in meta.items() if name != "format"})


def with_policy_of_nan(run: Run) -> Callable[[], object]:
    broken(run.file("policy.safetensors"), "head.linear.weight")
    return lambda: load_policy(run.path)


def scored_with_infinity(run: Run) -> Callable[[], object]:
    broken(run.file("policy.safetensors"), "head.linear.weight", value=-math.inf)
    return lambda: evaluate(run, episodes=2, device="cpu")


def resumed_with_nan(run: Run) -> Callable[[], object]:
    broken(run.file(STATE), "policy.head.linear.weight")
    return lambda: train(run.config, run.path, resume=True, device="cpu")


def resumed_with_best_of_nan(run: Run) -> Callable[[], object]:
    broken(run.file(STATE), "best.head.linear.weight")
    return lambda: train(run.config, run.path, resume=True, device="cpu")


@pytest.mark.parametrize("use", [with_policy_of_nan, scored_with_infinity, resumed_with_nan, resumed_with_best_of_nan])
def test_weights_that_are_no_numbers_are_refused_by_name(
    use: Callable[[Run], Callable[[], object]], tmp_path: Path
) -> None:
    call = use(train(tiny(), tmp_path, device="cpu"))
    with pytest.raises(RunError, match=r"safetensors: the weight (\w+\.)?head\.linear\.weight holds (nan|-inf)"):
        call()


def test_a_policy_of_nan_is_not_saved(tmp_path: Path) -> None:
    policy, file = build_random("uat", SPECS["vector-discrete"], dtype=torch.float32), tmp_path / "policy.safetensors"
    with torch.no_grad():
        policy.head.get_parameter("linear.bias")[0] = NAN
    with pytest.raises(
        ValueError, match=r"policy\.safetensors was not written: the weight head\.linear\.bias holds nan"
    ):
        uat.save(file, policy, "uat")
    assert not file.exists()
