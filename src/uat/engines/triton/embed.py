"""Embedding of observations, LN(W o + b + p), forward and backward (Triton).

The slow twin is `Transformer.embed`; tests check that outputs and gradients are equal. Only the observations are
stored: the backward pass recomputes the rest. Each of its programs processes the same steps of several episodes, so its
sums per step are the gradient of the positions, and their sum over steps is the gradient of the bias.

Shapes: N rows (B episodes of T steps), D width, O width of an observation, P positions.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from uat.engines.triton.complete_weights import room
from uat.engines.triton.outer import added
from uat.engines.triton.parts import (
    norm_rows,
    read,
    shares,
    standardised,
    through_norm,
    times_loaded,
    times_some,
    write,
)
from uat.engines.triton.step import products
from uat.episode import Batch
from uat.nn.blocks import Transformer
from uat.nn.encoders import VectorEncoder

ROWS = 32
"""Rows, or steps of an episode, that a program processes at a time."""
PROGRAMS = 256
"""Approximate number of programs of the backward pass: two per multiprocessor of the largest GPUs."""
WIDEST, PIECE = 128, 32
"""Largest width of an observation, and entries per product: more would need too many registers."""


def embeds(backbone: Transformer, batch: Batch) -> bool:
    """Whether `fused_embed` supports this batch: vectors that are not too wide and need no gradient, and episodes that
    start at the first position."""
    encoder = backbone.encoder
    if not isinstance(encoder, VectorEncoder) or batch.start is not None or batch.obs.requires_grad:
        return False
    return encoder.linear.in_features <= WIDEST


def fused_embed(backbone: Transformer, batch: Batch) -> Tensor:
    """Return the embedding (N, D), like `Transformer.embed`."""
    encoder, norm, steps = cast(VectorEncoder, backbone.encoder), backbone.norm, batch.obs.shape[1]
    places = backbone.positions
    if not steps <= len(places) <= shares(steps, ROWS) * ROWS:  # too short, or longer than programs write
        places = backbone.placed(steps)
    obs_BTO = batch.obs.flatten(2).float().contiguous()
    weights = (encoder.linear.weight, encoder.linear.bias, places, norm.weight, norm.bias)
    return cast(Tensor, FusedEmbed.apply(obs_BTO, *weights))


class FusedEmbed(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, obs: Tensor, weight: Tensor, bias: Tensor, places: Tensor, scale: Tensor, shift: Tensor
    ) -> Tensor:
        (episodes, steps, wide), d, places = obs.shape, len(weight), places.contiguous()
        x, rows = torch.empty(episodes * steps, d, device=obs.device), episodes * steps
        ctx.sizes = _sizes(d, wide, products())
        cast(Any, _embed)[(shares(rows, ROWS),)](obs, weight, bias, places, scale, shift, x, rows, steps, **ctx.sizes)
        ctx.save_for_backward(obs, weight, bias, places, scale)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        obs, weight, bias, places, scale = ctx.saved_tensors
        (episodes, steps, _), d, device = obs.shape, len(weight), obs.device
        spans = shares(steps, ROWS)
        turns = shares(episodes * spans, PROGRAMS)
        groups, counts = shares(episodes, turns), (weight.numel(), d, d, d)
        parts = torch.empty(groups * spans, sum(counts), device=device)
        by_place = torch.empty(groups, places.numel(), device=device)
        cast(Any, _embed_backward)[(groups, spans, ctx.sizes["PIECES"])](
            obs, weight, bias, places, scale, dx.contiguous(), parts, by_place, episodes, steps, len(places),
            TURNS=turns, **ctx.sizes,
        )  # fmt: skip
        summed, dplaces = added(parts, by_place)
        dweight, dbias, dscale, dshift = summed.split(counts)
        return None, dweight.view_as(weight), dbias, dplaces.view_as(places), dscale, dshift


def _sizes(d: int, wide: int, precision: str) -> dict[str, Any]:
    piece = min(PIECE, room(wide))
    sizes = {"D": d, "WIDE": wide, "PIECE": piece, "PIECES": shares(wide, piece), "ROWS": ROWS}
    return {**sizes, "PRECISION": precision, "num_warps": 4 if d * piece <= 64 * 16 else 8}


@triton.jit
def _mapped(
    obs_ptr, w_ptr, n, live, d, WIDE: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Compute W o for rows n."""
    out = tl.zeros((n.shape[0], d.shape[0]), tl.float32)
    for piece in tl.range(0, PIECES):
        i = piece * PIECE + tl.arange(0, PIECE)
        out += times_some(_piece(obs_ptr, n, live, i, WIDE), w_ptr, d, i, WIDE, PRECISION)
    return out


@triton.jit
def _piece(obs_ptr, n, live, i, WIDE: tl.constexpr):
    """Load entries i of the observations of rows n."""
    return read(obs_ptr + n[:, None] * WIDE + i[None, :], live & (i < WIDE)[None, :])


@triton.jit
def _embed(
    obs_ptr, w_ptr, b_ptr, place_ptr, gamma_ptr, beta_ptr, x_ptr, N, T,
    D: tl.constexpr, WIDE: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    n, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    live = (n < N)[:, None]
    x = tl.load(place_ptr + (n % T)[:, None] * D + d[None, :]) + tl.load(b_ptr + d)[None, :]
    x += _mapped(obs_ptr, w_ptr, n, live, d, WIDE, PIECE, PIECES, PRECISION)
    write(x_ptr + n[:, None] * D + d[None, :], norm_rows(x, gamma_ptr, beta_ptr, d, D), live)


@triton.jit
def _embed_backward(
    obs_ptr, w_ptr, b_ptr, place_ptr, gamma_ptr, dx_ptr, parts_ptr, by_place_ptr, B, T, P,
    D: tl.constexpr, WIDE: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr,
    TURNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute gradients of some columns of W over some steps of some episodes. The first programs also compute those of
    b, of scale and shift of the norm, and of the positions."""
    group, span = tl.program_id(0), tl.program_id(1)
    t, d, i = span * ROWS + tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, PIECE)
    if PIECES > 1:
        i += tl.program_id(2) * PIECE
    gamma = tl.load(gamma_ptr + d)
    at, there = t[:, None] * D + d[None, :], (t < P)[:, None]
    place = tl.load(place_ptr + at, mask=there, other=0.0) + tl.load(b_ptr + d)[None, :]
    dw = tl.zeros((PIECE, D), tl.float32)
    dplace = tl.zeros((ROWS, D), tl.float32)
    dgamma = tl.zeros((ROWS, D), tl.float32)
    dbeta = tl.zeros((ROWS, D), tl.float32)
    for turn in tl.range(0, TURNS):
        episode = group * TURNS + turn
        n, live = episode * T + t, ((t < T) & (episode < B))[:, None]
        dx = read(dx_ptr + n[:, None] * D + d[None, :], live)
        z, scale = standardised(_mapped(obs_ptr, w_ptr, n, live, d, WIDE, PIECE, PIECES, PRECISION) + place, D)
        dgamma += dx * z
        dbeta += dx
        dz = through_norm(dx, z, scale, gamma, D)
        dplace += dz
        dw += times_loaded(tl.trans(_piece(obs_ptr, n, live, i, WIDE)), dz, PRECISION)
    parts_ptr += (group * tl.num_programs(1) + span) * (WIDE + 3) * D
    write(parts_ptr + d[None, :] * WIDE + i[:, None], dw, (i < WIDE)[:, None])
    if tl.program_id(2) == 0:
        write(by_place_ptr + group * P * D + at, dplace, there)
        parts_ptr += WIDE * D
        tl.store(parts_ptr + d, tl.sum(dplace, 0))
        tl.store(parts_ptr + D + d, tl.sum(dgamma, 0))
        tl.store(parts_ptr + 2 * D + d, tl.sum(dbeta, 0))
