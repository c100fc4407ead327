"""The Gated Transformer-XL: gates replace residual sums, a memory replaces the window (Parisotto et al. 2020).

  y = g(x, ReLU(attention(LN([memory; x]))))
  x = g(y, ReLU(ff(LN(y))))

LayerNorm is applied only to the input of attention and of the feed-forward network. The gates start near the identity,
so that the input reaches the last layer unchanged. Every layer remembers its own input of the last M steps.
Shapes: B batch, T time, S keys (memory, then time) or cached steps, M memory, R distances, D width, H heads, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from uat import contracts
from uat.nn.blocks import BackboneConfig, FeedForward, Trace
from uat.nn.cache import RollingCache
from uat.nn.dropout import Dropout
from uat.nn.encoders import build_observation_encoder
from uat.nn.relative import RelativeAttention, encode_distances
from uat.spec import Spec

Memory = tuple[Tensor, ...]
"""Inputs of each layer in the last steps, one (B, up to M, D) per layer, detached from the graph."""


@dataclass(slots=True)
class StreamState(contracts.Memory):
    cache: RollingCache
    encoding_SD: Tensor
    """Encodings of the distances 0 .. S - 1."""


class GRUGate(nn.Module):
    """Gated recurrent unit that replaces the sum x + y; with a large bias it is the identity on x.

    r = σ(W_r y + U_r x)    z = σ(W_z y + U_z x - b)    g(x, y) = (1 - z) ⊙ x + z ⊙ tanh(W_g y + U_g (r ⊙ x))
    """

    def __init__(self, d_model: int, bias: float) -> None:
        super().__init__()
        self.from_y = nn.Linear(d_model, 3 * d_model, bias=False)  # W_r, W_z, W_g
        self.from_x = nn.Linear(d_model, 2 * d_model, bias=False)  # U_r, U_z
        self.from_reset = nn.Linear(d_model, d_model, bias=False)  # U_g
        self.bias = nn.Parameter(torch.full((d_model,), float(bias)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        W_y, W_gy = self.from_y(y).split([2 * x.shape[-1], x.shape[-1]], dim=-1)
        reset, update = (W_y + self.from_x(x)).chunk(2, dim=-1)
        new = torch.tanh(W_gy + self.from_reset(torch.sigmoid(reset) * x))
        return torch.lerp(x, new, torch.sigmoid(update - self.bias))


class GatedBlock(nn.Module):
    def __init__(self, config: BackboneConfig, gate_bias: float) -> None:
        super().__init__()
        d_model = config.d_model
        self.attention_norm = nn.LayerNorm(d_model)
        self.attention = RelativeAttention(d_model, config.num_heads, dropout=config.dropout)
        self.attention_gate = GRUGate(d_model, gate_bias)
        self.ff_norm = nn.LayerNorm(d_model)
        self.ff = FeedForward(d_model, config.d_ff)
        self.ff_gate = GRUGate(d_model, gate_bias)
        self.attention_drop, self.ff_drop = Dropout(config.dropout), Dropout(config.dropout)

    def forward(self, past_BSD: Tensor, key_HRE: Tensor, outside_TS: Tensor) -> Tensor:
        """Apply the block to the last T of S steps; the earlier steps are memory."""
        y_BTD = self.attention(self.attention_norm(past_BSD), key_HRE, outside_TS)
        return self._gated(past_BSD[:, -len(outside_TS) :], y_BTD)

    def step(
        self, x_BD: Tensor, key_HRE: Tensor, cache: RollingCache, layer: int, distance_BHS: Tensor, unseen_B1S: Tensor
    ) -> Tensor:
        normed_BD = self.attention_norm(x_BD)
        return self._gated(x_BD, self.attention.step(normed_BD, key_HRE, cache, layer, distance_BHS, unseen_B1S))

    def _gated(self, x: Tensor, attended: Tensor) -> Tensor:
        x = self.attention_gate(x, self.attention_drop(attended.relu()))
        return self.ff_gate(x, self.ff_drop(self.ff(self.ff_norm(x)).relu()))


class GatedTransformer(nn.Module):
    """x = LN(W^E o), L gated blocks and a last LN. Each layer attends to the last `memory` steps."""

    def __init__(self, spec: Spec, config: BackboneConfig, *, memory: int, gate_bias: float) -> None:
        super().__init__()
        self.config, self.memory = config, memory
        self.encoder = build_observation_encoder(spec, config.d_model)
        self.norm = nn.LayerNorm(config.d_model)
        self.distance = nn.Linear(config.d_model, config.num_layers * config.d_model, bias=False)  # W_R of all layers
        self.blocks = nn.ModuleList(GatedBlock(config, gate_bias) for _ in range(config.num_layers))
        self.last_norm = nn.LayerNorm(config.d_model)

    def forward(self, obs_BT: Tensor) -> Tensor:
        """Return h (B, T, D) for all steps at once."""
        return self.segment(obs_BT)[0]

    def segment(self, obs_BT: Tensor, memory: Memory | None = None) -> tuple[Tensor, Memory]:
        """Return h (B, T, D) of the next T steps, and the memory for the segment after them."""
        x_BTD, remembered = self.norm(self.encoder(obs_BT)), []
        past = 0 if memory is None else memory[0].shape[1]
        key_LHRE, outside_TS = self._band(obs_BT.shape[1], past)
        for layer, block in self._layers():
            past_BSD = x_BTD if memory is None else torch.cat([memory[layer], x_BTD], dim=1)
            remembered.append(past_BSD[:, -self.memory :].detach())
            x_BTD = block(past_BSD, key_LHRE[layer], outside_TS)
        return self.last_norm(x_BTD), tuple(remembered)

    def trace(self, obs_BT: Tensor) -> Trace:
        """Run the forward pass and return its attention maps."""
        x_BTD, maps = self.norm(self.encoder(obs_BT)), []
        key_LHRE, outside_TT = self._band(obs_BT.shape[1], 0)
        for layer, block in self._layers():
            maps.append(block.attention.weights(block.attention_norm(x_BTD), key_LHRE[layer], outside_TT)[0])
            x_BTD = block(x_BTD, key_LHRE[layer], outside_TT)
        return Trace(attention_LBHTT=torch.stack(maps), gates=None)

    def init_state(self, streams: int, capacity: int) -> StreamState:
        c, weight = self.config, self.distance.weight
        slots = min(capacity, self.memory + 1)  # one more for the present step
        cache = RollingCache.empty(
            layers=c.num_layers,
            streams=streams,
            heads=c.num_heads,
            capacity=slots,
            d_head=c.d_model // c.num_heads,
            like=weight,
        )
        distance_S = torch.arange(slots, dtype=weight.dtype, device=weight.device)
        return StreamState(cache, encode_distances(distance_S, c.d_model))

    def step(self, obs_B: Tensor, first_B: Tensor, state: StreamState) -> Tensor:
        """Return h (B, D) for one step of every stream; `state` is updated in place."""
        cache = state.cache
        cache.restart(first_B)
        x_BD = self.norm(self.encoder(obs_B))
        distance_BHS = cache.distance()[:, None].expand(-1, self.config.num_heads, -1)
        unseen_B1S = ~cache.visible()[:, None]
        key_LHRE = self._keys(state.encoding_SD)
        for layer, block in self._layers():
            x_BD = block.step(x_BD, key_LHRE[layer], cache, layer, distance_BHS, unseen_B1S)
        cache.advance()
        return self.last_norm(x_BD)

    def _band(self, steps: int, past: int) -> tuple[Tensor, Tensor]:
        """Keys (L, H, R, E) of the distances S, S - 1, ... 0, and a mask (T, S), True where a step must not attend."""
        weight, total = self.distance.weight, past + steps
        s_S = torch.arange(total, device=weight.device)
        distance_TS = s_S[past:, None] - s_S
        far_to_near_R = torch.arange(total, -1, -1, dtype=weight.dtype, device=weight.device)
        key_LHRE = self._keys(encode_distances(far_to_near_R, self.config.d_model))
        return key_LHRE, (distance_TS < 0) | (distance_TS > self.memory)

    def _keys(self, encoding_RD: Tensor) -> Tensor:
        """Return W_R r of every layer: (L, H, R, E)."""
        c = self.config
        return self.distance(encoding_RD).unflatten(-1, (c.num_layers, c.num_heads, -1)).permute(1, 2, 0, 3)

    def _layers(self) -> Iterator[tuple[int, GatedBlock]]:
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, GatedBlock)
            yield layer, block
