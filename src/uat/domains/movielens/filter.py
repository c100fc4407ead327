"""The exact filter over regimes: the posterior of the hidden group, given rewards that come late.

A reward shows only whether its item is of the regime's group; the rating itself comes from the log. The belief is a
table over (group, steps that the segment has lasted): each step moves it by the true distribution of lengths and drops
the groups that contradict the reward, or weighs them by its likelihood if the reward is noisy. Actions change nothing
here, so the filter is an upper bound for every policy.

Axes: B episodes, T time, G groups, S steps that the segment has lasted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uat.domains.movielens.regime import RegimeLaw


def posterior(law: RegimeLaw, group_BT: Tensor, reward_BT: Tensor, delay: int) -> Tensor:
    """(B, T, G) probability of each regime at t, given the items until t and the true rewards until t - delay."""
    own_BTG = torch.arange(law.num_groups, device=group_BT.device) == group_BT[..., None]
    return posterior_of(law, own_BTG == (reward_BT > 0)[..., None], delay)


def posterior_of(law: RegimeLaw, likelihood_BTG: Tensor, delay: int) -> Tensor:
    """(B, T, G) probability of each regime at t, given the likelihoods of what was received for the steps until
    t - delay; those of later steps are not read."""
    if delay < 0:
        raise ValueError(f"delay={delay} must not be negative")
    hazard_S = law.hazard(likelihood_BTG.device)
    belief_BGS = _start(law, len(likelihood_BTG), hazard_S)
    before, beliefs = [belief_BGS], []  # belief about step s before its reward, which arrives later
    for t in range(likelihood_BTG.shape[1]):
        known = t - delay
        if known >= 0:
            belief_BGS = _after_reward(before[known], likelihood_BTG[:, known])
            before.append(_moved(belief_BGS, hazard_S))
            steps = delay
        else:
            belief_BGS, steps = before[0], t
        for _ in range(steps):
            belief_BGS = _moved(belief_BGS, hazard_S)
        beliefs.append(belief_BGS.sum(2))
    return torch.stack(beliefs, dim=1)


def _start(law: RegimeLaw, streams: int, hazard_S: Tensor) -> Tensor:
    """Return the belief at the first step: a segment begins, of any group with the same probability."""
    belief_BGS = hazard_S.new_zeros(streams, law.num_groups, law.longest)
    belief_BGS[:, :, 0] = 1 / law.num_groups
    return belief_BGS


def _after_reward(belief_BGS: Tensor, likelihood_BG: Tensor) -> Tensor:
    """Weigh the regimes by the likelihood of the reward; a true reward removes those that contradict it."""
    belief_BGS = belief_BGS * likelihood_BG[:, :, None]
    return belief_BGS / belief_BGS.sum((1, 2), keepdim=True)


def _moved(belief_BGS: Tensor, hazard_S: Tensor) -> Tensor:
    """Move the belief by one step: the segment lasts, or a segment of another group begins."""
    ends_BG = (belief_BGS * hazard_S).sum(2)
    lasts_BGS = (belief_BGS * (1 - hazard_S)).roll(1, dims=2)
    lasts_BGS[:, :, 0] = (ends_BG.sum(1, keepdim=True) - ends_BG) / (belief_BGS.shape[1] - 1)
    return lasts_BGS
