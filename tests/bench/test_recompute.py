"""The recomputing baseline plays the same episodes as the cached step."""

import time
from typing import Any

import pytest
import torch

import uat
from tests.builders import IN_THE_DARK
from uat.acting import rollout
from uat.bench.recompute import Recomputing
from uat.engines.rollout import RolloutRunner
from uat.training.trainer import build_policy

CPU = torch.device("cpu")


def played(method: str, preset: str, episodes: int, **changes: int) -> tuple[Any, ...]:
    """A policy, its worlds, and the randomness of some episodes."""
    config = uat.override(uat.recipe("darkroom", method, preset), {f"domain.{k}": v for k, v in changes.items()})
    domain = config.build_domain()
    policy = build_policy(config, domain, CPU).eval()
    simulator = domain.simulator("test", CPU)
    noise = RolloutRunner(policy, simulator, device=CPU, sampled=True).noise(torch.arange(episodes), seed=1)
    return policy, simulator, noise, noise.pop("actions")


@pytest.mark.parametrize("method", IN_THE_DARK)
def test_recomputing_the_history_gives_the_same_episodes(method: str) -> None:
    policy, simulator, noise, sampling = played(method, "smoke", 5, horizon=20)
    cached = rollout(policy, simulator, noise, sampling)
    recomputed = rollout(Recomputing(policy), simulator, noise, sampling)
    assert torch.equal(cached.action, recomputed.action)
    assert torch.equal(cached.reward, recomputed.reward)


@pytest.mark.slow
def test_the_cache_is_at_least_three_times_as_fast() -> None:
    policy, simulator, noise, sampling = played("uat", "paper", 256)

    def seconds(agent: Any) -> float:
        start = time.perf_counter()
        rollout(agent, simulator, noise, sampling)
        return time.perf_counter() - start

    fast, slow = min(seconds(policy) for _ in range(3)), min(seconds(Recomputing(policy)) for _ in range(2))
    assert slow / fast >= 3, f"recomputing {slow:.2f} s, cached {fast:.2f} s"
