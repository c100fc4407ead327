"""A bandit that only feedback reveals: the best accuracy is known exactly, with and without feedback.

One of A arms pays 1, the others nothing; the arm is hidden and drawn for each episode, and the observation is always
the same. A policy that tries arm after arm until one pays is right with probability min(t, A) / A at step t. A policy
that does not see its feedback is right with probability 1 / A at every step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.builders import CPU
from uat.acting import rollout
from uat.config import TrainConfig
from uat.contracts import Simulator, Transition
from uat.engines.update import optimize
from uat.episode import Noise
from uat.methods import METHODS, Policy
from uat.noise import gumbel, integers
from uat.spec import Discrete, Spec, Vector
from uat.training.optimizing import build_optimizer, set_rates
from uat.training.surroundings import seeded

A, T, B = 4, 8, 128
SIZES: dict[str, Any] = {"d_model": 32, "num_heads": 2, "num_layers": 2, "d_ff": 64, "dropout": 0.0}
TRAINING = TrainConfig(epochs=150, lr=3e-3, utility_lr=2e-2)
BEST = [min(t, A) / A for t in range(1, T + 1)]


class Bandit(Simulator[Tensor]):
    spec = Spec(obs=Vector(1), action=Discrete(A), horizon=T)

    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        return {"arm": integers(seed, "bandit.arm", episode_ids, 1, below=A)[:, 0]}

    def reset(self, noise: Noise) -> tuple[Tensor, Tensor]:
        return noise["arm"], torch.ones(len(noise["arm"]), 1)

    def expert(self, world: Tensor) -> Tensor:
        return world

    def step(self, world: Tensor, action: Tensor) -> Transition[Tensor]:
        never = torch.zeros(len(world), dtype=torch.bool)
        return Transition(world, torch.ones(len(world), 1), (action == world).float(), never)


def learn(method: str, **settings: Any) -> Policy:
    """Rollout, then optimize, with a fresh batch of bandits each time."""
    bandit, entry = Bandit(), METHODS[method]
    with seeded(0, CPU):
        policy = entry.build(bandit.spec, entry.configure(**SIZES, **settings))
    optimizer = build_optimizer(policy, TRAINING)
    for epoch in range(TRAINING.epochs):
        ids = torch.arange(epoch * B, (epoch + 1) * B)
        sampled = gumbel(0, "actions", ids, T * A).view(B, T, A).float()
        trajectory = rollout(policy.eval(), bandit, bandit.noise(ids, seed=0), sampled)
        set_rates(optimizer, TRAINING, epoch + 1)
        optimize(policy.train().phases()[0], bandit.spec.clock.batch(trajectory), optimizer, TRAINING.clip)
    return policy.eval()


def accuracy(policy: Policy) -> Tensor:
    """(T,) share of right arms at each step, greedily, each arm hidden once."""
    trajectory = rollout(policy, Bandit(), {"arm": torch.arange(A)})
    return (trajectory.action == trajectory.target).float().mean(0)


SEEING = [
    pytest.param("uat", {}, id="uat"),
    pytest.param("adt", {}, id="adt"),
    pytest.param("dt", {"include_actions": True}, id="dt", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("method", "settings"), SEEING)
def test_a_policy_that_sees_actions_and_rewards_learns_to_find_the_arm(method: str, settings: dict[str, Any]) -> None:
    right_T, best_T = accuracy(learn(method, **settings)), torch.tensor(BEST)
    assert (right_T <= best_T + 1e-6).all()  # the best possible accuracy
    assert right_T.mean() > best_T.mean() - 0.05
    assert right_T[A - 1 :].mean() > 0.95  # once every arm could have been tried


def test_vanilla_cannot_tell_one_arm_from_another() -> None:
    assert accuracy(learn("vanilla")).tolist() == [1 / A] * T
