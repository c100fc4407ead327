"""The numbers of `noise.uniform` on a GPU, to the last bit, in one launch (Triton). Slow twin: `uniform_of_key`."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportInvalidTypeForm=false
from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def fused_uniform(key: int, ids_B: Tensor, count: int) -> Tensor:
    """Return (B, count) float64 numbers in the open interval (0, 1). Ids are int64 and may have any stride."""
    out = torch.empty(len(ids_B), count, dtype=torch.float64, device=ids_B.device)
    if out.numel():
        with torch.cuda.device_of(out):  # Triton launches on the current device
            cast(Any, _uniform)[(triton.cdiv(out.numel(), BLOCK),)](
                ids_B, out, key, ids_B.stride(0), count, out.numel(), BLOCK=BLOCK
            )
    return out


@triton.jit(do_not_specialize=["ids_ptr", "key", "stride", "count", "N"])  # compiled once for all values
def _uniform(ids_ptr, out_ptr, key: tl.int64, stride: tl.int64, count: tl.int64, N: tl.int64, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b = n // count
    ids = tl.load(ids_ptr + b * stride, mask=n < N, other=0)
    state = _mix(_mix(ids.to(tl.uint64) + key.to(tl.uint64)))
    counter = (n - b * count + 1).to(tl.uint64)
    bits = _mix(state + counter * 0x9E3779B97F4A7C15)
    tl.store(out_ptr + n, ((bits >> 12).to(tl.float64) + 0.5) * 2.0**-52, mask=n < N)


@triton.jit
def _mix(x):
    """Mix the bits of unsigned integers: products wrap around, and shifts insert zeros."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)
