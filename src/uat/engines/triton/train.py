"""The fused training pass over whole episodes: kernels of gates, blocks, and the maps around them (Triton)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from uat.engines.triton.attend import LONGEST
from uat.engines.triton.block import fused_blocks, large_products
from uat.engines.triton.embed import embeds, fused_embed
from uat.engines.triton.ends import fused_linear, fused_norm
from uat.engines.triton.gates import fused_gates, gates_fit
from uat.episode import Batch
from uat.nn.blocks import Block, Transformer
from uat.nn.encoders import VectorEncoder
from uat.nn.utility import UtilityGates


def unsupported_reason(backbone: Transformer, steps: int) -> str | None:
    """Return why the pass cannot be fused although the step can; None if it can."""
    c = backbone.config
    if c.d_model // c.num_heads < 16:
        return f"it takes heads of at least 16, and d_model / num_heads is {c.d_model // c.num_heads}"
    widest = 128 if large_products(backbone.positions.device) else 64
    if c.d_model > widest or c.d_ff > 256 or c.d_model * c.d_ff > 128 * 128:
        return (
            f"on this device it takes d_model to {widest}, d_ff to 256 and their product to {128 * 128:,}, "
            f"and they are {c.d_model} and {c.d_ff}"
        )
    return f"it takes episodes of at most {LONGEST} steps, not {steps}" if steps > LONGEST else None


def fused_features(backbone: Transformer, utility: UtilityGates | None, batch: Batch, seed: Tensor) -> Tensor:
    """Return h (B, T, D), like the slow twin (`Policy.features`). seed: of dropout."""
    x_ND = _embed(backbone, batch)
    peak = x_ND.new_empty(1)
    gates = None if utility is None else _gates(utility, batch, peak)
    return _attend(backbone, x_ND, batch.obs.shape[:2], gates, seed, peak)


def fused_attend(backbone: Transformer, x_BTD: Tensor, seed: Tensor) -> Tensor:
    """Return h (B, T, D) of tokens whose embeddings include positions, like `Transformer.attend`."""
    x_ND = x_BTD.float().flatten(0, 1).contiguous()
    return _attend(backbone, x_ND, x_BTD.shape[:2], None, seed, x_ND.new_empty(1))


def _attend(
    backbone: Transformer, x_ND: Tensor, shape: torch.Size, gates: Tensor | None, seed: Tensor, peak: Tensor
) -> Tensor:
    """Apply all blocks and the last norm, whose backward pass writes the largest gradient to `peak`."""
    blocks = [cast(Block, block) for block in backbone.blocks]
    x_ND = fused_blocks(blocks, x_ND, gates, (shape[0], shape[1]), seed, peak)
    return fused_norm(backbone.last_norm, x_ND, peak).view(*shape, -1)


def _embed(backbone: Transformer, batch: Batch) -> Tensor:
    """Return LN(W^E o + p), by rows."""
    if embeds(backbone, batch):
        return fused_embed(backbone, batch)
    encoder, p = backbone.encoder, backbone.placed(batch.obs.shape[1], batch.start)
    if isinstance(encoder, VectorEncoder):
        rows = batch.obs.flatten(0, 1).flatten(1).float()
        e_BTD = fused_linear(encoder.linear, rows).view(*batch.obs.shape[:2], -1)
    else:
        e_BTD = encoder(batch.obs)
    return fused_norm(backbone.norm, (e_BTD + p).flatten(0, 1))


def _gates(utility: UtilityGates, batch: Batch, peak: Tensor) -> Tensor:
    """Return rho and the gates of all layers (1 + L, B * T, D)."""
    if gates_fit(utility, batch.prev_action, LONGEST):
        return fused_gates(utility, batch.prev_action, batch.prev_reward, peak)
    gates = utility(batch.prev_action, batch.prev_reward)
    return torch.stack([gate.float().flatten(0, 1) for gate in (gates.rho, *gates.g)])
