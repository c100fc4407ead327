"""The contract of a domain: one column of the table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from uat.contracts import Agent, Reader, Recording, Simulator
from uat.episode import Trajectory
from uat.metrics import Metric
from uat.noise import derive
from uat.spec import Spec

Split = Literal["train", "validation", "test"]


class Domain(ABC):
    """A decision problem with its worlds, its metrics and its references. A simulator and its spec are enough: the rest
    has defaults."""

    name: str
    spec: Spec
    train_tasks: tuple[str, ...] = ("default",)
    """Tasks for each of which one model is trained."""
    task: str = "default"
    """The task that this instance trains and evaluates."""
    setting: str = "default"
    """What differs from the domain's defaults, in a few words; "default" if nothing does."""
    metrics: tuple[Metric, ...] = (Metric(name="return", label="Return"),)
    """What `summarise` gives; the first decides which checkpoint is best, and is never partial."""
    rivals: tuple[str, ...] = ()
    """References that every method should be held against, as it is against the blind one."""
    block: float = 1.0
    """Mean length of the blocks in which intervals resample episodes, which follow each other in time; 1: they are
    independent."""

    @abstractmethod
    def simulator(self, split: Split, device: torch.device | str) -> Simulator[Any] | Recording:
        """The worlds of one split, or what was recorded of them."""

    def measure(self, trajectory: Trajectory) -> dict[str, Tensor]:
        """Each metric, or what `summarise` makes it of, per episode: (B,); NaN where a partial metric is undefined."""
        return {"return": torch.where(trajectory.valid, trajectory.reward, 0.0).sum(1)}

    def summarise(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Per metric, values whose mean it is, from what `measure` gave of all episodes; metrics that are no means over
        episodes are worked out here."""
        return values

    def references(self) -> Mapping[str, Agent[Any] | Reader]:
        """Who stands beside every score: "ceiling" (the Bayes filter), "random"; where episodes are recorded, "expert"
        too: in a simulator its play is known."""
        return {}

    @property
    def episodes(self) -> Mapping[str, int]:
        """For splits that hold so many episodes and no more, how many: these are played whole, and their worlds need
        not depend on a seed."""
        return {}

    def episode_count(self, split: Split, wanted: int) -> int:
        """How many episodes of a split are played: as many as wanted, or all that it holds."""
        return self.episodes.get(split, wanted)


def split_seed(split: Split, seed: int) -> int:
    """Training worlds differ by run; validation and test worlds are the same for every run and method."""
    return derive(seed, "worlds", "train") if split == "train" else derive(0, "worlds", split)
