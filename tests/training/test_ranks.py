"""Training on several processes gives the numbers of a single process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import uat
from uat.paper.studies.__main__ import main
from uat.training.ranks import Ranks, joined

SMALL = {
    "domain.horizon": 6,
    "train.epochs": 8,
    "train.validate_every": 4,
    "method.dropout": 0.0,
    "method.d_model": 8,
    "method.d_ff": 8,
}


def flags(changes: dict[str, object]) -> list[str]:
    named = [(name.replace("_", "-"), str(value)) for name, value in changes.items()]
    return [part for name, value in named for part in (f"--{name}", value)]


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["imitation", "ppo"])
def test_two_processes_have_the_loss_curve_of_one(objective: str, tmp_path: Path) -> None:
    config = uat.override(uat.recipe("darkroom", "uat", "smoke", objective=objective), SMALL)
    one = uat.train(config, tmp_path / "one", device="cpu")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "uat"]
    what = ["train", "darkroom", "--preset", "smoke", "--device", "cpu", "--out", str(tmp_path / "two"), *flags(SMALL)]
    what += ["--objective", objective]
    source = Path(uat.__file__).parents[1]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(source)}
    done = subprocess.run([*launch, *what], capture_output=True, text=True, env=surroundings, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("best_epoch") == 1  # one of the two speaks
    two = uat.Run.open(tmp_path / "two")
    assert two.config.identity() == config.identity()
    name = {"imitation": "loss/imitation", "ppo": "loss/value"}[objective]
    curves = [[row[name] for row in run.rows("metrics.jsonl") if name in row] for run in (one, two)]
    assert len(curves[1]) == SMALL["train.epochs"] - (objective == "ppo")  # its first rollout only fits statistics
    assert curves[1] == pytest.approx(curves[0], abs=1e-5)
    assert curves[0][0] != curves[0][-1]
    weights = [uat.load(tmp_path / name).state_dict() for name in ("one", "two")]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, atol=1e-4, rtol=1e-3)


def test_sums_keep_what_is_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Integer counts come first, and losses are not truncated to integers when two equal ranks are summed."""
    monkeypatch.setattr("torch.distributed.all_reduce", lambda flat: flat.mul_(2))
    count, loss = Ranks(0, 2).sum([torch.tensor(3), torch.tensor([0.25, 0.5])])
    assert count.dtype == torch.int64
    assert count.item() == 6
    assert loss.tolist() == [0.5, 1.0]


def test_a_grid_is_not_started_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as stopped:
        main(["main", "--preset", "smoke", "--dry-run"])
    assert stopped.value.code == 2


def test_shares_cover_a_batch_once() -> None:
    parts = [Ranks(rank, 3).share(torch.arange(12)) for rank in range(3)]
    assert torch.equal(torch.cat(parts), torch.arange(12))


def test_a_batch_that_cannot_be_shared_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    config = uat.override(uat.recipe("darkroom", "uat", "smoke"), SMALL)
    with pytest.raises(ValueError, match=r"batch_size=16 must be a multiple of the 3 processes"):
        uat.train(config, tmp_path / "run", device="cpu")


@pytest.mark.parametrize(
    ("device", "process", "said"),
    [
        ("cuda:0", 1, "device 'cuda:0' is one GPU for 2 processes: say 'cuda', and each takes its own"),
        ("cuda", 1, "process 1 of this machine has no GPU of its own: there are 1"),
    ],
)
def test_processes_do_not_share_a_gpu(monkeypatch: pytest.MonkeyPatch, device: str, process: int, said: str) -> None:
    for name, value in {"RANK": process, "LOCAL_RANK": process, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    config = uat.recipe("darkroom", "uat", "smoke")
    with pytest.raises(ValueError, match=said), joined(config, torch.device(device)):
        pass
