"""The fused step of a policy on a GPU, for a session: a launch or two from the observation to the logits."""

from __future__ import annotations

import contextlib
import copy
from typing import Any, ClassVar

import torch
from torch import Tensor

from uat.episode import Step
from uat.methods.policy import TransformerPolicy
from uat.spec import Items, Spec


class FusedStep:
    """A policy's weights as they are now; later changes of the policy do not reach it, and the policy stays on its own
    path."""

    sampled: ClassVar[bool] = False

    def __init__(self, policy: TransformerPolicy) -> None:
        """A ValueError if there is no fused step for this policy and its device."""
        before, reason = policy.fused, policy.fuse()
        policy.fused = before
        if reason is not None:
            raise ValueError(reason)
        try:
            self._policy = copy.deepcopy(policy).eval()
        except (RuntimeError, TypeError) as error:  # a policy of one's own may hold anything
            raise ValueError(f"the policy cannot be copied: {error}") from error
        self._policy.fused = True

    @torch.no_grad()
    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> Any:
        """A memory that has seen one step of nothing, so that kernels are compiled when a session opens and not when it
        is first asked: every stream begins with its first step anyway."""
        with self._current():
            state = self._policy.init_state(streams, capacity, device)
            return self._policy.decide(state, _nothing(self._policy.spec, streams, device))[1]

    def step(self, state: Any, step: Step) -> tuple[Tensor, Any]:
        with self._current():
            return self._policy.step(state, step)

    def decide(self, state: Any, step: Step, gumbel_BA: Tensor | None = None) -> tuple[Tensor, Any]:
        """The action of each stream, as the kernel chooses it among ids, and the state after this step."""
        with self._current():
            return self._policy.decide(state, step, gumbel_BA)

    def _current(self) -> contextlib.AbstractContextManager[Any]:
        """Kernels are launched on the current device: there may be several."""
        where = self._policy.backbone.like
        return torch.cuda.device_of(where) if where.is_cuda else contextlib.nullcontext()


def _nothing(spec: Spec, streams: int, device: torch.device | str) -> Step:
    """A first step at which nothing is seen."""
    kind = torch.long if isinstance(spec.obs, Items) else torch.float32
    obs = torch.zeros(streams, *spec.obs.shape, dtype=kind, device=device)
    return Step(
        obs=obs,
        prev_action=spec.no_action(streams, device),
        prev_reward=torch.zeros(streams, device=device),
        first=torch.ones(streams, dtype=torch.bool, device=device),
    )
