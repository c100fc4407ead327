"""Standardise raw observations (`train.standardise`): fit their statistics once, before the first update.

The statistics depend on the domain and on the run's seed alone, so every method gets the same. They are buffers of the
policy, which checkpoints and policy files hold, so a resumed training restores them and never fits them again.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from uat.acting import Behaviour, rollout
from uat.config import RunConfig
from uat.contracts import Recording, Simulator
from uat.distributions import action_noise
from uat.domains import split_seed
from uat.episode import Trajectory
from uat.methods import Policy
from uat.nn.encoders import Normalizer
from uat.training.ranks import Ranks

EPISODES, MOST_NUMBERS = 256, 2**24
"""Number of episodes that statistics are fitted to, and the most observed numbers in them; of long episodes with many
numbers, fewer are taken."""
RANDOM = Behaviour(random_share=1.0)


def standardise(
    policy: Policy, worlds: Simulator[Any] | Recording, config: RunConfig, device: torch.device, ranks: Ranks
) -> None:
    """Fit the statistics of a policy's observations to the first training episodes. All ranks get those of the first
    rank."""
    try:
        policy.standardise(*episodes(worlds, config, device))
    except ValueError as error:
        raise ValueError(f"train.standardise=True is not possible: {error}") from None
    statistics = [x for module in policy.modules() if isinstance(module, Normalizer) for x in module.buffers()]
    if not all(x.isfinite().all() for x in statistics):
        raise ValueError(
            f"train.standardise=True is not possible: observations of {config.domain_name} are not finite, or too "
            "large for their statistics"
        )
    ranks.copy_from_first(statistics)


def episodes(worlds: Simulator[Any] | Recording, config: RunConfig, device: torch.device) -> list[Trajectory]:
    """Return the first training episodes in batches: recorded ones, or played with uniformly random actions."""
    spec, seed = worlds.spec, split_seed("train", config.seed)
    numbers = spec.steps * max(1, math.prod(spec.obs.shape))
    count = max(1, min(EPISODES, MOST_NUMBERS // numbers))
    played = []
    for ids in torch.arange(count).split(config.train.batch_size):
        drawn = action_noise(spec, seed, "standardise", ids.to(device), spec.steps)
        played.append(rollout(RANDOM, worlds, worlds.noise(ids, seed), drawn))
    return played
