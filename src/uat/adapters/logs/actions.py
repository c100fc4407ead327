"""Actions of a log: ids of names, numbers within limits, or weights; and the sets of allowed actions.

Axes: N rows, S sets of allowed actions, A actions or numbers of an action.
"""

from __future__ import annotations

import numpy as np

from uat.adapters.logs.columns import codes, flags, in_training, numbers
from uat.adapters.logs.config import LogsConfig
from uat.adapters.logs.files import Log
from uat.adapters.logs.findings import Findings
from uat.adapters.logs.keys import Keys
from uat.adapters.logs.roles import Roles
from uat.archives import Array
from uat.data import need
from uat.files import FileError
from uat.settings import shown

MARGIN = 0.1
"""Margin of the limits of actions that are numbers, as a share of the training part's range."""
MOST_FLAGS = 62
"""Most columns of allowed actions, which are packed into one integer."""

Limits = tuple[tuple[float, ...], tuple[float, ...]]


def actions_of(
    config: LogsConfig, log: Log, roles: Roles, keys: Keys, train_N: Array, findings: Findings
) -> tuple[Array, tuple[str, ...], Limits]:
    """Return the actions, the names of their ids, and limits of numbers."""
    if roles.action_kind == "ids":
        return (*_ids(config, log, roles.action[0], keys, train_N, findings), ((), ()))
    value_NA = np.empty((len(keys.order_N), len(roles.action)), dtype=np.float32)
    for i, (name, value_N, _) in enumerate(numbers(log, roles.action, len(keys.order_N))):
        if (wrong_N := ~np.isfinite(value_N)).any():
            row = int(wrong_N.argmax())
            raise FileError(f"{log.place(row, name)}: the action is {log.value(row, name)!r:.60}, not a finite number")
        value_NA[:, i] = value_N[keys.order_N]
    if roles.action_kind == "weights":
        wrong_N = (value_NA < 0).any(1) | (np.abs(value_NA.sum(1, dtype=np.float64) - 1) > 1e-4)
        if wrong_N.any():
            first = int(wrong_N.argmax())
            place = log.place(int(keys.order_N[first]), roles.action[0])
            raise FileError(
                f"{place}: weights must not be negative and sum to 1, got "
                f"a sum of {value_NA[first].sum():g} and a least weight of {value_NA[first].min():g}"
            )
        return value_NA, (), ((), ())
    return value_NA, (), _limits(config, log, roles, keys, train_N, value_NA, findings)


def _ids(
    config: LogsConfig, log: Log, column: str, keys: Keys, train_N: Array, findings: Findings
) -> tuple[Array, tuple[str, ...]]:
    code_N, names = codes(log, column)
    if (missing_N := code_N < 0).any():
        raise FileError(
            f"{log.place(int(missing_N.argmax()), column)} is empty: every step needs the action that was taken"
        )
    code_N = code_N[keys.order_N]
    if config.actions:
        known = {name: i for i, name in enumerate(config.actions)}
        if len(known) < len(config.actions):
            raise ValueError(f"domain.actions={shown(config.actions)} names an action twice")
        id_N = np.array([known.get(name, -1) for name in names], dtype=np.int32)[code_N]
        kept, odd_N, where = config.actions, id_N < 0, "domain.actions"
    else:
        id_N, kept, odd_N = in_training(code_N, names, train_N)
        where = "the training part"
    if odd_N.any():
        first = int(odd_N.argmax())
        findings.error(
            "unseen-actions",
            odd_N.sum(),
            f"{log.place(int(keys.order_N[first]), column)}: the action {names[code_N[first]]!r:.60} never occurs in "
            f"{where}, as in {int(odd_N.sum()):,} rows; list all actions in domain.actions, remove these rows, or "
            "split otherwise",
        )
        id_N = np.maximum(id_N, 0)
    if len(kept) < 2:
        raise FileError(f"{log.path}: column {column} has the one action {', '.join(kept)}: there is nothing to decide")
    return id_N, kept


def targets_of(config: LogsConfig, log: Log, names: tuple[str, ...], keys: Keys) -> Array | None:
    """Return the ids of the actions to imitate; None: the logged ones."""
    if not config.target:
        return None
    if not names:
        raise FileError(f"{log.path}: domain.target is for actions that are ids, and these are numbers")
    code_N, own = codes(log, config.target)
    place = {name: i for i, name in enumerate(names)}
    target_N = np.array([*(place.get(name, -1) for name in own), -1], dtype=np.int32)[code_N]
    if (odd_N := target_N < 0).any():
        row = int(odd_N.argmax())
        raise FileError(
            f"{log.place(row, config.target)}: the action {log.value(row, config.target)!r:.60} is unknown: it never "
            "occurs in the training part; list all actions in domain.actions"
        )
    return target_N[keys.order_N]


def _limits(
    config: LogsConfig, log: Log, roles: Roles, keys: Keys, train_N: Array, value_NA: Array, findings: Findings
) -> Limits:
    """Return the limits of each number of the action; numbers outside are an error."""
    least_A, most_A = value_NA[train_N].min(0).astype(np.float64), value_NA[train_N].max(0).astype(np.float64)
    if config.low and len(config.low) != len(roles.action):
        raise ValueError(f"domain.low={config.low} must have a limit for each of {', '.join(roles.action)}")
    if (constant_A := least_A == most_A).any() and not config.low:
        name = roles.action[int(constant_A.argmax())]
        raise FileError(f"{log.path}: column {name} of the action never varies in the training part: leave it out")
    low = config.low or tuple((least_A - MARGIN * (most_A - least_A)).tolist())
    high = config.high or tuple((most_A + MARGIN * (most_A - least_A)).tolist())
    odd_NA = (value_NA < np.asarray(low, dtype=np.float32)) | (value_NA > np.asarray(high, dtype=np.float32))
    if odd_NA.any():
        first, i = (int(x) for x in np.argwhere(odd_NA)[0])
        findings.error(
            "unseen-actions",
            odd_NA.any(1).sum(),
            f"{log.place(int(keys.order_N[first]), roles.action[i])}: the action {value_NA[first, i]:g} is outside "
            f"[{low[i]:g}, {high[i]:g}]; set domain.low and domain.high",
        )
    return low, high


def allowed_of(
    log: Log, roles: Roles, names: tuple[str, ...], keys: Keys, action: Array, findings: Findings
) -> tuple[Array | None, Array | None]:
    """Return the number of each row's set of allowed actions, and the sets."""
    if not roles.allowed:
        return None, None
    if not names:
        raise FileError(f"{log.path}: domain.allowed is for actions that are ids, and these are numbers")
    if list(roles.allowed.values()) == [""]:
        column = next(iter(roles.allowed))
        set_N, sets = _listed_sets(log, column)
    else:
        column, set_N, sets = _flag_sets(log, roles, names)
    place = {name: i for i, name in enumerate(names)}
    allowed_SA = np.zeros((max(1, len(sets)), len(names)), dtype=bool)
    for s, own in enumerate(sets):
        allowed_SA[s, [place[name] for name in own if name in place]] = True
    if (missing_N := set_N < 0).any():
        raise FileError(f"{log.place(int(missing_N.argmax()), column)} is empty: list the allowed actions in every row")
    set_N = set_N[keys.order_N]
    wrong_N = ~allowed_SA[set_N, action]
    if wrong_N.any():
        first = int(wrong_N.argmax())
        findings.error(
            "action-not-allowed",
            wrong_N.sum(),
            f"{log.place(int(keys.order_N[first]), column)}: the logged action {names[action[first]]!r:.60} is not "
            f"among the allowed ones, as in {int(wrong_N.sum()):,} rows",
        )
    return set_N, allowed_SA


def _listed_sets(log: Log, column: str) -> tuple[Array, list[set[str]]]:
    """Return the code of each row's list of actions, and the lists."""
    pl = need("polars", "data", "reading logs")
    if log.kinds[column] == "list":
        joined = pl.col(column).list.eval(pl.element().cast(pl.String)).list.join("|")
        kinds = {**log.kinds, column: "text"}
        log = Log(log.path, log.frame.with_columns(joined.alias(column)), kinds, log.lazies, log.fingerprint)
    set_N, texts = codes(log, column)
    return set_N, [{name.strip() for name in text.split("|")} for text in texts]


def _flag_sets(log: Log, roles: Roles, names: tuple[str, ...]) -> tuple[str, Array, list[set[str]]]:
    """Return the code of each row's booleans, one for each action, and the sets of actions."""
    columns = {name: column for column, name in roles.allowed.items()}
    if missing := [name for name in names if name not in columns]:
        raise FileError(f"{log.path}: no column of domain.allowed is named after the action {missing[0]!r:.60}")
    if len(names) > MOST_FLAGS:
        raise FileError(f"{log.path}: {len(names)} actions are too many for a column each: write one column of lists")
    bits_N = sum(flags(log, columns[name]).astype(np.int64) << i for i, name in enumerate(names))
    sets, set_N = np.unique(bits_N, return_inverse=True)
    return (
        columns[names[0]],
        set_N.astype(np.int32),
        [{n for i, n in enumerate(names) if bits >> i & 1} for bits in sets],
    )
