"""The laws of the model: its equations, streaming, zero degradation, and what the paper proves.

On random weights, since a fresh UAT behaves as Vanilla and would obey most of them for that reason alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests import reference
from tests.builders import (
    ALL_SPECS,
    PRECISIONS,
    SPECS,
    build_random,
    build_uat,
    crossed,
    largest,
    moments,
    random_batch,
    random_trajectory,
    randomise,
    stream,
    vanilla_of,
    with_other_feedback,
)
from uat.clock import NO_ACTION
from uat.episode import Batch
from uat.methods import Policy
from uat.methods.uat import UAT
from uat.methods.vanilla import Vanilla, VanillaConfig
from uat.nn.attention import Attention
from uat.spec import Discrete, Spec, Vector, Weights

every_spec = pytest.mark.parametrize("spec", ALL_SPECS.values(), ids=ALL_SPECS)
both_methods = pytest.mark.parametrize("method", ["vanilla", "uat"])
seeds = st.integers(0, 2**31)


def assert_same_logits(found: Tensor, expected: Tensor) -> None:
    """Equal to 1e-10 in double precision, to 1e-5 of the largest logit in single."""
    atol = 1e-10 if found.dtype == torch.float64 else 1e-5 * largest(expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


# ---------------------------------------------------------------- the equations


@every_spec
@both_methods
@given(seed=seeds, episodes=st.integers(1, 2), steps=st.integers(1, 7), start=st.integers(0, 5))
def test_parallel_pass_equals_the_equations(
    method: str, spec: Spec, seed: int, episodes: int, steps: int, start: int
) -> None:
    policy = build_random(method, spec, seed=seed, max_positions=12)
    batch = random_batch(spec, episodes=episodes, steps=steps, seed=seed)
    batch.start = torch.arange(start, start + episodes).clamp_max(5)
    assert_same_logits(policy.logits(batch), reference.logits(policy, batch))


@every_spec
@both_methods
def test_loss_and_its_gradients_equal_the_equations(method: str, spec: Spec) -> None:
    policy, batch = build_random(method, spec), random_batch(spec)
    target = batch.required_target
    batch.target = target.double() if isinstance(spec.action, Weights) else target
    total, count = policy.loss(batch)["imitation"]
    expected = reference.loss(policy, batch)
    assert count == batch.valid.sum()
    torch.testing.assert_close(total, expected, rtol=1e-10, atol=0)
    names, parameters = zip(*policy.named_parameters(), strict=True)
    fast, slow = (torch.autograd.grad(loss, parameters) for loss in (total, expected))
    for name, ours, theirs in zip(names, fast, slow, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def test_vanilla_equals_torch_encoder() -> None:
    vanilla = build_random("vanilla", SPECS["vector-discrete"])
    assert isinstance(vanilla, Vanilla)
    encoder, batch = torch_encoder(vanilla), random_batch(vanilla.spec)
    steps = batch.obs.shape[1]
    causal = torch.ones(steps, steps, dtype=torch.bool).triu(1)
    with torch.no_grad():
        h_BTD = encoder(vanilla.backbone.embed(batch.obs), mask=causal)
        torch.testing.assert_close(vanilla.features(batch), h_BTD, rtol=0, atol=1e-6)


def torch_encoder(vanilla: Vanilla) -> nn.TransformerEncoder:
    """PyTorch's own encoder with our weights; the biases of its projections, which we do not have, are zero."""
    c, theirs = vanilla.config, {}
    layer = nn.TransformerEncoderLayer(
        c.d_model, c.num_heads, c.d_ff, dropout=0.0, activation="relu", norm_first=True, batch_first=True
    )
    encoder = nn.TransformerEncoder(layer, c.num_layers, nn.LayerNorm(c.d_model), enable_nested_tensor=False)
    names = {
        "attention_norm": "norm1",
        "ff_norm": "norm2",
        "attention.out": "self_attn.out_proj",
        "ff.0": "linear1",
        "ff.2": "linear2",
    }
    for index, block in enumerate(vanilla.backbone.blocks):
        for ours, name in names.items():
            for kind in ("weight", "bias"):
                theirs[f"layers.{index}.{name}.{kind}"] = block.get_parameter(f"{ours}.{kind}")
        theirs[f"layers.{index}.self_attn.in_proj_weight"] = block.get_parameter("attention.project.weight")
        theirs[f"layers.{index}.self_attn.in_proj_bias"] = torch.zeros(3 * c.d_model)
    theirs |= {f"norm.{kind}": vanilla.backbone.last_norm.get_parameter(kind) for kind in ("weight", "bias")}
    encoder.double().eval().load_state_dict(theirs)
    return encoder


# ---------------------------------------------------------------- streaming


@pytest.mark.parametrize(
    ("method", "spec", "dtype", "streams"),
    crossed(pytest.mark.slow, ("uat", "vanilla"), SPECS, PRECISIONS, (3, 1, 257)),
)
def test_streaming_equals_the_parallel_pass(method: str, spec: Spec, dtype: torch.dtype, streams: int) -> None:
    policy, batch = build_random(method, spec, dtype=dtype), random_batch(spec, episodes=streams)
    with torch.no_grad():
        assert_same_logits(stream(policy, batch), policy.logits(batch))


@every_spec
@both_methods
@given(seed=seeds, at=st.integers(1, 6))
def test_stream_restarted_in_mid_episode_is_a_fresh_episode(method: str, spec: Spec, seed: int, at: int) -> None:
    """Stream 1 starts again at step `at`; streams 0 and 2 continue unaffected."""
    policy = build_random(method, spec, seed=seed)
    going, fresh = (random_batch(spec, seed=seed + i) for i in range(2))
    restarted_B = torch.tensor([False, True, False])
    state, logits = policy.init_state(3, spec.steps, "cpu"), []
    with torch.no_grad():
        for t, (now, anew) in enumerate(zip(moments(going), late(list(moments(fresh)), by=at), strict=True)):
            step = now if t < at else mixed(restarted_B, anew, now)
            logits_BA, state = policy.step(state, step)
            logits.append(logits_BA)
        found, expected = torch.stack(logits, 1), policy.logits(going)
        assert_same_logits(found[[0, 2]], expected[[0, 2]])
        assert_same_logits(found[1, :at], expected[1, :at])
        assert_same_logits(found[1, at:], policy.logits(fresh)[1, : spec.steps - at])


def late(steps: list[Any], by: int) -> list[Any]:
    return [*[None] * by, *steps[: len(steps) - by]]


def mixed(chosen_B: Tensor, a: Any, b: Any) -> Any:
    """The step a in the streams chosen, b in the others."""

    def pick(x: Tensor | None, y: Tensor | None) -> Tensor | None:
        return None if x is None or y is None else torch.where(chosen_B.view(-1, *[1] * (x.dim() - 1)), x, y)

    return replace(b, **{name: pick(getattr(a, name), getattr(b, name)) for name in b.__dataclass_fields__})


# ---------------------------------------------------------------- zero degradation


def silenced(batch: Batch) -> Batch:
    """Return the batch without any feedback."""
    none = 0 if batch.prev_action.is_floating_point() else NO_ACTION
    return replace(
        batch,
        prev_action=torch.full_like(batch.prev_action, none),
        prev_reward=torch.zeros_like(batch.prev_reward),
    )


def shut(uat: UAT) -> UAT:
    """W_s = W_ρ = 0."""
    with torch.no_grad():
        uat.utility.token.weight.zero_()
        uat.utility.regime.weight.zero_()
    return uat


def assert_is_vanilla_to_the_last_bit(uat: UAT, batch: Batch) -> None:
    vanilla = vanilla_of(uat)
    with torch.no_grad():
        assert torch.equal(uat.logits(batch), vanilla.logits(batch))
    assert torch.equal(stream(uat, batch), stream(vanilla, batch))


@pytest.mark.parametrize(("spec", "dtype", "episodes"), crossed(pytest.mark.slow, SPECS, PRECISIONS, (3, 1, 64)))
class TestZeroDegradation:
    def test_zero_gates_are_vanilla(self, spec: Spec, dtype: torch.dtype, episodes: int) -> None:
        uat, batch = randomise(build_uat(spec, dtype=dtype), 1), random_batch(spec, episodes=episodes)
        assert not torch.equal(uat.logits(batch), vanilla_of(uat).logits(batch))
        assert_is_vanilla_to_the_last_bit(shut(uat), batch)

    def test_no_feedback_is_vanilla(self, spec: Spec, dtype: torch.dtype, episodes: int) -> None:
        uat = randomise(build_uat(spec, dtype=dtype), 2)
        assert_is_vanilla_to_the_last_bit(uat, silenced(random_batch(spec, episodes=episodes)))

    def test_fresh_uat_is_vanilla(self, spec: Spec, dtype: torch.dtype, episodes: int) -> None:
        assert_is_vanilla_to_the_last_bit(build_uat(spec, dtype=dtype), random_batch(spec, episodes=episodes))


@every_spec
def test_fresh_uat_learns_its_gates_first(spec: Spec) -> None:
    """The gradient is exactly zero on W^u, U, W_a and E, and reaches W_s and W_ρ."""
    uat = build_uat(spec)
    uat.loss(random_batch(spec))["imitation"][0].backward()
    gates, encoder = uat.utility, uat.utility.encoder
    idle = [*encoder.action.parameters(), *encoder.mlp.parameters()]
    for block in uat.backbone.blocks:
        assert isinstance(block.attention, Attention)
        project = block.attention.project
        assert project.weight.grad is not None
        assert project.bias_3HEE is not None
        idle.append(project.bias_3HEE)
        base, twin = project.weight.grad.split(3 * uat.config.d_model)
        assert twin.abs().max() == 0
        assert (base.abs().amax(1) > 0).all()
    assert all(p.grad is not None and p.grad.abs().max() == 0 for p in idle)
    for readout in (gates.token, gates.regime):
        assert readout.weight.grad is not None
        assert (readout.weight.grad.abs().amax(1) > 0).all()


@every_spec
def test_gradient_reaches_every_matrix_of_every_layer_and_head(spec: Spec) -> None:
    """Matrices lie side by side in few parameters: none of them may hide behind another's gradient."""
    uat, c = randomise(build_uat(spec), 0), build_uat(spec).config
    uat.loss(random_batch(spec, episodes=8))["imitation"][0].backward()
    d_head = c.d_model // c.num_heads
    for block in uat.backbone.blocks:
        for name in ("weight", "bias_3HEE"):
            gradient = block.get_parameter(f"attention.project.{name}").grad
            assert gradient is not None
            assert (gradient.reshape(-1, d_head, gradient.shape[-1]).abs().amax((1, 2)) > 0).all(), name
    for readout in (uat.utility.token, uat.utility.regime):
        assert readout.weight.grad is not None
        assert (readout.weight.grad.abs().amax(1) > 0).all()


# ---------------------------------------------------------------- parameters


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("d_model", [12, 24, 64])
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("name", ["vector-discrete", "assets-weights"])
def test_overhead_is_the_formula(name: str, d_model: int, num_layers: int) -> None:
    heads, d_u, d_a, hidden = {12: 3, 24: 2, 64: 4}[d_model], 5, 3, 8
    uat = build_uat(SPECS[name], d_model=d_model, num_layers=num_layers, num_heads=heads)
    L, d, d_m = num_layers, d_model, d_model // heads
    encoder = uat.spec.action.count * d_a + (d_a + 1) * hidden + hidden * d_u
    assert count(uat.utility.encoder) == encoder
    assert count(uat) - count(vanilla_of(uat)) == 3 * L * d**2 + 3 * L * d_m * d + (L + 1) * d * d_u + encoder


def test_parameter_counts() -> None:
    """The published number."""
    spec = Spec(obs=Vector(10), action=Discrete(4), horizon=60)
    sizes: dict[str, Any] = {"d_model": 64, "num_heads": 4, "num_layers": 3, "d_ff": 128}
    uat = build_uat(spec, **sizes, d_utility=16, d_action=8, d_hidden=32)
    assert uat.backbone.positions.shape == (61, 64)
    assert count(uat) == 155_972
    projections = 3 * 3 * 64**2  # no bias in any of them
    assert sum(p.numel() for n, p in vanilla_of(uat).named_parameters() if ".project." in n) == projections


# ---------------------------------------------------------------- Proposition 1: who is blind


@every_spec
@given(seed=seeds)
def test_observation_only_retrieval_is_blind_to_feedback(spec: Spec, seed: int) -> None:
    vanilla, trajectory = build_random("vanilla", spec, seed=seed), random_trajectory(spec, seed=seed, whole=True)
    batch, other = (spec.clock.batch(each) for each in (trajectory, with_other_feedback(trajectory)))
    assert torch.equal(vanilla.features(batch), vanilla.features(other))
    assert torch.equal(stream(vanilla, batch), stream(vanilla, other))


@every_spec
@given(seed=seeds)
def test_uat_retrieval_is_not_blind_to_feedback(spec: Spec, seed: int) -> None:
    """From the first feedback on, every representation differs; before it, none does."""
    uat, trajectory = build_random("uat", spec, seed=seed), random_trajectory(spec, seed=seed, whole=True)
    h_BTD = uat.features(spec.clock.batch(trajectory))
    other_BTD = uat.features(spec.clock.batch(with_other_feedback(trajectory)))
    assert torch.equal(h_BTD[:, 0], other_BTD[:, 0])
    assert (h_BTD != other_BTD).any(-1)[:, 1:].all()


# ---------------------------------------------------------------- Proposition 2: input-level injection


def interactions(W_e: Tensor, W_Q: Tensor, W_K: Tensor, split: int) -> dict[str, Tensor]:
    """M^(oo), M^(of), M^(fo), M^(ff)"""
    part = {"o": W_e[:, :split], "f": W_e[:, split:]}
    return {a + b: part[a].T @ W_Q.T @ W_K @ part[b] for a in "of" for b in "of"}


def rank(*side_by_side: Tensor) -> int:
    return int(torch.linalg.matrix_rank(torch.cat(side_by_side, dim=1), rtol=1e-10))


@given(seed=seeds)
def test_concatenated_feedback_shares_one_rank_limited_kernel(seed: int) -> None:
    """The logit of tokens W_e [o; f] is a sum of four forms, each of rank d_m at most, through one pair of maps."""
    d, heads, wide_o, wide_f, steps = 12, 3, 7, 6, 5
    d_m = d // heads
    attention = randomise(Attention(d, heads, dropout=0.0, utility=True).double(), seed)
    generator = torch.Generator().manual_seed(seed)
    W_e = torch.randn(d, wide_o + wide_f, dtype=torch.float64, generator=generator)
    tokens = torch.randn(steps, wide_o + wide_f, dtype=torch.float64, generator=generator)
    o, f = tokens.split([wide_o, wide_f], dim=1)
    x_BTD = (tokens @ W_e.T)[None]
    shut_gate = torch.zeros_like(x_BTD)
    logit_HTT = attention.logit_terms(x_BTD, shut_gate, shut_gate)[0, 0, 0] * d_m**0.5
    w = {f"attention.{name}": p for name, p in attention.named_parameters()}
    for head in range(heads):
        W_Q, W_K = (reference.matrices(w, "attention.project", p, head, heads)[0] for p in "QK")
        M = interactions(W_e, W_Q, W_K, wide_o)
        four = o @ M["oo"] @ o.T + o @ M["of"] @ f.T + f @ M["fo"] @ o.T + f @ M["ff"] @ f.T
        torch.testing.assert_close(logit_HTT[head], four, rtol=0, atol=1e-10)
        for name, form in M.items():
            assert rank(form) == d_m < min(form.shape)  # the bound, and that it is tight
            A, B = ({"o": W_e[:, :wide_o], "f": W_e[:, wide_o:]}[part] for part in name)
            assert rank(A.T @ W_Q.T, form) == rank(A.T @ W_Q.T)  # columns through W_Q
            assert rank((W_K @ B).T, form.T) == rank(W_K @ B)  # rows through W_K
        assert rank(W_e.T @ W_Q.T @ W_K @ W_e) == d_m  # and all four at once


# ---------------------------------------------------------------- Theorem 1: an explicit separation


def told_apart(kind: str) -> tuple[Batch, Batch]:
    """Two histories with equal observations that differ in the first action, or in the first reward."""
    first, second = ((0, 0.0), (1, 0.0)) if kind == "action" else ((0, 1.0), (0, -1.0))

    def history(action: int, reward: float) -> Batch:
        return Batch(
            obs=torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64),
            prev_action=torch.tensor([[NO_ACTION, action]]),
            prev_reward=torch.tensor([[0.0, reward]], dtype=torch.float64),
            target=torch.zeros(1, 2, dtype=torch.long),
            valid=torch.ones(1, 2, dtype=torch.bool),
        )

    return history(*first), history(*second)


@torch.no_grad()
def explicit_uat() -> UAT:
    """The construction of the proof: one layer, one head, and feedback that enters one entry of one key."""
    spec = Spec(obs=Vector(2), action=Discrete(2), horizon=2)
    sizes: dict[str, Any] = {
        "d_model": 4,
        "num_heads": 1,
        "num_layers": 1,
        "d_ff": 1,
        "d_utility": 1,
        "d_action": 1,
        "d_hidden": 2,
    }
    uat = build_uat(spec, **sizes)
    for name, p in uat.named_parameters():
        p.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    w = dict(uat.named_parameters())
    w["backbone.encoder.linear.weight"].copy_(torch.tensor([[1, 0], [0, 1], [-1, 0], [0, -1]]))
    w["utility.encoder.action.weight"].copy_(torch.tensor([[1], [-1]]))  # f_a(0) = 1, f_a(1) = -1
    w["utility.encoder.mlp.0.weight"].copy_(torch.tensor([[1, 1], [-1, -1]]))
    w["utility.encoder.mlp.2.weight"].copy_(torch.tensor([[1, -1]]))  # u = f_a(a) + r
    k = 0
    w["utility.token.weight"][k] = 1.0  # g_k = tanh(u), the others shut
    x = tokens(uat)
    stacked = w["backbone.blocks.0.attention.project.weight"].unflatten(0, (6, 4))  # Q K V, and their twins
    stacked[0, k] = x[1]  # W_Q: its k-th row meets x_t
    stacked[4, k] = x[1]  # W_K^u: its k-th row meets x_{j*+1}, which is x_t here
    stacked[2] = torch.eye(4)  # W_V
    w["backbone.blocks.0.attention.out.weight"].copy_(torch.eye(4))
    return uat


def tokens(uat: UAT) -> Tensor:
    """(T, D) what attention reads."""
    block = uat.backbone.blocks[0]
    return block.get_submodule("attention_norm")(uat.backbone.embed(told_apart("reward")[0].obs))[0]


@torch.no_grad()
def aim_head(uat: UAT, one: Batch, other: Batch) -> None:
    """The head that says 0 on one side of the midpoint between the two representations, and 1 on the other."""
    h, h_other = (uat.features(history)[0, -1] for history in (one, other))
    across = (h - h_other) / (h - h_other).norm()
    uat.head.linear.weight.copy_(torch.stack([across, -across]))
    middle = across @ (h + h_other) / 2
    uat.head.linear.bias.copy_(torch.stack([-middle, middle]))


@pytest.mark.parametrize("kind", ["action", "reward"])
def test_explicit_uat_separates_histories_with_equal_observations(kind: str) -> None:
    uat, (one, other) = explicit_uat(), told_apart(kind)
    x = tokens(uat)
    attention = uat.backbone.blocks[0].get_submodule("attention")
    assert isinstance(attention, Attention)
    gates, gates_other = (uat.utility(history.prev_action, history.prev_reward) for history in (one, other))
    logit, logit_other = (attention.logit_terms(x[None], g.rho, g.g[0]).sum((0, 1))[0, 0] for g in (gates, gates_other))
    d_k = (gates.g[0] - gates_other.g[0])[0, 1, 0]
    gap = d_k * (x[1] @ x[1]) ** 2 / 4**0.5  # d_k ⟨w_Q, x_t⟩ ⟨w_K^u, x_j⟩ / √d_m
    assert gap.abs() > 0.1
    torch.testing.assert_close((logit - logit_other)[1, 1], gap, rtol=0, atol=1e-12)
    torch.testing.assert_close(logit[1, 0], logit_other[1, 0], rtol=0, atol=0)

    aim_head(uat, one, other)
    answers = [uat.logits(history)[0, -1] for history in (one, other)]
    assert [answer.argmax().item() for answer in answers] == [0, 1]
    assert [stream(uat, history)[0, -1].argmax().item() for history in (one, other)] == [0, 1]
    assert min((answer[0] - answer[1]).abs().item() for answer in answers) > 0.01


@pytest.mark.parametrize("kind", ["action", "reward"])
@given(seed=seeds)
def test_no_vanilla_separates_them(kind: str, seed: int) -> None:
    one, other = told_apart(kind)
    vanilla = randomise(vanilla_of(explicit_uat()), seed)
    assert torch.equal(vanilla.logits(one), vanilla.logits(other))


# ---------------------------------------------------------------- Theorem 2: uniform approximation


STEPS = 3
HISTORIES = Spec(obs=Vector(1), action=Weights(2), horizon=STEPS)


def histories(o_BT: Tensor, a_BT: Tensor, r_BT: Tensor) -> Batch:
    """Return the input of a policy after actions (a, 1-a) and rewards r; one action and reward fewer than observations.

    The target is a Lipschitz map of the history: how well the first weight paid so far, older steps counting
    half, and the present observation.
    """
    paid_BT = r_BT * (2 * a_BT - 1)
    felt_BT = torch.stack([(paid_BT[:, :t] * 0.5 ** torch.arange(t).flip(0)).sum(1) for t in range(STEPS)], 1)
    p_BT = torch.sigmoid(felt_BT + 0.5 * o_BT)
    action_BT2 = torch.stack([a_BT, 1 - a_BT], -1)
    return Batch(
        obs=o_BT[..., None],
        prev_action=torch.cat([torch.zeros(len(o_BT), 1, 2), action_BT2], 1),
        prev_reward=torch.cat([torch.zeros(len(o_BT), 1), r_BT], 1),
        target=torch.stack([p_BT, 1 - p_BT], -1),
        valid=torch.ones(o_BT.shape, dtype=torch.bool),
    )


def grid(levels: int) -> tuple[Batch, int]:
    """Histories on a grid, and how many different feedbacks follow one another for each run of observations."""
    o, a, r = torch.linspace(-1, 1, levels), torch.linspace(0, 1, levels), torch.linspace(-1, 1, levels)
    points = torch.cartesian_prod(*[o] * STEPS, *[a] * (STEPS - 1), *[r] * (STEPS - 1))
    return histories(*points.split([STEPS, STEPS - 1, STEPS - 1], dim=1)), levels ** (2 * STEPS - 2)


def fit(policy: Policy, updates: int) -> Policy:
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
    for _ in range(updates):
        points = torch.cos(torch.pi * torch.rand(256, 3 * STEPS - 2, generator=generator))  # denser at the edges
        o, a, r = points.split([STEPS, STEPS - 1, STEPS - 1], dim=1)
        total, count = policy.loss(histories(o, (1 + a) / 2, r))["imitation"]
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        schedule.step()
    return policy


@torch.no_grad()
def sup_error(policy: Policy, batch: Batch) -> float:
    return (policy.logits(batch).softmax(-1) - batch.required_target).norm(dim=-1).max().item()


@pytest.mark.slow
def test_uat_approximates_a_feedback_map_uniformly_and_vanilla_cannot() -> None:
    sizes: dict[str, Any] = {"d_model": 32, "num_heads": 4, "num_layers": 1, "d_ff": 64}
    uat = build_uat(HISTORIES, dtype=torch.float32, **sizes, d_utility=16, d_action=8, d_hidden=32)
    vanilla = Vanilla(HISTORIES, VanillaConfig(dropout=0.0, **sizes))
    batch, aliased = grid(levels=4)
    same_observations = batch.required_target[:, -1].unflatten(0, (-1, aliased))
    separation = (same_observations.amax(1) - same_observations.amin(1)).norm(dim=-1).max().item()
    assert separation > 0.5
    assert sup_error(fit(uat, 1500), batch) < 0.05
    assert sup_error(fit(vanilla, 300), batch) >= separation / 2
