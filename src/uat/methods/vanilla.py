"""Vanilla: a causal pre-norm Transformer over observations (Vaswani et al. 2017), the same backbone as UAT.

Differences from the paper
  1. pre-norm blocks, and a LayerNorm after the embedding, as in UAT's appendix    test_vanilla_equals_torch_encoder
  2. projections of queries, keys and values have no bias                          test_parameter_counts
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from uat.episode import Batch, Step
from uat.methods.policy import TransformerPolicy
from uat.nn.blocks import Trace, Transformer, TransformerConfig
from uat.nn.cache import KVCache
from uat.nn.heads import build_head
from uat.spec import Spec


@dataclass(frozen=True, kw_only=True, slots=True)
class VanillaConfig(TransformerConfig):
    """Settings of the shared backbone; Vanilla has no others."""


class Vanilla(TransformerPolicy):
    config: VanillaConfig

    def __init__(self, spec: Spec, config: VanillaConfig) -> None:
        super().__init__(spec, config)
        self.backbone = Transformer(spec, config, utility=False)
        self.head = build_head(spec, config.d_model)

    def features(self, batch: Batch) -> Tensor:
        return self.backbone(batch.obs, start_B=batch.start)

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> KVCache:
        return self.backbone.init_cache(streams, capacity)

    def step(self, state: KVCache, step: Step) -> tuple[Tensor, KVCache]:
        return self.head.logits(self.backbone.step(step.obs, step.first, state), step.allowed), state

    def trace(self, batch: Batch) -> Trace:
        return self.backbone.trace(batch.obs, start_B=batch.start)
