"""The Utility-Augmented Transformer: previous actions and rewards reshape attention itself.

Source: "Breaking Feedback-Blindness: Utility-Augmented Transformer for Sequential Decision Making".

Differences from the paper
  1. weight-vector actions have a bias-free W_a of their own     test_no_feedback_is_vanilla
  2. the loss is averaged over real steps only                   test_padding_never_changes_a_loss
  3. ablations have no weights where the paper sets zeros        test_an_ablation_removes_exactly_its_weights
Choices that the paper leaves open: W^E has a bias, which gives the published parameter count; W_a starts at N(0, 1),
positions at N(0, 0.02²), all other weights like torch's own layers; no-q and no-kv also drop the U of the projections
that they leave unchanged; without actions or rewards, E keeps its shape and receives zeros instead
(test_what_is_not_seen_is_nothing_to_the_whole_model).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from uat.contracts import Memory
from uat.episode import Batch, Step
from uat.methods.policy import factor_of_returns
from uat.methods.tokens import TokenConfig, TokenPolicy
from uat.nn.blocks import Trace, Transformer, TransformerConfig
from uat.nn.cache import KVCache
from uat.nn.heads import build_head
from uat.nn.late import Unanswered
from uat.nn.utility import Channels, Gates, UtilityEncoder, UtilityGates
from uat.settings import Decay, Scale, Width, renamed
from uat.spec import Spec


@dataclass(frozen=True, kw_only=True, slots=True)
class UATConfig(TokenConfig):
    d_utility: Width = 16
    """Width of the utility state u."""
    d_action: Width = 8
    """Width of the action embedding in the utility encoder."""
    d_hidden: Width = 32
    """Hidden width of the utility encoder."""
    feedback_decay: Decay = field(default=0.7, metadata=renamed("decay"))
    """Decay λ of the regime state: 0 keeps only the latest feedback, values near 1 average over many steps."""
    use_action: bool = field(default=True, metadata=renamed("sees_action"))
    """Give the previous action to the utility encoder."""
    use_reward: bool = field(default=True, metadata=renamed("sees_reward"))
    """Give the previous reward to the utility encoder."""
    use_return: bool = False
    """Give the return so far to the utility encoder, as a third channel of feedback. Not in the paper."""
    return_scale: Scale | None = None
    """With use_return: factor of the return so far; unset: 1 / horizon."""
    nonlinear: bool = True
    """Give the utility encoder a hidden layer with ReLU; otherwise it is one linear map."""
    modulates_queries: bool = True
    """Let the regime state change queries."""
    modulates_keys_values: bool = True
    """Let the latest feedback change keys and values."""
    utility_bias: bool = True
    """Let gates also add offsets (U times the gate) to the projections that they change."""

    binding: Literal["early", "late"] = "early"
    """Feedback that gates the keys and values of a step: the action and reward before it (early, as in the paper), or
    its own, from the step on at which they are known (late)."""
    pending: Literal["action", "nothing"] = "action"
    """Late gates of a step whose reward is still to come: computed from its action alone, or closed."""

    def __post_init__(self) -> None:
        TransformerConfig.__post_init__(self)
        if self.binding == "late" and not self.modulates_keys_values:
            raise ValueError("binding='late' and modulates_keys_values=False: late gates are those of keys and values")
        if not (self.modulates_queries or self.modulates_keys_values):
            raise ValueError("modulates_queries=False and modulates_keys_values=False: feedback would change nothing")
        if self.use_return:
            self._check_return()

    def _check_return(self) -> None:
        if not self.use_reward:
            raise ValueError("use_return=True and use_reward=False: the return so far is a sum of rewards")
        if self.binding == "late":
            raise ValueError(
                "use_return=True and binding='late': late gates hold the feedback on one step, and the return so far "
                "is that of all steps"
            )
        if self.token_feedback == "encoder" and self.holds_feedback:
            raise ValueError(
                "use_return=True and token_feedback='encoder': the encoder of tokens has no channel for the return"
            )


@dataclass(slots=True)
class UATState(Memory):
    cache: KVCache
    ubar_BU: Tensor
    unanswered: Unanswered | None = None
    """With late gates: the steps whose feedback is still to come."""
    obs_B: Tensor | None = None
    """The previous observation, if tokens hold it."""
    return_B: Tensor | None = None
    """Sum of the rewards that each stream has received so far, if the utility encoder sees it."""


class UAT(TokenPolicy):
    sees = frozenset({"action", "reward"})
    config: UATConfig

    def __init__(self, spec: Spec, config: UATConfig) -> None:
        super().__init__(spec, config)
        c = config
        channels = Channels(queries=c.modulates_queries, keys_values=c.modulates_keys_values, offsets=c.utility_bias)
        self.sees = frozenset(["action"] * c.use_action + ["reward"] * c.use_reward)
        self.tokens_per_step = c.tokens_per_step
        self.backbone = Transformer(spec, c, utility=channels, tokens_per_step=c.tokens_per_step)
        encoder = UtilityEncoder(
            spec,
            d_action=c.d_action,
            d_hidden=c.d_hidden,
            d_utility=c.d_utility,
            use_action=c.use_action,
            use_reward=c.use_reward,
            nonlinear=c.nonlinear,
            return_scale=factor_of_returns(spec, c.return_scale) if c.use_return else None,
        )
        self.utility = UtilityGates(
            encoder,
            d_model=c.d_model,
            num_layers=c.num_layers,
            d_utility=c.d_utility,
            feedback_decay=c.feedback_decay,
            channels=channels,
        )
        self.head = build_head(spec, c.d_model)
        self.build_token_maps(self.feedback_encoder, actions=c.use_action, rewards=c.use_reward)

    @property
    def feedback_encoder(self) -> UtilityEncoder | None:
        return self.utility.encoder if self.config.token_feedback == "encoder" else None

    def gates(self, batch: Batch) -> Gates:
        """Return the gates of all tokens."""
        c = self.config
        if c.binding == "late":
            return self.utility.late(
                batch.prev_action,
                batch.prev_reward,
                self.spec.clock,
                pending=c.pending == "action",
                transitions=c.tokens == "two",
            )
        gates = self.utility(batch.prev_action, batch.prev_reward)
        return gates.repeated(c.tokens_per_step)

    def features(self, batch: Batch) -> Tensor:
        h = self.backbone.attend(self.tokens(batch), self.gates(batch), batch.start)
        return h if self.tokens_per_step == 1 else h[:, 1::2]  # at the observations

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> UATState:
        cache, like = self.backbone.init_cache(streams, capacity), self.backbone.like
        unanswered = None
        if self.config.binding == "late":
            unanswered = Unanswered.empty(self.backbone, self.spec.clock, self.spec.no_action(streams, like.device))
        ubar_BU = like.new_zeros(streams, self.config.d_utility)
        return_B = like.new_zeros(streams) if self.config.use_return else None
        return UATState(cache, ubar_BU, unanswered, self.no_observation(streams), return_B)

    def step(self, state: UATState, step: Step) -> tuple[Tensor, UATState]:
        cache, unanswered = state.cache, state.unanswered
        cache.restart(step.first)
        ubar_BU = state.ubar_BU.masked_fill(step.first[:, None], 0.0)
        return_B = state.return_B
        if return_B is not None:
            return_B = return_B.masked_fill(step.first, 0.0) + step.prev_reward.to(return_B.dtype)
        gates, ubar_BU = self.utility.step(ubar_BU, step.prev_action, step.prev_reward, return_B)
        *transition, token_BD = self.step_tokens(step, state.obs_B, cache.steps(self.tokens_per_step))
        obs_B = None if state.obs_B is None else step.obs.clone()
        if unanswered is None:
            for x_BD in transition:
                self.backbone.attend_step(x_BD, cache, gates)
            h_BD = self.backbone.attend_step(token_BD, cache, gates)
            return self.head.logits(h_BD, step.allowed), UATState(cache, ubar_BU, None, obs_B, return_B)
        pending, clock = self.config.pending == "action", self.spec.clock
        unanswered.bind(self.backbone, self.utility, cache, step, clock, pending=pending)
        for x_BD in transition:
            self.backbone.attend_step(x_BD, cache, gates)
        inputs: list[Tensor] = []
        h_BD = self.backbone.attend_step(token_BD, cache, gates.of_queries(), inputs)
        state = UATState(cache, ubar_BU, unanswered.remember(step, inputs), obs_B)
        return self.head.logits(h_BD, step.allowed), state

    def trace(self, batch: Batch) -> Trace:
        """Return attention and gates; with two tokens a step, their axes are tokens."""
        return self.backbone.trace_tokens(self.tokens(batch), self.gates(batch), batch.start)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Put the utility encoder E and W_ρ into "utility" and all other parameters, W_a included, into "base"."""
        fast = [*self.utility.encoder.mlp.parameters(), *self.utility.regime.parameters()]
        chosen = {id(p) for p in fast}
        return {"base": [p for p in self.parameters() if id(p) not in chosen], "utility": fast}
