"""The order of a log: episodes, time, splits and windows. No value of an observation is read here.

Axes: N rows in the order of episodes and time, E episodes, W windows.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from uat.adapters.logs.columns import codes, flags
from uat.adapters.logs.config import LogsConfig
from uat.adapters.logs.files import Log
from uat.adapters.logs.findings import Findings
from uat.archives import Array
from uat.data import need
from uat.files import FileError
from uat.noise import derive

SPLITS = ("train", "validation", "test")
NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}
REGULAR = 0.9
"""Share of equal time differences from which on time is regular, so that other differences are gaps."""


@dataclass(slots=True, kw_only=True)
class Keys:
    """Rows in the order of episodes and time."""

    order_N: Array
    """Row of the log."""
    episode_N: Array
    """Number of the episode, from 0."""
    part_N: Array
    """Split of the row: a place in SPLITS."""
    begins_N: Array
    """True where a window must begin: a new episode, another split, or after a gap that splits."""
    ends_N: Array
    """True at the last row of each episode."""
    terminated_N: Array
    """True where the task ended."""
    episodes: int
    step: float | None = None
    """The usual difference in time, if time is regular."""


def keys_of(config: LogsConfig, log: Log, findings: Findings) -> Keys:
    """Read episode, time, ends and splits; raise FileError, or add findings, for rows that are out of order."""
    done_N = flags(log, config.done) if config.done else None
    episode_N, names = _episodes(config, log, done_N)
    time_N = _times(log, config.time) if config.time else None
    order_N = _order(config, log, episode_N, time_N, findings)
    keys = Keys(
        order_N=order_N,
        episode_N=episode_N[order_N],
        part_N=np.zeros(0),
        begins_N=np.ones(len(order_N), dtype=bool),
        ends_N=np.ones(len(order_N), dtype=bool),
        terminated_N=np.zeros(0),
        episodes=len(np.unique(episode_N)) if names is None else len(names),
    )
    same_N = keys.episode_N[1:] == keys.episode_N[:-1]
    keys.begins_N[1:] = ~same_N
    keys.ends_N[:-1] = ~same_N
    keys.terminated_N = keys.ends_N.copy() if done_N is None else done_N[order_N]
    _check_ends(log, config, keys, findings)
    if time_N is not None:
        _gaps(config, log, keys, time_N[order_N], same_N, findings)
    keys.part_N = _parts(config, log, keys, time_N, names)
    keys.begins_N[1:] |= keys.part_N[1:] != keys.part_N[:-1]
    _check_parts(config, log, keys, findings)
    return keys


def _episodes(config: LogsConfig, log: Log, done_N: Array | None) -> tuple[Array, list[str] | None]:
    """Return the number of each row's episode, and the names of episodes; None: they are numbered."""
    if config.episode:
        episode_N, names = codes(log, config.episode)
        if (missing := episode_N < 0).any():
            raise FileError(f"{log.place(int(missing.argmax()), config.episode)} is empty: every row needs an episode")
    elif done_N is not None:
        episode_N = np.zeros(len(done_N), dtype=np.int32)
        np.cumsum(done_N[:-1], out=episode_N[1:])
        names = None
    else:
        pl = need("polars", "data", "reading logs")
        episode_N, names = np.zeros(log.select(pl.len()).item(), dtype=np.int32), None
    if not len(episode_N):
        raise FileError(f"{log.path} holds no rows")
    return episode_N, names


def _times(log: Log, column: str) -> Array:
    """Return times as numbers: seconds, or the numbers of the column; text may be either."""
    pl = need("polars", "data", "reading logs")
    x = pl.col(column)
    if log.kinds[column] == "time":
        read = x.cast(pl.Datetime("us")).cast(pl.Int64) / 1e6
    elif log.kinds[column] == "text":
        text = x.cast(pl.String)
        stamp = text.str.to_datetime(strict=False, time_unit="us", ambiguous="null").cast(pl.Int64) / 1e6
        day = text.str.to_date("%Y-%m-%d", strict=False).cast(pl.Datetime("us")).cast(pl.Int64) / 1e6
        number = text.cast(pl.Float64, strict=False)
        row = log.select(number.is_null().all().alias("number"), day.is_null().all().alias("day")).row(0)
        read = number if not row[0] else stamp if row[1] else day
    else:
        read = x.cast(pl.Float64, strict=False)
    time_N = log.select(read.alias("time"))["time"].to_numpy()
    if (wrong := ~np.isfinite(time_N)).any():
        row = int(wrong.argmax())
        raise FileError(
            f"{log.place(row, column)}: {log.value(row, column)!r:.60} is not a time; write numbers, dates "
            "(2024-05-31) or times (2024-05-31 12:00:00) in every row"
        )
    return time_N


def _order(config: LogsConfig, log: Log, episode_N: Array, time_N: Array | None, findings: Findings) -> Array:
    """Return the rows in the order of episodes and time, without repeated steps if the settings say so."""
    grouped = (np.diff(episode_N) >= 0).all()
    order_N = np.arange(len(episode_N)) if grouped else np.argsort(episode_N, kind="stable")
    if time_N is None:
        return order_N
    here_N, when_N = episode_N[order_N], time_N[order_N]
    late_N = (here_N[1:] == here_N[:-1]) & (when_N[1:] < when_N[:-1])
    if late_N.any():
        row = int(order_N[int(late_N.argmax()) + 1])
        findings.warning(
            "unsorted-time",
            late_N.sum(),
            f"{log.place(row, config.time)}: {int(late_N.sum()):,} of {len(order_N):,} rows are earlier than the row "
            "of their episode before; rows are sorted by time, so check that the column is the time of the decision",
        )
        order_N = np.lexsort((time_N, episode_N))
        here_N, when_N = episode_N[order_N], time_N[order_N]
    twice_N = (here_N[1:] == here_N[:-1]) & (when_N[1:] == when_N[:-1])
    if not twice_N.any():
        return order_N
    first = int(twice_N.argmax())
    rows = sorted(map(int, order_N[first : first + 2]))
    if config.duplicates == "refuse":
        findings.error(
            "duplicate-steps",
            twice_N.sum(),
            f"{log.place(rows[1], config.time)}: {int(twice_N.sum()):,} rows repeat the episode and the time of "
            f"another, this one those of row {rows[0] + 1}; remove them, or keep one by domain.duplicates=first or "
            "last",
        )
        return order_N
    return order_N[np.append(True, ~twice_N) if config.duplicates == "first" else np.append(~twice_N, True)]


def _check_ends(log: Log, config: LogsConfig, keys: Keys, findings: Findings) -> None:
    """Report rows that follow the end of their episode."""
    if (early_N := keys.terminated_N & ~keys.ends_N).any():
        row = int(keys.order_N[int(early_N.argmax())])
        findings.error(
            "rows-after-the-end",
            early_N.sum(),
            f"{log.place(row, config.done)} ends the episode, but later rows of it follow, in {int(early_N.sum()):,} "
            "cases; give each part an episode of its own, or leave domain.episode empty",
        )


def _gaps(config: LogsConfig, log: Log, keys: Keys, time_N: Array, same_N: Array, findings: Findings) -> None:
    """Find the usual step of regular time, and report or split at other steps."""
    steps = np.diff(time_N)[same_N]
    if not len(steps):
        return
    usual = float(np.median(steps))
    if usual <= 0 or np.isclose(steps, usual, rtol=1e-6).mean() < REGULAR:
        return  # irregular time has no gaps
    keys.step = usual
    gap_N = same_N & (np.diff(time_N) > 1.5 * usual)
    if not gap_N.any():
        return
    row = int(keys.order_N[int(gap_N.argmax()) + 1])
    sentence = (
        f"{log.place(row, config.time)}: {int(gap_N.sum()):,} steps come later than the usual {usual:g} after the step "
        "before; a policy takes steps as equally long, so fill the gaps, or begin new windows by domain.gaps=split"
    )
    if config.gaps == "refuse":
        findings.error("gaps", gap_N.sum(), sentence)
    elif config.gaps == "keep":
        findings.warning("gaps", gap_N.sum(), sentence)
    else:
        keys.begins_N[1:] |= gap_N


# ---------------------------------------------------------------- splits


def _parts(config: LogsConfig, log: Log, keys: Keys, time_N: Array | None, names: list[str] | None) -> Array:
    """Return the split of each row."""
    if config.split == "column":
        return _named_parts(config, log)[keys.order_N]
    shares = np.array([1 - config.validation_share - config.test_share, 1 - config.test_share])
    if config.split == "time":
        assert time_N is not None
        when_N = time_N[keys.order_N]
        return np.searchsorted(np.quantile(when_N, shares), when_N, side="right").astype(np.int8)
    names = list(map(str, range(keys.episodes))) if names is None else names
    part_E = np.searchsorted(shares, hashed(names, config.split_seed), side="right").astype(np.int8)
    return part_E[keys.episode_N]


def hashed(names: list[str], seed: int) -> Array:
    """Return a number in [0, 1) for each name, which depends on the seed and the name alone."""
    with np.errstate(over="ignore"):
        x = np.fromiter((zlib.crc32(name.encode()) for name in names), dtype=np.uint64, count=len(names))
        x += np.uint64(derive(seed, "logs", "split"))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _named_parts(config: LogsConfig, log: Log) -> Array:
    code_N, names = codes(log, config.split_column)
    places = {name: place for place, split in enumerate(SPLITS) for name in NAMES[split]}
    lookup = np.array([places.get(name.strip().lower(), -1) for name in names] + [-1], dtype=np.int8)
    part_N = lookup[code_N]
    if (wrong := part_N < 0).any():
        row = int(wrong.argmax())
        raise FileError(
            f"{log.place(row, config.split_column)}: {log.value(row, config.split_column)!r:.60} is not a split; write "
            "train, validation or test"
        )
    return part_N


def _check_parts(config: LogsConfig, log: Log, keys: Keys, findings: Findings) -> None:
    """Report splits without rows."""
    counts = np.bincount(keys.part_N, minlength=len(SPLITS))
    for split, count in zip(SPLITS, counts, strict=True):
        if not count:
            findings.error(
                "empty-split",
                1,
                f"{log.path}: the {split} part is empty: {keys.episodes:,} episode{'s' * (keys.episodes != 1)} with "
                f"{len(keys.order_N):,} rows are split by {config.split}; change domain.split, the shares, or "
                "domain.split_seed",
            )


@dataclass(slots=True, kw_only=True)
class Cut:
    """Windows of one split: consecutive rows of one episode."""

    begin_W: Array
    length_W: Array
    next_W: Array
    """Row after the window if its episode goes on, otherwise its last row."""


def cut(keys: Keys, split: int, horizon: int) -> Cut:
    """Cut the rows of a split into windows of at most `horizon` steps."""
    starts = np.flatnonzero(keys.begins_N)
    lengths = np.diff(np.append(starts, len(keys.begins_N)))
    mine = keys.part_N[starts] == split
    starts, lengths = starts[mine], lengths[mine]
    counts = -(-lengths // horizon)
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    begin_W = np.repeat(starts, counts) + place * horizon
    length_W = np.minimum(horizon, np.repeat(lengths, counts) - place * horizon)
    last_W = begin_W + length_W - 1
    next_W = np.where(keys.ends_N[last_W], last_W, np.minimum(last_W + 1, len(keys.begins_N) - 1))
    return Cut(begin_W=begin_W, length_W=length_W.astype(np.int32), next_W=next_W)


def longest(keys: Keys) -> int:
    """Return the most rows of one episode that can be in one window."""
    starts = np.flatnonzero(keys.begins_N)
    return int(np.diff(np.append(starts, len(keys.begins_N))).max())


def named(part_N: Array) -> dict[str, Any]:
    """Return the number of rows of each split."""
    counts = np.bincount(part_N, minlength=len(SPLITS))
    return {f"{split} rows": int(count) for split, count in zip(SPLITS, counts, strict=True)}
