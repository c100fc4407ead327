"""IQL: implicit Q-learning on the shared backbone, from logged transitions.

Source: Kostrikov, Nair and Levine, "Offline Reinforcement Learning with Implicit Q-Learning" (ICLR 2022).

One causal Transformer over observations gives h_t; on it lie a value V, twin action values Q¹ and Q², and the policy π
that acts. Q̂ = min(Q¹, Q²) of the target network, a slow average of backbone and twins. With the logged a_t and r_t

  value    L_τ(Q̂(h_t, a_t) - V(h_t)),   L_τ(u) = |τ - 1(u < 0)| u²      V becomes a high expectile of Q over the log
  critic   Σ_i (r_t + γ V(h_{t+1}) - Q^i(h_t, a_t))²                       no action is asked that the log lacks
  policy   min(exp(β (Q̂(h_t, a_t) - V(h_t))), clip) · -log π(a_t | h_t)    the log, weighted by its advantage

Rewards and actions are in the losses alone: what decides sees observations.

Differences from the paper
  1. ids, so π is a softmax, and one pass gives Q of every action        test_weights_are_refused
  2. V, Q and π share a causal backbone over the episode, and one Adam
     step serves all three; in the paper each has networks of its own    test_loss_is_finite_and_reaches_every_parameter
  3. the log is played by an expert with a share of random actions, and
     goes on as long as training does                                    test_iql_learns_from_logs_alone
  4. an end is an end: only r counts there; a last step that is none has
     no next value, and is left out of the critic's loss                 test_what_ends_has_no_future
  5. the advantage is that of V before the step, not after it            test_losses_equal_the_equations
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from uat.acting import Behaviour
from uat.clock import blank
from uat.episode import Batch, Losses, masked_sum
from uat.methods.policy import Phase
from uat.methods.vanilla import Vanilla, VanillaConfig
from uat.nn.blocks import Transformer
from uat.settings import Amount, Between, Inner, Share
from uat.spec import Discrete, Spec


@dataclass(frozen=True, kw_only=True, slots=True)
class IQLConfig(VanillaConfig):
    expectile: Inner = 0.7
    """Which expectile τ of the action values V is: 0.5 is their mean under the log, near 1 their best."""
    temperature: Amount = 3.0
    """The β of the weights exp(β advantage): 0 clones the log, the larger the greedier."""
    largest_weight: Amount = 100.0
    """Where those weights are clipped."""
    discount: Share = 0.99
    """What a reward one step later is worth, γ."""
    target_rate: Annotated[float, Between(0, 1, without_low=True)] = 0.005
    """How far the target network goes toward the learnt one after each step."""
    random_share: Share = 0.3
    """Share of the log's actions that are uniformly random; the others are the expert's."""


def expectile_loss(u: Tensor, expectile: float) -> Tensor:
    """L_τ(u): over draws of x, the v that makes the mean of L_τ(x - v) least is their τ-expectile."""
    return (expectile - (u < 0).to(u.dtype)).abs() * u.square()


class TwinQ(nn.Module):
    """Two values of every action, from the representation of a step."""

    def __init__(self, d_model: int, num_actions: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(d_model, num_actions), nn.Linear(d_model, num_actions)

    def forward(self, h_BTD: Tensor, action_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Both values (B, T) of these actions; of padding, those of some action."""
        index_BT1 = action_BT.clamp_min(0)[..., None]
        first_BT, second_BT = (q(h_BTD).gather(-1, index_BT1)[..., 0] for q in (self.first, self.second))
        return first_BT, second_BT


class TargetQ(nn.Module):
    """The slow copy of backbone and twins: no gradient moves it, and nothing is ever dropped in it."""

    def __init__(self, backbone: Transformer, critic: TwinQ) -> None:
        super().__init__()
        self.backbone, self.critic = copy.deepcopy(backbone), copy.deepcopy(critic)
        self.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> TargetQ:
        return super().train(False)

    def forward(self, batch: Batch, action_BT: Tensor) -> Tensor:
        """Q̂ (B, T): the lesser of the two."""
        return torch.minimum(*self.critic(self.backbone(batch.obs, start_B=batch.start), action_BT))


class IQL(Vanilla):
    """Acts as Vanilla does; learns from what others did."""

    config: IQLConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, spec: Spec, config: IQLConfig) -> None:
        super().__init__(spec, config)
        self.value = nn.Linear(config.d_model, 1)
        self.critic = TwinQ(config.d_model, spec.action.count)
        self.target = TargetQ(self.backbone, self.critic)

    @classmethod
    def refusal(cls, spec: Spec) -> str | None:
        return None if isinstance(spec.action, Discrete) else f"takes ids as actions, not {spec.action}"

    def phases(self) -> tuple[Phase, ...]:
        behaviour = Behaviour(self.config.random_share)
        return (Phase("offline", self.loss, behaviour=behaviour, after_step=self.follow),)

    def loss(self, batch: Batch) -> Losses:
        """The three losses of the paper, over logged steps."""
        happened, valid_BT, c = batch.trajectory, batch.valid, self.config
        if happened is None:
            raise ValueError("IQL learns from what happened: this batch does not say it")
        action_BT, h_BTD = blank(happened.action, valid_BT), self.features(batch)
        value_BT = self.value(h_BTD)[..., 0]
        with torch.no_grad():
            target_BT = self.target(batch, action_BT)
            weight_BT = (c.temperature * (target_BT - value_BT)).exp().clamp_max(c.largest_weight)
            wanted_BT, known_BT = self._wanted(batch, value_BT)
        errors = [(wanted_BT - q_BT).square() for q_BT in self.critic(h_BTD, action_BT)]
        return {
            "value": masked_sum(expectile_loss(target_BT - value_BT, c.expectile), valid_BT),
            "critic": masked_sum(errors[0] + errors[1], known_BT),
            "policy": masked_sum(weight_BT * self.head.nll(h_BTD, action_BT, batch.allowed), valid_BT),
        }

    def _wanted(self, batch: Batch, value_BT: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T) what Q should say, and where that is known."""
        assert batch.trajectory is not None
        done_BT, last_B1 = batch.trajectory.terminated, torch.zeros_like(value_BT[:, :1])
        future_BT = torch.cat([value_BT[:, 1:], last_B1], dim=1).masked_fill(done_BT, 0.0)
        goes_on_BT = torch.cat([batch.valid[:, 1:], last_B1.bool()], dim=1)
        earned_BT, known_BT = self.spec.clock.earned(batch.trajectory), batch.valid & (done_BT | goes_on_BT)
        if batch.trajectory.reward_known is not None:
            known_BT = known_BT & batch.trajectory.reward_known
        return earned_BT + self.config.discount * future_BT, known_BT

    def follow(self) -> None:
        """The target network goes a little of the way."""
        learnt = [*self.backbone.parameters(), *self.critic.parameters()]
        for slow, fast in zip(self.target.parameters(), learnt, strict=True):
            slow.lerp_(fast, self.config.target_rate)
