"""The contract of a domain: one column of the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from uat.contracts import Agent, Reader, Recording, Simulator
from uat.episode import Trajectory
from uat.metrics import Metric
from uat.noise import derive
from uat.spec import Spec

Split = Literal["train", "validation", "test"]


@runtime_checkable
class Domain(Protocol):
    """A decision problem with its worlds, its metrics and its references.

    A domain may also say
      episodes            for splits that hold so many episodes and no more, how many: these are played whole, and
                          their worlds need not depend on a seed
      summarise(values)   per metric, values whose mean it is, from what `measure` gave of all episodes; for metrics
                          that are no means over episodes. Without it the metrics are what `measure` gives
      rivals              names of references that every method should be held against, as it is against the blind one
      block               that its episodes follow each other in time: the mean length of blocks in which intervals
                          resample them
    """

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

    def simulator(self, split: Split, device: torch.device | str) -> Simulator[Any] | Recording:
        """The worlds of one split, or what was recorded of them."""
        ...

    def measure(self, trajectory: Trajectory) -> dict[str, Tensor]:
        """Each metric, or what `summarise` makes it of, per episode: (B,); NaN where a partial metric is undefined."""
        ...

    def references(self) -> Mapping[str, Agent[Any] | Reader]:
        """Who stands beside every score: "ceiling" (the Bayes filter), "random"; where episodes are recorded, "expert"
        too: in a simulator its play is known."""
        ...


def episode_count(domain: Domain, split: Split, wanted: int) -> int:
    """How many episodes of a split are played: as many as wanted, or all that it holds."""
    return getattr(domain, "episodes", {}).get(split, wanted)


def summarised(domain: Domain, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Per metric, values whose mean it is, from what was measured of all episodes."""
    return domain.summarise(values) if hasattr(domain, "summarise") else values  # pyright: ignore[reportAttributeAccessIssue]


def block_length(domain: Domain) -> float:
    """Mean length of the blocks in which episodes are resampled; 1: they are independent."""
    return getattr(domain, "block", 1.0)


def rivals(domain: Domain) -> tuple[str, ...]:
    """References that every method should be held against."""
    return getattr(domain, "rivals", ())


def split_seed(split: Split, seed: int) -> int:
    """Training worlds differ by run; validation and test worlds are the same for every run and method."""
    return derive(seed, "worlds", "train") if split == "train" else derive(0, "worlds", split)
