"""References that know no laws: the Hebbian rule, LinUCB and linear Thompson sampling.

All three take the rule to last the whole episode and never forget. They learn from rewards of both kinds.

Axes: B streams, K actions, J = K - 1, O observation, Q nodes of a quadrature.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from uat.contracts import Agent
from uat.domains.rule.law import simplex
from uat.domains.rule.world import RuleConfig
from uat.episode import Step, TensorFields
from uat.memory import check_fits

RIDGE = 1.0
"""Penalty of the ridge regressions."""
OPTIMISM = 1.0
"""Standard deviations that LinUCB adds to the estimate of each action."""
NODES = 48
"""Number of nodes of the quadrature over the score of one action."""
LEAST = 1e-300


@dataclass(slots=True, kw_only=True)
class Trace(TensorFields):
    trace_BJO: Tensor
    """Sum of reward times corner times observation."""
    obs_BO: Tensor


class Hebbian(Agent[Trace]):
    """The action whose corner agrees best with the rewards of similar observations.

    Its scores are the sums over j of r_j (A_a · A_(a_j)) (o_j · o). With two actions it plays the sign of the sum of
    y_j o_j · o, where y_j is the reward of the first action, or minus that of the second.
    """

    def __init__(self, config: RuleConfig) -> None:
        self.config, self.spec, self.corner_KJ = config, config.spec, simplex(config.num_actions)

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> Trace:
        self.corner_KJ = self.corner_KJ.to(device)
        obs_BO = torch.zeros(streams, self.config.d_obs, dtype=torch.float64, device=device)
        return Trace(trace_BJO=obs_BO[:, None].repeat(1, self.config.num_actions - 1, 1), obs_BO=obs_BO)

    def step(self, state: Trace, step: Step) -> tuple[Tensor, Trace]:
        lesson_BJ = step.prev_reward[:, None] * self.corner_KJ[step.prev_action.clamp_min(0)]
        trace_BJO = state.trace_BJO + lesson_BJ[..., None] * state.obs_BO[:, None]
        trace_BJO = torch.where(step.first[:, None, None], 0.0, trace_BJO)
        obs_BO = step.obs.double()
        score_BK = (trace_BJO * obs_BO[:, None]).sum(-1) @ self.corner_KJ.T
        return score_BK, Trace(trace_BJO=trace_BJO, obs_BO=obs_BO)


@dataclass(slots=True, kw_only=True)
class Regressions(TensorFields):
    """A ridge regression of the reward on the observation, for each action."""

    inverse_BKOO: Tensor
    """Inverse of ridge + the sum of o o'."""
    sum_BKO: Tensor
    """Sum of reward times observation."""
    obs_BO: Tensor


class LinUCB(Agent[Regressions]):
    """LinUCB with separate models of all actions (Li et al. 2010): estimate plus a multiple of its deviation."""

    def __init__(self, config: RuleConfig) -> None:
        self.config, self.spec = config, config.spec

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> Regressions:
        c, real = self.config, {"dtype": torch.float64, "device": device}
        what = f"regressions of {streams} streams on d_obs={c.d_obs} for num_actions={c.num_actions}"
        check_fits(16 * streams * c.num_actions * c.d_obs**2, what, device)
        return Regressions(
            inverse_BKOO=torch.eye(c.d_obs, **real).div(RIDGE).expand(streams, c.num_actions, -1, -1),
            sum_BKO=torch.zeros(streams, c.num_actions, c.d_obs, **real),
            obs_BO=torch.zeros(streams, c.d_obs, **real),
        )

    def step(self, state: Regressions, step: Step) -> tuple[Tensor, Regressions]:
        state = self._learn(state, step)
        obs_BO = step.obs.double()
        along_BKO = (state.inverse_BKOO * obs_BO[:, None, None]).sum(-1)
        mean_BK = (along_BKO * state.sum_BKO).sum(-1)
        std_BK = (along_BKO * obs_BO[:, None]).sum(-1).clamp_min(0).sqrt()
        return self.preferences(mean_BK, std_BK), replace(state, obs_BO=obs_BO)

    def preferences(self, mean_BK: Tensor, std_BK: Tensor) -> Tensor:
        """(B, K) logits, from the estimates of all scores and their standard deviations per unit of noise."""
        return mean_BK + OPTIMISM * std_BK

    def _learn(self, state: Regressions, step: Step) -> Regressions:
        """Add the last observation to the regression of the last action (Sherman and Morrison)."""
        at_BK1 = (step.prev_action[:, None] == torch.arange(self.config.num_actions, device=step.obs.device))[..., None]
        obs_B1O, first_B11 = state.obs_BO[:, None], step.first[:, None, None]
        along_BKO = torch.where(at_BK1, (state.inverse_BKOO * obs_B1O[:, None]).sum(-1), 0.0)
        scale_BK = 1 + (along_BKO * obs_B1O).sum(-1)
        change_BKOO = along_BKO[..., None] * along_BKO[..., None, :] / scale_BK[..., None, None]
        unit_OO = torch.eye(self.config.d_obs, dtype=torch.float64, device=step.obs.device) / RIDGE
        sum_BKO = state.sum_BKO + torch.where(at_BK1, step.prev_reward[:, None, None] * obs_B1O, 0.0)
        return replace(
            state,
            inverse_BKOO=torch.where(first_B11[..., None], unit_OO, state.inverse_BKOO - change_BKOO),
            sum_BKO=torch.where(first_B11, 0.0, sum_BKO),
        )


class LinTS(LinUCB):
    """Linear Thompson sampling (Agrawal and Goyal 2013): an action as probable as it is to be the best one.

    The models of all actions are drawn independently. The logits are the log-probabilities that the drawn score of an
    action is the highest, and evaluation samples from them.
    """

    sampled: ClassVar[bool] = True

    def __init__(self, config: RuleConfig) -> None:
        super().__init__(config)
        node_Q, weight_Q = np.polynomial.hermite_e.hermegauss(NODES)
        self.node_Q, self.weight_Q = torch.from_numpy(node_Q), torch.from_numpy(weight_Q / weight_Q.sum())

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> Regressions:
        self.node_Q, self.weight_Q = self.node_Q.to(device), self.weight_Q.to(device)
        return super().init_state(streams, capacity, device)

    def preferences(self, mean_BK: Tensor, std_BK: Tensor) -> Tensor:
        noise = self.config.payoff_noise if self.config.reward == "payoff" else 1.0
        std_BK = (noise * std_BK).clamp_min(1e-9)
        drawn_BKQ = mean_BK[..., None] + std_BK[..., None] * self.node_Q
        ahead_BKQK = (drawn_BKQ[..., None] - mean_BK[:, None, None]) / std_BK[:, None, None]
        own_KK = torch.eye(mean_BK.shape[1], dtype=torch.bool, device=mean_BK.device)
        above_BKQK = torch.special.log_ndtr(ahead_BKQK).masked_fill(own_KK[:, None], 0.0)
        return (above_BKQK.sum(-1).exp() * self.weight_Q).sum(-1).clamp_min(LEAST).log()
