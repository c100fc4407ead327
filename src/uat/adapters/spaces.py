"""Gymnasium spaces: the conversion of observations and actions to rows of numbers and ids, and back.

Conversions are pure functions of the space and the value. This module needs NumPy and Gymnasium alone, so that
processes that step environments start without torch.

  observations   Box, MultiBinary                       numbers, flattened
                 Discrete                               an id, counted from 0
                 MultiDiscrete                          an id for each element
                 Dict, Tuple                            named parts, such as `pose.angle` or `0`
  actions        Discrete, MultiDiscrete, MultiBinary   one id for each combination
                 Box                                    numbers, flattened
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from uat.settings import MOST_SCALE, shown

Values = NDArray[Any]
MOST_COMBINATIONS = 4096
"""Limit of the combinations of a MultiDiscrete or MultiBinary action, each of which is an id."""


class BadValueError(ValueError):
    """A value that does not fit its space; `row` is its place in the batch."""

    def __init__(self, message: str, row: int = 0) -> None:
        super().__init__(message)
        self.row = row


# ---------------------------------------------------------------- observations


@dataclass(frozen=True, slots=True)
class Part:
    """A Box, Discrete, MultiDiscrete or MultiBinary space inside an observation."""

    path: tuple[str | int, ...]
    """Keys and positions that lead to the space in nested dictionaries and tuples."""
    shape: tuple[int, ...]
    dtype: Any
    counts: tuple[int, ...] | None = None
    """Number of ids of each element; None: the elements are numbers."""
    starts: tuple[int, ...] = ()
    """The first id of each element."""

    @property
    def label(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def width(self) -> int:
        return math.prod(self.shape)

    @property
    def names(self) -> tuple[str, ...]:
        """Name of the part, or of each element if a MultiDiscrete space has several."""
        if self.counts is None or not self.shape:
            return (self.label,)
        return tuple(".".join(map(str, (*self.path, i))) for i in range(self.width))

    def rows(self, batch: Sequence[Any]) -> Values:
        """(B, width) float32 numbers, or int64 ids counted from 0, of this part in each observation."""
        values = [_follow(obs, self.path, row) for row, obs in enumerate(batch)]
        try:
            array = np.asarray(values)
        except ValueError:  # ragged
            array = np.empty(0)
        if array.shape != (len(batch), *self.shape) or array.dtype.kind not in "biuf":
            row, value = next(((i, v) for i, v in enumerate(values) if not self._fits(v)), (0, values[0]))
            where = f" at {self.label!r}" if self.path else ""
            raise BadValueError(
                f"an observation{where} of shape {np.shape(value)} ({shown(value)}), where its space has {self.shape}",
                row,
            )
        array = array.reshape(len(batch), -1)
        return self._numbers(array) if self.counts is None else self._ids(array, self.counts)

    def _fits(self, value: Any) -> bool:
        try:
            array = np.asarray(value)
        except ValueError:
            return False
        return array.shape == self.shape and array.dtype.kind in "biuf"

    def _numbers(self, array: Values) -> Values:
        with np.errstate(over="ignore"):
            rows = array.astype(np.float32)
        if not np.isfinite(rows).all():
            row, column = (int(i) for i in np.argwhere(~np.isfinite(rows))[0])
            where = f"number {column} of the observation" + (f" at {self.label!r}" if self.path else "")
            raise BadValueError(
                f"{shown(array[row, column].item())} as {where}, where only finite float32 numbers can be", row
            )
        return rows

    def _ids(self, array: Values, counts: tuple[int, ...]) -> Values:
        ids = array.astype(np.int64) - np.asarray(self.starts)
        wrong = (ids < 0) | (ids >= np.asarray(counts)) | (array != array.astype(np.int64))
        if wrong.any():
            row, column = (int(i) for i in np.argwhere(wrong)[0])
            low = self.starts[column]
            where = f" at {self.names[column]!r}" if self.names[column] else ""
            raise BadValueError(
                f"the id {shown(array[row, column].item())} as its observation{where}, "
                f"where its space has {low} to {low + counts[column] - 1}",
                row,
            )
        return ids

    def value(self, row: Values) -> Any:
        """Return the value in the space, given the numbers or ids of one row."""
        if self.counts is not None:
            row = row.round().astype(np.int64) + np.asarray(self.starts)
        value = row.astype(self.dtype).reshape(self.shape)
        return value[()] if self.counts is not None and not self.shape else value


def _follow(obs: Any, path: tuple[str | int, ...], row: int) -> Any:
    for i, key in enumerate(path):
        try:
            obs = obs[key]
        except (KeyError, IndexError, TypeError):
            name = ".".join(map(str, path[: i + 1]))
            raise BadValueError(f"an observation without the part {name!r} ({shown(obs)})", row) from None
    return obs


def _parts(space: Any, path: tuple[str | int, ...] = ()) -> Iterator[Part]:
    from gymnasium import spaces

    match space:
        case spaces.Dict():
            for key, inner in space.spaces.items():
                yield from _parts(inner, (*path, key))
        case spaces.Tuple():
            for i, inner in enumerate(space.spaces):
                yield from _parts(inner, (*path, i))
        case spaces.Discrete():
            yield Part(path, (), space.dtype, (int(space.n),), (int(space.start),))
        case spaces.MultiDiscrete():
            counts = tuple(int(n) for n in space.nvec.reshape(-1))
            yield Part(path, space.nvec.shape, space.dtype, counts, tuple(int(n) for n in space.start.reshape(-1)))
        case spaces.MultiBinary():
            yield Part(path, tuple(space.shape), space.dtype)
        case spaces.Box() if space.dtype == np.uint8 and len(space.shape) > 1:
            raise ValueError(
                f"observations{_at(path)} are images ({space}), which are not supported yet: turn them into a vector "
                "of features with gymnasium.wrappers.TransformObservation"
            )
        case spaces.Box() if math.prod(space.shape):
            yield Part(path, tuple(space.shape), space.dtype)
        case _:
            raise ValueError(
                f"observations{_at(path)} are {shown(space)}, which is not supported: supported are Box, Discrete, "
                "MultiDiscrete, MultiBinary, Dict and Tuple; gymnasium.wrappers.TransformObservation makes one of them"
            )


def _at(path: tuple[str | int, ...]) -> str:
    return f" at {'.'.join(map(str, path))!r}" if path else ""


class ObservationConverter:
    """Turns observations of a space into rows, and back.

    A space of one part gives the part's numbers (B, width), or ids (B,) if it is Discrete. Any other space gives rows
    of floats that hold the parts in the order of their names, with ids plus 1, as `uat.spec.Named` packs them.
    """

    def __init__(self, space: Any) -> None:
        self.space, self.parts = space, tuple(_parts(space))
        if not self.parts:
            raise ValueError(f"observations are {space}, which holds nothing")
        first = self.parts[0]
        self.single = not first.path and (first.counts is None or not first.shape)
        """Whether the space is one part without a name."""
        columns = [
            (
                name,
                part,
                None if part.counts is None else part.counts[i],
                slice(i, i + 1) if part.counts else slice(None),
            )
            for part in self.parts
            for i, name in enumerate(part.names)
        ]
        names = [name for name, *_ in columns]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"observations have two parts of the name {twice!r}: rename a key of {shown(space)}")
        self.columns = sorted(columns, key=lambda column: column[0])
        """Name, part, number of ids (None: numbers), and place within the part, in the order of a row."""

    @property
    def sizes(self) -> dict[str, tuple[int | None, int]]:
        """Name -> number of ids (None: numbers) and width."""
        return {name: (count, 1 if count else part.width) for name, part, count, _ in self.columns}

    def rows(self, batch: Sequence[Any]) -> Values:
        """Return a row for each observation; raise BadValueError for one that does not fit the space."""
        if self.single:
            rows = self.parts[0].rows(batch)
            return rows if self.parts[0].counts is None else rows[:, 0]
        whole = {part.path: part.rows(batch) for part in self.parts}
        places = [whole[part.path][:, place] + (0 if count is None else 1) for _, part, count, place in self.columns]
        return np.concatenate([place.astype(np.float32) for place in places], axis=1)

    def values(self, rows: Values) -> list[Any]:
        """Return the observations of these rows: the inverse of `rows`."""
        if self.single:
            return [self.parts[0].value(row) for row in rows.reshape(len(rows), -1)]
        named = self.named(rows)
        found = [
            {part.path: np.concatenate([named[name][i].reshape(-1) for name in part.names]) for part in self.parts}
            for i in range(len(rows))
        ]
        values = [{part.path: part.value(own[part.path]) for part in self.parts} for own in found]
        return [_nested(self.space, own) for own in values]

    def named(self, rows: Values) -> dict[str, Values]:
        """Split packed rows into parts by name: numbers (B, width) and ids (B,)."""
        parts, at = {}, 0
        for name, (count, width) in self.sizes.items():
            own = rows[:, at : at + width]
            parts[name] = own if count is None else own[:, 0].round().astype(np.int64) - 1
            at += width
        return parts


def _nested(space: Any, values: Mapping[tuple[str | int, ...], Any], path: tuple[str | int, ...] = ()) -> Any:
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return {key: _nested(inner, values, (*path, key)) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_nested(inner, values, (*path, i)) for i, inner in enumerate(space.spaces))
    return values[path]


# ---------------------------------------------------------------- actions


class ActionConverter:
    """Turns actions of a space into ids (B,) or numbers (B, A), and back."""

    def __init__(self, space: Any) -> None:
        from gymnasium import spaces

        self.space = space
        self.counts: tuple[int, ...] = ()
        """Number of ids of each element of a discrete space; empty: a Box."""
        match space:
            case spaces.Discrete():
                self.shape, self.counts, starts = (), (int(space.n),), [int(space.start)]
            case spaces.MultiDiscrete():
                self.shape, starts = space.nvec.shape, space.start.reshape(-1)
                self.counts = tuple(int(n) for n in space.nvec.reshape(-1))
            case spaces.MultiBinary():
                self.shape, self.counts = tuple(space.shape), (2,) * math.prod(space.shape)
                starts = [0] * len(self.counts)
            case spaces.Box():
                self.shape, starts = tuple(space.shape), []
                self._check_limits(space)
            case _:
                raise ValueError(
                    f"actions are {shown(space)}, which is not supported: supported are Discrete, MultiDiscrete, "
                    "MultiBinary and Box; gymnasium.wrappers.TransformAction makes one of them"
                )
        self.starts = np.asarray(starts, dtype=np.int64)
        if len(self.counts) > 1 and self.combinations > MOST_COMBINATIONS:
            raise ValueError(
                f"actions are {shown(space)} with {self.combinations:,} combinations, more than the limit of "
                f"{MOST_COMBINATIONS:,}: reduce them with gymnasium.wrappers.TransformAction"
            )

    @staticmethod
    def _check_limits(space: Any) -> None:
        low, high = (np.asarray(x, dtype=np.float64).reshape(-1) for x in (space.low, space.high))
        if not low.size:
            raise ValueError(f"actions are {space}, which holds nothing")
        if (np.maximum(np.abs(low), np.abs(high)) > MOST_SCALE).any():
            raise ValueError(
                f"actions are {shown(space)}, which has no finite limits: give it limits with "
                "gymnasium.wrappers.TransformAction(env, lambda action: action, gymnasium.spaces.Box(-1, 1, "
                f"{space.shape}))"
            )
        if (low >= high).any():
            i = int((low >= high).argmax())
            raise ValueError(
                f"actions are {shown(space)}, whose number {i} is always {low[i]:g}: leave it out with "
                "gymnasium.wrappers.TransformAction"
            )

    @property
    def combinations(self) -> int:
        """Number of ids; 0 for a Box."""
        return math.prod(self.counts) if self.counts else 0

    @property
    def limits(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Lowest and highest numbers of a Box."""
        low, high = (np.asarray(x, dtype=np.float64).reshape(-1) for x in (self.space.low, self.space.high))
        return tuple(low.tolist()), tuple(high.tolist())

    def values(self, actions: Values) -> list[Any]:
        """Return the environment's actions for ids (B,) or numbers (B, A); numbers are kept inside the limits."""
        if not self.counts:
            rows = actions.reshape(len(actions), *self.shape).astype(np.float64)
            if np.issubdtype(self.space.dtype, np.integer):
                rows = np.rint(rows)
            inside = np.clip(rows, self.space.low, self.space.high).astype(self.space.dtype)
            return [np.asarray(row) for row in np.clip(inside, self.space.low, self.space.high)]
        if not self.shape:
            return [np.int64(action) for action in actions.reshape(-1).astype(np.int64) + self.starts]
        places = np.stack(np.unravel_index(actions.reshape(-1).astype(np.int64), self.counts), axis=-1) + self.starts
        return list(places.astype(self.space.dtype).reshape(len(places), *self.shape))

    def rows(self, batch: Sequence[Any]) -> Any:
        """Return ids (B,) or numbers (B, A) of the environment's actions: the inverse of `values`."""
        array = np.asarray(batch).reshape(len(batch), -1)
        if not self.counts:
            return array.astype(np.float32)
        places = (array.astype(np.int64) - self.starts).T
        return np.ravel_multi_index(tuple(places), self.counts).astype(np.int64)

    def allowed(self, mask: Any) -> Values:
        """(A,) True for allowed ids, given a mask of all ids, or one mask for each element of the action."""
        if not self.counts:
            raise BadValueError(f"a mask of actions, but actions of {shown(self.space)} cannot be masked")
        several = isinstance(mask, tuple | list) and len(mask) == len(self.counts) and np.ndim(mask[0]) == 1
        masks = [np.asarray(one) for one in mask] if several else [np.asarray(mask).reshape(-1)]
        wanted = self.counts if several else (self.combinations,)
        if any(len(one) != count or one.dtype.kind not in "biuf" for one, count in zip(masks, wanted, strict=True)):
            raise BadValueError(
                f"a mask of actions with {', '.join(str(one.size) for one in masks)} entries, where its actions have "
                f"{self.combinations}"
            )
        joint = masks[0].astype(bool)
        for one in masks[1:]:
            joint = (joint[:, None] & one.astype(bool)).reshape(-1)
        return joint
