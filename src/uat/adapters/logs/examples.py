"""Generated logs: one with a hidden regime whose best action is known, and one for every trap that the check catches.

    from uat.adapters.logs.examples import hidden_regime, write
    write(hidden_regime(episodes=2000), "events.parquet")

Axes: E episodes, T steps, N = E * T rows, O observed numbers, A actions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from uat.archives import Array
from uat.data import need
from uat.files import FileError, replacing

ROLES: dict[str, Any] = {
    "episode": "customer",
    "time": "day",
    "action": ("offer",),
    "reward": "clicked",
    "propensity": "propensity",
}
"""Roles of the columns of `hidden_regime`."""
OFFERS = ("coupon", "gift", "letter", "nothing")
REGIONS = ("east", "north", "south", "west")


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A generated log, and the truth about it."""

    columns: dict[str, Any]
    best_N: Array
    """The best action of each row, which depends on the hidden regime. Ids are those of the domain."""
    regime_N: Array
    probability_NA: Array
    """Probability of each action under the logging policy."""
    value_NA: Array
    """Probability of the reward after each action."""

    @property
    def roles(self) -> dict[str, Any]:
        """Settings of the columns that are there."""
        return {name: x for name, x in ROLES.items() if (x if isinstance(x, str) else x[0]) in self.columns}

    def without(self, column: str) -> Example:
        return replace(self, columns={name: x for name, x in self.columns.items() if name != column})

    def with_best(self) -> Example:
        """Return the example with the best action as a column `best`, for `target`."""
        return self.having(best=self.columns["offer"].changed(self.best_N))

    def having(self, **columns: Any) -> Example:
        """Return the example with some columns replaced or added."""
        return replace(self, columns={**self.columns, **columns})


def hidden_regime(
    episodes: int = 2000,
    steps: int = 25,
    *,
    actions: int = 4,
    observed: int = 3,
    switch: float = 0.05,
    explore: float = 0.6,
    hit: float = 0.8,
    miss: float = 0.2,
    seed: int = 0,
) -> Example:
    """Return a log of customers and offers. The offer that pays depends on what is observed and on a hidden regime.

    The best action is (k + regime) mod actions, where k is the largest of `actions` products of the observed numbers
    with fixed weights. The regime of an episode is drawn uniformly and switches at each step with probability `switch`.
    The reward is 1 with probability `hit` after the best action, otherwise with probability `miss`. The logging policy
    takes action k with probability 1 - explore, and a uniformly random action otherwise; its probability is logged.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    rows = episodes * steps
    x_NO = generator.standard_normal((rows, observed), dtype=np.float32)
    weight_OA = np.random.Generator(np.random.PCG64(7)).standard_normal((observed, actions)).astype(np.float32)
    favourite_N = (x_NO @ weight_OA).argmax(1)
    change_ET = generator.random((episodes, steps), dtype=np.float32) < switch
    jump_ET = np.where(change_ET, generator.integers(1, actions, (episodes, steps)), 0)
    jump_ET[:, 0] = generator.integers(0, actions, episodes)
    regime_N = (jump_ET.cumsum(1) % actions).reshape(-1)
    best_N = (favourite_N + regime_N) % actions
    random_N = generator.random(rows, dtype=np.float32) < explore
    action_N = np.where(random_N, generator.integers(0, actions, rows), favourite_N)
    probability_NA = np.full((rows, actions), explore / actions, dtype=np.float32)
    np.put_along_axis(probability_NA, favourite_N[:, None], 1 - explore + explore / actions, axis=1)
    value_NA = np.full((rows, actions), miss, dtype=np.float32)
    np.put_along_axis(value_NA, best_N[:, None], hit, axis=1)
    chance_N = np.take_along_axis(value_NA, action_N[:, None], axis=1)[:, 0]
    names = OFFERS if actions <= len(OFFERS) else tuple(f"offer {i:03d}" for i in range(actions))
    columns: dict[str, Any] = {
        "customer": np.repeat(np.arange(episodes), steps),
        "day": np.tile(np.arange(steps), episodes),
        **{f"x{i}": x_NO[:, i] for i in range(observed)},
        "region": Text(REGIONS, np.repeat(generator.integers(0, len(REGIONS), episodes), steps)),
        "offer": Text(names[:actions], action_N),
        "clicked": (generator.random(rows) < chance_N).astype(np.float32),
        "propensity": np.take_along_axis(probability_NA, action_N[:, None], axis=1)[:, 0],
    }
    return Example(columns=columns, best_N=best_N, regime_N=regime_N, probability_NA=probability_NA, value_NA=value_NA)


@dataclass(frozen=True, slots=True)
class Text:
    """A column of names, as numbers of names."""

    names: tuple[str, ...]
    code_N: Array

    def __len__(self) -> int:
        return len(self.code_N)

    def changed(self, code_N: Array) -> Text:
        return Text(self.names, code_N)


def frame(columns: dict[str, Any]) -> Any:
    """Return columns as a polars frame."""
    pl = need("polars", "data", "writing logs")

    def series(name: str, values: Any) -> Any:
        if isinstance(values, Text):
            names = pl.Series(values.names, dtype=pl.String)
            return names.gather(values.code_N).alias(name)
        return pl.Series(name, values)

    return pl.DataFrame([series(name, values) for name, values in columns.items()])


def write(example: Example | dict[str, Any], path: Path | str) -> Path:
    """Write a log as .parquet, .csv or .arrow, atomically."""
    path = Path(path)
    table = frame(example.columns if isinstance(example, Example) else example)
    writers = {".parquet": table.write_parquet, ".csv": table.write_csv, ".arrow": table.write_ipc}
    if path.suffix not in writers:
        raise FileError(f"{path} must end in {', '.join(writers)}")
    with replacing(path) as file:
        writers[path.suffix](file)
    return path


# ---------------------------------------------------------------- traps


def _generator(seed: int = 1) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def _shifted(values: Array, customer_N: Array, by: int) -> Array:
    """Return each row's value `by` rows later in its episode; its own where the episode ends."""
    later = np.roll(values, -by)
    return np.where(np.roll(customer_N, -by) == customer_N, later, values)


def copycat(e: Example) -> Example:
    """Repeat the last offer in 19 of 20 steps."""
    offer, day_N = e.columns["offer"], e.columns["day"]
    again_N = (_generator().random(len(offer)) < 0.95) & (day_N > 0)
    start_N = np.maximum.accumulate(np.where(again_N, 0, np.arange(len(offer))))
    return e.without("propensity").having(offer=offer.changed(offer.code_N[start_N]))


def confounded(e: Example) -> Example:
    """Add a column `urgent` that drives offers and clicks; the trap is to leave it out of the observations."""
    offer, generator = e.columns["offer"], _generator()
    urgent_N = generator.random(len(offer)) < 0.5
    code_N = np.where(urgent_N & (generator.random(len(offer)) < 0.8), 0, offer.code_N)
    clicked_N = np.where(urgent_N, generator.random(len(offer)) < 0.9, e.columns["clicked"])
    changed = {"offer": offer.changed(code_N), "clicked": clicked_N.astype(np.float32)}
    return e.without("propensity").having(**changed, urgent=urgent_N.astype(np.int64))


def raw_scales(e: Example) -> Example:
    """Observe an income in cents and an age in years instead of standardised numbers."""
    return e.having(x0=3_000_000 + 1_000_000 * e.columns["x0"].astype(np.float64), x1=40 + 12 * e.columns["x1"])


def reward_leak(e: Example) -> Example:
    """Observe the amount of the order, which exists only after a click."""
    clicked_N = e.columns["clicked"]
    return e.having(order=clicked_N * (20 + 5 * _generator().random(len(clicked_N))))


def action_leak(e: Example) -> Example:
    """Observe the number of the campaign, which is written when the offer is made."""
    return e.having(campaign=e.columns["offer"].code_N * 10 + 7)


def next_step_leak(e: Example) -> Example:
    """Observe the result of the next step, as a table that was joined one row too late holds it."""
    return e.having(outcome=_shifted(e.columns["clicked"], e.columns["customer"], 1))


def rare_action(e: Example) -> Example:
    """Make one offer almost never."""
    offer = e.columns["offer"]
    rare_N = (offer.code_N == 3) & (_generator().random(len(offer)) > 0.001)
    return e.without("propensity").having(offer=offer.changed(np.where(rare_N, 0, offer.code_N)))


def imbalance(e: Example) -> Example:
    """Make the same offer in 19 of 20 steps."""
    offer, generator = e.columns["offer"], _generator()
    same_N = generator.random(len(offer)) < 0.95
    return e.without("propensity").having(offer=offer.changed(np.where(same_N, 3, offer.code_N)))


def constant_reward(e: Example) -> Example:
    """Pay the same reward in every step."""
    return e.having(clicked=np.ones(len(e.columns["clicked"])))


def rare_reward(e: Example) -> Example:
    """Pay a reward in one of 500 steps."""
    return e.having(clicked=(_generator().random(len(e.columns["clicked"])) < 0.002).astype(np.float32))


def constant_column(e: Example) -> Example:
    """Observe a column with one value."""
    return e.having(country=np.ones(len(e.columns["x0"])))


def gaps(e: Example) -> Example:
    """Lose one day in fifty."""
    kept_N = _generator().random(len(e.columns["day"])) > 0.02
    return _taken(e, np.flatnonzero(kept_N))


def unsorted_time(e: Example) -> Example:
    """Write the rows in random order."""
    return _taken(e, _generator().permutation(len(e.columns["day"])))


def duplicate_steps(e: Example) -> Example:
    """Write some rows twice."""
    rows = len(e.columns["day"])
    return _taken(e, np.sort(np.concatenate([np.arange(rows), np.arange(5, rows, 997)])))


def propensities(e: Example) -> Example:
    """Log a propensity of zero in one of a thousand rows, and of 1.5 in another."""
    value_N = e.columns["propensity"].copy()
    value_N[3::1000], value_N[7::1000] = 0.0, 1.5
    return e.having(propensity=value_N)


def wrong_propensities(e: Example) -> Example:
    """Log the propensity of a uniformly random policy, which the logging policy is not."""
    return e.having(propensity=np.full(len(e.columns["propensity"]), 0.25, dtype=np.float32))


def missing_values(e: Example) -> Example:
    """Leave some observations empty."""
    value_N = e.columns["x1"].copy()
    value_N[11::500] = np.nan
    return e.having(x1=value_N)


def _taken(e: Example, rows: Array) -> Example:
    return e.having(**{n: x.changed(x.code_N[rows]) if isinstance(x, Text) else x[rows] for n, x in e.columns.items()})


TRAPS: dict[str, Callable[[Example], Example]] = {
    "copycat": copycat,
    "confounding": confounded,
    "raw-scales": raw_scales,
    "reward-leak": reward_leak,
    "action-leak": action_leak,
    "next-step-leak": next_step_leak,
    "rare-actions": rare_action,
    "class-imbalance": imbalance,
    "constant-reward": constant_reward,
    "rare-rewards": rare_reward,
    "constant-columns": constant_column,
    "gaps": gaps,
    "unsorted-time": unsorted_time,
    "duplicate-steps": duplicate_steps,
    "propensities": propensities,
    "propensity-mismatch": wrong_propensities,
    "missing-values": missing_values,
}
"""Name of a finding -> function that puts its trap into a clean log."""
OBSERVED: dict[str, tuple[str, ...]] = {"confounding": ("x*", "region")}
"""Trap -> observations of its settings, where they are not all columns without another role."""
