"""GTrXL: a Transformer-XL over observations, with gates in place of residual sums.

Source: Parisotto et al. 2020, "Stabilizing Transformers for Reinforcement Learning"; attention over distances and the
memory of segments: Dai et al. 2019, "Transformer-XL".

Differences from the paper
  1. a LayerNorm after the embedding and one before the head, as in
     Vanilla and UAT                                                     test_shut_gates_hand_the_embedding_on
  2. every step reaches exactly `memory` steps back, wherever segments
     are cut; in the paper later steps of a segment reach further        test_segments_equal_one_long_pass
  3. dropout on attention and on the input of a gate                     test_dropout_acts_in_training_alone
  4. it imitates an expert over whole episodes; in the paper V-MPO
     trains it over segments                                             test_network_and_gradients_equal_the_equations
Choices that the paper leaves open: every layer has its own u and v, which start at zero; b_g is learned; all other
weights are initialised like torch's own layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from uat.episode import Batch, Step
from uat.methods.policy import Policy
from uat.nn.blocks import BackboneConfig, Trace
from uat.nn.gated import GatedTransformer, Memory, StreamState
from uat.nn.heads import build_head
from uat.settings import Number, Steps
from uat.spec import Spec


@dataclass(frozen=True, kw_only=True, slots=True)
class GTrXLConfig(BackboneConfig):
    memory: Steps | None = None
    """Past steps that each layer attends to; unset: the horizon, so that it covers a whole episode."""
    gate_bias: Number = 2.0
    """Initial bias b_g of every gate: the larger, the closer each layer starts to the identity."""


class GTrXL(Policy):
    """Gated Transformer-XL. It uses distances instead of positions, so `Batch.start` has no effect."""

    config: GTrXLConfig

    def __init__(self, spec: Spec, config: GTrXLConfig) -> None:
        super().__init__(spec, config)
        memory = spec.horizon if config.memory is None else config.memory
        if memory is None:
            raise ValueError("memory is unset, which means the horizon, but the problem has no horizon: set it")
        self.backbone = GatedTransformer(spec, config, memory=memory, gate_bias=config.gate_bias)
        self.head = build_head(spec, config.d_model)

    @property
    def observation_encoder(self) -> nn.Module:
        return self.backbone.encoder

    def features(self, batch: Batch) -> Tensor:
        return self.backbone(batch.obs)

    def segment(self, batch: Batch, memory: Memory | None = None) -> tuple[Tensor, Memory]:
        """Return the features of the next segment of longer episodes, and the memory for the segment after it."""
        return self.backbone.segment(batch.obs, memory)

    @property
    def endless(self) -> bool:
        """True: each layer attends to the last `memory` steps, and distances are unbounded."""
        return True

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> StreamState:
        return self.backbone.init_state(streams, capacity)

    def step(self, state: StreamState, step: Step) -> tuple[Tensor, StreamState]:
        h_BD = self.backbone.step(step.obs, step.first, state)
        return self.head.logits(h_BD, step.allowed), state

    def trace(self, batch: Batch) -> Trace:
        return self.backbone.trace(batch.obs)
