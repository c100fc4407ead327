"""Matrices in the order in which threads take them: on a GPU where there is one, interpreted elsewhere."""

# ruff: noqa: E402 (what needs Triton is imported where there is Triton)
from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
pytest.importorskip("triton")

import triton
import triton.language as tl

from uat.engines.triton.tensor_core_layout import (
    arrange,
    key_place,
    load_block_diagonal,
    load_keys,
    load_matrix,
    load_values,
    value_place,
)

DEVICE = "cuda" if CUDA else "cpu"
SIZES = [(16, 16), (16, 64), (32, 32), (64, 16), (64, 64), (64, 128), (128, 64)]


@triton.jit
def _written(to, found, K: tl.constexpr, N: tl.constexpr):
    tl.store(to + tl.arange(0, K)[:, None] * N + tl.arange(0, N)[None, :], found)


@triton.jit
def _read(ptr, to, K: tl.constexpr, N: tl.constexpr):
    _written(to, load_matrix(ptr, K, N), K, N)


@triton.jit
def _read_diagonal(ptr, to, D: tl.constexpr, E: tl.constexpr):
    _written(to, load_block_diagonal(ptr, D, E), D, D)


@triton.jit
def _remember(keys_ptr, values_ptr, k_ptr, v_ptr, s, D: tl.constexpr, S: tl.constexpr):
    d = tl.arange(0, D)
    tl.store(keys_ptr + key_place(d, s, D, S), tl.load(k_ptr + s * D + d))
    tl.store(values_ptr + value_place(d, s, D), tl.load(v_ptr + s * D + d))


@triton.jit
def _recall(keys_ptr, values_ptr, to_keys, to_values, most, D: tl.constexpr, S: tl.constexpr):
    _written(to_keys, load_keys(keys_ptr, most, D, S), D, S)
    _written(to_values, load_values(values_ptr, most, D, S), S, D)


def some(*shape: int) -> Tensor:
    """Numbers that half precision holds."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).half().float().to(DEVICE)


def launch(kernel: Any, *given: Any, **sizes: int) -> None:
    cast(Any, kernel)[(1,)](*given, **sizes, num_warps=4)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(("k", "n"), SIZES)
def test_a_matrix_comes_back_as_it_was_stored(k: int, n: int, narrow: bool) -> None:
    w_NK = some(n, k)
    packed, found = arrange(w_NK, narrow=narrow), torch.empty(k, n, device=DEVICE)
    launch(_read, packed.half() if narrow else packed, found, K=k, N=n)
    assert torch.equal(found, w_NK.T)


@pytest.mark.parametrize(("d", "e"), [(16, 4), (32, 8), (32, 16), (64, 8), (64, 16), (64, 32), (64, 64)])
def test_so_do_blocks_along_a_diagonal_and_nothing_beside_them(d: int, e: int) -> None:
    w_DD = torch.block_diag(*some(d // e, e, e))
    packed, found = arrange(w_DD, narrow=True, short=True).half(), torch.empty(d, d, device=DEVICE)
    beside = arrange((w_DD == 0).float(), narrow=True, short=True).bool()
    if e % 16 == 0:  # what is beside them is not read
        packed[beside] = torch.nan
    launch(_read_diagonal, packed, found, D=d, E=e)
    assert torch.equal(found, w_DD.T)


@pytest.mark.parametrize("most", [0, 1, 15, 16, 33, 64])
@pytest.mark.parametrize(("d", "s"), [(16, 64), (32, 64), (64, 64), (64, 16), (32, 32)])
def test_keys_and_values_are_found_where_they_were_put(d: int, s: int, most: int) -> None:
    most = min(most, s)
    k_SD, v_SD = some(2, s, d)
    keys, values = (torch.full((d * s,), torch.inf, dtype=torch.half, device=DEVICE) for _ in range(2))
    values.zero_()  # of these some that are not there yet are read
    for step in range(most):
        launch(_remember, keys, values, k_SD, v_SD, step, D=d, S=s)
    found_keys, found_values = torch.empty(d, s, device=DEVICE), torch.empty(s, d, device=DEVICE)
    launch(_recall, keys, values, found_keys, found_values, most, D=d, S=s)
    there = (torch.arange(s, device=DEVICE) < most).float()
    assert torch.equal(found_keys, k_SD.T * there)
    assert torch.equal(found_values, v_SD * there[:, None])


@pytest.mark.parametrize(("d", "s"), [(16, 16), (64, 64), (64, 16)])
def test_no_two_entries_share_a_place(d: int, s: int) -> None:
    k_SD, v_SD = (torch.arange(1.0, s * d + 1, device=DEVICE).view(s, d) for _ in range(2))
    keys, values = torch.zeros(2, d * s, device=DEVICE)
    for step in range(s):
        launch(_remember, keys, values, k_SD, v_SD, step, D=d, S=s)
    assert len(keys.unique()) == len(values.unique()) == d * s
    assert bool((keys > 0).all() & (values > 0).all())
