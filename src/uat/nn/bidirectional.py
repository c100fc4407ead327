"""Bidirectional Transformer, as in BERT: every token attends to every other one.

  y = LN(x + attention(x))
  x = LN(y + W_2 GELU(W_1 y))          post-norm: the residual sum is normalised

A new token changes the representations of all others, so results of layers cannot be cached from step to step. Only the
first layer's keys and values depend on their own token alone. A caller that needs one token needs one query in the last
layer.
Shapes: B batch, S tokens, Q queries, F keys and values side by side, D width, H heads, E head size.
"""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from uat.nn.blocks import BackboneConfig


class BidirectionalBlock(nn.Module):
    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        d_model = config.d_model
        self.query = nn.Linear(d_model, d_model)
        self.key_value = nn.Linear(d_model, 2 * d_model)
        self.out = nn.Linear(d_model, d_model)
        self.attention_norm = nn.LayerNorm(d_model)
        self.ff = nn.Sequential(nn.Linear(d_model, config.d_ff), nn.GELU(), nn.Linear(config.d_ff, d_model))
        self.ff_norm = nn.LayerNorm(d_model)
        self.drop = nn.Dropout(config.dropout)
        self.num_heads, self.dropout = config.num_heads, config.dropout

    def forward(self, x_BQD: Tensor, kv_BSF: Tensor, visible_BS: Tensor | None) -> Tensor:
        """Apply the block to the tokens x, which attend to the visible keys and values."""
        q_BHQE = self._split(self.query(x_BQD))
        k_BHSE, v_BHSE = (self._split(part) for part in kv_BSF.chunk(2, dim=-1))
        mask_B11S = None if visible_BS is None else visible_BS[:, None, None]
        dropout = self.dropout if self.training else 0.0
        h_BHQE = F.scaled_dot_product_attention(q_BHQE, k_BHSE, v_BHSE, attn_mask=mask_B11S, dropout_p=dropout)
        y_BQD = self.attention_norm(x_BQD + self.drop(self.out(h_BHQE.transpose(1, 2).flatten(-2))))
        return self.ff_norm(y_BQD + self.drop(self.ff(y_BQD)))

    def _split(self, y: Tensor) -> Tensor:
        return y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, S, D) -> (B, H, S, E)


class BidirectionalTransformer(nn.Module):
    """A stack of blocks over tokens that the caller has embedded."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BidirectionalBlock(config) for _ in range(config.num_layers))

    def keys_values(self, x: Tensor) -> Tensor:
        """Return keys and values (..., 2D) of the first layer; each token's depend on that token alone."""
        return self._layers()[0].key_value(x)

    def forward(
        self, x_BSD: Tensor, kv_BSF: Tensor, *, visible_BS: Tensor | None = None, asked_B: Tensor | None = None
    ) -> Tensor:
        """Return all tokens after the last layer, (B, S, D), or with `asked_B` only the token at that index, (B, D)."""
        layers = self._layers()
        for block, following in pairwise(layers):
            x_BSD = block(x_BSD, kv_BSF, visible_BS)
            kv_BSF = following.key_value(x_BSD)
        if asked_B is None:
            return layers[-1](x_BSD, kv_BSF, visible_BS)
        row_B1D = asked_B[:, None, None].expand(-1, 1, x_BSD.shape[-1])
        return layers[-1](x_BSD.gather(1, row_B1D), kv_BSF, visible_BS)[:, 0]

    def _layers(self) -> list[BidirectionalBlock]:
        return [block for block in self.blocks if isinstance(block, BidirectionalBlock)]
