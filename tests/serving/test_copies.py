"""A copied, pickled or forked session starts from the memory of the original and then acts independently of it."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.builders import SPECS, build_random
from uat.methods import METHODS
from uat.serving.session import Session
from uat.threads import cpu_threads

STREAMS, STEPS = 3, 7
SPEC = replace(SPECS["vector-weights"], reward_lag=2)  # answers are weights: every bit of a logit shows
COPIES: dict[str, Callable[[Session], Session]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda session: pickle.loads(pickle.dumps(session)),
    "copy of a copy": lambda session: copy.deepcopy(copy.copy(session)),
}
every_copy = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
every_path = pytest.mark.parametrize("path", ["fast", "cached"])


def opened(method: str = "uat", path: Literal["auto", "fast", "cached"] = "auto", streams: int = STREAMS) -> Session:
    return Session(build_random(method, SPEC, dtype=torch.float32), streams=streams, path=path)


def play(session: Session, steps: range, seed: int = 0) -> Tensor:
    """Return the actions for observations and rewards that depend on the seed and the steps alone."""
    answers = []
    for t in steps:
        told = np.random.default_rng((seed, t)).normal(size=(session.streams, 6)).astype(np.float32)
        answers.append(session.act(told[:, :5], reward=told[:, 5]))
    return torch.stack(answers)


@every_path
@every_copy
def test_a_copy_decides_as_the_original(copied: Callable[[Session], Session], path: Any) -> None:
    """Copies act alike to the last bit, with streams of different lengths, and do not affect each other."""
    session, untouched = opened(path=path), opened(path=path)
    for one in (session, untouched):
        play(one, range(2))
        one.restart([1])
        play(one, range(2, 4))
    twin = copied(session)
    expected = play(untouched, range(4, STEPS))
    assert torch.equal(play(twin, range(4, STEPS)), expected)
    assert torch.equal(play(session, range(4, STEPS)), expected)
    twin.restart()
    session.restart()
    other, same = play(twin, range(STEPS), seed=1), play(session, range(STEPS), seed=2)
    assert torch.equal(play(opened(path=path), range(STEPS), seed=1), other)
    assert torch.equal(play(opened(path=path), range(STEPS), seed=2), same)


@pytest.mark.parametrize("method", [m for m, entry in METHODS.items() if entry.serves("markets") and not entry.changes])
def test_sessions_of_every_method_are_copied_exactly(method: str) -> None:
    if METHODS[method].policy.unsupported_reason(SPEC) is not None:
        pytest.skip(f"{method} does not take {SPEC}")
    session = opened(method)
    play(session, range(3))
    twins = [copied(session) for copied in COPIES.values()]
    expected = play(session, range(3, STEPS))
    for twin in twins:
        assert torch.equal(play(twin, range(3, STEPS)), expected)


def test_a_copy_shares_the_policy_and_a_deep_copy_does_not() -> None:
    session = opened(path="cached")
    assert copy.copy(session).policy is session.policy
    assert copy.deepcopy(session).policy is not session.policy


def test_a_pickled_session_holds_what_was_seen_and_not_its_capacity() -> None:
    policy = build_random("uat", SPEC, dtype=torch.float32, max_positions=10_001)
    small, large = (Session(policy, capacity=capacity) for capacity in (10, 10_000))
    for session in (small, large):
        play(session, range(3))
    assert len(pickle.dumps(large)) - len(pickle.dumps(small)) < 100_000
    assert torch.equal(
        play(pickle.loads(pickle.dumps(large)), range(3, 9)), play(pickle.loads(pickle.dumps(small)), range(3, 9))
    )


# ---------------------------------------------------------------- processes


def in_a_fork(ask: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Return the result of a call in a forked process, or its error; a process that hangs is an error too."""
    ours, theirs = multiprocessing.Pipe()

    def answer() -> None:
        try:
            theirs.send(ask())
        except Exception as error:
            theirs.send(error)
        finally:
            os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=answer)
    process.start()
    theirs.close()
    try:
        assert ours.poll(seconds), "the forked process hangs"
        return ours.recv()
    finally:
        process.kill()
        process.join()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@every_path
def test_a_forked_process_goes_on_with_the_session(path: Any) -> None:
    session = opened(path=path, streams=64)
    with cpu_threads(1):
        play(session, range(4))
        found = in_a_fork(lambda: play(session, range(4, STEPS)).numpy())
        assert isinstance(found, np.ndarray), found
        assert torch.equal(torch.from_numpy(found), play(session, range(4, STEPS)))


def test_a_pickled_session_goes_on_in_a_new_process() -> None:
    session = opened()
    play(session, range(4))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(play, (session, range(4, STEPS)))
    assert torch.equal(found, play(session, range(4, STEPS)))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_that_would_wait_for_threads_of_its_parent_is_refused() -> None:
    session = Session(build_random("uat", SPEC, dtype=torch.float32), streams=64, path="cached", threads=2)
    play(session, range(4))
    found = in_a_fork(lambda: play(session, range(4, STEPS)).numpy())
    assert isinstance(found, ValueError)
    assert "a forked process cannot use the 2 threads of its parent" in str(found)
    play(session, range(4, STEPS))


THREADED = """
import multiprocessing, os, sys
import numpy as np, torch
from uat import Session, UAT, UATConfig, Spec, Vector, Weights
torch.set_num_threads(2)
torch.randn(3_000_000).exp().sum()  # both threads have work: a forked process would wait for the second
policy = UAT(Spec(obs=Vector(5), action=Weights(4), horizon=9), UATConfig(d_model=256, max_positions=9)).eval()
obs, reward = np.ones((3, 5)), np.zeros(3)
session = Session(policy, streams=3, path=sys.argv[1])
session.act(obs)
if sys.argv[2] == "act":
    work = lambda: session.act(obs, reward=reward)
elif sys.argv[2] == "copy":
    import copy
    work = lambda: copy.deepcopy(session).act(obs, reward=reward)
else:
    work = lambda: Session(policy, streams=300, capacity=9, path=sys.argv[1])
process = multiprocessing.get_context("fork").Process(target=work)
process.start()
process.join(60)
ended = process.exitcode
process.kill()
print(ended)
"""


@pytest.mark.parametrize("what", ["act", "copy", "open"])
@every_path
def test_a_fork_does_not_wait_for_threads_that_torch_used_elsewhere(path: Any, what: str) -> None:
    """A session with one thread never uses a second one, although torch has two."""
    command = [sys.executable, "-W", "ignore", "-c", THREADED, path, what]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert found.stdout == "0\n", found.stderr
