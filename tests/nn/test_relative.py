"""Attention over distances against the equations, one number at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.builders import randomise
from tests.reference import softmax
from uat.nn.cache import RollingCache
from uat.nn.relative import RelativeAttention, encode_distances, relative_shift

B, D, H = 2, 12, 3
E = D // H
EXACT: Any = {"rtol": 0, "atol": 1e-12}


def random_attention(seed: int = 0, dropout: float = 0.0) -> RelativeAttention:
    return randomise(RelativeAttention(D, H, dropout=dropout).double(), seed)


def random_numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def keys_of(W_R: Tensor, distances: range) -> Tensor:
    """Return W_R r_d of these distances: (H, R, E)."""
    encoded_RD = encode_distances(torch.tensor(list(distances), dtype=W_R.dtype), D)
    return (encoded_RD @ W_R.T).unflatten(-1, (H, E)).transpose(0, 1)


def outside(steps: int, total: int, memory: int) -> Tensor:
    return torch.tensor(
        [[not 0 <= total - steps + t - s <= memory for s in range(total)] for t in range(steps)], dtype=torch.bool
    )


def attend(attention: RelativeAttention, x_BSD: Tensor, W_R: Tensor, *, steps: int, memory: int) -> Tensor:
    """Attention of the last steps of x, `memory` steps back."""
    total = x_BSD.shape[1]
    return attention(x_BSD, keys_of(W_R, range(total, -1, -1)), outside(steps, total, memory))


def by_hand(attention: RelativeAttention, x: Tensor, W_R: Tensor, *, steps: int, memory: int) -> Tensor:
    """Attention of one episode (S, D) from the equations, with loops over steps, heads and keys."""
    W_Q, W_K, W_V = attention.project.weight.chunk(3)
    u, v = attention.bias_2HE
    rows = []
    for t in range(len(x) - steps, len(x)):
        heads = []
        for h in range(H):
            own, within = slice(h * E, (h + 1) * E), range(max(0, t - memory), t + 1)
            q = W_Q[own] @ x[t]
            logits = [
                ((q + u[h]) @ (W_K[own] @ x[j]) + (q + v[h]) @ (W_R[own] @ sinusoids(t - j))) / math.sqrt(E)
                for j in within
            ]
            alpha = softmax(torch.stack(logits))
            heads.append(sum(alpha[i] * (W_V[own] @ x[j]) for i, j in enumerate(within)))
        rows.append(attention.out.weight @ torch.cat(heads) + attention.out.bias)
    return torch.stack(rows)


def sinusoids(distance: int, width: int = D) -> Tensor:
    angles = [distance / 10_000 ** (2 * i / width) for i in range((width + 1) // 2)]
    return torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)[:width]


# ---------------------------------------------------------------- distances


@pytest.mark.parametrize("width", [1, 2, 7, 12])
def test_encodings_are_sines_and_cosines_of_the_distance(width: int) -> None:
    found = encode_distances(torch.arange(70, dtype=torch.float64), width)
    expected = torch.stack([sinusoids(d, width) for d in range(70)])
    torch.testing.assert_close(found, expected, **EXACT)
    assert found[0].tolist() == [0.0] * ((width + 1) // 2) + [1.0] * (width // 2)


@given(steps=st.integers(1, 9), past=st.integers(0, 9))
def test_relative_shift_picks_the_distance_of_every_key(steps: int, past: int) -> None:
    total = past + steps
    y_BHTR = random_numbers(B, H, steps, total + 1)
    shifted_BHTS = relative_shift(y_BHTR)
    assert shifted_BHTS.shape == (B, H, steps, total)
    for t in range(steps):
        for s in range(past + t + 1):
            distance = past + t - s
            assert torch.equal(shifted_BHTS[:, :, t, s], y_BHTR[:, :, t, total - distance])


# ---------------------------------------------------------------- the equations


@pytest.mark.parametrize(
    ("steps", "past", "memory"), [(1, 0, 1), (5, 0, 5), (7, 0, 2), (4, 3, 3), (3, 5, 5), (1, 4, 9)]
)
def test_attention_and_its_gradients_equal_the_equations(steps: int, past: int, memory: int) -> None:
    attention, W_R = random_attention(), random_numbers(D, D, seed=1).requires_grad_()
    x_BSD = random_numbers(B, past + steps, D).requires_grad_()
    found = attend(attention, x_BSD, W_R, steps=steps, memory=memory)
    expected = torch.stack([by_hand(attention, x, W_R, steps=steps, memory=memory) for x in x_BSD])
    torch.testing.assert_close(found, expected, **EXACT)
    leaves, weigh = [x_BSD, W_R, *attention.parameters()], random_numbers(B, steps, D, seed=2)
    fast, slow = (torch.autograd.grad((y * weigh).sum(), leaves) for y in (found, expected))
    for ours, theirs in zip(fast, slow, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_step_by_step_equals_attention_at_once() -> None:
    """The stream is long enough to use each slot several times."""
    attention, W_R, memory, steps = random_attention(), random_numbers(D, D, seed=1), 3, 13
    x_BTD = random_numbers(B, steps, D)
    cache = RollingCache.empty(layers=1, streams=B, heads=H, capacity=memory + 1, d_head=E, like=x_BTD)
    found = []
    for t in range(steps):
        distance_BHS = cache.distance()[:, None].expand(-1, H, -1)
        keys = keys_of(W_R, range(memory + 1))
        found.append(attention.step(x_BTD[:, t], keys, cache, 0, distance_BHS, ~cache.visible()[:, None]))
        cache.advance()
    expected = attend(attention, x_BTD, W_R, steps=steps, memory=memory)
    torch.testing.assert_close(torch.stack(found, 1), expected, **EXACT)


# ---------------------------------------------------------------- what it may know


@pytest.mark.parametrize("memory", [1, 3])
def test_nothing_before_the_band_changes_anything(memory: int) -> None:
    attention, W_R, x = random_attention(), random_numbers(D, D, seed=1), random_numbers(B, 9, D)
    before = attend(attention, x, W_R, steps=9, memory=memory)
    for j in range(9):
        other = x.clone()
        other[:, j] += 1.0
        after = attend(attention, other, W_R, steps=9, memory=memory)
        for t in range(9):
            assert torch.equal(after[:, t], before[:, t]) == (not 0 <= t - j <= memory), (j, t)


def test_only_distances_matter() -> None:
    """Equal steps give equal outputs at any position and after any steps before the band."""
    attention, W_R, memory = random_attention(), random_numbers(D, D, seed=1), 4
    window = random_numbers(B, memory + 3, D)
    alone = attend(attention, window, W_R, steps=3, memory=memory)
    for before in (1, 2, 11):
        longer = torch.cat([random_numbers(B, before, D, seed=before), window], dim=1)
        torch.testing.assert_close(attend(attention, longer, W_R, steps=3, memory=memory), alone, **EXACT)


def test_the_distance_itself_matters() -> None:
    """Negative control: exchanging two earlier steps changes the output with W_R and not without."""
    attention, W_R = random_attention(), random_numbers(D, D, seed=1)
    x = random_numbers(B, 5, D)
    swapped = x[:, [1, 0, 2, 3, 4]]
    for weight, same in ((torch.zeros_like(W_R), True), (W_R, False)):
        one, two = (attend(attention, y, weight, steps=1, memory=9) for y in (x, swapped))
        assert torch.allclose(one, two, rtol=0, atol=1e-12) is same


def test_dropout_acts_in_training_alone() -> None:
    attention, W_R, x = random_attention(dropout=0.5), random_numbers(D, D, seed=1), random_numbers(B, 5, D)
    now, plain = attention.eval(), random_attention()
    assert torch.equal(attend(now, x, W_R, steps=5, memory=9), attend(plain, x, W_R, steps=5, memory=9))
    attention.train()
    one, two = (attend(attention, x, W_R, steps=5, memory=9) for _ in range(2))
    assert not torch.equal(one, two)
