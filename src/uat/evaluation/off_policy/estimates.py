"""Estimates of a policy's worth from logged episodes, each with the question that it answers, or a refusal.

With ratios ρ_t = π(a_t | h_t) / b(a_t | h_t), weights w_t = ρ_1 ⋯ ρ_t (w_0 = 1), returns G = Σ_t γ^(t-1) r_t, and means
over episodes written as E[...]:

  deployment by full-trajectory weights         one-step deviation under the logged history
    ips      E[w_T G]                             ips      E[Σ_t ρ_t r_t] / E[T]
    wis      E[w_T G] / E[w_T]                    snips    E[Σ_t ρ_t r_t] / E[Σ_t ρ_t]
    pdis     Σ_t γ^(t-1) E[w_t r_t]               dr       E[Σ_t V_t + ρ_t (r_t - Q_t)] / E[T]
    pdwis    Σ_t γ^(t-1) E[w_t r_t] / E[w_t]
    dm       E[V_1]
    dr       Σ_t γ^(t-1) (E[w_(t-1) V_t] + E[w_t (r_t - Q_t)])
    wdr      the same with each E[w x] replaced by E[w x] / E[w]

V and Q are cross-fitted (`values.py`). Episodes that have ended keep their last weight. Intervals are those of
`ratios.py`, over episodes. A number is refused where the effective sample size is too small for its interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from uat.evaluation.off_policy.ratios import Ratios, effective_size
from uat.evaluation.off_policy.steps import LoggedSteps
from uat.evaluation.off_policy.values import Values, fit_rewards, fit_values
from uat.settings import Between, Count, Scale, Seed, Share, check_fields

Question = Literal[
    "the logging policy as it acted",
    "deployment by full-trajectory weights",
    "one-step deviation under the logged history",
    "deployment by replay",
]
DEPLOYMENT: Question = "deployment by full-trajectory weights"
ONE_STEP: Question = "one-step deviation under the logged history"
NO_INTERVAL = "dm has no interval: it depends on the fitted value alone, whose error no resampling shows"


@dataclass(frozen=True, kw_only=True, slots=True)
class OffPolicyConfig:
    discount: Share = 1.0
    """Factor γ of rewards one step later."""
    clip: Scale | None = None
    """Largest weight (of one step: largest ratio); larger ones become this. None: weights are not clipped."""
    least_ess: Annotated[float, Between(1, 1e12)] = 150.0
    """Effective sample size below which no number is given."""
    most_unsupported: Share = 0.001
    """Mean probability, under the target policy, of actions that the log can never hold, above which no number is
    given."""
    most_weight_errors: Scale = 4.0
    """Standard errors by which the mean weight may differ from 1, its expectation, before numbers are refused."""
    resamples: Count = 1000
    """Bootstrap resamples of episodes."""
    folds: Annotated[int, Between(2, 1000)] = 5
    """Folds of episodes for fitted values."""
    ridge: Scale = 1.0
    """Penalty of the regressions, on standardised features."""
    seed: Seed = 0
    """Seed of resamples and folds."""

    def __post_init__(self) -> None:
        check_fields(self)


DEFAULTS = OffPolicyConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One estimate with its 95 % interval, or the reason why there is no number."""

    name: str
    question: Question
    unit: Literal["return of an episode", "reward of a step"]
    value: float | None
    """None: refused."""
    low: float | None
    high: float | None
    """95 % interval; None: refused, or this estimate has none."""
    ess: float
    """Effective sample size, in episodes; for one-step estimates the smaller one of steps and episodes."""
    episodes: int
    refused: str | None = None
    """Reason for giving no number, and advice."""
    notes: tuple[str, ...] = ()
    """Limits of this number, one sentence each."""

    def sentence(self) -> str:
        """Return the estimate, or the refusal, with its question in one line."""
        head = f"{self.name} ({self.question}, {self.unit})"
        if self.value is None:
            return f"{head}: no number, because {self.refused}"
        interval = "" if self.low is None or self.high is None else f" [{self.low:.4g}, {self.high:.4g}]"
        size = f"effective sample size {self.ess:.0f} of {self.episodes} episodes"
        return "; ".join([f"{head}: {self.value:.4g}{interval}, {size}", *self.notes])

    __str__ = sentence


def deployment(
    steps: LoggedSteps, config: OffPolicyConfig = DEFAULTS, *, values: Values | None = None
) -> list[Estimate]:
    """Return estimates of the mean return of episodes in which the target policy takes every action.

    Estimates with a value (dm, dr, wdr) need `features_BTF`, or values that were not fitted to these episodes.
    """
    if not steps.known_BT[steps.real_BT].all():
        unknown = int((steps.real_BT & ~steps.known_BT).sum())
        raise ValueError(
            f"{unknown} of {int(steps.real_BT.sum())} rewards are unknown, and returns need all of them: leave those "
            f"episodes out if rewards are missing by chance, or ask for one_step estimates, which leave out the steps"
        )
    if values is None and steps.features_BTF is not None:
        settings = {"discount": config.discount, "folds": config.folds, "penalty": config.ridge, "seed": config.seed}
        values = fit_values(steps, **settings)
    plain_BT = steps.ratio_BT.cumprod(1)
    weight_BT, notes = _clipped(plain_BT, steps.real_BT, config.clip)
    ess, refused = effective_size(weight_BT), _refusal(steps, plain_BT[:, -1], effective_size(weight_BT), config)
    estimates = [behaviour_mean(steps, config)]
    for name, ratios in deployment_ratios(steps, weight_BT, config.discount, values).items():
        made = _estimate(name, DEPLOYMENT, "return of an episode", ratios, ess, refused, notes, config)
        if name == "dm" and made.value is not None:
            made = replace(made, low=None, high=None, notes=(NO_INTERVAL,))
        estimates.append(made)
    return estimates


def behaviour_mean(steps: LoggedSteps, config: OffPolicyConfig = DEFAULTS) -> Estimate:
    """Return the mean return of the log, which is the worth of the policy that recorded it."""
    discount_T = config.discount ** torch.arange(steps.reward_BT.shape[1], dtype=torch.float64)
    ratios, episodes = Ratios.mean((discount_T * steps.reward_BT).sum(1)), float(len(steps.reward_BT))
    question: Question = "the logging policy as it acted"
    return _estimate("log", question, "return of an episode", ratios, episodes, None, (), config)


def deployment_ratios(
    steps: LoggedSteps, weight_BT: Tensor, discount: float, values: Values | None = None
) -> dict[str, Ratios]:
    """Return the estimators of deployment for these weights, by name."""
    discount_T = discount ** torch.arange(steps.reward_BT.shape[1], dtype=torch.float64)
    reward_BT, last_B1 = discount_T * steps.reward_BT, weight_BT[:, -1:]
    return_B1 = reward_BT.sum(1, keepdim=True)
    ratios = {
        "ips": Ratios.mean((last_B1 * return_B1)[:, 0]),
        "wis": Ratios(last_B1 * return_B1, last_B1),
        "pdis": Ratios.mean((weight_BT * reward_BT).sum(1)),
        "pdwis": Ratios(weight_BT * reward_BT, weight_BT),
    }
    if values is not None:
        before_BT = torch.cat([torch.ones_like(weight_BT[:, :1]), weight_BT[:, :-1]], dim=1)
        mean_BT = discount_T * torch.where(steps.real_BT, values.mean_BT, 0.0)
        rest_BT = discount_T * torch.where(steps.real_BT, steps.reward_BT - values.logged_BT, 0.0)
        ratios["dm"] = Ratios.mean(mean_BT[:, 0])
        ratios["dr"] = Ratios.mean((before_BT * mean_BT + weight_BT * rest_BT).sum(1))
        ratios["wdr"] = Ratios(
            torch.cat([before_BT * mean_BT, weight_BT * rest_BT], 1), torch.cat([before_BT, weight_BT], 1)
        )
    return ratios


def one_step(steps: LoggedSteps, config: OffPolicyConfig = DEFAULTS, *, values: Values | None = None) -> list[Estimate]:
    """Return estimates of the mean reward of a step at which the target policy acts once, after a history of the log.

    Effects on later steps are no part of the question. Steps with unknown rewards are left out, as if they were
    missing by chance. The estimate with a value (dr) needs `features_BTF`, or values that were not fitted to these
    episodes.
    """
    used_BT, notes = steps.known_BT, ()
    if not used_BT.any():
        raise ValueError("no reward is known, so nothing can be estimated from this log")
    if (unknown := int(steps.real_BT.sum() - used_BT.sum())) > 0:
        notes = (f"{unknown} of {int(steps.real_BT.sum())} steps have unknown rewards and are left out",)
    if values is None and steps.features_BTF is not None:
        values = fit_rewards(steps, folds=config.folds, penalty=config.ridge, seed=config.seed)
    ratio_BT, clipped = _clipped(steps.ratio_BT, used_BT, config.clip)
    ratio_BT = torch.where(used_BT, ratio_BT, 0.0)
    ess = min(effective_size(ratio_BT[used_BT]), effective_size(ratio_BT.sum(1)))
    excess_B = torch.where(used_BT, steps.ratio_BT - 1, 0.0).sum(1)
    refused = _refusal(steps, 1 + excess_B / used_BT.sum().div(len(excess_B)), ess, config)
    return [
        _estimate(name, ONE_STEP, "reward of a step", ratios, ess, refused, (*notes, *clipped), config)
        for name, ratios in one_step_ratios(steps, ratio_BT, values).items()
    ]


def one_step_ratios(steps: LoggedSteps, ratio_BT: Tensor, values: Values | None = None) -> dict[str, Ratios]:
    """Return the estimators of one step for these ratios, which are 0 at steps that are left out."""
    used_BT = steps.known_BT
    paid_B1, count_B1 = (ratio_BT * steps.reward_BT).sum(1, keepdim=True), used_BT.sum(1, keepdim=True).double()
    ratios = {"ips": Ratios(paid_B1, count_B1), "snips": Ratios(paid_B1, ratio_BT.sum(1, keepdim=True))}
    if values is not None:
        score_BT = values.mean_BT + ratio_BT * (steps.reward_BT - values.logged_BT)
        ratios["dr"] = Ratios(torch.where(used_BT, score_BT, 0.0).sum(1, keepdim=True), count_B1)
    return ratios


def as_table(estimates: Sequence[Estimate]) -> str:
    """Return one line for each estimate, and the reasons of refusals once each."""
    lines = [f"{'estimate':8} {'value':>9} {'95 % interval':>22} {'ESS':>9}  question"]
    for e in estimates:
        value = "refused" if e.value is None else f"{e.value:.4g}"
        interval = "" if e.low is None or e.high is None else f"[{e.low:.4g}, {e.high:.4g}]"
        lines.append(f"{e.name:8} {value:>9} {interval:>22} {e.ess:>9.1f}  {e.question} ({e.unit})")
    remarks = [e.refused for e in estimates if e.refused] + [note for e in estimates for note in e.notes]
    return "\n".join([*lines, *dict.fromkeys(remarks)])


def _clipped(weight_BT: Tensor, used_BT: Tensor, clip: float | None) -> tuple[Tensor, tuple[str, ...]]:
    """Return clipped weights, and a note that says how many there are."""
    if clip is None or not (over_BT := (weight_BT > clip) & used_BT).any():
        return weight_BT, ()
    share = over_BT.sum().item() / used_BT.sum().item()
    return weight_BT.clamp(max=clip), (f"{100 * share:.2g} % of weights exceed clip={clip:g}: the estimate is biased",)


def _refusal(steps: LoggedSteps, weight_B: Tensor, ess: float, config: OffPolicyConfig) -> str | None:
    """Return the reason why these weights allow no estimate; None: they do. Weights are those before clipping."""
    episodes = len(weight_B)
    if (missing := steps.unsupported()) > config.most_unsupported:
        return (
            f"the target policy takes actions of propensity 0 with a probability of {missing:.2g} at a step (limit "
            f"{config.most_unsupported:g}): no log of this policy can tell their rewards; forbid these actions to the "
            f"target policy, or log a policy that takes them"
        )
    if ess < config.least_ess:
        needed = math.ceil(episodes * config.least_ess / ess) if ess > 0 else None
        more = "" if needed is None else f"log about {needed:,} episodes in all, "
        return (
            f"the effective sample size is {ess:.1f} of {episodes} episodes, below {config.least_ess:g}: {more}"
            f"evaluate shorter episodes or a policy nearer to the logging policy, or ask for one_step estimates"
        )
    if episodes < 2:
        return None  # least_ess is at its lowest, and the interval is undefined
    mean, error = weight_B.mean().item(), weight_B.std().item() / math.sqrt(episodes)
    if abs(mean - 1) > config.most_weight_errors * error + 1e-6:
        return (
            f"the mean weight is {mean:.3g} with a standard error of {error:.2g}, and should be 1: either propensities "
            f"are wrong (see calibration), or the target policy takes actions that the log hardly holds"
        )
    return None


def _estimate(
    name: str,
    question: Question,
    unit: Literal["return of an episode", "reward of a step"],
    ratios: Ratios,
    ess: float,
    refused: str | None,
    notes: tuple[str, ...],
    config: OffPolicyConfig,
) -> Estimate:
    about = {"name": name, "question": question, "unit": unit, "ess": ess, "episodes": len(ratios.top_BK)}
    if refused is not None:
        return Estimate(**about, value=None, low=None, high=None, refused=refused)
    low, high = ratios.interval(resamples=config.resamples, seed=config.seed)
    return Estimate(**about, value=ratios.value, low=low, high=high, notes=notes)
