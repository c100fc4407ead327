"""Parts shared by the tests of the adapter: a method that needs no expert, random episodes, and their comparison."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import uat
from uat.adapters.gymnasium import GymDomain, domain
from uat.engines.rollout import RolloutRunner
from uat.episode import Batch, Losses, Trajectory, masked_sum
from uat.methods import Phase

CPU = torch.device("cpu")


class Reinforce(uat.UAT):
    """UAT that learns from rewards alone, by the policy gradient."""

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("reinforce", self.policy_gradient),)

    def policy_gradient(self, batch: Batch) -> Losses:
        played = batch.trajectory
        assert played is not None
        log_prob_BT = self.distribution(self.logits(batch)).log_prob(played.action)
        to_come_BT = self.spec.clock.earned(played).flip(1).cumsum(1).flip(1)
        return {"reinforce": masked_sum(-log_prob_BT * to_come_BT, batch.valid)}


def played(what: Any, count: int = 7, seed: int = 0, **settings: Any) -> Trajectory:
    """Episodes 0 .. count-1 of an environment, played with random actions, and its environments closed again."""
    return episodes(what if isinstance(what, GymDomain) else domain(what, **settings), torch.arange(count), seed)


def episodes(own: GymDomain, ids: Tensor, seed: int = 0) -> Trajectory:
    agent: Any = own.references()["random"]
    runner = RolloutRunner(agent, own.simulator("train", CPU), device=CPU, sampled=True)
    try:
        return runner.play(ids, seed)
    finally:
        runner.close()


def assert_same(a: Trajectory, b: Trajectory) -> None:
    """Assert that two trajectories have the same real steps."""
    assert torch.equal(a.valid, b.valid)
    for name in ("obs", "action", "reward", "terminated", "truncated", "allowed"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None), name
        if x is not None:
            assert torch.equal(x[a.valid], y[a.valid]), name
    assert a.final_obs is not None
    assert b.final_obs is not None
    assert torch.equal(a.final_obs, b.final_obs)
    x, y = a.facts["success"][a.valid], b.facts["success"][a.valid]
    assert torch.equal(x.isnan(), y.isnan())
    assert torch.equal(x.nan_to_num(), y.nan_to_num())
