"""Encoders that turn observations and actions into vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uat.spec import Assets, Discrete, Items, Named, Observations, Spec, Vector

CONSTANT = 1e-6
"""Numbers whose relative deviation is at most this are treated as constant: they differ by rounding."""


class IdEmbedding(nn.Module):
    """Table with one row per id; the id -1 ("none") gives exactly zero, like a bias-free map of a zero vector."""

    def __init__(self, count: int, d_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, d_out))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids.clamp_min(0), self.weight) * (ids >= 0)[..., None]


def scale_of(mean: Tensor, deviation: Tensor) -> Tensor:
    """Return the deviation of each number; 1 where the number is constant."""
    return torch.where(deviation > CONSTANT * (1 + mean.abs()), deviation, 1.0)


class Normalizer(nn.Module):
    """(x - mean) / scale, with statistics of each number that are saved with the weights."""

    mean: Tensor
    scale: Tensor

    def __init__(self, count: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(count))
        self.register_buffer("scale", torch.ones(count))

    @torch.no_grad()
    def fit(self, rows: Tensor) -> None:
        """Fit the statistics to rows (N, count); the scale of a constant number stays 1."""
        rows = rows.double()
        self.set(rows.mean(0), rows.std(0, correction=0))

    @torch.no_grad()
    def set(self, mean: Tensor, deviation: Tensor) -> None:
        """Take these statistics; the scale of a constant number stays 1."""
        self.mean.copy_(mean)
        self.scale.copy_(scale_of(mean, deviation))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.scale


class VectorEncoder(nn.Module):
    """W x over the flattened last `num_axes` axes, which are standardised first if a normalizer was added.

    Observations have a bias, actions none.
    """

    normalizer: Normalizer | None

    def __init__(self, d_in: int, d_out: int, *, bias: bool, num_axes: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(d_in, d_out, bias=bias)
        self.num_axes = num_axes
        self.register_module("normalizer", None)

    def add_normalizer(self) -> Normalizer:
        self.normalizer = Normalizer(self.linear.in_features).to(self.linear.weight)
        return self.normalizer

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.flat(x))

    def flat(self, x: Tensor) -> Tensor:
        """Return the flattened and standardised input of the linear map."""
        flat = x.flatten(-self.num_axes).to(self.linear.weight.dtype)
        return flat if self.normalizer is None else self.normalizer(flat)


class ZeroMap(nn.Module):
    """Replaces a map that a variant of a model lacks: returns zeros and has no parameters."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.d_in, self.d_out = d_in, d_out

    @property
    def weight(self) -> Tensor:
        """Weight of the equivalent linear map."""
        return torch.zeros(self.d_out, self.d_in)

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], self.d_out)


class NamedEncoder(nn.Module):
    """Sum of the encodings of all parts of a dictionary observation: linear maps of vectors, table rows of ids."""

    def __init__(self, space: Named, d_out: int, *, bias: bool = True) -> None:
        super().__init__()
        self.space = space
        self.parts = nn.ModuleList(build_encoder(space.parts[name], d_out, bias=bias) for name in space.names)

    def forward(self, row: Tensor) -> Tensor:
        values = self.space.unpack(row)
        encoded = [encode(values[name]) for name, encode in zip(self.space.names, self.parts, strict=True)]
        return torch.stack(encoded).sum(0)


def vector_parts(encoder: nn.Module, space: Observations, obs: Tensor) -> list[tuple[VectorEncoder, Tensor]]:
    """Return each linear map of an observation encoder together with its part of the observations."""
    if isinstance(encoder, VectorEncoder):
        return [(encoder, obs)]
    if not isinstance(encoder, NamedEncoder) or not isinstance(space, Named):
        return []
    values = space.unpack(obs)
    parts = zip(encoder.parts, space.names, strict=True)
    return [(part, values[name]) for part, name in parts if isinstance(part, VectorEncoder)]


def build_observation_encoder(spec: Spec, d_model: int) -> nn.Module:
    return build_encoder(spec.obs, d_model)


def build_encoder(space: Observations, d_model: int, *, bias: bool = True) -> nn.Module:
    match space:
        case Named():
            return NamedEncoder(space, d_model, bias=bias)
        case Vector(width):
            return VectorEncoder(width, d_model, bias=bias)
        case Assets(count, features):
            return VectorEncoder(count * features, d_model, bias=bias, num_axes=2)
        case Items(count):
            return IdEmbedding(count, d_model)


def build_action_encoder(spec: Spec, d_out: int) -> nn.Module:
    """Build f_a(a) = W_a a, without a bias, so that "no action" gives exactly zero."""
    if isinstance(spec.action, Discrete):
        return IdEmbedding(spec.action.count, d_out)
    return VectorEncoder(spec.action.count, d_out, bias=False)
