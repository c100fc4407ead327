"""Utility-affine attention against the equations, summand by summand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests import reference
from tests.builders import randomise
from uat.nn import attention
from uat.nn.attention import Attention

B, T, D, H = 2, 5, 12, 3
E = D // H
NAME = "block.attention.project"
EXACT: Any = {"rtol": 0, "atol": 1e-12}


def random_attention(seed: int = 0, *, utility: bool = True) -> Attention:
    return randomise(Attention(D, H, dropout=0.0, utility=utility).double(), seed)


def random_inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, and gates that are neither zero nor saturated."""
    generator = torch.Generator().manual_seed(seed)
    x, rho, g = (torch.randn(B, T, D, generator=generator, dtype=torch.float64) for _ in range(3))
    return x, torch.tanh(0.7 * rho), torch.tanh(0.7 * g)


def weights_of(attention: Attention) -> dict[str, Tensor]:
    return {f"block.attention.{name}": parameter for name, parameter in attention.named_parameters()}


def by_hand(attention: Attention, x: Tensor, rho: Tensor, g: Tensor, head: int) -> tuple[list[Tensor], ...]:
    """Compute q, k and v of one episode and head from the equations."""
    gates, w = zip("QKV", (rho, g, g), strict=True), weights_of(attention)
    return tuple(reference.project(w, "block", p, head, H, list(x), list(gate)) for p, gate in gates)


def heads(y: Tensor) -> Tensor:
    return y.unflatten(-1, (H, E))


def test_projections_equal_the_equations() -> None:
    attention, (x, rho, g) = random_attention(), random_inputs()
    for name, y in zip("qkv", attention.project(x, rho, g), strict=True):
        for b in range(B):
            for h in range(H):
                expected = torch.stack(by_hand(attention, x[b], rho[b], g[b], h)["qkv".index(name)])
                torch.testing.assert_close(heads(y)[b, :, h], expected, **EXACT)


def test_attention_and_its_gradients_equal_the_equations() -> None:
    attention, inputs = random_attention(), [x.requires_grad_() for x in random_inputs()]
    x, rho, g = inputs
    expected = torch.stack(
        [
            torch.cat([torch.stack(reference.attend(*by_hand(attention, x[b], rho[b], g[b], h))) for h in range(H)], -1)
            for b in range(B)
        ]
    )
    expected = expected @ attention.out.weight.T + attention.out.bias
    found = attention(x, rho, g)
    torch.testing.assert_close(found, expected, **EXACT)
    leaves, weigh = [*inputs, *attention.parameters()], torch.randn(B, T, D, dtype=torch.float64)
    fast, slow = (torch.autograd.grad((y * weigh).sum(), leaves) for y in (found, expected))
    for ours, theirs in zip(fast, slow, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_gates_change_no_bit(dtype: torch.dtype) -> None:
    attention = random_attention().to(dtype)
    x = random_inputs()[0].to(dtype)
    zero = torch.zeros_like(x)
    assert torch.equal(attention(x, zero, zero), attention(x, None, None))
    assert not torch.equal(attention(x, zero, zero + 0.1), attention(x, None, None))


def test_base_rows_are_all_there_is_without_utility() -> None:
    attention, plain = random_attention(), random_attention(utility=False)
    assert plain.project.bias_3HEE is None
    assert plain.project.weight.shape == (3 * D, D)
    with torch.no_grad():
        plain.project.weight.copy_(attention.project.base_weight)
        plain.out.load_state_dict(attention.out.state_dict())
    x = random_inputs()[0]
    assert torch.equal(plain(x, None, None), attention(x, None, None))


def test_offsets_stay_inside_their_head() -> None:
    """U is d_m by d_m: a gate entry of one head offsets no other head."""
    attention, (x, rho, g) = random_attention(), random_inputs()
    moved = rho.clone()
    moved[..., :E] += 0.1
    before, after = (heads(attention.project(x, gate, g)[0]) for gate in (rho, moved))
    assert torch.equal(before[:, :, 1:], after[:, :, 1:])
    assert (before[:, :, 0] != after[:, :, 0]).all()


# ---------------------------------------------------------------- the logit, term by term (appendix)


@given(seed=st.integers(0, 2**31))
def test_nine_terms_sum_to_the_logit(seed: int) -> None:
    attention, (x, rho, g) = random_attention(seed), random_inputs(seed)
    terms = attention.logit_terms(x, rho, g)
    assert terms.shape == (3, 3, B, H, T, T)
    q, k, _ = attention.project(x, rho, g)
    logit = torch.einsum("bthe,bjhe->bhtj", heads(q), heads(k)) / E**0.5
    torch.testing.assert_close(terms.sum((0, 1)), logit, **EXACT)
    assert (terms.flatten(2).abs().amax(-1) > 1e-3).all()  # every one of the nine has a say


def test_first_term_is_the_logit_of_vanilla() -> None:
    attention, (x, rho, g) = random_attention(), random_inputs()
    q, k, _ = attention.project(x)
    vanilla = torch.einsum("bthe,bjhe->bhtj", heads(q), heads(k)) / E**0.5
    torch.testing.assert_close(attention.logit_terms(x, rho, g)[0, 0], vanilla, **EXACT)


def test_terms_without_bias_channels_are_the_four_of_the_appendix() -> None:
    attention, (x, rho, g) = random_attention(), random_inputs()
    w = weights_of(attention)
    terms = attention.logit_terms(x, rho, g)
    for b in range(B):
        for h in range(H):
            W_Q, W_Qu, _ = reference.matrices(w, NAME, "Q", h, H)
            W_K, W_Ku, _ = reference.matrices(w, NAME, "K", h, H)
            assert W_Qu is not None
            assert W_Ku is not None
            own = reference.rows_of(h, E)
            for t in range(T):
                for j in range(T):
                    fed_Q, fed_K = torch.diag(rho[b, t, own]) @ W_Qu, torch.diag(g[b, j, own]) @ W_Ku
                    expected = [
                        [x[b, t] @ Q.T @ K @ x[b, j] / E**0.5 for K in (W_K, fed_K)]  # ℓ0 ℓ1, then ℓ2 ℓ3
                        for Q in (W_Q, fed_Q)
                    ]
                    torch.testing.assert_close(
                        terms[:2, :2, b, h, t, j], torch.stack([torch.stack(row) for row in expected]), **EXACT
                    )


def test_bias_channels_are_the_other_five() -> None:
    attention, (x, rho, g) = random_attention(), random_inputs()
    assert attention.project.bias_3HEE is not None
    with torch.no_grad():
        attention.project.bias_3HEE.zero_()
    terms = attention.logit_terms(x, rho, g)
    assert terms[2].abs().max() == 0
    assert terms[:, 2].abs().max() == 0
    assert (terms[:2, :2].flatten(2).abs().amax(-1) > 1e-3).all()


def test_shown_attention_is_the_one_that_is_used() -> None:
    attention, (x, rho, g) = random_attention(), random_inputs()
    alpha = attention.weights(x, rho, g)
    assert alpha.triu(1).abs().max() == 0
    torch.testing.assert_close(alpha.sum(-1), torch.ones(B, H, T, dtype=torch.float64), **EXACT)
    v = heads(attention.project(x, rho, g)[2])
    mixed = torch.einsum("bhtj,bjhe->bthe", alpha, v).flatten(-2)
    torch.testing.assert_close(attention.out(mixed), attention(x, rho, g), **EXACT)


def test_dropout_acts_in_training_alone() -> None:
    attention = randomise(Attention(D, H, dropout=0.5, utility=True).double(), 0)
    x, rho, g = random_inputs()
    assert torch.equal(attention.eval()(x, rho, g), random_attention()(x, rho, g))
    attention.train()
    assert not torch.equal(attention(x, rho, g), attention(x, rho, g))


@pytest.mark.parametrize("context", [None, 150])
def test_long_episodes_with_late_gates_are_attended_to_in_one_call(context: int | None) -> None:
    """Outputs and gradients equal those of explicit matrices, with the window and without it."""
    generator, steps = torch.Generator().manual_seed(0), attention.LONG + 40
    draw = {"dtype": torch.float64, "generator": generator}
    q, *keys = (torch.randn(2, 2, steps, 3, **draw, requires_grad=True) for _ in range(7))
    pairs = [attention.AgedKeys(age, keys[i], keys[i + 1]) for i, age in ((0, 3), (2, 1), (4, 0))]
    geometry = attention.Geometry(context=context)
    results = []
    for long in (attention.LONG, steps + 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "LONG", long)
            h = geometry.attend_by_age(q, pairs)
            results.append([h, *torch.autograd.grad(h.square().sum(), [q, *keys])])
    for fast, plain in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, atol=1e-10, rtol=1e-10)
