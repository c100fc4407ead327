"""The grouped weight gradient against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from uat.nn.kernels.linear import GroupedLinear, group_count

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("shape", [(256, 60), (63, 1), (1, 997), (5, 7, 11)])
@pytest.mark.parametrize("biased", [True, False])
def test_outputs_are_the_same_bits_and_gradients_agree(shape: tuple[int, ...], biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, b, dy = (
        torch.randn(*s, generator=generator, dtype=torch.float64).to(DEVICE)
        for s in ((*shape, 8), (12, 8), (12,), (*shape, 12))
    )
    results = []
    for function in (F.linear, GroupedLinear.apply):
        leaves = [tensor.clone().requires_grad_() for tensor in ((x, w, b) if biased else (x, w))]
        y = function(*leaves, *([] if biased else [None]))
        y.backward(dy)
        results.append((y.detach(), [leaf.grad for leaf in leaves]))
    (plain, expected), (grouped, found) = results
    assert torch.equal(plain, grouped)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_groups_are_equal_and_as_many_as_may_be() -> None:
    assert [group_count(n) for n in (1, 63, 64, 997, 15360, 130)] == [1, 63, 64, 1, 64, 26]
