"""Where a token stands in its stream: a learned row, rotary angles, or nothing.

learned   a row of a table is added to the embedded token (`Transformer.place`); past the last row there is none
rotary    queries and keys are turned by angles that grow with the position, so that logits depend on distances alone
          (Su et al. 2021, "RoFormer"); no weights, and no last position
none      causal attention alone tells the past from the present

A token is turned after feedback has changed its projections: gates act on the entries of a head as they were
projected, and all that they add turns along. The logit is then a function of both contents, both gates and the
distance. Had the gates come after the turn, they would multiply different mixtures of entries at different positions.

Shapes: E head size, F = E/2 pairs of a head.
"""

from __future__ import annotations

import decimal
import math
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

PositionKind = Literal["learned", "rotary", "none"]
BASE = 10_000
"""The slowest pair of a head turns by nearly 1/BASE radians a step, the fastest by 1."""
PI = decimal.Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
RADIANS_PER_UNIT = 2 * math.pi / 2**64


def unsupported_positions(kind: PositionKind, context: int | None) -> str | None:
    """Why fast engines that know the paper's setting alone, learned positions and no window, cannot take a policy."""
    if kind != "learned":
        return f"it knows learned positions alone, and positions is {kind!r}"
    return None if context is None else f"it attends to all of the past, and context is {context}"


class Rotation(NamedTuple):
    """Cosine and sine of every token's angles, (..., F), ready to be multiplied with each head's queries and keys."""

    cos: Tensor
    sin: Tensor

    def turn(self, x: Tensor) -> Tensor:
        """(..., E) with the pairs (i, i + F) turned; of the type of x."""
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], dim=-1).to(x.dtype)


@lru_cache(maxsize=32)
def units_per_step(d_head: int) -> tuple[int, ...]:
    """By how many units of 2^-64 turns each pair of a head turns in a step: BASE^(-i/F) radians, rounded once."""
    with decimal.localcontext(prec=50):
        units, slower, found = 2**64 / (2 * PI), decimal.Decimal(BASE) ** (decimal.Decimal(-2) / d_head), []
        for _ in range(d_head // 2):
            found.append(int(units.to_integral_value()))
            units *= slower
    return tuple(found)


class Rotary(nn.Module):
    """Angles of rotary positions, as exact at position 10^18 as at position 1.

    Angles are counted in whole units of 2^-64 turns. 64-bit integers wrap around where a turn is complete, so the
    product of position and speed loses nothing, and equal distances are equal angles wherever they lie. Speeds are
    rounded to a unit: at position p an angle differs from the formula's by at most 1.8e-19 p radians. The wrapped angle
    becomes a number in double precision (4e-16 radians); only its cosine and sine are rounded to the model's type.
    """

    units_F: Tensor

    def __init__(self, d_head: int) -> None:
        super().__init__()
        self.register_buffer("units_F", torch.tensor(units_per_step(d_head)), persistent=False)

    def forward(self, position: Tensor, dtype: torch.dtype) -> Rotation:
        """cos and sin (..., F) of integer positions (...)."""
        angle = (position[..., None] * self.units_F).double() * RADIANS_PER_UNIT
        return Rotation(angle.cos().to(dtype), angle.sin().to(dtype))
