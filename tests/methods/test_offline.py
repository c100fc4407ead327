"""Methods that learn from logs give the same numbers captured on a GPU as on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.methods.offline import in_the_dark
from uat.config import override
from uat.training import train


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["iql", "cadm"])
def test_a_run_on_cuda_gives_the_numbers_of_a_cpu(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = override(in_the_dark(method, monkeypatch), {"train.precision": "fp64", "train.batch_size": 32})
    here, there = (train(config, tmp_path / name, device=name).rows("metrics.jsonl") for name in ("cpu", "cuda"))
    for cpu_row, cuda_row in zip(here, there, strict=True):
        assert cuda_row == {name: pytest.approx(value, abs=1e-6) for name, value in cpu_row.items()}
