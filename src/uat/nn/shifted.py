"""Cached step of the backbone with separate weights for each stream: the module's weights plus the stream's shift.

A shift of zero gives the module's own step. Gradients flow through the present token; cached keys and values are
constants. Each stream has one token, so the gradient of a matrix is the outer product of the layer's input and the
gradient at its output. Autograd computes only the gradient at the output; no (B, O, I) gradient is ever stored.
Shapes: B streams, R rows of a stream (the token, then its jittered copies), I inputs and O outputs of a layer, D width,
H heads, E head size, S cached steps, P shifted parameters of a stream, counted by number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from uat.nn.attention import attend_to_slots
from uat.nn.blocks import Block, Transformer
from uat.nn.cache import KVCache, Window
from uat.nn.encoders import VectorEncoder
from uat.nn.positions import Rotation


class Layout:
    """Position of each shifted parameter in the flat vector of P numbers of a stream.

    Matrices are stored as (I, O), which makes products with a stream's few rows faster.
    """

    def __init__(self, backbone: Transformer, names: Iterable[str]) -> None:
        self.shapes = {name: tuple(backbone.get_parameter(name).shape[::-1]) for name in names}
        self.sizes = [backbone.get_parameter(name).numel() for name in self.shapes]

    def zeros(self, streams: int, like: Tensor) -> Tensor:
        """Return shifts of zero, (B, P)."""
        return like.new_zeros(streams, sum(self.sizes))

    def views(self, flat_BP: Tensor) -> dict[str, Tensor]:
        """Return the shift of each parameter, (B, D) or (B, I, O), as views of `flat_BP`."""
        parts = flat_BP.split(self.sizes, dim=1)
        return {name: part.unflatten(1, self.shapes[name]) for name, part in zip(self.shapes, parts, strict=True)}


def norm_names(backbone: Transformer) -> list[str]:
    """Names of the scales and offsets of every LayerNorm."""
    norms = {name for name, module in backbone.named_modules() if isinstance(module, nn.LayerNorm)}
    return [name for name, _ in backbone.named_parameters() if name.rpartition(".")[0] in norms]


def layer_names(backbone: Transformer) -> list[str]:
    """Names of all parameters except the tables of positions and items, from which a token reads a single row."""
    return [name for name, _ in backbone.named_parameters() if name not in ("positions", "encoder.weight")]


class Site(NamedTuple):
    """Input and output of a layer in the forward pass: y = W x + b, or y = w ⊙ x + b for a norm."""

    y_BRO: Tensor
    x_BRI: Tensor
    outer: bool
    """True if the weight is a matrix, so that its gradient is an outer product."""


class PresentAttention(torch.autograd.Function):
    """Attention of one row over a cache that already contains the present key and value.

    The forward pass equals the plain step to the last bit. The backward pass gives gradients only to the query and to
    the present key and value; the rest of the cache is constant and is read in place.
    """

    @staticmethod
    def forward(
        ctx: Any, q_BH1E: Tensor, k_BHE: Tensor, v_BHE: Tensor, keys: Tensor, values: Tensor,
        visible_BS: Tensor | None, slot: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(q_BH1E)
        ctx.memory = keys, values, visible_BS, slot  # not saved for backward: later layers write into the same cache
        return attend_to_slots(q_BH1E, keys, values, visible_BS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dh_BH1E,) = outputs
        (q_BH1E,) = ctx.saved_tensors
        keys_BHSE, values_BHSE, visible_BS, slot_B = ctx.memory
        scale = q_BH1E.shape[-1] ** -0.5
        logits_BH1S = q_BH1E @ keys_BHSE.mT * scale
        if visible_BS is not None:
            logits_BH1S = logits_BH1S.masked_fill(~visible_BS[:, None, None], -torch.inf)
        weight_BH1S = logits_BH1S.softmax(-1)
        at_weight = dh_BH1E @ values_BHSE.mT
        at_logit = weight_BH1S * (at_weight - (weight_BH1S * at_weight).sum(-1, keepdim=True)) * scale
        present = slot_B[:, None, None, None].expand(*weight_BH1S.shape[:3], 1)
        own, own_at_logit = weight_BH1S.gather(-1, present)[:, :, 0], at_logit.gather(-1, present)[:, :, 0]
        return at_logit @ keys_BHSE, own_at_logit * q_BH1E[:, :, 0], own * dh_BH1E[:, :, 0], None, None, None, None


class ShiftedStep:
    """One step of every stream. With gradients enabled, records the input and output of each shifted layer."""

    def __init__(self, backbone: Transformer, shifts: Mapping[str, Tensor]) -> None:
        self.backbone, self.shifts = backbone, shifts
        self.sites: dict[str, Site] = {}

    def __call__(self, obs_B: Tensor, position_B: Tensor, cache: KVCache, jitter_BRD: Tensor | None = None) -> Tensor:
        """Return h (B, R, D). The first row, whose jitter is zero, writes to the cache; the other rows only read it.

        jitter: noise to add to the embedded token, in units of the token's root mean square.
        """
        backbone, x_BRD = self.backbone, self._encode(obs_B)
        if backbone.config.positions == "learned":
            table = backbone.positions
            x_BRD = x_BRD + table[position_B.clamp_max(len(table) - 1)].detach()[:, None]
        if jitter_BRD is not None:
            x_BRD = x_BRD + jitter_BRD * x_BRD.square().mean(-1, keepdim=True).sqrt()
        x_BRD = self._norm("norm", backbone.norm, x_BRD)
        window, rotation = cache.window(), backbone.step_rotation(cache)
        for layer, block in enumerate(backbone.blocks):
            assert isinstance(block, Block)
            x_BRD = self._block(layer, block, x_BRD, cache, window, rotation)
        cache.advance()
        return self._norm("last_norm", backbone.last_norm, x_BRD)

    def gradients(self, loss_B: Tensor) -> dict[str, tuple[Tensor, ...]]:
        """Return the gradient of each stream's loss with respect to its own shifts, as the factors of a product.

        Only the first row counts.
        """
        at_outputs = torch.autograd.grad(loss_B.sum(), [site.y_BRO for site in self.sites.values()])
        factors: dict[str, tuple[Tensor, ...]] = {}
        for (name, site), at_output in zip(self.sites.items(), at_outputs, strict=True):
            dy_BO, x_BI = at_output[:, 0], site.x_BRI.detach()[:, 0]
            factors[f"{name}.weight"] = (x_BI[:, :, None], dy_BO[:, None]) if site.outer else (x_BI, dy_BO)
            if f"{name}.bias" in self.shifts:
                factors[f"{name}.bias"] = (dy_BO,)
        return factors

    def _encode(self, obs_B: Tensor) -> Tensor:
        encoder = self.backbone.encoder
        if isinstance(encoder, VectorEncoder):
            return self._linear("encoder.linear", encoder.flat(obs_B)[:, None], encoder.linear)
        return encoder(obs_B).detach()[:, None]

    def _block(
        self, layer: int, block: Block, x_BRD: Tensor, cache: KVCache, window: Window, rotation: Rotation | None
    ) -> Tensor:
        name = f"blocks.{layer}"
        normed = self._norm(f"{name}.attention_norm", block.attention_norm, x_BRD)
        x_BRD = x_BRD + self._attend(layer, block, normed, cache, window, rotation)
        hidden = self._linear(f"{name}.ff.0", self._norm(f"{name}.ff_norm", block.ff_norm, x_BRD), block.ff[0])
        return x_BRD + self._linear(f"{name}.ff.2", hidden.relu(), block.ff[2])

    def _attend(
        self, layer: int, block: Block, x_BRD: Tensor, cache: KVCache, window: Window, rotation: Rotation | None
    ) -> Tensor:
        name, attention = f"blocks.{layer}.attention", block.attention
        qkv = self._linear(f"{name}.project", x_BRD, attention.project)
        q, k, v = (y.unflatten(-1, (attention.num_heads, -1)) for y in qkv.chunk(3, dim=-1))  # (B, R, H, E)
        if rotation is not None:
            each_row = Rotation(rotation.cos[:, None], rotation.sin[:, None])
            q, k = each_row.turn(q), each_row.turn(k)
        keys_BHSE, values_BHSE = cache.write(layer, k[:, 0].detach(), v[:, 0].detach(), window)
        q_BHRE, memory = q.transpose(1, 2), (keys_BHSE, values_BHSE, window.visible_BS)
        if torch.is_grad_enabled():
            slot_B = cache.slot().clone()  # a copy for backward, since the cache advances in place
            h_BHRE = PresentAttention.apply(q_BHRE, k[:, 0], v[:, 0], *memory, slot_B)
        else:
            h_BHRE = attend_to_slots(q_BHRE, *memory)
        return self._linear(f"{name}.out", h_BHRE.transpose(1, 2).flatten(-2), attention.out)

    def _norm(self, name: str, norm: nn.LayerNorm, x_BRD: Tensor) -> Tensor:
        shape = norm.normalized_shape
        y_BRD = F.layer_norm(x_BRD, shape, norm.weight.detach(), norm.bias.detach(), norm.eps)
        if f"{name}.weight" not in self.shifts:
            return y_BRD
        unit_BRD = F.layer_norm(x_BRD, shape, eps=norm.eps)
        scale_B1D, offset_B1D = (self.shifts[f"{name}.{part}"][:, None] for part in ("weight", "bias"))
        return self._pass(name, Site(y_BRD + unit_BRD * scale_B1D + offset_B1D, unit_BRD, outer=False))

    def _linear(self, name: str, x_BRI: Tensor, layer: nn.Module) -> Tensor:
        weight, bias = layer.get_parameter("weight"), getattr(layer, "bias", None)
        flat = x_BRI.flatten(0, 1)  # the same product as in the module's own step, to the last bit
        y_BRO = F.linear(flat, weight.detach(), None if bias is None else bias.detach()).unflatten(0, x_BRI.shape[:2])
        if f"{name}.weight" not in self.shifts:
            return y_BRO
        y_BRO = torch.baddbmm(y_BRO, x_BRI, self.shifts[f"{name}.weight"])
        if bias is not None:
            y_BRO = y_BRO + self.shifts[f"{name}.bias"][:, None]
        return self._pass(name, Site(y_BRO, x_BRI, outer=True))

    def _pass(self, name: str, site: Site) -> Tensor:
        if torch.is_grad_enabled():
            if not site.y_BRO.requires_grad:  # the first shifted layer: no layer before it needs a gradient
                site.y_BRO.requires_grad_()
            self.sites[name] = site
        return site.y_BRO
