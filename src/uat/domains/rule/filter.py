"""Bayes filters of the hidden rule: normal beliefs about Z, from which the rows W = A Z follow (see `law`).

A filter sees what a policy sees, and knows the laws of the rule and of the rewards. It plays the arg-max of its
posterior over the expert's action. With two actions, every action teaches the same, so that no policy has a higher
expected accuracy than the exact posterior; with more actions a policy that explores may exceed it a little.

  filter           reward   actions  its belief is
  `KalmanFilter`   payoff   all      exact
  `ProbitFilter`   sign     two      expectation propagation (EP): normal, with moments matched for one reward at a
                                     time, and every earlier reward of a rule that stays matched again at each step
  `PointFilter`    sign     all      assumed-density: normal, with moments matched once, by a sum over fixed points

In the task `flip` a belief is a mixture with one component for each history of flips, of which the `hypotheses` most
probable ones are kept. It is exact (in the sense above) as long as none is dropped. `drift` keeps everything normal;
EP then matches each reward once.

The posterior over the expert's action is a normal integral for two actions, and a mean over fixed points for more.

Axes: B streams, M histories of flips, N = J O numbers of Z, K actions, J = K - 1, O observation, S sites, Q points.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from uat.contracts import Agent
from uat.domains.rule.law import simplex
from uat.domains.rule.world import RuleConfig
from uat.episode import Step, TensorFields
from uat.memory import check_fits

HYPOTHESES = 32
"""Histories of flips that are kept."""
POINTS = 512
"""Number of fixed points in integrals over several scores."""
SWEEPS, NOISY_SWEEPS = 1, 2
"""Times that EP matches all earlier rewards again at each step, without and with label noise."""
LEAST = 1e-12
"""Least variance of a score."""
LOWEST = -0.1
"""Lowest precision of a site, relative to all else; label noise asks for precisions below zero."""
LEAST_SHARE = 1e-3
"""Least share of a precision that other rewards must have while one reward is matched again."""
LEAST_NOISE = 1e-3
"""Least label noise that EP assumes in the task `flip`, where some histories of flips contradict the rewards."""


@dataclass(slots=True, kw_only=True)
class Belief(TensorFields):
    """Belief of each stream at its last step, and the observation of that step, which the next reward answers."""

    mean_BMN: Tensor
    cov_BMNN: Tensor
    log_BM: Tensor
    """Log-probability of each history of flips."""
    turn_BM: Tensor
    """Places by which the rows are rotated now."""
    obs_BO: Tensor


@dataclass(slots=True, kw_only=True)
class View(TensorFields):
    """The scores u = Z o for one observation: u = mean + L e with e standard normal, and Z = its mean + sum of G e."""

    mean_BMJ: Tensor
    factor_BMJJ: Tensor
    """L, lower triangular."""
    gain_BMJN: Tensor
    """G."""


@dataclass(slots=True, kw_only=True)
class Evidence(TensorFields):
    """The effect of a reward on e: its likelihood, and the posterior mean and covariance 1 - shrink."""

    log_BM: Tensor
    mean_BMJ: Tensor
    shrink_BMJJ: Tensor


class RuleFilter(Agent[Belief]):
    """A mixture of normal beliefs; subclasses say what a reward does to them."""

    def __init__(self, config: RuleConfig, hypotheses: int = HYPOTHESES) -> None:
        if (reason := self.unsupported_reason(config)) is not None:
            raise ValueError(f"{type(self).__name__} {reason}")
        self.config, self.spec = config, config.spec
        self.hypotheses = hypotheses if config.task == "flip" else 1
        self.corner_KJ, self.points_QJ = simplex(config.num_actions), fixed_points(config.num_actions - 1)

    @classmethod
    def unsupported_reason(cls, config: RuleConfig) -> str | None:
        """Return why the filter does not cover a problem; None: it does."""
        return None

    @abstractmethod
    def learn(self, belief: Belief, action_B: Tensor, reward_B: Tensor) -> Belief:
        """Return the belief after the reward of an action for the last observation."""

    # ------------------------------------------------------------ steps

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> Belief:
        c, numbers = self.config, (self.config.num_actions - 1) * self.config.d_obs
        what = f"beliefs of {streams} streams about d_obs={c.d_obs} and num_actions={c.num_actions}"
        check_fits(16 * streams * self.hypotheses * numbers**2, what, device)
        self.corner_KJ, self.points_QJ = self.corner_KJ.to(device), self.points_QJ.to(device)
        return self.prior(streams, device)

    def prior(self, streams: int, device: torch.device | str) -> Belief:
        """Return the belief before the first observation."""
        c, real = self.config, {"dtype": torch.float64, "device": device}
        shape, numbers = (streams, self.hypotheses), (c.num_actions - 1) * c.d_obs
        log_BM = torch.full(shape, -math.inf, **real)
        log_BM[:, 0] = 0.0
        return Belief(
            mean_BMN=torch.zeros(*shape, numbers, **real),
            cov_BMNN=torch.eye(numbers, **real).div(c.d_obs).expand(*shape, -1, -1),
            log_BM=log_BM,
            turn_BM=torch.zeros(shape, dtype=torch.long, device=device),
            obs_BO=torch.zeros(streams, c.d_obs, **real),
        )

    def step(self, state: Belief, step: Step) -> tuple[Tensor, Belief]:
        learnt = self.learn(state, step.prev_action.clamp_min(0), step.prev_reward.double())
        belief = restarted(self.advance(learnt), self.prior(len(step.first), step.obs.device), step.first)
        belief = replace(belief, obs_BO=step.obs.double())
        return self.chances(belief).log(), belief

    def advance(self, belief: Belief) -> Belief:
        """Return the belief one step later, after the rule may have changed."""
        c = self.config
        if c.task == "drift":
            fresh_N = torch.full_like(belief.mean_BMN[0, 0], c.drift / c.d_obs).diag()
            cov_BMNN = (1 - c.drift) * belief.cov_BMNN + fresh_N
            return replace(belief, mean_BMN=math.sqrt(1 - c.drift) * belief.mean_BMN, cov_BMNN=cov_BMNN)
        return self.branch(belief) if c.task == "flip" else belief

    def branch(self, belief: Belief) -> Belief:
        """Extend every history by every rotation, and keep the most probable ones."""
        c, count = self.config, self.config.num_actions
        chance = [math.log1p(-c.flip_chance)] + [math.log(c.flip_chance / (count - 1))] * (count - 1)
        log_BX = torch.cat([belief.log_BM + each for each in chance], dim=1)
        kept_BM = log_BX.topk(self.hypotheses, dim=1).indices
        source_BM, move_BM = kept_BM % self.hypotheses, kept_BM // self.hypotheses
        belief = chosen(belief, source_BM)
        return replace(
            belief, log_BM=log_BX.gather(1, kept_BM).log_softmax(1), turn_BM=(belief.turn_BM + move_BM) % count
        )

    def corners(self, belief: Belief) -> Tensor:
        """(B, M, K, J) the corner of each action under each history."""
        count = self.config.num_actions
        return self.corner_KJ[(torch.arange(count, device=belief.turn_BM.device) + belief.turn_BM[..., None]) % count]

    def chances(self, belief: Belief) -> Tensor:
        """(B, K) posterior of the expert's action for the belief's observation."""
        view, corner_BMKJ = viewed(belief, belief.obs_BO), self.corners(belief)
        weight_BM = belief.log_BM.exp()
        if self.config.num_actions == 2:
            score_BM1 = view.mean_BMJ / view.factor_BMJJ[..., 0]
            return (weight_BM[..., None] * torch.special.ndtr(corner_BMKJ[..., 0] * score_BM1)).sum(1)
        parts = []
        for m in range(self.hypotheses):
            score_BQK = self.scores(view, corner_BMKJ, m)
            share_BK = torch.zeros_like(score_BQK).scatter_(-1, score_BQK.argmax(-1, keepdim=True), 1.0).mean(1)
            means_BK = (corner_BMKJ[:, m] * view.mean_BMJ[:, m, None]).sum(-1)
            parts.append(torch.lerp(share_BK, means_BK.softmax(-1), 1 / POINTS))  # positive, and without ties
        return (weight_BM[..., None] * torch.stack(parts, dim=1)).sum(1)

    def scores(self, view: View, corner_BMKJ: Tensor, m: int) -> Tensor:
        """(B, Q, K) scores of all actions at the fixed points, under one history."""
        u_BQJ = view.mean_BMJ[:, m, None] + self.points_QJ @ view.factor_BMJJ[:, m].transpose(-1, -2)
        return u_BQJ @ corner_BMKJ[:, m].transpose(-1, -2)


class KalmanFilter(RuleFilter):
    """Exact filter of payoffs."""

    @classmethod
    def unsupported_reason(cls, config: RuleConfig) -> str | None:
        if config.reward != "payoff":
            return f"covers reward='payoff', not {config.reward!r}: use ProbitFilter or PointFilter"
        return None

    def learn(self, belief: Belief, action_B: Tensor, reward_B: Tensor) -> Belief:
        view, corner_BMJ = viewed(belief, belief.obs_BO), of_action(self.corners(belief), action_B)
        slope_BMJ = (corner_BMJ[..., None] * view.factor_BMJJ).sum(-2)
        variance_BM = slope_BMJ.square().sum(-1) + self.config.payoff_noise**2
        surprise_BM = reward_B[:, None] - (corner_BMJ * view.mean_BMJ).sum(-1)
        found = Evidence(
            log_BM=-0.5 * (surprise_BM.square() / variance_BM + variance_BM.log()),
            mean_BMJ=slope_BMJ * (surprise_BM / variance_BM)[..., None],
            shrink_BMJJ=slope_BMJ[..., None] * slope_BMJ[..., None, :] / variance_BM[..., None, None],
        )
        return conditioned(belief, view, found)


class PointFilter(RuleFilter):
    """Assumed-density filter of signs.

    No likelihood is taken to be less than one over the number of points, since a rare reward meets few points or none.
    """

    @classmethod
    def unsupported_reason(cls, config: RuleConfig) -> str | None:
        return None if config.reward == "sign" else f"covers reward='sign', not {config.reward!r}: use KalmanFilter"

    def learn(self, belief: Belief, action_B: Tensor, reward_B: Tensor) -> Belief:
        view, corner_BMKJ = viewed(belief, belief.obs_BO), self.corners(belief)
        right_B1 = torch.where(reward_B > 0, 1 - self.config.label_noise, self.config.label_noise)[:, None]
        logs, means, shrinks = [], [], []
        for m in range(self.hypotheses):
            hit_BQ = self.scores(view, corner_BMKJ, m).argmax(-1) == action_B[:, None]
            chance_BQ = torch.where(hit_BQ, right_B1, 1 - right_B1).clamp_min(1 / POINTS)
            weight_BQ1 = (chance_BQ / chance_BQ.sum(1, keepdim=True))[..., None]
            mean_BJ = (weight_BQ1 * self.points_QJ).sum(1)
            square_BJJ = (weight_BQ1 * self.points_QJ).transpose(1, 2) @ self.points_QJ
            unit_JJ = torch.eye(square_BJJ.shape[-1], dtype=square_BJJ.dtype, device=square_BJJ.device)
            logs.append(chance_BQ.mean(1).log())
            means.append(mean_BJ)
            shrinks.append(unit_JJ - square_BJJ + mean_BJ[:, :, None] * mean_BJ[:, None])
        found = Evidence(
            log_BM=torch.stack(logs, 1), mean_BMJ=torch.stack(means, 1), shrink_BMJJ=torch.stack(shrinks, 1)
        )
        return conditioned(belief, view, found)


# ---------------------------------------------------------------- expectation propagation


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


# ---------------------------------------------------------------- beliefs


def viewed(belief: Belief, obs_BO: Tensor) -> View:
    """Return the distribution of the scores for an observation, by a Cholesky factorisation one row after the other."""
    streams, histories, numbers = belief.mean_BMN.shape
    rows, obs_B11O = numbers // obs_BO.shape[1], obs_BO[:, None, None]

    def score(x_BMN: Tensor) -> Tensor:
        """(B, M, J) the scores of a matrix in place of Z."""
        return (x_BMN.view(streams, histories, rows, -1) * obs_B11O).sum(-1)

    cross_BMNJ = (belief.cov_BMNN.view(streams, histories, numbers, rows, -1) * obs_B11O[:, :, None]).sum(-1)
    gains, columns = list[Tensor](), list[Tensor]()
    for i in range(rows):
        gain_BMN = cross_BMNJ[..., i]
        for earlier_BMN, column_BMJ in zip(gains, columns, strict=True):
            gain_BMN = gain_BMN - column_BMJ[..., i, None] * earlier_BMN
        gain_BMN = gain_BMN / score(gain_BMN)[..., i, None].clamp_min(LEAST).sqrt()
        gains.append(gain_BMN)
        columns.append(score(gain_BMN))
    factor_BMJJ = torch.stack(columns, dim=-1).tril()
    return View(mean_BMJ=score(belief.mean_BMN), factor_BMJJ=factor_BMJJ, gain_BMJN=torch.stack(gains, dim=2))


def conditioned(belief: Belief, view: View, found: Evidence) -> Belief:
    """Return the belief after evidence about the scores for the observation of a view."""
    gain_BMNJ = view.gain_BMJN.transpose(-1, -2)
    return replace(
        belief,
        mean_BMN=belief.mean_BMN + (gain_BMNJ * found.mean_BMJ[..., None, :]).sum(-1),
        cov_BMNN=belief.cov_BMNN - gain_BMNJ @ found.shrink_BMJJ @ view.gain_BMJN,
        log_BM=(belief.log_BM + found.log_BM).log_softmax(1),
    )


def of_action(corner_BMKJ: Tensor, action_B: Tensor) -> Tensor:
    """(B, M, J) the corner of one action."""
    each_B = torch.arange(len(action_B), device=action_B.device)
    return corner_BMKJ[each_B, :, action_B]


def restarted(belief: Belief, prior: Belief, first_B: Tensor) -> Belief:
    """Return the belief with the prior in streams that start a new episode."""
    return _changed(
        belief, lambda name, x: torch.where(first_B.view(-1, *[1] * (x.dim() - 1)), getattr(prior, name), x)
    )


def chosen(belief: Belief, source_BM: Tensor) -> Belief:
    """Return the belief with a copy of one of its histories in place of each."""
    each_B1 = torch.arange(len(source_BM), device=source_BM.device)[:, None]
    return _changed(belief, lambda name, x: x[each_B1, source_BM] if "_BM" in name else x)


def _changed(belief: Belief, change: Callable[[str, Tensor], Tensor]) -> Belief:
    """Return the belief with a function applied to each of its tensors, by name."""
    values = {item.name: getattr(belief, item.name) for item in fields(belief)}
    return replace(belief, **{name: change(name, x) for name, x in values.items() if isinstance(x, Tensor)})


def fixed_points(rows: int) -> Tensor:
    """(Q, J) points with the mean and covariance of independent standard normal numbers, the same in every process."""
    half = torch.quasirandom.SobolEngine(rows).draw(POINTS // 2 + 1, dtype=torch.float64)[1:]
    points_QJ = torch.special.ndtri(half)
    points_QJ = torch.cat([points_QJ, -points_QJ])
    factor_JJ = torch.linalg.cholesky(points_QJ.T @ points_QJ / POINTS)
    return torch.linalg.solve_triangular(factor_JJ, points_QJ.T, upper=False).T.contiguous()
