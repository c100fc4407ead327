"""Tokens that may hold feedback beside the observation, as A-DT and UAT make them.

  observation   W_o o_t
  previous      W_o o_t + W_p o_{t-1}
  feedback      W_o o_t + f(a_{t-1}, r_{t-1})
  transition    W_o o_t + W_p o_{t-1} + f(a_{t-1}, r_{t-1})
  two           m + W_p o_{t-1} + f(a_{t-1}, r_{t-1}), then W_o o_t: two tokens at the position of t

A token with the whole previous transition is the input of RL² (Duan et al. 2016). Two tokens are after DPT (Lee et al.
2023); the decision is read from the second. A sum of linear maps is one linear map of the concatenation. LayerNorm and
positions follow. f is linear, or W_u E(a, r) with a utility encoder E, which learns at `train.utility_lr`. At the first
step there is no transition, and its maps give zero. Only W_o has a bias; m, a learned vector, marks transitions.
Shapes: B batch, T time, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from uat.clock import shift
from uat.episode import Batch, Step
from uat.methods.policy import TransformerPolicy
from uat.nn.blocks import TransformerConfig
from uat.nn.encoders import VectorEncoder, build_action_encoder, build_encoder
from uat.nn.utility import UtilityEncoder
from uat.spec import Items

TokenKind = Literal["observation", "previous", "feedback", "transition", "two"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenConfig(TransformerConfig):
    tokens: TokenKind = "observation"
    """Content of a step's token: the observation; with the previous observation; with the previous action and reward;
    with both (the previous transition); or two tokens, the previous transition and the observation."""
    token_feedback: Literal["linear", "encoder"] = "linear"
    """Map of actions and rewards into the tokens that hold them: linear, or the utility encoder, which learns at
    train.utility_lr."""

    @property
    def tokens_per_step(self) -> int:
        return 2 if self.tokens == "two" else 1

    @property
    def remembers_observation(self) -> bool:
        """Whether tokens hold the previous observation."""
        return self.tokens in ("previous", "transition", "two")

    @property
    def holds_feedback(self) -> bool:
        """Whether tokens hold the previous action and reward."""
        return self.tokens in ("feedback", "transition", "two")


class TokenPolicy(TransformerPolicy):
    """A policy on the shared backbone whose tokens may hold the previous transition."""

    previous: nn.Module | None
    """W_p."""
    action: nn.Module | None
    """W_a, in tokens with linear feedback."""
    reward: nn.Linear | None
    """w_r, likewise."""
    utility_map: nn.Linear | None
    """W_u, in tokens with encoded feedback."""
    mark: nn.Parameter | None
    """m, of two tokens a step."""

    def build_token_maps(self, encoder: UtilityEncoder | None, *, actions: bool = True, rewards: bool = True) -> None:
        """Add the maps of the previous transition. The backbone must exist.

        encoder: the encoder of feedback in tokens; None: feedback is linear, or not in tokens.
        actions, rewards: whether tokens with linear feedback hold them.
        """
        c: TokenConfig = self.config
        spec, d_model = self.spec, c.d_model
        linear = c.holds_feedback and encoder is None
        self.action = build_action_encoder(spec, d_model) if linear and actions else None
        self.reward = nn.Linear(1, d_model, bias=False) if linear and rewards else None
        for part in (self.action, self.reward):
            for weight in () if part is None else part.parameters():
                self._start_like_observations(weight)
        self.previous = build_encoder(spec.obs, d_model, bias=False) if c.remembers_observation else None
        self.utility_map = None
        if c.holds_feedback and encoder is not None:
            self.utility_map = nn.Linear(encoder.d_utility, d_model, bias=False)
        self.mark = nn.Parameter(0.02 * torch.randn(d_model)) if c.tokens == "two" else None

    def _start_like_observations(self, weight: Tensor) -> None:
        encoder = self.backbone.encoder
        if isinstance(encoder, VectorEncoder):
            bound = encoder.linear.in_features**-0.5
            nn.init.uniform_(weight, -bound, bound)
        else:
            nn.init.normal_(weight)

    @property
    def feedback_encoder(self) -> UtilityEncoder | None:
        """The encoder of feedback in tokens, if it has one."""
        return None

    @property
    def observation_encoders(self) -> list[nn.Module]:
        return [self.backbone.encoder] if self.previous is None else [self.backbone.encoder, self.previous]

    # ------------------------------------------------------------ tokens

    def embedded(
        self, obs: Tensor, prev_obs: Tensor | None, first: Tensor, prev_action: Tensor, prev_reward: Tensor
    ) -> list[Tensor]:
        """Return the tokens of a step in their order, without position and norm; each (..., D).

        first: True (...) where no step comes before this one.
        """
        parts = []
        if self.previous is not None:
            assert prev_obs is not None
            parts.append(self.previous(prev_obs) * ~first[..., None])
        if self.action is not None:
            parts.append(self.action(prev_action))
        if self.reward is not None:
            parts.append(self.reward(prev_reward.to(self.reward.weight.dtype)[..., None]))
        if self.utility_map is not None:
            assert self.feedback_encoder is not None
            parts.append(self.utility_map(self.feedback_encoder(prev_action, prev_reward)))
        query = self.backbone.encoder(obs)
        if self.mark is not None:
            return [torch.stack(parts).sum(0) + self.mark, query]
        for part in parts:
            query = query + part
        return [query]

    def tokens(self, batch: Batch) -> Tensor:
        """Return all tokens x (B, T, D) of a batch, or (B, 2T, D), with positions and norm."""
        if not (self.config.holds_feedback or self.config.remembers_observation):
            return self.backbone.embed(batch.obs, batch.start)
        steps = batch.obs.shape[1]
        first_T = torch.arange(steps, device=batch.obs.device) == 0
        previous = shift(batch.obs, 1) if self.previous is not None else None
        tokens = self.embedded(batch.obs, previous, first_T, batch.prev_action, batch.prev_reward)
        position = self.backbone.step_positions(steps, batch.start)
        placed = [self.backbone.place(x, position) for x in tokens]
        return placed[0] if len(placed) == 1 else torch.stack(placed, dim=2).flatten(1, 2)

    def step_tokens(self, step: Step, prev_obs_B: Tensor | None, seen_B: Tensor) -> list[Tensor]:
        """Return the tokens of one step (B, D), with positions and norm. seen_B: steps that each stream has seen."""
        tokens = self.embedded(step.obs, prev_obs_B, step.first, step.prev_action, step.prev_reward)
        return [self.backbone.place(x_BD, seen_B) for x_BD in tokens]

    def no_observation(self, streams: int) -> Tensor | None:
        """Return the previous observation of new streams, which is never read; None: tokens hold none."""
        if self.previous is None:
            return None
        dtype = torch.long if isinstance(self.spec.obs, Items) else self.backbone.like.dtype
        return torch.zeros(streams, *self.spec.obs.shape, dtype=dtype, device=self.backbone.like.device)
