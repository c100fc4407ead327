"""Where a token stands in its stream: learned rows, rotary angles or nothing, and the window of steps that it sees.

learned   a row of a table is added to the embedded token; the table has as many rows as positions can be told apart
rotary    queries and keys are turned by angles that grow with the position, so that logits depend on distances alone
          (Su et al. 2021, "RoFormer"); no weights, and no last position
none      causal attention alone tells the past from the present

A token is turned after feedback has changed its projections: gates act on the entries of a head as they were
projected, and all that they add turns along. The logit is then a function of both contents, both gates and the
distance. Had the gates come after the turn, they would multiply different mixtures of entries at different positions.

With a window of `context` steps, a step attends to itself and to the context - 1 steps before it, in every layer.
Shapes: B batch, H heads, T tokens, E head size, F = E/2 pairs of a head, W tokens of a window, C chunks.
"""

from __future__ import annotations

import decimal
import math
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
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
    pairs = d_head // 2
    with decimal.localcontext(prec=50):
        radians = [decimal.Decimal(BASE) ** (decimal.Decimal(-pair) / pairs) for pair in range(pairs)]
        return tuple(int((each / (2 * PI) * 2**64).to_integral_value()) for each in radians)


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


class Geometry(NamedTuple):
    """What a pass over whole episodes needs to know of its tokens' places; as it stands, plain causal attention."""

    rotation: Rotation | None = None
    context: int | None = None
    """Steps that a step sees, itself included; None: all that came before."""
    tokens_per_step: int = 1

    def turn(self, x: Tensor) -> Tensor:
        """Queries or keys (..., T, E), turned if positions are rotary."""
        return x if self.rotation is None else self.rotation.turn(x)

    def expired(self, tokens: int, device: torch.device | str) -> Tensor:
        """(T, T) True where a key lies before the window of the query."""
        step_T = torch.arange(tokens, device=device) // self.tokens_per_step
        age_TT = step_T[:, None] - step_T
        return age_TT >= (tokens if self.context is None else self.context)

    def visible(self, tokens: int, device: torch.device | str) -> Tensor:
        """(T, T) True where a query sees a key: not in the future, and inside the window."""
        future_TT = torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)
        return ~(future_TT | self.expired(tokens, device))

    def attend(self, q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, dropout: float = 0.0) -> Tensor:
        """Softmax attention (B, H, T, E) of turned queries to turned keys. Where an episode is longer than the window,
        time and memory grow with T W, not with T²."""
        tokens = q_BHTE.shape[-2]
        if self.context is None or tokens <= (width := self.context * self.tokens_per_step):
            return F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True, dropout_p=dropout)
        chunks = -(-tokens // width)
        q, k, v = (_chunked(x, chunks, width) for x in (q_BHTE, k_BHTE, v_BHTE))
        k, v = (_with_previous(x) for x in (k, v))
        visible_C1WX = self.visible(2 * width, q.device)[width:].expand(chunks, 1, -1, -1).clone()
        visible_C1WX[0, :, :, :width] = False  # nothing comes before the first chunk
        h_CXWE = F.scaled_dot_product_attention(q, k, v, attn_mask=visible_C1WX, dropout_p=dropout)
        return h_CXWE.unflatten(1, q_BHTE.shape[:2]).permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :tokens]


CAUSAL = Geometry()


def _chunked(x_BHTE: Tensor, chunks: int, width: int) -> Tensor:
    """(C, BH, W, E): the episode in parts as long as the window, the last one padded."""
    padded = F.pad(x_BHTE, (0, 0, 0, chunks * width - x_BHTE.shape[-2]))
    return padded.unflatten(2, (chunks, width)).permute(2, 0, 1, 3, 4).flatten(1, 2)


def _with_previous(x_CXWE: Tensor) -> Tensor:
    """(C, BH, 2W, E): each chunk after the one before it."""
    before = torch.cat([torch.zeros_like(x_CXWE[:1]), x_CXWE[:-1]])
    return torch.cat([before, x_CXWE], dim=2)
