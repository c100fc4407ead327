"""The fused training pass against its slow twin: on a GPU where there is one, by Triton's interpreter elsewhere."""

# ruff: noqa: E402 (what needs Triton is imported where there is Triton)
from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

CUDA = torch.cuda.is_available()
pytest.importorskip("triton")

import triton
import triton.language as tl

from tests.builders import crossed, interpreted, randomise
from uat.engines import FusedEngine
from uat.engines.fused import fused_view
from uat.engines.triton import outer as triton_outer
from uat.engines.triton.dropout import fused_dropout
from uat.engines.triton.outer import added, outer
from uat.engines.triton.parts import dropped, kept
from uat.engines.triton.train import fused_attend
from uat.episode import Batch
from uat.methods import METHODS
from uat.methods.policy import TransformerPolicy
from uat.spec import Discrete, Spec, Vector

DEVICE = "cuda" if CUDA else "cpu"
SMALL = {"d_model": 32, "num_heads": 2, "num_layers": 2, "d_ff": 64, "dropout": 0.0}
FULL = {"d_model": 64, "num_heads": 4, "num_layers": 3, "d_ff": 128, "dropout": 0.0}


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The interpreter goes through programs one by one; sums are added up by larger ones there."""
    if not CUDA and "added" not in request.node.name:
        monkeypatch.setattr(triton_outer, "COLUMNS", 1024)


FUSED = [name for name, m in METHODS.items() if issubclass(m.policy, TransformerPolicy)]


def build(method: str, sizes: dict[str, Any], horizon: int) -> TransformerPolicy:
    spec = Spec(obs=Vector(5), action=Discrete(4), horizon=horizon)
    policy = METHODS[method].build(spec, METHODS[method].configure(**sizes))
    assert isinstance(policy, TransformerPolicy)
    return randomise(policy, 1).float().to(DEVICE).train()


def some_batch(episodes: int, steps: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    return Batch(
        obs=torch.randn(episodes, steps, 5, generator=generator),
        prev_action=torch.randint(-1, 4, (episodes, steps), generator=generator),
        prev_reward=torch.randn(episodes, steps, generator=generator),
        target=torch.randint(0, 4, (episodes, steps), generator=generator),
        valid=torch.ones(episodes, steps, dtype=torch.bool),
    ).to(DEVICE)


def passes(policy: TransformerPolicy, batch: Batch) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Return features and gradients of a loss: slow, then fused."""
    found = []
    for way in (policy, fused_view(policy, fused_pass=True)):
        policy.zero_grad()
        h_BTD = way.features(batch)
        (policy.head.nll(h_BTD, batch.required_target).sum() + h_BTD.square().sum()).backward()
        found.append((h_BTD.detach(), {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}))
    return found


def check(policy: TransformerPolicy, batch: Batch, tolerance: float) -> None:
    (slow, slow_grads), (fast, fast_grads) = passes(policy, batch)
    assert (slow - fast).abs().max() < tolerance * slow.abs().max()
    assert slow_grads.keys() == fast_grads.keys()
    for name, grad in slow_grads.items():
        assert (grad - fast_grads[name]).abs().max() < tolerance * grad.abs().max().clamp_min(1e-3), name


@pytest.mark.parametrize(
    ("method", "episodes", "steps"),
    [
        *((m, 1, 3) for m in FUSED),
        *(interpreted(m, 2, 5) for m in FUSED),
        *(interpreted(m, *size) for m in ("uat", "vanilla") for size in [(1, 1), (3, 17)]),
    ],
)
def test_the_fused_pass_gives_outputs_and_gradients_of_the_slow_one(method: str, episodes: int, steps: int) -> None:
    check(build(method, SMALL, 20), some_batch(episodes, steps), 1e-4)


def test_a_pass_without_gates_leaves_those_of_a_gated_backbone_alone() -> None:
    policy = build("uat", SMALL, 20)
    x_BTD, found = torch.randn(2, 5, 32, device=DEVICE), []
    seed = torch.zeros((), dtype=torch.long, device=DEVICE)
    for attend in (policy.backbone.attend, lambda x: fused_attend(policy.backbone, x, seed)):
        policy.zero_grad()
        h_BTD = attend(x_BTD)
        h_BTD.square().sum().backward()
        found.append((h_BTD.detach(), {n: p.grad for n, p in policy.backbone.named_parameters() if p.grad is not None}))
    (slow, slow_grads), (fast, fast_grads) = found
    torch.testing.assert_close(slow, fast, rtol=1e-4, atol=1e-4)
    for name, grad in slow_grads.items():
        torch.testing.assert_close(grad, fast_grads[name], rtol=1e-3, atol=1e-3 * float(grad.abs().max()), msg=name)


def test_second_derivatives_are_refused() -> None:
    """Second derivatives would be those of the head alone, so they are refused."""
    policy, batch = build("uat", SMALL, 20), some_batch(1, 2)
    view = fused_view(policy, fused_pass=True)
    loss = policy.head.nll(view.features(batch), batch.required_target).sum()
    gradients = torch.autograd.grad(loss, list(policy.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.stack([gradient.square().sum() for gradient in gradients]).sum().backward()


@pytest.mark.parametrize(("method", "width"), [interpreted("uat", 4), ("uat", 20), interpreted("uat-linear", 4)])
def test_the_same_for_utilities_of_any_width(method: str, width: int) -> None:
    check(build(method, {**SMALL, "d_utility": width, "d_hidden": 24}, 20), some_batch(2, 5), 1e-4)


@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        interpreted("uat", {"d_model": 64, "num_heads": 4, "d_ff": 32}),
        interpreted("vanilla", {"d_model": 128, "num_heads": 2, "d_ff": 64}),
        ("vanilla", {"d_model": 16, "num_heads": 1, "d_ff": 256}),
        interpreted("uat", {"d_model": 64, "num_heads": 1, "d_ff": 64}),
    ],
)
def test_the_same_where_hidden_units_are_few_or_many_and_heads_wide(method: str, sizes: dict[str, int]) -> None:
    check(build(method, {**SMALL, **sizes}, 20), some_batch(2, 5), 1e-4)


@pytest.fixture
def _rounds() -> Iterator[None]:
    """Products may round to tf32, and so to half precision inside the blocks."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.usefixtures("_rounds")
@pytest.mark.parametrize(("method", "size"), crossed(pytest.mark.kernels, ("uat", "vanilla"), (1e-12, 1e12, 1.0)))
def test_in_half_precision_gradients_of_any_size_come_back(method: str, size: float) -> None:
    policy, batch = build(method, SMALL, 20), some_batch(3, 17)
    gradients = []
    for way in (policy, fused_view(policy, fused_pass=True)):
        policy.zero_grad()
        h_BTD = way.features(batch)
        (size * (policy.head.nll(h_BTD, batch.required_target).sum() + h_BTD.square().sum())).backward()
        gradients.append({n: p.grad.double() / size for n, p in policy.named_parameters() if p.grad is not None})
    for name, grad in gradients[0].items():
        off = (grad - gradients[1][name]).norm()
        assert off < 5e-3 * grad.norm().clamp_min(1e-3), (name, off, grad.norm())


@pytest.mark.usefixtures("_rounds")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("bad", [float("inf"), interpreted(float("nan"))])
def test_in_half_precision_a_gradient_that_is_no_number_stays_none(bad: float) -> None:
    policy, batch = build("uat", SMALL, 20), some_batch(2, 3)
    h_BTD = fused_view(policy, fused_pass=True).features(batch)
    (h_BTD * torch.full_like(h_BTD, bad)).sum().backward()
    for name, p in policy.backbone.blocks.named_parameters():
        assert p.grad is not None
        assert not p.grad.isfinite().any(), name


@pytest.mark.parametrize("rows", [(1,), (300, 5), (240, 48, 64)])
def test_parts_are_added_up_in_one_launch(rows: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(n, 33 + 7 * i, generator=generator).to(DEVICE) for i, n in enumerate(rows)]
    for found, part in zip(added(*parts), parts, strict=True):
        torch.testing.assert_close(found, part.sum(0), rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("method", "episodes", "steps"),
    [*((m, 256, 60) for m in FUSED), ("uat", 63, 100), ("vanilla", 63, 100), ("uat", 257, 7)],
)
def test_the_same_at_full_size(method: str, episodes: int, steps: int) -> None:
    check(build(method, FULL, 100), some_batch(episodes, steps), 1e-3)


def test_what_is_dropped_depends_on_the_seed_alone() -> None:
    policy, batch = build("uat", {**SMALL, "dropout": 0.3}, 20), some_batch(2, 9)
    engine = FusedEngine(policy)

    def features(seed: int) -> torch.Tensor:
        engine.reseed(seed)
        return engine.learner.features(batch).detach()

    assert torch.equal(features(5), features(5))
    assert not torch.equal(features(5), features(6))
    policy.eval()
    assert torch.equal(features(5), features(6))


def test_gradients_with_dropout_are_those_of_what_was_computed() -> None:
    """Along a random direction the loss rises as its gradient says; the same seed drops the same."""
    policy, batch = build("uat", {**SMALL, "dropout": 0.3, "num_layers": 1}, 20), some_batch(2, 5)
    engine = FusedEngine(policy)
    engine.reseed(3)

    def loss() -> torch.Tensor:
        h_BTD = engine.learner.features(batch)
        return (h_BTD * torch.linspace(-1, 1, h_BTD.numel(), device=DEVICE).view_as(h_BTD)).sum()

    loss().backward()
    parameters = [p for p in policy.parameters() if p.grad is not None]
    generator = torch.Generator().manual_seed(1)
    directions = [torch.randn(p.shape, generator=generator).to(DEVICE) for p in parameters]
    slope = sum((p.grad * v).sum().item() for p, v in zip(parameters, directions, strict=True) if p.grad is not None)
    step, sides = 1e-5, []  # so small that hardly any unit starts or stops in between
    for sign in (1, -2):
        with torch.no_grad():
            for p, v in zip(parameters, directions, strict=True):
                p += sign * step * v
            sides.append(loss().item())
    assert abs((sides[0] - sides[1]) / (2 * step) - slope) < 0.02 * abs(slope) + 0.15


@triton.jit(do_not_specialize=["site"])
def _drop(x_ptr, seed_ptr, out_ptr, site, N: tl.constexpr, DROP: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out_ptr + n, dropped(tl.load(x_ptr + n), seed_ptr, n, site, DROP))


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_the_stated_share_is_dropped_and_the_mean_kept(share: float) -> None:
    ones = torch.ones(1 << 14, device=DEVICE)
    masks = {}
    for seed, site in ((7, 0), (7, 1), (8, 0), (7 + 2**32, 0)):
        out = torch.empty_like(ones)
        cast(Any, _drop)[(1,)](ones, torch.tensor(seed, device=DEVICE), out, site, N=len(ones), DROP=share)
        dropped = out == 0
        assert abs(dropped.float().mean() - share) < 4 * (share * (1 - share) / len(ones)) ** 0.5
        assert torch.allclose(out[~dropped], torch.tensor(1 / (1 - share), device=DEVICE))
        masks[seed, site] = dropped.float() - share
    spread = share * (1 - share)
    pairs = list(itertools.combinations(masks.values(), 2))  # seeds and sites draw independently, and so do neighbours
    pairs += [(mask, mask.roll(lag)) for mask in masks.values() for lag in (1, 2, 64, 128)]
    for one, other in pairs:
        assert abs((one * other).mean() / spread) < 5 / len(ones) ** 0.5


def test_sums_over_rows_of_half_precision_are_float32() -> None:
    """The sum of two hundred rows of 1,500 exceeds the range of half precision."""
    a, b = torch.full((200, 24), 1500.0, device=DEVICE).half(), torch.randn(200, 40, device=DEVICE).half()
    product, total = outer(a, b, splits=2, precision="half")
    assert torch.allclose(total, torch.full((24,), 300_000.0, device=DEVICE))
    assert torch.allclose(product, a.float().T @ b.float(), rtol=1e-4, atol=1.0)


@triton.jit(do_not_specialize=["site"])
def _keep(seed_ptr, out_ptr, site, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DROP: tl.constexpr):
    n, d = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    stays = kept(tl.load(seed_ptr), n, d, site, DROP)
    tl.store(out_ptr + n[:, None] * COLUMNS + d[None, :], stays.to(tl.float32))


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_entries_of_a_block_are_dropped_as_if_each_had_a_coin_of_its_own(share: float) -> None:
    rows, columns = 1024, 64
    masks = {}
    for seed, site in ((7, 0), (7, 1), (8, 0), (7 + 2**32, 0)):
        out = torch.empty(rows, columns, device=DEVICE)
        cast(Any, _keep)[(1,)](torch.tensor(seed, device=DEVICE), out, site, ROWS=rows, COLUMNS=columns, DROP=share)
        masks[seed, site] = mask = (1 - share) - out
        spread = share * (1 - share)
        assert abs(mask.mean()) < 4 * (spread / mask.numel()) ** 0.5
        for axis, size in ((0, columns), (1, rows)):  # how many a row, or a column, loses varies as coins would have it
            assert mask.mean(axis).abs().max() < 7 * (spread / mask.shape[axis]) ** 0.5
            assert abs(mask.sum(axis).var() / (spread * mask.shape[axis]) - 1) < 6 * (2 / size) ** 0.5
    bound = 5 / (rows * columns) ** 0.5
    pairs = list(itertools.combinations(masks.values(), 2))
    shifts = [(1, 0), (2, 0), (64, 0), (0, 1), (0, 2), (0, 16), (1, 1), (3, 5)]
    pairs += [(mask, mask.roll(shift, (0, 1))) for mask in masks.values() for shift in shifts]
    for one, other in pairs:
        assert abs((one * other).mean() / spread) < bound
    for mask in masks.values():  # nor do the corners of rectangles go together, though rows and columns share numbers
        for down, right in ((1, 1), (5, 3), (100, 17)):
            corners = mask * mask.roll(down, 0) * mask.roll(right, 1) * mask.roll((down, right), (0, 1))
            assert abs(corners.mean() / spread**2) < 2 * bound


def test_dropout_on_its_own_keeps_and_passes_back_the_same_places() -> None:
    x = torch.randn(3, 700, device=DEVICE, requires_grad=True)
    seed = torch.tensor(11, device=DEVICE)
    y = fused_dropout(x, seed, 0.25)
    kept = y != 0
    assert abs(kept.float().mean().item() - 0.75) < 0.04
    assert torch.allclose(y[kept], x[kept] / 0.75)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(dx, kept / 0.75)
    assert torch.equal(y, fused_dropout(x, seed, 0.25))
    assert not torch.equal(y, fused_dropout(x, seed + 1, 0.25))
