"""Bayes filters of the sepsis domain: what the best-informed agent believes of the regime, and does.

They know the generative model, see the physiological state without observation noise, and know their own actions.
How the state moved weighs the regimes; the schedule then moves the belief on. They play the arg-max of the posterior
over the expert's action and never act in order to learn: references that a policy may pass by a little.

`SegmentFilter` knows the law of segment lengths. `HazardFilter` believes that a regime ends with the same chance at
every step, which is simpler and not true.

Axes: B streams, R regimes, A actions, J segments after the present one, S first step of the present segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from uat.domains.sepsis.schedule import NUM_REGIMES
from uat.domains.sepsis.treatment import ACTIONS, EXPERT, Physiology
from uat.domains.sepsis.world import SepsisConfig
from uat.types import Step, TensorFields


@dataclass(slots=True, kw_only=True)
class Belief(TensorFields):
    """What each stream believes after its last step, and what it needs to judge the next one."""

    weight: Tensor
    """(B, R), or (B, J, S, R); sums to one."""
    state_B3: Tensor
    action_B: Tensor
    repeats_B: Tensor
    t_B: Tensor


@dataclass(slots=True, kw_only=True)
class Model(TensorFields):
    """The generative model as the filters use it, in double precision."""

    physiology: Physiology
    prior: Tensor
    other_RR: Tensor
    """Law of the regime after a change."""
    label_RA: Tensor
    hazard: Tensor
    """(J, S, T) chance that the segment is over; a single number for a constant hazard."""


class SegmentFilter:
    """Knows how long segments last. Its belief is exact, over (segments to come, first step of this one, regime)."""

    sampled: ClassVar[bool] = False
    privileged: ClassVar[bool] = True

    def __init__(self, config: SepsisConfig) -> None:
        self.config = config
        hazard_JST = config.segments.hazards()
        prior_JSR = torch.zeros(*hazard_JST.shape[:2], NUM_REGIMES, dtype=torch.float64)
        prior_JSR[config.min_segments - 1 : config.max_segments, 0] = 1.0
        self.model = _model(config, prior_JSR / prior_JSR.sum(), hazard_JST)

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> Belief:
        self.model = self.model.to(device)
        return Belief(
            weight=self.model.prior.expand(streams, *self.model.prior.shape),
            state_B3=torch.zeros(streams, 3, dtype=torch.float64, device=device),
            action_B=torch.full((streams,), -1, device=device),
            repeats_B=torch.zeros(streams, dtype=torch.long, device=device),
            t_B=torch.zeros(streams, dtype=torch.long, device=device),
        )

    def step(self, state: Belief, step: Step) -> tuple[Tensor, Belief]:
        m, seen_B3, first_B, action_B = self.model, step.facts["state"].double(), step.first, step.prev_action
        repeats_B = torch.where((action_B == state.action_B) & ~first_B, state.repeats_B + 1, 1)
        t_B = torch.where(first_B, 0, (state.t_B + 1).clamp_max(self.config.horizon - 1))
        likelihood_BR = self.likelihood(state.state_B3, seen_B3, action_B.clamp_min(0), repeats_B)
        weight = self._moved_on(_times(state.weight, likelihood_BR), t_B)
        weight = torch.where(_like(first_B, weight), m.prior, weight)
        weight = weight / _like(weight.flatten(1).sum(1), weight)
        regime_BR = weight.flatten(1, -2).sum(1) if weight.dim() > 2 else weight
        after = Belief(weight=weight, state_B3=seen_B3, action_B=action_B, repeats_B=repeats_B, t_B=t_B)
        return (regime_BR @ m.label_RA).log(), after

    def likelihood(self, old_B3: Tensor, new_B3: Tensor, action_B: Tensor, repeats_B: Tensor) -> Tensor:
        """(B, R) of the new state under each regime, up to a factor per stream; at a limit, of reaching beyond it."""
        physiology, noise = self.model.physiology, self.config.state_noise
        effect_BR = physiology.effect_RA[:, action_B].T
        expected_BR3 = physiology.expected(old_B3[:, None], effect_BR, repeats_B[:, None])
        new_B13 = new_B3[:, None]
        inside = -0.5 * ((new_B13 - expected_BR3) / noise).square()
        log_BR3 = torch.where(new_B13 <= 0, torch.special.log_ndtr(-expected_BR3 / noise), inside)
        log_BR3 = torch.where(new_B13 >= 1, torch.special.log_ndtr((expected_BR3 - 1) / noise), log_BR3)
        log_BR = log_BR3.sum(-1)
        return (log_BR - log_BR.amax(1, keepdim=True)).exp()

    def _moved_on(self, weight_BJSR: Tensor, t_B: Tensor) -> Tensor:
        """The belief one step later: segments that are over hand their weight to a new one that begins now."""
        m = self.model
        hazard_BJS1 = m.hazard[:, :, t_B].permute(2, 0, 1)[..., None]
        over_BJR = (weight_BJSR * hazard_BJS1).sum(2) @ m.other_RR
        begins_BJR = torch.cat([over_BJR[:, 1:], torch.zeros_like(over_BJR[:, :1])], dim=1)  # one segment fewer to come
        now_BS = one_hot(t_B, weight_BJSR.shape[2])
        return weight_BJSR * (1 - hazard_BJS1) + begins_BJR[:, :, None] * now_BS[:, None, :, None]


class HazardFilter(SegmentFilter):
    """Believes that every step ends the regime with the same chance; its belief is over the regime alone."""

    def __init__(self, config: SepsisConfig, hazard: float) -> None:
        self.config = config
        prior_R = torch.full((NUM_REGIMES,), 1 / NUM_REGIMES, dtype=torch.float64)
        self.model = _model(config, prior_R, torch.tensor(hazard, dtype=torch.float64))

    def _moved_on(self, weight_BR: Tensor, t_B: Tensor) -> Tensor:
        m = self.model
        return (1 - m.hazard) * weight_BR + m.hazard * (weight_BR @ m.other_RR)


def _model(config: SepsisConfig, prior: Tensor, hazard: Tensor) -> Model:
    return Model(
        physiology=config.physiology(torch.float64),
        prior=prior,
        other_RR=(1 - torch.eye(NUM_REGIMES, dtype=torch.float64)) / (NUM_REGIMES - 1),
        label_RA=one_hot(torch.tensor(EXPERT), len(ACTIONS)).double(),
        hazard=hazard,
    )


def _times(weight: Tensor, likelihood_BR: Tensor) -> Tensor:
    """The belief weighed by regime, its last axis."""
    return weight * likelihood_BR.view(len(weight), *[1] * (weight.dim() - 2), NUM_REGIMES)


def _like(x_B: Tensor, weight: Tensor) -> Tensor:
    """One value per stream, to be broadcast over a belief."""
    return x_B.view(-1, *[1] * (weight.dim() - 1))
