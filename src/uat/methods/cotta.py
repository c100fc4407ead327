"""CoTTA: a trained Vanilla that learns while it acts, from an average of its own weights.

Source: Wang, Fink, Van Gool and Dai, "Continual Test-Time Domain Adaptation" (CVPR 2022).

Each stream has two copies of the backbone. The teacher decides. The student takes one gradient step towards the
teacher's prediction, which is averaged over jittered copies of the token if the teacher is not certain. Then the
teacher moves towards the student (exponential average), and a small random share of the student's weights is reset to
the source.

Differences from the paper
  1. augmentation is Gaussian noise on the embedded token, which any observation has,
     and the copies attend to the token's own keys and values                        test_jitter_is_the_same_for_a_step
  2. decisions use the teacher's own prediction, not the average                     test_cotta_equals_its_slow_twin
  3. certainty is the teacher's own, not that of a third, constant network          test_certain_teachers_stay_plain
  4. plain gradient descent at the rate of the paper's ImageNet-C, without momentum:
     an average of gradients would be one more copy of the weights per stream        test_cotta_equals_its_slow_twin
  5. exactly the stated share of weights is restored, instead of each one by chance,
     and the same weights in every stream at the same step                           test_the_stated_share_is_restored
  6. the head and the tables of positions and items do not change                    test_layers_move_and_nothing_else
  7. cached keys and values are constants, gradients flow through the present token  test_cotta_equals_its_slow_twin
  8. an episode starts from the source weights                                       test_restart_restores_the_source
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from uat.episode import Step
from uat.methods.adapting import AdaptedState, Adapting, cross_entropy
from uat.nn.blocks import TransformerConfig
from uat.nn.cache import KVCache
from uat.nn.shifted import Layout, ShiftedStep, layer_names
from uat.noise import integers, uniform
from uat.settings import Amount, Decay, Seed, Width
from uat.spec import Spec


@dataclass(frozen=True, kw_only=True, slots=True)
class CottaConfig(TransformerConfig):
    adaptation_rate: Amount = 0.01
    """Learning rate of the student's step after each decision; 0 gives Vanilla."""
    teacher_decay: Decay = 0.999
    """Weight of the teacher in its exponential average with the student."""
    restore_share: Decay = 0.01
    """Share of the student's weights that are reset to the source at each step."""
    certainty: Amount = 0.92
    """Probability of the best action from which on the teacher is certain: then its plain prediction is the target."""
    augmentations: Width = 2
    """Jittered copies of the token over which the teacher's prediction is averaged."""
    jitter: Amount = 0.1
    """Standard deviation of the noise on a copy, in units of the embedded token's root mean square."""
    adaptation_seed: Seed = 0
    """Seed of the restored weights and of the jitter."""


@dataclass(slots=True)
class CottaState(AdaptedState):
    """Caches and shifts of teacher and student; `cache` is the teacher's."""

    student_cache: KVCache
    student_BP: Tensor
    """Shift of each stream's student from the source weights."""
    teacher_BP: Tensor
    """Shift of each stream's teacher from the source weights."""
    jitter_SRD: Tensor
    """Noise of each step of an episode, drawn once for all steps, which costs no more than one step's draw."""
    turn_S1: Tensor
    """Offset that rotates the restored set after each step, drawn in the same way."""


class Cotta(Adapting):
    config: CottaConfig
    restore_N: Tensor
    """Indices of the numbers to restore, before rotation."""

    def __init__(self, spec: Spec, config: CottaConfig) -> None:
        super().__init__(spec, config)
        self.layout = Layout(self.backbone, layer_names(self.backbone))
        size, seed = sum(self.layout.sizes), config.adaptation_seed
        order_P = uniform(seed, "restored set", torch.zeros(1, dtype=torch.long), size)[0].argsort()
        chosen_N = order_P[: round(config.restore_share * size)].sort().values
        self.register_buffer("restore_N", chosen_N, persistent=False)

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> CottaState:
        cache, student_cache = (self.open_cache(streams, capacity) for _ in range(2))
        student_BP, teacher_BP = (self.layout.zeros(streams, like=self.backbone.like) for _ in range(2))
        step_S, start_B = torch.arange(capacity, device=device), torch.zeros_like(cache.length_B)
        draws = {"jitter_SRD": self.jitter(step_S), "turn_S1": self.turns(step_S)}
        return CottaState(cache, start_B, student_cache, student_BP, teacher_BP, **draws)

    def adapt(self, state: CottaState, step: Step) -> tuple[Tensor, CottaState]:
        self._restart(state, step.first)
        position_B, count_B = state.position_B, state.cache.length_B.clone()
        student, teacher = self.layout.views(state.student_BP), self.layout.views(state.teacher_BP)
        h_BRD = ShiftedStep(self.backbone, teacher)(step.obs, position_B, state.cache, state.jitter_SRD[count_B])
        target_BA = self._target(h_BRD, step.allowed)
        with torch.enable_grad():
            forward = ShiftedStep(self.backbone, student)
            own_BD = forward(step.obs, position_B, state.student_cache)[:, 0]
            gradients = forward.gradients(cross_entropy(target_BA, self.head.logits(own_BD, step.allowed)))
        for name, factors in gradients.items():
            if len(factors) == 2:
                student[name].addcmul_(*factors, value=-self.config.adaptation_rate)
            else:
                student[name].add_(*factors, alpha=-self.config.adaptation_rate)
        state.teacher_BP.lerp_(state.student_BP, 1 - self.config.teacher_decay)
        self._restore(state.student_BP, state.turn_S1[count_B])
        return h_BRD[:, 0], state

    def _restart(self, state: CottaState, first_B: Tensor) -> None:
        """Reset caches and shifts of the streams that start an episode."""
        state.cache.restart(first_B)
        state.student_cache.restart(first_B)
        if first_B.device.type != "cpu" or first_B.any():  # on a CPU, a cheap check saves passes over all shifts
            state.student_BP.masked_fill_(first_B[:, None], 0.0)
            state.teacher_BP.masked_fill_(first_B[:, None], 0.0)

    def restored(self, count_B: Tensor) -> Tensor:
        """Indices (B, N) of the student's numbers to restore after step `count`: a random set with a random rotation.

        This is far cheaper than a draw for each number, and the indices of a step are distinct.
        """
        return self._turned(self.turns(count_B))

    def turns(self, count_B: Tensor) -> Tensor:
        """Offset (B, 1) that rotates the set after step `count`."""
        return integers(self.config.adaptation_seed, "restore", count_B, 1, below=sum(self.layout.sizes))

    def _turned(self, turn_B1: Tensor) -> Tensor:
        return (self.restore_N + turn_B1) % sum(self.layout.sizes)

    def _restore(self, student_BP: Tensor, turn_B1: Tensor) -> None:
        """Reset these numbers to the source. On a CPU, streams at the same step share one set of indices."""
        if turn_B1.device.type == "cpu" and (turn_B1 == turn_B1[:1]).all():
            student_BP.index_fill_(1, self._turned(turn_B1[:1])[0], 0.0)
        else:
            student_BP.scatter_(1, self._turned(turn_B1), 0.0)

    def jitter(self, count_B: Tensor) -> Tensor:
        """Noise of each row, (B, 1 + augmentations, D); zero for the token itself."""
        c = self.config
        u = uniform(c.adaptation_seed, "jitter", count_B, c.augmentations * c.d_model)
        noise_BRD = c.jitter * torch.special.ndtri(u).to(self.backbone.like.dtype).unflatten(1, (-1, c.d_model))
        return torch.cat([torch.zeros_like(noise_BRD[:, :1]), noise_BRD], dim=1)

    def _target(self, h_BRD: Tensor, allowed_BA: Tensor | None) -> Tensor:
        """Return the target: the teacher's own prediction if it is certain, else that of the copies' mean logits."""
        plain_BA = self.head.logits(h_BRD[:, 0], allowed_BA).softmax(-1)
        averaged_BA = self.head.logits(h_BRD[:, 1:].mean(1), allowed_BA).softmax(-1)
        return torch.where(plain_BA.amax(-1, keepdim=True) >= self.config.certainty, plain_BA, averaged_BA)
