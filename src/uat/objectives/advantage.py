"""Advantage: clone logged actions, weighted by how much better than usual they were, by a critic on the same backbone.

Sources: Kostrikov, Nair and Levine, "Offline Reinforcement Learning with Implicit Q-Learning" (ICLR 2022), and for
the filter Wang et al., "Critic Regularized Regression" (NeurIPS 2020). From the representation h_t, which holds the
history before a_t and r_t, linear maps give Q(h_t, a) of every action and V(h_t). With the logged a_t and r_t

  targets   G_t = r_t + γ ((1 - λ) V(h_{t+1}) + λ G_{t+1})          constants
  critic    (G_t - Q(h_t, a_t))²
  value     L_τ(Q(h_t, a_t) - V(h_t)),  L_τ(u) = |τ - 1(u < 0)| u²   a high expectile over the actions of the log
  policy    w_t · -log π(a_t | h_t),    w_t = min(exp(β A_t), limit) or 1(A_t > 0),
            A_t = κ G_t + (1 - κ) Q(h_t, a_t) - V(h_t)

The policy's loss is divided by the sum of its weights. Q has less noise than G_t, and G_t teaches before Q has learnt
anything, so both enter. In a box there is no Q of every action, and G_t takes its place everywhere.

The best weights are those whose Q (V in a box) has the lowest squared error on the log's own discounted returns in
validation episodes. The losses cannot compare weights: their scale changes with the critic.

Differences from IQL
  1. one critic, without a target network; λ mixes rewards of the log
     into its targets, 1 being the returns of the log              test_targets_equal_a_plain_reference
  2. policy and critic share the method's own backbone             test_the_loss_reaches_every_parameter
  3. the target of a terminated step is r; a truncated episode goes
     on with the value of `final_obs`, and without it the critic
     leaves out the last step (only if γ > 0)                      test_a_cut_without_a_last_observation_is_left_out
  4. a step without a known reward is left out of the critic, and
     its advantage is that of Q alone                              test_unknown_rewards_change_nothing
  5. A_t mixes Q and returns (κ = 0 in IQL), and the policy's loss
     is divided by its weights                                     test_losses_equal_the_equations
Shapes: B episodes, T time, S the same with one more step after truncated episodes, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uat.contracts import Recording, Simulator
from uat.episode import Batch, Losses, Trajectory, masked_sum
from uat.methods.iql import expectile_loss
from uat.methods.policy import Phase, Policy
from uat.objectives.logged import LogObjective, action_nll, known_steps, logged
from uat.objectives.returns import advantages, with_column
from uat.settings import Amount, Inner, Scale, Share, check_fields
from uat.spec import Discrete


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageConfig:
    discount: Share = 0.99
    """Discount γ of a reward one step later; 0 where actions affect their own reward alone, as in most logs of offers,
    clicks and answers."""
    decay: Share = 0.5
    """Share λ of the log's own later rewards in the critic's targets: 0 trusts the critic's values, 1 the returns."""
    expectile: Inner = 0.7
    """Expectile τ of the action values that V estimates: 0.5 is their mean under the log, near 1 their maximum."""
    weighting: Literal["exponential", "positive"] = "exponential"
    """Weight of a logged action: exp(β advantage), or 1 where the advantage is positive and 0 elsewhere."""
    temperature: Amount = 10.0
    """Factor β of the weights exp(β advantage): 0 clones the log, larger values are greedier."""
    largest_weight: Scale = 100.0
    """Upper limit of the weights exp(β advantage)."""
    return_share: Share = 0.5
    """Share κ of the log's own return in the advantage of an action, beside the critic's value of it."""
    critic_weight: Scale = 10.0
    """Weight of the critic's losses beside the policy's."""

    def __post_init__(self) -> None:
        check_fields(self, "objective.")


class LogCritic(nn.Module):
    """Values of histories, and of each action after them, from the representation of a step."""

    def __init__(self, d_model: int, num_actions: int | None) -> None:
        """num_actions: None for actions that are no ids."""
        super().__init__()
        self.value = nn.Linear(d_model, 1)
        self.action_value = None if num_actions is None else nn.Linear(d_model, num_actions)
        for layer in (self.value, self.action_value):
            if layer is not None:
                nn.init.zeros_(layer.weight)
                nn.init.zeros_(layer.bias)

    def values(self, h_BTD: Tensor) -> Tensor:
        """(B, T) V(h_t)."""
        return self.value(h_BTD)[..., 0]

    def action_values(self, h_BTD: Tensor, action_BT: Tensor) -> Tensor:
        """(B, T) Q(h_t, a_t), which reads no other row of a large vocabulary; meaningless in padding."""
        assert self.action_value is not None
        id_BT = action_BT.clamp_min(0)
        return (F.embedding(id_BT, self.action_value.weight) * h_BTD).sum(-1) + self.action_value.bias[id_BT]


class Advantage(LogObjective):
    """Clone logged actions, weighted by their advantage."""

    name = "advantage"

    def __init__(self, policy: Policy, config: AdvantageConfig) -> None:
        super().__init__(policy, config)
        self.config: AdvantageConfig = config
        action, linear = policy.spec.action, policy.head.linear
        self.critic = LogCritic(linear.in_features, action.count if isinstance(action, Discrete) else None)
        self.modules = self.critic.to(linear.weight)

    @classmethod
    def unsupported_reason(
        cls, policy: Policy, worlds: Simulator[Any] | Recording, config: AdvantageConfig
    ) -> str | None:
        if reason := super().unsupported_reason(policy, worlds, config):
            return reason
        if policy.spec.reward_lag < 1:
            return f"policies see a step's reward before its action (reward_lag={policy.spec.reward_lag})"
        return None

    def phases(self) -> tuple[Phase, ...]:
        return (Phase(self.name, self.loss, judged_by="loss", selects=self.error),)

    def loss(self, batch: Batch) -> Losses:
        c, episodes = self.config, logged(batch)
        h_BSD, value_BS = self._read(batch)
        h_BTD, value_BT = h_BSD[:, : episodes.valid.shape[1]], value_BS[:, : episodes.valid.shape[1]]
        target_BT, known_BT = self.targets(episodes, value_BS.detach(), c.decay)
        nll_BT, counts_BT = action_nll(self.policy, h_BTD, episodes)
        losses: Losses = {}
        if self.critic.action_value is None:
            gain_BT = mixed_BT = target_BT - value_BT
            counts_BT, valued_BT = counts_BT & known_BT, known_BT
        else:
            worth_BT, valued_BT = self.critic.action_values(h_BTD, episodes.action), episodes.valid
            losses["critic"] = masked_sum(c.critic_weight * (target_BT - worth_BT).square(), known_BT)
            gain_BT = worth_BT.detach() - value_BT
            mixed_BT = torch.where(known_BT, torch.lerp(gain_BT, target_BT - value_BT, c.return_share), gain_BT)
        losses["value"] = masked_sum(c.critic_weight * expectile_loss(gain_BT, c.expectile), valued_BT)
        weight_BT = self.weights(mixed_BT.detach())
        policy = (masked_sum(weight_BT * nll_BT, counts_BT)[0], masked_sum(weight_BT, counts_BT)[0])
        return {"policy": policy, **losses}

    def error(self, batch: Batch) -> Losses:
        """Return the critic's squared error on the log's own discounted returns, by which weights are selected."""
        episodes = logged(batch)
        h_BSD, value_BS = self._read(batch)
        return_BT, known_BT = self.targets(episodes, value_BS, decay=1.0)
        worth_BT = value_BS[:, : episodes.valid.shape[1]]
        if self.critic.action_value is not None:
            worth_BT = self.critic.action_values(h_BSD[:, : episodes.valid.shape[1]], episodes.action)
        return {"error": masked_sum((return_BT - worth_BT).square(), known_BT)}

    def weights(self, gain: Tensor) -> Tensor:
        """Return the weight of an action, given its advantage."""
        if self.config.weighting == "positive":
            return (gain > 0).to(gain.dtype)
        return (self.config.temperature * gain).exp().clamp_max(self.config.largest_weight)

    def targets(self, episodes: Trajectory, value_BS: Tensor, decay: float) -> tuple[Tensor, Tensor]:
        """Return the critic's targets G (B, T), and a mask of the steps where they are known."""
        c, valid_BT = self.config, episodes.valid
        known_BT = known_steps(episodes)
        if c.discount > 0:
            cut = episodes.truncated if episodes.final_obs is not None else None
            continues_BT = torch.cat([valid_BT[:, 1:], torch.zeros_like(valid_BT[:, :1])], dim=1)
            followed_BT = continues_BT | episodes.terminated
            known_BT = known_BT & (followed_BT if cut is None else followed_BT | cut)
        earned_BT = self.policy.spec.clock.earned(episodes)
        gain_BT = advantages(earned_BT, value_BS, episodes, discount=c.discount, decay=decay, known_BT=known_BT)
        return gain_BT + value_BS[:, : valid_BT.shape[1]], known_BT

    def _read(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return h (B, S, D) and V (B, S): one more step follows truncated episodes with a known last observation."""
        episodes, clock = logged(batch), self.policy.spec.clock
        if episodes.truncated is not None and episodes.final_obs is not None and self.config.discount > 0:
            seen = replace(episodes, facts={name: episodes.facts[name] for name in clock.facts})
            batch = clock.batch(with_column(seen, episodes.truncated, episodes.final_obs))
        h_BSD = self.policy.features(batch)
        return h_BSD, self.critic.values(h_BSD)
