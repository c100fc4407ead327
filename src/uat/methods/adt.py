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

from uat.contracts import Memory
from uat.episode import Batch, Step
from uat.methods.tokens import TokenConfig, TokenKind, TokenPolicy
from uat.nn.blocks import Trace, Transformer
from uat.nn.cache import KVCache
from uat.nn.heads import build_head
from uat.nn.utility import UtilityEncoder
from uat.settings import Width
from uat.spec import Spec


@dataclass(frozen=True, kw_only=True, slots=True)
class ADTConfig(TokenConfig):
    tokens: TokenKind = "feedback"
    """Content of a step's token: the observation; with the previous observation; with the previous action and reward;
    with both (the previous transition); or two tokens, the previous transition and the observation."""
    d_utility: Width = 16
    """Width of the utility state, with token_feedback='encoder'."""
    d_action: Width = 8
    """Width of the action embedding in the utility encoder, with token_feedback='encoder'."""
    d_hidden: Width = 32
    """Hidden width of the utility encoder, with token_feedback='encoder'."""


@dataclass(slots=True)
class ADTState(Memory):
    cache: KVCache
    obs_B: Tensor
    """The previous observation."""


class ADT(TokenPolicy):
    sees = frozenset({"action", "reward"})
    config: ADTConfig

    def __init__(self, spec: Spec, config: ADTConfig) -> None:
        super().__init__(spec, config)
        self.sees = frozenset({"action", "reward"} if config.holds_feedback else ())
        self.tokens_per_step = config.tokens_per_step
        self.backbone = Transformer(spec, config, utility=False, tokens_per_step=config.tokens_per_step)
        self.encoder = None
        if config.token_feedback == "encoder" and config.holds_feedback:
            self.encoder = UtilityEncoder(
                spec, d_action=config.d_action, d_hidden=config.d_hidden, d_utility=config.d_utility
            )
        self.build_token_maps(self.encoder)
        self.head = build_head(spec, config.d_model)

    @property
    def feedback_encoder(self) -> UtilityEncoder | None:
        return self.encoder

    def features(self, batch: Batch) -> Tensor:
        h = self.backbone.attend(self.tokens(batch), start_B=batch.start)
        return h if self.tokens_per_step == 1 else h[:, 1::2]  # at the observations

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> KVCache | ADTState:
        cache, obs_B = self.backbone.init_cache(streams, capacity), self.no_observation(streams)
        return cache if obs_B is None else ADTState(cache, obs_B)

    def step(self, state: KVCache | ADTState, step: Step) -> tuple[Tensor, KVCache | ADTState]:
        cache, prev_obs_B = (state.cache, state.obs_B) if isinstance(state, ADTState) else (state, None)
        cache.restart(step.first)
        h_BD = None
        for x_BD in self.step_tokens(step, prev_obs_B, cache.steps(self.tokens_per_step)):
            h_BD = self.backbone.attend_step(x_BD, cache)
        assert h_BD is not None
        logits_BA = self.head.logits(h_BD, step.allowed)
        return logits_BA, cache if prev_obs_B is None else ADTState(cache, step.obs.clone())

    def trace(self, batch: Batch) -> Trace:
        """Return attention; with two tokens a step, its axes are tokens."""
        return self.backbone.trace_tokens(self.tokens(batch), start_B=batch.start)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Put the map of the utility encoder, if there is one, into "utility" and all other parameters into "base"."""
        fast = [] if self.encoder is None else list(self.encoder.mlp.parameters())
        chosen = {id(p) for p in fast}
        base = {"base": [p for p in self.parameters() if id(p) not in chosen]}
        return {**base, "utility": fast} if fast else base
