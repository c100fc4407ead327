"""Learning rates of parameter groups, schedules with known values, and clipping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.builders import IN_THE_DARK
from tests.training.small_runs import (
    last_weights,
    same,
    tiny,
)
from uat.acting import rollout
from uat.config import TrainConfig
from uat.engines.update import optimize
from uat.methods import METHODS, Phase, Policy
from uat.training import train
from uat.training.optimizing import build_optimizer, set_rates
from uat.training.trainer import build_policy


def small_policy() -> Policy:
    config = tiny(method__dropout=0.0)
    return METHODS["uat"].build(config.build_domain().spec, config.method).double()


def test_each_rate_reaches_its_parameters() -> None:
    """With a gradient of ones, Adam's first step equals the learning rate."""
    policy = small_policy()
    optimizer = build_optimizer(policy, TrainConfig(lr=0.25, utility_lr=2.0, weight_decay=0.0))
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    for p in policy.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    moved = {name: (before[name] - p.detach()).mean().item() for name, p in policy.named_parameters()}
    fast = {name for name, step in moved.items() if step == pytest.approx(2.0)}
    assert fast == {"utility.encoder.mlp.0.weight", "utility.encoder.mlp.2.weight", "utility.regime.weight"}
    assert [step for name, step in moved.items() if name not in fast] == pytest.approx([0.25] * (len(moved) - 3))


def test_every_parameter_is_optimized_once() -> None:
    for method in IN_THE_DARK:
        config = tiny(method)
        policy = METHODS[method].build(config.build_domain().spec, config.method)
        listed = [id(p) for group in build_optimizer(policy, config.train).param_groups for p in group["params"]]
        assert sorted(listed) == sorted(map(id, policy.parameters()))


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", {1: 0.25, 2: 0.5, 4: 1.0, 5: 1.0, 12: 1.0}),
        ("cosine", {1: 0.25, 2: 0.5, 4: 1.0, 6: 0.8535533905932737, 8: 0.5, 10: 0.14644660940672627, 12: 0.0}),
    ],
)
def test_warm_up_and_schedule_have_their_known_values(schedule: Any, factors: dict[int, float]) -> None:
    config = TrainConfig(lr=0.5, utility_lr=4.0, epochs=12, warmup=4, lr_schedule=schedule)
    optimizer = build_optimizer(small_policy(), config)
    for epoch, factor in factors.items():
        set_rates(optimizer, config, epoch)
        rates = {group["name"]: group["lr"].item() for group in optimizer.param_groups}
        assert rates == pytest.approx({"base": 0.5 * factor, "utility": 4.0 * factor}, abs=1e-7), epoch


@pytest.mark.usefixtures("without_tensorboard")
def test_training_follows_the_schedule(tmp_path: Path) -> None:
    """One cosine epoch has rate zero and changes no weight; one epoch at a constant rate does."""
    for schedule, moves in (("cosine", False), ("constant", True)):
        config = tiny(train__epochs=1, train__lr_schedule=schedule)
        run = train(config, tmp_path / schedule, device="cpu")
        untrained = build_policy(config, config.build_domain(), torch.device("cpu")).state_dict()
        assert same(last_weights(run), untrained) is not moves


@pytest.mark.parametrize("clip", [1e-3, 1e6])
def test_the_gradient_is_clipped_and_its_norm_told(clip: float) -> None:
    policy, spec = small_policy(), tiny().build_domain().spec
    simulator = tiny().build_domain().simulator("train", "cpu")
    trajectory = rollout(None, simulator, simulator.noise(torch.arange(4), 0))
    batch = spec.clock.batch(trajectory)
    total, count = policy.loss(batch)["imitation"]
    gradient = torch.autograd.grad(total / count, list(policy.parameters()), materialize_grads=True)
    norm = torch.cat([g.flatten() for g in gradient]).norm().item()
    optimizer = build_optimizer(policy, TrainConfig())
    told = optimize(Phase("imitation", policy.loss), batch, optimizer, clip)
    used = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]).norm().item()
    assert told["gradient_norm"].item() == pytest.approx(norm)
    assert used == pytest.approx(min(norm, clip), rel=1e-3)
    assert told["loss/imitation"].item() == pytest.approx((total / count).item())
