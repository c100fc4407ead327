"""The weights of a complete UAT, with zeros for the parts that a variant lacks.

One kernel then supports UAT and its ablations. For the full model the weights are the parameters themselves; for a
variant, gradients flow back to its parameters.

Shapes: D width, H heads, E head size, U utility width, J width of an action's embedding.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uat.nn.attention import UtilityAffine
from uat.nn.encoders import IdEmbedding
from uat.nn.utility import UtilityEncoder, UtilityGates


class Feedback(NamedTuple):
    """Weights that turn feedback into gates. The table is None if actions are not ids and are embedded outside."""

    table_AJ: Tensor | None
    first: Tensor
    """(hidden, J + 1): the last column is multiplied with the reward. Hidden units and U are padded with zeros to sizes
    supported by matrix products."""
    last: Tensor
    """(U, hidden)"""
    token: Tensor
    """(L * D, U)"""
    regime: Tensor
    """(D, U)"""


def projections(project: UtilityAffine) -> tuple[Tensor, Tensor | None]:
    """Return W and W^u (6D, D), and U (3, H, E, E); without feedback, W (3D, D) and None."""
    weight, bias = project.weight, project.bias_3HEE
    if project.modulated == "":
        return weight, None
    (_, d), heads = weight.shape, project.num_heads
    if bias is None:
        bias = weight.new_zeros(len(project.modulated), heads, d // heads, d // heads)
    if project.modulated == "q":
        return _with_zeros(weight, 2 * d, after=3 * d + d), _with_zeros(bias, 2, after=1)
    if project.modulated == "kv":
        return _with_zeros(weight, d, after=3 * d), _with_zeros(bias, 1, after=0)
    return weight, bias


def feedback(utility: UtilityGates) -> Feedback:
    encoder, device = utility.encoder, _device(utility)
    table = encoder.action.weight if isinstance(encoder.action, IdEmbedding) else None
    first, last = _encoder(encoder)
    token, regime = (
        part.weight if isinstance(part, nn.Linear) else torch.zeros(part.d_out, part.d_in, device=device)
        for part in (utility.token, utility.regime)
    )
    wider, more = (room(size) - size for size in last.shape)
    if more:
        first, last = F.pad(first, (0, 0, 0, more)), F.pad(last, (0, more))
    if wider:
        last, token, regime = F.pad(last, (0, 0, 0, wider)), F.pad(token, (0, wider)), F.pad(regime, (0, wider))
    return Feedback(table, first, last, token, regime)


def room(size: int) -> int:
    """Return the smallest block size that holds this number of entries and that matrix products support."""
    return max(16, power_of_two(size))


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is not below size."""
    return 1 << (size - 1).bit_length()


def hidden_units(encoder: UtilityEncoder) -> int:
    """Return the number of hidden units of the encoder in the form that `feedback` returns."""
    return encoder.d_hidden if encoder.nonlinear else 2 * cast(nn.Linear, encoder.mlp[0]).out_features


def _encoder(encoder: UtilityEncoder) -> tuple[Tensor, Tensor]:
    """Return both layers of the encoder; a linear encoder is W x = max(W x, 0) - max(-W x, 0)."""
    first = cast(Tensor, encoder.mlp.get_parameter("0.weight"))
    if not encoder.use_reward:
        first = torch.cat([first[:, :-1], torch.zeros_like(first[:, -1:])], dim=1)
    if encoder.nonlinear:
        return first, encoder.mlp.get_parameter("2.weight")
    one = torch.eye(first.shape[0], device=first.device, dtype=first.dtype)
    return torch.cat([first, -first]), torch.cat([one, -one], dim=1)


def _with_zeros(x: Tensor, count: int, *, after: int) -> Tensor:
    """Insert rows of zeros into x."""
    return torch.cat([x[:after], x.new_zeros(count, *x.shape[1:]), x[after:]])


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
