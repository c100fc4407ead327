"""Corollary 1: on a feedback-informative task, some UAT has a lower imitation loss than any observation-only policy.

The task has two equally likely histories with equal observations, after which the expert takes different actions. A
policy that sees observations alone gives both the same probabilities (p, 1 - p), so its loss is at least log 2, the
entropy of the expert's action given the observations. The explicit UAT of Theorem 1 has a loss as small as its head is
steep.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import build_random, randomise, vanilla_of
from tests.test_laws import aim_head, explicit_uat, told_apart
from uat.episode import Batch
from uat.methods import METHODS, Policy
from uat.spec import Discrete, Spec, Vector

ENTROPY = math.log(2)
"""Entropy of the expert's action given the observations, in nats."""
SPEC = Spec(obs=Vector(2), action=Discrete(2), horizon=2)
BLIND = [
    name
    for name in METHODS
    if METHODS[name].serves("darkroom") and not build_random(name, SPEC).sees and name != "cotta"
]
"""Methods that see observations alone; CoTTA adapts as TENT does."""


def task(kind: str) -> tuple[Batch, Batch]:
    """Both histories; the expert answers 0 after the first one and 1 after the other, and only that step counts."""
    last = torch.tensor([[False, True]])
    one, other = told_apart(kind)
    return replace(one, valid=last), replace(other, target=torch.ones(1, 2, dtype=torch.long), valid=last)


@torch.no_grad()
def loss(policy: Policy, kind: str) -> float:
    """The imitation loss over both histories."""
    parts = [policy.loss(history)["imitation"] for history in task(kind)]
    return float(sum(total / count for total, count in parts)) / 2


@pytest.mark.parametrize("kind", ["action", "reward"])
@given(seed=st.integers(0, 2**31), method=st.sampled_from(BLIND))
def test_no_observation_only_policy_is_below_the_entropy(kind: str, seed: int, method: str) -> None:
    assert loss(build_random(method, SPEC, seed=seed), kind) >= ENTROPY - 1e-12


@pytest.mark.parametrize("kind", ["action", "reward"])
def test_an_explicit_uat_is_below_it_by_any_margin(kind: str) -> None:
    uat = explicit_uat()
    aim_head(uat, *told_apart(kind))
    assert loss(randomise(vanilla_of(uat), 0), kind) >= ENTROPY
    losses = []
    for steepness in (1.0, 10.0, 100.0):
        steeper = explicit_uat()
        aim_head(steeper, *told_apart(kind))
        with torch.no_grad():
            for p in steeper.head.parameters():
                p.mul_(steepness)
        losses.append(loss(steeper, kind))
    assert ENTROPY > losses[0] > losses[1] > losses[2]
    assert losses[2] < 0.01


def test_the_bound_is_reached_by_the_best_blind_policy() -> None:
    """With equal probabilities for both actions, the bound is an equality."""
    vanilla = vanilla_of(explicit_uat())
    with torch.no_grad():
        for p in vanilla.head.parameters():
            p.zero_()
    assert loss(vanilla, "reward") == pytest.approx(ENTROPY, abs=1e-12)
