"""DT: feedback in separate tokens between the observations (Chen et al. 2021, "Decision Transformer").

Each step t adds to the sequence, at the position t of the step,

  feedback     W_f [r_{t-1}; c R_t] + b_f,   R_t = Σ_{s≤t} r_{s-1}   latest reward and return so far
  observation  W^E o_t                                               the output for the action of t
  action       W_a a_t                                               with `include_actions`; visible from t + 1 on

and every token attends to the tokens before it. The clock shifts, delays and scales the rewards. The factor c
(`return_scale`) scales the return of a long episode to the size of a reward, since one LayerNorm follows both.

Differences from the paper
  1. instead of the return-to-go, the return so far and the latest reward: imitation
     has no desired return (UAT's paper: "DT-style")                     test_return_so_far_is_the_running_sum
  2. no action tokens, unless `include_actions`, as in UAT's paper       test_dt_sees_actions_when_it_includes_them
  3. action logits for ids and weights, no tanh                          test_parallel_pass_equals_the_equations
  4. UAT's backbone, not GPT-2's: ReLU, Q, K and V without bias          test_overhead_over_vanilla_is_the_formula
  5. the whole episode is the context, not its last K steps              test_oldest_reward_is_seen_at_the_end
  6. the loss is averaged over real steps only                           test_padding_never_changes_a_loss
Shapes: B batch, T time, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from uat.contracts import Memory
from uat.episode import Batch, Step
from uat.methods.policy import TransformerPolicy, factor_of_returns
from uat.nn.blocks import Trace, Transformer, TransformerConfig
from uat.nn.cache import KVCache
from uat.nn.encoders import build_action_encoder
from uat.nn.heads import build_head
from uat.settings import Scale
from uat.spec import Spec


@dataclass(frozen=True, kw_only=True, slots=True)
class DTConfig(TransformerConfig):
    include_actions: bool = False
    """Add each action to the sequence as a token, after its observation."""
    return_scale: Scale | None = None
    """Factor of the return so far in its token, as Chen et al. scale returns; unset: 1 / horizon."""


@dataclass(slots=True)
class DTState(Memory):
    cache: KVCache
    return_B: Tensor
    """Sum of the rewards that each stream has received so far."""


class DT(TransformerPolicy):
    config: DTConfig

    def __init__(self, spec: Spec, config: DTConfig) -> None:
        super().__init__(spec, config)
        self.sees = frozenset({"action", "reward"} if config.include_actions else {"reward"})
        self.return_scale = factor_of_returns(spec, config.return_scale)
        self.tokens_per_step = 3 if config.include_actions else 2
        self.backbone = Transformer(spec, config, utility=False, tokens_per_step=self.tokens_per_step)
        self.feedback = nn.Linear(2, config.d_model)  # W_f, b_f
        self.action = build_action_encoder(spec, config.d_model) if config.include_actions else None  # W_a
        self.head = build_head(spec, config.d_model)

    def new_tokens(
        self, obs: Tensor, prev_action: Tensor, prev_reward: Tensor, return_so_far: Tensor, position: Tensor
    ) -> list[Tensor]:
        """Return the new tokens of a step, in order: the last step's action, feedback, observation; each (..., D).

        The first step has no action before it, so the caller must drop that token.
        """
        numbers = [prev_reward.to(return_so_far.dtype), return_so_far * self.return_scale]
        feedback = self.feedback(torch.stack(numbers, dim=-1))
        place = self.backbone.place
        tokens = [place(feedback, position), place(self.backbone.encoder(obs), position)]
        if self.action is not None:
            tokens.insert(0, place(self.action(prev_action), (position - 1).clamp_min(0)))
        return tokens

    # ------------------------------------------------------------ all at once

    def sequence(self, batch: Batch) -> Tensor:
        """Return all tokens from the first feedback to the last observation: (B, 2T, D), or (B, 3T - 1, D)."""
        position = self.backbone.step_positions(batch.obs.shape[1], batch.start)
        return_BT = batch.prev_reward.to(self.feedback.weight.dtype).cumsum(1)
        tokens = self.new_tokens(batch.obs, batch.prev_action, batch.prev_reward, return_BT, position)
        sequence = torch.stack(tokens, dim=2).flatten(1, 2)
        return sequence if self.action is None else sequence[:, 1:]

    def features(self, batch: Batch) -> Tensor:
        h = self.backbone.attend(self.sequence(batch), start_B=batch.start)
        return h[:, 1 :: self.tokens_per_step]  # at the observations

    def trace(self, batch: Batch) -> Trace:
        """Return attention between tokens, whose axes are tokens of the sequence, not steps."""
        return self.backbone.trace_tokens(self.sequence(batch), start_B=batch.start)

    # ------------------------------------------------------------ step by step

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> DTState:
        cache = self.backbone.init_cache(streams, capacity)
        return DTState(cache, return_B=self.backbone.like.new_zeros(streams))

    def step(self, state: DTState, step: Step) -> tuple[Tensor, DTState]:
        cache = state.cache
        cache.restart(step.first)
        return_B = state.return_B.masked_fill(step.first, 0.0) + step.prev_reward.to(state.return_B.dtype)
        tokens = self.new_tokens(step.obs, step.prev_action, step.prev_reward, return_B, self._steps_seen(cache))
        if self.action is not None:
            self.backbone.attend_step(tokens.pop(0), cache)
            cache.restart(step.first)  # a first step has no previous action: feedback overwrites that slot
        self.backbone.attend_step(tokens[0], cache)
        h_BD = self.backbone.attend_step(tokens[1], cache)
        return self.head.logits(h_BD, step.allowed), DTState(cache, return_B)

    def _steps_seen(self, cache: KVCache) -> Tensor:
        """Return the number of steps t in the cache: 2t tokens, or 3t - 1 with actions, as the last one comes later."""
        behind = 0 if self.action is None else 1
        return torch.div(cache.length_B + behind, self.tokens_per_step, rounding_mode="floor")
