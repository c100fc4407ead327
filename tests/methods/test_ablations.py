"""The six ablations of UAT: each lacks exactly the part in its name and equals UAT otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests import reference
from tests.builders import PRECISIONS, SPECS, build, build_random, crossed, random_batch, stream, vanilla_of
from uat.episode import Batch
from uat.methods import METHODS
from uat.methods.uat import UAT, UATConfig
from uat.nn.attention import Attention
from uat.spec import Spec

ABLATIONS = [name for name, method in METHODS.items() if method.ablation]
every_ablation = pytest.mark.parametrize("method", ABLATIONS)
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def ablated(method: str, spec: Spec, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> UAT:
    policy = build_random(method, spec, seed=seed, dtype=dtype)
    assert isinstance(policy, UAT)
    return policy


def nothing_done(batch: Batch, spec: Spec) -> Batch:
    none_B = spec.no_action(len(batch.obs)).to(batch.prev_action.dtype)
    return replace(batch, prev_action=none_B[:, None].expand_as(batch.prev_action))


def nothing_earned(batch: Batch) -> Batch:
    return replace(batch, prev_reward=torch.zeros_like(batch.prev_reward))


def test_there_are_six() -> None:
    parts = ("no-action", "no-reward", "linear", "no-q", "no-kv", "no-bias")
    assert [f"uat-{part}" for part in parts] == ABLATIONS
    assert all(len(METHODS[name].changes) == 1 for name in ABLATIONS)


# ---------------------------------------------------------------- weights


def sizes(policy: UAT) -> dict[str, int]:
    return {name: p.numel() for name, p in policy.named_parameters()}


@pytest.mark.parametrize("d_model", [12, 24, 64])
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("name", ["vector-discrete", "assets-weights", "items-discrete"])
def test_an_ablation_removes_exactly_its_weights(name: str, d_model: int, num_layers: int) -> None:
    """W^u is d x d per layer, U is d_m x d_m per layer and head, W_s is d x d_u per layer."""
    heads, d_u, d_a, hidden, spec = {12: 3, 24: 2, 64: 4}[d_model], 5, 3, 8, SPECS[name]
    settings: dict[str, Any] = {"d_model": d_model, "num_layers": num_layers, "num_heads": heads}
    count = {}
    for method in ("uat", *ABLATIONS):
        policy = build(method, spec, **settings)
        assert isinstance(policy, UAT)
        count[method] = sum(sizes(policy).values())
    L, d, d_m = num_layers, d_model, d_model // heads
    removed = {
        "uat-no-action": spec.action.count * d_a,
        "uat-no-reward": 0,
        "uat-linear": (d_a + 1) * hidden + hidden * d_u - (d_a + 1) * d_u,
        "uat-no-q": L * d**2 + L * d_m * d + d * d_u,
        "uat-no-kv": 2 * L * d**2 + 2 * L * d_m * d + L * d * d_u,
        "uat-no-bias": 3 * L * d_m * d,
    }
    assert {method: count["uat"] - count[method] for method in ABLATIONS} == removed


MISSING = {
    "uat-no-action": {"utility.encoder.action.weight"},
    "uat-no-reward": set(),
    "uat-linear": {"utility.encoder.mlp.2.weight"},
    "uat-no-q": {"utility.regime.weight"},
    "uat-no-kv": {"utility.token.weight"},
    "uat-no-bias": {f"backbone.blocks.{layer}.attention.project.bias_3HEE" for layer in range(2)},
}


@every_ablation
def test_what_is_missing_is_missing_by_name(method: str) -> None:
    """The remaining weights have the names and the order of the full model."""
    spec = SPECS["vector-discrete"]
    whole, rest = list(ablated("uat", spec).state_dict()), list(ablated(method, spec).state_dict())
    assert rest == [name for name in whole if name not in MISSING[method]]


@pytest.mark.parametrize(
    ("method", "rows", "offsets"), [("uat", 6, 3), ("uat-no-q", 5, 2), ("uat-no-kv", 4, 1), ("uat-no-bias", 6, None)]
)
def test_projections_have_rows_for_what_is_there(method: str, rows: int, offsets: int | None) -> None:
    for block in ablated(method, SPECS["vector-discrete"]).backbone.blocks:
        assert isinstance(block.attention, Attention)
        project = block.attention.project
        assert project.weight.shape == (rows * 12, 12)
        assert (None if project.bias_3HEE is None else len(project.bias_3HEE)) == offsets


@every_ablation
def test_the_fast_rate_is_that_of_the_encoder_and_the_regime_readout(method: str) -> None:
    policy = ablated(method, SPECS["vector-discrete"])
    fast = {id(p) for p in policy.parameter_groups()["utility"]}
    named = {"utility.encoder.mlp.0.weight", "utility.encoder.mlp.2.weight", "utility.regime.weight"} - MISSING[method]
    assert {name for name, p in policy.named_parameters() if id(p) in fast} == named


def test_feedback_must_have_somewhere_to_go() -> None:
    with pytest.raises(ValueError, match="modulates_queries=False and modulates_keys_values=False"):
        UATConfig(modulates_queries=False, modulates_keys_values=False)


# ---------------------------------------------------------------- functions


@every_spec
@every_ablation
def test_an_ablation_equals_the_equations(method: str, spec: Spec) -> None:
    policy, batch = ablated(method, spec), random_batch(spec)
    torch.testing.assert_close(policy.logits(batch), reference.logits(policy, batch), rtol=0, atol=1e-10)


@every_ablation
def test_its_gradients_equal_those_of_the_equations(method: str) -> None:
    policy, batch = ablated(method, SPECS["vector-discrete"]), random_batch(SPECS["vector-discrete"])
    found, expected = policy.loss(batch)["imitation"][0], reference.loss(policy, batch)
    names, parameters = zip(*policy.named_parameters(), strict=True)
    fast, slow = (torch.autograd.grad(loss, parameters) for loss in (found, expected))
    for name, ours, theirs in zip(names, fast, slow, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("method", "spec", "dtype"), crossed(pytest.mark.slow, ABLATIONS, SPECS, PRECISIONS))
def test_without_feedback_an_ablation_is_vanilla_to_the_last_bit(method: str, spec: Spec, dtype: torch.dtype) -> None:
    policy, batch = ablated(method, spec, dtype=dtype), random_batch(spec)
    vanilla, silent = vanilla_of(policy), nothing_earned(nothing_done(batch, spec))
    with torch.no_grad():
        assert torch.equal(policy.logits(silent), vanilla.logits(silent))
        assert not torch.equal(policy.logits(batch), vanilla.logits(batch))
    assert torch.equal(stream(policy, silent), stream(vanilla, silent))


@every_spec
@every_ablation
def test_a_fresh_ablation_is_vanilla_to_the_last_bit(method: str, spec: Spec) -> None:
    policy, batch = build(method, spec), random_batch(spec)
    assert isinstance(policy, UAT)
    assert torch.equal(policy.logits(batch), vanilla_of(policy).logits(batch))


@every_spec
@pytest.mark.parametrize("method", ["uat-no-action", "uat-no-reward"])
def test_what_is_not_seen_is_nothing_to_the_whole_model(method: str, spec: Spec) -> None:
    """With the same weights, UAT on episodes without actions (or rewards) is the ablation on any episodes."""
    whole, policy, batch = ablated("uat", spec), ablated(method, spec), random_batch(spec)
    policy.load_state_dict({name: whole.state_dict()[name] for name in policy.state_dict()})
    quiet = nothing_done(batch, spec) if method == "uat-no-action" else nothing_earned(batch)
    assert torch.equal(policy.logits(batch), whole.logits(quiet))


@pytest.mark.parametrize("method", ["uat-no-q", "uat-no-kv", "uat-no-bias"])
def test_what_is_missing_is_zero_to_the_whole_model(method: str) -> None:
    """UAT with zeros in place of the missing weights gives the same logits."""
    spec = SPECS["vector-weights"]
    whole, policy, batch = ablated("uat", spec), ablated(method, spec, seed=1), random_batch(spec)
    base, d, modulated = 3 * 12, 12, {"uat-no-q": "kv", "uat-no-kv": "q", "uat-no-bias": "qkv"}[method]
    weights = {name: torch.zeros_like(value) for name, value in whole.state_dict().items()}
    for name, value in policy.state_dict().items():
        if name.endswith("project.weight"):
            weights[name][:base] = value[:base]
            for i, part in enumerate(modulated):
                row = base + d * "qkv".index(part)
                weights[name][row : row + d] = value[base + d * i : base + d * (i + 1)]
        elif name.endswith("bias_3HEE"):
            weights[name][["qkv".index(part) for part in modulated]] = value
        else:
            weights[name] = value
    whole.load_state_dict(weights)
    torch.testing.assert_close(policy.logits(batch), whole.logits(batch), rtol=0, atol=1e-12)


def test_a_linear_encoder_adds_up() -> None:
    """The linear encoder is additive; the encoder with ReLU is not."""
    spec = SPECS["vector-weights"]
    a, b = torch.rand(2, 9, 4, dtype=torch.float64)
    r, s = torch.randn(2, 9, dtype=torch.float64)
    for method, additive in (("uat-linear", True), ("uat", False)):
        encoder = ablated(method, spec).utility.encoder
        found, parts = encoder(a - b, r - s), encoder(a, r) - encoder(b, s)
        assert torch.allclose(found, parts, rtol=0, atol=1e-12) == additive


# ---------------------------------------------------------------- looking inside


@pytest.mark.parametrize(
    ("method", "silent"),
    [("uat-no-q", [(1, 0), (2, 0)]), ("uat-no-kv", [(0, 1), (0, 2)]), ("uat-no-bias", [(0, 2), (2, 0), (2, 2)])],
)
def test_logit_terms_of_missing_parts_are_zero_and_all_sum_to_the_logit(
    method: str, silent: list[tuple[int, int]]
) -> None:
    policy, batch = ablated(method, SPECS["vector-discrete"]), random_batch(SPECS["vector-discrete"])
    gates, attention = policy.utility(batch.prev_action, batch.prev_reward), policy.backbone.blocks[0].attention
    assert isinstance(attention, Attention)
    x_BTD = policy.backbone.embed(batch.obs)
    terms = attention.logit_terms(x_BTD, gates.rho, gates.g[0])
    q, k, _ = (y.unflatten(-1, (3, 4)) for y in attention.project(x_BTD, gates.rho, gates.g[0]))
    logit = torch.einsum("bthe,bjhe->bhtj", q, k) / 2
    torch.testing.assert_close(terms.sum((0, 1)), logit, rtol=0, atol=1e-12)
    for query, key in silent:
        assert terms[query, key].abs().max() == 0
    assert terms[0, 0].abs().max() > 0


@every_ablation
def test_a_trace_shows_shut_gates_where_there_are_none(method: str) -> None:
    policy, batch = ablated(method, SPECS["vector-discrete"]), random_batch(SPECS["vector-discrete"])
    seen = policy.trace(batch)
    assert seen.gates is not None
    assert seen.attention_LBHTT.shape == (2, 3, 3, 7, 7)
    assert (seen.gates.rho.abs().max() > 0) == (method != "uat-no-q")
    assert [(g.abs().max() > 0).item() for g in seen.gates.plain] == [method != "uat-no-kv"] * 2
