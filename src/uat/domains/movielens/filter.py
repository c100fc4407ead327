"""The exact filter over regimes: what can be known of the hidden group, given rewards that come late.

A reward tells whether its item was of the regime's group, and nothing more: the rating is the log's own. The belief
is a table over (group, steps that the segment has lasted), moved by the true law of lengths and cut by each match.
Actions change nothing here, so no policy can know more: the filter is a ceiling.

Axes: B episodes, T time, G groups, S steps that the segment has lasted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uat.domains.movielens.regime import RegimeLaw


def posterior(law: RegimeLaw, group_BT: Tensor, reward_BT: Tensor, delay: int) -> Tensor:
    """(B, T, G) chance of each regime at t, given the items until t and the rewards until t - delay."""
    if delay < 0:
        raise ValueError(f"delay={delay} must not be negative")
    hazard_S = law.hazard(group_BT.device)
    belief_BGS = _start(law, len(group_BT), hazard_S)
    before, beliefs = [belief_BGS], []  # belief about step s before its own reward; known only later
    for t in range(group_BT.shape[1]):
        known = t - delay
        if known >= 0:
            belief_BGS = _told(before[known], group_BT[:, known], reward_BT[:, known])
            before.append(_moved(belief_BGS, hazard_S))
            steps = delay
        else:
            belief_BGS, steps = before[0], t
        for _ in range(steps):
            belief_BGS = _moved(belief_BGS, hazard_S)
        beliefs.append(belief_BGS.sum(2))
    return torch.stack(beliefs, dim=1)


def _start(law: RegimeLaw, streams: int, hazard_S: Tensor) -> Tensor:
    """A segment of any group has just begun."""
    belief_BGS = hazard_S.new_zeros(streams, law.num_groups, law.longest)
    belief_BGS[:, :, 0] = 1 / law.num_groups
    return belief_BGS


def _told(belief_BGS: Tensor, group_B: Tensor, reward_B: Tensor) -> Tensor:
    """Keep the regimes that explain the reward."""
    own_BG = torch.arange(belief_BGS.shape[1], device=group_B.device) == group_B[:, None]
    fits_BG = own_BG == (reward_B > 0)[:, None]
    belief_BGS = belief_BGS * fits_BG[:, :, None]
    return belief_BGS / belief_BGS.sum((1, 2), keepdim=True)


def _moved(belief_BGS: Tensor, hazard_S: Tensor) -> Tensor:
    """One step on: the segment lasts, or another group's begins."""
    ends_BG = (belief_BGS * hazard_S).sum(2)
    lasts_BGS = (belief_BGS * (1 - hazard_S)).roll(1, dims=2)
    lasts_BGS[:, :, 0] = (ends_BG.sum(1, keepdim=True) - ends_BG) / (belief_BGS.shape[1] - 1)
    return lasts_BGS
