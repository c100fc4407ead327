"""The contract of a method: one row of the table."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from uat.acting import Behaviour, choose
from uat.nn.blocks import Trace
from uat.nn.heads import Head
from uat.types import Batch, Losses, Spec, Step, check_choices, masked_sum


@dataclass(frozen=True, slots=True)
class Phase:
    """One stage of training: what is minimised, on whose episodes. Cloning is one phase; other methods have several."""

    name: str
    loss: Callable[[Batch], Losses]
    behaviour: Behaviour | None = None
    """Who plays the episodes: the policy itself as it is by now, or whoever fills a log."""
    share: float = 1.0
    """How many epochs, as a share of `train.epochs`."""
    after_step: Callable[[], None] | None = None
    """What follows each optimizer step, on the device, as part of it: such as an average of weights."""
    judged_by: Literal["play", "loss", "nothing"] = "play"
    """What decides which weights are best and when to stop: the domain's metric in greedy play, this phase's loss on
    validation episodes of the same source, or nothing: the last weights are kept."""

    def __post_init__(self) -> None:
        check_choices(self)
        if not 0 < self.share < math.inf:
            raise ValueError(f"phase {self.name!r}: share={self.share} must be positive and finite")

    def epochs(self, most: int) -> int:
        """Epochs of this phase, if a whole one has so many."""
        return max(1, round(self.share * most))


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
        if reason := self.refusal(spec):
            raise ValueError(f"{type(self).__name__} {reason}")
        self.spec, self.config = spec, config

    @classmethod
    def refusal(cls, spec: Spec) -> str | None:
        """Why a decision problem of this shape is none for the method, with the shape; None: it serves it."""
        return None

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
        """Learnt parameters by learning rate: "base" at `train.lr`, "utility" at `train.utility_lr` where a method has
        a faster part, and any other NAME at the method's own setting NAME_lr.

        What no gradient moves (`requires_grad` False, such as averages of weights) is in none, and in checkpoints.
        """
        return {"base": [p for p in self.parameters() if p.requires_grad]}
