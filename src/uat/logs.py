"""Conversion of a user's logs of (observation, action, reward) to a checked Trajectory."""

from __future__ import annotations

import torch

from uat.checks import (
    Array,
    as_tensor,
    check_actions,
    check_allowed,
    check_mask,
    check_observations,
    check_propensities,
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
    truncated: Array | None = None,
    reward_known: Array | None = None,
    propensity: Array | None = None,
) -> Trajectory:
    """Return B episodes of T steps as they happened: action[t] follows obs[t] and earns reward[t].

    target: what an expert would have done; unset: what was done. valid: False for padding at the end of short
    episodes. allowed: True where an action might be taken; targets are always allowed. truncated: (B,) True for
    episodes that went on after their last logged step; the others ended there. reward_known: False
    where a reward is missing; it may be NaN there. propensity: probability with which the logged action was taken, or
    its density in a box. `spec.clock.batch` makes of the result what a policy may know.
    """
    checked(spec, Spec, "spec")
    shape = tuple(as_tensor("reward", reward).shape)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"reward: expected shape (episodes, steps) with at least one of each, got {shape}")
    valid_BT = torch.ones(shape, dtype=torch.bool) if valid is None else check_valid(valid, shape)
    taken = check_actions("action", action, spec, shape, valid_BT)
    right = taken if target is None else check_actions("target", target, spec, shape, valid_BT)
    last_BT = valid_BT & ~torch.cat([valid_BT[:, 1:], torch.zeros_like(valid_BT[:, :1])], dim=1)
    known_BT = None if reward_known is None else check_mask("reward_known", reward_known, shape)
    cut_B = torch.zeros(shape[0], dtype=torch.bool)
    if truncated is not None:
        cut_B = check_mask("truncated", truncated, shape[:1])
    return Trajectory(
        obs=check_observations(obs, spec, shape, valid_BT),
        action=taken,
        reward=check_rewards(reward, spec, shape, valid_BT if known_BT is None else valid_BT & known_BT),
        reward_known=known_BT,
        terminated=last_BT & ~cut_B[:, None],
        truncated=None if truncated is None else last_BT & cut_B[:, None],
        target=right,
        valid=valid_BT,
        allowed=None if allowed is None else check_allowed(allowed, right, spec, valid_BT),
        propensity=None if propensity is None else check_propensities(propensity, spec, shape, valid_BT),
    )
