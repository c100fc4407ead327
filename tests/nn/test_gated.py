"""Gates against their equations, and segments with memory against one long pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.builders import SIZES, SPECS, random_observations, randomise
from uat.nn.blocks import BackboneConfig
from uat.nn.gated import GatedTransformer, GRUGate, Memory

D = 6
SPEC = SPECS["vector-discrete"]
EXACT: Any = {"rtol": 0, "atol": 1e-12}


def random_numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_gate() -> GRUGate:
    return randomise(GRUGate(D, 2.0).double(), 0)


def random_backbone(memory: int, **settings: Any) -> GatedTransformer:
    sizes = {name: SIZES[name] for name in ("d_model", "num_heads", "num_layers", "d_ff", "dropout")} | settings
    return randomise(GatedTransformer(SPEC, BackboneConfig(**sizes), memory=memory, gate_bias=2.0).double(), 0).eval()


def observations(steps: int, seed: int = 0) -> Tensor:
    return random_observations(SPEC, (3, steps), torch.Generator().manual_seed(seed)).double()


# ---------------------------------------------------------------- gates


def test_gate_equals_its_equations() -> None:
    gate, x, y = random_gate(), random_numbers(D), random_numbers(D, seed=1)
    W_r, W_z, W_g = gate.from_y.weight.chunk(3)
    U_r, U_z = gate.from_x.weight.chunk(2)
    U_g = gate.from_reset.weight
    r = 1 / (1 + (-(W_r @ y + U_r @ x)).exp())
    z = 1 / (1 + (-(W_z @ y + U_z @ x - gate.bias)).exp())
    expected = (1 - z) * x + z * torch.tanh(W_g @ y + U_g @ (r * x))
    torch.testing.assert_close(gate(x, y), expected, **EXACT)


@pytest.mark.parametrize("shape", [(3,), (2, 5)])
def test_gate_with_a_large_bias_is_the_identity_and_with_a_small_one_forgets(shape: tuple[int, ...]) -> None:
    gate, x, y = random_gate(), 5 * random_numbers(*shape, D), random_numbers(*shape, D, seed=1)
    torch.nn.init.constant_(gate.bias, 1e4)
    assert torch.equal(gate(x, y), x)
    torch.nn.init.constant_(gate.bias, -1e4)
    assert gate(x, y).abs().max() < 1 < x.abs().max()


def test_gates_begin_near_the_identity() -> None:
    """For inputs of zero, the gate takes a share of σ(-2) = 0.12 of the new value; the bias is trained too."""
    gate = GRUGate(D, 2.0)
    assert gate.bias.tolist() == [2.0] * D
    x, y = torch.ones(D), torch.zeros(D)
    torch.nn.init.zeros_(gate.from_x.weight)
    torch.nn.init.zeros_(gate.from_reset.weight)
    assert gate(x, y).tolist() == pytest.approx([1 - 0.1192029] * D)


# ---------------------------------------------------------------- segments


def in_segments(backbone: GatedTransformer, obs_BT: Tensor, lengths: list[int]) -> Tensor:
    memory: Memory | None = None
    found = []
    for part in obs_BT.split(lengths, dim=1):
        h_BTD, memory = backbone.segment(part, memory)
        found.append(h_BTD)
    return torch.cat(found, dim=1)


@given(memory=st.integers(1, 12), lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_segments_equal_one_long_pass(memory: int, lengths: list[int]) -> None:
    backbone, obs_BT = random_backbone(memory), observations(sum(lengths))
    with torch.no_grad():
        torch.testing.assert_close(in_segments(backbone, obs_BT, lengths), backbone(obs_BT), **EXACT)


def test_without_its_memory_a_segment_is_another() -> None:
    backbone, obs_BT = random_backbone(memory=4), observations(8)
    _, memory = backbone.segment(obs_BT[:, :4])
    carried, forgotten = (backbone.segment(obs_BT[:, 4:], kept)[0] for kept in (memory, None))
    assert (carried != forgotten).any(-1).all()


def test_memory_holds_the_last_inputs_of_every_layer_and_no_more() -> None:
    backbone, obs_BT = random_backbone(memory=4), observations(7)
    memory = backbone.segment(obs_BT[:, :3])[1]
    assert [tuple(x.shape) for x in memory] == [(3, 3, 12)] * 2
    memory = backbone.segment(obs_BT[:, 3:], memory)[1]
    assert [tuple(x.shape) for x in memory] == [(3, 4, 12)] * 2
    torch.testing.assert_close(memory[0], backbone.norm(backbone.encoder(obs_BT)).detach()[:, 3:], **EXACT)


def test_no_gradient_flows_into_memory_but_weights_still_learn_from_it() -> None:
    """In a segment of one step, all keys but its own come from memory."""
    backbone, obs_BT = random_backbone(memory=4, num_layers=1), observations(5)
    past = obs_BT[:, :4].clone().requires_grad_()
    _, memory = backbone.segment(past)
    assert not any(x.requires_grad for x in memory)
    h_BTD, _ = backbone.segment(obs_BT[:, 4:], memory)
    (h_BTD * random_numbers(*h_BTD.shape)).sum().backward()
    assert past.grad is None
    learned = backbone.distance.weight.grad  # with one key there would be nothing to weigh
    assert learned is not None
    assert learned.abs().max() > 0


def test_reach_grows_with_layers() -> None:
    """Two layers with a memory of 2 depend on four past steps and on no more."""
    backbone, obs_BT = random_backbone(memory=2, num_layers=2), observations(9)
    before = backbone(obs_BT)[:, -1]
    for j in range(9):
        other = obs_BT.clone()
        other[:, j] += 1.0
        assert torch.equal(backbone(other)[:, -1], before) == (8 - j > 4), j


def test_the_end_of_a_long_past_is_enough() -> None:
    """Only distances and contents matter: the last steps give the same output after any past."""
    backbone, obs_BT = random_backbone(memory=2, num_layers=2), observations(12)
    alone = backbone(obs_BT[:, -5:])[:, -1]
    torch.testing.assert_close(backbone(obs_BT)[:, -1], alone, **EXACT)
    torch.testing.assert_close(backbone(obs_BT[:, 3:])[:, -1], alone, **EXACT)


def test_dropout_acts_in_training_alone() -> None:
    obs_BT = observations(6)
    backbone = random_backbone(memory=6, dropout=0.5)
    assert torch.equal(backbone(obs_BT), random_backbone(memory=6)(obs_BT))
    backbone.train()
    assert not torch.equal(backbone(obs_BT), backbone(obs_BT))
