"""Training: determinism, best weights, stopping, and no files or graphs left behind."""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import uat.runs
import uat.training.checkpoint
from tests.training.small_runs import (
    Crash,
    broken_at,
    crash_at,
    judged,
    last_weights,
    numbers,
    same,
    saved_weights,
    tiny,
)
from uat.config import RunConfig, override
from uat.domains import split_seed
from uat.domains.darkroom import DarkRoom
from uat.engines.graph import copy_to_host
from uat.engines.rollout import RolloutRunner, play_all
from uat.episode import Batch, Losses, Step
from uat.methods import METHODS, Method, Phase, Policy
from uat.methods.uat import UAT
from uat.metrics import Metric
from uat.nn.heads import build_head
from uat.recipes import recipe
from uat.runs import Run, load_policy
from uat.spec import Spec
from uat.tensor_files import read_tensors
from uat.training import train
from uat.training.trainer import Trainer
from uat.training.validation import Criterion

pytestmark = pytest.mark.usefixtures("save_always")  # so that a kill can come after any checkpoint


# ---------------------------------------------------------------- what decides the numbers


@pytest.mark.usefixtures("without_tensorboard")
def test_the_seed_decides_and_nothing_else(tmp_path: Path) -> None:
    first = train(tiny(), tmp_path / "first", device="cpu")
    torch.manual_seed(123)
    again = train(tiny(), tmp_path / "again", device="cpu")
    other = train(tiny(seed=1), tmp_path / "other", device="cpu")
    assert numbers(again.path) == numbers(first.path)
    assert first.file("metrics.jsonl").read_bytes() != other.file("metrics.jsonl").read_bytes()
    assert not same(last_weights(first), last_weights(other))


@pytest.fixture
def own_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def surroundings() -> list[Any]:
    tf32, generator = torch.backends.cuda.matmul.allow_tf32, np.random.get_state()  # noqa: NPY002 (the caller's)
    switches = (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), tf32)
    return [torch.get_rng_state().tolist(), random.getstate(), str(generator), switches]


@pytest.mark.usefixtures("without_tensorboard", "own_tf32")
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp64"])
def test_the_callers_surroundings_are_left_as_they_were(precision: str, tmp_path: Path) -> None:
    for tf32 in (True, False):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        before = surroundings()
        train(tiny(train__precision=precision), tmp_path / f"{precision}-{tf32}", device="cpu")
        assert surroundings() == before


@pytest.mark.usefixtures("without_tensorboard", "own_tf32")
def test_surroundings_come_back_also_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise Crash

    monkeypatch.setattr(UAT, "loss", fail)
    torch.backends.cuda.matmul.allow_tf32 = False
    before = surroundings()
    with pytest.raises(Crash):
        train(tiny(train__precision="tf32"), tmp_path, device="cpu")
    assert surroundings() == before


@pytest.mark.usefixtures("without_tensorboard")
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("fp64", torch.float64)])
def test_precision_is_that_of_the_weights(precision: str, dtype: torch.dtype, tmp_path: Path) -> None:
    run = train(tiny(train__precision=precision), tmp_path, device="cpu")
    assert {tensor.dtype for tensor in saved_weights(run).values()} == {dtype}


def test_cuda_without_cuda_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device 'cuda' was asked for, but .* none; use device 'cpu'"):
        train(tiny(), tmp_path / "run", device="cuda")
    with pytest.raises(ValueError, match="'warp'"):
        train(tiny(), tmp_path / "run", device="warp")
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- the best checkpoint, and when to stop


def test_numbers_are_fetched_from_the_device_in_one_copy_of_each_type() -> None:
    third, loss = torch.tensor(1 / 3, dtype=torch.float64), torch.tensor([0.1])
    rows = [
        {"epoch": 1, "phase": "all", "loss": loss},
        {"epoch": 2, "loss": loss + 1, "validation": third, "ok": loss > 0},
    ]

    def waits(_: Tensor) -> float:
        raise AssertionError("one by one each number waits for the device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "item", waits)
        found = copy_to_host(rows)()
    assert found == [
        {"epoch": 1, "phase": "all", "loss": loss.item()},
        {"epoch": 2, "loss": (loss + 1).item(), "validation": 1 / 3, "ok": True},
    ]
    assert isinstance(rows[0]["loss"], Tensor)


@pytest.mark.usefixtures("without_tensorboard")
def test_patience_stops_and_the_best_epoch_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(train__epochs=50, train__validate_every=1, train__patience=3)
    judged(monkeypatch, 0.1, 0.3, 0.2, 0.3, 0.29, 0.9)
    run = train(config, tmp_path / "run", device="cpu")
    rows = run.rows("metrics.jsonl")
    assert [row["validation/accuracy"] for row in rows] == [0.1, 0.3, 0.2, 0.3, 0.29]
    best = max(rows, key=lambda row: row["validation/accuracy"])
    assert best["epoch"] == 2  # the first of equals
    judged(monkeypatch, 0.1, 0.3)
    short = train(override(config, {"train.epochs": best["epoch"]}), tmp_path / "short", device="cpu")
    assert same(saved_weights(run), last_weights(short))
    assert not same(saved_weights(run), last_weights(run))


@pytest.mark.usefixtures("without_tensorboard")
def test_patience_counts_epochs_not_validations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged(monkeypatch, *[0.5] * 9)
    run = train(tiny(train__epochs=50, train__validate_every=4, train__patience=8), tmp_path, device="cpu")
    assert run.rows("metrics.jsonl")[-1]["epoch"] == 12  # the best is 4, and 4 + 8 have passed


@pytest.mark.usefixtures("without_tensorboard")
def test_patience_does_not_end_a_training_on_its_plateau(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best of 0.2 does not exceed the plateau of 0.25; 0.3 does, and patience ends three epochs after it."""
    values = (0.2, *[0.1] * 5, 0.3, *[0.2] * 9)
    ends = []
    for plateau in (None, 0.25):
        judged(monkeypatch, *values)
        monkeypatch.setattr(Trainer, "plateau", lambda _, level=plateau: level)
        config = tiny(train__epochs=12, train__validate_every=1, train__patience=3)
        ends.append(len(train(config, tmp_path / str(plateau), device="cpu").rows("metrics.jsonl")))
    assert ends == [4, 10]


def trainer_of(domain: str, method: str, folder: Path, **settings: Any) -> Trainer:
    config = override(recipe(domain, method, "smoke"), {name.replace("__", "."): v for name, v in settings.items()})
    return Trainer(Run.create(config, folder), torch.device("cpu"))


def test_the_plateau_is_the_reference_without_feedback_and_holds_for_those_that_see_rewards(tmp_path: Path) -> None:
    uat, vanilla = (trainer_of("movielens", method, tmp_path / method) for method in ("uat", "vanilla"))
    level, reference = uat.plateau(), uat.domain.references()["no-feedback"]
    runner = RolloutRunner(reference, uat.validation.simulator, device=torch.device("cpu"), sampled=False)
    hits = play_all(runner, 15, split_seed("validation", 0), uat.domain.measure)["hr@10"]
    assert level == pytest.approx(1.05 * hits.mean().item())
    assert uat.domain.episode_count("validation", 1) == 15
    assert vanilla.plateau() is None
    assert trainer_of("movielens", "uat-no-reward", tmp_path / "blind").plateau() is None
    corrupted = trainer_of("movielens", "uat", tmp_path / "corrupted", feedback__reward="inverted")
    assert corrupted.plateau() == level
    assert trainer_of("darkroom", "uat", tmp_path / "room").plateau() is None
    uat.domain.plateau = "no-feedbak"
    with pytest.raises(ValueError, match="did you mean 'no-feedback'"):
        uat.plateau()


@pytest.mark.parametrize(("higher", "sides"), [(True, [False, False, True]), (False, [True, False, False])])
def test_a_plateau_is_left_on_the_better_side(higher: bool, sides: list[bool]) -> None:
    criterion = Criterion(dict, Metric(name="x", higher_is_better=higher), 0.5)
    assert [criterion.left_plateau(best) for best in (0.4, 0.5, 0.6)] == sides
    assert Criterion(dict, Metric(name="x")).left_plateau(-1.0)


@pytest.mark.usefixtures("without_tensorboard")
def test_the_metric_says_which_way_is_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DarkRoom, "metrics", (Metric(name="accuracy", higher_is_better=False),))
    judged(monkeypatch, 0.1, 0.3)
    run = train(tiny(train__epochs=2, train__validate_every=1), tmp_path, device="cpu")
    assert not same(saved_weights(run), last_weights(run))


@pytest.mark.usefixtures("without_tensorboard")
def test_the_last_epoch_is_always_judged(tmp_path: Path) -> None:
    rows = train(tiny(train__epochs=5, train__validate_every=2), tmp_path, device="cpu").rows("metrics.jsonl")
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["epoch"] for row in rows if "validation/accuracy" in row] == [2, 4, 5]
    assert not any("second" in name for row in rows for name in row)  # wall times would differ from run to run


# ---------------------------------------------------------------- numbers that are not finite


@pytest.mark.usefixtures("without_tensorboard")
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_at(monkeypatch, epoch=3)
    with pytest.raises(ValueError, match="loss is not finite at epoch 3") as caught:
        train(tiny(), tmp_path, device="cpu")
    assert str(tmp_path) in str(caught.value)
    assert [row["epoch"] for row in Run.open(tmp_path).rows("metrics.jsonl")] == [1, 2]
    assert all(p.isfinite().all() for p in load_policy(tmp_path).parameters())
    assert read_tensors(tmp_path / "state/train.safetensors")[1]["total"] == 2


@pytest.mark.usefixtures("without_tensorboard")
def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of an epoch is computed before its step, so it may be finite although the gradient is not."""
    loss = UAT.loss

    def steep(self: UAT, batch: Batch) -> Losses:
        total, count = loss(self, batch)["imitation"]
        zero = self.backbone.positions - self.backbone.positions.detach()
        return {"imitation": (total + 0 * zero.sqrt().sum(), count)}

    monkeypatch.setattr(UAT, "loss", steep)
    with pytest.raises(ValueError, match="not finite"):
        train(tiny(train__epochs=1), tmp_path, device="cpu")
    assert not (tmp_path / "policy.safetensors").exists()


# ---------------------------------------------------------------- where episodes start


def starts_of(config: RunConfig, folder: Path, patch: pytest.MonkeyPatch) -> list[Tensor | None]:
    """Return the starts in the table of positions of the episodes of each epoch."""
    seen: list[Tensor | None] = []
    loss = UAT.loss

    def watched(self: UAT, batch: Batch) -> Losses:
        seen.append(None if batch.start is None else batch.start.clone())
        return loss(self, batch)

    with patch.context() as within:
        within.setattr(UAT, "loss", watched)
        train(config, folder, device="cpu")
    return seen


@pytest.mark.usefixtures("without_tensorboard")
def test_random_start_uses_every_row_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(train__random_start=True, method__max_positions=8, train__batch_size=32)
    starts = [start for start in starts_of(config, tmp_path, monkeypatch) if start is not None]
    assert len(starts) == 4
    assert torch.cat(starts).unique().tolist() == [0, 1, 2, 3]  # 3 + horizon 5 = 8 rows
    assert not torch.equal(starts[0], starts[1])


@pytest.mark.usefixtures("without_tensorboard")
def test_random_start_stays_inside_a_short_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(train__random_start=True, method__max_positions=2, method__past_table="clamp")
    starts = [start for start in starts_of(config, tmp_path, monkeypatch) if start is not None]
    assert torch.cat(starts).unique().tolist() == [0]


@pytest.mark.usefixtures("without_tensorboard")
def test_episodes_start_at_the_first_row_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert starts_of(tiny(), tmp_path, monkeypatch) == [None] * 4


# ---------------------------------------------------------------- a method with phases of its own


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyConfig:
    goal: float = 1.0
    """Target of both weights, one after the other."""


class Toy(Policy):
    """A policy of two weights, learnt in two phases with different losses."""

    config: ToyConfig

    def __init__(self, spec: Spec, config: ToyConfig) -> None:
        super().__init__(spec, config)
        self.head = build_head(spec, 1)
        self.a, self.b = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    def features(self, batch: Batch) -> Tensor:
        return batch.obs.new_zeros(*batch.valid.shape, 1)

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> None:
        return None

    def step(self, state: None, step: Step) -> tuple[Tensor, None]:
        return step.obs.new_zeros(len(step.obs), self.spec.action.count), None

    def phases(self) -> tuple[Phase, ...]:
        return Phase("first", self._pull("a")), Phase("second", self._pull("b"))

    def _pull(self, name: str) -> Callable[[Batch], Losses]:
        def loss(batch: Batch) -> Losses:
            count = batch.valid.sum()
            return {name: ((getattr(self, name) - self.config.goal).square() * count, count)}

        return loss


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, without_tensorboard: None) -> RunConfig:
    monkeypatch.setitem(METHODS, "toy", Method(policy=Toy, config=ToyConfig, summary="two phases"))
    base = tiny("vanilla", train__epochs=4, train__lr=0.1, train__weight_decay=0.0)
    return dataclasses.replace(base, method_name="toy", method=ToyConfig())


def test_phases_train_one_after_the_other_with_their_own_losses(toy: RunConfig, tmp_path: Path) -> None:
    run = train(toy, tmp_path, device="cpu")
    rows = run.rows("metrics.jsonl")
    assert [row["epoch"] for row in rows] == list(range(1, 9))
    assert [row["phase"] for row in rows] == ["first"] * 4 + ["second"] * 4
    losses = [{name: value for name, value in row.items() if name.startswith("loss/")} for row in rows]
    assert [list(loss) for loss in losses] == [["loss/a"]] * 4 + [["loss/b"]] * 4
    assert losses[0]["loss/a"] == losses[4]["loss/b"] == 1.0  # (0 - goal)²
    steps = [loss["loss/a"] for loss in losses[:4]]
    assert steps == sorted(steps, reverse=True)
    weights = last_weights(run)
    assert weights["a"].item() == pytest.approx(0.4, abs=0.01)  # four Adam steps of 0.1
    assert weights["a"] == weights["b"]  # the second phase left a alone, and b had the same way to go
    assert "validation/accuracy" in rows[3]
    assert "validation/accuracy" in rows[7]


def test_the_saved_policy_is_the_best_of_the_last_phase(
    toy: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged(monkeypatch, 0.9, 0.8, 0.1, 0.2)  # the first phase looks better, and is not what was asked for
    weights = saved_weights(train(toy, tmp_path, device="cpu"))
    assert weights["b"].item() == pytest.approx(0.4, abs=0.01)


def test_patience_is_counted_in_each_phase(toy: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = override(toy, {"train.epochs": 9, "train.validate_every": 1, "train.patience": 2})
    judged(monkeypatch, 0.5, 0.6, 0.1, 0.1, 0.4, 0.3, 0.3)
    rows = train(config, tmp_path, device="cpu").rows("metrics.jsonl")
    assert [row["phase"] for row in rows] == ["first"] * 4 + ["second"] * 3


def test_a_crash_between_phases_changes_no_number(
    toy: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = numbers(train(toy, tmp_path / "whole", device="cpu").path)
    for event in range(4, 24):
        folder = tmp_path / f"{event}"
        with monkeypatch.context() as patch:
            crash_at(event, patch)
            try:
                train(toy, folder, device="cpu")
            except Crash:
                train(toy, folder, resume=True, device="cpu")
        assert numbers(folder) == whole, f"crash before write {event}"


# ---------------------------------------------------------------- TensorBoard


def test_tensorboard_shows_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(tiny(), tmp_path, device="cpu")
    events = EventAccumulator(str(run.file("tensorboard"))).Reload()
    rows = run.rows("metrics.jsonl")
    shown = [(event.step, event.value) for event in events.Scalars("loss/imitation")]
    assert shown == [(row["epoch"], pytest.approx(row["loss/imitation"])) for row in rows]
    judged_at = [event.step for event in events.Scalars("validation/accuracy")]
    assert judged_at == [2, 4]


@pytest.mark.usefixtures("without_tensorboard")
def test_without_tensorboard_nothing_is_missing_but_its_folder(tmp_path: Path) -> None:
    run = train(tiny(), tmp_path, device="cpu")
    assert not run.file("tensorboard").exists()
    assert len(run.rows("metrics.jsonl")) == 4


def test_checkpoints_close_to_each_other_are_left_out_and_a_kill_costs_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first and the last checkpoint are saved; resuming from the first repeats the rest."""
    plain = train(tiny(), tmp_path / "plain")
    monkeypatch.setattr("uat.training.checkpoint.SAVE_SECONDS", 1e9)
    saved: list[int] = []
    real = uat.training.checkpoint.write_tensors

    def counting(file: Path, tensors: Any, meta: Any) -> None:
        saved.append(meta["total"])
        real(file, tensors, meta)
        if len(saved) == 1:
            shutil.copytree(tmp_path / "killed", tmp_path / "early")

    monkeypatch.setattr("uat.training.checkpoint.write_tensors", counting)
    train(tiny(), tmp_path / "killed")
    assert saved == [2, 4]
    train(tiny(), tmp_path / "early", resume=True)
    for folder in ("killed", "early"):
        assert numbers(tmp_path / folder) == numbers(plain.path)
