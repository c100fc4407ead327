"""Logs of (observation, action, reward) that a user brings, checked, as a Trajectory like any other."""

from __future__ import annotations

import torch

from uat.checks import (
    Array,
    as_tensor,
    check_actions,
    check_allowed,
    check_observations,
    check_rewards,
    check_valid,
)
from uat.episode import Trajectory
from uat.settings import checked
from uat.spec import Spec


def episodes(
    spec: Spec,
    *,
    obs: Array,
    action: Array,
    reward: Array,
    target: Array | None = None,
    valid: Array | None = None,
    allowed: Array | None = None,
) -> Trajectory:
    """B episodes of T steps as they happened: action[t] was chosen after obs[t] and earned reward[t].

    target: what an expert would have done; unset: what was done. valid: False for padding at the end of short
    episodes. allowed: True where an action might be taken; targets are always allowed. `spec.clock.batch` makes of the
    result what a policy may know.
    """
    checked(spec, Spec, "spec")
    shape = tuple(as_tensor("reward", reward).shape)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"reward: expected shape (episodes, steps) with at least one of each, got {shape}")
    valid_BT = torch.ones(shape, dtype=torch.bool) if valid is None else check_valid(valid, shape)
    done = check_actions("action", action, spec, shape, valid_BT)
    right = done if target is None else check_actions("target", target, spec, shape, valid_BT)
    return Trajectory(
        obs=check_observations(obs, spec, shape, valid_BT),
        action=done,
        reward=check_rewards(reward, spec, shape, valid_BT),
        done=valid_BT & ~torch.cat([valid_BT[:, 1:], torch.zeros_like(valid_BT[:, :1])], dim=1),
        target=right,
        valid=valid_BT,
        allowed=None if allowed is None else check_allowed(allowed, right, spec, valid_BT),
    )
