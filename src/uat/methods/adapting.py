"""Base class of TENT and CoTTA: a trained Vanilla that adapts its weights while acting, separately in every stream.

The module holds the source weights and never changes. The state holds each stream's shift of the weights, which starts
at zero with each episode and depends only on that stream's own past.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from uat.contracts import Memory
from uat.episode import Batch, Losses, Step
from uat.methods.policy import Policy
from uat.methods.vanilla import Vanilla, VanillaConfig
from uat.nn import structure
from uat.nn.blocks import TransformerConfig
from uat.nn.cache import KVCache
from uat.spec import Box, Spec


@dataclass(slots=True)
class AdaptedState(Memory):
    """Memory of B streams; each method adds its shifts of the weights."""

    cache: KVCache
    start_B: Tensor
    """Position of each stream's first step in the position table."""

    @property
    def position_B(self) -> Tensor:
        return self.cache.length_B + self.start_B


class Adapting(Policy):
    """A policy that trains as Vanilla and adapts while acting."""

    trains_as = "vanilla"

    def __init__(self, spec: Spec, config: TransformerConfig) -> None:
        super().__init__(spec, config)
        source = Vanilla(spec, VanillaConfig(**{f.name: getattr(config, f.name) for f in fields(VanillaConfig)}))
        self.backbone, self.head = source.backbone, source.head
        self._source = (source,)  # in a tuple, so that weights are not registered twice

    @classmethod
    def unsupported_reason(cls, spec: Spec) -> str | None:
        return (
            f"adapts to the entropy of choices among actions, which {spec.action} does not have"
            if isinstance(spec.action, Box)
            else None
        )

    @property
    def observation_encoder(self) -> nn.Module:
        return self.backbone.encoder

    @property
    def learner(self) -> Vanilla:
        return self._source[0]

    def loss(self, batch: Batch) -> Losses:
        return self.learner.loss(batch)

    def open_cache(self, streams: int, capacity: int) -> KVCache:
        """Return an empty cache for `capacity` steps in every stream.

        The adapting step reads weights without calling modules, so a backbone with changed modules is refused.
        """
        source = self.learner
        difference = structure.difference(source, source.spec, source.config, normalised=True)
        if difference is None and (self.backbone is not source.backbone or self.head is not source.head):
            difference = "its backbone or head is not the learner's"
        if difference is not None:
            raise ValueError(f"{type(self).__name__} cannot adapt this policy: {difference}")
        return self.backbone.init_cache(streams, capacity)

    @abstractmethod
    def adapt(self, state: Any, step: Step) -> tuple[Tensor, Any]:
        """Return h (B, D) of the decision, and the state after adapting to this step."""

    def step(self, state: Any, step: Step) -> tuple[Tensor, Any]:
        with torch.no_grad():
            h_BD, state = self.adapt(state, step)
            return self.head.logits(h_BD, step.allowed), state

    @torch.no_grad()
    def features(self, batch: Batch) -> Tensor:
        """Replay the steps one by one, since the weights at step t depend on all steps before t."""
        (streams, steps), device = batch.obs.shape[:2], batch.obs.device
        state, features = self.init_state(streams, steps, device), []
        if batch.start is not None:
            state.start_B.copy_(batch.start)
        for t in range(steps):
            h_BD, state = self.adapt(state, batch.step(t))
            features.append(h_BD)
        return torch.stack(features, dim=1)


def cross_entropy(target_BA: Tensor, logits_BA: Tensor) -> Tensor:
    """Return -Σ target log softmax(logits) of each stream; masked actions (logit -∞) add nothing."""
    log_pi_BA = logits_BA.log_softmax(-1).masked_fill(logits_BA.isneginf(), 0.0)
    return -(target_BA * log_pi_BA).sum(-1)


def entropy(logits_BA: Tensor) -> Tensor:
    """Return the entropy of the policy's softmax: its distribution over actions, or its weight vector."""
    return cross_entropy(logits_BA.softmax(-1), logits_BA)
