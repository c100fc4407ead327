"""The fused step of a policy on a GPU, for a session: one launch from the observation to the logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from uat.methods.policy import TransformerPolicy
from uat.types import Step


class FusedStep:
    """An agent whose memories hold the weights of the layers as they were when each was opened; the rest is read as it
    is by then. The policy itself stays on its path: whoever trains it, or opens another session, notices nothing."""

    sampled: ClassVar[bool] = False

    def __init__(self, policy: TransformerPolicy) -> None:
        """A ValueError if there is no fused step for this policy and its device."""
        before, self._policy = policy.fused, policy
        reason = policy.fuse()
        policy.fused = before
        if reason is not None:
            raise ValueError(reason)

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> Any:
        with self._fused():
            return self._policy.init_state(streams, capacity, device)

    def step(self, state: Any, step: Step) -> tuple[Tensor, Any]:
        with self._fused():
            return self._policy.step(state, step)

    @contextlib.contextmanager
    def _fused(self) -> Iterator[None]:
        """Kernels are launched on the current device: there may be several."""
        before, where = self._policy.fused, self._policy.backbone.positions
        self._policy.fused = True
        try:
            with torch.cuda.device_of(where) if where.is_cuda else contextlib.nullcontext():
                yield
        finally:
            self._policy.fused = before
