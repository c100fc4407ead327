"""A filtered log of ratings as arrays, grouped by user and ordered by time.

Axes: N interactions, U users, I items.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from uat.archives import Array, read_arrays, required, write_arrays
from uat.data.movielens.genres import GROUPS
from uat.files import FileError
from uat.settings import Count, check_fields

LOWEST, HIGHEST = 0.5, 5.0
"""Range of a rating, in stars."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Filters:
    """Thresholds applied to items first and then to users, counting the remaining items only."""

    min_ratings: Count = 50
    """Minimum number of ratings of an item."""
    min_interactions: Count = 100
    """Minimum number of a user's interactions with the remaining items."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratings:
    """Ratings of a source, in any order. Users and items are indices into their sorted names."""

    user_N: Array
    item_N: Array
    rating_N: Array
    time_N: Array
    user_names: Array
    """Names as text; numeric names are sorted by value."""
    item_names: Array
    group_I: Array
    untagged: int = 0
    """Number of items without a genre."""

    def __post_init__(self) -> None:
        wrong_N = ~((self.rating_N >= LOWEST) & (self.rating_N <= HIGHEST))  # also catches NaN
        if wrong_N.any():
            first = int(wrong_N.argmax())
            raise ValueError(
                f"{int(wrong_N.sum())} ratings are not within [{LOWEST}, {HIGHEST}]; "
                f"the first is {self.rating_N[first]} of user {self.user_names[self.user_N[first]]!s}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """Interactions that remain after the filters: each user's in order of time, with ties broken by item."""

    item_N: Array
    """Index of the item in [0, num_items)."""
    rating_N: Array
    """Stars."""
    time_N: Array
    """Seconds."""
    first_U: Array
    """Index of each user's first interaction, followed by the total number: num_users + 1 numbers."""
    user_names: Array
    item_names: Array
    group_I: Array
    """Genre group of each item; see `GROUPS`."""

    @classmethod
    def of(cls, ratings: Ratings, filters: Filters) -> Log:
        """Filter and sort the ratings of a source."""
        rows = _without_repeats(ratings)
        item_N = ratings.item_N[rows]
        kept_I = np.bincount(item_N, minlength=len(ratings.item_names)) >= filters.min_ratings
        rows = rows[kept_I[item_N]]
        kept_U = np.bincount(ratings.user_N[rows], minlength=len(ratings.user_names)) >= filters.min_interactions
        rows = rows[kept_U[ratings.user_N[rows]]]
        if not len(rows):
            raise ValueError(
                f"nothing is left of {len(ratings.rating_N)} ratings: no user has {filters.min_interactions} "
                f"interactions with items of {filters.min_ratings} ratings"
            )
        rows = rows[np.lexsort((ratings.item_N[rows], ratings.time_N[rows], ratings.user_N[rows]))]
        index_I = np.cumsum(kept_I) - 1
        counts_U = np.bincount(ratings.user_N[rows], minlength=len(ratings.user_names))[kept_U]
        return cls(
            item_N=index_I[ratings.item_N[rows]].astype(np.int32),
            rating_N=ratings.rating_N[rows].astype(np.float32),
            time_N=ratings.time_N[rows].astype(np.int64),
            first_U=np.concatenate([[0], np.cumsum(counts_U)]).astype(np.int64),
            user_names=ratings.user_names[kept_U],
            item_names=ratings.item_names[kept_I],
            group_I=ratings.group_I[kept_I].astype(np.int8),
        )

    @property
    def num_users(self) -> int:
        return len(self.user_names)

    @property
    def num_items(self) -> int:
        return len(self.item_names)

    def rows_of(self, user: str) -> slice:
        """Rows of a user's interactions."""
        matches = np.flatnonzero(self.user_names == user)
        if not len(matches):
            raise ValueError(f"unknown user {user!r}; {self.num_users} users remain after the filters")
        index = int(matches[0])
        return slice(int(self.first_U[index]), int(self.first_U[index + 1]))

    def checksum(self) -> str:
        """Checksum of the log, equal on every machine."""
        digest = hashlib.blake2b(digest_size=16)
        for item in fields(self):
            array = np.ascontiguousarray(getattr(self, item.name))
            digest.update(f"{item.name} {array.dtype.str} {array.shape}".encode())
            digest.update(array.data if array.dtype.kind != "U" else "\n".join(array).encode())
        return digest.hexdigest()

    def save(self, path: Path, *, small: bool = False) -> None:
        """Write the log to a file atomically. `small` compresses it, which takes longer."""
        arrays = {item.name: getattr(self, item.name) for item in fields(self)}
        write_arrays(path, {"checksum": np.array(self.checksum()), **arrays}, small=small)

    @classmethod
    def load(cls, path: Path) -> Log:
        """Read a saved log; raise FileError if it is damaged."""
        arrays = read_arrays(path)
        log = cls(**{name: required(path, arrays, name, kinds, (None,)) for name, kinds in SAVED.items()})
        if str(required(path, arrays, "checksum", "U", ())) != log.checksum():
            raise FileError(f"{path} is damaged: its arrays do not match the checksum that was written with them")
        if flaw := log.flaw():
            raise FileError(f"{path} is not a log of ratings: {flaw}")
        return log

    def flaw(self) -> str | None:
        """The first inconsistency between the arrays, as a sentence; None if there is none."""
        interactions, users, items = len(self.item_N), self.num_users, self.num_items
        if not len(self.rating_N) == len(self.time_N) == interactions or len(self.group_I) != items:
            return "its arrays are of different lengths"
        if len(self.first_U) != users + 1 or not users:
            return f"first_U has {len(self.first_U)} entries for {users} users"
        if self.first_U[0] != 0 or self.first_U[-1] != interactions or (np.diff(self.first_U) < 1).any():
            return f"first_U does not divide its {interactions} interactions among users"
        for name, ids, count in (("item_N", self.item_N, items), ("group_I", self.group_I, len(GROUPS))):
            if ids.min() < 0 or ids.max() >= count:
                return f"{name} has numbers outside [0, {count})"
        if not ((self.rating_N >= LOWEST) & (self.rating_N <= HIGHEST)).all():
            return f"it has ratings outside [{LOWEST}, {HIGHEST}]"
        return None


SAVED = {
    "item_N": "i",
    "rating_N": "f",
    "time_N": "i",
    "first_U": "i",
    "user_names": "U",
    "item_names": "U",
    "group_I": "i",
}
"""The arrays of a log, with the kind of their types."""


def _without_repeats(ratings: Ratings) -> Array:
    """Rows to keep, in the order of the source: each user's newest rating of an item, and the highest on a tie."""
    pair_N = ratings.user_N.astype(np.int64) * len(ratings.item_names) + ratings.item_N
    in_order_N = np.sort(pair_N)
    if not (in_order_N[1:] == in_order_N[:-1]).any():
        return np.arange(len(pair_N))
    order = np.lexsort((ratings.rating_N, ratings.time_N, pair_N))
    last_N = np.append(pair_N[order][1:] != pair_N[order][:-1], True)
    return np.sort(order[last_N])


def group_sizes(log: Log) -> Array:
    """Number of items in each group."""
    return np.bincount(log.group_I, minlength=len(GROUPS))
