"""All Transformer blocks, forward and backward, in a few launches (Triton).

The slow twin is `Block.forward`, block after block; tests check that outputs and all gradients are equal. Besides
`_lay`, which copies the weights, the forward pass has two kernels: attention (`attend.py`), and the row-wise operations
from one attention to the next (`rows.py`).

In the backward pass, each kernel has a counterpart that computes the gradients of its inputs. Gradients of weights are
sums over all rows and come last (`weights.py`). All sums have a fixed order: repeating a step gives the same bits.

If products have half precision, so have the activations stored for the backward pass and intermediate gradients, which
are scaled up (`enlarged`). The residual stream, its gradient and all sums stay float32.

Dropout is a function of (seed, site): the seed is a tensor on the device, and training changes it before each step.

Shapes: N rows (B episodes of T steps), D width, H heads, E head size, F feed-forward, L blocks.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from uat.engines.triton.attend import attend, attend_backward
from uat.engines.triton.complete_weights import projections
from uat.engines.triton.outer import added, unpacked
from uat.engines.triton.parts import rounded, shares
from uat.engines.triton.rows import rows_backward, rows_forward
from uat.engines.triton.step import rounding
from uat.engines.triton.weights import Factors, Norms, map_sizes, weight_gradients
from uat.nn.blocks import Block

LAID = 1024
"""Numbers per program when weights are copied into one buffer."""
SITES = 3
"""Dropout sites in a block: attention, its output, the feed-forward network's output."""
MOST_HIDDEN = 64
"""Hidden units that a program processes at a time."""


class Weights(NamedTuple):
    """Weights of one block."""

    norm_w: Tensor
    norm_b: Tensor
    project: Tensor
    """W, and W^u if the block has gates."""
    u: Tensor | None
    out_w: Tensor
    out_b: Tensor
    ff_norm_w: Tensor
    ff_norm_b: Tensor
    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor


class Program(NamedTuple):
    """Rows per program of `rows_forward`, and warps per program in the forward and in the backward pass."""

    rows: int
    warps: int
    warps_back: int


class Kept(NamedTuple):
    """Activations stored for the backward pass of the blocks, (L, N, ...)."""

    z: Tensor
    """Rows of the first norm before scale and bias; `scale` is the factor that normalised them. z1: of the second."""
    scale: Tensor
    qkv: Tensor
    h: Tensor
    z1: Tensor
    scale1: Tensor
    hidden: Tensor

    @classmethod
    def room(cls, x: Tensor, narrow: Tensor, blocks: int, f: int) -> Kept:
        """Allocate buffers for x (N, D); `narrow` is a tensor of the dtype of most of them."""
        rows, d = x.shape
        z, qkv, h, z1, hidden = (narrow.new_empty(blocks, rows, width) for width in (d, 3 * d, d, d, f))
        scale, scale1 = x.new_empty(2, blocks, rows)
        return cls(z, scale, qkv, h, z1, scale1, hidden)

    def block(self, index: int) -> Kept:
        """Return the activations (N, ...) of one block."""
        return Kept(*(tensor[index] for tensor in self))


def fused_blocks(
    blocks: Sequence[Block], x_ND: Tensor, gates: Tensor | None, shape: tuple[int, int], seed: Tensor, peak: Tensor
) -> Tensor:
    """Return the output of all blocks for x (B * T, D). shape: (B, T).

    gates: rho and the g of each block, (1 + L, B * T, D), or None. In half precision they come from `fused_gates`,
    which expects their gradient enlarged.
    peak: the largest gradient of the last block's output; the backward pass writes it before it reaches the blocks."""
    first = blocks[0].attention
    drop = first.dropout if blocks[0].training else 0.0
    weights = [weight for block in blocks for weight in _weights(block, gated=gates is not None)]
    return cast(Tensor, FusedBlocks.apply(x_ND, gates, seed, peak, shape, first.num_heads, drop, *weights))


def _weights(block: Block, *, gated: bool) -> Weights:
    """Return the weights of a block; without gates, only those of the plain projections."""
    a, (ff1, _, ff2) = block.attention, block.ff
    norm, ff_norm = block.attention_norm, block.ff_norm
    project, u = projections(a.project)
    if not gated:
        project, u = project[: 3 * project.shape[1]], None
    tensors = (
        norm.weight, norm.bias, project, u, a.out.weight, a.out.bias, ff_norm.weight, ff_norm.bias,
        ff1.weight, ff1.bias, ff2.weight, ff2.bias,
    )  # fmt: skip
    return Weights(*cast("tuple[Any, ...]", tensors))


class FusedBlocks(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, gates: Tensor | None, seed: Tensor, peak: Tensor, shape: tuple[int, int], heads: int,
        drop: float, *flat: Tensor | None,
    ) -> Tensor:  # fmt: skip
        each = len(Weights._fields)
        weights = [Weights(*cast("tuple[Any, ...]", flat[at : at + each])) for at in range(0, len(flat), each)]
        precision, laid = rounding(), _laid(weights, rounding())
        kept = Kept.room(x, laid, len(weights), weights[0].w1.shape[0])
        for layer in range(len(weights) + 1):
            x = _launch_rows(x, layer, kept, gates, seed, weights, laid, drop, precision)
            if layer < len(weights):
                attend(kept.qkv[layer], kept.h[layer], seed, SITES * layer, shape, heads, drop, precision)
        norms = [norm for w in weights for norm in (w.norm_w, w.norm_b, w.ff_norm_w, w.ff_norm_b)]
        ctx.save_for_backward(gates, seed, laid, *norms, *kept)
        ctx.peak, ctx.shape, ctx.heads, ctx.drop, ctx.precision, ctx.blocks = (
            peak, shape, heads, drop, precision, len(weights)
        )  # fmt: skip
        ctx.shapes = [None if weight is None else weight.shape for weight in flat]
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gates, seed, laid, *rest), count, precision, peak = ctx.saved_tensors, ctx.blocks, ctx.precision, ctx.peak
        norms, kept = [Norms(*rest[at : at + 4]) for at in range(0, 4 * count, 4)], Kept(*rest[4 * count :])
        (rows, d), f, gated = dx.shape, kept.hidden.shape[-1], gates is not None
        program = _program(precision, dx.device)
        programs = shares(rows, program.rows)
        dgates = None if gates is None else torch.empty_like(gates)
        e2, e1, dhidden, dqkv = (torch.empty_like(like) for like in (kept.z, kept.z, kept.hidden, kept.qkv))
        dx = dx.contiguous()
        dx1 = dx  # not read if there is no block above
        for above in reversed(range(count + 1)):  # from the attention of the block above to that of the one below
            below, here, there = above - 1, min(above, count - 1), max(above - 1, 0)
            up, low = kept.block(here), kept.block(there)
            dh, to_x, to_x1 = torch.empty_like(low.z), torch.empty_like(dx), torch.empty_like(dx)
            of_gates = (
                (dx,) * 4
                if gates is None or dgates is None
                else (gates[0], gates[1 + here], dgates[0], dgates[1 + here])
            )
            cast(Any, rows_backward)[(programs,)](
                dx, dqkv[here], up.z, up.scale, dx1, norms[here].w, norms[here].b, laid[here], *of_gates,
                low.z1, low.scale1, low.hidden, norms[there].ff_w, laid[there], seed, peak,
                e2[there], dhidden[there], to_x1, e1[there], dh, to_x, rows, SITES * below,
                D=d, F=f, BLOCK=min(f, MOST_HIDDEN), SQUARES=_squares(gated), ROWS=program.rows, DROP=ctx.drop,
                MIX=below >= 0, PROJECT=above < count, UTILITY=gated, TOP=gated and above == count - 1,
                ENLARGED=of_gates[0].dtype == torch.float16, STAGES=_stages(d, precision), PRECISION=precision,
                num_warps=program.warps_back,
            )  # fmt: skip
            dx = to_x
            if below < 0:
                break
            dx1 = to_x1
            attend_backward(low.qkv, dh, dqkv[below], seed, SITES * below, ctx.shape, ctx.heads, ctx.drop, precision)
        factors = Factors(e2, kept.hidden, dhidden, kept.z1, e1, kept.h, dqkv, kept.z)
        parts = weight_gradients(factors, norms, gates, laid, peak, ctx.heads, precision)
        found = added(*(part.flatten(1) for part in parts))
        gradients = zip(*(part.view(count, -1) for part in found), strict=True)
        flat = [gradient for parts in gradients for gradient in _gradients(parts, map_sizes(d, f), ctx.shapes)]
        return dx, dgates, None, None, None, None, None, *flat


def _gradients(parts: tuple[Tensor, ...], sizes: Sequence[tuple[int, int]], of: Sequence[Any]) -> list[Tensor | None]:
    """Return the gradients of one block's weights, in order, from the summed parts; `of`: shapes of the weights."""
    norms, summed, projects = parts
    dff_norm_w, dff_norm_b, dnorm_w, dnorm_b = norms.chunk(4)
    (dw2, db2), (dw1, db1), (dout_w, dout_b) = unpacked(summed, sizes)
    project_shape, u_shape = of[2], of[3]
    dproject = projects[: project_shape.numel()].view(project_shape)
    du = None if u_shape is None else projects[project_shape.numel() :].view(u_shape)
    return [dnorm_w, dnorm_b, dproject, du, dout_w, dout_b, dff_norm_w, dff_norm_b, dw1, db1, dw2, db2]


def _launch_rows(
    x: Tensor, layer: int, kept: Kept, gates: Tensor | None, seed: Tensor, weights: list[Weights], laid: Tensor,
    drop: float, precision: str,
) -> Tensor:  # fmt: skip
    """Compute everything between the attention of the previous block and that of block `layer`, if they exist; store
    activations for the backward pass in `kept`, and return the output of the previous block."""
    count, (rows, d), f, gated = len(weights), x.shape, weights[0].w1.shape[0], gates is not None
    mix, project = layer > 0, layer < count
    before, here = max(layer - 1, 0), min(layer, count - 1)
    out = torch.empty_like(x) if mix else x
    old, new, w, w_new = kept.block(before), kept.block(here), weights[before], weights[here]
    rho, g = (x, x) if gates is None else (gates[0], gates[1 + here])
    program = _program(precision, x.device)
    cast(Any, rows_forward)[(shares(rows, program.rows),)](
        x, old.h, laid[before], w.out_b, w.ff_norm_w, w.ff_norm_b, w.b1, w.b2, seed, old.z1, old.scale1, old.hidden,
        out, w_new.norm_w, w_new.norm_b, laid[here], rho, g, new.z, new.scale, new.qkv, rows, SITES * before,
        D=d, F=f, BLOCK=min(f, MOST_HIDDEN), SQUARES=_squares(gated), ROWS=program.rows, DROP=drop, MIX=mix,
        PROJECT=project, UTILITY=gated, STAGES=_stages(d, precision), PRECISION=precision, num_warps=program.warps,
    )  # fmt: skip
    return out


def large_products(device: torch.device) -> bool:
    """Whether the GPU has instructions for large matrix products, which need fewer registers. Data centre GPUs of the
    Hopper and Blackwell generations have them; older and workstation GPUs do not."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)


def _program(precision: str, device: torch.device) -> Program:
    """Choose the program size by the available registers: fewer rows if each product takes three, and more warps
    without instructions for large products."""
    return Program(64, 4, 4 if large_products(device) else 8) if precision == "half" else Program(32, 8, 8)


def _stages(d: int, precision: str) -> int:
    """Return how many blocks of weights load at a time: more than one if they are small enough for shared memory."""
    return 2 if precision == "half" and d <= 64 else 1


def _squares(gated: bool) -> int:
    """Return the number of (D, D) matrices in a block: projections, their twins and U if gated, and the output."""
    return 10 if gated else 4


def _laid(weights: Sequence[Weights], precision: str) -> Tensor:
    """Copy all matrices into one buffer (L, 2, ...) in the dtype of the products, for each block as they are and then
    transposed: W, W^u, U as a block-diagonal matrix of the heads, the output, and the feed-forward network.

    Gradients are multiplied with the transposed matrices: tensor cores read along the axis of the sum."""
    w = weights[0]
    (f, d), squares = w.w1.shape, _squares(w.u is not None)
    total = squares * d * d + 2 * d * f
    kind = torch.float16 if precision == "half" else torch.float32
    to = w.out_w.new_empty(len(weights), 2, total, dtype=kind)
    pointers = [(w.project, w.out_w if w.u is None else w.u, w.out_w, w.w1, w.w2) for w in weights]
    cast(Any, _lay)[(shares(total, LAID), len(weights))](
        tuple(tensor for block in pointers for tensor in block), to, total,
        D=d, F=f, E=d if w.u is None else w.u.shape[-1], PROJECT=len(w.project) // d, SQUARES=squares,
        L=len(weights), BLOCK=LAID, PRECISION=precision,
    )  # fmt: skip
    return to


@triton.jit
def _lay(
    weights, to_ptr, TOTAL,
    D: tl.constexpr, F: tl.constexpr, E: tl.constexpr, PROJECT: tl.constexpr, SQUARES: tl.constexpr, L: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    which, r, c = i // (D * D), i % (D * D) // D, i % D
    up = i - SQUARES * D * D
    down = up - F * D
    own = (which >= PROJECT) & (which < SQUARES - 1) & (r // E == c // E)
    at = tl.where(up < 0, which * D * D + c * D + r, SQUARES * D * D + up % D * F + up // D)
    at = tl.where(down < 0, at, SQUARES * D * D + F * D + down % F * D + down // F)
    for layer in tl.static_range(L):
        if tl.program_id(1) == layer:
            w = tl.load(weights[5 * layer] + i, mask=which < PROJECT, other=0.0)
            w += tl.load(weights[5 * layer + 1] + ((which - PROJECT) * D + r) * E + c % E, mask=own, other=0.0)
            w += tl.load(weights[5 * layer + 2] + r * D + c, mask=which == SQUARES - 1, other=0.0)
            w += tl.load(weights[5 * layer + 3] + up, mask=(up >= 0) & (down < 0), other=0.0)
            w += tl.load(weights[5 * layer + 4] + down, mask=(down >= 0) & (i < TOTAL), other=0.0)
            w = rounded(w, PRECISION)
            tl.store(to_ptr + 2 * layer * TOTAL + i, w, mask=i < TOTAL)
            tl.store(to_ptr + (2 * layer + 1) * TOTAL + at, w, mask=i < TOTAL)
