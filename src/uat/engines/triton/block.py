"""All Transformer blocks forwards and backwards in a few launches (Triton).

The slow twin is `Block.forward`, block after block; tests hold outputs and all gradients equal. Forwards there are two
kernels, beside `_lay`, which copies the weights: attention (`attend.py`), and all that is done to each row on
its own from one attention to the next (`rows.py`).

Backwards each has a twin that gives the gradients of what came in, row by row. Gradients of weights are sums over all
rows, and come last (`weights.py`). All is added up in a fixed order: a step repeated gives the same bits.

Where products are of half precision, so is what is kept for the way back, and gradients on their way; these are
`enlarged` meanwhile. The residual stream, its gradient and all sums stay float32.

Dropout draws from (seed, place): the seed lies on the device, and whoever trains changes it before each step.

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
"""Numbers that a program copies when matrices are laid side by side."""
SITES = 3
"""Places in a block that drop: attention, its output, the feed-forward network's output."""
MOST_HIDDEN = 64
"""Hidden units that a program treats at a time."""


class Weights(NamedTuple):
    """Of one block."""

    norm_w: Tensor
    norm_b: Tensor
    project: Tensor
    """W, and with gates W^u."""
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
    """Rows that a program of `rows_forward` serves, and its warps on the way forwards and back."""

    rows: int
    warps: int
    warps_back: int


class Kept(NamedTuple):
    """What the way back of the blocks needs, (L, N, ...)."""

    z: Tensor
    """Rows of the first norm before scale and bias, and what they were multiplied with; z1: of the second."""
    scale: Tensor
    qkv: Tensor
    h: Tensor
    z1: Tensor
    scale1: Tensor
    hidden: Tensor

    @classmethod
    def room(cls, x: Tensor, narrow: Tensor, blocks: int, f: int) -> Kept:
        """For what comes of x (N, D); `narrow`: a tensor of the type in which most is kept."""
        rows, d = x.shape
        z, qkv, h, z1, hidden = (narrow.new_empty(blocks, rows, width) for width in (d, 3 * d, d, d, f))
        scale, scale1 = x.new_empty(2, blocks, rows)
        return cls(z, scale, qkv, h, z1, scale1, hidden)

    def block(self, index: int) -> Kept:
        """(N, ...)"""
        return Kept(*(tensor[index] for tensor in self))


def fused_blocks(
    blocks: Sequence[Block], x_ND: Tensor, gates: Tensor | None, shape: tuple[int, int], seed: Tensor, peak: Tensor
) -> Tensor:
    """What the blocks make of x (B * T, D). shape: (B, T).

    gates: rho and the g of each block, (1 + L, B * T, D), or None. In half precision they come from `fused_gates`,
    which takes their gradient enlarged.
    peak: the largest gradient of what the last block gives, written before the way back comes here."""
    first = blocks[0].attention
    drop = first.dropout if blocks[0].training else 0.0
    weights = [weight for block in blocks for weight in _weights(block, gated=gates is not None)]
    return cast(Tensor, FusedBlocks.apply(x_ND, gates, seed, peak, shape, first.num_heads, drop, *weights))


def _weights(block: Block, *, gated: bool) -> Weights:
    """Without gates those of the plain projections alone."""
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
        dx1 = dx  # not read where there is no block above
        for above in reversed(range(count + 1)):  # from the attention of the block above to that of the one below
            below, here, there = above - 1, min(above, count - 1), max(above - 1, 0)
            up, low = kept.block(here), kept.block(there)
            dh, to_x, to_x1 = torch.empty_like(low.z), torch.empty_like(dx), torch.empty_like(dx)
            told = (
                (dx,) * 4
                if gates is None or dgates is None
                else (gates[0], gates[1 + here], dgates[0], dgates[1 + here])
            )
            cast(Any, rows_backward)[(programs,)](
                dx, dqkv[here], up.z, up.scale, dx1, norms[here].w, norms[here].b, laid[here], *told,
                low.z1, low.scale1, low.hidden, norms[there].ff_w, laid[there], seed, peak,
                e2[there], dhidden[there], to_x1, e1[there], dh, to_x, rows, SITES * below,
                D=d, F=f, BLOCK=min(f, MOST_HIDDEN), SQUARES=_squares(gated), ROWS=program.rows, DROP=ctx.drop,
                MIX=below >= 0, PROJECT=above < count, UTILITY=gated, TOP=gated and above == count - 1,
                ENLARGED=told[0].dtype == torch.float16, STAGES=_stages(d, precision), PRECISION=precision,
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
    """Of one block's weights, in their order, from what was added up; `of`: their shapes."""
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
    """From the attention of the block before `layer` to that of this one, where there are such; what the way back needs
    goes to `kept`. What the block before gives."""
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
    """Whether the GPU has instructions for large matrix products, which need fewer registers: Hopper and Blackwell for
    data centres do, older ones and those for workstations do not."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)


def _program(precision: str, device: torch.device) -> Program:
    """Fewer rows where each product is three, and more warps where instructions for large ones are missing: else there
    are too few registers."""
    return Program(64, 4, 4 if large_products(device) else 8) if precision == "half" else Program(32, 8, 8)


def _stages(d: int, precision: str) -> int:
    """Blocks of weights under way at a time: more than one where they are small enough for shared memory."""
    return 2 if precision == "half" and d <= 64 else 1


def _squares(gated: bool) -> int:
    """Matrices of (D, D) in a block: those of projections, with feedback their twins and U, and the output's."""
    return 10 if gated else 4


def _laid(weights: Sequence[Weights], precision: str) -> Tensor:
    """All matrices side by side in the type that products take: for each block as they are and then transposed, W, W^u,
    U with the heads' matrices along the diagonal, the output's, those of the feed-forward network. (L, 2, ...)

    Gradients are multiplied with the transposed ones: products on tensor cores read along what they sum over."""
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
