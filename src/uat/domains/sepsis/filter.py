"""Bayes filters of the sepsis domain: posteriors of the hidden regime.

The filters know the generative model and their own actions, and see the physiological state without observation noise.
Each step multiplies the belief by the likelihood of the state's movement, then moves it by the schedule. The filters
play the arg-max of the posterior over the expert's action and never explore, so a policy may score slightly higher.

`HazardFilter` assumes that a regime ends with the same probability at every step, which is simple but wrong.
`SegmentFilter` knows the distribution of segment lengths.

Axes: B streams, R regimes, A actions, J segments after the current one, S first step of the current segment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from uat.contracts import Agent
from uat.domains.sepsis.schedule import NUM_REGIMES
from uat.domains.sepsis.treatment import ACTIONS, EXPERT, Physiology
from uat.domains.sepsis.world import SepsisConfig
from uat.episode import Step, TensorFields


@dataclass(slots=True, kw_only=True)
class Belief(TensorFields):
    """Belief of each stream after its last step, with the data that the next step needs."""

    weight: Tensor
    """(B, R), or (B, J, S, R), up to a factor per stream."""
    total_B: Tensor
    """Sum of `weight`; the next step divides by it."""
    state_B3: Tensor
    """Physiological state one step before."""
    seen_B3: Tensor
    """Physiological state at this step."""
    action_B: Tensor
    repeats_B: Tensor
    t_B: Tensor


@dataclass(slots=True, kw_only=True)
class Model(TensorFields):
    """The generative model as the filters use it, in double precision."""

    physiology: Physiology
    prior: Tensor
    """(R,), or (J, R), belief at the first step of an episode."""
    hazard: Tensor
    """Probability that a regime is over: a single number, or (T, J, S)."""
    other_RR: Tensor
    """Distribution of the regime after a change."""
    label_RA: Tensor

    @classmethod
    def of(cls, config: SepsisConfig, prior: Tensor, hazard: Tensor) -> Model:
        return cls(
            physiology=config.physiology(torch.float64),
            prior=prior / prior.sum(),
            hazard=hazard,
            other_RR=(1 - torch.eye(NUM_REGIMES, dtype=torch.float64)) / (NUM_REGIMES - 1),
            label_RA=one_hot(torch.tensor(EXPERT), len(ACTIONS)).double(),
        )


class HazardFilter(Agent[Belief]):
    """Filter that assumes the same probability of a change at every step; its belief is over the regime alone."""

    def __init__(self, config: SepsisConfig, hazard: float) -> None:
        self.config, self.spec = config, config.spec
        prior_R = torch.ones(NUM_REGIMES, dtype=torch.float64)
        self.model = Model.of(config, prior_R, torch.tensor(hazard, dtype=torch.float64))

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> Belief:
        self.model = self.model.to(device)
        unseen_B3 = torch.zeros(streams, 3, dtype=torch.float64, device=device)
        return Belief(
            weight=self._blank(streams),
            total_B=torch.ones(streams, dtype=torch.float64, device=device),
            state_B3=unseen_B3,
            seen_B3=unseen_B3,
            action_B=torch.full((streams,), -1, device=device),
            repeats_B=torch.zeros(streams, dtype=torch.long, device=device),
            t_B=torch.zeros(streams, dtype=torch.long, device=device),
        )

    def look(self, state: Belief, facts: dict[str, Tensor]) -> Belief:
        """Store the true state, which policies do not see."""
        return replace(state, state_B3=state.seen_B3, seen_B3=facts["state"].double())

    def step(self, state: Belief, step: Step) -> tuple[Tensor, Belief]:
        first_B, action_B = step.first, step.prev_action
        repeats_B = torch.where((action_B == state.action_B) & ~first_B, state.repeats_B + 1, 1)
        t_B = torch.where(first_B, 0, (state.t_B + 1).clamp_max(self.config.horizon - 1))
        likelihood_BR = self.likelihood(state.state_B3, state.seen_B3, action_B.clamp_min(0), repeats_B)
        factor_BR = likelihood_BR / state.total_B[:, None]
        factor_BR = torch.where(first_B[:, None], 0.0, factor_BR)  # a new episode forgets the old belief
        weight, regime_BR = self._advance(state.weight, factor_BR, first_B, t_B)
        total_B = regime_BR.sum(1)
        after = replace(state, weight=weight, total_B=total_B, action_B=action_B, repeats_B=repeats_B, t_B=t_B)
        return (regime_BR / total_B[:, None] @ self.model.label_RA).log(), after

    def likelihood(self, old_B3: Tensor, new_B3: Tensor, action_B: Tensor, repeats_B: Tensor) -> Tensor:
        """(B, R) likelihood of the new state under each regime, up to a factor per stream.

        A coordinate at a limit has the probability of reaching or exceeding the limit.
        """
        physiology, noise = self.model.physiology, self.config.state_noise
        effect_BR = physiology.effect_RA[:, action_B].T
        expected_BR3 = physiology.expected(old_B3[:, None], effect_BR, repeats_B[:, None])
        new_B13 = new_B3[:, None]
        inside = -0.5 * ((new_B13 - expected_BR3) / noise).square()
        log_BR3 = torch.where(new_B13 <= 0, torch.special.log_ndtr(-expected_BR3 / noise), inside)
        log_BR3 = torch.where(new_B13 >= 1, torch.special.log_ndtr((expected_BR3 - 1) / noise), log_BR3)
        log_BR = log_BR3.sum(-1)
        return (log_BR - log_BR.amax(1, keepdim=True)).exp()

    def _blank(self, streams: int) -> Tensor:
        return torch.zeros(streams, NUM_REGIMES, dtype=torch.float64, device=self.model.prior.device)

    def _advance(self, weight: Tensor, factor_BR: Tensor, first_B: Tensor, t_B: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply the belief by the likelihood, move it by one step, and return it with its sums by regime (B, R)."""
        m, weighed_BR = self.model, weight * factor_BR
        weight_BR = (1 - m.hazard) * weighed_BR + m.hazard * (weighed_BR @ m.other_RR) + first_B[:, None] * m.prior
        return weight_BR, weight_BR


class SegmentFilter(HazardFilter):
    """Exact filter that knows the distribution of segment lengths.

    Its belief is over (segments to come, first step of the current one, regime).
    """

    def __init__(self, config: SepsisConfig) -> None:
        self.config, self.spec = config, config.spec
        prior_JR = torch.zeros(config.max_segments, NUM_REGIMES, dtype=torch.float64)
        prior_JR[config.min_segments - 1 :] = 1.0
        self.model = Model.of(config, prior_JR, config.segments.hazards().permute(2, 0, 1).contiguous())

    def _blank(self, streams: int) -> Tensor:
        _, after, starts = self.model.hazard.shape
        return torch.zeros(streams, after, starts, NUM_REGIMES, dtype=torch.float64, device=self.model.prior.device)

    def _advance(self, weight: Tensor, factor_BR: Tensor, first_B: Tensor, t_B: Tensor) -> tuple[Tensor, Tensor]:
        """Move the weight of segments that are over to new ones that begin now, with one segment fewer to come."""
        m, factor_B1R = self.model, factor_BR[:, None]
        hazard_BJS = m.hazard[t_B]
        over_BJR = (hazard_BJS[:, :, None] @ weight)[:, :, 0] * factor_B1R
        begins_BJR = torch.cat([over_BJR[:, 1:] @ m.other_RR, torch.zeros_like(over_BJR[:, :1])], dim=1)
        weight = weight * (1 - hazard_BJS)[..., None]
        weight *= factor_B1R[:, None]
        each_B = torch.arange(len(t_B), device=t_B.device)
        weight[each_B, :, t_B] += begins_BJR + first_B[:, None, None] * m.prior
        return weight, weight.sum((1, 2))
