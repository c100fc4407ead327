"""GTrXL against its equations, and known answers of its gates, its memory and its size."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.builders import SPECS, build, build_random, moments, random_batch, stream
from tests.reference import embed, feed_forward, layer_norm, softmax
from uat.episode import Batch
from uat.methods.gtrxl import GTrXL, GTrXLConfig
from uat.recipes import recipe
from uat.spec import Items, Named, Observations, Spec, Weights

every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
POISON = 1e18


def gtrxl(spec: Spec, **settings: Any) -> GTrXL:
    policy = build_random("gtrxl", spec, **settings)
    assert isinstance(policy, GTrXL)
    return policy


# ---------------------------------------------------------------- the equations, one number at a time


def slow_logits(policy: GTrXL, batch: Batch, memory: int) -> Tensor:
    w = {name: parameter.double() for name, parameter in policy.named_parameters()}
    rows = []
    for b in range(len(batch.obs)):
        x = [layer_norm(w, "backbone.norm", embed(w, o)) for o in batch.obs[b]]
        for layer in range(policy.config.num_layers):
            x = slow_block(policy, w, layer, x, memory)
        h = [layer_norm(w, "backbone.last_norm", x_t) for x_t in x]
        row = torch.stack([w["head.linear.weight"] @ h_t + w["head.linear.bias"] for h_t in h])
        rows.append(row if batch.allowed is None else row.masked_fill(~batch.allowed[b], -torch.inf))
    return torch.stack(rows)


def slow_block(policy: GTrXL, w: dict[str, Tensor], layer: int, x: list[Tensor], memory: int) -> list[Tensor]:
    name = f"backbone.blocks.{layer}"
    normed = [layer_norm(w, f"{name}.attention_norm", x_t) for x_t in x]
    attended = [slow_attention(policy, w, layer, normed[max(0, t - memory) : t + 1]) for t in range(len(x))]
    x = [slow_gate(w, f"{name}.attention_gate", x_t, y_t.clamp_min(0)) for x_t, y_t in zip(x, attended, strict=True)]
    fed = [feed_forward(w, f"{name}.ff", layer_norm(w, f"{name}.ff_norm", x_t)) for x_t in x]
    return [slow_gate(w, f"{name}.ff_gate", x_t, y_t.clamp_min(0)) for x_t, y_t in zip(x, fed, strict=True)]


def slow_attention(policy: GTrXL, w: dict[str, Tensor], layer: int, window: list[Tensor]) -> Tensor:
    """Return the steps of the window that influence its last step."""
    name, d, heads = f"backbone.blocks.{layer}.attention", policy.config.d_model, []
    d_m = d // policy.config.num_heads
    W_Q, W_K, W_V = w[f"{name}.project.weight"].chunk(3)
    W_R = w["backbone.distance.weight"][layer * d : (layer + 1) * d]
    for h in range(policy.config.num_heads):
        own = slice(h * d_m, (h + 1) * d_m)
        u, v = w[f"{name}.bias_2HE"][:, h]
        q, logits = W_Q[own] @ window[-1], []
        for j, x_j in enumerate(window):
            distance = len(window) - 1 - j
            content, place = (q + u) @ (W_K[own] @ x_j), (q + v) @ (W_R[own] @ encoding(distance, d))
            logits.append((content + place) / math.sqrt(d_m))
        alpha = softmax(torch.stack(logits))
        heads.append(sum(alpha[j] * (W_V[own] @ x_j) for j, x_j in enumerate(window)))
    return w[f"{name}.out.weight"] @ torch.cat(heads) + w[f"{name}.out.bias"]


def encoding(distance: int, d: int) -> Tensor:
    angles = [distance / 10_000 ** (2 * i / d) for i in range(d // 2)]
    return torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)


def slow_gate(w: dict[str, Tensor], name: str, x: Tensor, y: Tensor) -> Tensor:
    W_r, W_z, W_g = w[f"{name}.from_y.weight"].chunk(3)
    U_r, U_z = w[f"{name}.from_x.weight"].chunk(2)
    r, z = (W_r @ y + U_r @ x).sigmoid(), (W_z @ y + U_z @ x - w[f"{name}.bias"]).sigmoid()
    return (1 - z) * x + z * torch.tanh(W_g @ y + w[f"{name}.from_reset.weight"] @ (r * x))


@pytest.mark.parametrize("memory", [None, 1, 3])
@every_spec
def test_network_and_gradients_equal_the_equations(spec: Spec, memory: int | None) -> None:
    policy, batch = gtrxl(spec, memory=memory), random_batch(spec)
    found, expected = policy.logits(batch), slow_logits(policy, batch, memory or spec.steps)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    if isinstance(spec.action, Weights):
        batch.target = batch.required_target.double()
    total, _ = policy.loss(batch)["imitation"]
    log_pi, held = expected.log_softmax(-1), batch.valid
    if isinstance(spec.action, Weights):
        some = (batch.required_target > 0) & held[..., None]
        twin = (batch.required_target[some] * (batch.required_target[some].log() - log_pi[some])).sum()
    else:
        twin = -log_pi[held].gather(-1, batch.required_target[held][:, None]).sum()
    torch.testing.assert_close(total, twin, rtol=1e-10, atol=0)
    names, parameters = zip(*policy.named_parameters(), strict=True)
    ours, theirs = (torch.autograd.grad(loss, parameters) for loss in (total, twin))
    for name, one, other in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@every_spec
def test_shut_gates_hand_the_embedding_on(spec: Spec) -> None:
    policy, batch = gtrxl(spec), random_batch(spec)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith("gate.bias"):
                parameter.fill_(1e4)
        x_BTD = policy.backbone.norm(policy.backbone.encoder(batch.obs))
        expected = policy.head.logits(policy.backbone.last_norm(x_BTD), batch.allowed)
        assert torch.equal(policy.logits(batch), expected)
        torch.testing.assert_close(stream(policy, batch), expected, rtol=0, atol=1e-12)


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize("memory", [1, 2, 5, 19, 40])
def test_streaming_with_a_short_memory_equals_all_at_once(memory: int, spare: int) -> None:
    """Slots are reused, and the cache has no more of them than the memory needs."""
    spec = replace(SPECS["vector-discrete"], horizon=20)
    policy, batch = gtrxl(spec, memory=memory), random_batch(spec)
    state, found = policy.init_state(3, spec.steps + spare, "cpu"), []
    assert state.cache.capacity == min(memory + 1, spec.steps + spare)
    state.cache.kv_L2BHSE.fill_(POISON)
    with torch.no_grad():
        for moment in moments(batch):
            logits_BA, state = policy.step(state, moment)
            found.append(logits_BA)
        torch.testing.assert_close(torch.stack(found, 1), policy.logits(batch), rtol=0, atol=1e-10)


@pytest.mark.parametrize("memory", [2, None])
def test_a_restarted_stream_begins_anew_and_the_others_go_on(memory: int | None) -> None:
    spec, at = replace(SPECS["vector-discrete"], horizon=12), 5
    policy, batch = gtrxl(spec, memory=memory), random_batch(spec, whole=True)
    state, found = policy.init_state(3, spec.steps, "cpu"), []
    with torch.no_grad():
        for t, moment in enumerate(moments(batch)):
            first_B = moment.first | torch.tensor([False, t == at, False])
            logits_BA, state = policy.step(state, replace(moment, first=first_B))
            found.append(logits_BA)
        late = policy.logits(replace(batch, obs=batch.obs[:, at:]))
        expected = policy.logits(batch)
    expected[1, at:] = late[1]
    torch.testing.assert_close(torch.stack(found, 1), expected, rtol=0, atol=1e-10)


def test_unset_memory_sees_the_whole_episode() -> None:
    """In one layer, the first step changes the last, but not with a memory one step shorter."""
    spec = SPECS["vector-discrete"]
    batch = random_batch(spec, whole=True)
    other = batch.obs.clone()
    other[:, 0] += 1.0
    for memory, seen in ((None, True), (spec.steps - 1, True), (spec.steps - 2, False)):
        policy = gtrxl(spec, memory=memory, num_layers=1)
        one, two = (policy.logits(replace(batch, obs=obs))[:, -1] for obs in (batch.obs, other))
        assert torch.equal(one, two) is not seen, memory


def test_segments_of_a_batch_carry_memory() -> None:
    spec = SPECS["items-discrete"]
    policy, batch = gtrxl(spec, memory=3), random_batch(spec, whole=True)
    early, late = (replace(batch, obs=obs) for obs in batch.obs.split([4, 3], dim=1))
    with torch.no_grad():
        h_early, memory = policy.segment(early)
        h_late, _ = policy.segment(late, memory)
        torch.testing.assert_close(torch.cat([h_early, h_late], 1), policy.features(batch), rtol=0, atol=1e-12)
        assert not torch.equal(policy.segment(late)[0], h_late)


def test_longer_episodes_need_no_table() -> None:
    spec = SPECS["vector-discrete"]
    policy, batch = gtrxl(spec), random_batch(spec, steps=5 * spec.steps)
    with torch.no_grad():
        torch.testing.assert_close(stream(policy, batch), policy.logits(batch), rtol=0, atol=1e-10)


def test_where_an_episode_starts_means_nothing() -> None:
    spec = SPECS["vector-discrete"]
    policy, batch = gtrxl(spec), random_batch(spec)
    assert torch.equal(policy.logits(replace(batch, start=torch.tensor([0, 2, 5]))), policy.logits(batch))


def test_shown_attention_stays_inside_the_memory() -> None:
    spec, memory = SPECS["vector-discrete"], 2
    alpha_LBHTT = gtrxl(spec, memory=memory).trace(random_batch(spec)).attention_LBHTT
    inside_TT = torch.ones(spec.steps, spec.steps, dtype=torch.bool).tril().triu(-memory)
    assert alpha_LBHTT.shape == (2, 3, 3, spec.horizon, spec.horizon)
    assert alpha_LBHTT[..., inside_TT].min() > 0
    assert alpha_LBHTT[..., ~inside_TT].max() == 0
    torch.testing.assert_close(alpha_LBHTT.sum(-1), torch.ones_like(alpha_LBHTT[..., 0]), rtol=0, atol=1e-12)


# ---------------------------------------------------------------- size and settings


def num_parameters(policy: GTrXL) -> int:
    return sum(p.numel() for p in policy.parameters())


def encoder_parameters(space: Observations, d: int) -> int:
    match space:
        case Items(count):
            return count * d
        case Named(parts):
            return sum(encoder_parameters(part, d) for part in parts.values())
        case _:
            return (math.prod(space.shape) + 1) * d


@pytest.mark.parametrize("memory", [None, 2])
@pytest.mark.parametrize(("d", "heads", "layers", "d_ff"), [(12, 3, 2, 10), (64, 4, 3, 128), (7, 1, 1, 5)])
@every_spec
def test_parameter_counts(spec: Spec, d: int, heads: int, layers: int, d_ff: int, memory: int | None) -> None:
    """Per layer: 5 d² for attention, 12 d² for gates, a feed-forward network and vectors; none for memory."""
    encoder = encoder_parameters(spec.obs, d)
    layer = 17 * d**2 + 2 * d * d_ff + d_ff + 10 * d
    expected = encoder + 2 * d + layers * layer + 2 * d + (d + 1) * spec.action.numbers
    sizes: dict[str, Any] = {"d_model": d, "num_heads": heads, "num_layers": layers, "d_ff": d_ff}
    policy = build("gtrxl", spec, memory=memory, **sizes)
    assert isinstance(policy, GTrXL)
    assert num_parameters(policy) == expected


def test_recipe_of_the_paper_has_the_shared_backbone() -> None:
    gtrxl_run, vanilla_run = recipe("darkroom", "gtrxl"), recipe("darkroom", "vanilla")
    for name in ("d_model", "num_heads", "num_layers", "d_ff", "dropout"):
        assert getattr(gtrxl_run.method, name) == getattr(vanilla_run.method, name)
    assert (gtrxl_run.method.memory, gtrxl_run.method.gate_bias) == (None, 2.0)
    policy = GTrXL(gtrxl_run.build_domain().spec, gtrxl_run.method)
    assert policy.backbone.memory == 60
    assert num_parameters(policy) == 261_637


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory": 0}, "memory=0 must be at least 1"),
        ({"gate_bias": math.inf}, "gate_bias=inf must lie in"),
        ({"d_model": 10, "num_heads": 3}, "num_heads=3 must divide d_model=10"),
        ({"d_ff": 0}, "d_ff=0 must be at least 1"),
        ({"dropout": 1.0}, r"dropout=1.0 must lie in \[0, 1\)"),
    ],
)
def test_bad_settings_are_refused_with_names_and_values(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GTrXLConfig(**settings)
