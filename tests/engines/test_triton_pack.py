"""Weights packed in one launch against packing by torch: on a GPU if available, interpreted elsewhere."""

# ruff: noqa: E402 (what needs Triton is imported where there is Triton)
from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

CUDA = torch.cuda.is_available()
pytest.importorskip("triton")

from tests.builders import randomise
from uat.engines.fused import utility_of
from uat.engines.triton import pack as triton_pack
from uat.engines.triton.acting import SMALL
from uat.engines.triton.complete_weights import feedback, projections
from uat.engines.triton.pack import Packed
from uat.engines.triton.step import pack
from uat.engines.triton.tensor_core_layout import arrange
from uat.methods import METHODS
from uat.methods.policy import TransformerPolicy
from uat.nn.blocks import Block
from uat.spec import Discrete, Spec, Vector
from uat.training.surroundings import precision

DEVICE = "cuda" if CUDA else "cpu"
SPEC = Spec(obs=Vector(5), action=Discrete(4), horizon=10)
ODD = (1e6, -1e6, 65519.0, torch.inf, torch.nan, -0.0, 1e-9)
"""Too large for half precision, no number, a zero with a sign, too small."""


def build(method: str, **sizes: int) -> TransformerPolicy:
    """Weights at random, in each parameter some odd ones."""
    policy = METHODS[method].build(SPEC, METHODS[method].configure(**sizes))
    assert isinstance(policy, TransformerPolicy)
    randomise(policy, 1).float()
    for p in policy.parameters():
        places = torch.randperm(p.numel(), generator=torch.Generator().manual_seed(p.numel()))[: len(ODD)]
        p.data.view(-1)[places] = torch.tensor(ODD)[: len(places)]
    return policy.to(DEVICE)


def slowly(policy: TransformerPolicy, *, half: bool, tensor_core_layout: bool) -> Packed:
    """Each matrix reordered alone, if it is reordered, and rounded by torch."""
    backbone, d, matrices, vectors = policy.backbone, policy.backbone.config.d_model, [], []
    for block in backbone.blocks:
        assert isinstance(block, Block)
        a, (up, _, down) = block.attention, cast("tuple[nn.Linear, Any, nn.Linear]", tuple(block.ff))
        weight, bias = projections(a.project)
        rest = [a.out.weight, up.weight, down.weight]
        if tensor_core_layout:
            matrices += [arrange(part, narrow=True) for part in weight.split(d)]
            blocks = [] if bias is None else [torch.block_diag(*part) for part in bias]
            matrices += [arrange(part, narrow=True, short=True) for part in blocks]
            matrices += [arrange(part, narrow=True) for part in rest]
        else:
            matrices += [weight, *([] if bias is None else [bias]), *rest]
        vectors += [block.attention_norm.weight, block.attention_norm.bias, a.out.bias]
        vectors += [block.ff_norm.weight, block.ff_norm.bias, down.bias, up.bias]
    vectors += [backbone.last_norm.weight, backbone.last_norm.bias]
    packed, told = torch.cat([part.flatten() for part in matrices]), None
    if half:
        most = torch.finfo(torch.float16).max
        packed = packed.clamp(-most, most).half()
    if (utility := utility_of(policy)) is not None:
        told = feedback(utility)
        if tensor_core_layout and d * told.token.shape[1] <= SMALL.value:
            told = told._replace(token=torch.cat([arrange(part) for part in told.token.split(d)]))
    return Packed(packed, torch.cat(vectors), told, tensor_core_layout)


def check(policy: TransformerPolicy, precise: str, *, tensor_core_layout: bool) -> None:
    with precision(precise), torch.no_grad():
        found = pack(policy.backbone, utility_of(policy))
        expected = slowly(policy, half=precise == "tf32", tensor_core_layout=tensor_core_layout)
    assert found.tensor_core_layout == tensor_core_layout
    assert found.matrices.isnan().any()
    assert found.vectors.isnan().any()
    same_bits(found.matrices, expected.matrices)
    same_bits(found.vectors, expected.vectors)
    assert (found.feedback is None) == (expected.feedback is None)
    for one, other in zip(found.feedback or (), expected.feedback or (), strict=True):
        if other is not None:
            same_bits(one, other)


def same_bits(found: Tensor | None, expected: Tensor) -> None:
    """Compare bits, but treat all NaN as equal."""
    assert found is not None
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    kind = torch.int16 if found.dtype == torch.float16 else torch.int32
    real = ~expected.isnan()
    assert torch.equal(~found.isnan(), real)
    assert torch.equal(found[real].view(kind), expected[real].view(kind))


@pytest.mark.parametrize("method", ["vanilla", *(name for name in METHODS if name.split("-")[0] == "uat")])
def test_weights_of_every_variant_are_packed_as_torch_would(method: str) -> None:
    check(build(method, d_model=32, num_heads=2, d_ff=64, num_layers=2), "tf32", tensor_core_layout=True)


@pytest.mark.parametrize("method", ["vanilla", "uat"])
@pytest.mark.parametrize(
    ("d", "heads", "f", "layers"), [(16, 2, 32, 2), (32, 1, 32, 3), (32, 4, 128, 1), (64, 4, 128, 3), (64, 1, 64, 1)]
)
def test_so_are_those_of_every_size(method: str, d: int, heads: int, f: int, layers: int) -> None:
    check(build(method, d_model=d, num_heads=heads, d_ff=f, num_layers=layers), "tf32", tensor_core_layout=True)


@pytest.mark.parametrize(
    ("method", "d", "precise"), [("vanilla", 32, "fp32"), ("uat", 32, "fp32"), ("vanilla", 128, "tf32")]
)
def test_without_the_layout_matrices_lie_side_by_side(method: str, d: int, precise: str) -> None:
    check(build(method, d_model=d, num_heads=4, d_ff=64, num_layers=2), precise, tensor_core_layout=False)


def test_gates_of_wide_utilities_are_left_as_they_are() -> None:
    policy = build("uat", d_model=64, num_heads=4, d_ff=64, num_layers=1, d_utility=128)
    check(policy, "tf32", tensor_core_layout=True)
    with precision("tf32"):
        told = pack(policy.backbone, utility_of(policy)).feedback
    assert told is not None
    assert told.token is cast(nn.Linear, cast(Any, utility_of(policy)).token).weight


@pytest.mark.parametrize("method", ["vanilla", "uat"])
def test_many_layers_take_several_launches(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_pack, "MOST_LAYERS", 2)
    check(build(method, d_model=16, num_heads=2, d_ff=32, num_layers=5), "tf32", tensor_core_layout=True)


def test_a_parameter_may_lie_in_memory_in_any_order() -> None:
    policy = build("uat", d_model=16, num_heads=2, d_ff=32, num_layers=2)
    linear = cast(Any, policy.backbone.blocks[1]).ff[0]
    linear.weight.data = linear.weight.data.t().contiguous().t()
    check(policy, "tf32", tensor_core_layout=True)
