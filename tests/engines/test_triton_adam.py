"""Clipping and Adam in two launches against torch: on a GPU where there is one, by Triton's interpreter elsewhere."""

# ruff: noqa: E402 (what needs Triton is imported where there is Triton)
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

CUDA = torch.cuda.is_available()
pytest.importorskip("triton")

from uat.engines import kernels
from uat.engines.graph import Captured
from uat.engines.triton import adam as triton_adam
from uat.engines.triton.adam import CHUNK, fits, fused_adam
from uat.engines.update import optimize
from uat.episode import Batch
from uat.methods import Phase

DEVICE = "cuda" if CUDA else "cpu"
SHAPES = [(1,), (CHUNK - 1,), (CHUNK,), (CHUNK + 1,), (5,), (40, 33)]
SMALL = [(3,), (2, 5), (7,)]
Adam = torch.optim.Adam


def build(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32, **settings: Any) -> Adam:
    """Two groups of parameters with the same numbers each time; the second has a decay and a higher rate.

    They are small, so that what is added to them is seen.
    """
    generator = torch.Generator().manual_seed(0)
    numbers = [0.01 * torch.randn(shape, generator=generator) for shape in shapes]
    parameters = [nn.Parameter(some.to(DEVICE, dtype)) for some in numbers]
    rates, half = [torch.tensor(rate, device=DEVICE) for rate in (0.01, 0.1)], len(shapes) // 2
    groups = [
        {"params": parameters[:half], "lr": rates[0], "weight_decay": 0.0},
        {"params": parameters[half:], "lr": rates[1], "weight_decay": 0.01},
    ]
    optimizer = Adam(groups, fused=True, capturable=CUDA, **settings)
    for p in parameters:
        zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        optimizer.state[p] = {"step": torch.zeros((), device=DEVICE), **zeros}
    return optimizer


def parameters_of(optimizer: Adam) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def give_gradients(optimizer: Adam, step: int, but: int | None = None) -> None:
    """Set gradients of every parameter but one, larger ones at every other step."""
    generator, scale = torch.Generator().manual_seed(step), 2.0 if step % 2 else 0.5
    for index, p in enumerate(parameters_of(optimizer)):
        drawn = scale * torch.randn(p.shape, generator=generator)
        p.grad = None if index == but else drawn.to(p)


def slow_adam(optimizer: Adam, clip: float) -> Tensor:
    norm = nn.utils.clip_grad_norm_(parameters_of(optimizer), clip)
    optimizer.step()
    return norm


def everything(optimizer: Adam) -> dict[str, Tensor]:
    found = {}
    for index, p in enumerate(parameters_of(optimizer)):
        found |= {f"{index} {name}": value.detach() for name, value in {"p": p, **optimizer.state[p]}.items()}
    return found


def check(fast: dict[str, Tensor], slow: dict[str, Tensor]) -> None:
    assert fast.keys() == slow.keys()
    for name, value in slow.items():
        size = value.abs().max().clamp_min(0.02)  # of a single number little may be left, after steps to and fro
        assert (fast[name] - value).abs().max() <= 1e-6 * size, name


def test_twenty_steps_are_those_of_torch_in_double_precision() -> None:
    """Some gradients are clipped; one parameter has a gradient only at every third step, and one never."""
    fast, slow = build(SHAPES), build(SHAPES, torch.float64)
    clip = math.sqrt(sum(math.prod(shape) for shape in SHAPES))
    clipped = 0
    for step in range(20):
        for optimizer in (fast, slow):
            give_gradients(optimizer, step, but=None if step % 3 == 0 else 1)
            parameters_of(optimizer)[4].grad = None
        assert fits(fast)
        norm, expected = fused_adam(fast, clip), slow_adam(slow, clip)
        assert norm.shape == ()
        assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
        clipped += norm.item() > clip
        if step in (0, 2):  # later steps would hide what the first ones have wrong
            check(everything(fast), everything(slow))
    assert clipped == 10
    check(everything(fast), everything(slow))
    assert [fast.state[p]["step"].item() for p in parameters_of(fast)] == [20, 7, 20, 20, 0, 20]
    assert torch.equal(parameters_of(fast)[4], parameters_of(build(SHAPES))[4])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_spreads_as_in_torch(number: float) -> None:
    """An infinite norm makes all other gradients zero; a norm that is NaN makes all of them NaN."""
    fast, slow, told = build(SMALL), build(SMALL, torch.float64), []
    for optimizer, move in ((fast, fused_adam), (slow, slow_adam)):
        give_gradients(optimizer, 1)
        gradient = parameters_of(optimizer)[1].grad
        assert gradient is not None
        gradient[1, 2] = number
        told.append(move(optimizer, 1.0))
    assert told[0].item() == pytest.approx(told[1].item(), nan_ok=True)
    torch.testing.assert_close(
        everything(fast), everything(slow), equal_nan=True, check_dtype=False, rtol=1e-5, atol=1e-7
    )
    none = sum(int(p.isnan().sum()) for p in parameters_of(fast))
    assert none == (20 if math.isnan(number) else 1)


def test_tensors_may_be_shared_out_over_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk sums may be read in several passes, too."""
    one, many = build(SHAPES), build(SHAPES)
    for optimizer in (one, many):
        give_gradients(optimizer, 1)
    norm = fused_adam(one, 1.0)
    monkeypatch.setattr(triton_adam, "MOST", 4)
    assert torch.equal(fused_adam(many, 1.0), norm)
    for name, value in everything(one).items():
        assert torch.equal(everything(many)[name], value), name
    monkeypatch.setattr(triton_adam, "MOST_PARTS", 2)
    again = build(SHAPES)
    give_gradients(again, 1)
    torch.testing.assert_close(fused_adam(again, 1.0), norm)
    check(everything(again), everything(one))


def other_betas(optimizer: Adam) -> None:
    optimizer.param_groups[1]["betas"] = (0.5, 0.9)


def rate_of_the_host(optimizer: Adam) -> None:
    optimizer.param_groups[1]["lr"] = 0.1


def no_gradients(optimizer: Adam) -> None:
    optimizer.zero_grad()


def no_state(optimizer: Adam) -> None:
    del optimizer.state[parameters_of(optimizer)[1]]


def turned(optimizer: Adam) -> None:
    p = parameters_of(optimizer)[1]
    p.data = p.data.T.contiguous().T


def turned_gradient(optimizer: Adam) -> None:
    p = parameters_of(optimizer)[1]
    assert p.grad is not None
    p.grad = p.grad.T.contiguous().T


def sparse(optimizer: Adam) -> None:
    p = parameters_of(optimizer)[1]
    assert p.grad is not None
    p.grad = p.grad.to_sparse()


@pytest.mark.parametrize(
    "change", [other_betas, rate_of_the_host, no_gradients, no_state, turned, turned_gradient, sparse]
)
def test_what_is_not_plain_is_left_to_torch(change: Callable[[Adam], None]) -> None:
    optimizer = build(SMALL)
    give_gradients(optimizer, 0)
    assert fits(optimizer)
    assert kernels.can_descend(optimizer) == CUDA
    change(optimizer)
    assert not fits(optimizer)


@pytest.mark.parametrize("settings", [{"amsgrad": True}, {"maximize": True}, {"dtype": torch.float64}])
def test_so_are_other_settings_and_types(settings: dict[str, Any]) -> None:
    optimizer = build(SMALL, **settings)
    give_gradients(optimizer, 0)
    assert not fits(optimizer)


def test_so_are_very_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = build(SMALL)
    give_gradients(optimizer, 0)
    for most, fit in ((20, True), (19, False)):
        monkeypatch.setattr(triton_adam, "MOST_NUMBERS", most)
        assert fits(optimizer) is fit


@pytest.mark.parametrize("compiles", [False, True])
def test_it_is_for_devices_that_kernels_are_compiled_for(*, compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = build(SMALL)
    give_gradients(optimizer, 0)
    monkeypatch.setattr(kernels, "compiles", lambda device: compiles)
    assert kernels.can_descend(optimizer) is compiles


def test_an_optimize_step_takes_it_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only torch clips gradients in memory; the kernel leaves them unchanged."""
    found, empty = [], torch.zeros(1, 1, device=DEVICE)
    batch = Batch(obs=empty, prev_action=empty, prev_reward=empty, target=empty, valid=empty)
    for fused in (False, True):
        monkeypatch.setattr(kernels, "can_descend", lambda optimizer, fused=fused: fused and fits(optimizer))
        optimizer = build(SMALL)
        ps = parameters_of(optimizer)

        def loss(batch: Batch, ps: list[nn.Parameter] = ps) -> dict[str, tuple[Tensor, Tensor]]:
            return {"toy": (torch.cat([p.flatten() for p in ps]).square().sum(), torch.ones_like(batch.valid).sum())}

        before = torch.cat([p.detach().flatten() for p in ps])
        numbers = optimize(Phase("toy", loss), batch, optimizer, 0.01)
        gradient = torch.cat([p.grad.flatten() for p in ps if p.grad is not None])
        assert torch.equal(gradient, 2 * before) is fused
        found.append((numbers, everything(optimizer)))
    (slow_numbers, slow), (fast_numbers, fast) = found
    torch.testing.assert_close(fast_numbers, slow_numbers, rtol=1e-6, atol=0)
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_captured_steps_have_the_bits_of_plain_ones() -> None:
    """Use more tensors than fit into one launch."""
    shapes = [(i % 7 + 1, 3 * i + 1) for i in range(100)]
    found = []
    for captured in (False, True, False):
        optimizer = build(shapes)
        give_gradients(optimizer, 1)

        def run(optimizer: Adam = optimizer) -> Tensor:
            return fused_adam(optimizer, 1.0)

        again = Captured(run, preserve=list(everything(optimizer).values())) if captured else run
        norms = [again().clone() for _ in range(5)]
        found.append({**everything(optimizer), "norm": torch.stack(norms)})
    for other in found[1:]:
        for name, value in found[0].items():
            assert torch.equal(value, other[name]), name
