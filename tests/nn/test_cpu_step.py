"""The fast CPU step answers what its slow twin, `Policy.step`, answers; speed is told as ratios in one slow test."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.builders import CPU, SPECS, build_random, largest, moments, random_batch
from uat.bench.recompute import Recomputing
from uat.domains.darkroom import DarkRoom, DarkRoomConfig
from uat.methods import METHODS, Policy
from uat.methods.uat import UAT
from uat.nn.kernels.cpu_step import CPUStep
from uat.serving.session import FAST_STREAMS, Session, open_fast
from uat.training.surroundings import threads
from uat.types import Spec, Step

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
FAST = [name for name in METHODS if isinstance(open_fast(build_random(name, SPECS["vector-discrete"])), CPUStep)]
every_method = pytest.mark.parametrize("method", FAST)
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def fast_of(policy: Policy) -> CPUStep:
    fast = open_fast(policy)
    assert isinstance(fast, CPUStep), fast
    return fast


def told(spec: Spec, streams: int, steps: int, *, masked: bool | None = None) -> Iterator[Step]:
    """Random steps; every stream starts anew now and then, each at its own moments."""
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
    assert {"vanilla", *(name for name, method in METHODS.items() if method.policy is UAT)} <= set(FAST)


@every_dtype
@pytest.mark.parametrize("streams", [1, 3, 63])
@every_spec
@every_method
def test_equals_the_slow_twin(method: str, spec: Spec, streams: int, dtype: torch.dtype) -> None:
    policy = build_random(method, spec, dtype=dtype, max_positions=20)
    assert_twins(policy, list(told(spec, streams, 20)))


@every_dtype
@every_method
def test_equals_the_slow_twin_over_a_thousand_steps(method: str, dtype: torch.dtype) -> None:
    spec = SPECS["vector-discrete"]
    policy = build_random(method, spec, dtype=dtype, max_positions=900, past_table="clamp")
    steps = list(moments(random_batch(spec, episodes=1, steps=1000, whole=True)))
    assert_twins(policy, steps)


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
    sizes = {"d_model": 64, "num_heads": 4, "num_layers": 3, "d_ff": 128}
    policy = build_random(method, spec, dtype=torch.float32, **sizes)
    assert_twins(policy, list(told(spec, 3, 60)))


def test_large_scores_do_not_overflow() -> None:
    policy = build_random("uat", SPECS["vector-discrete"], max_positions=30)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if name.endswith("project.weight"):
                weight.mul_(100)
    policy = policy.to(torch.float32)
    logits = play(fast_of(policy), list(told(policy.spec, 2, 30)))
    assert logits.isfinite().all()
    assert_twins(policy.double(), list(told(policy.spec, 2, 30)))


# ---------------------------------------------------------------- memory and weights


@every_method
def test_what_lies_in_unused_slots_is_never_read(method: str) -> None:
    policy = build_random(method, SPECS["vector-weights"], max_positions=12)
    fast, steps = fast_of(policy), list(told(policy.spec, 3, 12))
    state = fast.init_state(3, 12, CPU)
    for memory in state.streams:
        for slots in (*memory.k_LHES, *memory.v_LHSE):
            slots.fill(1e18)
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
        play(fast, steps, fast.init_state(1, fast_spec.horizon - 1, CPU))


def test_more_steps_than_positions_are_refused_or_clamped() -> None:
    spec = SPECS["vector-discrete"]
    with pytest.raises(ValueError, match="9 steps do not fit the position table of 8"):
        fast_of(build_random("uat", spec)).init_state(1, 9, CPU)
    fast_of(build_random("uat", spec, past_table="clamp")).init_state(1, 9, CPU)


# ---------------------------------------------------------------- which path a session takes


def test_a_session_says_which_path_it_took() -> None:
    policy = build_random("uat", SPECS["vector-discrete"], dtype=torch.float32)
    assert Session(policy).path == "fast"
    assert Session(policy, streams=FAST_STREAMS).path == "fast"
    assert Session(policy, streams=FAST_STREAMS + 1).path == "cached"
    assert Session(policy, streams=FAST_STREAMS + 1, path="fast").path == "fast"
    assert Session(policy, path="cached").path == "cached"
    assert Session(policy.bfloat16()).path == "cached"


def test_a_path_that_is_not_there_is_refused() -> None:
    policy = build_random("uat", SPECS["vector-discrete"])
    with pytest.raises(ValueError, match="path='quick' must be 'auto', 'fast' or 'cached'"):
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
    """One stream that has seen `context` - 1 steps, asked for the next one again and again."""

    def __init__(self, agent: Any, spec: Spec, context: int) -> None:
        self.agent, self.context, self.times = agent, context, []
        steps = list(moments(random_batch(spec, episodes=1, steps=context, whole=True)))
        self.step, self.state = steps[-1], agent.init_state(1, context, CPU)
        if isinstance(agent, Recomputing):
            self.state.steps.extend(steps[:-1])
        else:
            play(agent, steps[:-1], self.state)

    @torch.no_grad()
    def once(self) -> None:
        if isinstance(self.agent, Recomputing):
            del self.state.steps[self.context - 1 :]
        else:
            self.state.streams[0].length = self.context - 1
        start = time.perf_counter()
        self.agent.step(self.state, self.step)
        self.times.append(time.perf_counter() - start)

    @property
    def median(self) -> float:
        return statistics.median(self.times)


@pytest.mark.slow
def test_fast_step_is_fast_and_grows_slowly() -> None:
    """Ratios of medians of calls that take turns, so that a busy machine slows all of them alike."""
    spec = replace(DarkRoom(DarkRoomConfig()).spec, horizon=4096)
    sizes = {"d_model": 64, "num_heads": 4, "num_layers": 3, "d_ff": 128}
    policy = build_random("uat", spec, dtype=torch.float32, d_utility=16, d_action=8, d_hidden=32, **sizes)
    fast, slow = fast_of(policy), Recomputing(policy)
    with threads(1):
        steps = {context: Timed(fast, spec, context) for context in (60, 1024, 4096)}
        recomputed = {context: Timed(slow, spec, context) for context in (60, 4096)}
        for _ in range(30):
            for timed in steps.values():
                for _ in range(30):
                    timed.once()
            for _ in range(5):
                recomputed[60].once()
        for _ in range(5):
            recomputed[4096].once()
    seconds = {context: timed.median for context, timed in steps.items()}
    assert recomputed[60].median >= 6 * seconds[60]
    assert recomputed[4096].median >= 50 * seconds[4096]
    assert seconds[1024] <= 2 * seconds[60]
    assert seconds[4096] <= 4 * seconds[60]
