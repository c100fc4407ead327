"""The map from raw rows to observations, and from ids to actions: vocabularies and statistics of the training part.

A preparation is saved with a run (preparation.json), so that a session takes raw rows without the log.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from uat.files import FileError, check_path, read_json
from uat.settings import checked, field_types, shown
from uat.spec import Box, Discrete, Items, Named, Spec, Vector, Weights

FILE = "preparation.json"
FORMAT = 1
NUMBERS = "numbers"
"""Name of the part of an observation that holds its numbers."""
NONE = -1
"""The id of "none"."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Preparation:
    """Columns, vocabularies and statistics, fitted to the training part alone."""

    numbers: tuple[str, ...]
    """Observed columns of numbers."""
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    """An observed number is (raw - mean) / scale."""
    categories: dict[str, tuple[str, ...]]
    """Observed column of categories -> names, in the order of their ids."""
    action: tuple[str, ...]
    """Columns of the action."""
    action_names: tuple[str, ...] = ()
    """Names of actions in the order of their ids; empty: actions are numbers or weights."""
    action_integers: bool = False
    """Whether the names of actions are integers in the log."""
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    """Limits of actions that are numbers."""
    unknown: Literal["none", "refuse"] = "none"
    missing: Literal["refuse", "fill"] = "refuse"

    # ------------------------------------------------------------ the problem

    @property
    def observation_space(self) -> Vector | Items | Named:
        """Return the space of observations: a vector, one id, or both by name. Nothing observed is a constant 1."""
        if not self.categories:
            return Vector(max(1, len(self.numbers)))
        if not self.numbers and len(self.categories) == 1:
            return Items(len(next(iter(self.categories.values()))))
        parts: dict[str, Any] = {name: Items(len(names)) for name, names in self.categories.items()}
        return Named({**parts, **({self.numbers_part: Vector(len(self.numbers))} if self.numbers else {})})

    @property
    def numbers_part(self) -> str:
        return NUMBERS if NUMBERS not in self.categories else f"{NUMBERS} of the row"

    @property
    def action_space(self) -> Discrete | Weights | Box:
        if self.action_names:
            return Discrete(len(self.action_names))
        return Box(low=self.low, high=self.high) if self.low else Weights(len(self.action))

    # ------------------------------------------------------------ raw rows

    @cached_property
    def _ids(self) -> dict[str, dict[str, int]]:
        return {column: {name: i for i, name in enumerate(names)} for column, names in self.categories.items()}

    @cached_property
    def _action_ids(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.action_names)}

    def observation(self, rows: Row | Sequence[Row]) -> Any:
        """Return the observation of a raw row, for `Session.act`; several rows are those of several streams.

        Columns that are not observed are ignored.
        """
        several = [rows] if isinstance(rows, Mapping) else list(rows)
        for row in several:
            if not isinstance(row, Mapping):
                raise ValueError(f"a row must map names of columns to values, got {shown(row)}")
        parts: dict[str, Tensor] = {
            column: torch.tensor([self._category(row, column) for row in several]) for column in self.categories
        }
        if not self.numbers:
            return next(iter(parts.values())) if len(parts) == 1 else parts or torch.ones(len(several), 1)
        values = np.array([[self._number(row, i) for i in range(len(self.numbers))] for row in several])
        x = torch.from_numpy(((values - self.mean) / self.scale).astype(np.float32))
        return {**parts, self.numbers_part: x} if parts else x

    def _number(self, row: Row, i: int) -> float:
        column, value = self.numbers[i], _value(row, self.numbers[i])
        if _is_missing(value):
            if self.missing == "fill":
                return self.mean[i]
            raise ValueError(f"column {column}: a number is missing; train with domain.missing=fill to allow that")
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"column {column}: {shown(value)} is not a finite number")
        return number

    def _category(self, row: Row, column: str) -> int:
        value, ids = _value(row, column), self._ids[column]
        if _is_missing(value):
            if self.missing == "fill":
                return NONE
            raise ValueError(f"column {column}: a category is missing; train with domain.missing=fill to allow that")
        place = ids.get(as_name(value), NONE)
        if place == NONE and self.unknown == "refuse":
            raise ValueError(
                f"column {column}: {shown(value)} never occurs in the training part{_near(as_name(value), ids)}; "
                "domain.unknown=none takes such values as none"
            )
        return place

    def action_name(self, action: Any) -> Any:
        """Return the action as the log writes it: a name, or a dictionary of numbers by column."""
        if not self.action_names:
            values = torch.as_tensor(action).reshape(-1).tolist()
            if len(values) != len(self.action):
                raise ValueError(f"action: expected {len(self.action)} numbers, got {len(values)}")
            return dict(zip(self.action, values, strict=True))
        place = int(action)
        if not 0 <= place < len(self.action_names):
            raise ValueError(f"action: ids must lie in [0, {len(self.action_names)}), got {place}")
        name = self.action_names[place]
        return int(name) if self.action_integers else name

    def action_id(self, name: Any) -> int:
        """Return the id of an action as the log writes it, for `Session.act(action=...)`."""
        if not self.action_names:
            raise ValueError(f"actions of this log are numbers ({', '.join(self.action)}) and have no ids")
        if (place := self._action_ids.get(as_name(name))) is None:
            raise ValueError(f"unknown action {shown(name)}{_near(as_name(name), self._action_ids)}")
        return place

    # ------------------------------------------------------------ JSON

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str) -> Preparation:
        """Return the preparation that `to_json` wrote; raise FileError if it is damaged."""
        try:
            if data["format"] != FORMAT:
                raise ValueError(f"it has format {data['format']!r}, and this version reads {FORMAT}")
            kinds = field_types(cls)
            if unknown := sorted(data.keys() - kinds.keys() - {"format"}):
                raise ValueError(f"unknown field {unknown[0]}")
            own = {name: checked(value, kinds[name], name) for name, value in data.items() if name != "format"}
            own["categories"] = {c: checked(names, tuple[str, ...], c) for c, names in own["categories"].items()}
            made = cls(**own)
            if not all(math.isfinite(x) for x in (*made.mean, *made.scale)) or 0 in made.scale:
                raise ValueError("its statistics are not positive and finite")
            if not len(made.numbers) == len(made.mean) == len(made.scale):
                raise ValueError("its statistics are not those of its columns")
            _ = made.observation_space, made.action_space
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise FileError(f"{where} is not a preparation: {error}") from None
        return made

    def fits(self, spec: Spec) -> bool:
        """Whether a policy of this spec takes the observations and actions of this preparation."""
        return spec.obs == self.observation_space and spec.action == self.action_space


def preparation(run: Any) -> Preparation:
    """Return the preparation that a run, or its folder, holds, without the log that the run was trained on."""
    folder = check_path(run if isinstance(run, str | Path) else run.path, "run")
    file = Path(folder) / FILE
    if not file.is_file():
        raise FileError(f"{folder} holds no {FILE}: it is not the run folder of a policy that was trained on logs")
    return Preparation.from_json(read_json(file), str(file))


def as_name(value: Any) -> str:
    """Return the name of a category, the same for text and numbers: 7, 7.0 and "7" are one."""
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value.item() if isinstance(value, np.generic | Tensor) else value)


def _value(row: Row, column: str) -> Any:
    if column not in row:
        raise ValueError(f"the row has no column {column!r}{_near(column, row)}")
    return row[column]


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float | np.floating) and math.isnan(value))


def _near(word: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(word, list(map(str, known)), n=1)
    some = shown(", ".join(map(str, list(known)[:20])), 200).strip("'")
    return f"; did you mean {close[0]!r}?" if close else f"; known: {some}"
