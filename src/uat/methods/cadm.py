"""CaDM: a context-aware model of the world, learnt from logged transitions, and a plan under it at every step.

Source: Lee, Seo, Lee, Lee and Shin, "Context-aware Dynamics Model for Generalization in Model-Based Reinforcement
Learning" (ICML 2020), with the ensemble of its PE-TS variant.

The last K transitions become a context z_t = g(τ_t); ensembles predict with it, for each of the next J steps i,

  forward    [o_{i+1} - o_i; r_i]  from  (o_i, a_i, z_t)
  backward   o_i - o_{i+1}         from  (o_{i+1}, a_i, z_t)         with weight β

in units of what is usual, as densities whose likelihood is maximised, so that z_t must hold what stays the same: the
regime. To act, every plan of h actions is played in the forward model; the logit of an action is the return of the best
plan that begins with it.

Differences from the paper
  1. the reward is predicted, and is part of each transition of the
     context; in the paper its function is known                           test_planning_finds_the_best_first_action
  2. all A^h plans of a short horizon are compared; in the paper the
     cross-entropy method searches 30 steps of continuous actions          test_the_plan_is_the_best_of_all_plans
  3. a prediction's variance belongs to the output and is that of the
     batch; in the paper networks predict it                               test_outputs_of_any_scale_weigh_alike
  4. a member's plan follows what it predicts, and a plan's return is the mean
     over members; in the paper particles sample                           test_the_plan_is_the_best_of_all_plans
  5. one context encoder for all members, all members learn from the same
     batch, and only their first weights differ                            test_members_differ
  6. numbers are standardised by their mean distance from the mean, in the
     paper by their deviation, which a rare bonus would decide; and the
     reward's density is Laplace's, for the same reason                    test_a_rare_bonus_hides_nothing
  7. the log is played by an expert with a share of random actions; in the
     paper by the planner itself, anew after each fit                      test_cadm_learns_from_logs_alone
  8. ends are not predicted: a plan never ends early                       test_the_plan_is_the_best_of_all_plans
Shapes: B batch, T time, O observation, A actions, C context, K transitions of it, F width of one, J steps ahead,
M members, N plans or rows.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uat.acting import Behaviour
from uat.clock import blank
from uat.contracts import Memory
from uat.episode import Batch, Losses, Step, masked_sum
from uat.methods.policy import Phase, Policy
from uat.nn.ensemble import Ensemble, Units, gaussian_nll, laplace_nll
from uat.settings import MOST_WIDTH, Amount, Between, Layers, Share, Steps, Width, check_fields
from uat.spec import Assets, Discrete, Items, Named, Observations, Spec, Vector

MOST_PLANS = 20_000
"""More are not compared at every step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaDMConfig:
    d_context: Width = 10
    """Width of the context."""
    context_steps: Steps = 10
    """Transitions that the context is made of, K."""
    d_encoder: Annotated[int, Between(4, MOST_WIDTH)] = 256
    """Width of the context encoder's first hidden layer; the next two have a half and a quarter of it."""
    members: Layers = 5
    """Networks in each ensemble."""
    d_hidden: Width = 200
    """Hidden width of each dynamics network."""
    num_hidden: Layers = 4
    """Hidden layers of each dynamics network."""
    future_steps: Steps = 10
    """Steps ahead that one context must serve, J; the paper's M."""
    backward_weight: Amount = 0.5
    """Weight β of the backward prediction's loss."""
    plan_steps: Steps = 3
    """Actions of a plan, h; all plans of this length are compared."""
    random_share: Share = 0.3
    """Share of the log's actions that are uniformly random; the others are the expert's."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(slots=True)
class CaDMState(Memory):
    recent_BKF: Tensor
    """The last transitions of each stream, the newest last; zeros before its first."""
    obs_BO: Tensor
    """What each stream saw in the step before."""


class CaDM(Policy):
    sees = frozenset({"action", "reward"})
    revision = 2
    config: CaDMConfig

    def __init__(self, spec: Spec, config: CaDMConfig) -> None:
        super().__init__(spec, config)
        c, self.num_actions = config, spec.action.count
        if self.num_actions**c.plan_steps > MOST_PLANS:
            raise ValueError(
                f"plan_steps={c.plan_steps} of {self.num_actions} actions are {self.num_actions**c.plan_steps} plans, "
                f"and {MOST_PLANS} are the most"
            )
        self.obs_axes, self.d_obs = _shape(spec.obs)
        self.d_transition = 2 * self.d_obs + self.num_actions + 1
        d_in = self.d_obs + self.num_actions + c.d_context
        widths = (c.context_steps * self.d_transition, c.d_encoder, c.d_encoder // 2, c.d_encoder // 4)
        layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.obs_units, self.moved_units, self.reward_units = Units(self.d_obs), Units(self.d_obs), Units(1)
        self.encoder = nn.Sequential(*layers, nn.Linear(widths[-1], c.d_context))
        self.forwards = Ensemble(c.members, d_in, c.d_hidden, c.num_hidden, self.d_obs + 1)
        self.backwards = Ensemble(c.members, d_in, c.d_hidden, c.num_hidden, self.d_obs)
        self.register_buffer("onehot_AA", torch.eye(self.num_actions), persistent=False)

    onehot_AA: Tensor

    @classmethod
    def refusal(cls, spec: Spec) -> str | None:
        if not isinstance(spec.action, Discrete):
            return f"takes ids as actions, not {spec.action}"
        return f"predicts numbers, and observations are {spec.obs}" if isinstance(spec.obs, Items | Named) else None

    # ------------------------------------------------------------ context

    def transition(self, before: Tensor, action: Tensor, reward: Tensor, after: Tensor) -> Tensor:
        """[o; a; r; o' - o] (..., F), the action as its one-hot vector, all else in its units."""
        told, moved = self.reward_units(reward[..., None].to(before.dtype)), self.moved_units(after - before)
        return torch.cat([self.obs_units(before), self.onehot(action), told, moved], dim=-1)

    def onehot(self, action: Tensor) -> Tensor:
        """(..., A); no action is the zero vector."""
        return self.onehot_AA[action.clamp_min(0)] * (action >= 0)[..., None]

    def flat(self, obs: Tensor) -> Tensor:
        """(..., O)."""
        return obs.flatten(-self.obs_axes).to(self.onehot_AA.dtype)

    def features(self, batch: Batch) -> Tensor:
        """The context z (B, T, C) of every step."""
        obs_BTO = self.flat(batch.obs)
        before_BTO = F.pad(obs_BTO, (0, 0, 1, 0))[:, :-1]
        found_BTF = self.transition(before_BTO, batch.prev_action, batch.prev_reward, obs_BTO)
        found_BTF = F.pad(found_BTF[:, 1:], (0, 0, self.config.context_steps, 0))  # nothing came before the first step
        recent_BTFK = found_BTF.unfold(1, self.config.context_steps, 1)
        return self.encoder(recent_BTFK.transpose(-1, -2).flatten(-2))

    # ------------------------------------------------------------ learning

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("dynamics", self.loss, behaviour=Behaviour(self.config.random_share)),)

    def loss(self, batch: Batch) -> Losses:
        """How unlikely the next J steps are under the context of each step, forwards and backwards."""
        happened = batch.trajectory
        if happened is None:
            raise ValueError("CaDM learns from what happened: this batch does not say it")
        obs_BTO, valid_BT = self.flat(batch.obs), batch.valid
        goes_on_BT = valid_BT & F.pad(valid_BT[:, 1:], (0, 1))
        after_BTO = F.pad(obs_BTO[:, 1:], (0, 0, 0, 1))
        reward_BT1 = self.spec.clock.earned(happened)[..., None].to(obs_BTO.dtype)
        if self.training:
            self.obs_units.see(obs_BTO.flatten(0, 1), valid_BT.flatten())
            self.moved_units.see((after_BTO - obs_BTO).flatten(0, 1), goes_on_BT.flatten())
            self.reward_units.see(reward_BT1.flatten(0, 1), valid_BT.flatten())
        steps = {
            "before": obs_BTO,
            "after": after_BTO,
            "action": self.onehot(blank(happened.action, valid_BT)),
            "moved": self.moved_units(after_BTO - obs_BTO),
            "reward": self.reward_units(reward_BT1),
        }
        ahead = {name: self._ahead(x).flatten(0, 2) for name, x in steps.items()}  # (N, ...), N = B T J
        context_BTC = self.features(batch)
        context_NC = context_BTC[:, :, None].expand(-1, -1, self.config.future_steps, -1).flatten(0, 2)
        known_N, real_N = (self._ahead(x[..., None]).flatten() for x in (goes_on_BT, valid_BT))
        told_MND = self.asked(self.forwards, ahead["before"], ahead["action"], context_NC)
        back_MNO = self.asked(self.backwards, ahead["after"], ahead["action"], context_NC)
        forward_N = gaussian_nll(told_MND[..., :-1], ahead["moved"], known_N)
        reward_N = laplace_nll(told_MND[..., -1:], ahead["reward"], real_N)
        backward_N = self.config.backward_weight * gaussian_nll(back_MNO, -ahead["moved"], known_N)
        return {
            "forward": masked_sum(forward_N, known_N),
            "reward": masked_sum(reward_N, real_N),
            "backward": masked_sum(backward_N, known_N),
        }

    def asked(self, model: nn.Module, obs: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """What a model says of this observation, action and context; in units, as it was taught."""
        return model(torch.cat([self.obs_units(obs), action, context], dim=-1))

    def _ahead(self, x_BTX: Tensor) -> Tensor:
        """(B, T, J, X) what x is at t and the J - 1 steps after it; zero, or False, after the last."""
        padded = F.pad(x_BTX, (0, 0, 0, self.config.future_steps - 1))
        return padded.unfold(1, self.config.future_steps, 1).transpose(-1, -2)

    # ------------------------------------------------------------ planning

    def plan(self, obs_BO: Tensor, context_BC: Tensor) -> Tensor:
        """(B, A) the return of the best plan that begins with each action."""
        members, streams = self.config.members, len(obs_BO)
        obs_MBNO = obs_BO[None, :, None].expand(members, -1, -1, -1)
        return_MBN = obs_BO.new_zeros(members, streams, 1)
        for _ in range(self.config.plan_steps):
            shape = (members, streams, obs_MBNO.shape[2], self.num_actions)
            before = obs_MBNO[:, :, :, None].expand(*shape, -1)
            context = context_BC[None, :, None, None].expand(*shape, -1)
            asked = (x.flatten(1, 3) for x in (before, self.onehot_AA.expand(*shape, -1), context))
            told = self.asked(self.forwards, *asked).view(*shape, -1)
            obs_MBNO = (before + self.moved_units.back(told[..., :-1])).flatten(2, 3)
            return_MBN = (return_MBN[..., None] + self.reward_units.back(told[..., -1:])[..., 0]).flatten(2, 3)
        return return_MBN.mean(0).view(streams, self.num_actions, -1).amax(-1)

    def logits(self, batch: Batch) -> Tensor:
        obs_NO, context_NC = self.flat(batch.obs).flatten(0, 1), self.features(batch).flatten(0, 1)
        return _masked(self.plan(obs_NO, context_NC).view(*batch.valid.shape, -1), batch.allowed)

    @property
    def endless(self) -> bool:
        """The context is that of the last `context_steps` transitions."""
        return True

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> CaDMState:
        zeros = self.onehot_AA.new_zeros
        return CaDMState(zeros(streams, self.config.context_steps, self.d_transition), zeros(streams, self.d_obs))

    def step(self, state: CaDMState, step: Step) -> tuple[Tensor, CaDMState]:
        obs_BO = self.flat(step.obs)
        found_BF = self.transition(state.obs_BO, step.prev_action, step.prev_reward, obs_BO)
        recent_BKF = torch.cat([state.recent_BKF[:, 1:], found_BF[:, None]], dim=1)
        recent_BKF = recent_BKF.masked_fill(step.first[:, None, None], 0.0)
        scores_BA = self.plan(obs_BO, self.encoder(recent_BKF.flatten(1)))
        return _masked(scores_BA, step.allowed), CaDMState(recent_BKF, obs_BO)


def _shape(obs: Observations) -> tuple[int, int]:
    """Axes of one observation, and how many numbers it is."""
    match obs:
        case Vector(width):
            return 1, width
        case Assets(count, features):
            return 2, count * features
        case _:
            raise ValueError(f"{obs} are no numbers")


def _masked(logits: Tensor, allowed: Tensor | None) -> Tensor:
    return logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
