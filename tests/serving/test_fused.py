"""A session on the fused step against one on the cached step: on a GPU where there is one, by Triton's interpreter
elsewhere."""

# ruff: noqa: E402 (what needs Triton is imported where there is Triton)
from __future__ import annotations

import pytest
import torch

CUDA = torch.cuda.is_available()
pytest.importorskip("triton")

from tests.builders import random_trajectory, randomise
from uat import Session
from uat.methods import METHODS
from uat.methods.policy import TransformerPolicy
from uat.methods.uat import UAT
from uat.nn.kernels import triton_step
from uat.types import Discrete, Spec, Step, Vector

DEVICE = "cuda" if CUDA else "cpu"
SPEC = Spec(obs=Vector(5), action=Discrete(4), horizon=12)
SMALL = {"d_model": 16, "num_heads": 2, "num_layers": 2, "d_ff": 16, "dropout": 0.0}


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere the interpreter stands in for it."""
    if CUDA:
        return

    def fuse(self: TransformerPolicy) -> None:
        self.fused = True

    monkeypatch.setattr("uat.serving.session.on_gpu", lambda policy: True)
    monkeypatch.setattr(TransformerPolicy, "fuse", fuse)
    monkeypatch.setattr(triton_step, "CHUNK", 16)


def build(method: str) -> TransformerPolicy:
    policy = METHODS[method].build(SPEC, METHODS[method].configure(**SMALL))
    assert isinstance(policy, TransformerPolicy)
    return randomise(policy, 1).float().to(DEVICE).eval()


@pytest.mark.parametrize("method", ["uat", "vanilla", "adt"])
def test_decisions_are_those_of_the_cached_step(method: str) -> None:
    policy, streams = build(method), 3
    fast, cached = Session(policy, streams=streams, path="fast"), Session(policy, streams=streams, path="cached")
    told = random_trajectory(SPEC, episodes=streams, seed=2, whole=True)
    for t in range(SPEC.horizon):
        if t == 7:  # an episode of one stream begins anew beside the others
            fast.restart([1])
            cached.restart([1])
        reward = None if t == 0 else told.reward[:, t - 1]
        assert torch.equal(fast.act(told.obs[:, t], reward=reward), cached.act(told.obs[:, t], reward=reward)), t
    assert (fast.path, cached.path) == ("fast", "cached")


def test_the_policy_stays_on_its_path() -> None:
    policy = build("uat")
    session = Session(policy, streams=2, path="fast")
    session.act(torch.zeros(2, 5))
    assert not policy.fused


@pytest.mark.parametrize("part", ["backbone.blocks", "backbone.encoder", "utility", "head"])
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
    """What the session's agent says to the first step of an episode with this reward before it."""
    streams = len(obs)
    step = Step(
        obs=obs,
        prev_action=torch.ones(streams, dtype=torch.long),
        prev_reward=reward,
        first=torch.ones(streams, dtype=torch.bool),
    ).to(DEVICE)
    with torch.no_grad():
        return session._agent.step(session._state, step)[0]


def test_unasked_any_number_of_streams_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = build("uat")
    assert [Session(policy, streams=streams).path for streams in (1, 20)] == ["fast", "fast"]
    monkeypatch.setattr(TransformerPolicy, "fuse", lambda self: "the sizes are odd")
    assert Session(policy, streams=2).path == "cached"


def test_kernels_are_compiled_when_it_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of nothing is taken then, and no episode knows of it: decisions are those of the cached step, above."""
    seen: list[Step] = []
    plain = UAT.step
    monkeypatch.setattr(UAT, "step", lambda self, state, step: (seen.append(step), plain(self, state, step))[1])
    session = Session(build("uat"), streams=3, path="fast")
    (step,) = seen
    assert step.first.all()
    assert not step.obs.any()
    assert (step.prev_action == -1).all()
    session.act(torch.zeros(3, 5))
    assert seen[1].first.all()


def test_a_policy_without_one_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransformerPolicy, "fuse", lambda self: "the sizes are odd")
    with pytest.raises(ValueError, match="path='fast' is not possible: the sizes are odd"):
        Session(build("uat"), streams=2, path="fast")
    gtrxl = METHODS["gtrxl"].build(SPEC, METHODS["gtrxl"].configure(**SMALL)).to(DEVICE)
    with pytest.raises(ValueError, match="path='fast' is not possible: GTrXL has no fused step"):
        Session(gtrxl, streams=2, path="fast")
