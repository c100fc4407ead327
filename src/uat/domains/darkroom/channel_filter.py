"""The Bayes filter of DarkRoom under corrupted feedback: it knows the channel, and receives what policies receive.

A hypothesis is a pair (start cell, goal). With the actions taken, a hypothesis determines every later cell and every
reward, of which there are only a few different values, so that the likelihood of what the channel carries is exact:

  noise      the density of the received number around the reward of the hypothesis
  shuffled   the mean of these densities over all rewards that the hypothesis has earned so far; draws of different
             steps are independent given the rewards, so that the likelihoods of steps multiply
  inverted   as clean, with the other sign
  null       no factor
  delay      the number that arrives before step t, of step t - 1 - delay, is compared with the reward of that step

If the channel hides actions, the filter remembers its own: it plays the arg-max of its logits.

The goal may move inside an episode only if rewards arrive at once and in order: otherwise a hypothesis would be a whole
path of the goal.

Axes: B streams, S start cells, C cells, G goals, A actions, V values of rewards, D steps that rewards are late, plus 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from uat.channel import FeedbackConfig
from uat.contracts import Agent
from uat.domains.darkroom.filter import REWARD_TOLERANCE, Model
from uat.domains.darkroom.world import DarkRoomConfig
from uat.episode import Step, TensorFields

DECIMALS = 9
"""Decimals of the logits. Sums of densities are not exact, and ties between actions must remain ties."""


@dataclass(slots=True, kw_only=True)
class ChannelBelief(TensorFields):
    """Belief of each stream after its last step, up to a factor, and what the next feedback may belong to."""

    weight_BSG: Tensor
    cell_BS: Tensor
    """Cell of the agent now, for each start."""
    t_B: Tensor
    decided_B: Tensor
    """The filter's own action at the last step."""
    past_action_BD: Tensor
    """Actions of the last steps, the latest one first."""
    past_cell_BDS: Tensor
    earned_VBSG: Tensor | None
    """How often each hypothesis has earned each reward; None unless rewards are shuffled."""


@dataclass(slots=True, kw_only=True)
class Values(TensorFields):
    """The different rewards of a room."""

    reward_V: Tensor
    index_ACG: Tensor
    """Which of them each action earns."""


def covers(config: DarkRoomConfig, feedback: FeedbackConfig) -> bool:
    """Whether the filter is exact for this room and channel."""
    at_once = feedback.reward == "null" or (feedback.reward != "shuffled" and feedback.delay == 0)
    return at_once or not config.shift_steps


class ChannelFilter(Agent[ChannelBelief]):
    """An agent whose logits are the log-posterior of the expert's action; NaN after impossible evidence."""

    def __init__(self, config: DarkRoomConfig, feedback: FeedbackConfig) -> None:
        if not covers(config, feedback):
            raise ValueError(
                f"feedback.reward={feedback.reward} with feedback.delay={feedback.delay} has no exact filter if the "
                f"goal moves inside an episode: shift_steps={config.shift_steps} must be empty"
            )
        self.spec, self.feedback, self.model = config.spec, feedback, Model.of(config)
        reward_V, index_ACG = torch.unique(self.model.reward_ACG.double(), return_inverse=True)
        sign = -1 if feedback.reward == "inverted" else 1
        self.values = Values(reward_V=sign * reward_V, index_ACG=index_ACG)
        self.lag = min(feedback.delay, config.horizon)

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> ChannelBelief:
        self.model, self.values = self.model.to(device), self.values.to(device)
        m, count = self.model, len(self.model.prior_CG)
        zeros_B = torch.zeros(streams, dtype=torch.long, device=device)
        shuffled = self.feedback.reward == "shuffled"
        return ChannelBelief(
            weight_BSG=m.prior_CG.expand(streams, -1, -1),
            cell_BS=torch.arange(count, device=device).expand(streams, -1),
            t_B=zeros_B,
            decided_B=zeros_B,
            past_action_BD=zeros_B[:, None].expand(-1, self.lag + 1),
            past_cell_BDS=zeros_B[:, None, None].expand(-1, self.lag + 1, count),
            earned_VBSG=self._nothing_earned(streams, device) if shuffled else None,
        )

    def _nothing_earned(self, streams: int, device: torch.device | str) -> Tensor:
        return torch.zeros(len(self.values.reward_V), streams, *self.model.prior_CG.shape, device=device)

    def step(self, state: ChannelBelief, step: Step) -> tuple[Tensor, ChannelBelief]:
        m, first_B11 = self.model, step.first[:, None, None]
        start_S = torch.arange(state.cell_BS.shape[1], device=state.cell_BS.device)
        action_B = step.prev_action.clamp_min(0) if self.feedback.action == "true" else state.decided_B
        past_action_BD = torch.cat([action_B[:, None], state.past_action_BD], dim=1)[:, : self.lag + 1]
        past_cell_BDS = torch.cat([state.cell_BS[:, None], state.past_cell_BDS], dim=1)[:, : self.lag + 1]
        t_B = torch.where(step.first, 0, state.t_B + 1)
        weight_BSG, earned_VBSG = state.weight_BSG, state.earned_VBSG
        if self.feedback.reward != "null":
            arrived_B11 = (t_B > self.lag)[:, None, None]
            index_BSG = self.values.index_ACG[past_action_BD[:, -1, None], past_cell_BDS[:, -1]]
            if earned_VBSG is not None:
                new_VBSG = torch.stack([index_BSG == v for v in range(len(earned_VBSG))]) & arrived_B11
                earned_VBSG = torch.where(first_B11, 0.0, earned_VBSG + new_VBSG)
            likelihood_BSG = self._likelihood(step.prev_reward, index_BSG, earned_VBSG)
            weight_BSG = torch.where(arrived_B11, weight_BSG * likelihood_BSG, weight_BSG)
        weight_BSG = torch.where(first_B11, m.prior_CG, weight_BSG)
        cell_BS = torch.where(step.first[:, None], start_S, m.next_AC[action_B[:, None], state.cell_BS])
        if len(m.shift_steps):
            shifted_B = torch.isin(t_B, m.shift_steps)
            weight_BSG = torch.where(shifted_B[:, None, None], weight_BSG @ m.kernel_GG, weight_BSG)
        weight_BSG = self._after_observation(weight_BSG, cell_BS, step.obs)
        logits_BA = self._logits(weight_BSG, cell_BS)
        return logits_BA, ChannelBelief(
            weight_BSG=weight_BSG,
            cell_BS=cell_BS,
            t_B=t_B,
            decided_B=logits_BA.argmax(1),
            past_action_BD=past_action_BD,
            past_cell_BDS=past_cell_BDS,
            earned_VBSG=earned_VBSG,
        )

    def _likelihood(self, received_B: Tensor, index_BSG: Tensor, earned_VBSG: Tensor | None) -> Tensor:
        """Return the likelihood of the received number under each hypothesis, up to a factor per stream."""
        error_BV = (received_B.double()[:, None] - self.values.reward_V).abs()
        if self.feedback.noise:
            exponent_BV = -0.5 * (error_BV / self.feedback.noise) ** 2
            density_BV = (exponent_BV - exponent_BV.amax(1, keepdim=True)).exp()
        else:
            density_BV = (error_BV < REWARD_TOLERANCE).double()
        if earned_VBSG is None:
            return density_BV.gather(1, index_BSG.flatten(1)).view(index_BSG.shape)
        likelihood_BSG = torch.zeros(index_BSG.shape, dtype=torch.float64, device=index_BSG.device)
        for v, earned_BSG in enumerate(earned_VBSG):
            likelihood_BSG = torch.addcmul(likelihood_BSG, earned_BSG.double(), density_BV[:, v, None, None])
        return likelihood_BSG

    def _after_observation(self, weight_BSG: Tensor, cell_BS: Tensor, obs_BO: Tensor) -> Tensor:
        """Multiply by the likelihood of wall mask and cue, and scale the weights to a sum in [0.5, 1)."""
        walls_BO, cue_B1 = obs_BO[:, :-1], (obs_BO[:, -1:] > 0.5).long()
        fits_BS = (self.model.walls_CO == walls_BO[:, None]).all(-1).gather(1, cell_BS)
        weight_BSG = weight_BSG * self.model.cue_2CG[cue_B1, cell_BS] * fits_BS[:, :, None]
        total_B11 = weight_BSG.sum((1, 2), keepdim=True)
        return weight_BSG * (torch.frexp(total_B11).mantissa / total_B11)  # a power of two

    def _logits(self, weight_BSG: Tensor, cell_BS: Tensor) -> Tensor:
        """Return the log-posterior of the expert's action."""
        streams, cells, _ = weight_BSG.shape
        row_BS = cell_BS + cells * torch.arange(streams, device=cell_BS.device)[:, None]
        at_BCG = torch.zeros_like(weight_BSG).flatten(0, 1)
        at_BCG = at_BCG.index_add_(0, row_BS.flatten(), weight_BSG.flatten(0, 1)).view_as(weight_BSG)
        mass_BA = at_BCG.flatten(1) @ self.model.label_CGA.flatten(0, 1)
        return (mass_BA / mass_BA.sum(1, keepdim=True)).log().round(decimals=DECIMALS)
