"""Noise in one launch against its slow twin, bit for bit: on a GPU where there is one, interpreted elsewhere."""

# ruff: noqa: E402 (what needs Triton is imported where there is Triton)
from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
pytest.importorskip("triton")

from uat import noise
from uat.engines import kernels
from uat.engines.triton import noise as noise_kernel
from uat.engines.triton.noise import fused_uniform
from uat.noise import derive, gumbel, integers, uniform

DEVICE = "cuda" if CUDA else "cpu"
IDS = torch.tensor([0, 1, -1, 255, 2**31, 2**62, -(2**62), 2**63 - 1, -(2**63)])
KEYS = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, derive(0, "darkroom.cue")]


def fused(key: int, ids_B: Tensor, count: int) -> Tensor:
    return fused_uniform(key, ids_B.to(DEVICE), count).cpu()


@pytest.mark.parametrize("key", KEYS)
def test_one_launch_draws_what_many_do_under_any_key(key: int) -> None:
    found = fused(key, IDS, 7)
    assert found.dtype == torch.float64
    assert torch.equal(found, noise.uniform_of_key(key, IDS, 7))


@pytest.mark.parametrize("count", [0, 1, 7, 1025])
def test_any_count_of_numbers_is_drawn(count: int) -> None:
    found = fused(5, IDS, count)
    assert found.shape == (len(IDS), count)
    assert torch.equal(found, noise.uniform_of_key(5, IDS, count))


def test_for_no_numbers_nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_kernel, "_uniform", None)
    for ids_B, count in ((IDS[:0], 0), (IDS[:0], 3), (IDS, 0)):
        assert torch.equal(fused(5, ids_B, count), noise.uniform_of_key(5, ids_B, count))


def test_ids_may_lie_apart() -> None:
    table = torch.arange(24).view(8, 3).to(DEVICE)
    for ids_B in (table[:, 1], table[::2, 0], table[0, :1].expand(4), table[3]):
        assert torch.equal(fused_uniform(5, ids_B, 9).cpu(), noise.uniform_of_key(5, ids_B.cpu(), 9))


def test_nothing_is_written_past_the_end() -> None:
    out = torch.full((noise_kernel.BLOCK,), -1.0, dtype=torch.float64, device=DEVICE)
    size = 7 * len(IDS)
    cast(Any, noise_kernel._uniform)[(1,)](IDS.to(DEVICE), out, 5, 1, 7, size, BLOCK=noise_kernel.BLOCK)
    assert torch.equal(out[:size].cpu(), noise.uniform_of_key(5, IDS, 7).flatten())
    assert (out[size:] == -1).all()


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_a_gpu_draws_what_a_cpu_does_and_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    ids_B = IDS.cuda()
    slow_gumbel = -torch.log(-torch.log(noise.uniform_of_key(derive(3, "c"), ids_B, 300)))
    expected = uniform(3, "a", IDS, 1025), integers(3, "b", IDS, 60, below=99)
    monkeypatch.setattr(kernels, "uniform_of_key", None)
    with kernels.fused_operations():
        assert torch.equal(uniform(3, "a", ids_B, 1025).cpu(), expected[0])
        assert torch.equal(integers(3, "b", ids_B, 60, below=99).cpu(), expected[1])
        assert torch.equal(gumbel(3, "c", ids_B, 300), slow_gumbel)
