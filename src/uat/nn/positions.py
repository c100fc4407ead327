"""Position encodings: a learned table, rotary angles, or none.

learned   a row of a table is added to the embedded token (`Transformer.place`); the table has a last position
rotary    queries and keys are rotated by angles that grow with the position, so that logits depend on distances alone
          (Su et al. 2021, "RoFormer"); no weights, and no last position
none      causal attention alone tells the past from the present

Queries and keys are rotated after feedback has changed them, so that the logit is a function of both contents, both
gates and the distance. Gates applied after the rotation would multiply different mixtures of entries at different
positions.

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
"""The slowest pair of a head rotates by nearly 1/BASE radians per step, the fastest by 1."""
PI = decimal.Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
RADIANS_PER_UNIT = 2 * math.pi / 2**64


def unsupported_positions(kind: PositionKind, context: int | None) -> str | None:
    """Return why an engine that supports only learned positions without a window cannot take a policy, or None."""
    if kind != "learned":
        return f"it knows learned positions alone, and positions is {kind!r}"
    return None if context is None else f"it attends to all of the past, and context is {context}"


class Rotation(NamedTuple):
    """Cosine and sine of every token's angles, (..., F), to be multiplied with each head's queries and keys."""

    cos: Tensor
    sin: Tensor

    def turn(self, x: Tensor) -> Tensor:
        """Return x (..., E) with the pairs (i, i + F) rotated, in the dtype of x."""
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], dim=-1).to(x.dtype)


@lru_cache(maxsize=32)
def units_per_step(d_head: int) -> tuple[int, ...]:
    """Rotation of each pair of a head per step in units of 2^-64 turns: BASE^(-i/F) radians, rounded once."""
    with decimal.localcontext(prec=50):
        units, slower, speeds = 2**64 / (2 * PI), decimal.Decimal(BASE) ** (decimal.Decimal(-2) / d_head), []
        for _ in range(d_head // 2):
            speeds.append(int(units.to_integral_value()))
            units *= slower
    return tuple(speeds)


class Rotary(nn.Module):
    """Angles of rotary positions, as exact at position 10^18 as at position 1.

    Angles are integers in units of 2^-64 turns. 64-bit integers overflow exactly after a full turn, so the product of
    position and speed is exact, and equal distances give equal angles at any position. Speeds are rounded to a unit: at
    position p, an angle differs from the formula by at most 1.8e-19 p radians. The wrapped angle is converted to double
    precision (4e-16 radians), and only its cosine and sine are rounded to the model's type.
    """

    units_F: Tensor

    def __init__(self, d_head: int) -> None:
        super().__init__()
        self.register_buffer("units_F", torch.tensor(units_per_step(d_head)), persistent=False)

    def forward(self, position: Tensor, dtype: torch.dtype) -> Rotation:
        """Return cos and sin (..., F) for integer positions (...)."""
        angle = (position[..., None] * self.units_F).double() * RADIANS_PER_UNIT
        return Rotation(angle.cos().to(dtype), angle.sin().to(dtype))
