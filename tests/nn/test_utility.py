"""Utility encoder and gates equal the recurrence, and are zero without feedback."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import one_hot

from tests import reference
from tests.builders import SPECS, build_random, build_uat, random_batch, randomise
from uat.nn.encoders import IdEmbedding, VectorEncoder, build_action_encoder, build_observation_encoder
from uat.nn.utility import UtilityGates, discounted
from uat.spec import Discrete, Spec, Weights

every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


# ---------------------------------------------------------------- regime state


@given(decay=st.floats(0, 1, exclude_max=True), steps=st.integers(1, 70), seed=st.integers(0, 2**31))
def test_discounted_equals_the_recurrence(decay: float, steps: int, seed: int) -> None:
    u_BTU = torch.randn(2, steps, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    expected = torch.stack([torch.stack(reference.regime_states(list(u), decay)) for u in u_BTU])
    torch.testing.assert_close(discounted(u_BTU, decay), expected, rtol=0, atol=1e-12)


def test_without_memory_the_regime_is_the_latest_utility() -> None:
    u_BTU = torch.randn(2, 9, 3)
    assert torch.equal(discounted(u_BTU, 0.0), u_BTU)


def test_regime_of_constant_utility_is_a_geometric_sum() -> None:
    decay, t = 0.7, torch.arange(1, 51, dtype=torch.float64)
    ubar = discounted(torch.full((1, 50, 1), 2.0, dtype=torch.float64), decay)
    torch.testing.assert_close(ubar[0, :, 0], 2.0 * (1 - decay**t), rtol=0, atol=1e-13)


# ---------------------------------------------------------------- f_a and the observation encoders


def test_no_action_is_exactly_zero_and_an_id_is_its_row() -> None:
    embedding = randomise(IdEmbedding(6, 4).double(), 0)
    ids = torch.tensor([[-1, 0, 5], [3, -1, 3]])
    found = embedding(ids)
    hot = one_hot(ids.clamp_min(0), 6).double() * (ids >= 0)[..., None]
    assert torch.equal(found, hot @ embedding.weight)
    assert torch.equal(found[ids < 0], torch.zeros(2, 4, dtype=torch.float64))


def test_no_action_sends_no_gradient() -> None:
    embedding = randomise(IdEmbedding(6, 4), 0)
    embedding(torch.tensor([-1, 2])).sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.abs().sum(1).nonzero().flatten().tolist() == [2]


@pytest.mark.parametrize("count", [4, 9])
def test_ids_and_one_hot_vectors_meet_the_same_action_map(count: int) -> None:
    """f_a(a) = W_a onehot(a), for actions given as ids or as vectors."""
    spec = SPECS["vector-discrete"]
    ids = build_action_encoder(Spec(obs=spec.obs, action=Discrete(count), horizon=1), 3).double()
    vectors = build_action_encoder(Spec(obs=spec.obs, action=Weights(count), horizon=1), 3).double()
    assert isinstance(ids, IdEmbedding)
    assert isinstance(vectors, VectorEncoder)
    assert vectors.linear.bias is None
    with torch.no_grad():
        vectors.linear.weight.copy_(ids.weight.T)
    a = torch.arange(count)
    assert torch.equal(ids(a), vectors(one_hot(a, count)))
    assert vectors(torch.zeros(1, count)).abs().max() == 0


@every_spec
def test_observation_encoders_equal_the_equation(spec: Spec) -> None:
    encoder = randomise(build_observation_encoder(spec, 6).double(), 0)
    w = {f"backbone.encoder.{name}": parameter for name, parameter in encoder.named_parameters()}
    obs = random_batch(spec).obs
    for b in range(2):
        for t in range(3):
            torch.testing.assert_close(encoder(obs)[b, t], reference.embed(w, obs[b, t]), rtol=0, atol=1e-14)


# ---------------------------------------------------------------- gates


def gates_of(spec: Spec, seed: int = 0) -> UtilityGates:
    return randomise(build_uat(spec), seed).utility


@every_spec
def test_gates_equal_the_equations(spec: Spec) -> None:
    policy, batch = build_random("uat", spec), random_batch(spec)
    found = policy.get_submodule("utility")(batch.prev_action, batch.prev_reward)
    w = dict(policy.named_parameters())
    for b in range(len(batch.obs)):
        rho, g = reference.gates(policy, w, batch, b)
        assert rho is not None
        assert g is not None
        torch.testing.assert_close(found.rho[b], torch.stack(rho), rtol=0, atol=1e-13)
        for layer, g_layer in enumerate(g):
            torch.testing.assert_close(found.g[layer][b], torch.stack(g_layer), rtol=0, atol=1e-13)


@every_spec
def test_gates_step_by_step_equal_gates_at_once(spec: Spec) -> None:
    gates, batch = gates_of(spec), random_batch(spec)
    at_once = gates(batch.prev_action, batch.prev_reward)
    ubar = torch.zeros(len(batch.obs), gates.d_utility, dtype=torch.float64)
    for t in range(batch.obs.shape[1]):
        now, ubar = gates.step(ubar, batch.prev_action[:, t], batch.prev_reward[:, t])
        torch.testing.assert_close(now.rho, at_once.rho[:, t], rtol=0, atol=1e-13)
        for ours, theirs in zip(now.g, at_once.g, strict=True):
            torch.testing.assert_close(ours, theirs[:, t], rtol=0, atol=1e-13)


@every_spec
def test_no_feedback_shuts_every_gate_exactly(spec: Spec) -> None:
    gates, batch = gates_of(spec), random_batch(spec)
    none = torch.full_like(batch.prev_action, -1 if isinstance(spec.action, Discrete) else 0)
    silent = gates(none, torch.zeros_like(batch.prev_reward))
    assert all(gate.abs().max() == 0 for gate in (silent.rho, *silent.g))


@every_spec
def test_random_weights_open_every_gate_and_saturate_none(spec: Spec) -> None:
    """Random weights give nonzero gates, so that the laws are not true merely for lack of feedback."""
    batch = random_batch(spec, episodes=16, whole=True)
    open_gates = gates_of(spec)(batch.prev_action, batch.prev_reward)
    for gate in (open_gates.rho, *open_gates.g):
        size = gate[:, spec.reward_lag :].abs()
        assert 0.03 < size.mean() < 0.7
        assert size.max() < 0.999


def test_no_map_has_a_bias() -> None:
    linears = [m for m in gates_of(SPECS["vector-weights"]).modules() if isinstance(m, nn.Linear)]
    assert len(linears) == 5  # f_a, two of E, W_s, W_ρ
    assert all(linear.bias is None for linear in linears)
