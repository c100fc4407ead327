"""Settings of a log: which column is what, how episodes are split, and the small TOML file beside the log."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from uat.files import FileError, read_text
from uat.settings import Amount, Delay, Episodes, Inner, Number, Seed, Steps, changed_fields, check_fields

PREFIX = "logs:"
"""Prefix of the names of logs on the command line: `logs:events.parquet`."""
MINARI = "minari:"
"""Prefix of the path of a Minari dataset: `logs:minari:D4RL/door/human-v2`."""
SHORT = ("episode", "time", "observations", "categories", "action", "reward", "propensity", "allowed", "done")
"""Settings that the command line also takes without the prefix `domain.`, such as `--action`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogsConfig:
    path: str = ""
    """File (.parquet, .csv, .arrow, .ipc or .feather), folder of such files, or minari:DATASET."""
    episode: str = ""
    """Column that names the episode, such as a customer; empty: `done` ends episodes, or all rows are one episode."""
    time: str = ""
    """Column that orders the steps of an episode: numbers, dates or times; empty: the order of the rows."""
    observations: tuple[str, ...] = ()
    """Columns that the policy observes; patterns such as x* are allowed. Empty: all columns without another role."""
    categories: tuple[str, ...] = ()
    """Observed columns of numbers that are categories or item ids; patterns are allowed. Text always is."""
    action: tuple[str, ...] = ()
    """Column of the action; several columns, or a pattern, for actions of several numbers or weights."""
    action_kind: Literal["auto", "ids", "numbers", "weights"] = "auto"
    """Kind of actions: names or ids, numbers within limits, or weights that sum to one. auto: ids for one column of
    text or integers, otherwise numbers."""
    actions: tuple[str, ...] = ()
    """All names of actions, in the order of their ids; empty: those of the training part."""
    low: tuple[Number, ...] = ()
    """Lower limits of actions that are numbers; empty: the training part's, with a margin of a tenth of its range."""
    high: tuple[Number, ...] = ()
    """Upper limits of actions that are numbers."""
    target: str = ""
    """Column of the action to imitate, such as an expert's, named as in `action`; empty: the logged action."""
    reward: str = ""
    """Column of the reward; a missing value is an unknown reward. Empty: all rewards are unknown."""
    propensity: str = ""
    """Column of the probability with which the logged action was taken."""
    allowed: tuple[str, ...] = ()
    """One column of lists of allowed actions (in CSV: names between |), or a pattern of one column of booleans for each
    action, such as can_*, where the action's name replaces the asterisk."""
    done: str = ""
    """Column of booleans: the task ended with this step. Empty: every episode ends with its last row."""
    split: Literal["episode", "time", "column"] = "episode"
    """How training, validation and test are split: by a hash of the episode's name, by time, or by `split_column`."""
    split_column: str = ""
    """Column that holds train, validation or test."""
    split_seed: Seed = 0
    """Seed of the hash of the split by episode."""
    validation_share: Inner = 0.1
    """Share of episodes, or of the rows in time, for validation."""
    test_share: Inner = 0.2
    """Share of episodes, or of the latest rows in time, for the test."""
    validation_windows: Episodes = 1024
    """Maximum number of windows of each validation, drawn once."""
    test_windows: Episodes = 4096
    """Maximum number of windows of the test, drawn once."""
    horizon: Steps = 64
    """Maximum number of steps of a window; longer episodes are split into windows."""
    reward_lag: Delay = 1
    """Steps after which the policy sees a reward: 1, at the next step."""
    reward_scale: Amount = 0.0
    """Factor on the rewards that policies see; 0: one over the deviation of the training rewards."""
    standardise: bool = True
    """Subtract the training mean from every observed number, and divide by the training deviation."""
    missing: Literal["refuse", "fill"] = "refuse"
    """Treatment of missing observations: refuse the file, or take the training mean and the category "none"."""
    unknown: Literal["none", "refuse"] = "none"
    """Treatment, while acting, of a category that training has not seen: the category "none", or an error."""
    duplicates: Literal["refuse", "first", "last"] = "refuse"
    """Treatment of two rows of one episode and time: refuse the file, or keep the first or the last."""
    gaps: Literal["keep", "split", "refuse"] = "keep"
    """Treatment of gaps in regular time: ignore them, begin a new window, or refuse the file."""

    def __post_init__(self) -> None:
        check_fields(self, "domain.")
        if self.validation_share + self.test_share >= 1:
            raise ValueError(
                f"domain.validation_share={self.validation_share} and domain.test_share={self.test_share} leave no "
                "training part: their sum must be below 1"
            )
        if self.split == "column" and not self.split_column:
            raise ValueError("domain.split='column' needs domain.split_column, the column with train, validation, test")
        if self.split == "time" and not self.time:
            raise ValueError("domain.split='time' needs domain.time, the column that orders the rows")
        if len(self.low) != len(self.high):
            raise ValueError(f"domain.low={self.low} and domain.high={self.high} must have equally many limits")

    @property
    def setting(self) -> str:
        """Return the settings beyond the roles of columns that are not at their defaults: "horizon=20"."""
        roles = {"path", *SHORT} - {"observations"}
        changed = {name: value for name, value in changed_fields(self).items() if name not in roles}
        return ",".join(f"{n}={'+'.join(map(str, v)) if isinstance(v, tuple) else v}" for n, v in changed.items())


def is_minari(path: str) -> bool:
    return path.startswith(MINARI)


def settings_beside(path: str) -> dict[str, Any]:
    """Return the settings of the TOML file beside a log: events.toml for events.parquet, logs.toml in a folder."""
    log = Path(path)
    file = log / "logs.toml" if log.is_dir() else log.with_suffix(".toml")
    if is_minari(path) or not file.is_file():
        return {}
    try:
        return tomllib.loads(read_text(file))
    except tomllib.TOMLDecodeError as error:
        raise FileError(f"{file} is not valid TOML: {error}") from None
