"""A-DT: feedback is part of each token; attention is unchanged.

Source: "Breaking Feedback-Blindness: Utility-Augmented Transformer for Sequential Decision Making", Proposition 2.

  x_j = LN(W_e [o_j; a_{j-1}; r_{j-1}] + b + p_j),   W_e [o; a; r] = W_o o + W_a a + w_r r

Differences from the paper
  1. a LayerNorm and positions follow W_e, as in the other methods' backbone    test_adt_tokens_are_the_concatenation
  2. the first step has no feedback: its token equals Vanilla's                 test_adt_without_feedback_is_vanilla
  3. the loss is averaged over real steps only                                  test_padding_never_changes_a_loss
Choices that the paper leaves open: an id a enters as its one-hot vector, so that W_a a is a row of a table; W_a and w_r
are initialised like W_o, so that the parts of a token have similar sizes.
Shapes: B batch, T time, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from uat.episode import Batch, Step
from uat.methods.policy import TransformerPolicy
from uat.nn.blocks import Trace, Transformer, TransformerConfig
from uat.nn.cache import KVCache
from uat.nn.encoders import VectorEncoder, build_action_encoder
from uat.nn.heads import build_head
from uat.spec import Spec


@dataclass(frozen=True, kw_only=True, slots=True)
class ADTConfig(TransformerConfig):
    """Settings of the shared backbone; A-DT has no others."""


class ADT(TransformerPolicy):
    sees = frozenset({"action", "reward"})
    config: ADTConfig

    def __init__(self, spec: Spec, config: ADTConfig) -> None:
        super().__init__(spec, config)
        self.backbone = Transformer(spec, config, utility=False)
        self.action = build_action_encoder(spec, config.d_model)  # W_a
        self.reward = nn.Linear(1, config.d_model, bias=False)  # w_r
        for weight in (*self.action.parameters(), self.reward.weight):
            self._start_like_observations(weight)
        self.head = build_head(spec, config.d_model)

    def _start_like_observations(self, weight: Tensor) -> None:
        encoder = self.backbone.encoder
        if isinstance(encoder, VectorEncoder):
            bound = encoder.linear.in_features**-0.5
            nn.init.uniform_(weight, -bound, bound)
        else:
            nn.init.normal_(weight)

    def concatenated(self, obs: Tensor, prev_action: Tensor, prev_reward: Tensor) -> Tensor:
        """Return W_e [o; a; r] + b (..., D), for all steps of a batch or for one step."""
        reward = self.reward(prev_reward.to(self.reward.weight.dtype)[..., None])
        return self.backbone.encoder(obs) + self.action(prev_action) + reward

    def tokens(self, batch: Batch) -> Tensor:
        """Return the tokens x (B, T, D)."""
        x_BTD = self.concatenated(batch.obs, batch.prev_action, batch.prev_reward)
        return self.backbone.place(x_BTD, self.backbone.step_positions(x_BTD.shape[1], batch.start))

    def features(self, batch: Batch) -> Tensor:
        return self.backbone.attend(self.tokens(batch), start_B=batch.start)

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> KVCache:
        return self.backbone.init_cache(streams, capacity)

    def step(self, state: KVCache, step: Step) -> tuple[Tensor, KVCache]:
        state.restart(step.first)
        x_BD = self.concatenated(step.obs, step.prev_action, step.prev_reward)
        h_BD = self.backbone.attend_step(self.backbone.place(x_BD, state.length_B), state)
        return self.head.logits(h_BD, step.allowed), state

    def trace(self, batch: Batch) -> Trace:
        return self.backbone.trace_tokens(self.tokens(batch), start_B=batch.start)
