"""Several trainings at once: each has the same numbers as when trained alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.small_runs import broken_at, tiny
from uat.config import RunConfig, override
from uat.recipes import recipe
from uat.runs import Run
from uat.tensor_files import read_tensors
from uat.training import train, train_together
from uat.training.checkpoint import DivergedError
from uat.training.trainer import Trainer

CUDA = torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs CUDA")])]


def config(seed: int, method: str = "uat", **changes: Any) -> RunConfig:
    small = {"domain.horizon": 9, "train.epochs": 20, "train.validate_every": 5, "method.dropout": 0.1}
    small |= {name.replace("__", "."): value for name, value in changes.items()}
    return override(recipe("darkroom", method, "smoke", seed=seed), small)


def assert_same_run(one: Run, other: Run, tolerance: float) -> None:
    mine, others = one.rows("metrics.jsonl"), other.rows("metrics.jsonl")
    assert [row.keys() for row in mine] == [row.keys() for row in others]
    for a, b in zip(mine, others, strict=True):
        for name, value in a.items():
            assert value == b[name] if isinstance(value, str) else abs(value - b[name]) <= tolerance, (name, a["epoch"])
    tensors, _ = read_tensors(one.file("state/train.safetensors"))
    for name, tensor in read_tensors(other.file("state/train.safetensors"))[0].items():
        assert (tensor - tensors[name]).abs().max() <= tolerance, name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("method", ["uat", "vanilla"])
def test_each_seed_gives_the_numbers_of_training_it_alone(
    tmp_path: Path, device: str, precision: str, method: str
) -> None:
    sizes = {"method__d_model": 32, "method__num_heads": 2, "method__d_ff": 32}  # the fused pass takes these
    if device == "cpu":
        sizes |= {"train__epochs": 6, "train__validate_every": 3}
    configs = [config(seed, method, train__precision=precision, **sizes) for seed in range(3)]
    alone = [train(c, tmp_path / f"alone{c.seed}", device=device) for c in configs]
    together = train_together(configs, [tmp_path / f"together{c.seed}" for c in configs], device=device)
    for one, other in zip(alone, together, strict=True):
        assert_same_run(one, other, 1e-9 if precision == "fp64" else 0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs CUDA")
@pytest.mark.parametrize("method", ["uat", "vanilla"])
def test_trainings_of_full_size_do_not_disturb_each_other(tmp_path: Path, method: str) -> None:
    """Train models large enough that their matrix products overlap. With a shared workspace, about one epoch in twenty
    gave other numbers."""
    changes = {"train.epochs": 60, "train.validate_every": 30}
    configs = [override(recipe("darkroom", method, "paper", seed=seed), changes) for seed in range(3)]
    alone = [train(c, tmp_path / f"alone{c.seed}", device="cuda") for c in configs]
    for turn in range(2):
        together = train_together(configs, [tmp_path / f"{turn}-{c.seed}" for c in configs], device="cuda")
        for one, other in zip(alone, together, strict=True):
            assert_same_run(one, other, 0.0)


def test_a_run_that_stopped_goes_on_beside_one_that_has_not_begun(tmp_path: Path) -> None:
    configs = [config(seed) for seed in range(2)]
    alone = [train(c, tmp_path / f"alone{c.seed}") for c in configs]
    train(configs[0], tmp_path / "0")
    together = train_together(configs, [tmp_path / "0", tmp_path / "1"], resume=True)
    for one, other in zip(alone, together, strict=True):
        assert_same_run(one, other, 0.0)


def test_bad_groups_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 configs need as many folders"):
        train_together([config(0), config(1)], [tmp_path / "a", tmp_path / "a"])
    with pytest.raises(ValueError, match="precision is one for all, got fp32, fp64"):
        train_together([config(0), config(1, train__precision="fp64")], [tmp_path / "a", tmp_path / "b"])
    assert train_together([], []) == []


def test_one_that_fails_closes_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    monkeypatch.setattr(Trainer, "close", lambda self: closed.append(self.config.seed))
    broken_at(monkeypatch, epoch=3)
    small = [tiny(seed=seed, train__validate_every=2) for seed in range(3)]
    try:
        train_together(small, [tmp_path / str(c.seed) for c in small])
    except DivergedError:
        assert sorted(closed) == [0, 1, 2]
    else:
        pytest.fail("a loss that is NaN was not reported")
