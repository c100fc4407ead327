"""Where a session's values enter: what is plainly right goes through at once, all else to the thorough checks.

A lean look recognises arrays, tensors on the CPU and lists that are of a common type, of the right shape, contiguous,
and good; it takes a few microseconds, which counts where a decision takes a hundred. What it does not recognise, right
or wrong, `uat.checks` accepts or refuses: so both accept the same, and errors come from one place. A test holds the two
equal. Everything comes out as NumPy: numbers as float32, ids as int64.

Shapes: B streams, A actions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from uat.checks import Array, as_tensor, check_actions, check_mask, check_observations, check_rewards, most_reward
from uat.spec import Box, Discrete, Items, Named, Spec, Weights

Values = NDArray[Any]
FLOAT32, FLOAT64, INT64, BOOL = (np.dtype(name) for name in ("float32", "float64", "int64", "bool"))
LARGEST = 0.99e24
"""A sum of squares below it has no entry beyond `checks.MOST_NUMBER`; NaN and infinities are not below it."""
SCALARS = (int, float, np.floating, np.integer)
OFF = 9e-5
"""How far from 1 weights may sum to at a lean look; the thorough one allows 1e-4, and may round otherwise."""


class Entrance:
    """One step of B streams: each value comes out, or a ValueError names the field, what is seen and what expected."""

    def __init__(self, spec: Spec, streams: int) -> None:
        self.spec, self.streams, self.shape_BA = spec, (streams,), (streams, spec.action.count)
        self.obs_shape = (streams, *spec.obs.shape)
        self.items = spec.obs.count if isinstance(spec.obs, Items) else None
        self.most_earned = 0.99 * most_reward(spec) ** 2

    def observations(self, obs: Array) -> Values:
        if isinstance(self.spec.obs, Named):
            x = None  # a dictionary
        else:
            x = numbers(obs, self.obs_shape) if self.items is None else ids(obs, self.obs_shape, self.items)
        return check_observations(obs, self.spec, self.streams).numpy() if x is None else x

    def rewards(self, reward: Array, known: Array | None = None) -> Values:
        """One number for each stream, or the number itself where there is one stream; 0 where it is not known."""
        if isinstance(reward, SCALARS) and self.streams == (1,):
            reward = [reward]
        if known is not None:
            known_B = np.array([known]) if isinstance(known, bool) and self.streams == (1,) else known
            known_B = check_mask("reward_known", known_B, self.streams).numpy()
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


# ---------------------------------------------------------------- lean looks: the values, or None: not recognised


def numbers(values: Array, shape: tuple[int, ...], largest: float = LARGEST) -> Values | None:
    """As float32, if the sum of their squares is below `largest`; it is summed in the type in which they came."""
    x = _array(values, shape)
    if x is None or x.dtype not in (FLOAT32, FLOAT64, INT64):
        return None
    summed = x if x.dtype != INT64 else x.astype(FLOAT64)
    return x.astype(FLOAT32, copy=False) if float(np.vdot(summed, summed)) < largest else None


def ids(values: Array, shape: tuple[int, ...], count: int) -> Values | None:
    x = _array(values, shape)
    if x is None or x.dtype != INT64:
        return None
    found = x.tolist()
    return x if min(found) >= 0 and max(found) < count else None


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
    except (TypeError, ValueError, RuntimeError):  # ragged lists, gradients, other devices, types that NumPy lacks
        return None
    return x if x.shape == shape and x.flags.c_contiguous else None
