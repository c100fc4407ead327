"""Streams without end: sessions of policies that remember a window of steps."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.builders import SPECS, build, build_random, random_trajectory, served
from uat.contracts import choose
from uat.methods import METHODS, Policy
from uat.nn.cache import ENDLESS
from uat.serving import Session

STEPS = 60
"""Many times the horizon of the small specs, which is 7."""
ENDLESS_SETTINGS: dict[str, dict[str, Any]] = {
    "rotary": {"positions": "rotary", "context": 5},
    "none": {"positions": "none", "context": 5},
    "clamped": {"past_table": "clamp", "context": 5},
}
spec = SPECS["vector-weights"]


def played(session: Session, told: Any, steps: range) -> list[Any]:
    """Return the answers (B, A) of these steps, with the actions and rewards of recorded episodes as feedback."""
    answers = []
    for t in steps:
        feedback = {} if t == 0 else {"reward": told.reward[:, t - 1], "action": told.action[:, t - 1]}
        answers.append(session.act(told.obs[:, t], **feedback))
    return answers


@pytest.mark.parametrize("path", ["cached", "auto"])
@pytest.mark.parametrize("positions", ENDLESS_SETTINGS)
@pytest.mark.parametrize("method", ["uat", "vanilla", "adt", "dt"])
def test_a_session_goes_on_as_the_windowed_parallel_pass_does(method: str, positions: str, path: Any) -> None:
    policy = build_random(method, spec, **ENDLESS_SETTINGS[positions])
    told = random_trajectory(spec, steps=STEPS, masked=False, whole=True)
    session = Session(policy, streams=3, path=path)
    assert session.capacity is None
    assert session.path == ("fast" if path == "auto" and method in ("uat", "vanilla") else "cached")
    found = torch.stack(played(session, told, range(STEPS)), dim=1)
    with torch.no_grad():
        expected = policy.logits(spec.clock.batch(told)).softmax(-1)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-10)


def test_each_stream_restarts_on_its_own() -> None:
    policy = build_random("uat", spec, **ENDLESS_SETTINGS["rotary"])
    told = random_trajectory(spec, steps=STEPS, masked=False, whole=True)
    session = Session(policy, streams=3)
    played(session, told, range(31))
    session.restart(1)
    found = torch.stack(played(session, told, range(31, STEPS)), dim=1)
    with torch.no_grad():
        whole = policy.logits(spec.clock.batch(told)).softmax(-1)[:, 31:]
        anew = policy.logits(spec.clock.batch(told.map(lambda x: x[:, 31:]))).softmax(-1)
    for stream, expected in enumerate((whole, anew, whole)):
        torch.testing.assert_close(found[stream].double(), expected[stream], rtol=0, atol=1e-10)


@pytest.mark.parametrize("path", ["cached", "auto"])
def test_a_session_does_not_grow(path: Any) -> None:
    session = Session(build_random("uat", spec, **ENDLESS_SETTINGS["rotary"]), streams=2, path=path)
    obs, reward, sizes = torch.zeros(2, 5), np.zeros(2), []
    for _ in range(4):
        for _ in range(20):
            session.act(obs, reward=reward)
        sizes.append(len(pickle.dumps(session)))
    assert max(sizes) - min(sizes) < 100  # counters are pickled in as few bytes as they need


def test_steps_far_beyond_32_bits_count_on() -> None:
    """A stream after 10^13 steps answers like a short one with the same recent steps: rotary logits depend on
    distances alone."""
    policy = build_random("vanilla", spec, **ENDLESS_SETTINGS["rotary"])
    told = random_trajectory(spec, steps=20, masked=False, whole=True)
    session, late = (Session(policy, streams=3, path="cached") for _ in range(2))
    late._steps += 10**13
    late._longest, late._fresh = 10**13, False
    late._state.length_B += 10**13
    reach = policy.config.num_layers * (policy.config.context - 1) + 1
    pairs = list(zip(played(late, told, range(20)), played(session, told, range(20)), strict=True))
    for answer, expected in pairs[reach - 1 :]:
        torch.testing.assert_close(answer, expected, rtol=0, atol=1e-10)
    assert not torch.allclose(*pairs[reach - 2])


@pytest.mark.parametrize("method", METHODS)
def test_policies_say_whether_their_streams_may_be_endless(method: str) -> None:
    kind = served(method)
    policy: Policy = build(method, kind)
    assert policy.endless == (method in ("gtrxl", "cadm", "sarl"))
    if "context" in policy.config.__dataclass_fields__:
        assert build(method, kind, positions="rotary", context=3).endless == (method != "cotta")
        assert not build(method, kind, context=3).endless  # a table of learned positions ends
        assert not build(method, kind, positions="rotary").endless  # the whole past is remembered
    if policy.endless:
        policy.init_state(1, ENDLESS, "cpu")


@pytest.mark.parametrize(("method", "settings"), [("gtrxl", {"memory": 4}), ("cadm", {}), ("sarl", {})])
def test_methods_with_a_memory_of_their_own_never_run_out_either(method: str, settings: dict[str, Any]) -> None:
    kind = served(method)
    policy = build_random(method, kind, **settings)
    told = random_trajectory(kind, steps=STEPS, masked=False, whole=True)
    found = torch.stack(played(Session(policy, streams=3), told, range(STEPS)), dim=1)
    with torch.no_grad():
        expected = choose(policy.logits(kind.clock.batch(told)), kind)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10, check_dtype=False)


def test_a_capacity_that_is_given_is_kept() -> None:
    session = Session(build_random("uat", spec, **ENDLESS_SETTINGS["rotary"]), capacity=2)
    told = random_trajectory(spec, episodes=1, masked=False, whole=True)
    played(session, told, range(2))
    with pytest.raises(ValueError, match=r"stream 0 has seen 2 steps, and the session holds 2"):
        session.act(told.obs[:, 2], reward=[0.0])


@pytest.mark.parametrize("settings", [{"context": 5}, {"positions": "rotary"}, {}])
def test_without_a_window_or_with_a_table_a_session_holds_an_episode(settings: dict[str, Any]) -> None:
    session = Session(build_random("uat", replace(spec), **settings))
    assert session.capacity == spec.horizon


@pytest.mark.slow
@pytest.mark.parametrize("path", ["fast", "cached"])
def test_a_long_stream_grows_neither_in_memory_nor_in_time(path: str) -> None:
    """Run the measurement of `benchmarks/endless.py`, with thousands of steps instead of a million."""
    file = Path(__file__).parents[2] / "benchmarks" / "endless.py"
    found = importlib.util.spec_from_file_location("endless", file)
    assert found is not None
    assert found.loader is not None
    endless = importlib.util.module_from_spec(found)
    sys.modules["endless"] = endless  # dataclasses look their module up
    found.loader.exec_module(endless)
    result = endless.measure(20_000 if path == "fast" else 6_000, 256, path)
    assert result.largest_difference < 1e-10
    assert abs(result.last_state_bytes - result.first_state_bytes) < 100
    assert result.last_rss_mb - result.first_rss_mb < 16  # passes to compare with take and give back a few
    assert result.ratio_to_young < 1.05


# ---------------------------------------------------------------- problems without a horizon


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("uat", {}, r"positions='learned' need a table of some length, .* set max_positions, or positions='rotary'"),
        ("dt", {"positions": "rotary"}, r"return_scale is unset, which means one over the horizon"),
        ("gtrxl", {}, r"memory is unset, which means the horizon"),
    ],
)
def test_what_needs_a_horizon_says_which_setting_stands_in_for_it(
    method: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(method, replace(spec, horizon=None), **settings)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("uat", ENDLESS_SETTINGS["rotary"]),
        ("vanilla", ENDLESS_SETTINGS["none"]),
        ("adt", {"context": 4, "max_positions": 9, "past_table": "clamp"}),
        ("dt", ENDLESS_SETTINGS["rotary"] | {"return_scale": 0.1}),
        ("gtrxl", {"memory": 4}),
    ],
)
def test_problems_without_a_horizon_are_acted_in(method: str, settings: dict[str, Any]) -> None:
    policy = build_random(method, replace(spec, horizon=None), **settings)
    told = random_trajectory(spec, steps=STEPS, masked=False, whole=True)
    found = torch.stack(played(Session(policy, streams=3), told, range(STEPS)), dim=1)
    with torch.no_grad():
        expected = policy.logits(spec.clock.batch(told)).softmax(-1)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-10)


def test_a_growing_memory_asks_for_a_capacity_where_there_is_no_horizon() -> None:
    policy = build_random("uat", replace(spec, horizon=None), positions="rotary")
    with pytest.raises(ValueError, match=r"capacity: the problem has no horizon, .* of this UAT grows"):
        Session(policy)
    assert Session(policy, capacity=20).capacity == 20
