"""A session on the fused step against one on the cached step: on a GPU where there is one, by Triton's interpreter
elsewhere."""

# ruff: noqa: E402 (what needs Triton is imported where there is Triton)
from __future__ import annotations

import copy
import pickle
import threading
from dataclasses import replace

import pytest
import torch

CUDA = torch.cuda.is_available()
pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from tests.builders import interpreted, random_trajectory, randomise
from uat import Session, engines
from uat.engines import kernels
from uat.engines.fused import FusedUAT
from uat.engines.triton import step as triton_step
from uat.episode import Step
from uat.methods import METHODS
from uat.methods.policy import TransformerPolicy
from uat.spec import Assets, Discrete, Items, Spec, Vector, Weights

DEVICE = "cuda" if CUDA else "cpu"
SPEC = Spec(obs=Vector(5), action=Discrete(4), horizon=12)
SMALL = {"d_model": 16, "num_heads": 2, "num_layers": 2, "d_ff": 16, "dropout": 0.0}


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use Triton's interpreter on machines without a GPU."""
    if CUDA:
        return

    monkeypatch.setattr(engines, "on_gpu", lambda policy: True)
    monkeypatch.setattr(kernels, "unsupported_step", lambda *parts: None)
    monkeypatch.setattr(triton_step, "CHUNK", 16)


def build(method: str, spec: Spec = SPEC) -> TransformerPolicy:
    policy = METHODS[method].build(spec, METHODS[method].configure(**SMALL))
    assert isinstance(policy, TransformerPolicy)
    return randomise(policy, 1).float().to(DEVICE).eval()


@pytest.mark.parametrize(
    ("method", "spec"),
    [
        ("uat", replace(SPEC, horizon=4)),
        ("uat", replace(SPEC, obs=Assets(3, 2), action=Weights(4), horizon=4)),
        interpreted("uat", SPEC),
        interpreted("vanilla", SPEC),
        interpreted("adt", SPEC),
        interpreted("dt", SPEC),
        interpreted("uat", replace(SPEC, obs=Items(7), horizon=9)),
    ],
    ids=["uat", "weights", "long", "vanilla", "adt", "dt", "items"],
)
def test_decisions_are_those_of_the_cached_step(method: str, spec: Spec) -> None:
    policy, streams = build(method, spec), 3
    fast, cached = Session(policy, streams=streams, path="fast"), Session(policy, streams=streams, path="cached")
    told = random_trajectory(spec, episodes=streams, seed=2, whole=True)
    for t in range(spec.steps):
        if t == spec.steps - 2:  # one stream starts a new episode
            fast.restart([1])
            cached.restart([1])
        reward = None if t == 0 else told.reward[:, t - 1]
        obs = told.obs[:, t] if told.obs.is_floating_point() else told.obs[:, t].clamp_min(0)
        found, expected = (session.act(obs, reward=reward) for session in (fast, cached))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    assert (fast.path, cached.path) == ("fast", "cached")


@pytest.mark.parametrize(
    ("method", "masked"),
    [("uat", True), interpreted("uat", False), interpreted("vanilla", False), interpreted("vanilla", True)],
)
def test_the_choice_is_the_kernels_own(method: str, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, streams, steps = build(method), 3, 4
    generator = torch.Generator().manual_seed(3)
    obs, reward = torch.randn(steps, streams, 5, generator=generator), torch.randn(steps, streams, generator=generator)
    may = torch.rand(steps, streams, 4, generator=generator) < 0.5
    may[..., 2] = True

    def play(session: Session) -> list[torch.Tensor]:
        return [
            session.act(obs[t], reward=reward[t - 1] if t else None, allowed=may[t] if masked else None)
            for t in range(steps)
        ]

    expected = torch.stack(play(Session(policy, streams=streams, path="cached")))
    for module in ("contracts", "engines.fused", "serving.session"):
        monkeypatch.setattr(f"uat.{module}.choose", None)
    found = torch.stack(play(Session(policy, streams=streams, path="fast")))
    assert torch.equal(found, expected)
    assert len(expected.unique()) > 1


def test_copies_decide_as_the_original() -> None:
    """Copies agree to the last bit (answers are weights, which show every bit of a logit) and are independent."""
    session, obs = Session(build("uat", replace(SPEC, action=Weights(4))), streams=2, path="fast"), torch.ones(2, 5)
    session.act(obs)
    twins = [copy.copy(session), copy.deepcopy(session), pickle.loads(pickle.dumps(session))]
    expected = session.act(obs, reward=[0.5, -0.5])
    session.act(obs, reward=[1.0, 1.0])
    assert all(torch.equal(twin.act(obs, reward=[0.5, -0.5]), expected) for twin in twins)


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize(
    ("method", "action"),
    [
        ("uat", Discrete(4)),
        ("vanilla", Weights(4)),
        interpreted("vanilla", Discrete(4)),
        interpreted("dt", Discrete(4)),
    ],
    ids=str,
)
def test_an_answer_that_is_not_finite_is_refused_and_forgotten(method: str, action: Discrete | Weights) -> None:
    """As on a CPU: otherwise the keys of that step make every later answer of the stream NaN or action 0."""
    policy = build(method, replace(SPEC, action=action))
    with torch.no_grad():
        policy.get_parameter("backbone.encoder.linear.weight")[::2, 0] = 1e38
    session, fresh = (Session(policy, streams=2, path="fast") for _ in range(2))
    good, bad = torch.ones(2, 5), torch.ones(2, 5)
    good[:, 0], bad[:, 0] = 0, torch.tensor([0, 9])
    reward = torch.zeros(2)
    session.act(good, reward=reward)
    with pytest.raises(ValueError, match=r"answer is not finite.* all streams .* begin a new episode"):
        session.act(bad, reward=reward)
    for _ in range(2):
        assert torch.equal(session.act(good, reward=reward), fresh.act(good, reward=reward))


@pytest.mark.parametrize(
    "part", ["backbone.blocks", interpreted("backbone.encoder"), interpreted("utility"), interpreted("head")]
)
def test_weights_are_those_of_when_it_opened(part: str) -> None:
    policy, obs, reward = build("uat"), torch.ones(2, 5), torch.ones(2)
    open_before, expected = (Session(policy, streams=2, path="fast") for _ in range(2))
    with torch.no_grad():
        expected.act(obs)
        decided = expected.act(obs, reward=reward)
        randomise(policy.get_submodule(part), 7)
    newer = [Session(policy, streams=2, path=path) for path in ("fast", "cached")]
    for session in (open_before, *newer):
        session.act(obs)
    assert torch.equal(open_before.act(obs, reward=reward), decided)
    first, second = (logits_of(session, obs, reward) for session in newer)
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(first, logits_of(open_before, obs, reward), atol=1e-2)


def logits_of(session: Session, obs: torch.Tensor, reward: torch.Tensor) -> torch.Tensor:
    """Return the agent's logits at the first step of an episode that follows this reward."""
    streams = len(obs)
    step = Step(
        obs=obs,
        prev_action=torch.ones(streams, dtype=torch.long),
        prev_reward=reward,
        first=torch.ones(streams, dtype=torch.bool),
    ).to(DEVICE)
    with torch.no_grad():
        return session._engine.step(session._state, step)[0]


@pytest.mark.kernels
def test_unasked_any_number_of_streams_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = build("uat")
    assert [Session(policy, streams=streams).path for streams in (1, 20)] == ["fast", "fast"]
    monkeypatch.setattr(kernels, "unsupported_step", lambda *parts: "the sizes are odd")
    assert Session(policy, streams=2).path == "cached"


def test_kernels_are_compiled_when_it_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a session takes one empty step, which does not affect episodes: the test above compares decisions."""
    seen: list[Step] = []
    answer = FusedUAT.answer
    monkeypatch.setattr(
        FusedUAT, "answer", lambda self, state, step, *drawn: (seen.append(step), answer(self, state, step))[1]
    )
    session = Session(build("uat"), streams=3, path="fast")
    (step,) = seen
    assert step.first.all()
    assert not step.obs.any()
    assert (step.prev_action == -1).all()
    session.act(torch.zeros(3, 5))
    assert seen[1].first.all()


def test_unasked_a_device_that_cannot_run_it_is_said_and_the_session_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch fails, as for lack of shared memory: the session reports it when it opens, not at its first step."""
    policy, expected = build("uat"), Session(build("uat"), streams=2, path="cached").act(torch.ones(2, 5))

    def refuse(*args: object, **given: object) -> None:
        raise OutOfResources(106_496, 101_376, "shared memory")

    monkeypatch.setattr(triton_step, "_launch", refuse)
    with pytest.warns(UserWarning, match=r"OutOfResources: .*shared memory.* uses the cached step"):
        session = Session(policy, streams=2)
    assert session.path == "cached"
    assert torch.equal(session.act(torch.ones(2, 5)), expected)
    with pytest.raises(OutOfResources):
        Session(policy, streams=2, path="fast")


def test_a_policy_that_cannot_be_copied_is_cached() -> None:
    policy = build("uat")
    vars(policy)["lock"] = threading.Lock()
    assert Session(policy, streams=2).path == "cached"
    with pytest.raises(ValueError, match="cannot be copied"):
        Session(policy, streams=2, path="fast")


def test_a_policy_without_one_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "unsupported_step", lambda *parts: "the sizes are odd")
    with pytest.raises(ValueError, match="path='fast' is not possible: the sizes are odd"):
        Session(build("uat"), streams=2, path="fast")
    gtrxl = METHODS["gtrxl"].build(SPEC, METHODS["gtrxl"].configure(**SMALL)).to(DEVICE)
    with pytest.raises(ValueError, match="path='fast' is not possible: GTrXL has no fused step"):
        Session(gtrxl, streams=2, path="fast")
