"""The fast CPU step equals its slow twin, `Policy.step`; one slow test checks its speed as ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.builders import CPU, SPECS, build_random, crossed, largest, moments, random_batch
from uat.bench.recompute import History, Recomputing
from uat.domains.darkroom import DarkRoom, DarkRoomConfig
from uat.engines import NUMPY_STREAMS, NumpyEngine, cpu, plan_session
from uat.engines.cpu import CPUStep
from uat.episode import Step
from uat.methods import METHODS, Policy
from uat.methods.uat import UAT
from uat.serving.session import Session
from uat.spec import Spec
from uat.threads import cpu_threads

PAPER = {"d_model": 64, "num_heads": 4, "num_layers": 3, "d_ff": 128}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
SERVED = [name for name in METHODS if not METHODS[name].policy.unsupported_reason(SPECS["vector-discrete"])]
FAST = [name for name in SERVED if plan_session(build_random(name, SPECS["vector-discrete"]), 1).name == "NumPy step"]
every_method = pytest.mark.parametrize("method", FAST)
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def fast_of(policy: Policy) -> CPUStep:
    engine = plan_session(policy, 1)
    assert isinstance(engine, NumpyEngine), engine.refused
    return engine.numpy


def told(spec: Spec, streams: int, steps: int, *, masked: bool | None = None) -> Iterator[Step]:
    """Generate random steps; each stream restarts at random times of its own."""
    generator = torch.Generator().manual_seed(1)
    for t, moment in enumerate(moments(random_batch(spec, episodes=streams, steps=steps, masked=masked, whole=True))):
        anew_B = torch.rand(streams, generator=generator) < 3 / steps
        yield replace(moment, first=moment.first | anew_B if t else moment.first)


@torch.no_grad()
def play(agent: Any, steps: list[Step], state: Any = None) -> Tensor:
    """Logits (B, T, A)."""
    state = agent.init_state(len(steps[0].first), len(steps), CPU) if state is None else state
    logits = []
    for step in steps:
        logits_BA, state = agent.step(state, step)
        logits.append(logits_BA.clone())
    return torch.stack(logits, 1)


def assert_twins(policy: Policy, steps: list[Step]) -> None:
    found, expected = play(fast_of(policy), steps), play(policy, steps)
    tolerance = TOLERANCE[next(policy.parameters()).dtype]
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * largest(expected))


# ---------------------------------------------------------------- the same answers


def test_vanilla_and_uat_have_a_fast_step_and_so_have_its_ablations() -> None:
    gated = {name for name, method in METHODS.items() if method.policy is UAT}
    assert {"vanilla", *gated} - {"uat-late", "uat-plus"} <= set(FAST)


@pytest.mark.parametrize(
    ("method", "spec", "streams", "dtype"), crossed(pytest.mark.kernels, FAST, SPECS, (3, 1, 63), tuple(TOLERANCE))
)
def test_equals_the_slow_twin(method: str, spec: Spec, streams: int, dtype: torch.dtype) -> None:
    policy = build_random(method, spec, dtype=dtype, max_positions=20)
    assert_twins(policy, list(told(spec, streams, 20)))


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        pytest.param(method, dtype, marks=[] if (method, dtype) == ("uat", torch.float32) else pytest.mark.kernels)
        for method in FAST
        for dtype in TOLERANCE
    ],
)
def test_equals_the_slow_twin_over_a_thousand_steps(method: str, dtype: torch.dtype) -> None:
    spec = SPECS["vector-discrete"]
    policy = build_random(method, spec, dtype=dtype, max_positions=900, past_table="clamp")
    steps = list(moments(random_batch(spec, episodes=1, steps=1000, whole=True)))
    assert_twins(policy, steps)


@pytest.mark.parametrize(
    ("positions", "context", "method", "dtype"),
    crossed(pytest.mark.kernels, ("rotary", "none", "learned"), (5, 1, 30, None), FAST, tuple(TOLERANCE)),
)
def test_equals_the_slow_twin_with_all_positions_and_windows(
    positions: str, context: int | None, method: str, dtype: torch.dtype
) -> None:
    places: dict[str, Any] = {"positions": positions, "context": context}
    table: dict[str, Any] = {"max_positions": 40} if positions == "learned" else {}
    policy = build_random(method, SPECS["vector-weights"], dtype=dtype, **places, **table)
    assert_twins(policy, list(told(policy.spec, 3, 40)))


def test_an_odd_head_size_is_served_where_nothing_turns() -> None:
    policy = build_random("uat", SPECS["vector-weights"], num_heads=4)
    assert_twins(policy, list(told(policy.spec, 2, 7)))


@pytest.mark.parametrize("masked", [True, False])
@every_spec
def test_masked_actions_are_impossible(spec: Spec, masked: bool) -> None:
    policy = build_random("uat", spec, max_positions=9)
    steps = list(told(spec, 2, 9, masked=masked))
    assert_twins(policy, steps)
    logits_BTA = play(fast_of(policy), steps)
    allowed = [torch.ones_like(logits_BTA[:, 0], dtype=torch.bool) if s.allowed is None else s.allowed for s in steps]
    assert torch.equal(logits_BTA.isfinite(), torch.stack(allowed, 1))


@every_method
def test_equals_the_slow_twin_at_the_sizes_of_the_paper(method: str) -> None:
    spec = DarkRoom(DarkRoomConfig()).spec
    policy = build_random(method, spec, dtype=torch.float32, **PAPER)
    assert_twins(policy, list(told(spec, 3, 60)))


@torch.no_grad()
def far_off(policy: Policy, offset: float) -> Policy:
    """Shift all scores of all heads by about the same number, which does not change a softmax."""
    for block in policy.get_submodule("backbone.blocks").children():
        weight_XD = block.get_parameter("attention.project.weight")
        width, d_head = weight_XD.shape[1], weight_XD.shape[1] // policy.config.num_heads
        weight_XD[:width, 0], weight_XD[width : 2 * width, 0] = 1, 1 if offset > 0 else -1
        block.get_parameter("attention_norm.bias")[0] += (abs(offset) / d_head**0.5) ** 0.5
    return policy


@pytest.mark.parametrize(
    ("offset", "dtype"),
    [
        *((o, torch.float32) for o in (-400.0, -30.0, 30.0, 400.0)),
        *((o, torch.float64) for o in (-2000.0, 30.0, 2000.0)),
    ],
)
@every_method
def test_scores_whose_exponentials_leave_the_range_are_exact(method: str, offset: float, dtype: torch.dtype) -> None:
    """Plain exponentials would be infinite or all zero: scores are 400 away in float32, 2000 away in float64."""
    policy = far_off(build_random(method, SPECS["vector-discrete"], dtype=dtype, max_positions=30), offset)
    fast, steps = fast_of(policy), list(told(policy.spec, 2, 30))
    state = fast.init_state(2, 30, CPU)
    assert play(fast, steps, state).isfinite().all()
    memory = state.streams[0]
    scores_HS = (state.scratch.q_H1E @ memory.kv_LHRS[-1][:, : fast.d_head, : memory.length])[:, 0]
    assert abs(offset) < 100 or (scores_HS / offset).min() > 0.4
    assert_twins(policy, steps)


def test_both_ways_to_the_attention_weights_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = build_random("uat", SPECS["vector-discrete"], max_positions=20)
    steps = list(told(policy.spec, 2, 20))
    quick = play(fast_of(policy), steps)
    monkeypatch.setattr(cpu, "SAFE", (0.0, 0.0))  # nothing is safe
    careful = play(fast_of(policy), steps)
    assert not torch.equal(quick, careful)
    torch.testing.assert_close(quick, careful, rtol=0, atol=1e-12 * largest(careful))


# ---------------------------------------------------------------- memory and weights


@every_method
def test_what_lies_in_unused_slots_is_never_read(method: str) -> None:
    policy = build_random(method, SPECS["vector-weights"], max_positions=12)
    fast, steps = fast_of(policy), list(told(policy.spec, 3, 12))
    state = fast.init_state(3, 12, CPU)
    for memory in state.streams:
        for kv_HRS in memory.kv_LHRS:
            kv_HRS[:, :-1].fill(1e18)
    assert torch.equal(play(fast, steps, state), play(fast, steps))


def test_weights_are_those_of_the_moment_of_opening() -> None:
    policy = build_random("uat", SPECS["vector-weights"], dtype=torch.float64)
    steps = list(told(policy.spec, 2, 7))
    fast, before = fast_of(policy), play(policy, steps)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    torch.testing.assert_close(play(fast, steps), before, rtol=0, atol=1e-10 * largest(before))
    assert not torch.equal(play(fast_of(policy), steps), before)


def test_two_states_of_one_step_do_not_meet() -> None:
    policy = build_random("uat", SPECS["items-discrete"])
    fast, steps = fast_of(policy), list(told(policy.spec, 2, 7))
    one, other = fast.init_state(2, 7, CPU), fast.init_state(2, 7, CPU)
    expected = play(fast, steps)
    for t, step in enumerate(steps):
        assert torch.equal(fast.step(one, step)[0], expected[:, t])
        assert torch.equal(fast.step(other, step)[0], expected[:, t])


def test_a_step_past_the_capacity_is_an_error() -> None:
    fast = fast_of(build_random("uat", SPECS["vector-discrete"]))
    steps = list(moments(random_batch(fast_spec := SPECS["vector-discrete"], episodes=1, whole=True)))
    with pytest.raises(IndexError):
        play(fast, steps, fast.init_state(1, fast_spec.steps - 1, CPU))


def test_more_steps_than_positions_are_refused_or_clamped() -> None:
    spec = SPECS["vector-discrete"]
    with pytest.raises(ValueError, match="9 steps do not fit the position table of 8"):
        fast_of(build_random("uat", spec)).init_state(1, 9, CPU)
    fast_of(build_random("uat", spec, past_table="clamp")).init_state(1, 9, CPU)


# ---------------------------------------------------------------- which path a session takes


def test_a_session_says_which_path_it_took() -> None:
    policy = build_random("uat", SPECS["vector-discrete"], dtype=torch.float32)
    assert Session(policy).path == "fast"
    assert Session(policy, streams=NUMPY_STREAMS).path == "fast"
    assert Session(policy, streams=NUMPY_STREAMS + 1).path == "cached"
    assert Session(policy, streams=NUMPY_STREAMS + 1, path="fast").path == "fast"
    assert Session(policy, path="cached").path == "cached"
    assert Session(policy.bfloat16()).path == "cached"


def test_a_path_that_is_not_there_is_refused() -> None:
    policy = build_random("uat", SPECS["vector-discrete"])
    with pytest.raises(ValueError, match="path='quick' must be one of 'auto', 'fast', 'cached'"):
        Session(policy, path="quick")  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError, match=r"path='fast' is not possible: it takes float32 or float64 .* not torch.bfloat16"
    ):
        Session(policy.bfloat16(), path="fast")


def test_a_policy_without_a_fast_step_says_so() -> None:
    class Other(type(build_random("uat", SPECS["vector-discrete"]))):
        """Might compute anything."""

    policy = build_random("uat", SPECS["vector-discrete"])
    policy.__class__ = Other
    assert Session(policy).path == "cached"
    with pytest.raises(ValueError, match="path='fast' is not possible: Other has no fast step"):
        Session(policy, path="fast")


# ---------------------------------------------------------------- speed


class Timed:
    """A repeated call, and the median of its times."""

    def __init__(self, run: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> None:
        self.run, self.before, self.times = run, before, []

    @torch.no_grad()
    def once(self) -> None:
        self.before()
        start = time.perf_counter()
        self.run()
        self.times.append(time.perf_counter() - start)

    @property
    def median(self) -> float:
        return statistics.median(self.times)


def stepping(fast: CPUStep, spec: Spec, context: int) -> Timed:
    """The step of one stream that has seen `context` - 1 others."""
    *past, last = moments(random_batch(spec, episodes=1, steps=context, whole=True))
    state = fast.init_state(1, context, CPU)
    play(fast, past, state)

    def before() -> None:
        state.streams[0].length = context - 1

    return Timed(lambda: fast.step(state, last), before)


def recomputing(policy: Policy, spec: Spec, context: int) -> Timed:
    *past, last = moments(random_batch(spec, episodes=1, steps=context, whole=True))
    twin = Recomputing(policy)
    return Timed(lambda: twin.step(History(list(past)), last))


def acting(policy: Policy, context: int) -> Timed:
    """Time steps of a session, with all its checks, over whole episodes, which cost a little less."""
    session, obs, reward = Session(policy, capacity=context), torch.rand(1, 10), torch.rand(1)

    def before() -> None:
        if session._longest == context:
            session.restart()

    return Timed(lambda: session.act(obs, reward=reward), before)


def reading(policy: Policy, context: int) -> Timed:
    """Time products that read as many bytes as the keys and values of all layers."""
    config: Any = policy.config
    kv = [np.ones(context * config.d_model, np.float32) for _ in range(2 * config.num_layers)]
    return Timed(lambda: [x.dot(x) for x in kv])


@pytest.mark.slow
@every_method
def test_fast_step_is_fast_and_long_contexts_cost_what_reading_them_does(method: str) -> None:
    """Ratios of medians of calls that take turns, so that a busy machine slows all of them alike.

    What a context adds is bounded by the time to read it, not by the cost of a short one: the less a short context
    costs, the more a long one is in proportion.
    """
    spec = replace(DarkRoom(DarkRoomConfig()).spec, horizon=4096)
    policy = build_random(method, spec, dtype=torch.float32, **PAPER)
    fast = fast_of(policy)
    with cpu_threads(1):
        steps = {context: stepping(fast, spec, context) for context in (60, 1024, 4096)}
        reads = {context: reading(policy, context) for context in (1024, 4096)}
        recomputed = {context: recomputing(policy, spec, context) for context in (60, 4096)}
        session = acting(policy, 60)
        for _ in range(30):
            for timed in (*steps.values(), *reads.values(), session):
                for _ in range(30):
                    timed.once()
            for _ in range(5):
                recomputed[60].once()
        for _ in range(5):
            recomputed[4096].once()
    seconds = {context: timed.median for context, timed in steps.items()}
    assert recomputed[60].median >= 6 * seconds[60]
    assert recomputed[4096].median >= 50 * seconds[4096]
    assert session.median <= 1.5 * seconds[60]
    for context, read in reads.items():
        assert seconds[context] - seconds[60] <= 3 * read.median
