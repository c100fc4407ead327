"""The Bayes filter of DarkRoom: the exact posterior of an agent that knows the generative model.

The filter sees what a policy sees. Its belief is a table over (agent's cell, goal's cell): each step removes entries
that contradict the reward, moves the rest by the action, and multiplies by the likelihood of wall mask and cue. The
filter plays the arg-max of its posterior over the expert's action and never explores, so a policy may score slightly
higher.

Weights are integers times powers of two, and are normalised by powers of two only. While they span less than 53 bits
every sum is exact, so that a tie between actions is a tie in any batch and on any device.

Axes: B streams, C cells of the agent, G cells of the goal, A actions, O wall mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from uat.contracts import Agent
from uat.domains.darkroom import schedule
from uat.domains.darkroom.world import CUE_CHANCE, CUE_REACH, MOVES, DarkRoomConfig, Grid
from uat.episode import Step, TensorFields

REWARD_TOLERANCE = 1e-3


@dataclass(slots=True, kw_only=True)
class Belief(TensorFields):
    """Belief of each stream after its last step, up to a factor, and the number of that step."""

    weight_BCG: Tensor
    t_B: Tensor


@dataclass(slots=True, kw_only=True)
class Model(TensorFields):
    """The generative model as the filter uses it."""

    prior_CG: Tensor
    kernel_GG: Tensor
    """Transition probabilities of the goal at a shift."""
    shift_steps: Tensor
    next_AC: Tensor
    reward_ACG: Tensor
    walls_CO: Tensor
    cue_2CG: Tensor
    """Likelihood of a silent and of a firing cue."""
    label_CGA: Tensor
    """Distribution of the expert's action."""

    @classmethod
    def of(cls, config: DarkRoomConfig) -> Model:
        grid = Grid.build(config.size, config.tie_break)
        fires_CG = CUE_CHANCE * (grid.distance_CG <= CUE_REACH).double()
        prior_G = schedule.prior(config.schedule, config.size)
        return cls(
            prior_CG=prior_G * (1 - torch.eye(len(prior_G), dtype=torch.float64)),  # the agent never starts on the goal
            kernel_GG=schedule.kernel(config.schedule, config.size),
            shift_steps=torch.tensor(config.shift_steps, dtype=torch.long),
            next_AC=grid.next_AC,
            reward_ACG=grid.reward_ACG,
            walls_CO=grid.walls_CO,
            cue_2CG=torch.stack([1 - fires_CG, fires_CG]),
            label_CGA=one_hot(grid.expert_2CG, len(MOVES)).double().mean(0),
        )


class DarkRoomFilter(Agent[Belief]):
    """An agent whose logits are the log-posterior of the expert's action; NaN after impossible evidence."""

    def __init__(self, config: DarkRoomConfig) -> None:
        self.spec, self.model = config.spec, Model.of(config)

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> Belief:
        self.model = self.model.to(device)
        weight_BCG = self.model.prior_CG.expand(streams, -1, -1)
        return Belief(weight_BCG=weight_BCG, t_B=torch.zeros(streams, dtype=torch.long, device=device))

    def step(self, state: Belief, step: Step) -> tuple[Tensor, Belief]:
        m, first_B11 = self.model, step.first[:, None, None]
        weight_BCG = self._after_action(state.weight_BCG, step.prev_action.clamp_min(0), step.prev_reward)
        weight_BCG = torch.where(first_B11, m.prior_CG, weight_BCG)
        t_B = torch.where(step.first, 0, state.t_B + 1)
        if len(m.shift_steps):
            shifted_B = torch.isin(t_B, m.shift_steps)
            weight_BCG = torch.where(shifted_B[:, None, None], weight_BCG @ m.kernel_GG, weight_BCG)
        weight_BCG = self._after_observation(weight_BCG, step.obs)
        mass_BA = weight_BCG.flatten(1) @ m.label_CGA.flatten(0, 1)
        return (mass_BA / mass_BA.sum(1, keepdim=True)).log(), Belief(weight_BCG=weight_BCG, t_B=t_B)

    def _after_action(self, weight_BCG: Tensor, action_B: Tensor, reward_B: Tensor) -> Tensor:
        """Remove entries that contradict the reward, then move every cell's weight along the action."""
        m, (streams, cells, _) = self.model, weight_BCG.shape
        explained_BCG = (m.reward_ACG[action_B] - reward_B[:, None, None]).abs() < REWARD_TOLERANCE
        weight_BCG = torch.where(explained_BCG, weight_BCG, 0.0)
        row_BC = m.next_AC[action_B] + cells * torch.arange(streams, device=action_B.device)[:, None]
        moved = torch.zeros_like(weight_BCG).flatten(0, 1)
        return moved.index_add_(0, row_BC.flatten(), weight_BCG.flatten(0, 1)).view_as(weight_BCG)

    def _after_observation(self, weight_BCG: Tensor, obs_BO: Tensor) -> Tensor:
        """Multiply by the likelihood of wall mask and cue, and scale the weights to a sum in [0.5, 1)."""
        walls_BO, cue_B = obs_BO[:, :-1], obs_BO[:, -1]
        fits_BC = (self.model.walls_CO == walls_BO[:, None]).all(-1)
        weight_BCG = weight_BCG * self.model.cue_2CG[(cue_B > 0.5).long()] * fits_BC[:, :, None]
        total_B11 = weight_BCG.sum((1, 2), keepdim=True)
        return weight_BCG * (torch.frexp(total_B11).mantissa / total_B11)  # a power of two
