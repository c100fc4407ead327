"""The contract of a domain: one column of the table."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from uat.noise import derive
from uat.types import Agent, Metric, Simulator, Spec, Trajectory

Split = Literal["train", "validation", "test"]


class Domain(Protocol):
    """A decision problem with its worlds, its metrics and its references."""

    name: ClassVar[str]
    train_tasks: ClassVar[tuple[str, ...]]
    """Tasks for each of which one model is trained."""
    spec: Spec
    task: str
    """The task that this instance trains and evaluates."""
    setting: str
    """What differs from the domain's defaults, in a few words; "default" if nothing does."""
    metrics: tuple[Metric, ...]
    """What `measure` gives; the first decides which checkpoint is best, and is never partial."""

    def simulator(self, split: Split, device: torch.device | str) -> Simulator[Any]:
        """The worlds of one split."""
        ...

    def measure(self, trajectory: Trajectory) -> dict[str, Tensor]:
        """Each metric, per episode: (B,); NaN where a partial metric is not defined."""
        ...

    def references(self) -> dict[str, Agent[Any]]:
        """Who stands beside every score: "ceiling" (the Bayes filter), "random"."""
        ...


def split_seed(split: Split, seed: int) -> int:
    """Training worlds differ by run; validation and test worlds are the same for every run and method."""
    return derive(seed, "worlds", "train") if split == "train" else derive(0, "worlds", split)
