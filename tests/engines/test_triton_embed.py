"""The fused embedding against its slow twin: on a GPU where there is one, by Triton's interpreter elsewhere."""

# ruff: noqa: E402 (what needs Triton is imported where there is Triton)
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
pytest.importorskip("triton")

from tests.builders import randomise
from uat.engines.triton import embed as triton_embed
from uat.engines.triton import outer as triton_outer
from uat.engines.triton import train as triton_train
from uat.engines.triton.embed import embeds, fused_embed
from uat.engines.triton.train import fused_features
from uat.episode import Batch
from uat.nn.blocks import Transformer, TransformerConfig
from uat.spec import Assets, Discrete, Spec, Vector

DEVICE = "cuda" if CUDA else "cpu"
EMBEDDING = ("encoder.linear.weight", "encoder.linear.bias", "positions", "norm.weight", "norm.bias")


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a program goes through several episodes, and the interpreter through few programs."""
    monkeypatch.setattr(triton_embed, "PROGRAMS", 4)
    if not CUDA:
        monkeypatch.setattr(triton_outer, "COLUMNS", 1024)


def build(obs: Vector | Assets, d_model: int, horizon: int, **more: Any) -> Transformer:
    config = TransformerConfig(d_model=d_model, num_heads=1, num_layers=1, d_ff=16, dropout=0.0, **more)
    backbone = Transformer(Spec(obs=obs, action=Discrete(4), horizon=horizon), config, utility=False)
    return randomise(backbone, 1).float().to(DEVICE).train()


def some_batch(*shape: int) -> Batch:
    """Return a batch with observations of this shape, (B, T, ...)."""
    obs = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ids = torch.zeros(shape[:2], dtype=torch.long)
    return Batch(obs=obs, prev_action=ids, prev_reward=ids.float(), target=ids, valid=ids == 0).to(DEVICE)


def result(backbone: Transformer, embed: Callable[[], Tensor]) -> list[Tensor]:
    """Return the output, by rows, and the gradients of the weights for a loss that weights all entries differently."""
    backbone.zero_grad()
    x_ND = embed().flatten(0, -2)
    (x_ND * torch.linspace(-1, 2, x_ND.numel(), device=DEVICE).view_as(x_ND) ** 2).sum().backward()
    weights = dict(backbone.named_parameters())
    gradients = [weights[name].grad for name in EMBEDDING]
    return [x_ND.detach(), *(gradient.clone() for gradient in gradients if gradient is not None)]


def check(backbone: Transformer, batch: Batch, tolerance: float = 1e-5) -> None:
    assert embeds(backbone, batch)
    fast = result(backbone, lambda: fused_embed(backbone, batch))
    backbone.double()
    slow = result(backbone, lambda: backbone.embed(batch.obs))
    assert len(fast) == len(slow) == 1 + len(EMBEDDING)
    for name, one, other in zip(("x", *EMBEDDING), fast, slow, strict=True):
        assert one.dtype == torch.float32
        assert one.shape == other.shape
        assert (one - other).abs().max() < tolerance * other.abs().max(), name


@pytest.mark.parametrize(
    ("episodes", "steps", "wide", "d_model"),
    [(1, 1, 1, 16), (5, 7, 5, 32), (9, 3, 17, 64), (3, 40, 10, 64), (2, 33, 128, 16), (1, 2, 65, 128)],
)
def test_outputs_and_gradients_are_those_of_the_slow_one(episodes: int, steps: int, wide: int, d_model: int) -> None:
    check(build(Vector(wide), d_model, horizon=steps), some_batch(episodes, steps, wide))


def test_observations_of_several_axes_are_laid_side_by_side() -> None:
    check(build(Assets(3, 4), 16, horizon=5), some_batch(2, 5, 3, 4))


@pytest.mark.parametrize(
    ("steps", "more"),
    [
        (5, {"max_positions": 31}),
        (5, {"max_positions": 100}),
        (32, {"max_positions": 33}),
        (5, {"max_positions": 3, "past_table": "clamp"}),
    ],
)
def test_positions_that_no_step_has_get_no_gradient_and_the_last_of_a_short_table_that_of_all_beyond(
    steps: int, more: dict[str, Any]
) -> None:
    check(build(Vector(5), 16, horizon=steps, **more), some_batch(3, steps, 5))


def test_too_many_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="position table"):
        fused_embed(build(Vector(5), 16, horizon=5, max_positions=3), some_batch(1, 5, 5))


@pytest.fixture(params=[False, True], ids=["exact", "tf32"])
def rounds(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether products may round to tf32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = request.param
    yield request.param
    torch.backends.cuda.matmul.allow_tf32 = before


def test_observations_may_be_beyond_half_precision(rounds: bool) -> None:
    batch = some_batch(3, 7, 5)
    batch.obs *= 1e6
    check(build(Vector(5), 16, horizon=7), batch, 5e-3 if rounds else 1e-5)


def test_all_parts_are_written_and_bits_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, batch = build(Vector(40), 32, horizon=40), some_batch(5, 35, 40)
    found = [result(backbone, lambda: fused_embed(backbone, batch))]
    poisoned = lambda *size, **given: torch.full(size, float("nan"), **given)  # noqa: E731
    monkeypatch.setattr(torch, "empty", poisoned)
    found.append(result(backbone, lambda: fused_embed(backbone, batch)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_the_pass_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, batch = build(Vector(5), 16, horizon=5), some_batch(2, 3, 5)
    monkeypatch.delattr(triton_train, "fused_linear")
    check_pass(backbone, batch)


@pytest.mark.parametrize("why", ["starts", "too wide", "a gradient is asked for"])
def test_the_pass_goes_without_where_it_does_not_fit(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(triton_train, "fused_embed")
    wide = 129 if why == "too wide" else 5
    backbone, batch = build(Vector(wide), 16, horizon=9), some_batch(2, 3, wide)
    if why == "starts":
        batch.start = torch.tensor([4, 0], device=DEVICE)
    batch.obs.requires_grad_(why == "a gradient is asked for")
    check_pass(backbone, batch)


def check_pass(backbone: Transformer, batch: Batch) -> None:
    found = []
    for attend in (
        lambda: backbone.attend(backbone.embed(batch.obs, batch.start)),
        lambda: fused_features(backbone, None, batch, torch.zeros((), dtype=torch.long, device=DEVICE)),
    ):
        batch.obs.grad = None
        found.append(result(backbone, attend))
        found[-1] += [] if batch.obs.grad is None else [batch.obs.grad]
    assert len(found[0]) == 1 + len(EMBEDDING) + batch.obs.requires_grad
    for slow, fast in zip(*found, strict=True):
        assert (slow - fast).abs().max() < 1e-4 * slow.abs().max()
