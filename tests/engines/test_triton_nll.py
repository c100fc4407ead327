"""The fused loss against its slow twin: on a GPU where there is one, by Triton's interpreter elsewhere."""

# ruff: noqa: E402 (what needs Triton is imported where there is Triton)
from __future__ import annotations

import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
pytest.importorskip("triton")

from tests.engines.test_triton_train import SMALL, build, some_batch
from uat.engines.fused import fused_view
from uat.engines.triton.nll import fits, fused_nll
from uat.episode import masked_sum
from uat.nn.heads import DiscreteHead, Head, WeightsHead

DEVICE = "cuda" if CUDA else "cpu"


def problem(
    actions: int, d: int, episodes: int, steps: int, *, bias: bool = True
) -> tuple[Head, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    head = DiscreteHead(d, actions, bias=bias)
    h_BTD, valid_BT = torch.randn(episodes, steps, d), torch.rand(episodes, steps) < 0.8
    target_BT = torch.randint(-1, actions, (episodes, steps))
    return head.to(DEVICE), h_BTD.to(DEVICE).requires_grad_(), target_BT.to(DEVICE), valid_BT.to(DEVICE)


def both(head: Head, h_BTD: Tensor, target_BT: Tensor, valid_BT: Tensor) -> list[tuple[Tensor, ...]]:
    """Sum, number of steps and gradients: slow, then fused."""
    found = []
    for summed in (
        lambda: masked_sum(head.nll(h_BTD, target_BT), valid_BT),
        lambda: fused_nll(head, h_BTD, target_BT, valid_BT),
    ):
        total, count = summed()
        learnt = [h_BTD, *head.parameters()]
        found.append((total.detach(), count, *torch.autograd.grad(3 * total / count.clamp_min(1), learnt)))
    return found


@pytest.mark.parametrize(
    ("actions", "d", "episodes", "steps", "bias"),
    [(1, 16, 1, 1, True), (5, 64, 3, 43, True), (16, 32, 2, 7, False), (17, 32, 2, 7, True), (128, 128, 1, 5, True)],
)
def test_sum_and_gradients_are_those_of_the_slow_one(
    actions: int, d: int, episodes: int, steps: int, *, bias: bool
) -> None:
    slow, fast = both(*problem(actions, d, episodes, steps, bias=bias))
    assert int(fast[1]) == int(slow[1])
    for a, b in zip(slow, fast, strict=True):
        torch.testing.assert_close(b.float(), a.float(), rtol=1e-4, atol=1e-5)


def test_padding_may_hold_anything() -> None:
    head, h_BTD, target_BT, valid_BT = problem(5, 32, 3, 11)
    clean = both(head, h_BTD, target_BT, valid_BT)[1]
    with torch.no_grad():
        h_BTD[~valid_BT] = float("nan")
    target_BT[~valid_BT] = 99
    total, count = fused_nll(head, h_BTD, target_BT, valid_BT)
    found = (total, count, *torch.autograd.grad(3 * total / count, [h_BTD, *head.parameters()]))
    for a, b in zip(clean, found, strict=True):
        assert torch.equal(a, b)


def test_no_real_step_gives_nothing_to_learn() -> None:
    head, h_BTD, target_BT, valid_BT = problem(5, 32, 2, 3)
    slow, fast = both(head, h_BTD, target_BT, torch.zeros_like(valid_BT))
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(slow, fast, strict=True))


@pytest.mark.parametrize("bad", [5, -2])
def test_a_target_that_is_no_action_is_not_passed_over(bad: int) -> None:
    head, h_BTD, target_BT, valid_BT = problem(5, 32, 2, 3)
    target_BT[0, 0], valid_BT[0, 0] = bad, True
    assert not fused_nll(head, h_BTD, target_BT, valid_BT)[0].isfinite()


def test_large_logits_do_not_overflow() -> None:
    head, h_BTD, target_BT, valid_BT = problem(5, 32, 2, 9)
    slow, fast = both(head, (1e4 * h_BTD).detach().requires_grad_(), target_BT, valid_BT)
    torch.testing.assert_close(fast[0], slow[0], rtol=1e-4, atol=1e-4)


def test_a_policy_takes_it_in_training_alone() -> None:
    policy, batch = build("uat", {**SMALL, "num_layers": 1}, 20), some_batch(2, 5)
    view = fused_view(policy, fused_pass=True)
    (fast, count), slow = view.loss(batch)["imitation"], view.eval().loss(batch)["imitation"]
    assert fast.grad_fn is not None
    assert "FusedNll" in fast.grad_fn.name()
    assert slow[0].grad_fn is not None
    assert "FusedNll" not in slow[0].grad_fn.name()
    torch.testing.assert_close(fast, slow[0], rtol=1e-4, atol=1e-4)
    assert int(count) == int(slow[1])


def test_it_takes_few_actions_of_whole_widths() -> None:
    h_BTD = torch.randn(1, 2, 32)
    assert fits(DiscreteHead(32, 128), h_BTD)
    assert not fits(DiscreteHead(32, 129), h_BTD)
    assert not fits(WeightsHead(32, 5), h_BTD)
    assert not fits(DiscreteHead(24, 5), torch.randn(1, 2, 24))
    assert not fits(DiscreteHead(32, 5).double(), h_BTD.double())
