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
from uat.nn.kernels import triton_step
from uat.types import Discrete, Spec, Vector

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
    policy.fused = True
    session.act(torch.zeros(2, 5), reward=torch.zeros(2))
    assert policy.fused


def test_weights_of_the_layers_are_those_of_when_it_opened() -> None:
    policy = build("uat")
    open_before = Session(policy, streams=2, path="fast")
    expected = Session(policy, streams=2, path="fast").act(torch.ones(2, 5))
    with torch.no_grad():
        for block in policy.backbone.blocks:
            for weight in block.parameters():
                weight.zero_()
    assert torch.equal(open_before.act(torch.ones(2, 5)), expected)
    assert not torch.equal(Session(policy, streams=2, path="fast").act(torch.ones(2, 5)), expected)


def test_unasked_it_is_cached() -> None:
    assert Session(build("uat"), streams=2).path == "cached"


def test_a_policy_without_one_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransformerPolicy, "fuse", lambda self: "the sizes are odd")
    with pytest.raises(ValueError, match="path='fast' is not possible: the sizes are odd"):
        Session(build("uat"), streams=2, path="fast")
    gtrxl = METHODS["gtrxl"].build(SPEC, METHODS["gtrxl"].configure(**SMALL)).to(DEVICE)
    with pytest.raises(ValueError, match="path='fast' is not possible: GTrXL has no fused step"):
        Session(gtrxl, streams=2, path="fast")
