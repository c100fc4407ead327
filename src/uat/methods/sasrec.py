"""SASRec: self-attentive sequential recommendation with a causal Transformer over items.

Source: Kang and McAuley 2018, "Self-Attentive Sequential Recommendation" (ICDM).

  x_t = Dropout(√D M_{o_t} + p_t)
  x   = x + Dropout(g(LN(x)))              g: causal attention, then a feed-forward network with ReLU; L times
  r_t = M LN(x_t)                          the table M that embeds items also scores them, without a bias

Differences from the paper
  1. cross-entropy over all items; the paper's loss, binary cross-entropy with one
     drawn negative, is the setting `negatives`                          test_sampled_loss_equals_the_equations
  2. attention has an output projection, and may have several heads      test_pass_equals_the_equations
  3. the target of each step is the domain's; on the ordinary task
     it is the next item, as in the paper                                test_leave_one_out_on_a_log_by_hand
Choices that the paper leaves open: √D before the table's rows, as in the authors' code; all matrices start at
N(0, 0.02²) and biases at zero. The authors' code normalises queries alone; here, as in the paper's equation, all that
enters attention is normalised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uat.episode import Batch, Losses, Step, masked_sum
from uat.methods.policy import Policy
from uat.nn.blocks import Trace, Transformer, TransformerConfig
from uat.nn.cache import KVCache
from uat.nn.heads import ItemHead, unsupported_items
from uat.noise import integers
from uat.settings import MOST_COUNT, Between
from uat.spec import Spec


@dataclass(frozen=True, kw_only=True, slots=True)
class SASRecConfig(TransformerConfig):
    negatives: Annotated[int, Between(0, MOST_COUNT)] = 0
    """Random negatives per target in a binary cross-entropy (the paper uses 1); 0: cross-entropy over all items, which
    learns better."""


class SASRec(Policy):
    config: SASRecConfig
    head: ItemHead
    sampling_seed: Tensor
    """Seed of the random negatives."""

    def __init__(self, spec: Spec, config: SASRecConfig) -> None:
        super().__init__(spec, config)
        head = ItemHead(config.d_model, spec.action.count, bias=False)
        self.head = head  # pyright: ignore[reportIncompatibleVariableOverride]
        self.backbone = Transformer(spec, config, utility=False)
        self.backbone.register_module("encoder", nn.Identity())  # the head's table embeds the items
        self.backbone.register_module("norm", nn.Dropout(config.dropout))  # no LayerNorm before the blocks
        self.register_buffer("sampling_seed", torch.zeros((), dtype=torch.long), persistent=False)
        start_small(self.backbone.blocks)

    def sampling_seeds(self) -> list[Tensor]:
        return [self.sampling_seed]

    @classmethod
    def unsupported_reason(cls, spec: Spec) -> str | None:
        return unsupported_items(spec)

    def embed(self, ids: Tensor) -> Tensor:
        return self.head.embed(ids) * self.config.d_model**0.5

    def features(self, batch: Batch) -> Tensor:
        return self.backbone(self.embed(batch.obs), start_B=batch.start)

    def loss(self, batch: Batch) -> Losses:
        if not self.config.negatives:
            return super().loss(batch)
        return {"binary": masked_sum(self._binary(batch), batch.valid)}

    def _binary(self, batch: Batch) -> Tensor:
        """-log σ(r_target) - Σ log(1 - σ(r_negative)), (B, T); items of the episode are not used as negatives."""
        streams, steps = batch.valid.shape
        ids_B = self.sampling_seed + torch.arange(streams, device=self.sampling_seed.device)
        count, target_BT = steps * self.config.negatives, batch.required_target
        drawn_BTK = integers(0, "sasrec.negatives", ids_B, count, below=self.spec.action.count).view(streams, steps, -1)
        taken_BTK = (drawn_BTK[..., None] == batch.obs[:, None, None]).any(-1)
        taken_BTK = taken_BTK | (drawn_BTK == target_BT[..., None])
        target_BT1 = target_BT.clamp_min(0)[..., None]
        score_BTK = self.head.score(self.features(batch), torch.cat([target_BT1, drawn_BTK], dim=-1))
        against_BTK = F.softplus(score_BTK[..., 1:]).masked_fill(taken_BTK, 0.0)
        return F.softplus(-score_BTK[..., 0]) + against_BTK.sum(-1)

    @property
    def endless(self) -> bool:
        return self.backbone.endless

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> KVCache:
        return self.backbone.init_cache(streams, capacity)

    def step(self, state: KVCache, step: Step) -> tuple[Tensor, KVCache]:
        h_BD = self.backbone.step(self.embed(step.obs), step.first, state)
        return self.head.logits(h_BD, step.allowed), state

    def trace(self, batch: Batch) -> Trace:
        return self.backbone.trace(self.embed(batch.obs))


@torch.no_grad()
def start_small(module: nn.Module) -> None:
    """Initialise matrices to N(0, 0.02²) and biases to zero, as usual for recommenders and BERT."""
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
