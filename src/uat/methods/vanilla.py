"""Vanilla: a causal pre-norm Transformer over observations (Vaswani et al. 2017), the same backbone as UAT.

Differences from the paper
  1. pre-norm blocks, and a LayerNorm after the embedding, as in UAT's appendix    test_vanilla_equals_torch_encoder
  2. projections of queries, keys and values have no bias                          test_parameter_counts
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from uat.distributions import choose
from uat.engines import kernels
from uat.episode import Batch, Noise, Step, Trajectory
from uat.methods.policy import TransformerPolicy
from uat.nn.blocks import Trace, Transformer, TransformerConfig
from uat.nn.cache import KVCache
from uat.nn.heads import build_head
from uat.spec import Spec


@dataclass(frozen=True, kw_only=True, slots=True)
class VanillaConfig(TransformerConfig):
    """The shared backbone, and nothing else."""


class Vanilla(TransformerPolicy):
    fusible = True
    config: VanillaConfig

    def __init__(self, spec: Spec, config: VanillaConfig) -> None:
        super().__init__(spec, config)
        self.backbone = Transformer(spec, config, utility=False)
        self.head = build_head(spec, config.d_model)

    def features(self, batch: Batch) -> Tensor:
        if self.takes_pass():
            return kernels.fused_features(self.backbone, None, batch)
        return self.backbone(batch.obs, start_B=batch.start)

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> KVCache:
        return self.open_cache(streams, capacity)

    def step(self, state: KVCache, step: Step) -> tuple[Tensor, KVCache]:
        if self.fused and state.packed is not None:
            return kernels.fused_step(self.backbone, None, self.head, step, state)[0], state
        return self.head.logits(self.backbone.step(step.obs, step.first, state), step.allowed), state

    def decide(self, state: KVCache, step: Step, gumbel_BA: Tensor | None = None) -> tuple[Tensor, KVCache]:
        if self.fused and state.packed is not None:
            logits_BA, choice_B = kernels.fused_step(self.backbone, None, self.head, step, state, gumbel_BA=gumbel_BA)
            return choose(logits_BA, self.spec, gumbel_BA) if choice_B is None else choice_B, state
        return super().decide(state, step, gumbel_BA)

    def play(self, simulator: Any, noise: Noise, gumbel_BTA: Tensor | None = None) -> Trajectory:
        """Said in the class that says `step` and `decide`, as `plays` asks for."""
        return self._play(simulator, noise, gumbel_BTA)

    def trace(self, batch: Batch) -> Trace:
        return self.backbone.trace(batch.obs, start_B=batch.start)
