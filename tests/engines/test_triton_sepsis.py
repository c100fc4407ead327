"""The fused step of the sepsis world against its slow twin: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from uat.acting import rollout
from uat.domains.sepsis import Sepsis, SepsisConfig
from uat.domains.sepsis.world import SepsisSimulator
from uat.episode import Trajectory
from uat.noise import integers

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def fused_twin(simulator: SepsisSimulator) -> SepsisSimulator:
    from uat.engines.triton.sepsis import FusedSepsis

    return FusedSepsis(simulator)


@pytest.mark.parametrize(("streams", "task"), [(1, "regimes"), (33, "regimes"), (9, "aligned")])
def test_fused_steps_are_the_slow_ones(streams: int, task: Any) -> None:
    """Random treatment, and long runs of the same; patients so ill and so well that some die and some recover."""
    domain = Sepsis(SepsisConfig(task=task, horizon=30, response=0.3, state_noise=0.05))
    slow = domain.simulator("train", DEVICE)
    fast = fused_twin(slow)
    ids = torch.arange(streams)
    noise = slow.noise(ids, 3)
    noise["fate"] = noise["fate"] / 10  # ten times as many outcomes
    action_BT = integers(3, "treatment", ids.to(DEVICE), 30, below=5)
    action_BT[:, 10:20] = action_BT[:, 9:10]
    worlds, seen = zip(*[simulator.reset(noise) for simulator in (slow, fast)], strict=True)
    torch.testing.assert_close(seen[0], seen[1])
    ended = 0
    for t in range(30):
        plain, fused = (
            simulator.step(world, action_BT[:, t]) for simulator, world in zip((slow, fast), worlds, strict=True)
        )
        for name in ("obs", "reward_B", "terminated_B"):
            torch.testing.assert_close(getattr(plain, name), getattr(fused, name), atol=2e-6, rtol=0)
        world, other = plain.world, fused.world
        for name in ("state_B3", "repeats_B", "ended_B", "last_B"):
            torch.testing.assert_close(getattr(world, name), getattr(other, name), atol=1e-6, rtol=0)
        if t < 29:
            for name, value in slow.facts(world).items():
                torch.testing.assert_close(value, fast.facts(other)[name], atol=1e-5, rtol=0)
        worlds, ended = (world, other), int(world.ended_B.sum())
    assert ended > 0 or streams < 33, "no patient died or recovered: the test would show nothing"


def test_a_whole_rollout_is_the_slow_one() -> None:
    domain = Sepsis(SepsisConfig(horizon=20))

    def play(fused: bool) -> Trajectory:
        simulator = domain.simulator("train", DEVICE)
        simulator = fused_twin(simulator) if fused else simulator
        return rollout(None, simulator, simulator.noise(torch.arange(4), 5))

    slow, fast = play(False), play(True)
    for name in ("obs", "target", "reward", "done", "valid"):
        torch.testing.assert_close(getattr(slow, name), getattr(fast, name), atol=1e-5, rtol=0)
    for name, value in slow.facts.items():
        torch.testing.assert_close(value, fast.facts[name], atol=1e-5, rtol=0)
