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

import torch
from torch import Tensor, nn

from uat.contracts import Memory
from uat.episode import Batch, Step
from uat.methods.policy import TransformerPolicy
from uat.nn.blocks import Trace, Transformer, TransformerConfig
from uat.nn.cache import KVCache
from uat.nn.heads import build_head
from uat.nn.utility import Channels, UtilityEncoder, UtilityGates
from uat.settings import Decay, Width, renamed
from uat.spec import Spec


@dataclass(frozen=True, kw_only=True, slots=True)
class UATConfig(TransformerConfig):
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
    nonlinear: bool = True
    """Give the utility encoder a hidden layer with ReLU; otherwise it is one linear map."""
    modulates_queries: bool = True
    """Let the regime state change queries."""
    modulates_keys_values: bool = True
    """Let the latest feedback change keys and values."""
    utility_bias: bool = True
    """Let gates also add offsets (U times the gate) to the projections that they change."""

    def __post_init__(self) -> None:
        TransformerConfig.__post_init__(self)
        if not (self.modulates_queries or self.modulates_keys_values):
            raise ValueError("modulates_queries=False and modulates_keys_values=False: feedback would change nothing")


@dataclass(slots=True)
class UATState(Memory):
    cache: KVCache
    ubar_BU: Tensor


class UAT(TransformerPolicy):
    sees = frozenset({"action", "reward"})
    config: UATConfig

    def __init__(self, spec: Spec, config: UATConfig) -> None:
        super().__init__(spec, config)
        c = config
        channels = Channels(queries=c.modulates_queries, keys_values=c.modulates_keys_values, offsets=c.utility_bias)
        self.sees = frozenset(["action"] * c.use_action + ["reward"] * c.use_reward)
        self.backbone = Transformer(spec, c, utility=channels)
        encoder = UtilityEncoder(
            spec,
            d_action=c.d_action,
            d_hidden=c.d_hidden,
            d_utility=c.d_utility,
            use_action=c.use_action,
            use_reward=c.use_reward,
            nonlinear=c.nonlinear,
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

    def features(self, batch: Batch) -> Tensor:
        gates = self.utility(batch.prev_action, batch.prev_reward)
        return self.backbone(batch.obs, gates, start_B=batch.start)

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> UATState:
        cache = self.backbone.init_cache(streams, capacity)
        return UATState(cache, ubar_BU=self.backbone.like.new_zeros(streams, self.config.d_utility))

    def step(self, state: UATState, step: Step) -> tuple[Tensor, UATState]:
        ubar_BU = state.ubar_BU.masked_fill(step.first[:, None], 0.0)
        gates, ubar_BU = self.utility.step(ubar_BU, step.prev_action, step.prev_reward)
        h_BD = self.backbone.step(step.obs, step.first, state.cache, gates)
        return self.head.logits(h_BD, step.allowed), UATState(state.cache, ubar_BU)

    def trace(self, batch: Batch) -> Trace:
        gates = self.utility(batch.prev_action, batch.prev_reward)
        return self.backbone.trace(batch.obs, gates, start_B=batch.start)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Put the utility encoder E and W_ρ into "utility" and all other parameters, W_a included, into "base"."""
        fast = [*self.utility.encoder.mlp.parameters(), *self.utility.regime.parameters()]
        chosen = {id(p) for p in fast}
        return {"base": [p for p in self.parameters() if id(p) not in chosen], "utility": fast}
