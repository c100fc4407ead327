"""Bayes filter of signed rewards of two actions, by expectation propagation (`filter` has the others).

Axes: B streams, M histories of flips, N = O numbers of Z, O observation, S sites.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from uat.domains.rule.filter import HYPOTHESES, LEAST, Belief, RuleFilter, of_action
from uat.domains.rule.world import RuleConfig

SWEEPS, NOISY_SWEEPS = 1, 2
"""Times that EP matches all earlier rewards again at each step, without and with label noise."""
LOWEST = -0.1
"""Lowest precision of a site, relative to all else; label noise asks for precisions below zero."""
LEAST_SHARE = 1e-3
"""Least share of a precision that other rewards must have while one reward is matched again."""
LEAST_NOISE = 1e-3
"""Least label noise that EP assumes in the task `flip`, where some histories of flips contradict the rewards."""


@dataclass(slots=True, kw_only=True)
class Sites(Belief):
    """A belief as the product of the prior and one normal factor (site) for each reward."""

    past_BSO: Tensor
    """Observations that the rewards answer."""
    sign_BMS: Tensor
    """1 or -1: the sign of w · o that the reward suggests, for the w of the first step; 0: no reward."""
    precision_BMS: Tensor
    shift_BMS: Tensor
    """Precision times mean, of the factor in w · o."""
    count: int
    """Rewards so far; a new one takes the place of the oldest once all sites are taken."""


class ProbitFilter(RuleFilter):
    """Filter of signs of two actions by expectation propagation (Minka 2001)."""

    def __init__(self, config: RuleConfig, hypotheses: int = HYPOTHESES, sweeps: int | None = None) -> None:
        """sweeps: times that all earlier rewards are matched again at each step; 0 is assumed-density filtering."""
        super().__init__(config, hypotheses)
        usual = NOISY_SWEEPS if config.label_noise else SWEEPS
        self.sweeps = 0 if config.task == "drift" else usual if sweeps is None else sweeps
        self.capacity = 1
        self.label_noise = max(config.label_noise, LEAST_NOISE) if config.task == "flip" else config.label_noise

    @classmethod
    def unsupported_reason(cls, config: RuleConfig) -> str | None:
        if config.reward != "sign":
            return f"covers reward='sign', not {config.reward!r}: use KalmanFilter"
        return None if config.num_actions == 2 else f"covers two actions, not {config.num_actions}: use PointFilter"

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> Belief:
        self.capacity = capacity if self.sweeps else 1
        return super().init_state(streams, capacity, device)

    def prior(self, streams: int, device: torch.device | str) -> Sites:
        plain = super().prior(streams, device)
        shape = (streams, self.hypotheses, self.capacity)
        past_BSO = plain.obs_BO.new_zeros(streams, self.capacity, self.config.d_obs)
        sign_BMS, precision_BMS, shift_BMS = (plain.obs_BO.new_zeros(shape) for _ in range(3))
        sites = {"sign_BMS": sign_BMS, "precision_BMS": precision_BMS, "shift_BMS": shift_BMS, "past_BSO": past_BSO}
        return Sites(**{item.name: getattr(plain, item.name) for item in fields(plain)}, **sites, count=0)

    def learn(self, belief: Belief, action_B: Tensor, reward_B: Tensor) -> Belief:
        assert isinstance(belief, Sites)
        place = belief.count % self.capacity
        belief.past_BSO[:, place] = belief.obs_BO
        belief.sign_BMS[..., place] = torch.sign(reward_B)[:, None] * of_action(self.corners(belief), action_B)[..., 0]
        belief.precision_BMS[..., place] = 0.0
        belief.shift_BMS[..., place] = 0.0
        belief = replace(belief, count=belief.count + 1)
        belief, log_BM = self.matched(belief, place)
        belief = replace(belief, log_BM=(belief.log_BM + log_BM).log_softmax(1))
        for _ in range(self.sweeps):
            for each in range(min(belief.count, self.capacity)):
                belief, _ = self.matched(belief, each)
        return belief

    def matched(self, belief: Sites, place: int) -> tuple[Sites, Tensor]:
        """Return the belief after one site is matched again, and the log-likelihood of its reward without the site.

        A site stays as it is if all else leaves nothing to match, which happens under a history of flips that
        contradicts the rewards.
        """
        obs_B1O, sign_BM = belief.past_BSO[:, place, None], belief.sign_BMS[..., place]
        precision_BM, shift_BM = belief.precision_BMS[..., place], belief.shift_BMS[..., place]
        along_BMN = (belief.cov_BMNN * obs_B1O[:, :, None]).sum(-1)
        variance_BM = (along_BMN * obs_B1O).sum(-1).clamp_min(LEAST)
        mean_BM = (belief.mean_BMN * obs_B1O).sum(-1)
        share_BM = 1 - precision_BM * variance_BM  # of the precision of w · o, without this site
        sound_BM = (share_BM > LEAST_SHARE) & (sign_BM != 0)
        rest_BM = torch.where(sound_BM, share_BM, 1.0) / variance_BM
        center_BM = (mean_BM / variance_BM - shift_BM) / rest_BM
        log_BM, pull_BM, shrink_BM = probit(sign_BM * center_BM * rest_BM.sqrt(), self.label_noise)
        target_BM = center_BM + sign_BM * pull_BM / rest_BM.sqrt()
        new_BM = (rest_BM * shrink_BM / (1 - shrink_BM).clamp_min(LEAST)).maximum(LOWEST * rest_BM)
        moved_BM = (rest_BM + new_BM) * target_BM - rest_BM * center_BM
        new_BM, moved_BM = torch.where(sound_BM, new_BM, precision_BM), torch.where(sound_BM, moved_BM, shift_BM)
        more_BM, pushed_BM = new_BM - precision_BM, moved_BM - shift_BM
        scale_BM = 1 + more_BM * variance_BM
        step_BM, less_BM = (pushed_BM - more_BM * mean_BM) / scale_BM, more_BM / scale_BM
        belief.precision_BMS[..., place] = new_BM
        belief.shift_BMS[..., place] = moved_BM
        mean_BMN = belief.mean_BMN + step_BM[..., None] * along_BMN
        cov_BMNN = belief.cov_BMNN - (less_BM[..., None] * along_BMN)[..., None] * along_BMN[..., None, :]
        return replace(belief, mean_BMN=mean_BMN, cov_BMNN=cov_BMNN), log_BM


def probit(ratio: Tensor, label_noise: float) -> tuple[Tensor, Tensor, Tensor]:
    """Moments of a standard normal e, given that the sign of e + ratio was reported as positive.

    Returns the log-probability of the report, the mean of e, and its variance as 1 - shrink.
    """
    log_BM = torch.special.log_ndtr(ratio)
    if label_noise:
        log_BM = (label_noise + (1 - 2 * label_noise) * torch.special.ndtr(ratio)).log()
    density_BM = -0.5 * ratio.square() - 0.5 * math.log(2 * math.pi)
    pull_BM = (1 - 2 * label_noise) * (density_BM - log_BM).exp()
    return log_BM, pull_BM, pull_BM * (pull_BM + ratio)
