"""Transformer methods with all kinds of positions and windows: streaming, causality, reach."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.builders import (
    SPECS,
    build,
    build_random,
    build_uat,
    crossed,
    moments,
    random_batch,
    random_trajectory,
    randomise,
    served,
    stream,
    vanilla_of,
    with_other_feedback,
)
from uat.config import override
from uat.engines import plan
from uat.episode import Batch
from uat.methods import METHODS, Policy
from uat.methods.uat import UAT
from uat.nn.blocks import TransformerConfig
from uat.recipes import recipe
from uat.runs import load_policy, save_policy

STEPS = 17
KINDS = ("rotary", "none", "learned")
CASES: dict[str, dict[str, Any]] = {
    "uat": {},
    "dt": {},
    "vanilla": {},
    "adt": {},
    "dt with actions": {"include_actions": True},
    "sasrec": {},
}
CONTEXTS = (5, 1, 2, 16, 17, None)
EXACT: Any = {"rtol": 0, "atol": 1e-10}
on_the_backbone = pytest.mark.parametrize(
    "method", [name for name, entry in METHODS.items() if issubclass(entry.config, TransformerConfig)]
)


def windowed(case: str, positions: str, context: int | None, *, seed: int = 0, **settings: Any) -> Policy:
    method = case.split()[0]
    table = {"max_positions": 40} if positions == "learned" else {}
    settings = {"positions": positions, "context": context, **table, **CASES.get(case, {}), **settings}
    return build_random(method, served(method), seed=seed, **settings)


def episodes(policy: Policy, *, steps: int = STEPS, seed: int = 0) -> Batch:
    return random_batch(policy.spec, steps=steps, seed=seed)


def with_obs(batch: Batch, at: int) -> Batch:
    """Return a copy of the batch with another observation at one step."""
    obs = batch.obs.clone()
    obs[:, at] = (obs[:, at] + 2) % 11 if obs.dtype == torch.long else obs[:, at] + 0.5
    return replace(batch, obs=obs)


@torch.no_grad()
def logits(policy: Policy, batch: Batch) -> Tensor:
    return policy.logits(batch)


# ---------------------------------------------------------------- streaming


@pytest.mark.parametrize(("case", "positions", "context"), crossed(pytest.mark.slow, tuple(CASES), KINDS, CONTEXTS))
def test_streaming_equals_the_parallel_pass_under_the_same_window(
    case: str, positions: str, context: int | None
) -> None:
    policy = windowed(case, positions, context)
    batch = episodes(policy)
    torch.testing.assert_close(stream(policy, batch), logits(policy, batch), **EXACT)


@pytest.mark.parametrize(("case", "positions"), crossed(pytest.mark.slow, tuple(CASES), KINDS))
def test_streams_restarted_in_the_middle_begin_anew(case: str, positions: str) -> None:
    """Streams restart at different times, so that their slots and positions differ."""
    policy = windowed(case, positions, 4)
    old, anew = (episodes(policy, seed=seed) for seed in (1, 2))
    restart_B = torch.tensor([3, 6, 20])
    state, found = policy.init_state(3, 2 * STEPS, "cpu"), []
    olds, anews = list(moments(old)), list(moments(anew))
    with torch.no_grad():
        for t in range(STEPS):
            mixed = olds[t].map(torch.clone)
            for b, at in enumerate(restart_B.tolist()):
                if t >= at:
                    for field in ("obs", "prev_action", "prev_reward", "first"):
                        getattr(mixed, field)[b] = getattr(anews[t - at], field)[b]
                    if mixed.allowed is not None:
                        mixed.allowed[b] = anews[t - at].allowed[b]
            logits_BA, state = policy.step(state, mixed)
            found.append(logits_BA)
    before, after = logits(policy, old), logits(policy, anew)
    for b, at in enumerate(restart_B.tolist()):
        expected = torch.cat([before[b, :at], after[b]])[:STEPS]
        torch.testing.assert_close(torch.stack(found, 1)[b], expected, **EXACT)


@pytest.mark.parametrize("case", CASES)
def test_a_windowed_step_reads_no_value_on_the_host(case: str) -> None:
    """Meta tensors have no values, so operations that would block a CUDA graph raise an error here."""
    policy = windowed(case, "rotary", 4).to("meta")
    state = policy.init_state(3, STEPS, "meta")
    with torch.no_grad():
        for moment in moments(random_batch(policy.spec, steps=6)):
            logits_BA, state = policy.step(state, moment.to("meta"))
            assert logits_BA.shape == (3, policy.spec.action.count)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("positions", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_windowed_steps_are_captured_on_a_gpu_and_equal_the_pass_on_a_cpu(case: str, positions: str) -> None:
    policy = windowed(case, positions, 4)
    batch = episodes(policy)
    expected = logits(policy, batch)
    policy, on_gpu = policy.cuda(), batch.to("cuda")
    torch.testing.assert_close(logits(policy, on_gpu).cpu(), expected, **EXACT)

    @torch.no_grad()
    def play() -> Tensor:
        state, found = policy.init_state(3, STEPS, "cuda"), []
        for t in range(STEPS):
            logits_BA, state = policy.step(state, on_gpu.step(t))
            found.append(logits_BA)
        return torch.stack(found, dim=1)

    play()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = play()
    graph.replay()
    torch.testing.assert_close(found.cpu(), expected, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["uat", "dt"])
def test_less_precise_weights_stream_within_their_rounding(case: str, dtype: torch.dtype) -> None:
    policy = windowed(case, "rotary", 4).to(dtype)
    batch = episodes(policy)
    found, expected = stream(policy, batch).float(), logits(policy, batch).float()
    assert (found - expected).abs().max() < (1e-5 if dtype == torch.float32 else 0.1) * expected.abs().max()


def test_poison_in_slots_of_no_step_changes_nothing() -> None:
    policy = windowed("uat", "rotary", 4)
    found = []
    for filling in (0.0, 1e18):
        state: Any = policy.init_state(3, STEPS, "cpu")
        state.cache.kv_L2BHSE.fill_(filling)
        with torch.no_grad():
            for moment in moments(episodes(policy)):
                logits_BA, state = policy.step(state, moment)
                found.append(logits_BA)
    assert torch.equal(torch.stack(found[:STEPS]), torch.stack(found[STEPS:]))


@pytest.mark.parametrize("case", ["uat", "dt"])
def test_memory_holds_the_window_however_long_the_stream_is(case: str) -> None:
    policy = windowed(case, "rotary", 4)
    caches = [policy.init_state(1, capacity, "cpu").cache.kv_L2BHSE for capacity in (3, 4, 10**12)]
    per_step = 2 if case == "dt" else 1
    assert [cache.shape[-2] for cache in caches] == [3 * per_step, 4 * per_step, 4 * per_step]


# ---------------------------------------------------------------- what a window cuts


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("positions", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_a_window_reaches_exactly_so_far(case: str, positions: str, layers: int) -> None:
    """Each layer adds context - 1 steps. A change just outside changes no bit; one just inside does."""
    policy: Any = windowed(case, positions, 3, num_layers=layers)
    batch, last = episodes(policy), STEPS - 1
    assert policy.backbone.reach == 2 * layers + 1
    farthest = last - 2 * layers
    expected = logits(policy, batch)[:, last]
    assert torch.equal(logits(policy, with_obs(batch, farthest - 1))[:, last], expected)
    assert (logits(policy, with_obs(batch, farthest))[:, last] != expected).any(-1).all()


def test_the_regime_state_of_uat_remembers_what_has_left_the_window() -> None:
    """Gates read a running average over all feedback of the episode, without a window."""
    policy = windowed("uat", "rotary", 2, num_layers=1)
    trajectory = random_trajectory(policy.spec, steps=STEPS, whole=True)
    early = with_other_feedback(trajectory)
    changed = replace(trajectory, reward=torch.cat([early.reward[:, :3], trajectory.reward[:, 3:]], dim=1))
    before, after = (logits(policy, policy.spec.clock.batch(each))[:, -1] for each in (trajectory, changed))
    assert (before != after).any(-1).all()


@pytest.mark.parametrize("positions", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_future_changes_no_earlier_output(case: str, positions: str) -> None:
    policy = windowed(case, positions, 4)
    batch = episodes(policy)
    before, after = logits(policy, batch), logits(policy, with_obs(batch, 9))
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9], after[:, 9])


@pytest.mark.parametrize("positions", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_a_window_longer_than_the_episode_changes_nothing(case: str, positions: str) -> None:
    policy, unlimited = (windowed(case, positions, context) for context in (STEPS, None))
    batch = episodes(policy)
    assert torch.equal(logits(policy, batch), logits(unlimited, batch))
    assert not torch.equal(logits(windowed(case, positions, STEPS - 1), batch), logits(unlimited, batch))


# ---------------------------------------------------------------- what positions mean


@pytest.mark.parametrize("context", [None, 4])
@pytest.mark.parametrize("case", CASES)
def test_rotary_positions_are_distances(case: str, context: int | None) -> None:
    """Episodes may start at any position, even after a trillion steps."""
    policy = windowed(case, "rotary", context)
    batch = episodes(policy)
    shifted = replace(batch, start=torch.tensor([1, 10**6, 10**12]))
    torch.testing.assert_close(logits(policy, shifted), logits(policy, batch), **EXACT)
    assert not torch.equal(logits(policy, batch), logits(windowed(case, "none", context), batch))


def test_without_positions_the_order_of_what_came_before_is_unknown_to_one_layer() -> None:
    policy = windowed("vanilla", "none", None, num_layers=1)
    batch = episodes(policy)
    order = torch.cat(
        [torch.randperm(STEPS - 1, generator=torch.Generator().manual_seed(0)), torch.tensor([STEPS - 1])]
    )
    mixed = replace(batch, obs=batch.obs[:, order], allowed=None)
    expected = logits(policy, replace(batch, allowed=None))[:, -1]
    torch.testing.assert_close(logits(policy, mixed)[:, -1], expected, **EXACT)
    rotary = windowed("vanilla", "rotary", None, num_layers=1)
    assert not torch.allclose(logits(rotary, mixed)[:, -1], logits(rotary, replace(batch, allowed=None))[:, -1])


@pytest.mark.parametrize("context", [None, 4])
@pytest.mark.parametrize("positions", KINDS)
def test_zero_gates_are_vanilla_to_the_last_bit(positions: str, context: int | None) -> None:
    table: dict[str, Any] = {"max_positions": 40} if positions == "learned" else {}
    uat = build_uat(SPECS["vector-discrete"], positions=positions, context=context, **table)
    randomise(uat, 0)
    with torch.no_grad():
        uat.utility.token.weight.zero_()
        uat.utility.regime.weight.zero_()
    vanilla, batch = vanilla_of(uat), random_batch(uat.spec, steps=STEPS)
    assert torch.equal(logits(uat, batch), logits(vanilla, batch))
    assert torch.equal(stream(uat, batch), stream(vanilla, batch))


@pytest.mark.parametrize("case", CASES)
def test_learned_tables_are_the_only_weights_that_positions_have(case: str) -> None:
    learned, rotary, none = (windowed(case, positions, 4).state_dict() for positions in ("learned", "rotary", "none"))
    assert learned.keys() - rotary.keys() == {"backbone.positions"}
    assert rotary.keys() == none.keys()


@pytest.mark.parametrize("tokens_per_step", [2, 3])
def test_all_tokens_of_a_step_have_its_position(tokens_per_step: int) -> None:
    policy: Any = windowed("dt with actions" if tokens_per_step == 3 else "dt", "rotary", None)
    rotation = policy.backbone.geometry(tokens_per_step * 4 - (tokens_per_step == 3)).rotation
    expected = policy.backbone.rotary(torch.arange(4), torch.float64).cos.repeat_interleave(tokens_per_step, 0)
    assert torch.equal(rotation.cos, expected[: len(rotation.cos)])


# ---------------------------------------------------------------- learning, and what is kept


@pytest.mark.parametrize("positions", ["rotary", "none"])
@on_the_backbone
def test_a_loss_reaches_every_parameter(method: str, positions: str) -> None:
    policy = build_random(method, served(method), positions=positions, context=3)
    batch = policy.spec.clock.batch(random_trajectory(policy.spec, episodes=6))
    total, count = zip(*(part for phase in policy.phases() for part in phase.loss(batch).values()), strict=True)
    torch.stack([a / b for a, b in zip(total, count, strict=True)]).sum().backward()
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("positions", KINDS)
@pytest.mark.parametrize("case", ["uat", "dt"])
def test_the_trace_shows_the_window_and_its_logits_give_the_attention(case: str, positions: str) -> None:
    policy: Any = windowed(case, positions, 4)
    with torch.no_grad():
        seen = policy.trace(episodes(policy))
        base, modulation = policy.backbone.split_logits(seen)
    tokens = seen.attention_LBHTT.shape[-1]
    visible = policy.backbone.geometry(tokens).visible(tokens, "cpu")
    assert seen.attention_LBHTT.masked_fill(visible, 0).abs().max() == 0
    assert (seen.attention_LBHTT.masked_fill(~visible, 1) > 0).all()
    found = (base + modulation).masked_fill(~visible, -torch.inf).softmax(-1)
    torch.testing.assert_close(found, seen.attention_LBHTT, **EXACT)
    assert base.isnan().any()  # keys before the window


@pytest.mark.parametrize("positions", KINDS)
def test_a_saved_policy_comes_back_to_the_last_bit(positions: str, tmp_path: Path) -> None:
    policy = windowed("uat", positions, 4)
    save_policy(tmp_path / "policy.safetensors", policy, "uat")
    loaded = load_policy(tmp_path / "policy.safetensors")
    assert loaded.config == policy.config
    assert torch.equal(logits(loaded, episodes(policy)), logits(policy, episodes(policy)))


def test_new_settings_at_their_defaults_rename_no_run() -> None:
    config = recipe("darkroom", "uat", "smoke")
    same = override(config, {"method.positions": "learned", "method.context": None})
    assert same.identity() == config.identity()
    others = [{"method.positions": "rotary"}, {"method.positions": "none"}, {"method.context": 5}]
    assert len({config.identity(), *(override(config, each).identity() for each in others)}) == 4


# ---------------------------------------------------------------- methods that adapt


@pytest.mark.parametrize("positions", KINDS)
@pytest.mark.parametrize("method", ["tent", "cotta"])
def test_adapting_at_rate_zero_is_vanilla(method: str, positions: str) -> None:
    """The adapting step has its own code, whose rotation and window must equal the plain step's."""
    table = {"max_positions": 40} if positions == "learned" else {}
    settings = {"positions": positions, "context": 4, **table}
    adapting = build_random(method, SPECS["vector-discrete"], adaptation_rate=0.0, **settings)
    vanilla = build("vanilla", adapting.spec, **settings)
    vanilla.load_state_dict(adapting.state_dict())
    batch = random_batch(adapting.spec, steps=STEPS)
    torch.testing.assert_close(stream(adapting, batch), stream(vanilla, batch), **EXACT)
    moving = build("tent", adapting.spec, **settings)
    moving.load_state_dict(adapting.state_dict())
    assert not torch.allclose(stream(moving, batch), stream(vanilla, batch))


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context": 0}, r"context=0 must be at least 1"),
        ({"context": 2.5}, r"context=2\.5 must be int"),
        ({"positions": "x"}, r"positions='x' must be one of 'learned', 'rotary', 'none'"),
        ({"positions": "rotary", "num_heads": 4}, r"d_model=12 with num_heads=4 has 3: choose sizes .* even"),
        ({"positions": "rotary", "max_positions": 9}, r"max_positions=9 is the size of a table of learned positions"),
        ({"positions": "none", "past_table": "clamp"}, r"past_table='clamp' is about a table of learned positions"),
    ],
)
@on_the_backbone
def test_settings_that_do_not_fit_are_refused(method: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(method, served(method), **settings)


def test_learned_positions_end_with_their_table_whatever_the_window_is() -> None:
    policy = windowed("uat", "learned", 4, max_positions=9)
    with pytest.raises(ValueError, match=r"10 steps do not fit the position table of 9"):
        policy.init_state(1, 10, "cpu")
    clamped = windowed("uat", "learned", 4, max_positions=9, past_table="clamp")
    batch = episodes(clamped)
    torch.testing.assert_close(stream(clamped, batch), logits(clamped, batch), **EXACT)


def test_fast_engines_refuse_what_they_do_not_know() -> None:
    for settings in ({"positions": "rotary"}, {"positions": "none"}, {"context": 4}):
        policy: Any = build("uat", SPECS["vector-discrete"], dtype=torch.float32, **settings)
        name = next(iter(settings))
        assert isinstance(policy, UAT)
        engine = plan(policy)
        for reason in (engine.refused, engine.refused_pass):
            assert reason is not None
            assert name in reason


@given(seed=st.integers(0, 2**31), context=st.integers(1, 9), case=st.sampled_from(sorted(CASES)))
def test_any_window_streams_as_it_learns(seed: int, context: int, case: str) -> None:
    policy = windowed(case, "rotary", context, seed=seed, num_layers=1)
    batch = episodes(policy, steps=11, seed=seed)
    torch.testing.assert_close(stream(policy, batch), logits(policy, batch), **EXACT)
