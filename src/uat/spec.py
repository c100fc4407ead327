"""The shape of a decision problem: what is observed, what may be done, and how feedback arrives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from uat.clock import NO_ACTION, Clock
from uat.settings import Count, Delay, Number, Steps, check_fields, checked, shown


class Checked:
    """A dataclass whose fields are checked when it is created."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_fields(self, f"{type(self).__name__}.")


@dataclass(frozen=True, slots=True)
class Vector(Checked):
    """Observations are vectors: (B, T, width) floats."""

    width: Count


@dataclass(frozen=True, slots=True)
class Items(Checked):
    """Observations are item ids: (B, T) integers in [0, count), -1 where there is none."""

    count: Count


@dataclass(frozen=True, slots=True)
class Assets(Checked):
    """Observations are feature rows of assets: (B, T, count, features) floats."""

    count: Count
    features: Count


@dataclass(frozen=True, slots=True)
class Discrete(Checked):
    """Actions are ids: integers in [0, count), -1 where there is none."""

    count: Count


@dataclass(frozen=True, slots=True)
class Weights(Checked):
    """Actions are vectors of `count` non-negative weights that sum to one, zeros where there is none."""

    count: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The shape of one decision problem: all that a method needs to know of a domain."""

    obs: Vector | Items | Assets
    action: Discrete | Weights
    horizon: Steps
    """Steps of one episode."""
    reward_scale: Number = 1.0
    """Rewards reach a policy multiplied by this; the clock does it, nobody else."""
    reward_lag: Delay = 1
    """The reward channel at t carries r[t - reward_lag]: 1 for a simulator without delay, 1 + d with
    delay d; d for logs, whose interaction t is complete when the decision at t is made."""
    facts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Facts of a step that a method may ask for, with their shapes; all other facts are hidden from methods."""

    def __post_init__(self) -> None:
        check_fields(self, "Spec.")
        for name, shape in self.facts.items():
            checked(name, str, "the name in Spec.facts")
            if not all(side > 0 for side in checked(shape, tuple[int, ...], f"Spec.facts[{name!r:.40}]")):
                raise ValueError(f"Spec.facts[{name!r:.40}]={shown(shape)} must be a shape: sides of at least 1")

    def no_action(self, streams: int, device: torch.device | str = "cpu") -> Tensor:
        """What was done before the first step of each stream."""
        if isinstance(self.action, Discrete):
            return torch.full((streams,), NO_ACTION, device=device)
        return torch.zeros(streams, self.action.count, device=device)

    @property
    def clock(self) -> Clock:
        return Clock(reward_lag=self.reward_lag, reward_scale=self.reward_scale, facts=tuple(self.facts))
