"""Copy the weights of all layers, in one launch, to the buffers that `_step` and `_play` read (Triton).

Three buffers are written for each layer: its matrices, in the dtype of products; its scales and biases; and the weights
that map u to gates g, if these use the tensor core layout. Each buffer gathers several parameters, as if concatenated;
an index list, the same for all layers, gives the source of each number, or -1 for a gap.

Shapes: D width, H heads, E head size, F feed-forward, U utility width, L layers.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from uat.engines.triton.acting import SMALL
from uat.engines.triton.complete_weights import Feedback, feedback, projections
from uat.engines.triton.parts import rounded, shares
from uat.engines.triton.tensor_core_layout import arrange
from uat.nn.blocks import Block, Transformer
from uat.nn.utility import UtilityGates

BLOCK = 1024
"""Numbers per program."""
MOST_LAYERS = 32
"""Most layers per launch: the arguments of a kernel are limited to 4096 bytes, and a layer has 14 tensors."""


class Packed(NamedTuple):
    """Weights of all layers in the buffers that `_step` and `_play` read."""

    matrices: Tensor
    """Matrices, in the dtype of products, which is also the dtype of keys and values."""
    vectors: Tensor
    """Scales and biases, always in float32; those of the last norm follow the last layer's."""
    feedback: Feedback | None
    tensor_core_layout: bool
    """Whether matrices have the tensor core layout, and so have the maps from u to gates g if they are small."""


@torch.no_grad()
def fused_pack(backbone: Transformer, utility: UtilityGates | None, *, half: bool, tensor_core_layout: bool) -> Packed:
    """Pack the current weights in half precision or in float32."""
    c, like, weights = backbone.config, backbone.positions, None if utility is None else feedback(utility)
    matrices, vectors = _matrices(backbone), _vectors(backbone)
    starts, vector_starts = _starts(matrices[0]), _starts(vectors[0])
    order = _order(c.d_model, c.d_ff, c.num_heads, len(matrices[0]) == 5, like.device) if tensor_core_layout else None
    each, each_vectors, each_token = starts[-1] if order is None else len(order), 6 * c.d_model + c.d_ff, 0
    to_matrices = like.new_empty(c.num_layers * each, dtype=torch.float16 if half else torch.float32)
    to_vectors = like.new_empty(c.num_layers * each_vectors + 2 * c.d_model)

    token, token_order, to_token = None, None, None
    if tensor_core_layout and weights is not None and c.d_model * weights.token.shape[1] <= SMALL.value:
        token, each_token = weights.token.contiguous(), c.d_model * weights.token.shape[1]
        token_order = _token_order(c.d_model, weights.token.shape[1], like.device)
        to_token = like.new_empty(token.numel())
        weights = weights._replace(token=to_token)

    programs = sum(shares(size, BLOCK) for size in (each, vector_starts[-1], each_token))
    for first in range(0, c.num_layers, MOST_LAYERS):
        some = slice(first, first + MOST_LAYERS)
        cast(Any, _pack)[(programs, len(matrices[some]))](
            _by_kind(matrices[some]), _by_kind(vectors[some]), token, order, token_order,
            to_matrices, to_vectors, to_token, first,
            STARTS=starts, VECTOR_STARTS=vector_starts, EACH=each, EACH_VECTORS=each_vectors, EACH_TOKEN=each_token,
            D=c.d_model, L=len(matrices[some]), BLOCK=BLOCK, PRECISION="half" if half else "tf32x3",
        )  # fmt: skip
    return Packed(to_matrices, to_vectors, weights, tensor_core_layout)


def _matrices(backbone: Transformer) -> list[tuple[Tensor, ...]]:
    """Return the matrices of each layer, in the order of the buffer."""
    found = []
    for block in cast("list[Block]", list(backbone.blocks)):
        a, (up, _, down) = block.attention, block.ff
        weight, bias = projections(a.project)
        found.append((weight, *([] if bias is None else [bias]), a.out.weight, up.weight, down.weight))
    return found


def _vectors(backbone: Transformer) -> list[tuple[Tensor, ...]]:
    """Return scales and biases of each layer and of the norm after it: the last norm, or the next layer's first norm,
    which both layers write."""
    blocks = cast("list[Block]", list(backbone.blocks))
    norms, found = [*(block.attention_norm for block in blocks), backbone.last_norm], []
    for block, norm, following in zip(blocks, norms, norms[1:], strict=False):
        (up, _, down), out, second = block.ff, block.attention.out, block.ff_norm
        own = (norm.weight, norm.bias, out.bias, second.weight, second.bias, down.bias, up.bias)
        found.append((*own, following.weight, following.bias))
    return found


def _starts(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the start of each tensor in their concatenation, and the end of the last one."""
    return tuple(accumulate((tensor.numel() for tensor in tensors), initial=0))


def _by_kind(layers: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return the first tensor of every layer, then the second of every layer, and so on."""
    return tuple(tensor.contiguous() for kind in zip(*layers, strict=True) for tensor in kind)


@functools.cache
def _order(d: int, f: int, heads: int, gated: bool, device: torch.device) -> Tensor:
    """Return, for each number of a layer's matrices in tensor core layout, its index in their concatenation; -1 for
    gaps beside block diagonals."""
    square, each = d * d, d // heads
    sizes = [6 * square, 3 * d * each, square, f * d, d * f] if gated else [3 * square, 0, square, f * d, d * f]
    weight, u, out, up, down = torch.arange(1, sum(sizes) + 1, dtype=torch.int32).split(sizes)
    parts = [arrange(part, narrow=True) for part in weight.view(-1, d).split(d)]
    parts += [arrange(torch.block_diag(*part), narrow=True, short=True) for part in u.view(-1, heads, each, each)]
    parts += [arrange(part, narrow=True) for part in (out.view(d, d), up.view(f, d), down.view(d, f))]
    return (torch.cat(parts) - 1).to(device)


@functools.cache
def _token_order(d: int, width: int, device: torch.device) -> Tensor:
    return arrange(torch.arange(d * width, dtype=torch.int32).view(d, width)).to(device)


@triton.jit
def _copy(
    tensors, order_ptr, to_ptr, block, layer,
    STARTS: tl.constexpr, SIZE: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Copy a block of a layer's tensors in this order; without an order, concatenated."""
    i = block * BLOCK + tl.arange(0, BLOCK)
    at = i
    if order_ptr is not None:
        at = tl.load(order_ptr + i, mask=i < SIZE, other=-1)
    found = tl.zeros((BLOCK,), tl.float32)
    for kind in tl.static_range(len(STARTS) - 1):
        ptr = tensors[kind * L]
        for other in tl.static_range(1, L):
            ptr = tl.where(layer == other, tensors[kind * L + other], ptr)
        here = (at >= STARTS[kind]) & (at < STARTS[kind + 1])
        found = tl.load(ptr + (at - STARTS[kind]), mask=here, other=found)
    tl.store(to_ptr + i, rounded(found, PRECISION), mask=i < SIZE)


@triton.jit
def _pack(
    matrices, vectors, token_ptr, order_ptr, token_order_ptr, to_matrices, to_vectors, to_token, first,
    STARTS: tl.constexpr, VECTOR_STARTS: tl.constexpr, EACH: tl.constexpr, EACH_VECTORS: tl.constexpr,
    EACH_TOKEN: tl.constexpr, D: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, layer = tl.program_id(0), tl.program_id(1)
    written: tl.constexpr = EACH_VECTORS + 2 * D
    after_matrices: tl.constexpr = (EACH + BLOCK - 1) // BLOCK
    after_vectors: tl.constexpr = after_matrices + (written + BLOCK - 1) // BLOCK
    if block < after_matrices:
        to = to_matrices + (first + layer) * EACH
        _copy(matrices, order_ptr, to, block, layer, STARTS, EACH, L, BLOCK, PRECISION)
    elif block < after_vectors:
        to = to_vectors + (first + layer) * EACH_VECTORS
        _copy(vectors, None, to, block - after_matrices, layer, VECTOR_STARTS, written, L, BLOCK, "tf32x3")
    elif EACH_TOKEN:
        i = (block - after_vectors) * BLOCK + tl.arange(0, BLOCK)
        at, own = (first + layer) * EACH_TOKEN, i < EACH_TOKEN
        w = tl.load(token_ptr + at + tl.load(token_order_ptr + i, mask=own, other=0), mask=own)
        tl.store(to_token + at + i, w, mask=own)
