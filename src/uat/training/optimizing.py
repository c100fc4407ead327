"""Adam with one learning rate per parameter group, and its schedule. Learning rates are tensors on the device."""

from __future__ import annotations

import math

import torch
from torch import nn

from uat.config import TrainConfig
from uat.methods import Policy


def build_optimizer(policy: Policy, config: TrainConfig, others: nn.Module | None = None) -> torch.optim.Adam:
    """Return Adam with its state already allocated, so that fresh and resumed runs have the same tensors.

    others: weights of the objective, which learn at the base rate.
    """
    device = next(policy.parameters()).device
    groups, named = [], policy.parameter_groups()
    if others is not None:
        named = {**named, "base": [*named.get("base", []), *others.parameters()]}
    for name, parameters in named.items():
        rate = rate_of(name, policy, config)
        groups.append({"params": parameters, "lr": torch.tensor(rate, device=device), "peak_lr": rate, "name": name})
    on_cuda = device.type == "cuda"
    optimizer = torch.optim.Adam(groups, weight_decay=config.weight_decay, capturable=on_cuda, fused=True)
    for group in optimizer.param_groups:
        for p in group["params"]:
            zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            optimizer.state[p] = {"step": torch.zeros((), device=device), **zeros}
    return optimizer


def rate_of(group: str, policy: Policy, config: TrainConfig) -> float:
    """Return the peak learning rate of a parameter group: a training setting, or one that the policy declares."""
    rates = {**policy.learning_rates(), "base": config.lr, "utility": config.utility_lr}
    if group not in rates:
        raise ValueError(
            f"{type(policy).__name__} has a parameter group {group!r} without a learning rate: return one from its "
            f"learning_rates(), or name the group one of {', '.join(rates)}"
        )
    return rates[group]


def set_rates(
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    epoch: int,
    factor_now: float | None = None,
    *,
    share_done: float | None = None,
) -> float:
    """Set the learning rates of an epoch, counted from 1: a linear warm-up, then constant or a decay.

    Return the factor on the peak rates. If it equals `factor_now`, the rates are not written again.
    share_done: finished share of a training that may end after a number of environment steps; a decay then begins at
        once, beside the warm-up.
    """
    factor = min(1.0, epoch / config.warmup) if config.warmup else 1.0
    if config.lr_schedule != "constant" and (share_done is not None or epoch > config.warmup):
        done = (epoch - config.warmup) / max(1, config.epochs - config.warmup) if share_done is None else share_done
        left = 0.5 * (1 + math.cos(math.pi * done)) if config.lr_schedule == "cosine" else max(0.0, 1 - done)
        factor *= config.last_lr + (1 - config.last_lr) * left
    if factor != factor_now:
        for group in optimizer.param_groups:
            group["lr"].fill_(group["peak_lr"] * factor)
    return factor
