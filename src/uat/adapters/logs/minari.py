"""Minari datasets as frames, if `minari` is installed: one row for each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from uat.data import need
from uat.files import FileError

ROLES = {"episode": "episode", "time": "time", "action": ("action*",), "reward": "reward", "done": "done"}
"""Roles of the columns of the frame."""


def frame_of(name: str) -> Any:
    """Return a dataset as a frame with the columns episode, time, obs_*, action or action_*, reward and done."""
    minari = need("minari", "minari", f"reading the dataset {name}")
    pl = need("polars", "data", "reading logs")
    try:
        dataset = minari.load_dataset(name)
    except Exception as error:  # minari raises errors of many types
        raise FileError(f"minari cannot load {name}: {str(error).strip() or type(error).__name__}") from None
    parts = [pl.DataFrame(_columns(number, episode)) for number, episode in enumerate(dataset.iterate_episodes())]
    if not parts:
        raise FileError(f"the Minari dataset {name} holds no episode")
    return pl.concat(parts)


def _columns(number: int, episode: Any) -> dict[str, Any]:
    """Return the columns of one episode; the observation after the last step is left out."""
    steps = len(episode.rewards)
    return {
        "episode": np.full(steps, number, dtype=np.int64),
        "time": np.arange(steps, dtype=np.int64),
        **_flat("obs", episode.observations, steps),
        **_flat("action", episode.actions, steps),
        "reward": np.asarray(episode.rewards, dtype=np.float64),
        "done": np.asarray(episode.terminations, dtype=bool),
    }


def _flat(name: str, values: Any, steps: int) -> dict[str, Any]:
    """Return numbers, vectors and dictionaries of them as flat columns: obs, obs_0, obs_place_1."""
    if isinstance(values, Mapping):
        return {n: x for key, part in values.items() for n, x in _flat(f"{name}_{key}", part, steps).items()}
    x = np.asarray(values)[:steps]
    if x.dtype.kind not in "biuf":
        raise FileError(f"{name} of a Minari dataset must hold numbers, got {x.dtype}")
    flat = x.reshape(steps, -1)
    return {name: flat[:, 0]} if x.ndim == 1 else {f"{name}_{i}": flat[:, i] for i in range(flat.shape[1])}
