"""CaDM: a context-aware dynamics model, learned from logged transitions, and planning with it at every step.

Source: Lee, Seo, Lee, Lee and Shin, "Context-aware Dynamics Model for Generalization in Model-Based Reinforcement
Learning" (ICML 2020), with the ensemble of its PE-TS variant.

The last K transitions become a context z_t = g(τ_t); ensembles predict with it, for each of the next J steps i,

  forward    [o_{i+1} - o_i; r_i]  from  (o_i, a_i, z_t)
  backward   o_i - o_{i+1}         from  (o_{i+1}, a_i, z_t)         with weight β

in standardised units, by maximum likelihood. One context serves several steps, so it must encode what stays the same:
the regime. To act, every plan of h actions is simulated in the forward model; the logit of an action is the return of
the best plan that begins with it.

Differences from the paper
  1. the reward is predicted, and is part of each transition of the
     context; in the paper its function is known                           test_planning_finds_the_best_first_action
  2. all A^h plans of a short horizon are compared; in the paper the
     cross-entropy method searches 30 steps of continuous actions          test_the_plan_is_the_best_of_all_plans
  3. each output has one variance, estimated from the batch;
     in the paper networks predict it                                      test_outputs_of_any_scale_weigh_alike
  4. each member simulates plans with its own mean predictions, and returns
     are averaged over members; the paper samples particles                test_the_plan_is_the_best_of_all_plans
  5. one context encoder for all members, all members learn from the same
     batch, and only their first weights differ                            test_members_differ
  6. numbers are standardised by their mean distance from the mean, in the
     paper by their deviation, which a rare bonus would dominate; the
     reward's density is a Laplace density for the same reason             test_a_rare_bonus_hides_nothing
  7. the log is played by an expert with a share of random actions; in the
     paper by the planner itself, after each fit of the model              test_cadm_learns_from_logs_alone
  8. terminal steps are not predicted: a plan never ends early             test_the_plan_is_the_best_of_all_plans
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
"""Limit of the plans that are compared at every step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaDMConfig:
    d_context: Width = 10
    """Width of the context."""
    context_steps: Steps = 10
    """Past transitions in the context, K."""
    d_encoder: Annotated[int, Between(4, MOST_WIDTH)] = 256
    """Width of the context encoder's first hidden layer; the next two have a half and a quarter of it."""
    members: Layers = 5
    """Networks in each ensemble."""
    d_hidden: Width = 200
    """Hidden width of each dynamics network."""
    num_hidden: Layers = 4
    """Hidden layers of each dynamics network."""
    future_steps: Steps = 10
    """Steps ahead that the model predicts from one context, J (M in the paper)."""
    backward_weight: Amount = 0.5
    """Weight β of the backward prediction's loss."""
    plan_steps: Steps = 3
    """Actions in a plan, h; all plans of this length are compared."""
    random_share: Share = 0.3
    """Share of the log's actions that are uniformly random; the others are the expert's."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(slots=True)
class CaDMState(Memory):
    recent_BKF: Tensor
    """Last transitions of each stream, newest last; zeros before the first transition."""
    obs_BO: Tensor
    """Observation of each stream in the step before."""


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
                f"and at most {MOST_PLANS} are supported: lower plan_steps"
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
    def unsupported_reason(cls, spec: Spec) -> str | None:
        if not isinstance(spec.action, Discrete):
            return f"takes ids as actions, not {spec.action}"
        return f"predicts numeric observations, not {spec.obs}" if isinstance(spec.obs, Items | Named) else None

    # ------------------------------------------------------------ context

    def transition(self, before: Tensor, action: Tensor, reward: Tensor, after: Tensor) -> Tensor:
        """Return [o; a; r; o' - o] (..., F), with the action as a one-hot vector and the rest standardised."""
        reward_unit, moved = self.reward_units(reward[..., None].to(before.dtype)), self.moved_units(after - before)
        return torch.cat([self.obs_units(before), self.onehot(action), reward_unit, moved], dim=-1)

    def onehot(self, action: Tensor) -> Tensor:
        """Return one-hot vectors (..., A); "no action" gives zeros."""
        return self.onehot_AA[action.clamp_min(0)] * (action >= 0)[..., None]

    def flat(self, obs: Tensor) -> Tensor:
        """Flatten observations to (..., O)."""
        return obs.flatten(-self.obs_axes).to(self.onehot_AA.dtype)

    def features(self, batch: Batch) -> Tensor:
        """Return the context z (B, T, C) of every step."""
        obs_BTO = self.flat(batch.obs)
        before_BTO = F.pad(obs_BTO, (0, 0, 1, 0))[:, :-1]
        transition_BTF = self.transition(before_BTO, batch.prev_action, batch.prev_reward, obs_BTO)
        transition_BTF = F.pad(
            transition_BTF[:, 1:], (0, 0, self.config.context_steps, 0)
        )  # zeros before the first step
        recent_BTFK = transition_BTF.unfold(1, self.config.context_steps, 1)
        return self.encoder(recent_BTFK.transpose(-1, -2).flatten(-2))

    # ------------------------------------------------------------ learning

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("dynamics", self.loss, behaviour=Behaviour(self.config.random_share)),)

    def loss(self, batch: Batch) -> Losses:
        """Return the negative log-likelihoods of the next J steps given each step's context, forwards and backwards."""
        trajectory = batch.trajectory
        if trajectory is None:
            raise ValueError("CaDM learns from logged actions and rewards, and this batch has no trajectory")
        obs_BTO, valid_BT = self.flat(batch.obs), batch.valid
        continues_BT = valid_BT & F.pad(valid_BT[:, 1:], (0, 1))
        after_BTO = F.pad(obs_BTO[:, 1:], (0, 0, 0, 1))
        reward_BT1 = self.spec.clock.earned(trajectory)[..., None].to(obs_BTO.dtype)
        if self.training:
            self.obs_units.see(obs_BTO.flatten(0, 1), valid_BT.flatten())
            self.moved_units.see((after_BTO - obs_BTO).flatten(0, 1), continues_BT.flatten())
            self.reward_units.see(reward_BT1.flatten(0, 1), valid_BT.flatten())
        steps = {
            "before": obs_BTO,
            "after": after_BTO,
            "action": self.onehot(blank(trajectory.action, valid_BT)),
            "moved": self.moved_units(after_BTO - obs_BTO),
            "reward": self.reward_units(reward_BT1),
        }
        ahead = {name: self._ahead(x).flatten(0, 2) for name, x in steps.items()}  # (N, ...), N = B T J
        context_BTC = self.features(batch)
        context_NC = context_BTC[:, :, None].expand(-1, -1, self.config.future_steps, -1).flatten(0, 2)
        known_N, real_N = (self._ahead(x[..., None]).flatten() for x in (continues_BT, valid_BT))
        forward_MND = self.predict(self.forwards, ahead["before"], ahead["action"], context_NC)
        backward_MNO = self.predict(self.backwards, ahead["after"], ahead["action"], context_NC)
        forward_N = gaussian_nll(forward_MND[..., :-1], ahead["moved"], known_N)
        reward_N = laplace_nll(forward_MND[..., -1:], ahead["reward"], real_N)
        backward_N = self.config.backward_weight * gaussian_nll(backward_MNO, -ahead["moved"], known_N)
        return {
            "forward": masked_sum(forward_N, known_N),
            "reward": masked_sum(reward_N, real_N),
            "backward": masked_sum(backward_N, known_N),
        }

    def predict(self, model: nn.Module, obs: Tensor, action: Tensor, context: Tensor) -> Tensor:
        """Return a model's predictions for these observations, actions and contexts, in standardised units."""
        return model(torch.cat([self.obs_units(obs), action, context], dim=-1))

    def _ahead(self, x_BTX: Tensor) -> Tensor:
        """Return the values (B, T, J, X) of x at t and the J - 1 steps after it; zero or False past the end."""
        padded = F.pad(x_BTX, (0, 0, 0, self.config.future_steps - 1))
        return padded.unfold(1, self.config.future_steps, 1).transpose(-1, -2)

    # ------------------------------------------------------------ planning

    def plan(self, obs_BO: Tensor, context_BC: Tensor) -> Tensor:
        """Return, for each action, the return (B, A) of the best plan that begins with it."""
        members, streams = self.config.members, len(obs_BO)
        obs_MBNO = obs_BO[None, :, None].expand(members, -1, -1, -1)
        return_MBN = obs_BO.new_zeros(members, streams, 1)
        for _ in range(self.config.plan_steps):
            shape = (members, streams, obs_MBNO.shape[2], self.num_actions)
            before = obs_MBNO[:, :, :, None].expand(*shape, -1)
            context = context_BC[None, :, None, None].expand(*shape, -1)
            inputs = (x.flatten(1, 3) for x in (before, self.onehot_AA.expand(*shape, -1), context))
            predicted = self.predict(self.forwards, *inputs).view(*shape, -1)
            obs_MBNO = (before + self.moved_units.back(predicted[..., :-1])).flatten(2, 3)
            return_MBN = (return_MBN[..., None] + self.reward_units.back(predicted[..., -1:])[..., 0]).flatten(2, 3)
        return return_MBN.mean(0).view(streams, self.num_actions, -1).amax(-1)

    def logits(self, batch: Batch) -> Tensor:
        obs_NO, context_NC = self.flat(batch.obs).flatten(0, 1), self.features(batch).flatten(0, 1)
        return _masked(self.plan(obs_NO, context_NC).view(*batch.valid.shape, -1), batch.allowed)

    @property
    def endless(self) -> bool:
        """True: the context depends only on the last `context_steps` transitions."""
        return True

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> CaDMState:
        zeros = self.onehot_AA.new_zeros
        return CaDMState(zeros(streams, self.config.context_steps, self.d_transition), zeros(streams, self.d_obs))

    def step(self, state: CaDMState, step: Step) -> tuple[Tensor, CaDMState]:
        obs_BO = self.flat(step.obs)
        transition_BF = self.transition(state.obs_BO, step.prev_action, step.prev_reward, obs_BO)
        recent_BKF = torch.cat([state.recent_BKF[:, 1:], transition_BF[:, None]], dim=1)
        recent_BKF = recent_BKF.masked_fill(step.first[:, None, None], 0.0)
        scores_BA = self.plan(obs_BO, self.encoder(recent_BKF.flatten(1)))
        return _masked(scores_BA, step.allowed), CaDMState(recent_BKF, obs_BO)


def _shape(obs: Observations) -> tuple[int, int]:
    """Number of axes and of numbers of one observation."""
    match obs:
        case Vector(width):
            return 1, width
        case Assets(count, features):
            return 2, count * features
        case _:
            raise ValueError(f"observations {obs} are not numeric")


def _masked(logits: Tensor, allowed: Tensor | None) -> Tensor:
    return logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
