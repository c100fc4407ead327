"""The Transformer block, and the backbone that Vanilla and UAT share.

Shapes: B batch, T time, D width, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from uat.nn.attention import CAUSAL, Attention, Geometry
from uat.nn.cache import KVCache, RollingCache, Window
from uat.nn.encoders import build_observation_encoder
from uat.nn.positions import PositionKind, Rotary, Rotation
from uat.nn.utility import Channels, Gates, LateGate
from uat.settings import Decay, Layers, Steps, Width, check_fields
from uat.spec import Spec


@dataclass(frozen=True, kw_only=True, slots=True)
class BackboneConfig:
    """Sizes and dropout of a Transformer, whatever its positions are."""

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
    positions: PositionKind = "learned"
    """Encoding of positions: a learned table (as in the paper), rotary angles (which encode distances and have no last
    position), or none."""
    context: Steps | None = None
    """Steps that each step attends to in every layer, itself included; unset: all steps of the episode so far."""
    max_positions: Steps | None = None
    """Rows of the learned position table; unset: the horizon + 1."""
    past_table: Literal["refuse", "clamp"] = "refuse"
    """Behaviour past the last learned position: refuse, or reuse the last row."""

    def __post_init__(self) -> None:
        BackboneConfig.__post_init__(self)
        if self.positions != "learned" and self.max_positions is not None:
            raise ValueError(
                f"max_positions={self.max_positions} is the size of a table of learned positions, and "
                f"positions={self.positions!r} has none: leave it unset"
            )
        if self.positions != "learned" and self.past_table != "refuse":
            raise ValueError(
                f"past_table={self.past_table!r} is about a table of learned positions, and "
                f"positions={self.positions!r} has none: leave it unset"
            )
        if self.positions == "rotary" and (d_head := self.d_model // self.num_heads) % 2:
            raise ValueError(
                f"positions='rotary' rotates pairs of numbers, and a head of d_model={self.d_model} with "
                f"num_heads={self.num_heads} has {d_head}: choose sizes whose quotient is even"
            )


@dataclass(frozen=True, slots=True)
class Trace:
    """Attention and gates of a forward pass, for inspection."""

    attention_LBHTT: Tensor
    gates: Gates | None
    input_LBTD: Tensor | None = None
    """Input of each layer's attention; None for other kinds of attention."""


def _table_rows(spec: Spec, config: TransformerConfig) -> int:
    """Rows of the table of learned positions."""
    if config.max_positions is not None:
        return config.max_positions
    if spec.horizon is None:
        raise ValueError(
            "positions='learned' need a table of some length, and the problem has no horizon: set max_positions, or "
            "positions='rotary' (or 'none') and a context of remembered steps"
        )
    return spec.horizon + 1


class FeedForward(nn.Sequential):
    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))


class Block(nn.Module):
    """Pre-norm block: attention, residual sum, feed-forward network, residual sum."""

    def __init__(self, config: TransformerConfig, *, utility: Channels | bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.attention = Attention(config.d_model, config.num_heads, dropout=config.dropout, utility=utility)
        self.ff_norm = nn.LayerNorm(config.d_model)
        self.ff = FeedForward(config.d_model, config.d_ff)
        self.drop = nn.Dropout(config.dropout)

    def forward(
        self, x_BTD: Tensor, rho_BTD: Tensor | None, g_BTD: Tensor | LateGate | None, geometry: Geometry = CAUSAL
    ) -> Tensor:
        x_BTD = x_BTD + self.drop(self.attention(self.attention_norm(x_BTD), rho_BTD, g_BTD, geometry))
        return x_BTD + self.drop(self.ff(self.ff_norm(x_BTD)))

    def step(
        self,
        x_BD: Tensor,
        rho_BD: Tensor | None,
        g_BD: Tensor | None,
        cache: KVCache,
        layer: int,
        window: Window,
        rotation: Rotation | None = None,
        inputs: list[Tensor] | None = None,
    ) -> Tensor:
        """Return the block's output for one token; its attention's input is appended to `inputs`, if given."""
        normed_BD = self.attention_norm(x_BD)
        if inputs is not None:
            inputs.append(normed_BD)
        x_BD = x_BD + self.attention.step(normed_BD, rho_BD, g_BD, cache, layer, window, rotation)
        return x_BD + self.ff(self.ff_norm(x_BD))


class Transformer(nn.Module):
    """x = LN(W^E o + p), L blocks and a last LN. Feedback enters only through the gates.

    `encoder`, `place` and the blocks (`attend`, `attend_step`) can be called separately, by methods with other tokens.
    If a step is several tokens, all of them have the step's position.
    """

    positions: nn.Parameter
    """Position table (S, D); exists only if positions are learned."""

    def __init__(
        self, spec: Spec, config: TransformerConfig, *, utility: Channels | bool, tokens_per_step: int = 1
    ) -> None:
        super().__init__()
        self.config, self.tokens_per_step = config, tokens_per_step
        self.encoder = build_observation_encoder(spec, config.d_model)
        if config.positions == "learned":
            self.positions = nn.Parameter(torch.empty(_table_rows(spec, config), config.d_model))
            nn.init.normal_(self.positions, std=0.02)
        self.rotary = Rotary(config.d_model // config.num_heads) if config.positions == "rotary" else None
        self.norm = nn.LayerNorm(config.d_model)
        self.blocks = nn.ModuleList(Block(config, utility=utility) for _ in range(config.num_layers))
        self.last_norm = nn.LayerNorm(config.d_model)

    def forward(self, obs_BT: Tensor, gates: Gates | None = None, start_B: Tensor | None = None) -> Tensor:
        """Return h (B, T, D) for all steps at once."""
        return self.attend(self.embed(obs_BT, start_B), gates, start_B)

    def step(self, obs_B: Tensor, first_B: Tensor, cache: KVCache, gates: Gates | None = None) -> Tensor:
        """Return h (B, D) for one step of every stream; the cache advances."""
        cache.restart(first_B)
        return self.attend_step(self.place(self.encoder(obs_B), cache.length_B), cache, gates)

    def trace(self, obs_BT: Tensor, gates: Gates | None = None, start_B: Tensor | None = None) -> Trace:
        """Run the forward pass and return its attention maps and gates."""
        return self.trace_tokens(self.embed(obs_BT, start_B), gates, start_B)

    # ------------------------------------------------------------ tokens

    def embed(self, obs_BT: Tensor, start_B: Tensor | None = None) -> Tensor:
        if self.config.positions != "learned":
            return self.norm(self.encoder(obs_BT))
        return self.norm(self.encoder(obs_BT) + self.placed(obs_BT.shape[1], start_B))

    def placed(self, steps: int, start_B: Tensor | None = None) -> Tensor:
        """Rows of the position table for `steps` steps: (T, D), or (B, T, D) if each episode has its own start."""
        table = self.positions.shape[0]
        position = self.step_positions(steps, start_B)
        return (
            self.positions[:steps]
            if start_B is None and steps <= table
            else self.positions[position.clamp_max(table - 1)]
        )

    def place(self, x: Tensor, position: Tensor) -> Tensor:
        """Return LN(x + p), or LN(x) if positions are not learned. Past the end of the table, p is its last row."""
        if self.config.positions != "learned":
            return self.norm(x)
        return self.norm(x + self.positions[position.clamp_max(self.positions.shape[0] - 1)])

    def step_positions(self, steps: int, start_B: Tensor | None = None) -> Tensor:
        """Positions of `steps` steps: (T,), or (B, T) if each episode has its own start."""
        self.check_range(steps)
        return self._count(steps, start_B)

    def check_range(self, steps: int) -> None:
        """Refuse episodes longer than the table of learned positions, unless past_table is 'clamp'."""
        if self.config.positions != "learned" or self.config.past_table == "clamp":
            return
        if steps > (table := self.positions.shape[0]):
            raise ValueError(
                f"{steps} steps do not fit the position table of {table}: "
                "set max_positions when training, or past_table='clamp'"
            )

    def _count(self, steps: int, start_B: Tensor | None) -> Tensor:
        t = torch.arange(steps, device=self.like.device)
        return t if start_B is None else start_B[:, None] + t

    @property
    def endless(self) -> bool:
        """Whether streams may be endless: the memory is a window, and every position is defined."""
        return self.config.context is not None and (
            self.config.positions != "learned" or self.config.past_table == "clamp"
        )

    @property
    def reach(self) -> int | None:
        """Steps that an output depends on through attention, the present one included; None: the whole episode.

        The windows of the layers add up. UAT's running average and DT's return so far depend on earlier steps too.
        """
        return None if self.config.context is None else self.config.num_layers * (self.config.context - 1) + 1

    @property
    def like(self) -> Tensor:
        """A weight that every backbone has, whose device and dtype are those of the results."""
        return self.last_norm.weight

    # ------------------------------------------------------------ blocks

    def geometry(self, tokens: int, start_B: Tensor | None = None) -> Geometry:
        """Return the positions and the window of `tokens` tokens."""
        k, rotation = self.tokens_per_step, None
        if self.rotary is not None:
            position = self._count(-(-tokens // k), start_B).repeat_interleave(k, dim=-1)[..., :tokens]
            rotation = self.rotary(position if start_B is None else position[:, None], self.like.dtype)  # for all heads
        return Geometry(rotation, self.config.context, k)

    def attend(self, x_BTD: Tensor, gates: Gates | None = None, start_B: Tensor | None = None) -> Tensor:
        """Pass tokens through all blocks: h (B, T, D). start_B: position of each episode's first step; unset: 0."""
        geometry = self.geometry(x_BTD.shape[1], start_B)
        for block, rho_BTD, g_BTD in self._layers(gates):
            x_BTD = block(x_BTD, rho_BTD, g_BTD, geometry)
        return self.last_norm(x_BTD)

    def attend_step(
        self, x_BD: Tensor, cache: KVCache, gates: Gates | None = None, inputs: list[Tensor] | None = None
    ) -> Tensor:
        """Pass one token of every stream through all blocks: h (B, D). The cache advances by one slot.

        inputs: a list to which the input of each layer's attention is appended.
        """
        window, rotation = cache.window(), self.step_rotation(cache)
        for layer, (block, rho_BD, g_BD) in enumerate(self._layers(gates)):
            assert not isinstance(g_BD, LateGate)
            x_BD = block.step(x_BD, rho_BD, g_BD, cache, layer, window, rotation, inputs)
        cache.advance()
        return self.last_norm(x_BD)

    def rewrite_step(self, x_LBD: Tensor, g: tuple[Tensor, ...], cache: KVCache, back: int) -> None:
        """Replace the keys and values of the last token of the step `back` steps ago by those under the gates g.

        x_LBD: the inputs of its layers' attention. Call it before the first token of the present step.
        """
        if self.config.context is not None and back >= self.config.context:
            return  # the window has left that step behind
        tokens, rotation = (back - 1) * self.tokens_per_step + 1, self.step_rotation(cache, back)
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            block.attention.rewrite(x_LBD[layer], g[layer], cache, layer, tokens, rotation)

    def step_rotation(self, cache: KVCache, back: int = 0) -> Rotation | None:
        """Rotation of the queries and keys (B, H, E) of this step, or of the one `back` steps ago, in each stream; None
        if positions are not rotary."""
        if self.rotary is None:
            return None
        position_B = torch.div(cache.length_B, self.tokens_per_step, rounding_mode="floor") - back
        return self.rotary(position_B[:, None], self.like.dtype)

    def trace_tokens(self, x_BTD: Tensor, gates: Gates | None = None, start_B: Tensor | None = None) -> Trace:
        inputs, maps, geometry = [], [], self.geometry(x_BTD.shape[1], start_B)
        for block, rho_BTD, g_BTD in self._layers(gates):
            inputs.append(block.attention_norm(x_BTD))
            maps.append(block.attention.weights(inputs[-1], rho_BTD, g_BTD, geometry))
            x_BTD = block(x_BTD, rho_BTD, g_BTD, geometry)
        return Trace(attention_LBHTT=torch.stack(maps), gates=gates, input_LBTD=torch.stack(inputs))

    def split_logits(self, seen: Trace) -> tuple[Tensor, Tensor]:
        """Split the logits of a trace into a part from observations and a part from feedback, both (L, B, H, T, T).

        The start of an episode does not matter, since rotary logits depend on distances. Logits of keys before the
        window of a query are NaN.
        """
        assert seen.input_LBTD is not None
        tokens = seen.input_LBTD.shape[2]
        geometry = self.geometry(tokens)
        parts = [
            block.attention.logit_split(x_BTD, rho_BTD, g_BTD, geometry)
            for (block, rho_BTD, g_BTD), x_BTD in zip(self._layers(seen.gates), seen.input_LBTD, strict=True)
        ]
        expired_TT = geometry.expired(tokens, seen.input_LBTD.device)
        base, modulation = (torch.stack(part).masked_fill(expired_TT, torch.nan) for part in zip(*parts, strict=True))
        return base, modulation

    def init_cache(self, streams: int, capacity: int) -> KVCache:
        """Return a cache for `capacity` steps in every stream, or for the window if it is shorter."""
        self.check_range(capacity)
        c, k = self.config, self.tokens_per_step
        rolls = c.context is not None and c.context < capacity
        cache = (RollingCache if rolls else KVCache).empty(
            layers=c.num_layers,
            streams=streams,
            heads=c.num_heads,
            capacity=k * (capacity if c.context is None else min(capacity, c.context)),
            d_head=c.d_model // c.num_heads,
            like=self.like,
        )
        if isinstance(cache, RollingCache):
            cache.tokens_per_step = k
        return cache

    def _layers(self, gates: Gates | None) -> Iterator[tuple[Block, Tensor | None, Tensor | LateGate | None]]:
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            yield (block, None, None) if gates is None else (block, gates.rho, gates.g[layer])
