"""GTrXL: a Transformer-XL whose residual sums are gates, over observations.

Source: Parisotto et al. 2020, "Stabilizing Transformers for Reinforcement Learning"; attention over distances and the
memory of segments: Dai et al. 2019, "Transformer-XL".

Differences from the paper
  1. a LayerNorm after the embedding and one before the head, as in
     Vanilla and UAT                                                     test_shut_gates_hand_the_embedding_on
  2. every step reaches exactly `memory` steps back, wherever segments
     are cut; in the paper later steps of a segment reach further        test_segments_equal_one_long_pass
  3. dropout on attention and on what enters a gate                      test_dropout_acts_in_training_alone
  4. it imitates an expert over whole episodes; in the paper V-MPO
     trains it over segments                                             test_network_and_gradients_equal_the_equations
Choices that the paper leaves open: u and v belong to a layer and start at zero, b_g is learned from its start on, and
all other weights start as torch's own layers do.
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
    """Steps that each layer reaches back; unset: the horizon, so that a whole episode is seen."""
    gate_bias: Number = 2.0
    """Where the bias b_g of every gate starts: the larger, the nearer each layer begins to the identity."""


class GTrXL(Policy):
    """Distances take the place of positions: where an episode starts in a table (`Batch.start`) means nothing here."""

    config: GTrXLConfig

    def __init__(self, spec: Spec, config: GTrXLConfig) -> None:
        super().__init__(spec, config)
        memory = spec.horizon if config.memory is None else config.memory
        if memory is None:
            raise ValueError("memory is unset, which means the horizon, and the problem has none: set it")
        self.backbone = GatedTransformer(spec, config, memory=memory, gate_bias=config.gate_bias)
        self.head = build_head(spec, config.d_model)

    @property
    def observation_encoder(self) -> nn.Module:
        return self.backbone.encoder

    def features(self, batch: Batch) -> Tensor:
        return self.backbone(batch.obs)

    def segment(self, batch: Batch, memory: Memory | None = None) -> tuple[Tensor, Memory]:
        """Features of the next part of longer episodes, and the memory that the part after it needs."""
        return self.backbone.segment(batch.obs, memory)

    @property
    def endless(self) -> bool:
        """Each layer reaches `memory` steps back, and distances have no last one."""
        return True

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> StreamState:
        return self.backbone.init_state(streams, capacity)

    def step(self, state: StreamState, step: Step) -> tuple[Tensor, StreamState]:
        h_BD = self.backbone.step(step.obs, step.first, state)
        return self.head.logits(h_BD, step.allowed), state

    def trace(self, batch: Batch) -> Trace:
        return self.backbone.trace(batch.obs)
