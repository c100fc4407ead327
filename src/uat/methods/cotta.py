"""CoTTA: a trained Vanilla that learns from its own average while it acts.

Source: Wang, Fink, Van Gool and Dai, "Continual Test-Time Domain Adaptation" (CVPR 2022).

Two copies of the backbone move in each stream. The teacher answers. The student takes one step towards the teacher's
prediction, which is averaged over jittered copies of the token where the teacher is not certain; then the teacher
moves towards the student (exponential average), and a small share of the student's weights, drawn at random, returns
to the source.

Differences from the paper
  1. augmentation is Gaussian noise on the embedded token, which any observation has,
     and the copies look at the token's own keys and values                          test_jitter_is_the_same_for_a_step
  2. the answer is the teacher's on the token itself, not the average                test_cotta_equals_its_slow_twin
  3. certainty is the teacher's own, not that of a third network that never moves    test_certain_teachers_stay_plain
  4. plain gradient descent at the rate of the paper's ImageNet-C, without momentum:
     an average of gradients would be one more copy of the weights per stream        test_cotta_equals_its_slow_twin
  5. exactly the share of weights is restored, not each weight by a throw of its own,
     and the same weights in every stream at the same step                           test_the_stated_share_is_restored
  6. the head, and tables of positions and items, stay as they are                   test_layers_move_and_nothing_else
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
    """Rate of the student's gradient step after each decision; 0 is Vanilla."""
    teacher_decay: Decay = 0.999
    """Share of itself that the teacher keeps when it moves towards the student."""
    restore_share: Decay = 0.01
    """Share of the student's weights that return to the source at each step."""
    certainty: Amount = 0.92
    """Largest probability from which on the teacher's plain prediction, not the averaged one, is the target."""
    augmentations: Width = 2
    """Jittered copies of the token over which the teacher's prediction is averaged."""
    jitter: Amount = 0.1
    """Deviation of the noise on a copy, in units of the embedded token's root mean square."""
    adaptation_seed: Seed = 0
    """Decides which weights are restored, and the jitter."""


@dataclass(slots=True)
class CottaState(AdaptedState):
    """The cache is the teacher's."""

    student_cache: KVCache
    student_BP: Tensor
    """What each stream's student has moved by."""
    teacher_BP: Tensor
    """What each stream's teacher has moved by."""
    jitter_SRD: Tensor
    """Noise of each step of an episode. Drawn when the memory is opened: for all steps it costs as much as for one."""
    turn_S1: Tensor
    """By how much the restored set is turned after each step, drawn likewise."""


class Cotta(Adapting):
    config: CottaConfig
    restore_N: Tensor
    """The numbers that return to the source, before they are turned."""

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
        drawn = {"jitter_SRD": self.jitter(step_S), "turn_S1": self.turns(step_S)}
        return CottaState(cache, start_B, student_cache, student_BP, teacher_BP, **drawn)

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
        """Streams that start anew have moved by nothing."""
        state.cache.restart(first_B)
        state.student_cache.restart(first_B)
        if first_B.device.type != "cpu" or first_B.any():  # where a look costs nothing, it spares passes over all
            state.student_BP.masked_fill_(first_B[:, None], 0.0)
            state.teacher_BP.masked_fill_(first_B[:, None], 0.0)

    def restored(self, count_B: Tensor) -> Tensor:
        """Which of a student's numbers return to the source after step `count`: (B, N), a random set, turned at random.

        Cheaper by far than a draw for each number; no two of a step are the same.
        """
        return self._turned(self.turns(count_B))

    def turns(self, count_B: Tensor) -> Tensor:
        """By how much the set is turned after step `count`: (B, 1)."""
        return integers(self.config.adaptation_seed, "restore", count_B, 1, below=sum(self.layout.sizes))

    def _turned(self, turn_B1: Tensor) -> Tensor:
        return (self.restore_N + turn_B1) % sum(self.layout.sizes)

    def _restore(self, student_BP: Tensor, turn_B1: Tensor) -> None:
        """Return these numbers to the source. Where a look costs nothing, streams at the same step share one set."""
        if turn_B1.device.type == "cpu" and (turn_B1 == turn_B1[:1]).all():
            student_BP.index_fill_(1, self._turned(turn_B1[:1])[0], 0.0)
        else:
            student_BP.scatter_(1, self._turned(turn_B1), 0.0)

    def jitter(self, count_B: Tensor) -> Tensor:
        """Noise of each row, (B, 1 + augmentations, D); none for the token itself."""
        c = self.config
        u = uniform(c.adaptation_seed, "jitter", count_B, c.augmentations * c.d_model)
        noise_BRD = c.jitter * torch.special.ndtri(u).to(self.backbone.like.dtype).unflatten(1, (-1, c.d_model))
        return torch.cat([torch.zeros_like(noise_BRD[:, :1]), noise_BRD], dim=1)

    def _target(self, h_BRD: Tensor, allowed_BA: Tensor | None) -> Tensor:
        """The teacher's prediction: its own where it is certain, else that of the copies' mean logits."""
        plain_BA = self.head.logits(h_BRD[:, 0], allowed_BA).softmax(-1)
        averaged_BA = self.head.logits(h_BRD[:, 1:].mean(1), allowed_BA).softmax(-1)
        return torch.where(plain_BA.amax(-1, keepdim=True) >= self.config.certainty, plain_BA, averaged_BA)
