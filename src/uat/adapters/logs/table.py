"""A log as tensors: every step once, in the order of episodes and time, and the windows of each split.

Axes: N rows, O observed numbers, W windows, S sets of allowed actions, A actions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from uat.adapters.logs.actions import actions_of, allowed_of, targets_of
from uat.adapters.logs.columns import codes, in_training, numbers
from uat.adapters.logs.config import LogsConfig
from uat.adapters.logs.files import Log, open_log
from uat.adapters.logs.findings import Findings
from uat.adapters.logs.keys import SPLITS, Keys, cut, keys_of, longest, named
from uat.adapters.logs.preparation import Preparation
from uat.adapters.logs.roles import Roles, roles_of
from uat.archives import Array
from uat.checks import MOST_NUMBER
from uat.episode import TensorFields
from uat.files import FileError
from uat.spec import Items, Named, Spec

CONSTANT = 1e-6
"""Numbers whose relative deviation is at most this are treated as constant: they differ by rounding."""


@dataclass(slots=True, kw_only=True)
class Windows(TensorFields):
    """Windows of one split: consecutive rows of one episode."""

    begin_W: Tensor
    length_W: Tensor
    next_W: Tensor
    """Row after the window, or its last row if the episode ends there."""

    def __len__(self) -> int:
        return len(self.begin_W)


@dataclass(slots=True, kw_only=True)
class Steps(TensorFields):
    """Every step of a log, in compact types."""

    obs: Tensor
    """(N, O) float32, or (N,) int32 ids."""
    action: Tensor
    """(N,) int32 ids, or (N, A) float32."""
    target_N: Tensor | None
    """Ids of the actions to imitate; None: the logged actions."""
    reward_N: Tensor
    known_N: Tensor | None
    """False where the reward is unknown; None: all are known."""
    terminated_N: Tensor
    propensity_N: Tensor | None
    allowed_N: Tensor | None
    """Number of the set of allowed actions."""
    allowed_SA: Tensor | None


@dataclass(slots=True, kw_only=True)
class Table:
    """A log that has been read and checked."""

    spec: Spec
    preparation: Preparation
    roles: Roles
    steps: Steps
    windows: dict[str, Windows]
    keys: Keys
    facts: dict[str, Any]
    action_counts: Tensor | None
    """Number of training rows of each action and, in the rows, of each previous action; the last row is "none"."""


def read(config: LogsConfig, findings: Findings | None = None, log: Log | None = None) -> Table:
    """Read a log; raise FileError with file, row and column if it cannot be used, or add that to the findings."""
    findings = findings or Findings()
    log = log or open_log(config.path)
    roles = roles_of(config, log, findings)
    keys = keys_of(config, log, findings)
    train_N = keys.part_N == 0
    if not train_N.any():
        raise FileError(f"{log.path}: the train part is empty; change domain.split, the shares, or domain.split_seed")
    action, names, limits = actions_of(config, log, roles, keys, train_N, findings)
    categories, code_N = _categories(log, roles, keys, train_N, config, findings)
    mean, scale, number_NO = _numbers(config, log, roles, keys, train_N, findings)
    preparation = Preparation(
        numbers=roles.numbers,
        mean=mean,
        scale=scale,
        categories=categories,
        action=roles.action,
        action_names=names,
        action_integers=roles.action_integers,
        low=limits[0],
        high=limits[1],
        unknown=config.unknown,
        missing=config.missing,
    )
    reward_N, known_N = _rewards(config, log, keys, findings)
    allowed_N, allowed_SA = allowed_of(log, roles, names, keys, action, findings)
    horizon = min(config.horizon, longest(keys))
    steps = Steps(
        obs=_packed(preparation, code_N, number_NO, len(keys.order_N)),
        action=torch.from_numpy(action),
        target_N=_tensor(targets_of(config, log, names, keys)),
        reward_N=torch.from_numpy(reward_N),
        known_N=_tensor(known_N),
        terminated_N=torch.from_numpy(keys.terminated_N),
        propensity_N=_tensor(_propensities(config, log, roles, keys, findings)),
        allowed_N=_tensor(allowed_N),
        allowed_SA=_tensor(allowed_SA),
    )
    log.check_unchanged()
    spec = Spec(
        obs=preparation.observation_space,
        action=preparation.action_space,
        horizon=horizon,
        reward_lag=config.reward_lag,
        reward_scale=_reward_scale(config, reward_N, known_N, train_N),
    )
    return Table(
        spec=spec,
        preparation=preparation,
        roles=roles,
        steps=steps,
        windows=_windows(keys, horizon),
        keys=keys,
        facts={"rows": len(keys.order_N), "episodes": keys.episodes, **named(keys.part_N)},
        action_counts=_transitions(action, keys, train_N, len(names)) if names else None,
    )


def _tensor(values: Array | None) -> Tensor | None:
    return None if values is None else torch.from_numpy(values)


def _windows(keys: Keys, horizon: int) -> dict[str, Windows]:
    """Return the windows of each split."""
    cuts = {split: cut(keys, place, horizon) for place, split in enumerate(SPLITS)}
    names = ("begin_W", "length_W", "next_W")
    return {split: Windows(**{n: torch.from_numpy(getattr(own, n)) for n in names}) for split, own in cuts.items()}


# ---------------------------------------------------------------- observations


def _numbers(
    config: LogsConfig, log: Log, roles: Roles, keys: Keys, train_N: Array, findings: Findings
) -> tuple[tuple[float, ...], tuple[float, ...], Array]:
    """Return mean and scale of each observed number, and the numbers (N, O) as policies see them."""
    rows = len(keys.order_N)
    number_NO = np.empty((rows, len(roles.numbers)), dtype=np.float32)
    means, scales = [], []
    for i, (name, value_N, missing_N) in enumerate(numbers(log, roles.numbers, rows)):
        wrong_N = ~np.isfinite(value_N)
        if wrong_N.any():
            fill_N = (wrong_N & (missing_N | np.isnan(value_N))) if config.missing == "fill" else np.zeros_like(wrong_N)
            _check_values(log, name, value_N, wrong_N & ~fill_N, findings)
        x_N = value_N[keys.order_N]
        known_N = train_N & np.isfinite(x_N) if wrong_N.any() else train_N
        if not known_N.any():
            raise FileError(f"{log.path}: column {name} has no value in the training part: leave it out")
        known = x_N[known_N]
        mean, deviation = float(known.mean()), float(known.std())
        if wrong_N.any():
            x_N[~np.isfinite(x_N)] = mean
        if not config.standardise:
            _check_size(log, name, value_N, wrong_N)
            means.append(0.0)
            scales.append(1.0)
        else:
            means.append(mean)
            scales.append(deviation if deviation > CONSTANT * (1 + abs(mean)) else 1.0)
        number_NO[:, i] = (x_N - means[-1]) / scales[-1]
    return tuple(means), tuple(scales), number_NO


def _check_values(log: Log, name: str, value_N: Array, wrong_N: Array, findings: Findings) -> None:
    if not wrong_N.any():
        return
    row = int(wrong_N.argmax())
    raw = log.value(row, name)
    what = "is empty" if raw is None or raw == "" else f"is {raw!r:.60}, not a finite number"
    findings.error(
        "missing-values",
        wrong_N.sum(),
        f"{log.place(row, name)} {what}, as in {int(wrong_N.sum()):,} of {len(value_N):,} rows; correct them, leave "
        "the column out, or fill missing values by domain.missing=fill",
    )


def _check_size(log: Log, name: str, value_N: Array, wrong_N: Array) -> None:
    """Raise FileError for raw numbers that policies cannot take."""
    large_N = ~wrong_N & (np.abs(value_N) > MOST_NUMBER)
    if large_N.any():
        row = int(large_N.argmax())
        raise FileError(
            f"{log.place(row, name)}: {value_N[row]:g} is beyond {MOST_NUMBER:g}; set domain.standardise, or rescale it"
        )


def _categories(
    log: Log, roles: Roles, keys: Keys, train_N: Array, config: LogsConfig, findings: Findings
) -> tuple[dict[str, tuple[str, ...]], dict[str, Array]]:
    """Return the training names of each observed category, and the ids of all rows; other names have the id -1."""
    vocabularies, ids = {}, {}
    for name in roles.categories:
        code_N, names = codes(log, name)
        if (missing_N := code_N < 0).any() and config.missing == "refuse":
            _check_values(log, name, code_N, missing_N, findings)
        id_N, kept, _ = in_training(code_N[keys.order_N], names, train_N)
        if not kept:
            raise FileError(f"{log.path}: column {name} has no value in the training part: leave it out")
        vocabularies[name], ids[name] = kept, id_N
    return vocabularies, ids


def _packed(preparation: Preparation, ids: dict[str, Array], number_NO: Array, rows: int) -> Tensor:
    """Return observations as `Spec.obs` stores them, in compact types."""
    space = preparation.observation_space
    if isinstance(space, Items):
        return torch.from_numpy(next(iter(ids.values())))
    if not isinstance(space, Named):
        return torch.from_numpy(number_NO) if preparation.numbers else torch.ones(rows, 1)
    row_NO, at = np.empty((rows, *space.shape), dtype=np.float32), 0
    for name in space.names:
        width = number_NO.shape[1] if name == preparation.numbers_part else 1
        row_NO[:, at : at + width] = number_NO if name == preparation.numbers_part else ids[name][:, None] + 1
        at += width
    return torch.from_numpy(row_NO)


# ---------------------------------------------------------------- rewards and propensities


def _rewards(config: LogsConfig, log: Log, keys: Keys, findings: Findings) -> tuple[Array, Array | None]:
    """Return rewards, 0 where they are unknown, and a mask of known ones; None: all are known."""
    rows = len(keys.order_N)
    if not config.reward:
        return np.zeros(rows, dtype=np.float32), np.zeros(rows, dtype=bool)
    [(_, value_N, missing_N)] = numbers(log, [config.reward], rows)
    wrong_N = ~missing_N & ~(np.abs(value_N) <= MOST_NUMBER)
    if wrong_N.any():
        row = int(wrong_N.argmax())
        findings.error(
            "reward-not-a-number",
            wrong_N.sum(),
            f"{log.place(row, config.reward)}: the reward is {log.value(row, config.reward)!r:.60}, not a finite "
            f"number, as in {int(wrong_N.sum()):,} rows; leave it empty where it is unknown",
        )
    odd_N = missing_N | wrong_N
    reward_N = np.where(odd_N, 0.0, value_N)[keys.order_N].astype(np.float32)
    return reward_N, ~odd_N[keys.order_N] if odd_N.any() else None


def _reward_scale(config: LogsConfig, reward_N: Array, known_N: Array | None, train_N: Array) -> float:
    """Return the factor on rewards: the setting, or one over the deviation of the training rewards, to four digits."""
    if config.reward_scale:
        return config.reward_scale
    used = reward_N[train_N if known_N is None else train_N & known_N]
    deviation = float(used.std(dtype=np.float64)) if len(used) else 0.0
    return float(f"{1 / deviation:.4g}") if deviation > 1e-9 else 1.0


def _propensities(config: LogsConfig, log: Log, roles: Roles, keys: Keys, findings: Findings) -> Array | None:
    """Return the probability, or the density, of each logged action."""
    if not config.propensity:
        return None
    [(_, value_N, _)] = numbers(log, [config.propensity], len(keys.order_N))
    most, limit = (1.0 + 1e-6, "1") if roles.action_kind == "ids" else (np.inf, "infinity")
    wrong_N = ~((value_N > 0) & (value_N <= most) & np.isfinite(value_N))
    if wrong_N.any():
        row = int(wrong_N.argmax())
        findings.error(
            "propensities",
            wrong_N.sum(),
            f"{log.place(row, config.propensity)}: the propensity is {log.value(row, config.propensity)!r:.60}, "
            f"outside (0, {limit}], as in {int(wrong_N.sum()):,} rows; a logged action has a positive probability",
        )
        value_N = np.where(wrong_N, 1.0, value_N)
    return np.minimum(value_N, most)[keys.order_N].astype(np.float32)


def _transitions(action_N: Array, keys: Keys, train_N: Array, count: int) -> Tensor | None:
    """Count actions by the previous action in the training part; in the last row, the first ones of windows."""
    if count > 2000:
        return None
    previous_N = np.full(len(action_N), count, dtype=np.int64)
    previous_N[1:] = np.where(keys.begins_N[1:], count, action_N[:-1])
    flat = np.bincount(previous_N[train_N] * count + action_N[train_N], minlength=(count + 1) * count)
    return torch.from_numpy(flat.reshape(count + 1, count))
