"""Estimate whether a training fits into memory before allocating it."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import torch

from uat.config import RunConfig
from uat.memory import check_fits
from uat.methods import METHODS
from uat.nn.blocks import BackboneConfig
from uat.runs import empty_policy
from uat.spec import Discrete, Spec

COPIES = 4
"""Numbers stored per weight: the weight, its gradient, and the optimizer's two moments."""
PER_LAYER = 12
"""Activations of width d_model that a layer stores per step for its gradients."""
WIDTHS = ("d_model", "num_layers", "d_ff", "d_hidden", "d_utility", "members", "num_hidden", "d_encoder", "d_asset")
"""Settings that determine the number of weights."""


def check_memory(config: RunConfig, spec: Spec, device: torch.device, *, share: int = 1) -> None:
    """Raise an error if a training certainly needs more memory than its device has.

    share: number of processes that divide a batch.
    """
    policy = empty_policy(METHODS[config.method_name], spec, config.method)
    weights = COPIES * sum(weight.nbytes for weight in policy.parameters())
    batch = 4 * -(-config.train.batch_size // share) * spec.steps * numbers_per_step(spec, config.method)
    sizes = sizes_of(config.method)
    parts = [f"method.{name}={value}" for name, value in sizes.items()]
    if weights < batch:
        parts = [f"train.batch_size={config.train.batch_size}", f"horizon={spec.steps}", *parts]
    check_fits(weights + batch, f"training {config.method_name} with {', '.join(parts)}", device)


def numbers_per_step(spec: Spec, config: Any) -> int:
    """Return how many numbers training stores per step of an episode: inputs, feedback and activations."""
    obs = math.prod(spec.obs.shape)
    action = 1 if isinstance(spec.action, Discrete) else spec.action.count
    inputs = 2 * obs + 4 * action
    if not isinstance(config, BackboneConfig):
        return inputs
    return inputs + config.num_layers * (PER_LAYER * config.d_model + 2 * config.d_ff)


def sizes_of(config: Any) -> dict[str, Any]:
    """Return the settings of a method that determine its number of weights."""
    settings = {item.name: getattr(config, item.name) for item in fields(config)}
    return {name: settings[name] for name in WIDTHS if name in settings}
