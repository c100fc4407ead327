"""A-DT: tokens are linear maps of the concatenation, and Proposition 2 holds for its weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests import reference
from tests.builders import SPECS, build, build_random, random_batch, stream
from uat.clock import NO_ACTION
from uat.episode import Batch
from uat.methods.adt import ADT
from uat.nn.blocks import Block
from uat.nn.encoders import VectorEncoder
from uat.spec import Assets, Discrete, Items, Spec, Vector, Weights

every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
seeds = st.integers(0, 2**31)


def random_adt(spec: Spec, **settings: Any) -> ADT:
    policy = build_random("adt", spec, **settings)
    assert isinstance(policy, ADT)
    return policy


def one_hot(ids: Tensor, count: int) -> Tensor:
    """Return one-hot vectors; zeros for the id -1."""
    return F.one_hot(ids + 1, count + 1)[..., 1:].double()


def observations(spec: Spec, obs: Tensor) -> Tensor:
    """Return o as a vector, with a 1 appended if the encoder has a bias."""
    if isinstance(spec.obs, Items):
        return one_hot(obs, spec.obs.count)
    o = obs.double().flatten(2)
    return torch.cat([o, torch.ones_like(o[..., :1])], -1)


def feedback(spec: Spec, batch: Batch) -> Tensor:
    """Return f = [a; r]."""
    weights = isinstance(spec.action, Weights)
    a = batch.prev_action.double() if weights else one_hot(batch.prev_action, spec.action.count)
    return torch.cat([a, batch.prev_reward.double()[..., None]], -1)


def columns(policy: ADT) -> tuple[Tensor, Tensor]:
    """Return W_e^(o), whose last column is the bias if there is one, and W_e^(f) = [W_a, w_r]."""
    w = dict(policy.named_parameters())
    W_o = (
        w["backbone.encoder.weight"].T
        if "backbone.encoder.weight" in w
        else torch.cat([w["backbone.encoder.linear.weight"], w["backbone.encoder.linear.bias"][:, None]], 1)
    )
    W_a = w["action.weight"].T if "action.weight" in w else w["action.linear.weight"]
    return W_o, torch.cat([W_a, w["reward.weight"]], 1)


# ---------------------------------------------------------------- the token


@every_spec
@given(seed=seeds)
def test_adt_tokens_are_the_concatenation(spec: Spec, seed: int) -> None:
    policy, batch = random_adt(spec, seed=seed, max_positions=12), random_batch(spec, seed=seed)
    W_e = torch.cat(columns(policy), 1)
    o_and_f = torch.cat([observations(spec, batch.obs), feedback(spec, batch)], -1)
    nowhere = torch.zeros(1, dtype=torch.bool)
    joined = policy.embedded(batch.obs, None, nowhere, batch.prev_action, batch.prev_reward)[0]
    torch.testing.assert_close(joined, o_and_f @ W_e.T, rtol=0, atol=1e-10)
    start = torch.tensor([0, 2, 5])
    position = start[:, None] + torch.arange(spec.steps)
    expected = policy.backbone.norm(o_and_f @ W_e.T + policy.backbone.positions[position])
    torch.testing.assert_close(policy.tokens(replace(batch, start=start)), expected, rtol=0, atol=1e-10)


@every_spec
def test_parallel_pass_equals_the_equations(spec: Spec) -> None:
    policy, batch = random_adt(spec), random_batch(spec)
    w, rows = dict(policy.named_parameters()), []
    for b in range(len(batch.valid)):
        x = list(policy.tokens(batch)[b])
        for layer in range(policy.config.num_layers):
            x = reference.block(w, layer, policy.config.num_heads, x, None, None)
        h = [reference.layer_norm(w, "backbone.last_norm", x_t) for x_t in x]
        rows.append(torch.stack([w["head.linear.weight"] @ h_t + w["head.linear.bias"] for h_t in h]))
    logits = torch.stack(rows)
    expected = logits if batch.allowed is None else logits.masked_fill(~batch.allowed, -torch.inf)
    torch.testing.assert_close(policy.logits(batch), expected, rtol=0, atol=1e-10)


@every_spec
def test_adt_without_feedback_is_vanilla(spec: Spec) -> None:
    policy, batch = random_adt(spec), random_batch(spec)
    vanilla, weights = build("vanilla", spec), policy.state_dict()
    vanilla.load_state_dict({name: weights[name] for name in vanilla.state_dict()})
    none = 0 if batch.prev_action.is_floating_point() else NO_ACTION
    silent = replace(
        batch,
        prev_action=torch.full_like(batch.prev_action, none),
        prev_reward=torch.zeros_like(batch.prev_reward),
    )
    with torch.no_grad():
        assert torch.equal(policy.logits(silent), vanilla.logits(silent))
        assert not torch.equal(policy.logits(batch), vanilla.logits(batch))
        assert torch.equal(policy.logits(batch)[:, 0], vanilla.logits(batch)[:, 0])  # before any feedback
    assert torch.equal(stream(policy, silent), stream(vanilla, silent))


@every_spec
def test_no_part_of_a_fresh_token_drowns_another(spec: Spec) -> None:
    """All columns of W_e have the same initial distribution."""
    policy = build("adt", spec, d_model=240)
    assert isinstance(policy, ADT)
    encoder = policy.backbone.encoder
    std = (encoder.linear.in_features * 3) ** -0.5 if isinstance(encoder, VectorEncoder) else 1.0
    W_o, W_f = columns(policy)
    for column in (*W_o.T, *W_f.T):
        assert column.std().item() == pytest.approx(std, rel=0.25)


@every_spec
def test_attention_runs_over_steps(spec: Spec) -> None:
    policy, batch = random_adt(spec), random_batch(spec)
    seen = policy.trace(batch).attention_LBHTT
    assert seen.shape == (2, len(batch.valid), 3, spec.horizon, spec.horizon)
    torch.testing.assert_close(seen.sum(-1), torch.ones_like(seen[..., 0]), rtol=0, atol=1e-12)
    assert seen.triu(1).abs().max() == 0


# ---------------------------------------------------------------- Proposition 2


PROPOSITION = {
    "ids": Spec(obs=Vector(7), action=Discrete(6), horizon=24),
    "weights": Spec(obs=Assets(3, 2), action=Weights(6), horizon=24),
}
"""Sizes at which observations, feedback and episodes exceed a head, so that the bounds are not trivial."""


def rank(*side_by_side: Tensor) -> int:
    return int(torch.linalg.matrix_rank(torch.cat(side_by_side, dim=1), rtol=1e-10))


def heads_of(policy: ADT) -> list[tuple[Tensor, Tensor]]:
    """Return W_Q and W_K of every head of the first layer."""
    block, heads = policy.backbone.blocks[0], policy.config.num_heads
    assert isinstance(block, Block)
    w = {f"project.{name}": p for name, p in block.attention.project.named_parameters()}
    pair = [[reference.matrices(w, "project", p, h, heads)[0] for p in "QK"] for h in range(heads)]
    return [(W_Q, W_K) for W_Q, W_K in pair]


@pytest.mark.parametrize("spec", PROPOSITION.values(), ids=PROPOSITION)
@given(seed=seeds)
def test_adt_logits_fall_into_four_forms_of_limited_rank(spec: Spec, seed: int) -> None:
    """The proposition is about tokens before LayerNorm and positions."""
    policy, batch = random_adt(spec, seed=seed), random_batch(spec, episodes=1, seed=seed, masked=False)
    d_m = policy.config.d_model // policy.config.num_heads
    block = policy.backbone.blocks[0]
    assert isinstance(block, Block)
    nowhere = torch.zeros(1, dtype=torch.bool)
    x_TD = policy.embedded(batch.obs, None, nowhere, batch.prev_action, batch.prev_reward)[0][0]
    q_TD, k_TD, _ = block.attention.project(x_TD)
    part = {"o": observations(spec, batch.obs)[0], "f": feedback(spec, batch)[0]}
    W = dict(zip("of", columns(policy), strict=True))
    for head, (W_Q, W_K) in enumerate(heads_of(policy)):
        own = reference.rows_of(head, d_m)
        logit_TT = q_TD[:, own] @ k_TD[:, own].T
        M = {a + b: W[a].T @ W_Q.T @ W_K @ W[b] for a in "of" for b in "of"}
        term = {name: part[name[0]] @ form @ part[name[1]].T for name, form in M.items()}
        torch.testing.assert_close(logit_TT, term["oo"] + term["of"] + term["fo"] + term["ff"], rtol=0, atol=1e-10)
        for name, form in M.items():
            A, B = W[name[0]], W[name[1]]
            assert rank(form) == d_m < min(form.shape)  # the bound, and that it is tight
            assert rank(A.T @ W_Q.T, form) == rank(A.T @ W_Q.T)  # columns through W_Q
            assert rank((W_K @ B).T, form.T) == rank(W_K @ B)  # rows through W_K
            assert rank(term[name]) <= d_m
        assert rank(logit_TT) == d_m < spec.steps  # all four together: one form, not four
        by_feedback_TT = term["of"] + term["fo"] + term["ff"]
        assert d_m < rank(by_feedback_TT) <= 2 * d_m < spec.steps


@given(seed=seeds)
def test_a_feedback_pathway_of_its_own_would_pass_the_bound(seed: int) -> None:
    """Negative control: with separate maps of feedback, the logits would have twice the rank."""
    spec = PROPOSITION["ids"]
    policy, batch = random_adt(spec, seed=seed), random_batch(spec, episodes=1, seed=seed, whole=True)
    o, f = observations(spec, batch.obs)[0], feedback(spec, batch)[0]
    W_o, W_f = columns(policy)
    (W_Q, W_K), (V_Q, V_K), *_ = heads_of(policy)
    apart_TT = o @ W_o.T @ W_Q.T @ W_K @ W_o @ o.T + f @ W_f.T @ V_Q.T @ V_K @ W_f @ f.T
    assert rank(apart_TT) == 2 * len(W_Q)


# ---------------------------------------------------------------- parameters


def count(policy: torch.nn.Module) -> int:
    return sum(p.numel() for p in policy.parameters())


@every_spec
@pytest.mark.parametrize("d_model", [12, 24])
def test_overhead_over_vanilla_is_the_formula(spec: Spec, d_model: int) -> None:
    adt, vanilla = (build(name, spec, d_model=d_model) for name in ("adt", "vanilla"))
    assert count(adt) - count(vanilla) == (spec.action.count + 1) * d_model


def test_parameter_counts() -> None:
    """The count differs from the published 102,532, which leaves no room for 61 learned positions."""
    spec = Spec(obs=Vector(10), action=Discrete(4), horizon=60)
    policy = random_adt(spec, d_model=64, num_heads=4, num_layers=3, d_ff=128)
    assert count(policy) == 105_284
    left = 102_532 - count(policy.backbone.blocks) - count(policy.head)
    assert left == 38 * 64 < policy.backbone.positions.numel() == 61 * 64
