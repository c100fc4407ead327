"""Small worlds and training loops for the tests of methods that learn from logs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.builders import CPU, small_config
from tests.training.test_trainer import Crash, crash_at, numbers, tiny
from uat.acting import rollout
from uat.config import RunConfig, TrainConfig
from uat.contracts import Simulator, Transition
from uat.engines.update import optimize
from uat.episode import Batch, Noise
from uat.methods import METHODS, Policy
from uat.noise import gumbel
from uat.spec import Spec
from uat.training import train
from uat.training.optimizing import build_optimizer
from uat.training.surroundings import seeded


class Worlds(Simulator[Tensor]):
    """A simulator with a dummy expert; worlds are tensors (B, ...) that end at the horizon."""

    spec: Spec

    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        raise NotImplementedError

    def expert(self, world: Tensor) -> Tensor:
        return torch.zeros(len(world), dtype=torch.long)

    def reset(self, noise: Noise) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def step(self, world: Tensor, action: Tensor) -> Transition[Tensor]:
        raise NotImplementedError


def batch_of(policy: Policy, worlds: Worlds, ids: Tensor) -> Batch:
    """Logged episodes of these worlds, with the behaviour of the policy's phase."""
    behaviour, spec = policy.phases()[0].behaviour, worlds.spec
    assert behaviour is not None
    noise = gumbel(0, "behaviour", ids, spec.steps * spec.action.count)
    return spec.clock.batch(
        rollout(behaviour, worlds, worlds.noise(ids, 0), noise.view(len(ids), spec.steps, -1).float())
    )


def learn(method: str, worlds: Worlds, *, steps: int, episodes: int = 64, lr: float = 3e-3, **settings: Any) -> Policy:
    """Train a policy for `steps` optimizer steps, each on fresh logs."""
    with seeded(0, CPU):
        policy = METHODS[method].build(worlds.spec, METHODS[method].configure(**settings))
    training = TrainConfig(lr=lr, weight_decay=0.0)
    optimizer, phase = build_optimizer(policy, training), policy.phases()[0]
    for index in range(steps):
        if index == steps * 3 // 4:
            for group in optimizer.param_groups:
                group["lr"].fill_(lr / 10)
        batch = batch_of(policy.train(), worlds, torch.arange(index * episodes, (index + 1) * episodes))
        optimize(phase, batch, optimizer, training.clip)
    return policy.eval()


def in_the_dark(method: str, patch: pytest.MonkeyPatch) -> RunConfig:
    """A tiny run in the dark room, of a method for another domain."""
    patch.setitem(METHODS, method, dataclasses.replace(METHODS[method], domains=None))
    patch.setattr("uat.training.checkpoint.SAVE_SECONDS", 0.0)
    return dataclasses.replace(tiny("vanilla"), method_name=method, method=small_config(method))


def assert_resumes(config: RunConfig, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Training that is stopped before a write and resumed leaves the same bytes as uninterrupted training."""
    whole = numbers(train(config, folder / "whole", device="cpu").path)
    for event in range(2, 9, 2):
        with patch.context() as within:
            crash_at(event, within)
            with pytest.raises(Crash):
                train(config, folder / f"{event}", device="cpu")
        train(config, folder / f"{event}", resume=True, device="cpu")
        assert numbers(folder / f"{event}") == whole, f"crash before write {event}"
