"""CoTTA: a trained Vanilla that learns from its own average while it acts.

Source: Wang, Fink, Van Gool and Dai, "Continual Test-Time Domain Adaptation" (CVPR 2022).

Two copies of the backbone move in each stream. The teacher answers. The student takes one step towards the teacher's
prediction, which is averaged over jittered copies of the token where the teacher is not certain; then the teacher
moves towards the student (exponential average), and a small share of the student's weights, drawn at random, returns
to the source.

Differences from the paper
  1. augmentation is Gaussian noise on the embedded token, which any observation has;
     the copies look at the same past and present as the token                       test_jitter_is_the_same_for_a_step
  2. the answer is the teacher's on the token itself, not the average                test_cotta_equals_its_slow_twin
  3. certainty is the teacher's own, not that of a third, unchanging network         test_a_certain_teacher_is_not_averaged
  4. plain gradient descent at the rate of the paper's ImageNet-C, without momentum:
     each average would be one more copy of the weights per stream                   test_cotta_equals_its_slow_twin
  5. as many draws of weights to restore as give the share on average, the same for
     every stream at the same step                                                   test_the_stated_share_is_restored
  6. the head, and tables of positions and items, stay as they are                   test_layers_move_and_nothing_else
  7. cached keys and values are constants, gradients flow through the present token  test_cotta_equals_its_slow_twin
  8. an episode starts from the source weights                                       test_restart_restores_the_source
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from uat.methods.adapting import AdaptedState, Adapting, check_settings, cross_entropy
from uat.nn.blocks import TransformerConfig
from uat.nn.cache import KVCache
from uat.nn.shifted import Layout, ShiftedStep, layer_names
from uat.noise import integers, uniform
from uat.types import Spec, Step


@dataclass(frozen=True, kw_only=True, slots=True)
class CottaConfig(TransformerConfig):
    adaptation_rate: float = 0.01
    """Rate of the student's gradient step after each decision; 0 is Vanilla."""
    teacher_decay: float = 0.999
    """Share of itself that the teacher keeps when it moves towards the student."""
    restore_share: float = 0.01
    """Share of the student's weights that return to the source at each step."""
    certainty: float = 0.92
    """Largest probability from which on the teacher's plain prediction, not the averaged one, is the target."""
    augmentations: int = 4
    """Jittered copies of the token over which the teacher's prediction is averaged."""
    jitter: float = 0.1
    """Deviation of the noise on a copy, in units of the embedded token's root mean square."""
    adaptation_seed: int = 0
    """Decides which weights are restored, and the jitter."""

    def __post_init__(self) -> None:
        TransformerConfig.__post_init__(self)
        check_settings(
            self,
            adaptation_rate=(0, math.inf),
            teacher_decay=(0, 1),
            restore_share=(0, 1),
            certainty=(0, math.inf),
            augmentations=(1, math.inf),
            jitter=(0, math.inf),
        )


@dataclass(slots=True)
class CottaState(AdaptedState):
    """The cache is the teacher's."""

    student_cache: KVCache
    student_BP: Tensor
    """What the student has moved by; the restore that ends a step is done as the next one begins."""
    teacher_BP: Tensor
    """What the teacher has moved by; its move towards the student, too, is done as the next step begins."""


class Cotta(Adapting):
    config: CottaConfig

    def __init__(self, spec: Spec, config: CottaConfig) -> None:
        super().__init__(spec, config)
        self.layout = Layout(self.backbone, layer_names(self.backbone))

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> CottaState:
        caches = [self.backbone.init_cache(streams, capacity) for _ in range(2)]
        weights = [self.layout.zeros(streams, like=self.backbone.positions) for _ in range(2)]
        return CottaState(caches[0], torch.zeros_like(caches[0].length_B), caches[1], *weights)

    def adapt(self, state: CottaState, step: Step) -> tuple[Tensor, CottaState]:
        state.cache.restart(step.first)
        state.student_cache.restart(step.first)
        self._finish_last_step(state, step.first)
        position_B, student = state.position_B, self.layout.views(state.student_BP)

        jitter_BRD = self._jitter(state.cache.length_B)
        teacher = ShiftedStep(self.backbone, self.layout.views(state.teacher_BP))
        h_BRD = teacher(step.obs, position_B, state.cache, jitter_BRD)
        target_BA = self._target(h_BRD, step.allowed)
        with torch.enable_grad():
            forward = ShiftedStep(self.backbone, student)
            own_BD = forward(step.obs, position_B, state.student_cache)[:, 0]
            gradients = forward.gradients(cross_entropy(target_BA, self.head.logits(own_BD, step.allowed)))
        for name, factors in gradients.items():
            rate = -self.config.adaptation_rate
            if len(factors) == 2:
                student[name].addcmul_(*factors, value=rate)
            else:
                student[name].add_(*factors, alpha=rate)
        return h_BRD[:, 0], state

    def _finish_last_step(self, state: CottaState, first_B: Tensor) -> None:
        """The teacher moves towards the student, then a share of the student returns; in a new episode all of both."""
        state.student_BP.mul_(~first_B[:, None])
        move_B1 = torch.full_like(state.student_BP[:, :1], 1 - self.config.teacher_decay)
        state.teacher_BP.lerp_(state.student_BP, move_B1.masked_fill_(first_B[:, None], 1.0))
        state.student_BP.scatter_(1, self.restored(state.cache.length_B), 0.0)

    def restored(self, count_B: Tensor) -> Tensor:
        """Which numbers of a student return to the source before step `count`: (B, draws), drawn with replacement."""
        size = sum(self.layout.sizes)
        draws = round(-size * math.log1p(-self.config.restore_share))  # 1 - (1 - 1/P)^draws is the share
        return integers(self.config.adaptation_seed, "restore", count_B, draws, below=size)

    def _jitter(self, count_B: Tensor) -> Tensor:
        """Noise of each row, (B, 1 + augmentations, D); none for the token itself."""
        c = self.config
        u = uniform(c.adaptation_seed, "jitter", count_B, c.augmentations * c.d_model)
        noise_BRD = c.jitter * torch.special.ndtri(u).to(self.backbone.positions.dtype).unflatten(1, (-1, c.d_model))
        return torch.cat([torch.zeros_like(noise_BRD[:, :1]), noise_BRD], dim=1)

    def _target(self, h_BRD: Tensor, allowed_BA: Tensor | None) -> Tensor:
        """The teacher's prediction: its own where it is certain, else that of the copies' mean logits."""
        plain_BA = self.head.logits(h_BRD[:, 0], allowed_BA).softmax(-1)
        averaged_BA = self.head.logits(h_BRD[:, 1:].mean(1), allowed_BA).softmax(-1)
        return torch.where(plain_BA.amax(-1, keepdim=True) >= self.config.certainty, plain_BA, averaged_BA)
