"""Episodes of MovieLens: windows of a log with simulated regimes, rewards and targets, which no policy changes.

The action of an episode is the logged item, as in the paper. A policy is scored by its recommendation at the last step,
which changes nothing. Interaction t is complete when the decision at t is made, so the spec's reward lag is the delay
itself: 0 shows the reward of the latest interaction.

In training an episode is a random window with a regime and targets of its own, drawn again in every epoch. Validation
and test hold the newest window of each of their users under a fixed number of regime schedules; their targets are the
same for every method, seed and machine.

Differences from the paper
  1. training uses several windows per user if there are few users    test_the_newest_windows_come_first
  2. each epoch of training draws new regimes and targets            test_training_asks_anew_and_test_asks_the_same
  3. target and negatives are averaged analytically, over several
     schedules; the paper's single draw is also a metric           test_the_filter_is_measured_as_its_reference

Axes: B episodes, T time, I items, K candidates, W windows, R a part of the episodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from uat.contracts import Answers, Recording
from uat.data.movielens import Log, SyntheticConfig, load, synthetic
from uat.data.movielens.windows import SHARES, Split, Windows, split_users, windows
from uat.domains.movielens.ranking import Ranking, drawn, ranks
from uat.domains.movielens.regime import Catalogue, RegimeLaw, rewards
from uat.episode import Noise, Trajectory
from uat.noise import integers
from uat.settings import MOST_COUNT, Between, Count, Delay, Steps, changed_fields, check_fields
from uat.spec import Discrete, Items, Spec

AT_ONCE = 1 << 22
"""Maximum number of scores in memory while all items are ranked."""


Draws = Annotated[int, Between(1, 10_000)]


@dataclass(frozen=True, kw_only=True, slots=True)
class MovieLensConfig:
    path: str = ""
    """Folder of MovieLens files, or a file written by `uat data prepare`; empty: the synthetic catalogue."""
    users: Annotated[int, Between(10, MOST_COUNT)] = 2000
    """Users of the synthetic catalogue, before the filters."""
    items: Annotated[int, Between(300, MOST_COUNT)] = 1000
    """Items of the synthetic catalogue, before the filters."""
    horizon: Steps = 50
    """Steps of one episode."""
    delay: Delay = 1
    """Steps by which rewards are late; 0 shows the reward of the latest interaction."""
    most_per_user: Count = 12
    """Maximum number of windows per training user; validation and test take only the newest one."""
    limit: Annotated[int, Between(10, MOST_COUNT)] = 20_000
    """Maximum number of windows of all splits together."""
    negatives: Count = 99
    """Number of items against which a target is ranked."""
    draws: Draws = 20
    """Regime schedules per test window."""
    validation_draws: Draws = 4
    """Regime schedules per validation window."""

    def __post_init__(self) -> None:
        check_fields(self)
        _ = self.catalogue  # its creation checks the fields

    @property
    def catalogue(self) -> SyntheticConfig:
        return SyntheticConfig(num_users=self.users, num_items=self.items)

    @property
    def setting(self) -> str:
        """Return the settings that are not at their defaults: "delay=3"; data by file name without the folder."""
        changed = changed_fields(self)
        if self.path:
            changed["path"] = Path(self.path).stem
        return ",".join(f"{name}={value}" for name, value in changed.items()) or "default"

    def log(self) -> Log:
        """Return the log. It is cached for further runs; a file that has changed is read again."""
        path = Path(self.path)
        return _log(self.path, self.catalogue, path.stat().st_mtime_ns if self.path and path.exists() else 0)

    def spec(self, num_items: int) -> Spec:
        return Spec(obs=Items(num_items), action=Discrete(num_items), horizon=self.horizon, reward_lag=self.delay)


@lru_cache(maxsize=4)
def _log(path: str, catalogue: SyntheticConfig, changed: int) -> Log:
    return load(path) if path else synthetic(catalogue)


class Episodes(Recording):
    """The episodes of one split."""

    def __init__(self, config: MovieLensConfig, log: Log, split: Split, device: torch.device | str = "cpu") -> None:
        self.config, self.split, self.device = config, split, device
        self.spec, self.law = config.spec(log.num_items), RegimeLaw()
        self.catalogue = Catalogue.of(torch.from_numpy(log.group_I), self.law.num_groups).to(device)
        self.windows = windows_of(config, log, split).to(device)
        self.draws = {"train": 0, "validation": config.validation_draws, "test": config.draws}[split]
        """Episodes per window; 0: unlimited."""
        self.rankings = {
            "": Ranking.sampled(log.num_items, config.negatives).to(device),
            "full_": Ranking.full(log.num_items).to(device),
        }

    def __len__(self) -> int:
        """Return the number of episodes; in training, of the windows to draw from."""
        return len(self.windows.user_W) * max(1, self.draws)

    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        """Draw window, regime and targets and, in validation and test, the negatives of the last step.

        Validation and test go through their windows in order, each under all of its schedules before the next.
        """
        ids_B = episode_ids.to(self.device, non_blocking=True)
        if self.split == "train":
            window_B = integers(seed, "movielens.window", ids_B, 1, below=len(self))[:, 0]
        else:
            ids_B = ids_B % len(self)
            window_B = ids_B // self.draws
        regime_BT = self.law.draw(seed, ids_B, self.config.horizon)
        target_BT = self.catalogue.targets(seed, ids_B, regime_BT)
        noise = {"window": window_B, "regime": regime_BT, "target": target_BT}
        if self.split != "train":
            last, count = self.config.horizon - 1, self.config.negatives
            noise["negatives"] = self.catalogue.negatives(seed, ids_B, last, target_BT[:, -1], count)
        return noise

    def trajectory(self, noise: Noise) -> Trajectory:
        item_BT = self.windows.item_WT[noise["window"]]
        group_BT, rating_BT = self.catalogue.group_I[item_BT], self.windows.rating_WT[noise["window"]]
        terminated_BT = torch.zeros_like(item_BT, dtype=torch.bool)
        terminated_BT[:, -1] = True
        return Trajectory(
            obs=item_BT,
            action=item_BT,
            reward=rewards(group_BT, rating_BT, noise["regime"]),
            terminated=terminated_BT,
            target=noise["target"],
            valid=torch.ones_like(terminated_BT),
            facts={"regime": noise["regime"], "rating": rating_BT},
        )

    def judged(self, trajectory: Trajectory, noise: Noise, answers: Answers) -> Trajectory:
        """Add facts by the names of metrics.

        Plain names are averages over all targets of the regime and all draws of negatives; "full_" ranks against every
        item; "drawn_" uses one draw of target and negatives, as in the paper.
        """
        regime_B, target_B1 = trajectory.facts["regime"][:, -1], trajectory.required_target[:, -1:]
        parts: list[dict[str, Tensor]] = []
        size = max(1, AT_ONCE // len(self.catalogue.group_I))
        for begin in range(0, len(regime_B), size):
            episodes = slice(begin, begin + size)
            wanted_RI = self.catalogue.group_I == regime_B[episodes, None]
            place = ranks(answers.every(episodes), wanted_RI)
            parts.append({p + name: x for p, r in self.rankings.items() for name, x in r.expected(place).items()})
        values = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        single_draw = drawn(answers.among(torch.cat([target_B1, noise["negatives"]], dim=1)))
        values |= {f"drawn_{name}": value_B for name, value_B in single_draw.items()}
        return replace(trajectory, facts={**trajectory.facts, **values})


def windows_of(config: MovieLensConfig, log: Log, split: Split) -> Windows:
    return windows(
        log,
        split_users(log.num_users, split),
        horizon=config.horizon,
        most_per_user=config.most_per_user if split == "train" else 1,
        limit=round(config.limit * SHARES[split]),
    )
