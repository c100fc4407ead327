"""The loss over many items equals the plain loss in values and gradients, within its memory limit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from uat.nn import vocabulary
from uat.nn.heads import build_head
from uat.spec import Discrete, Items, Spec

Inputs = tuple[Tensor, Tensor, Tensor]


def case(rows: int, count: int, dtype: torch.dtype) -> tuple[Inputs, Tensor, Tensor]:
    g = torch.Generator().manual_seed(rows + count)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    inputs = draw(rows, 8).requires_grad_(), draw(count, 8).requires_grad_(), draw(count).requires_grad_()
    target_R = torch.randint(-1, count, (rows,), generator=g)
    target_R[0] = -1
    return inputs, target_R, draw(rows)


def plain(h_RD: Tensor, weight_AD: Tensor, bias_A: Tensor, target_R: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h_RD, weight_AD, bias_A), target_R, ignore_index=-1, reduction="none")


@pytest.mark.parametrize(("rows", "count"), [(1, 1), (63, 1000), (7, 5), (33, 17)])
@pytest.mark.parametrize("at_once", [1, 100, 5000, 1 << 22])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_values_and_gradients_equal_the_plain_ones(
    rows: int, count: int, at_once: int, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "AT_ONCE", at_once)
    inputs, target_R, pull_R = case(rows, count, dtype)
    fast, slow = vocabulary.linear_cross_entropy(*inputs, target_R), plain(*inputs, target_R)
    torch.testing.assert_close(fast, slow, rtol=0, atol=tolerance)
    for a, b in zip(torch.autograd.grad(fast, inputs, pull_R), torch.autograd.grad(slow, inputs, pull_R), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * rows)


def test_large_logits_stay_finite() -> None:
    weight_AD, h_RD = torch.tensor([[1.0], [-1.0]], requires_grad=True), torch.full((1, 1), 1e4, requires_grad=True)
    loss_R = vocabulary.linear_cross_entropy(h_RD, weight_AD, torch.zeros(2), torch.tensor([1]))
    assert loss_R.item() == pytest.approx(2e4)
    loss_R.sum().backward()
    assert weight_AD.grad is not None
    assert weight_AD.grad.isfinite().all()


def test_under_autocast_the_products_are_rounded_and_the_gradients_are_not_lost() -> None:
    inputs, target_R, _ = case(63, 1000, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss_R = vocabulary.linear_cross_entropy(*inputs, target_R)
    assert loss_R.dtype == torch.float32
    exact = plain(*inputs, target_R)
    assert 0 < (loss_R - exact).abs().max() < 0.2
    for a, b in zip(torch.autograd.grad(loss_R.sum(), inputs), torch.autograd.grad(exact.sum(), inputs), strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.03 * b.norm()


def test_the_head_takes_it_where_logits_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    head = build_head(Spec(obs=Items(1000), action=Discrete(1000), horizon=5), 8)
    h_BTD, target_BT = torch.randn(3, 5, 8), torch.randint(-1, 1000, (3, 5))
    whole = head.nll(h_BTD, target_BT)
    monkeypatch.setattr(vocabulary, "AT_ONCE", 4000)
    widest = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda *xs: widest.append(linear(*xs).numel()) or linear(*xs))
    pieces = head.nll(h_BTD, target_BT)
    assert max(widest) == 4000
    torch.testing.assert_close(pieces, whole)
    assert pieces.shape == (3, 5)


def test_scores_of_candidates_equal_their_logits() -> None:
    head = build_head(Spec(obs=Items(500), action=Discrete(500), horizon=5), 8)
    h_BD, candidate_BK = torch.randn(3, 8), torch.randint(500, (3, 100))
    torch.testing.assert_close(head.score(h_BD, candidate_BK), head.logits(h_BD).gather(1, candidate_BK))
