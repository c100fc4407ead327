"""The MovieLens domain, recommendation with delayed feedback: its splits, metrics and references.

Axes: B episodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from uat.channel import FeedbackConfig
from uat.contracts import Reader
from uat.domains.domain import Domain, Split
from uat.domains.movielens.episodes import Episodes, MovieLensConfig, windows_of
from uat.domains.movielens.references import (
    Belief,
    Believer,
    every_item,
    every_regime,
    filtered,
    informed,
    true_regime,
)
from uat.domains.movielens.regime import Catalogue, RegimeLaw
from uat.episode import Trajectory
from uat.metrics import Metric

REGIMES = ("action", "comedy", "drama", "thriller")
"""Groups of genres, each named after its first genre; see `uat.data.movielens.genres`."""


class MovieLens(Domain):
    """Recommendation: which item a user wants next depends on a hidden group of genres that only late rewards show."""

    name = "movielens"
    train_tasks = ("movielens",)
    plateau = "no-feedback"
    metrics = (
        *(Metric(name=name, label=name.upper()) for name in ("hr@10", "ndcg@10", "hr@20", "ndcg@20")),
        *(Metric(name=f"drawn_{n}", label=f"{n.upper()}, one draw") for n in ("hr@10", "ndcg@10", "hr@20", "ndcg@20")),
        *(Metric(name=f"full_{name}", label=f"{name.upper()}, all items") for name in ("hr@10", "ndcg@10")),
        *(Metric(name=f"hr@10_{regime}", label=f"HR@10, {regime}", partial=True) for regime in REGIMES),
    )

    def __init__(self, config: MovieLensConfig) -> None:
        self.config, self.log, self.law = config, config.log(), RegimeLaw()
        self.spec = config.spec(self.log.num_items)
        self.task = "movielens"
        self.setting = config.setting
        self.block = float(config.draws)
        """Episodes of one window have consecutive ids and are resampled together."""

    @property
    def episodes(self) -> dict[str, int]:
        c = self.config
        draws: dict[Split, int] = {"validation": c.validation_draws, "test": c.draws}
        return {split: many * len(windows_of(c, self.log, split).user_W) for split, many in draws.items()}

    def simulator(self, split: Split, device: torch.device | str) -> Episodes:
        return Episodes(self.config, self.log, split, device)

    def measure(self, trajectory: Trajectory) -> dict[str, Tensor]:
        """Return the scores of the answers at the last step; a regime's hit rate is NaN where another is active."""
        facts, regime_B = trajectory.facts, trajectory.facts["regime"][:, -1]
        by_regime = {
            f"hr@10_{name}": torch.where(regime_B == r, facts["hr@10"], torch.nan) for r, name in enumerate(REGIMES)
        }
        return {m.name: facts[m.name] for m in self.metrics if m.name not in by_regime} | by_regime

    def references(self) -> dict[str, Reader]:
        """Return the references. The ceiling is exact, since actions reveal nothing; "no-feedback" is the ceiling
        without feedback."""
        return self._believers(
            {
                "ceiling": filtered(self.law, self.config.delay),
                "no-feedback": every_regime,
                "expert": true_regime,
                "random": every_item,
            }
        )

    def references_under(self, feedback: FeedbackConfig) -> dict[str, Reader]:
        """Return the filters that know the channel; none for shuffled rewards in long episodes."""
        return self._believers(informed(self.law, self.config.delay, self.config.horizon, feedback))

    def _believers(self, beliefs: dict[str, Belief]) -> dict[str, Reader]:
        catalogue = Catalogue.of(torch.from_numpy(self.log.group_I), self.law.num_groups)
        return {name: Believer(catalogue, belief) for name, belief in beliefs.items()}
