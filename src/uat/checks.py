"""Checks of input values: shape, finiteness and range; a ValueError names the field, its value and what is expected.

`shape` is (B, T) for logs and (B,) for one step of a session. Where `valid` is given, padding may hold anything and
comes out as nothing. Numbers are checked in float32, the type in which they are used, and must not exceed
MOST_NUMBER: norms square what they are given, and a square beyond float32 would stay in a stream's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from uat.clock import NO_ACTION
from uat.settings import MOST_SCALE, shown
from uat.spec import Assets, Box, Discrete, Items, Named, Spec, Vector

Array = Any
"""A tensor, a numpy array, or nested lists of numbers."""
MOST_NUMBER = MOST_SCALE
"""The largest observation or scaled reward, with either sign."""
PLAIN = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)
"""Types of tensors that are used unchanged; other types are accepted if NumPy supports them."""


def check_observations(obs: Array, spec: Spec, shape: tuple[int, ...], valid: Tensor | None = None) -> Tensor:
    """Return checked observations; dictionaries of parts are packed into rows."""
    if not isinstance(spec.obs, Named):
        return _check_part("obs", obs, spec.obs, shape, valid)
    if not isinstance(obs, Mapping) and tuple((row := as_tensor("obs", obs)).shape) == (*shape, *spec.obs.shape):
        obs = spec.obs.unpack(row)
    if not isinstance(obs, Mapping) or obs.keys() != spec.obs.parts.keys():
        got = f"the parts {', '.join(map(str, obs))}" if isinstance(obs, Mapping) else type(obs).__name__
        raise ValueError(f"obs: expected a dictionary of the parts {', '.join(spec.obs.names)}, got {got}")
    parts = spec.obs.parts
    return spec.obs.pack({n: _check_part(f"obs[{n!r}]", obs[n], parts[n], shape, valid) for n in parts})


def _check_part(
    name: str, obs: Array, space: Vector | Items | Assets, shape: tuple[int, ...], valid: Tensor | None
) -> Tensor:
    if isinstance(space, Items):
        return check_ids(name, obs, shape, space.count, valid)
    return check_numbers(name, obs, (*shape, *space.shape), valid)


def check_rewards(reward: Array, spec: Spec, shape: tuple[int, ...], valid: Tensor | None = None) -> Tensor:
    """Return checked rewards as float32."""
    return check_numbers("reward", reward, shape, valid, most=most_reward(spec))


def most_reward(spec: Spec) -> float:
    """Return the largest reward: neither it nor its scaled value exceeds MOST_NUMBER."""
    return MOST_NUMBER / max(1.0, abs(spec.reward_scale))


def check_actions(name: str, action: Array, spec: Spec, shape: tuple[int, ...], valid: Tensor | None = None) -> Tensor:
    """Return checked actions: ids, numbers within the limits of a box, or weights."""
    if isinstance(spec.action, Discrete):
        return check_ids(name, action, shape, spec.action.count, valid)
    if isinstance(spec.action, Box):
        return check_box(name, action, spec.action, shape, valid)
    return check_weights(name, action, (*shape, spec.action.count), valid)


def check_numbers(
    name: str, values: Array, shape: tuple[int, ...], valid: Tensor | None = None, *, most: float = MOST_NUMBER
) -> Tensor:
    """Return checked numbers as float32; with `valid`, padding is not checked and becomes 0."""
    x = _shaped(name, as_tensor(name, values), shape)
    if valid is not None:
        x = torch.where(valid.view(*valid.shape, *[1] * (x.dim() - valid.dim())), x, torch.zeros_like(x))
    used = x.float()
    if (wrong := ~(used.abs() <= most)).any():
        where = _first(wrong)
        if used[where].isfinite():
            raise ValueError(f"{name}: expected numbers from {-most:g} to {most:g}, got {x[where].item():g} at {where}")
        raise ValueError(f"{name}: expected finite numbers, got {x[where].item()} at {where}")
    return used


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


def check_box(name: str, values: Array, box: Box, shape: tuple[int, ...], valid: Tensor | None = None) -> Tensor:
    x = check_numbers(name, values, (*shape, box.count), valid)
    low, high = torch.tensor(box.low), torch.tensor(box.high)
    wrong = (x < low) | (x > high)
    if (wrong := wrong if valid is None else wrong & valid[..., None]).any():
        where = _first(wrong)
        limits = f"from {low[where[-1]].item():g} to {high[where[-1]].item():g}"
        raise ValueError(
            f"{name}: expected numbers {limits}, the limits of the box, got {x[where].item():g} at {where}"
        )
    return x


def check_propensities(values: Array, spec: Spec, shape: tuple[int, ...], valid: Tensor | None = None) -> Tensor:
    """(B, T) probabilities of logged actions, in (0, 1], or positive densities in a box; 1 in padding."""
    x = check_numbers("propensity", values, shape, valid)
    most = MOST_NUMBER if isinstance(spec.action, Box) else 1.0
    wrong = ~((x > 0) & (x <= most))
    if (wrong := wrong if valid is None else wrong & valid).any():
        where = _first(wrong)
        raise ValueError(f"propensity: expected numbers in (0, {most:g}], got {x[where].item():g} at {where}")
    return x if valid is None else torch.where(valid, x, torch.ones_like(x))


def check_mask(name: str, values: Array, shape: tuple[int, ...]) -> Tensor:
    x = as_tensor(name, values, "booleans")
    if x.dtype != torch.bool or tuple(x.shape) != shape:
        raise ValueError(f"{name}: expected booleans of shape {shape}, got {x.dtype} of shape {tuple(x.shape)}")
    return x


def check_valid(values: Array, shape: tuple[int, ...]) -> Tensor:
    """(B, T) True for the first steps of each episode, at least one, and False for the padding after them."""
    valid_BT = check_mask("valid", values, shape)
    if not (begun_B := valid_BT[:, 0]).all():
        raise ValueError(f"valid: every episode must begin with a real step, got False at {_first(~begun_B)[0], 0}")
    if (holes_BT := valid_BT[:, 1:] & ~valid_BT[:, :-1]).any():
        episode, step = _first(holes_BT)
        raise ValueError(
            f"valid: padding may only follow an episode's last step, got True after False at {episode, step + 1}"
        )
    return valid_BT


def check_allowed(allowed: Array, target: Tensor, spec: Spec, valid_BT: Tensor) -> Tensor:
    """(B, T, A) mask in which every real step allows an action, and its target. In padding all are allowed."""
    if isinstance(spec.action, Box):
        spec.action.refuse_mask()
    allowed_BTA = check_mask("allowed", allowed, (*valid_BT.shape, spec.action.count))
    if (none_BT := ~allowed_BTA.any(-1) & valid_BT).any():
        raise ValueError(f"allowed: every step needs at least one allowed action, got none at {_first(none_BT)}")
    if isinstance(spec.action, Discrete):
        hit_BT = allowed_BTA.gather(-1, target.clamp_min(0)[..., None]).squeeze(-1)
    else:
        hit_BT = (allowed_BTA | (target == 0)).all(-1)
    if (missed_BT := ~hit_BT & valid_BT).any():
        where = _first(missed_BT)
        raise ValueError(f"target: expected an allowed action at every step, got {target[where].tolist()} at {where}")
    return allowed_BTA | ~valid_BT[..., None]


def as_tensor(name: str, values: Array, what: str = "numbers") -> Tensor:
    """Return a user's value as a plain tensor on the CPU; raise for values of other types."""
    if isinstance(values, Tensor):
        if (odd := _oddity(values)) is not None:
            raise ValueError(f"{name}: expected {what}, got {odd}")
        values = values.detach().cpu().resolve_neg()
        if values.dtype in PLAIN:
            return values
    if np.ma.is_masked(values):
        raise ValueError(f"{name}: expected {what}, got a masked array, some of whose values are missing")
    try:
        x = np.asarray(values)
    except Exception as error:  # a foreign class may raise anything
        raise ValueError(f"{name}: expected {what}, got {type(values).__name__} ({shown(str(error), 100)})") from None
    if x.dtype.kind not in "biuf" or x.dtype.itemsize > 8:
        raise ValueError(f"{name}: expected {what}, got {type(values).__name__} ({x.dtype} in NumPy)")
    if x.dtype.kind == "u" and x.size and int(x.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{name}: expected {what} of at most 64 bits with a sign, got {x.max()}")
    signed = np.int64 if x.dtype.kind == "u" else x.dtype.newbyteorder("=")
    return torch.from_numpy(np.require(x, dtype=signed, requirements=["C", "W"]))


def _oddity(x: Tensor) -> str | None:
    """Return a description of a tensor that holds no plain numbers; None: it holds plain numbers."""
    if x.is_meta:
        return "a tensor on the device 'meta', which has no values"
    if x.is_nested or x.layout != torch.strided:
        return f"a tensor of layout {'nested' if x.is_nested else x.layout}"
    if x.is_quantized or x.is_complex():
        return f"a tensor of {x.dtype}"
    return None


def _shaped(name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(x.shape)}")
    return x


def _first(wrong: Tensor) -> tuple[int, ...]:
    return tuple(wrong.nonzero()[0].tolist())
