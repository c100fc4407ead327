"""IQL: implicit Q-learning on the shared backbone, from logged transitions.

Source: Kostrikov, Nair and Levine, "Offline Reinforcement Learning with Implicit Q-Learning" (ICLR 2022).

One causal Transformer over observations gives h_t, from which heads compute a value V, twin action values Q¹ and Q²,
and the policy π that acts. Q̂ = min(Q¹, Q²) of the target network, a slow average of backbone and twins.
With the logged a_t and r_t

  value    L_τ(Q̂(h_t, a_t) - V(h_t)),   L_τ(u) = |τ - 1(u < 0)| u²      V estimates a high expectile of Q over the log
  critic   Σ_i (r_t + γ V(h_{t+1}) - Q^i(h_t, a_t))²                       uses only actions of the log
  policy   min(exp(β (Q̂(h_t, a_t) - V(h_t))), clip) · -log π(a_t | h_t)    cloning, weighted by the advantage

Rewards and actions enter only the losses; the policy sees observations only.

Differences from the paper
  1. ids, so π is a softmax, and one pass gives Q of every action        test_weights_are_refused
  2. V, Q and π share a causal backbone over the episode, and one Adam
     step serves all three; in the paper each has networks of its own    test_loss_is_finite_and_reaches_every_parameter
  3. the log is played by an expert with a share of random actions,
     single or held for some steps, and is produced during training      test_iql_learns_from_logs_alone
  4. the target of a terminal step is r; a truncated last step has no
     next value, and is left out of the critic's loss                    test_what_ends_has_no_future
  5. the advantage uses V before the optimizer step, not after it        test_losses_equal_the_equations
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
from uat.settings import Amount, Between, Inner, Share, Steps
from uat.spec import Discrete, Spec


@dataclass(frozen=True, kw_only=True, slots=True)
class IQLConfig(VanillaConfig):
    expectile: Inner = 0.7
    """Expectile τ of the action values that V estimates: 0.5 is their mean under the log, near 1 their maximum."""
    temperature: Amount = 3.0
    """Factor β of the weights exp(β advantage): 0 clones the log, larger values are greedier."""
    largest_weight: Amount = 100.0
    """Upper limit of the weights exp(β advantage)."""
    discount: Share = 0.99
    """Discount γ of a reward one step later."""
    target_rate: Annotated[float, Between(0, 1, without_low=True)] = 0.005
    """Share by which the target network moves toward the trained network after each step."""
    random_share: Share = 0.3
    """Share of the log's actions that are uniformly random; the others are the expert's."""
    random_steps: Steps = 1
    """Steps for which the log holds a random action; 1: each step draws its own."""


def expectile_loss(u: Tensor, expectile: float) -> Tensor:
    """Return L_τ(u). The v that minimises the mean of L_τ(x - v) over x is the τ-expectile of x."""
    return (expectile - (u < 0).to(u.dtype)).abs() * u.square()


class TwinQ(nn.Module):
    """Two estimates of the value of every action, from the representation of a step."""

    def __init__(self, d_model: int, num_actions: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(d_model, num_actions), nn.Linear(d_model, num_actions)

    def forward(self, h_BTD: Tensor, action_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return both values (B, T) of these actions; values in padding are meaningless."""
        index_BT1 = action_BT.clamp_min(0)[..., None]
        first_BT, second_BT = (q(h_BTD).gather(-1, index_BT1)[..., 0] for q in (self.first, self.second))
        return first_BT, second_BT


class TargetQ(nn.Module):
    """Slowly moving copy of backbone and twin critics, without gradients and without dropout."""

    def __init__(self, backbone: Transformer, critic: TwinQ) -> None:
        super().__init__()
        self.backbone, self.critic = copy.deepcopy(backbone), copy.deepcopy(critic)
        self.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> TargetQ:
        return super().train(False)

    def forward(self, batch: Batch, action_BT: Tensor) -> Tensor:
        """Return Q̂ (B, T), the minimum of both values."""
        return torch.minimum(*self.critic(self.backbone(batch.obs, start_B=batch.start), action_BT))


class IQL(Vanilla):
    """Acts like Vanilla; learns from a log of other policies' actions."""

    config: IQLConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, spec: Spec, config: IQLConfig) -> None:
        super().__init__(spec, config)
        self.value = nn.Linear(config.d_model, 1)
        self.critic = TwinQ(config.d_model, spec.action.count)
        self.target = TargetQ(self.backbone, self.critic)

    @classmethod
    def unsupported_reason(cls, spec: Spec) -> str | None:
        return None if isinstance(spec.action, Discrete) else f"takes ids as actions, not {spec.action}"

    @property
    def observation_encoders(self) -> list[nn.Module]:
        return [self.backbone.encoder, self.target.backbone.encoder]

    def phases(self) -> tuple[Phase, ...]:
        behaviour = Behaviour(self.config.random_share, self.config.random_steps)
        return (Phase("offline", self.loss, behaviour=behaviour, after_step=self.follow),)

    def loss(self, batch: Batch) -> Losses:
        """Return the three losses of the paper over logged steps."""
        trajectory, valid_BT, c = batch.trajectory, batch.valid, self.config
        if trajectory is None:
            raise ValueError("IQL learns from logged actions and rewards, and this batch has no trajectory")
        action_BT, h_BTD = blank(trajectory.action, valid_BT), self.features(batch)
        value_BT = self.value(h_BTD)[..., 0]
        with torch.no_grad():
            target_BT = self.target(batch, action_BT)
            weight_BT = (c.temperature * (target_BT - value_BT)).exp().clamp_max(c.largest_weight)
            return_BT, known_BT = self._critic_target(batch, value_BT)
        errors = [(return_BT - q_BT).square() for q_BT in self.critic(h_BTD, action_BT)]
        return {
            "value": masked_sum(expectile_loss(target_BT - value_BT, c.expectile), valid_BT),
            "critic": masked_sum(errors[0] + errors[1], known_BT),
            "policy": masked_sum(weight_BT * self.head.nll(h_BTD, action_BT, batch.allowed), valid_BT),
        }

    def _critic_target(self, batch: Batch, value_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return the target (B, T) of Q, and a mask of the steps where it is known."""
        assert batch.trajectory is not None
        done_BT, last_B1 = batch.trajectory.terminated, torch.zeros_like(value_BT[:, :1])
        future_BT = torch.cat([value_BT[:, 1:], last_B1], dim=1).masked_fill(done_BT, 0.0)
        continues_BT = torch.cat([batch.valid[:, 1:], last_B1.bool()], dim=1)
        earned_BT, known_BT = self.spec.clock.earned(batch.trajectory), batch.valid & (done_BT | continues_BT)
        if batch.trajectory.reward_known is not None:
            known_BT = known_BT & batch.trajectory.reward_known
        return earned_BT + self.config.discount * future_BT, known_BT

    def follow(self) -> None:
        """Move the target network toward the trained network by `target_rate`."""
        trained = [*self.backbone.parameters(), *self.critic.parameters()]
        for slow, fast in zip(self.target.parameters(), trained, strict=True):
            slow.lerp_(fast, self.config.target_rate)
