"""The shape of a decision problem: observations, actions, and the timing of feedback."""

from __future__ import annotations

import math
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


# ---------------------------------------------------------------- observations


@dataclass(frozen=True, slots=True)
class Vector(Checked):
    """Observations are vectors: (B, T, width) floats."""

    width: Count

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.width,)


@dataclass(frozen=True, slots=True)
class Items(Checked):
    """Observations are item ids: (B, T) integers in [0, count), -1 for "none"."""

    count: Count

    @property
    def shape(self) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class Assets(Checked):
    """Observations are feature rows of assets: (B, T, count, features) floats."""

    count: Count
    features: Count

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count, self.features)


@dataclass(frozen=True, slots=True)
class Named(Checked):
    """Observations are dictionaries with a part for each name. They are stored as rows of floats, (B, T, width): `pack`
    concatenates the parts in the order of their names, and `unpack` splits a row again."""

    parts: Mapping[str, Vector | Items | Assets]

    def __post_init__(self) -> None:
        check_fields(self, "Named.")
        if not self.parts:
            raise ValueError("Named.parts={} must name at least one part")
        for name, part in self.parts.items():
            checked(name, str, "the name in Named.parts")
            checked(part, Vector | Items | Assets, f"Named.parts[{name!r:.40}]")
            if isinstance(part, Items) and part.count > MOST_PACKED_ITEMS:
                raise ValueError(f"Named.parts[{name!r:.40}]={part} must have at most {MOST_PACKED_ITEMS} items")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parts, in their order within a row."""
        return tuple(sorted(self.parts))

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(math.prod(part.shape) for part in self.parts.values()),)

    def pack(self, values: Mapping[str, Tensor]) -> Tensor:
        """(..., width) floats; ids are stored plus 1, so that a row of zeros holds no item."""
        if values.keys() != self.parts.keys():
            raise ValueError(
                f"obs: expected the parts {', '.join(self.names)}, got {', '.join(map(str, sorted(values)))}"
            )
        rows = []
        for name in self.names:
            part, value = self.parts[name], values[name]
            lead = value.shape[: value.dim() - len(part.shape)]
            rows.append((value + 1 if isinstance(part, Items) else value).reshape((*lead, -1)).float())
        return torch.cat(rows, dim=-1)

    def unpack(self, row: Tensor) -> dict[str, Tensor]:
        """Return each part in its own shape, with ids as integers again."""
        sizes = [math.prod(self.parts[name].shape) for name in self.names]
        parts = {}
        for name, value in zip(self.names, row.split(sizes, dim=-1), strict=True):
            part = self.parts[name]
            value = value.reshape((*row.shape[:-1], *part.shape))
            parts[name] = value.round().long() - 1 if isinstance(part, Items) else value
        return parts


Observations = Vector | Items | Assets | Named
MOST_PACKED_ITEMS = 2**24 - 1
"""Largest number of ids in a row of floats: integers up to 2^24 are exact as floats."""


# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Discrete(Checked):
    """Actions are ids: integers in [0, count), -1 for "none"."""

    count: Count

    @property
    def numbers(self) -> int:
        """Number of outputs that describe a distribution over actions: the logits."""
        return self.count


@dataclass(frozen=True, slots=True)
class Weights(Checked):
    """Actions are vectors of `count` non-negative weights that sum to one, zeros for "none"."""

    count: Count

    @property
    def numbers(self) -> int:
        """Number of outputs that describe a distribution over actions: the logits."""
        return self.count


@dataclass(frozen=True, slots=True)
class Box(Checked):
    """Actions are vectors of bounded numbers, such as torques; zeros for "none"."""

    low: tuple[Number, ...]
    high: tuple[Number, ...]

    def __post_init__(self) -> None:
        check_fields(self, "Box.")
        if len(self.low) != len(self.high) or not self.low:
            raise ValueError(f"Box.low={self.low} and Box.high={self.high} must have equally many limits, at least one")
        if any(low >= high for low, high in zip(self.low, self.high, strict=True)):
            raise ValueError(f"Box.low={self.low} must lie below Box.high={self.high} in every dimension")

    def refuse_mask(self) -> None:
        """Raise a ValueError: masks of allowed actions are unsupported in a box."""
        raise ValueError(f"allowed: actions of {self} cannot be masked, because they are not discrete")

    @property
    def count(self) -> int:
        """Number of dimensions of an action."""
        return len(self.low)

    @property
    def numbers(self) -> int:
        """Number of outputs that describe a distribution over actions: means and log-deviations."""
        return 2 * len(self.low)


Actions = Discrete | Weights | Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The shape of a decision problem: everything that a method needs to know about a domain."""

    obs: Vector | Items | Assets | Named
    action: Discrete | Weights | Box
    horizon: Steps | None
    """Steps of one episode; None: streams are endless, and the caller of a rollout gives the number of steps."""
    reward_scale: Number = 1.0
    """Factor on the rewards that policies see; only the clock applies it."""
    reward_lag: Delay = 1
    """The reward channel at t carries r[t - reward_lag]: 1 for a simulator without delay, 1 + d with
    delay d; d for logs, whose interaction t is complete when the decision at t is made."""
    facts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Facts of a step that methods see, with their shapes; all other facts are hidden from methods."""

    def __post_init__(self) -> None:
        if isinstance(self.action, Vector):
            raise ValueError(
                f"Spec.action={self.action} is for observations; give vector actions as a Box with limits for "
                f"each number, such as Box(low=(-1.0,) * {self.action.width}, high=(1.0,) * {self.action.width})"
            )
        check_fields(self, "Spec.")
        for name, shape in self.facts.items():
            checked(name, str, "the name in Spec.facts")
            if not all(side > 0 for side in checked(shape, tuple[int, ...], f"Spec.facts[{name!r:.40}]")):
                raise ValueError(f"Spec.facts[{name!r:.40}]={shown(shape)} must be a shape of positive integers")

    @property
    def steps(self) -> int:
        """The horizon, for code that needs one; raise a ValueError if streams are endless."""
        if self.horizon is None:
            raise ValueError("Spec.horizon=None: streams are endless; give the number of steps, or set the horizon")
        return self.horizon

    def no_action(self, streams: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the previous action at the first step of each stream: none."""
        if isinstance(self.action, Discrete):
            return torch.full((streams,), NO_ACTION, device=device)
        return torch.zeros(streams, self.action.count, device=device)

    @property
    def clock(self) -> Clock:
        return Clock(reward_lag=self.reward_lag, reward_scale=self.reward_scale, facts=tuple(self.facts))
