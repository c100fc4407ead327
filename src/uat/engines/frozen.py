"""Engines of sessions: they only act, with a copy of the weights made when the engine was planned."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor

from uat.contracts import Agent
from uat.engines.cpu import CPUState, CPUStep
from uat.engines.engine import Engine, FusedEngine
from uat.engines.fused import fused_view, utility_of
from uat.episode import Step
from uat.methods.policy import TransformerPolicy
from uat.spec import Assets, Items, Spec, Vector


class NumpyEngine(Engine):
    """The engine for few streams on a CPU: compute steps in NumPy."""

    name = "NumPy step"

    def __init__(self, policy: TransformerPolicy) -> None:
        """Copy the weights; raise a ValueError if the NumPy step does not support the policy."""
        super().__init__(policy)
        self.numpy = CPUStep(policy.backbone, policy.head, utility_of(policy))

    def init_state(self, streams: int, capacity: int, device: torch.device | str = "cpu") -> CPUState:
        return self.numpy.init_state(streams, capacity, device)

    def step(self, state: CPUState, step: Step) -> tuple[Tensor, CPUState]:
        return self.numpy.step(state, step)

    def decide(self, state: CPUState, step: Step, gumbel_BA: Tensor | None = None) -> tuple[Tensor, CPUState]:
        return Agent.decide(self, state, step, gumbel_BA)


class FrozenFusedEngine(FusedEngine):
    """The engine of a GPU session: compute a step of a copied policy in one or two launches."""

    def __init__(self, policy: TransformerPolicy) -> None:
        """Copy the policy; raise a ValueError if it cannot be copied."""
        try:
            copied = copy.deepcopy(policy).eval()
        except (RuntimeError, TypeError) as error:  # a user's policy may hold objects that cannot be copied
            raise ValueError(f"the policy cannot be copied: {error}") from error
        super().__init__(copied, refused_pass="the engine of a session does not learn")

    @torch.no_grad()
    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> Any:
        """Return a memory after one empty step, which compiles the kernels when a session opens rather than at its
        first action. The first real step of every stream resets the stream."""
        with self._current():
            state = super().init_state(streams, capacity, device)
            return super().decide(state, _nothing(self.spec, streams, device))[1]

    def step(self, state: Any, step: Step) -> tuple[Tensor, Any]:
        with self._current():
            return super().step(state, step)

    def decide(self, state: Any, step: Step, gumbel_BA: Tensor | None = None) -> tuple[Tensor, Any]:
        with self._current():
            return super().decide(state, step, gumbel_BA)

    def answer(self, state: Any, step: Step) -> tuple[Tensor, Tensor, Any]:
        """Return the logits (B, A) of this step, the actions chosen from them, and the next state."""
        with self._current():
            return self.view.answer(state, step)

    def _current(self) -> contextlib.AbstractContextManager[Any]:
        """Make the policy's device the current one, on which kernels are launched."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "view"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        assert isinstance(self.policy, TransformerPolicy)
        self.view = fused_view(self.policy)


def _nothing(spec: Spec, streams: int, device: torch.device | str) -> Step:
    """Return a first step with an empty observation."""
    match spec.obs:
        case Vector(width):
            obs = torch.zeros(streams, width, device=device)
        case Assets(count, features):
            obs = torch.zeros(streams, count, features, device=device)
        case Items():
            obs = torch.zeros(streams, dtype=torch.long, device=device)
        case _:
            raise ValueError(f"no fused step: it does not take observations of {spec.obs}")
    return Step(
        obs=obs,
        prev_action=spec.no_action(streams, device),
        prev_reward=torch.zeros(streams, device=device),
        first=torch.ones(streams, dtype=torch.bool, device=device),
    )
