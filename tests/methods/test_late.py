"""Late gates: the action and the reward of a step gate its keys and values, once they are known."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.builders import ALL_SPECS, SPECS, build_random, random_batch, stream
from uat.engines import plan_session
from uat.episode import Batch
from uat.methods.tokens import TokenPolicy
from uat.methods.uat import UAT, UATConfig
from uat.nn.blocks import Block
from uat.nn.utility import LateGate
from uat.spec import Spec

EXACT: dict[str, Any] = {"rtol": 0, "atol": 1e-10}
KINDS = ("observation", "previous", "feedback", "transition", "two")
every_lag = pytest.mark.parametrize("lag", [0, 1, 2, 3])
every_kind = pytest.mark.parametrize("tokens", KINDS)


def spec_of(name: str = "vector-discrete", lag: int = 1) -> Spec:
    return replace(ALL_SPECS[name], reward_lag=lag)


def late(spec: Spec, **settings: Any) -> UAT:
    policy = build_random("uat", spec, **{"binding": "late", **settings})
    assert isinstance(policy, UAT)
    return policy


@torch.no_grad()
def parallel(policy: Any, batch: Batch) -> Tensor:
    return policy.logits(batch)


# ---------------------------------------------------------------- the equations


def gate_of(policy: UAT, batch: Batch, b: int, t: int, j: int, layer: int) -> Tensor:
    """The gate of step j as a query at step t meets it, by the definition."""
    lag = policy.spec.reward_lag
    if t == j:
        return torch.zeros(policy.config.d_model, dtype=torch.float64)
    action, reward = batch.prev_action[b, j + 1], batch.prev_reward[b, j + lag] if j + lag <= t else torch.tensor(0.0)
    if j + lag > t and policy.config.pending == "nothing":
        return torch.zeros(policy.config.d_model, dtype=torch.float64)
    u_U = policy.utility.encoder(action[None], reward[None])[0]
    return torch.tanh(policy.utility.token(u_U)).chunk(policy.config.num_layers)[layer]


@pytest.mark.parametrize("pending", ["action", "nothing"])
@every_lag
def test_late_gates_equal_the_equations(lag: int, pending: str) -> None:
    policy, batch = late(spec_of(lag=lag), pending=pending, num_layers=1), random_batch(spec_of(lag=lag), whole=True)
    block, b = policy.backbone.blocks[0], 1
    assert isinstance(block, Block)
    project, heads, d = block.attention.project, policy.config.num_heads, policy.config.d_model
    with torch.no_grad():
        x_TD = policy.tokens(batch)[b]
        n_TD, rho_TD = block.attention_norm(x_TD), policy.gates(batch).rho[b]
        expected = []
        for t in range(len(x_TD)):
            q = project.by_gate(n_TD[t], rho_TD[t], [None])[0]
            seen = [
                project.by_gate(n_TD[j], rho_TD[j], [gate_of(policy, batch, b, t, j, 0)])[1][0] for j in range(t + 1)
            ]
            h = []
            for own in torch.arange(d).chunk(heads):
                logits = torch.stack([q[own] @ k[own] for k, _ in seen]) / math.sqrt(d // heads)
                h.append(sum(w * v[own] for w, (_, v) in zip(logits.softmax(0), seen, strict=True)))
            y = x_TD[t] + block.attention.out(torch.cat(h))
            expected.append(policy.head.logits(policy.backbone.last_norm(y + block.ff(block.ff_norm(y)))))
    torch.testing.assert_close(parallel(policy, batch)[b], torch.stack(expected), **EXACT)


def test_pending_gates_matter_only_while_rewards_are_late() -> None:
    for lag, differs in ((0, False), (1, False), (2, True)):
        spec = spec_of(lag=lag)
        own, other = late(spec), late(spec, pending="nothing")
        other.load_state_dict(own.state_dict())
        assert torch.equal(parallel(own, random_batch(spec)), parallel(other, random_batch(spec))) != differs, lag


# ---------------------------------------------------------------- streaming


@pytest.mark.parametrize(
    "settings",
    [{}, {"context": 3}, {"context": 1}, {"positions": "rotary", "context": 4}, {"positions": "none"}],
    ids=str,
)
@every_lag
@every_kind
def test_streaming_equals_the_parallel_pass(tokens: str, lag: int, settings: dict[str, Any]) -> None:
    for pending in ("action", "nothing"):
        policy = late(spec_of(lag=lag), tokens=tokens, pending=pending, **settings)
        batch = random_batch(policy.spec, episodes=4)
        torch.testing.assert_close(stream(policy, batch), parallel(policy, batch), **EXACT)


@given(
    seed=st.integers(0, 2**31),
    name=st.sampled_from(sorted(ALL_SPECS)),
    lag=st.integers(0, 4),
    tokens=st.sampled_from(KINDS),
    context=st.integers(1, 8),
)
def test_any_problem_streams_as_it_learns(seed: int, name: str, lag: int, tokens: str, context: int) -> None:
    policy = late(spec_of(name, lag), tokens=tokens, context=context, num_layers=1)
    batch = random_batch(policy.spec, seed=seed)
    found, expected = stream(policy, batch), parallel(policy, batch)
    torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("context", [None, 3])
@every_lag
def test_a_stream_that_restarts_is_a_new_one(lag: int, context: int | None) -> None:
    """One stream restarts at step 4, and another goes on; poison stands where a new stream must not read."""
    policy = late(spec_of(lag=lag), tokens="transition", context=context)
    batch = random_batch(policy.spec, episodes=2, whole=True, seed=3)
    expected, state, steps = parallel(policy, batch), policy.init_state(2, 7, "cpu"), policy.spec.steps
    state.cache.kv_L2BHSE.fill_(1e30)
    with torch.no_grad():
        for t in range(4):
            _, state = policy.step(state, batch.step(t))
        for t in range(4, steps):
            moments = batch.step(t), batch.step(t - 4)
            both = moments[0].map(torch.clone)
            for name in ("obs", "prev_action", "prev_reward", "first"):
                getattr(both, name)[1] = getattr(moments[1], name)[1]
            logits, state = policy.step(state, both)
            torch.testing.assert_close(logits[0], expected[0, t], **EXACT)
            torch.testing.assert_close(logits[1], expected[1, t - 4], **EXACT)


@pytest.mark.parametrize("lag", [0, 1, 3])
@every_kind
def test_streams_are_taken_and_put(tokens: str, lag: int) -> None:
    policy = late(spec_of(lag=lag), tokens=tokens)
    batch = random_batch(policy.spec, episodes=3, whole=True)
    expected, state = parallel(policy, batch), policy.init_state(3, 7, "cpu")
    rows = torch.tensor([2, 0])
    with torch.no_grad():
        for t in range(4):
            _, state = policy.step(state, batch.step(t))
        other = policy.init_state(3, 7, "cpu")
        other.put(torch.tensor([1, 2]), state.take(rows))
        for t in range(4, 7):
            logits, other = policy.step(other, batch.map(lambda x: x[[1, 2, 0]]).step(t))
            torch.testing.assert_close(logits[1:], expected[rows, t], **EXACT)


@pytest.mark.parametrize("method", ["uat", "uat-late", "adt"])
def test_a_memory_keeps_no_tensor_of_its_caller(method: str) -> None:
    """Callers may reuse their observations, and `put` may write into a memory."""
    policy = build_random(method, spec_of(), tokens="transition")
    step = random_batch(spec_of(), episodes=3, whole=True).step(0)
    with torch.no_grad():
        _, state = policy.step(policy.init_state(3, 7, "cpu"), step)
    given = {x.data_ptr() for x in (step.obs, step.prev_action, step.prev_reward, step.first)}
    assert not given & {x.data_ptr() for x in state.tensors().values() if x.numel()}


def test_a_window_that_has_passed_is_not_rewritten() -> None:
    """The slot of a step that left the window belongs to a newer one."""
    policy = late(spec_of(lag=3), context=2, positions="none")
    batch = random_batch(policy.spec, whole=True)
    torch.testing.assert_close(stream(policy, batch), parallel(policy, batch), **EXACT)


# ---------------------------------------------------------------- zero gates


def without_gates(policy: UAT) -> TokenPolicy:
    """The policy without gates that has the same tokens and base weights."""
    c = policy.config
    plain = build_random("adt", policy.spec, tokens=c.tokens, token_feedback=c.token_feedback)
    assert isinstance(plain, TokenPolicy)
    own = {name.replace("utility.encoder.", "encoder."): value for name, value in policy.state_dict().items()}
    plain.load_state_dict({name: own[name][: len(value)] for name, value in plain.state_dict().items()})
    return plain


@pytest.mark.parametrize("binding", ["early", "late"])
@pytest.mark.parametrize("feedback", ["linear", "encoder"])
@every_kind
def test_zero_gates_equal_the_same_tokens_without_gates(tokens: str, feedback: str, binding: str) -> None:
    """Exactly with early gates, and in steps; the pass of late gates adds in another order."""
    if feedback == "encoder" and tokens in ("observation", "previous"):
        return
    policy = late(spec_of(), tokens=tokens, token_feedback=feedback, binding=binding)
    with torch.no_grad():
        for readout in (policy.utility.token, policy.utility.regime):
            readout.weight.zero_()
    plain, batch = without_gates(policy), random_batch(policy.spec)
    assert torch.equal(stream(policy, batch), stream(plain, batch))
    if binding == "early":
        assert torch.equal(parallel(policy, batch), parallel(plain, batch))
    torch.testing.assert_close(parallel(policy, batch), parallel(plain, batch), rtol=0, atol=1e-12)


def test_late_gates_differ_from_early_ones() -> None:
    own, batch = late(spec_of()), random_batch(spec_of())
    other = late(spec_of(), binding="early")
    other.load_state_dict(own.state_dict())
    assert torch.equal(parallel(own, batch)[:, 0], parallel(other, batch)[:, 0])  # no feedback yet
    assert not torch.allclose(parallel(own, batch)[:, 1], parallel(other, batch)[:, 1])


# ---------------------------------------------------------------- inspection


@every_kind
def test_traces_show_the_attention_that_acts(tokens: str) -> None:
    policy, batch = late(spec_of(lag=2), tokens=tokens), random_batch(spec_of(lag=2))
    with torch.no_grad():
        trace = policy.trace(batch)
        base, modulation = policy.backbone.split_logits(trace)
        future = torch.ones(base.shape[-2:], dtype=torch.bool).triu(1)
        found = (base + modulation).masked_fill(future, -torch.inf).softmax(-1)
    torch.testing.assert_close(found, trace.attention_LBHTT, **EXACT)
    assert trace.gates is not None
    assert all(isinstance(g, LateGate) for g in trace.gates.g)
    assert trace.gates.known_LBTD.shape[2] == base.shape[-1]


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"binding": "late", "modulates_keys_values": False}, "late gates are those of keys and values"),
        ({"binding": "soon"}, "binding='soon' must be one of 'early', 'late'"),
        ({"tokens": "three"}, "tokens='three' must be one of"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        UATConfig(**settings)


def test_standardised_observations_reach_both_maps() -> None:
    """Both maps of observations have the same statistics, which are saved; the first step still has no previous one."""
    policy = late(SPECS["vector-discrete"], tokens="transition")
    batch = random_batch(policy.spec, episodes=4)
    assert batch.trajectory is not None
    policy.standardise(batch.trajectory)
    torch.testing.assert_close(stream(policy, batch), parallel(policy, batch), **EXACT)
    names = [name for name in policy.state_dict() if "normalizer.mean" in name]
    assert names == ["backbone.encoder.normalizer.mean", "previous.normalizer.mean"]
    loaded = late(SPECS["vector-discrete"], tokens="transition")
    loaded.expect(policy.state_dict())
    loaded.load_state_dict(policy.state_dict())
    assert torch.equal(parallel(loaded, batch), parallel(policy, batch))


# ---------------------------------------------------------------- engines


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"binding": "late"}, "late gates are computed by the plain engine alone"),
        ({"tokens": "transition"}, "tokens='transition' with gates are computed by the plain engine alone"),
    ],
)
def test_sessions_say_why_late_gates_take_the_plain_step(settings: dict[str, Any], reason: str) -> None:
    policy = build_random("uat", spec_of(), dtype=torch.float32, **settings)
    engine = plan_session(policy, 1)
    assert (engine.name, engine.refused) == ("plain", reason)
