"""Tensor core layout: matrices stored in the order in which threads read them (Triton).

Tensor cores distribute the right factor of a product over a program's threads in a fixed way: of each block of 8 or 16
rows, a thread has a few entries of one column. If a matrix is stored in that order, each thread reads its share with
few wide loads straight into the registers of the product, without shared memory or waiting for other warps. If a
compiler distributes the factor differently, the numbers are the same, but slower.

Weights bypass the multiprocessor's own cache (".cg"): each weight is read once per step, and together they would evict
the keys, values and tables that are read again.

Shapes: K rows, N columns. A turn is one wide load of a thread: some groups of one or two neighbouring rows, of one
column. The four warps of a program process 32 columns at a time, 8 per warp.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

COLUMNS = tl.constexpr(32)
"""Columns that the warps of a program share: 8 each."""


def arrange(w_NK: Tensor, *, narrow: bool = False, short: bool = False) -> Tensor:
    """Reorder a weight (out, in) for `load_matrix`, which reads it in half precision (`narrow`) or in its own dtype.

    short: reorder it for `load_block_diagonal` instead.
    """
    (n, k), pair = w_NK.shape, 2 if narrow else 1  # number of neighbouring rows that share a register
    columns = min(n, COLUMNS.value)
    groups = min(k // (4 * pair), 2 if short else 4)
    parts = w_NK.view(n // columns, columns, k // (4 * pair * groups), groups, 4, pair)
    return parts.permute(0, 2, 1, 4, 3, 5).flatten()


@triton.jit
def load_matrix(ptr, K: tl.constexpr, N: tl.constexpr):
    """Load a matrix (K, N) in this layout."""
    pair: tl.constexpr = 32 // ptr.dtype.element_ty.primitive_bitwidth
    groups: tl.constexpr = min(K // (4 * pair), 4)
    turn: tl.constexpr = groups * pair
    at = tl.arange(0, K * N // turn)[:, None] * turn + tl.arange(0, turn)[None, :]
    return _gathered(tl.load(ptr + at, cache_modifier=".cg"), K, N, groups, pair)


@triton.jit
def load_block_diagonal(ptr, D: tl.constexpr, E: tl.constexpr):
    """Load a block-diagonal matrix (D, D) with blocks of size E, stored in short turns. Zeros beside the blocks are not
    read if E is 16, 32 or 64."""
    pair: tl.constexpr = 32 // ptr.dtype.element_ty.primitive_bitwidth
    groups: tl.constexpr = min(D // (4 * pair), 2)
    turn: tl.constexpr = groups * pair
    columns: tl.constexpr = min(D, COLUMNS)
    who = tl.arange(0, D * D // turn)
    at = who[:, None] * turn + tl.arange(0, turn)[None, :]
    if E % (4 * turn) == 0:
        n = who // (4 * columns) // (D // (4 * turn)) * columns + who // 4 % columns
        k = who // (4 * columns) % (D // (4 * turn)) * (4 * turn)
        found = tl.load(ptr + at, mask=(n // E == k // E)[:, None], other=0.0, cache_modifier=".cg")
    else:
        found = tl.load(ptr + at, cache_modifier=".cg")
    return _gathered(found, D, D, groups, pair)


@triton.jit
def _gathered(found, K: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, PAIR: tl.constexpr):
    columns: tl.constexpr = min(N, COLUMNS)
    found = tl.reshape(found, (N // columns, K // (4 * PAIR * GROUPS), columns, 4, GROUPS, PAIR))
    return tl.reshape(tl.permute(found, (1, 4, 3, 5, 0, 2)), (K, N))


@triton.jit
def load_keys(ptr, most, D: tl.constexpr, S: tl.constexpr):
    """Load keys (D, S) of the steps before `most`, and zeros beyond."""
    groups: tl.constexpr = min(D // 8, 4)  # as in `key_place`
    columns: tl.constexpr = min(S, COLUMNS)
    who = tl.arange(0, D * S // (2 * groups))
    at = who[:, None] * (2 * groups) + tl.arange(0, 2 * groups)[None, :]
    s = who // (4 * columns) // (D // (8 * groups)) * columns + who // 4 % columns
    found = tl.load(ptr + at, mask=(s < most)[:, None], other=0.0)
    return _gathered(found, D, S, groups, 2)


@triton.jit
def key_place(d, s, D: tl.constexpr, S: tl.constexpr):
    """Return the offset of entry d of the key of step s."""
    groups: tl.constexpr = min(D // 8, 4)
    columns: tl.constexpr = min(S, COLUMNS)
    who = ((s // columns * (D // (8 * groups)) + d // (8 * groups)) * columns + s % columns) * 4 + d % 8 // 2
    return who * (2 * groups) + d // 8 % groups * 2 + d % 2


@triton.jit
def load_values(ptr, most, D: tl.constexpr, S: tl.constexpr):
    """Load values (S, D) of the steps before `most`, and unspecified numbers of up to 15 steps after it. A turn has
    entries of the same steps, in blocks of sixteen; blocks after `most` are not read."""
    columns: tl.constexpr = min(D, COLUMNS)
    turn: tl.constexpr = D // columns * 4
    who = tl.arange(0, S * D // turn)
    at = who[:, None] * turn + tl.arange(0, turn)[None, :]
    found = tl.load(ptr + at, mask=(who // (4 * columns) * 16 < most)[:, None], other=0.0)
    found = tl.reshape(found, (S // 16, columns, 4, D // columns, 2, 2))
    return tl.reshape(tl.permute(found, (0, 4, 2, 5, 3, 1)), (S, D))


@triton.jit
def value_place(d, s, D: tl.constexpr):
    """Return the offset of entry d of the value of step s."""
    columns: tl.constexpr = min(D, COLUMNS)
    who = (s // 16 * columns + d % columns) * 4 + s % 8 // 2
    return who * (D // columns * 4) + d // columns * 4 + s // 8 % 2 * 2 + s % 2
