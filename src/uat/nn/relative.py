"""Causal attention by distance instead of position (Dai et al. 2019, "Transformer-XL"), limited to a band.

  q_t, k_j, v_j = W_Q x_t, W_K x_j, W_V x_j
  a_tj = ⟨q_t + u, k_j⟩ + ⟨q_t + v, W_R r_{t-j}⟩          content and distance
  h_t  = Σ_{t-M ≤ j ≤ t} softmax_j(a_tj / √E) v_j         per head

r_d is the sinusoidal encoding of the distance d. The caller passes the products W_R r_d, because the encodings
are the same at every step and one product serves all steps.
Shapes: B batch, T time, S keys (memory, then time) or cached steps, R distances, D width, H heads, E head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from uat.nn.cache import RollingCache
from uat.nn.dropout import Dropout


def encode_distances(distance_R: Tensor, d_model: int) -> Tensor:
    """Return r_d, (R, D): sines of d at wavelengths from 2π to 10000 · 2π, then cosines."""
    even = torch.arange(0, d_model, 2, dtype=distance_R.dtype, device=distance_R.device)
    angle = distance_R[:, None] * 10_000 ** (-even / d_model)
    return torch.cat([angle.sin(), angle.cos()], dim=1)[:, :d_model]


def relative_shift(y_BHTR: Tensor) -> Tensor:
    """Turn columns by distance (S, S - 1, ... 0) into columns by key: row t moves left by T - t columns.

    Dropping the first T entries of the flattened matrix and reading it with rows one entry shorter shifts all rows
    without a copy. Entries right of the present belong to other rows and must be masked.
    """
    steps, distances = y_BHTR.shape[-2:]
    return y_BHTR.flatten(-2)[..., steps:].unflatten(-1, (steps, distances - 1))


class RelativeAttention(nn.Module):
    """Multi-head attention by content and distance, with a cached step."""

    def __init__(self, d_model: int, num_heads: int, *, dropout: float) -> None:
        super().__init__()
        self.project = nn.Linear(d_model, 3 * d_model, bias=False)
        self.bias_2HE = nn.Parameter(torch.zeros(2, num_heads, d_model // num_heads))  # u, v
        self.out = nn.Linear(d_model, d_model)
        self.drop = Dropout(dropout)
        self.num_heads, self.scale = num_heads, (d_model // num_heads) ** -0.5

    def forward(self, x_BSD: Tensor, key_HRE: Tensor, outside_TS: Tensor) -> Tensor:
        """Attend from the last T of S steps to all but the masked (`outside`) keys.

        key_HRE: keys of the distances S, S - 1, ... 0.
        """
        alpha_BHTS, v_BHSE = self.weights(x_BSD, key_HRE, outside_TS)
        h_BHTE = self.drop(alpha_BHTS) @ v_BHSE
        return self.out(h_BHTE.transpose(1, 2).flatten(-2))

    def weights(self, x_BSD: Tensor, key_HRE: Tensor, outside_TS: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention weights (B, H, T, S) and the values (B, H, S, E)."""
        q_BSHE, k_BSHE, v_BSHE = self._split(self.project(x_BSD))
        content_BHTE, place_BHTE = self._queries(q_BSHE[:, -len(outside_TS) :]).transpose(2, 3)
        by_distance_BHTR = torch.einsum("bhte,hre->bhtr", place_BHTE, key_HRE)
        logits_BHTS = content_BHTE @ k_BSHE.permute(0, 2, 3, 1) + relative_shift(by_distance_BHTR)
        return logits_BHTS.masked_fill(outside_TS, -torch.inf).softmax(-1), v_BSHE.transpose(1, 2)

    def step(
        self,
        x_BD: Tensor,
        key_HRE: Tensor,
        cache: RollingCache,
        layer: int,
        distance_BHS: Tensor,
        unseen_B1S: Tensor,
    ) -> Tensor:
        """One step of every stream; key_HRE are the keys of the distances 0, 1, ... S - 1."""
        q_BHE, k_BHE, v_BHE = self._split(self.project(x_BD))
        k_BHSE, v_BHSE = cache.write(layer, k_BHE, v_BHE)
        content_BHE, place_BHE = self._queries(q_BHE)
        by_distance_BHR = torch.einsum("bhe,hre->bhr", place_BHE, key_HRE)
        logits_BHS = (k_BHSE @ content_BHE[..., None])[..., 0] + by_distance_BHR.gather(-1, distance_BHS)
        alpha_BHS = logits_BHS.masked_fill(unseen_B1S, -torch.inf).softmax(-1)
        return self.out((alpha_BHS[:, :, None] @ v_BHSE).flatten(1))

    def _queries(self, q: Tensor) -> Tensor:
        """q + u and q + v, scaled for the softmax: (2, ..., H, E)."""
        bias = self.bias_2HE.view(2, *[1] * (q.dim() - 2), *self.bias_2HE.shape[1:])
        return (q + bias) * self.scale

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of shape (..., H, E)."""
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).unbind(-3)
        return q, k, v
