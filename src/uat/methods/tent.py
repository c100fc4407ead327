"""TENT: a trained Vanilla that lowers its entropy while it acts, by changing only its LayerNorms.

Source: Wang, Shelhamer, Liu, Olshausen and Darrell, "Tent: Fully Test-time Adaptation by Entropy Minimization"
(ICLR 2021).

Each decision is one forward pass, whose logits are the answer. One Adam step on scales and offsets of the LayerNorms
then lowers the entropy of that answer; the next decision uses the changed values.

Differences from the paper
  1. LayerNorm instead of BatchNorm: it has no batch statistics to re-estimate      test_norms_move_and_nothing_else
  2. a batch is the one token of a stream; nothing is shared between streams         test_other_streams_change_nothing
  3. cached keys and values are constants, gradients flow through the present token  test_tent_equals_its_slow_twin
  4. an episode starts from the source weights ("episodic" in the paper's code)      test_restart_restores_the_source
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from uat.episode import Step
from uat.methods.adapting import AdaptedState, Adapting, entropy
from uat.nn.blocks import TransformerConfig
from uat.nn.shifted import Layout, ShiftedStep, norm_names
from uat.settings import Amount
from uat.spec import Spec

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8
"""Constants of Adam, as in the paper's code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TentConfig(TransformerConfig):
    adaptation_rate: Amount = 1e-3
    """Learning rate of Adam's step after each decision; 0 gives Vanilla."""


@dataclass(slots=True)
class TentState(AdaptedState):
    shift_BP: Tensor
    """Shift of each stream's LayerNorm parameters from the source."""
    mean_BP: Tensor
    square_BP: Tensor
    """Adam's running averages of the gradient and of its square."""


class Tent(Adapting):
    config: TentConfig

    def __init__(self, spec: Spec, config: TentConfig) -> None:
        super().__init__(spec, config)
        self.layout = Layout(self.backbone, norm_names(self.backbone))

    @property
    def endless(self) -> bool:
        return self.backbone.endless

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> TentState:
        cache = self.open_cache(streams, capacity)
        zeros = [self.layout.zeros(streams, like=self.backbone.like) for _ in range(3)]
        return TentState(cache, torch.zeros_like(cache.length_B), *zeros)

    def adapt(self, state: TentState, step: Step) -> tuple[Tensor, TentState]:
        state.cache.restart(step.first)
        for moved_BP in (state.shift_BP, state.mean_BP, state.square_BP):
            moved_BP.masked_fill_(step.first[:, None], 0.0)
        with torch.enable_grad():
            forward = ShiftedStep(self.backbone, self.layout.views(state.shift_BP))
            h_BD = forward(step.obs, state.position_B, state.cache)[:, 0]
            gradients = forward.gradients(entropy(self.head.logits(h_BD, step.allowed)))
        self._descend(state, torch.cat([reduce(torch.mul, gradients[name]) for name in self.layout.shapes], dim=1))
        return h_BD.detach(), state

    def _descend(self, state: TentState, gradient_BP: Tensor) -> None:
        """Apply Adam's update, with a separate step count for each stream."""
        count_B1 = state.cache.length_B[:, None].double()  # the cache has advanced: 1 after a stream's first step
        state.mean_BP.lerp_(gradient_BP, 1 - BETA_1)
        state.square_BP.mul_(BETA_2).addcmul_(gradient_BP, gradient_BP, value=1 - BETA_2)
        rate_B1 = self.config.adaptation_rate / (1 - BETA_1**count_B1)
        spread_BP = (state.square_BP / (1 - BETA_2**count_B1).to(gradient_BP.dtype)).sqrt_().add_(EPSILON)
        state.shift_BP.sub_(rate_B1.to(gradient_BP.dtype) * state.mean_BP / spread_BP)
