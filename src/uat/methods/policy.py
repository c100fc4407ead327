"""The contract of a method: one row of the table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from uat.acting import choose
from uat.nn.blocks import Trace
from uat.nn.heads import Head
from uat.types import Batch, Losses, Spec, Step, masked_sum


@dataclass(frozen=True, slots=True)
class Phase:
    """One stage of training: what is minimised. Cloning is one phase; other methods may have several."""

    name: str
    loss: Callable[[Batch], Losses]


class Policy(nn.Module, ABC):
    """Maps what is known at t to logits over actions: all steps at once for training, one at a time for acting."""

    sees: frozenset[str] = frozenset()
    """Feedback that may change a decision: any of "action", "reward"."""
    trains_as: ClassVar[str | None] = None
    """The method whose trained weights this one starts from, if it has no training of its own; see `learner`."""
    sampled: ClassVar[bool] = False
    """Policies are judged by their arg-max."""
    revision: ClassVar[int] = 1
    """Raised when the same config starts to mean another function: old runs are then other runs."""

    head: Head
    fused: bool = False
    """Whether `step` takes the fused path; see `fuse`."""
    fused_pass: bool = False
    """Whether `features` takes the fused path in training; see `fuse_pass`."""

    def __init__(self, spec: Spec, config: Any) -> None:
        super().__init__()
        self.spec, self.config = spec, config

    @property
    def learner(self) -> Policy:
        """The policy that plays, learns and is judged in training: this one, or the one that it `trains_as`.

        A learner holds the same parameters under the same names, so that one training serves every method that
        starts from it.
        """
        return self

    @abstractmethod
    def features(self, batch: Batch) -> Tensor:
        """h (B, T, D) at every step, knowing the past alone; what streaming gives, also where it must be replayed."""

    @abstractmethod
    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> Any:
        """Memory for `streams` streams of at most `capacity` steps."""

    @abstractmethod
    def step(self, state: Any, step: Step) -> tuple[Tensor, Any]:
        """Logits (B, A) of this step, and the state after it; the state that came in is consumed."""

    def decide(self, state: Any, step: Step, gumbel_BA: Tensor | None = None) -> tuple[Tensor, Any]:
        """The action of each stream (see `choose`), and the state after this step."""
        logits_BA, state = self.step(state, step)
        return choose(logits_BA, self.spec, gumbel_BA), state

    def fuse(self) -> str | None:
        """Let `step` take the fused path from now on; if there is none for this policy and device, why."""
        return f"{type(self).__name__} has no fused step"

    def fuse_pass(self) -> str | None:
        """Let training take the fused pass from now on; if there is none for this policy and device, why."""
        return f"{type(self).__name__} has no fused pass"

    def reseed(self, seed: int) -> None:
        """Decide what the next training pass drops."""
        torch.manual_seed(seed)
        for name, buffer in self.named_buffers():
            if name.endswith("dropout_seed"):
                buffer.fill_(seed)

    def logits(self, batch: Batch) -> Tensor:
        """Logits (B, T, A) at every step; for small action sets."""
        return self.head.logits(self.features(batch), batch.allowed)

    def loss(self, batch: Batch) -> Losses:
        """How far from the expert, over real steps."""
        return {"imitation": masked_sum(self.head.nll(self.features(batch), batch.target, batch.allowed), batch.valid)}

    def trace(self, batch: Batch) -> Trace:
        """Attention and gates at every step, for looking at; methods without attention have none to show."""
        raise ValueError(f"{type(self).__name__} has no attention to look at")

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("imitation", self.loss),)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Parameters by learning rate: "base", and "utility" where a method has a faster part."""
        return {"base": list(self.parameters())}
