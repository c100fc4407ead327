"""Observations and actions become vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uat.spec import Assets, Discrete, Items, Named, Observations, Spec, Vector


class IdEmbedding(nn.Module):
    """The row of an id; the id -1 ("none") gives exactly zero, as a bias-free map of a zero vector would."""

    def __init__(self, count: int, d_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, d_out))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids.clamp_min(0), self.weight) * (ids >= 0)[..., None]


class VectorEncoder(nn.Module):
    """W x, with a bias for observations and without for actions; the last `num_axes` axes are laid side by side."""

    def __init__(self, d_in: int, d_out: int, *, bias: bool, num_axes: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(d_in, d_out, bias=bias)
        self.num_axes = num_axes

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.flat(x))

    def flat(self, x: Tensor) -> Tensor:
        """What the map is applied to."""
        return x.flatten(-self.num_axes).to(self.linear.weight.dtype)


class ZeroMap(nn.Module):
    """Stands where a variant of a model has no map: no weights to learn, and zeros for whatever comes in."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.d_in, self.d_out = d_in, d_out

    @property
    def weight(self) -> Tensor:
        """As a linear map it would have this weight."""
        return torch.zeros(self.d_out, self.d_in)

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], self.d_out)


class NamedEncoder(nn.Module):
    """The sum of what each part of a dictionary becomes: a linear map of all parts side by side, rows for ids."""

    def __init__(self, space: Named, d_out: int) -> None:
        super().__init__()
        self.space = space
        self.parts = nn.ModuleList(build_encoder(space.parts[name], d_out) for name in space.names)

    def forward(self, row: Tensor) -> Tensor:
        values = self.space.unpack(row)
        encoded = [encode(values[name]) for name, encode in zip(self.space.names, self.parts, strict=True)]
        return torch.stack(encoded).sum(0)


def build_observation_encoder(spec: Spec, d_model: int) -> nn.Module:
    return build_encoder(spec.obs, d_model)


def build_encoder(space: Observations, d_model: int) -> nn.Module:
    match space:
        case Named():
            return NamedEncoder(space, d_model)
        case Vector(width):
            return VectorEncoder(width, d_model, bias=True)
        case Assets(count, features):
            return VectorEncoder(count * features, d_model, bias=True, num_axes=2)
        case Items(count):
            return IdEmbedding(count, d_model)


def build_action_encoder(spec: Spec, d_out: int) -> nn.Module:
    """f_a(a) = W_a a, bias-free: no action gives exactly zero."""
    if isinstance(spec.action, Discrete):
        return IdEmbedding(spec.action.count, d_out)
    return VectorEncoder(spec.action.count, d_out, bias=False)
