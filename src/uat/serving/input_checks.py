"""Check the values a session receives: quickly for the common types, thoroughly for all others.

A quick check recognises arrays, CPU tensors and lists that have a common type, the right shape, contiguous memory and
valid values. It takes a few microseconds, which matters because a decision takes about a hundred. Values that it does
not recognise, valid or not, go to `uat.checks`, which accepts them or raises the error. A test checks that both accept
the same values. The results are NumPy arrays: numbers as float32, ids as int64.

Shapes: B streams, A actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from uat.checks import Array, as_tensor, check_actions, check_mask, check_observations, check_rewards, most_reward
from uat.spec import Box, Discrete, Items, Named, Spec, Weights

Values = NDArray[Any]
FLOAT32, FLOAT64, INT64, BOOL = (np.dtype(name) for name in ("float32", "float64", "int64", "bool"))
LARGEST = 0.99e24
"""If the sum of squares is below this, no entry exceeds `checks.MOST_NUMBER`. NaN and infinity compare as not below."""
SCALARS = (int, float, np.floating, np.integer)
OFF = 9e-5
"""Largest deviation of a sum of weights from 1 in the quick check. The thorough check allows 1e-4, which leaves room
for different rounding."""


class InputChecks:
    """Checks of one step of B streams: return each value as NumPy, or raise a ValueError that names the field, the
    value and what was expected."""

    def __init__(self, spec: Spec, streams: int) -> None:
        self.spec, self.streams, self.shape_BA = spec, (streams,), (streams, spec.action.count)
        self.obs_shape = (streams, *spec.obs.shape)
        self.items = spec.obs.count if isinstance(spec.obs, Items) else None
        self.most_earned = 0.99 * most_reward(spec) ** 2

    def is_one(self, obs: Array) -> bool:
        """Whether an observation has no axis of streams."""
        try:
            if isinstance(self.spec.obs, Named):
                parts, given = self.spec.obs.parts, obs if isinstance(obs, Mapping) else {}
                return given.keys() == parts.keys() and all(np.shape(given[k]) == parts[k].shape for k in parts)
            return np.shape(obs) == self.spec.obs.shape
        except ValueError:  # ragged
            return False

    def in_a_batch(self, value: Array | None) -> Any:
        """Return a value of one stream with the axis of streams."""
        if value is None or isinstance(value, Tensor):
            return None if value is None else value[None]
        if isinstance(value, Mapping):
            return {name: np.asarray(part)[None] for name, part in value.items()}
        return np.asarray(value)[None]

    def observations(self, obs: Array) -> Values:
        if isinstance(self.spec.obs, Named):
            x = None  # a dictionary
        else:
            x = numbers(obs, self.obs_shape) if self.items is None else ids(obs, self.obs_shape, self.items)
        return check_observations(obs, self.spec, self.streams).numpy() if x is None else x

    def known(self, reward_known: Array) -> Values:
        """Return the mask of known rewards (B,). A single stream may pass a plain boolean."""
        known_B = np.array([reward_known]) if isinstance(reward_known, bool) and self.streams == (1,) else reward_known
        return check_mask("reward_known", known_B, self.streams).numpy()

    def rewards(self, reward: Array, known_B: Values | None = None) -> Values:
        """Return rewards (B,), with 0 where the reward is unknown. A single stream may pass a plain number."""
        if isinstance(reward, SCALARS) and self.streams == (1,):
            reward = [reward]
        if known_B is not None:
            given_B = as_tensor("reward", reward).numpy()
            if given_B.shape != self.streams:
                raise ValueError(f"reward: expected shape {self.streams}, got {given_B.shape}")
            reward = np.where(known_B, given_B, 0)
        x = numbers(reward, self.streams, self.most_earned)
        return check_rewards(reward, self.spec, self.streams).numpy() if x is None else x

    def actions(self, action: Array) -> Values:
        match self.spec.action:
            case Discrete(count):
                x = ids(action, self.streams, count)
            case Weights():
                x = weights(action, self.shape_BA)
            case Box():
                x = None
        return check_actions("action", action, self.spec, self.streams).numpy() if x is None else x

    def allowed(self, allowed: Array) -> Values:
        if isinstance(self.spec.action, Box):
            self.spec.action.refuse_mask()
        x = _array(allowed, self.shape_BA)
        if x is None or x.dtype != BOOL:
            x = check_mask("allowed", allowed, self.shape_BA).numpy()
        if not (some_B := x.any(-1)).all():
            stream = int(some_B.argmin())
            raise ValueError(f"allowed: every stream needs at least one allowed action, got none in stream {stream}")
        return x


# ---------------------------------------------------------------- quick checks: the values, or None if not recognised


def numbers(values: Array, shape: tuple[int, ...], largest: float = LARGEST) -> Values | None:
    """Return the values as float32 if their sum of squares, in their original type, is below `largest`."""
    x = _array(values, shape)
    if x is None or x.dtype not in (FLOAT32, FLOAT64, INT64):
        return None
    summed = x if x.dtype != INT64 else x.astype(FLOAT64)
    return x.astype(FLOAT32, copy=False) if float(np.vdot(summed, summed)) < largest else None


def ids(values: Array, shape: tuple[int, ...], count: int) -> Values | None:
    x = _array(values, shape)
    if x is None or x.dtype != INT64:
        return None
    values_list = x.tolist()
    return x if min(values_list) >= 0 and max(values_list) < count else None


def weights(values: Array, shape: tuple[int, ...]) -> Values | None:
    x = numbers(values, shape)
    return None if x is None or x.min() < 0 or np.abs(x.sum(-1) - 1).max() > OFF else x


def _array(values: Array, shape: tuple[int, ...]) -> Values | None:
    kind = type(values)
    try:
        if kind is Tensor:
            x = values.numpy()
        elif kind is list:
            x = np.asarray(values)
        elif kind is np.ndarray:
            x = values
        else:
            return None
    except (TypeError, ValueError, RuntimeError):  # ragged lists, gradients, other devices, types unknown to NumPy
        return None
    return x if x.shape == shape and x.flags.c_contiguous else None
