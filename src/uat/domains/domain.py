"""The base class of domains; each domain is one column of the paper's main table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from uat.channel import FeedbackConfig
from uat.contracts import Agent, Reader, Recording, Simulator
from uat.episode import Trajectory
from uat.metrics import Metric
from uat.noise import derive
from uat.spec import Discrete, Spec

Split = Literal["train", "validation", "test"]


class Domain(ABC):
    """A decision problem with its worlds, its metrics and its references.

    Subclasses must give `name`, `spec` and `simulator`; everything else has a default.
    """

    name: str
    spec: Spec
    train_tasks: tuple[str, ...] = ("default",)
    """Tasks of this domain; one model is trained for each."""
    task: str = "default"
    """The task that this instance trains and evaluates."""
    setting: str = "default"
    """Short text of the settings that differ from the defaults; "default" if none does."""
    metrics: tuple[Metric, ...] = (Metric(name="return", label="Return"),)
    """Metrics that `summarise` returns; the first one selects the best checkpoint and is never partial."""
    rivals: tuple[str, ...] = ()
    """References with which every method is compared, in addition to the feedback-blind method."""
    block: float = 1.0
    """Mean length of the blocks in which intervals resample episodes, if episodes follow each other in time; 1:
    episodes are independent."""

    plateau: str | None = None
    """The reference whose validation score policies reach without using feedback, if they may stay there for long:
    patience does not end the training of a policy that sees rewards before it has left that level. None: there is no
    such level."""

    @property
    def registered(self) -> tuple[str, Any] | None:
        """Return the name and the settings under which configs hold this object; None: those of its class."""
        return None

    @abstractmethod
    def simulator(self, split: Split, device: torch.device | str) -> Simulator[Any] | Recording:
        """Return the simulator or the recording of one split."""

    def measure(self, trajectory: Trajectory) -> dict[str, Tensor]:
        """Return one value per episode (B,) of each metric, or for `summarise`; NaN: a partial metric is undefined."""
        return {"return": torch.where(trajectory.valid, trajectory.reward, 0.0).sum(1)}

    def summarise(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return, for each metric, values whose mean is the metric, given the values of `measure` for all episodes.

        Override it for metrics that are not means over episodes.
        """
        return values

    def curves(self, trajectory: Trajectory) -> dict[str, Tensor]:
        """Return one value per step (B, T) of each curve inside an episode; NaN: padding, or an undefined value.

        By default: the reward, where it is known, and the accuracy of ids, where there is an expert.
        """
        defined_BT, values = trajectory.valid, {}
        if trajectory.reward_known is not None:
            defined_BT = defined_BT & trajectory.reward_known
        values["reward"] = torch.where(defined_BT, trajectory.reward.double(), torch.nan)
        if trajectory.target is not None and isinstance(self.spec.action, Discrete):
            right_BT = (trajectory.action == trajectory.target).double()
            values["accuracy"] = torch.where(trajectory.valid, right_BT, torch.nan)
        return values

    def references(self) -> Mapping[str, Agent[Any] | Reader]:
        """Return the agents that are scored beside every policy: "ceiling" (the Bayes filter) and "random".

        They receive true feedback. A domain with a recording adds "expert"; a simulator supplies its own expert.
        """
        return {}

    def references_under(self, feedback: FeedbackConfig) -> Mapping[str, Agent[Any] | Reader]:
        """Return references that receive corrupted feedback and know how it is corrupted, so that they are the ceiling
        of policies with the same feedback.

        Each replaces the reference of the same name; all others receive true feedback. Default: none.
        """
        return {}

    def preparation(self) -> Mapping[str, Any] | None:
        """Return what turns raw data into observations, as JSON that a run folder keeps for acting (preparation.json).
        None: observations need no preparation."""
        return None

    @property
    def episodes(self) -> Mapping[str, int]:
        """Return the number of episodes of each finite split. Evaluation plays all of them, and their worlds need not
        depend on a seed."""
        return {}

    def episode_count(self, split: Split, wanted: int) -> int:
        """Return the number of episodes to play: all of a finite split, otherwise as many as wanted."""
        return self.episodes.get(split, wanted)


def split_seed(split: Split, seed: int) -> int:
    """Return the seed of a split's worlds. Only training worlds depend on the run's seed."""
    return derive(seed, "worlds", "train") if split == "train" else derive(0, "worlds", split)
