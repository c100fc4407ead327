"""Windows of a log with everything simulated on top of them, as trajectories; and how answers to them are measured.

The action of a trajectory is the logged item, as the paper's feedback has it; what a policy recommends changes
nothing. The interaction t is complete when the decision at t is made, so that the spec's reward lag is the delay
itself: 0 shows the reward of the latest interaction.

Axes: B episodes, T time, I items, K candidates, W windows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from uat.data.movielens import Log, load, synthetic
from uat.data.movielens.windows import SHARES, Split, Windows, split_users, windows
from uat.domains.movielens.ranking import Ranking, drawn
from uat.domains.movielens.regime import Catalogue, RegimeLaw, rewards
from uat.noise import integers
from uat.types import Discrete, Items, Spec, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class MovieLensConfig:
    path: str = ""
    """Folder with MovieLens files; empty: the embedded synthetic catalogue."""
    cache: str = ""
    """Folder that keeps the arrays read from the files; empty: none."""
    horizon: int = 50
    """Steps of one episode."""
    delay: int = 1
    """Steps that a reward comes late; 0 shows the reward of the latest interaction."""
    most_per_user: int = 12
    """Windows of one training user; validation and test take the newest one."""
    limit: int = 20_000
    """Most windows of all splits together."""
    negatives: int = 99
    """Items that a target is ranked against."""

    def __post_init__(self) -> None:
        if self.delay < 0:
            raise ValueError(f"delay={self.delay} must not be negative")
        for name, least in {"horizon": 1, "most_per_user": 1, "limit": 10, "negatives": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")

    def log(self) -> Log:
        return load(self.path, cache=self.cache or None) if self.path else synthetic()


class Episodes:
    """The episodes of one split."""

    def __init__(self, config: MovieLensConfig, log: Log, split: Split, device: torch.device | str = "cpu") -> None:
        self.config, self.split, self.device = config, split, device
        self.law = RegimeLaw()
        self.catalogue = Catalogue.of(torch.from_numpy(log.group_I), self.law.num_groups).to(device)
        self.windows: Windows = windows(
            log,
            split_users(log.num_users, split),
            horizon=config.horizon,
            most_per_user=config.most_per_user if split == "train" else 1,
            limit=round(config.limit * SHARES[split]),
        ).to(device)
        self.rankings = {
            "": Ranking.sampled(log.num_items, config.negatives).to(device),
            "full_": Ranking.full(log.num_items).to(device),
        }
        count = log.num_items
        self.spec = Spec(obs=Items(count), action=Discrete(count), horizon=config.horizon, reward_lag=config.delay)

    def __len__(self) -> int:
        return len(self.windows.user_W)

    def trajectory(self, episode_ids: Tensor, seed: int) -> Trajectory:
        """These episodes: a function of (seed, id) alone. A window that comes again has a new regime and new targets.

        Training draws its windows; validation and test go through theirs in order.
        """
        ids_B = episode_ids.to(self.device)
        window_B = ids_B % len(self)
        if self.split == "train":
            window_B = integers(seed, "movielens.window", ids_B, 1, below=len(self))[:, 0]
        item_BT, rating_BT = self.windows.item_WT[window_B], self.windows.rating_WT[window_B]
        regime_BT = self.law.draw(seed, ids_B, self.config.horizon)
        done_BT = torch.zeros_like(item_BT, dtype=torch.bool)
        done_BT[:, -1] = True
        return Trajectory(
            obs=item_BT,
            action=item_BT,
            reward=rewards(self.catalogue.group_I[item_BT], rating_BT, regime_BT),
            done=done_BT,
            target=self.catalogue.targets(seed, ids_B, regime_BT),
            valid=torch.ones_like(done_BT),
            facts={"regime": regime_BT},
        )

    def candidates(self, episode_ids: Tensor, seed: int) -> Tensor:
        """(B, K) the target of the last step and its negatives, one draw: the paper's protocol."""
        ids_B = episode_ids.to(self.device)
        target_B = self.trajectory(ids_B, seed).target[:, -1]
        last, count = self.config.horizon - 1, self.config.negatives
        return torch.cat([target_B[:, None], self.catalogue.negatives(seed, ids_B, last, target_B, count)], dim=1)

    def measure(self, score_BI: Tensor, episode_ids: Tensor, seed: int) -> dict[str, Tensor]:
        """Each metric (B,) of the scores of all items at the last step.

        Plain names are averages over all targets of the regime and all draws of negatives, "full_" ranks against
        every item, "drawn_" is one draw of target and negatives.
        """
        regime_B = self.law.draw(seed, episode_ids.to(self.device), self.config.horizon)[:, -1]
        wanted_BI = self.catalogue.group_I == regime_B[:, None]
        found = {
            prefix + name: value_B
            for prefix, ranking in self.rankings.items()
            for name, value_B in ranking.expected(score_BI.double(), wanted_BI).items()
        }
        one = drawn(score_BI.gather(1, self.candidates(episode_ids, seed)))
        return {**found, **{f"drawn_{name}": value_B for name, value_B in one.items()}}
