"""Randomness as data: numbers that depend on (seed, name, id) alone.

The numbers are the same on a CPU and a GPU, in any batch and in any order. A new consumer takes a new name and so
changes no other result. The generator is SplitMix64 (Steele, Lea and Flood 2014), one stream per id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextvars import ContextVar

import torch
from torch import Tensor

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed integer
MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def derive(seed: int, *names: str | int) -> int:
    """Return a seed in [0, 2^63) for one named purpose."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def uniform(seed: int, name: str, ids_B: Tensor, count: int) -> Tensor:
    """(B, count) float64 in the open interval (0, 1)."""
    return uniform_by.get()(derive(seed, name), ids_B.long(), count)


def integers(seed: int, name: str, ids_B: Tensor, count: int, below: int) -> Tensor:
    """(B, count) integers, uniform in [0, below)."""
    return (uniform(seed, name, ids_B, count) * below).long()


def gumbel(seed: int, name: str, ids_B: Tensor, count: int) -> Tensor:
    """(B, count) standard Gumbel noise: arg-max of logits + noise samples from their softmax."""
    return -torch.log(-torch.log(uniform(seed, name, ids_B, count)))


def uniform_of_key(key: int, ids_B: Tensor, count: int) -> Tensor:
    """(B, count) float64 in the open interval (0, 1), from the key that `derive` makes of seed and name."""
    key_B = _mix(_mix(ids_B + key))
    counter = torch.arange(1, count + 1, device=ids_B.device) * GOLDEN
    bits = _mix(key_B[:, None] + counter)
    return (_shift_right(bits, 12).double() + 0.5) * 2.0**-52


uniform_by: ContextVar[Callable[[int, Tensor, int], Tensor]] = ContextVar("uniform_by", default=uniform_of_key)
"""The function that computes `uniform`. While an engine runs, it is a kernel with the same bits."""


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's `>>` keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
