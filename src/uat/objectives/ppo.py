"""PPO: learn from rewards alone, by several clipped updates on the episodes of each rollout.

Source: Schulman et al., "Proximal Policy Optimization Algorithms" (2017), with advantages after Schulman et al.,
"High-Dimensional Continuous Control Using Generalized Advantage Estimation" (ICLR 2016).

  prepare   one parallel pass in evaluation mode gives log π_old(a_t), V_t, V after truncated episodes; advantages A_t
  loss      -min(ρ A, clip(ρ, 1 ± ε) A) + c_v ½ (V - R)² - c_e H(π),   ρ = π(a_t) / π_old(a_t),   R_t = A_t + V_t

A policy with memory decides from its history, so a minibatch is a few whole episodes, and every update computes their
histories again under its own weights. Memories written under older weights are never used.

Differences from the papers
  1. a row is one whole episode: no memory outlives an update     test_the_ratio_is_one_before_the_first_update
  2. a truncated episode is continued by the value of its last
     observation                                                  test_advantages_equal_those_of_a_peer
  3. rewards are divided by the running deviation of discounted
     returns; observed numbers are standardised by running
     statistics, which change after the updates of a rollout      test_statistics_change_after_the_updates
  4. updates on a rollout stop once the policy moved too far      test_updates_stop_at_the_target_divergence
  5. the critic is a linear map of the last representation        test_one_update_equals_a_plain_reference
Unknown rewards count as zero.
Shapes: B episodes, T time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from uat.acting import has_expert
from uat.clock import blank, known_rewards
from uat.contracts import Recording, Simulator
from uat.distributions import Distribution
from uat.episode import Losses, TensorFields, Trajectory, masked_sum
from uat.methods.policy import AddUp, Phase, Policy, Reuse
from uat.nn.blocks import TransformerConfig
from uat.nn.encoders import VectorEncoder, vector_parts
from uat.noise import uniform
from uat.objectives.objective import Objective, has_own_phases
from uat.objectives.returns import Moments, advantages, discounted_so_far, moments, sums, with_last_observation
from uat.settings import Amount, Count, Delay, Scale, Share, check_fields
from uat.spec import Weights

FLAT = 1e-6
"""Deviation of the critic's targets below which the share of it that the critic explains is not reported."""
MOST_LOG_RATIO = 20.0
"""Log-ratios are clamped to this size, so that one impossible action cannot make a loss infinite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOConfig:
    discount: Share = 0.99
    """Discount γ of a reward one step later."""
    gae_decay: Share = 0.95
    """Decay λ of advantage estimates: 0 trusts the critic, 1 the rewards that were earned."""
    clip: Scale = 0.2
    """Range ε in which the probability ratio of an action still changes the loss."""
    passes: Count = 3
    """Passes over the episodes of each rollout."""
    minibatches: Count = 4
    """Minibatches of whole episodes in each pass, with one update each."""
    entropy: Amount = 1e-2
    """Weight of the entropy bonus at the start of training."""
    last_entropy: Amount = 1e-3
    """Weight of the entropy bonus at the end of training; it changes linearly."""
    value_weight: Amount = 0.5
    """Weight of the critic's squared error."""
    target_kl: Scale | None = 0.03
    """Divergence from the policy of the rollout at which the updates on it stop; unset: they never stop early."""
    scale_rewards: bool = True
    """Divide rewards by the running deviation of discounted returns, in the loss alone."""
    scale_observations: bool = True
    """Standardise observed numbers by running statistics, which are saved with the weights; the first rollout only fits
    them. Not after cloning."""
    clone_epochs: Delay = 0
    """Epochs of imitating the expert before learning from rewards."""

    def __post_init__(self) -> None:
        check_fields(self, "objective.")


@dataclass(slots=True, kw_only=True)
class Prepared(TensorFields):
    """Episodes of one rollout, with everything that the updates on them hold constant."""

    episodes: Trajectory
    log_prob_BT: Tensor
    """log π_old of the actions taken."""
    advantage_BT: Tensor
    """Advantages, standardised over all steps of the rollout."""
    return_BT: Tensor
    """Targets of the critic."""

    def rows(self, row_R: Tensor) -> Prepared:
        """Return some of the episodes, without the columns in which all of them are padding."""
        if not len(row_R):  # other processes hold all episodes of a minibatch: one of ours that counts for nothing
            own = self.rows(row_R.new_zeros(1))
            return replace(own, episodes=replace(own.episodes, valid=torch.zeros_like(own.episodes.valid)))
        steps = int(self.episodes.valid[row_R].sum(1).max().clamp_min(1))
        own = replace(self.episodes, final_obs=None, target=None)
        return replace(self, episodes=own).map(lambda x: x[row_R, :steps])


class Critic(nn.Module):
    """Values of steps, and running statistics of returns and observed numbers."""

    def __init__(self, d_model: int, parts: list[VectorEncoder]) -> None:
        super().__init__()
        self.value = nn.Linear(d_model, 1)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)
        self.returns = Moments(1)
        self.observations = nn.ModuleList(Moments(part.linear.in_features) for part in parts)

    def forward(self, h_BTD: Tensor) -> Tensor:
        return self.value(h_BTD)[..., 0]

    @property
    def has_seen_observations(self) -> bool:
        return all(isinstance(seen, Moments) and bool(seen.count) for seen in self.observations)


class PPO(Objective, Reuse):
    name, metric = "ppo", "return"

    def __init__(self, policy: Policy, config: PPOConfig) -> None:
        super().__init__(policy, config)
        self.config: PPOConfig = config
        like = policy.head.linear.weight
        self.parts = []
        if config.scale_observations and not config.clone_epochs:  # a clone would lose what it learned from raw numbers
            self.parts = [m for e in policy.observation_encoders for m in e.modules() if isinstance(m, VectorEncoder)]
        for part in self.parts:
            if part.normalizer is None:
                part.add_normalizer()
        self.critic = Critic(policy.head.linear.in_features, self.parts)
        self.critic.value.to(like)
        for module in self.critic.modules():
            if isinstance(module, Moments):
                module.to(like.device)
        self.modules = self.critic
        self.entropy_weight = config.entropy
        self.report: dict[str, Tensor] = {}
        """Numbers of the rollout that is being learnt from."""

    @classmethod
    def unsupported_reason(cls, policy: Policy, worlds: Simulator[Any] | Recording, config: PPOConfig) -> str | None:
        if has_own_phases(type(policy)):
            return f"{type(policy).__name__} defines its own training, and takes no other objective"
        if isinstance(worlds, Recording):
            return "it plays, and recorded episodes cannot be played"
        if isinstance(policy.spec.action, Weights):
            return f"it samples actions, and actions {policy.spec.action} are not random"
        if config.clone_epochs and not has_expert(worlds):
            return f"objective.clone_epochs={config.clone_epochs} imitates an expert, and there is none: set it to 0"
        table = policy.config.max_positions if isinstance(policy.config, TransformerConfig) else None
        horizon = worlds.spec.horizon
        if table is not None and horizon is not None and table <= horizon and policy.config.past_table == "refuse":
            return (
                f"method.max_positions={table} must be at least {horizon + 1}: the observation after an episode of "
                f"{horizon} steps that is cut off has a value, too"
            )
        return None

    def phases(self) -> tuple[Phase, ...]:
        cloning = () if not self.config.clone_epochs else self.policy.phases()
        cloning = tuple(replace(phase, length=self.config.clone_epochs) for phase in cloning)
        return (*cloning, Phase("ppo", self.policy.loss, reuse=self))

    # ------------------------------------------------------------ one rollout

    @torch.no_grad()
    def prepare(self, episodes: Trajectory, add_up: AddUp, share_done: float) -> Prepared | None:
        c, valid_BT = self.config, episodes.valid
        self.entropy_weight = c.entropy + (c.last_entropy - c.entropy) * share_done
        if self.parts and not self.critic.has_seen_observations:
            return None  # the first episodes only fit the statistics
        earned_BT = blank(known_rewards(episodes.reward, episodes.reward_known), valid_BT)
        steps = valid_BT.shape[1]
        self.policy.eval()  # also in `loss`: without dropout, the pass that learns is the one that played
        batch = self.policy.spec.clock.batch(with_last_observation(episodes))
        h_BSD = self.policy.features(batch)
        value_BS = self.critic(h_BSD)
        reward_BT = self._scaled(earned_BT, valid_BT, add_up).to(value_BS.dtype)
        advantage_BT = advantages(reward_BT, value_BS, episodes, discount=c.discount, decay=c.gae_decay)
        return_BT = advantage_BT + value_BS[:, :steps]
        mean, deviation = moments(advantage_BT, valid_BT, add_up)
        spread = moments(return_BT, valid_BT, add_up)[1]
        self.report = {"explained_variance": 1 - (deviation / spread).square()} if spread > FLAT else {}
        return Prepared(
            episodes=episodes,
            log_prob_BT=blank(self._policy(h_BSD[:, :steps], episodes).log_prob(episodes.action), valid_BT),
            advantage_BT=blank((advantage_BT - mean) / (deviation + 1e-8), valid_BT),
            return_BT=blank(return_BT, valid_BT),
        )

    def minibatches(self, seed: int, episodes: int) -> Iterator[Tensor]:
        for number in range(self.config.passes):
            draw_B = uniform(seed, f"minibatches/{number}", torch.arange(episodes), 1)[:, 0]
            yield from draw_B.argsort().tensor_split(min(self.config.minibatches, episodes))

    def loss(self, prepared: Prepared, row_R: Tensor) -> tuple[Losses, Losses]:
        c, own = self.config, prepared.rows(row_R)
        self.policy.eval()
        valid_BT, episodes = own.episodes.valid, own.episodes
        h_BTD = self.policy.features(self.policy.spec.clock.batch(episodes))
        decided = self._policy(h_BTD, episodes)
        change_BT = blank(decided.log_prob(episodes.action), valid_BT) - own.log_prob_BT
        ratio_BT = change_BT.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()
        clipped_BT = ratio_BT.clamp(1 - c.clip, 1 + c.clip)
        gain_BT = torch.minimum(ratio_BT * own.advantage_BT, clipped_BT * own.advantage_BT)
        error_BT = self.critic(h_BTD) - own.return_BT
        entropy_BT = decided.entropy
        losses = {
            "policy": masked_sum(-gain_BT, valid_BT),
            "value": masked_sum(c.value_weight * 0.5 * error_BT.square(), valid_BT),
            "entropy": masked_sum(-self.entropy_weight * entropy_BT, valid_BT),
        }
        with torch.no_grad():
            measures = {
                "entropy": masked_sum(entropy_BT, valid_BT),
                "kl": masked_sum(ratio_BT - 1 - change_BT, valid_BT),
                "clipped": masked_sum((ratio_BT != clipped_BT).to(ratio_BT.dtype), valid_BT),
            }
        return losses, measures

    def stops(self, measured: Mapping[str, float]) -> bool:
        return self.config.target_kl is not None and measured["kl"] > self.config.target_kl

    @torch.no_grad()
    def finish(self, episodes: Trajectory, add_up: AddUp) -> dict[str, Tensor]:
        """Standardise observations by all episodes so far from now on, and return the mean return and length."""
        encoders = self.policy.observation_encoders if self.parts else []
        for part, value in (x for e in encoders for x in vector_parts(e, self.policy.spec.obs, episodes.obs)):
            seen = self.critic.observations[self.parts.index(part)]
            assert isinstance(seen, Moments)
            assert part.normalizer is not None
            seen.add(*sums(value[episodes.valid].flatten(1), add_up))
            part.normalizer.set(seen.mean, seen.deviation)
        valid_BT = episodes.valid
        earned_BT = blank(known_rewards(episodes.reward, episodes.reward_known), valid_BT)
        count = torch.full((), float(len(valid_BT)), dtype=torch.float64, device=valid_BT.device)
        count, steps, total = add_up([count, valid_BT.sum().double(), earned_BT.double().sum()])
        report, self.report = self.report, {}
        return {"return": total / count, "length": steps / count, "steps": steps, **report}

    def _policy(self, h_BTD: Tensor, episodes: Trajectory) -> Distribution:
        """Return the distribution over actions at every step."""
        return self.policy.distribution(self.policy.head.logits(h_BTD, episodes.allowed))

    def _scaled(self, earned_BT: Tensor, valid_BT: Tensor, add_up: AddUp) -> Tensor:
        """Return rewards divided by the running deviation of discounted returns."""
        if not self.config.scale_rewards:
            return earned_BT
        so_far_BT = discounted_so_far(earned_BT, self.config.discount)
        self.critic.returns.add(*sums(so_far_BT[valid_BT][:, None], add_up))
        return earned_BT / self.critic.returns.scale.to(earned_BT.dtype)
