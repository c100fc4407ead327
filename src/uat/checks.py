"""Values where they enter: right shape, finite, in range; otherwise a ValueError with the field, seen and expected.

`shape` is (B, T) for logs and (B,) for one step of a session. Where `valid` is given, padding may hold anything and
comes out as nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from uat.types import NO_ACTION, Assets, Discrete, Items, Spec, Vector

Array = Any
"""A tensor, a numpy array, or nested lists of numbers."""


def check_observations(obs: Array, spec: Spec, shape: tuple[int, ...], valid: Tensor | None = None) -> Tensor:
    match spec.obs:
        case Vector(width):
            return check_numbers("obs", obs, (*shape, width), valid)
        case Assets(count, features):
            return check_numbers("obs", obs, (*shape, count, features), valid)
        case Items(count):
            return check_ids("obs", obs, shape, count, valid)


def check_actions(name: str, action: Array, spec: Spec, shape: tuple[int, ...], valid: Tensor | None = None) -> Tensor:
    if isinstance(spec.action, Discrete):
        return check_ids(name, action, shape, spec.action.count, valid)
    return check_weights(name, action, (*shape, spec.action.count), valid)


def check_numbers(name: str, values: Array, shape: tuple[int, ...], valid: Tensor | None = None) -> Tensor:
    x = _shaped(name, as_tensor(name, values), shape)
    if valid is not None:
        x = torch.where(valid.view(*valid.shape, *[1] * (x.dim() - valid.dim())), x, torch.zeros_like(x))
    if (wrong := ~x.isfinite()).any():
        where = _first(wrong)
        raise ValueError(f"{name}: expected finite numbers, got {x[where].item()} at {where}")
    return x.float()


def check_ids(name: str, values: Array, shape: tuple[int, ...], count: int, valid: Tensor | None = None) -> Tensor:
    x = as_tensor(name, values)
    if x.is_floating_point() or x.dtype == torch.bool:
        raise ValueError(f"{name}: expected integer ids, got {x.dtype}")
    x = _shaped(name, x, shape).long()
    real = torch.ones_like(x, dtype=torch.bool) if valid is None else valid
    if (wrong := ((x < 0) | (x >= count)) & real).any():
        where = _first(wrong)
        raise ValueError(f"{name}: ids must lie in [0, {count}), got {x[where].item()} at {where}")
    return torch.where(real, x, NO_ACTION)


def check_weights(name: str, values: Array, shape: tuple[int, ...], valid: Tensor | None = None) -> Tensor:
    x = check_numbers(name, values, shape, valid)
    wrong = (x < 0).any(-1) | ((x.sum(-1) - 1).abs() > 1e-4)
    if (wrong if valid is None else wrong & valid).any():
        where = _first(wrong if valid is None else wrong & valid)
        raise ValueError(
            f"{name}: weights must be non-negative and sum to 1, got a sum of {x[where].sum().item()} "
            f"and a least weight of {x[where].min().item()} at {where}"
        )
    return x


def check_mask(name: str, values: Array, shape: tuple[int, ...]) -> Tensor:
    x = as_tensor(name, values, "booleans")
    if x.dtype != torch.bool or tuple(x.shape) != shape:
        raise ValueError(f"{name}: expected booleans of shape {shape}, got {x.dtype} of shape {tuple(x.shape)}")
    return x


def as_tensor(name: str, values: Array, what: str = "numbers") -> Tensor:
    try:
        return values.detach().cpu() if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: expected {what}, got {type(values).__name__} ({error})") from None


def _shaped(name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(x.shape)}")
    return x


def _first(wrong: Tensor) -> tuple[int, ...]:
    return tuple(wrong.nonzero()[0].tolist())
