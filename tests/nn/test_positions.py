"""Rotary angles equal the formula in many digits, and windowed attention equals a plain mask."""

from __future__ import annotations

import decimal
import itertools
import math
from decimal import Decimal
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.builders import randomise
from uat.nn.attention import CAUSAL, Attention, Geometry
from uat.nn.positions import PI, RADIANS_PER_UNIT, Rotary, units_per_step

EXACT: Any = {"rtol": 0, "atol": 1e-12}
POSITIONS = (0, 1, 255, 10**6, 10**9, 10**15)


def random_heads(tokens: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, keys and values (2, 3, T, 4) that require gradients."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, 3, tokens, 4, dtype=torch.float64, generator=generator)
    return q.clone().requires_grad_(), k.clone().requires_grad_(), v.clone().requires_grad_()


# ---------------------------------------------------------------- angles


@pytest.mark.parametrize("d_head", [2, 4, 6, 16, 128])
@pytest.mark.parametrize("position", POSITIONS)
def test_angles_are_those_of_the_formula_at_any_position(d_head: int, position: int) -> None:
    """The error is at most 1.8e-19 radians per step plus the rounding of double precision."""
    found = Rotary(d_head)(torch.tensor(position), torch.float64)
    for pair in range(d_head // 2):
        with decimal.localcontext(prec=60):
            angle = float((position * Decimal(10_000) ** (Decimal(-2 * pair) / d_head)) % (2 * PI))
        atol = 1.8e-19 * position + 2e-15
        assert found.cos[pair].item() == pytest.approx(math.cos(angle), abs=atol)
        assert found.sin[pair].item() == pytest.approx(math.sin(angle), abs=atol)


def test_the_fastest_pair_turns_by_a_radian() -> None:
    assert units_per_step(8)[0] * RADIANS_PER_UNIT == pytest.approx(1.0, abs=1e-15)
    assert units_per_step(8)[3] * RADIANS_PER_UNIT == pytest.approx(1e-3, abs=1e-18)


@pytest.mark.parametrize("shift", [1, 17, 10**6, 10**12, 10**17])
def test_logits_depend_on_distances_alone(shift: int) -> None:
    q, k, _ = random_heads(6)
    rotary, position_T = Rotary(4), torch.arange(6)
    here, there = (rotary(position, torch.float64) for position in (position_T, position_T + shift))
    logits = [rotation.turn(q) @ rotation.turn(k).mT for rotation in (here, there)]
    torch.testing.assert_close(logits[0], logits[1], **EXACT)
    assert (logits[0] - q @ k.mT).abs().max() > 1e-3  # the turn does something


def test_float32_positions_stay_distinct_after_a_million_steps() -> None:
    """Neighbours a million steps in differ by the same rotation as at the start, unlike with float32 positions."""
    rotation = Rotary(4)(torch.tensor([0, 1, 10**6, 10**6 + 1]), torch.float32)
    turned = rotation.turn(torch.ones(4, 4))
    near, far = turned[0] @ turned[1], turned[2] @ turned[3]
    assert near.item() == pytest.approx(far.item(), abs=1e-6)


def test_a_turn_keeps_lengths_and_types() -> None:
    q = random_heads(5)[0]
    rotation = Rotary(4)(torch.arange(5) * 1000, torch.float64)
    torch.testing.assert_close(rotation.turn(q).norm(dim=-1), q.norm(dim=-1), **EXACT)
    assert rotation.turn(q.bfloat16()).dtype == torch.bfloat16


def test_angles_move_with_the_module_and_not_with_its_weights() -> None:
    rotary = Rotary(6)
    assert not rotary.state_dict()
    assert rotary.half().units_F.dtype == torch.int64
    assert rotary(torch.arange(3), torch.float32).cos.dtype == torch.float32


def test_the_widest_head_has_its_speeds_at_once() -> None:
    units = units_per_step(65_536)
    assert len(units) == 32_768
    assert all(fast > slow > 0 for fast, slow in itertools.pairwise(units))
    with decimal.localcontext(prec=60):
        slowest = Decimal(10_000) ** (Decimal(-32_767) / 32_768) / (2 * PI) * 2**64
    assert abs(units[-1] - slowest) <= 0.5


# ---------------------------------------------------------------- windows


def masked(q: Tensor, k: Tensor, v: Tensor, context: int, tokens_per_step: int) -> Tensor:
    """Slow twin: attention with an explicit mask over all pairs."""
    tokens = q.shape[-2]
    step = [token // tokens_per_step for token in range(tokens)]
    seen = [[j <= i and step[j] > step[i] - context for j in range(tokens)] for i in range(tokens)]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.tensor(seen))


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3])
@pytest.mark.parametrize(("tokens", "context"), [(1, 1), (7, 1), (7, 2), (8, 4), (63, 5), (64, 64), (65, 64), (130, 9)])
def test_windowed_attention_equals_its_slow_twin(tokens: int, context: int, tokens_per_step: int) -> None:
    """Outputs and gradients are equal, also for lengths that are not a multiple of the window."""
    inputs = random_heads(tokens)
    found = Geometry(context=context, tokens_per_step=tokens_per_step).attend(*inputs)
    expected = masked(*inputs, context, tokens_per_step)
    torch.testing.assert_close(found, expected, **EXACT)
    weigh = torch.randn(found.shape, dtype=torch.float64)
    fast, slow = (torch.autograd.grad((y * weigh).sum(), inputs) for y in (found, expected))
    for ours, theirs in zip(fast, slow, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


def test_a_window_as_long_as_the_episode_changes_no_bit() -> None:
    inputs = random_heads(9)
    assert torch.equal(Geometry(context=9).attend(*inputs), CAUSAL.attend(*inputs))
    assert not torch.equal(Geometry(context=8).attend(*inputs), CAUSAL.attend(*inputs))


def test_visible_keys_are_the_last_steps() -> None:
    visible = Geometry(context=2, tokens_per_step=2).visible(6, "cpu").int().tolist()
    assert visible == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0],
        [0, 0, 1, 1, 1, 1],
    ]


# ---------------------------------------------------------------- shown and split


def random_attention() -> tuple[Attention, tuple[Tensor, Tensor, Tensor]]:
    attention = randomise(Attention(12, 3, dropout=0.0, utility=True).double(), 0)
    generator = torch.Generator().manual_seed(1)
    x, rho, g = (torch.randn(2, 7, 12, dtype=torch.float64, generator=generator) for _ in range(3))
    return attention, (x, torch.tanh(0.7 * rho), torch.tanh(0.7 * g))


def geometries() -> dict[str, Geometry]:
    rotation = Rotary(4)(torch.arange(7), torch.float64)
    return {"rotary": Geometry(rotation), "window": Geometry(context=3), "both": Geometry(rotation, 3)}


@pytest.mark.parametrize("kind", geometries())
def test_shown_attention_is_the_one_that_is_used(kind: str) -> None:
    (attention, inputs), geometry = random_attention(), geometries()[kind]
    alpha = attention.weights(*inputs, geometry)
    v = attention.project(*inputs)[2].unflatten(-1, (3, 4))
    mixed = torch.einsum("bhtj,bjhe->bthe", alpha, v).flatten(-2)
    torch.testing.assert_close(attention.out(mixed), attention(*inputs, geometry), **EXACT)


@pytest.mark.parametrize("kind", geometries())
def test_terms_of_the_logit_sum_to_what_the_softmax_takes(kind: str) -> None:
    (attention, inputs), geometry = random_attention(), geometries()[kind]
    logits = attention.logit_terms(*inputs, geometry).sum((0, 1))
    hidden = ~geometry.visible(7, "cpu")
    torch.testing.assert_close(
        logits.masked_fill(hidden, -torch.inf).softmax(-1), attention.weights(*inputs, geometry), **EXACT
    )
    base, modulation = attention.logit_split(*inputs, geometry)
    torch.testing.assert_close(base + modulation, logits, **EXACT)
    plain = attention.logit_split(inputs[0], None, None, geometry)[0]
    torch.testing.assert_close(base, plain, **EXACT)  # the observation-only logit is Vanilla's
