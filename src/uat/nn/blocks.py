"""The Transformer block and the stack of them that Vanilla and UAT share.

Shapes: B batch, T time, D width, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from uat.engines import kernels
from uat.nn.attention import Attention
from uat.nn.cache import KVCache, Window
from uat.nn.encoders import build_observation_encoder
from uat.nn.utility import Channels, Gates, UtilityGates
from uat.settings import Decay, Layers, Steps, Width, check_fields
from uat.spec import Spec


@dataclass(frozen=True, kw_only=True, slots=True)
class BackboneConfig:
    """What every Transformer has, whatever its positions are."""

    d_model: Width = 64
    """Width of the residual stream."""
    num_heads: Width = 4
    """Attention heads; must divide d_model."""
    num_layers: Layers = 3
    """Transformer blocks."""
    d_ff: Width = 128
    """Hidden width of each feed-forward network."""
    dropout: Decay = 0.05
    """Share of attention weights and residual updates dropped in training."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.d_model % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads} must divide d_model={self.d_model}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerConfig(BackboneConfig):
    max_positions: Steps | None = None
    """Rows of the learned position table; unset: the horizon + 1."""
    past_table: Literal["refuse", "clamp"] = "refuse"
    """What a longer episode meets: an error, or the table's last row again and again."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What a forward pass looked at."""

    attention_LBHTT: Tensor
    gates: Gates | None
    input_LBTD: Tensor | None = None
    """What each layer's attention projects; None where attention is of another kind."""


class FeedForward(nn.Sequential):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))


class Block(nn.Module):
    """Pre-norm: attention, residual, feed-forward, residual."""

    def __init__(self, config: TransformerConfig, *, utility: Channels | bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.attention = Attention(config.d_model, config.num_heads, dropout=config.dropout, utility=utility)
        self.ff_norm = nn.LayerNorm(config.d_model)
        self.ff = FeedForward(config.d_model, config.d_ff)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, rho_BTD: Tensor | None, g_BTD: Tensor | None) -> Tensor:
        x_BTD = x_BTD + self.drop(self.attention(self.attention_norm(x_BTD), rho_BTD, g_BTD))
        return x_BTD + self.drop(self.ff(self.ff_norm(x_BTD)))

    def step(
        self, x_BD: Tensor, rho_BD: Tensor | None, g_BD: Tensor | None, cache: KVCache, layer: int, window: Window
    ) -> Tensor:
        x_BD = x_BD + self.attention.step(self.attention_norm(x_BD), rho_BD, g_BD, cache, layer, window)
        return x_BD + self.ff(self.ff_norm(x_BD))


class Transformer(nn.Module):
    """x = LN(W^E o + p), L blocks, a last LN. Feedback enters through the gates, or not at all.

    `encoder`, `place` and the blocks (`attend`, `attend_step`) are apart, for methods that make other tokens.
    """

    def __init__(self, spec: Spec, config: TransformerConfig, *, utility: Channels | bool) -> None:
        super().__init__()
        self.config = config
        self.encoder = build_observation_encoder(spec, config.d_model)
        self.positions = nn.Parameter(torch.empty(config.max_positions or spec.horizon + 1, config.d_model))
        nn.init.normal_(self.positions, std=0.02)
        self.norm = nn.LayerNorm(config.d_model)
        self.blocks = nn.ModuleList(Block(config, utility=utility) for _ in range(config.num_layers))
        self.last_norm = nn.LayerNorm(config.d_model)
        self.register_buffer("dropout_seed", torch.zeros((), dtype=torch.long), persistent=False)
        """Decides what the fused pass drops; the slow one asks torch's generator."""

    dropout_seed: Tensor
    fused: bool = False
    """Whether a step takes the fused path; its memory must have been opened after this was set."""
    beside: int = 1
    """How many policies act on the device at a time; the fused step takes its share of the programs."""
    fused_pass: bool = False
    """Whether a pass over episodes takes the fused path in training."""

    def forward(self, obs_BT: Tensor, gates: Gates | None = None, start_B: Tensor | None = None) -> Tensor:
        """All steps at once: h (B, T, D)."""
        return self.attend(self.embed(obs_BT, start_B), gates)

    def step(self, obs_B: Tensor, first_B: Tensor, cache: KVCache, gates: Gates | None = None) -> Tensor:
        """One step of every stream: h (B, D). The cache moves on."""
        cache.restart(first_B)
        return self.attend_step(self.place(self.encoder(obs_B), cache.length_B), cache, gates)

    def trace(self, obs_BT: Tensor, gates: Gates | None = None, start_B: Tensor | None = None) -> Trace:
        """The forward pass again, for looking at."""
        return self.trace_tokens(self.embed(obs_BT, start_B), gates)

    # ------------------------------------------------------------ tokens

    def embed(self, obs_BT: Tensor, start_B: Tensor | None = None) -> Tensor:
        return self.norm(self.encoder(obs_BT) + self.placed(obs_BT.shape[1], start_B))

    def placed(self, steps: int, start_B: Tensor | None = None) -> Tensor:
        """Rows of the position table for so many steps: (T, D), or (B, T, D) if each episode has its own start."""
        table = self.positions.shape[0]
        position = self.window(steps, start_B)
        return (
            self.positions[:steps]
            if start_B is None and steps <= table
            else self.positions[position.clamp_max(table - 1)]
        )

    def place(self, x: Tensor, position: Tensor) -> Tensor:
        """LN(x + p); past the table its last row serves."""
        return self.norm(x + self.positions[position.clamp_max(self.positions.shape[0] - 1)])

    def window(self, steps: int, start_B: Tensor | None = None) -> Tensor:
        """Positions of so many steps: (T,), or (B, T) if each episode has its own start."""
        self.check_range(steps)
        t = torch.arange(steps, device=self.positions.device)
        return t if start_B is None else start_B[:, None] + t

    def check_range(self, steps: int) -> None:
        """Refuse what is longer than the position table, unless its last row is to serve again and again."""
        table = self.positions.shape[0]
        if steps > table and self.config.past_table == "refuse":
            raise ValueError(
                f"{steps} steps do not fit the position table of {table}: "
                "set max_positions when training, or past_table='clamp'"
            )

    # ------------------------------------------------------------ blocks

    def attend(self, x_BTD: Tensor, gates: Gates | None = None) -> Tensor:
        """Tokens through all blocks: h (B, T, D)."""
        if self.fused_pass and self.training and gates is None:
            return kernels.fused_attend(self, x_BTD)
        for block, rho_BTD, g_BTD in self._layers(gates):
            x_BTD = block(x_BTD, rho_BTD, g_BTD)
        return self.last_norm(x_BTD)

    def attend_step(self, x_BD: Tensor, cache: KVCache, gates: Gates | None = None) -> Tensor:
        """One token of every stream through all blocks: h (B, D). The cache moves on by one slot."""
        if self.fused and cache.packed is not None and gates is None:
            return kernels.fused_token(self, x_BD, cache)
        window = cache.window()
        for layer, (block, rho_BD, g_BD) in enumerate(self._layers(gates)):
            x_BD = block.step(x_BD, rho_BD, g_BD, cache, layer, window)
        cache.advance()
        return self.last_norm(x_BD)

    def trace_tokens(self, x_BTD: Tensor, gates: Gates | None = None) -> Trace:
        inputs, maps = [], []
        for block, rho_BTD, g_BTD in self._layers(gates):
            inputs.append(block.attention_norm(x_BTD))
            maps.append(block.attention.weights(inputs[-1], rho_BTD, g_BTD))
            x_BTD = block(x_BTD, rho_BTD, g_BTD)
        return Trace(attention_LBHTT=torch.stack(maps), gates=gates, input_LBTD=torch.stack(inputs))

    def split_logits(self, seen: Trace) -> tuple[Tensor, Tensor]:
        """What observations and what feedback contribute to the logits of a trace: two (L, B, H, T, T)."""
        assert seen.input_LBTD is not None
        parts = [
            block.attention.logit_split(x_BTD, rho_BTD, g_BTD)
            for (block, rho_BTD, g_BTD), x_BTD in zip(self._layers(seen.gates), seen.input_LBTD, strict=True)
        ]
        return torch.stack([base for base, _ in parts]), torch.stack([modulation for _, modulation in parts])

    def init_cache(
        self,
        streams: int,
        capacity: int,
        *,
        tokens_per_step: int = 1,
        utility: UtilityGates | None = None,
        may_fuse: bool = True,
    ) -> KVCache:
        """Room for so many steps in every stream, and the weights of now where the step is fused, if it may."""
        self.check_range(capacity)
        c = self.config
        packed = kernels.pack(self, utility) if self.fused and may_fuse else None
        cache = KVCache.empty(
            layers=c.num_layers,
            streams=streams,
            heads=c.num_heads,
            capacity=capacity * tokens_per_step,
            d_head=c.d_model // c.num_heads,
            like=self.positions if packed is None else packed.matrices,
        )
        cache.packed = packed
        return cache

    def _layers(self, gates: Gates | None) -> Iterator[tuple[Block, Tensor | None, Tensor | None]]:
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            yield (block, None, None) if gates is None else (block, gates.rho, gates.g[layer])
