"""Markets as worlds: B windows at once; each step is a few table lookups.

Order of events at step t: the agent observes the indicators of day t and chooses weights over cash and assets. By the
next close these earn `weights · relative - 1`, minus the cost of the trades that lead to them from the drifted weights
of the day before. A window starts in cash.

In training an episode is a random window, and the markets take turns, so that a batch holds equally many windows of
each. Validation and test hold every window once, in order of time, whatever the seed.

Differences from the paper
  1. the last 15 % of the training segment, after an embargo of one window, are for validation; means and deviations
     come from the days before them      test_no_window_of_training_comes_within_a_window_of_validation
  2. weights are a softmax masked to cash and the market's own assets, in training as in evaluation; the paper
     renormalises afterwards      test_weights_lie_on_cash_and_the_markets_own_assets
  3. an asset that cannot be traded (suspensions="mask") is masked out for the day, as if it could be sold at its last
     close      test_an_asset_that_cannot_be_traded_gets_no_weight

Axes: B windows, T time, N assets, F indicators, A cash and assets, X decision days of all markets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from uat.contracts import Simulator, Transition
from uat.data.markets.features import Protocol
from uat.data.markets.indicators import NAMES
from uat.domains.domain import Split
from uat.domains.markets.tables import Suspensions, Tables, Windows, build, grown, load, windows
from uat.episode import Noise
from uat.noise import uniform
from uat.settings import MOST_STEPS, Between, Decay, Delay, Inner, Scale, Steps, Width, changed_fields, check_fields
from uat.spec import Assets, Spec, Weights


@dataclass(frozen=True, kw_only=True, slots=True)
class MarketsConfig:
    data: str = ""
    """A file or folder of daily bars, one file per market, or a prepared .npz; empty: the embedded generator."""
    suspensions: Suspensions = "common"
    """Handling of days on which an asset has no bar: drop the day (common), or mask the asset (mask)."""
    days: Annotated[int, Between(0, MOST_STEPS)] = 0
    """Number of days of each market to use: the latest of a file, the first of the generator; 0: all."""
    max_assets: Width = 45
    """Number of assets to which every market is padded."""
    horizon: Steps = 60
    """Days of one window."""
    temperature: Scale = 0.02
    """Temperature of the hindsight labels: softmax((relative - 1) / temperature)."""
    reward_scale: Scale = 50.0
    """Factor on the daily returns that policies see."""
    cost: Decay = 0.0
    """Cost of trading, per unit of money traded in assets."""
    execution_lag: Delay = 0
    """Days between a decision and the close at which it is traded; its return arrives later by the same number."""
    train_share: Inner = 0.8
    """Share of the decision days in the training segment; the rest is for testing."""
    validation_share: Inner = 0.15
    """Share of the training segment, at its end, that is for validation."""
    test_from: str = ""
    """First day of the test segment, YYYY-MM-DD; empty: `train_share` decides."""

    def __post_init__(self) -> None:
        check_fields(self)
        _ = self.protocol  # its creation checks the fields

    @property
    def protocol(self) -> Protocol:
        return Protocol(
            window=self.horizon,
            train_share=self.train_share,
            validation_share=self.validation_share,
            execution_lag=self.execution_lag,
            test_from=self.test_from,
        )

    @property
    def spec(self) -> Spec:
        return Spec(
            obs=Assets(self.max_assets, len(NAMES)),
            action=Weights(self.max_assets + 1),
            horizon=self.horizon,
            reward_lag=1 + self.execution_lag,
            reward_scale=self.reward_scale,
            facts={"relative": (self.max_assets + 1,)},
        )

    @property
    def setting(self) -> str:
        """Return the settings that are not at their defaults: "cost=0.001,days=400"; data by file name alone."""
        changed = changed_fields(self)
        if self.data:
            changed["data"] = Path(self.data).stem
        return ",".join(f"{name}={value}" for name, value in changed.items()) or "default"


@dataclass(frozen=True, slots=True)
class World:
    market_B: Tensor
    start_B: Tensor
    """The window's first row in the tables."""
    held_BA: Tensor
    """Weights of the day before, after their drift."""
    ended_B: Tensor
    """False everywhere: no window ends before the horizon."""
    t: int = 0


class MarketsSimulator(Simulator[World]):
    """The windows of one split. Only `noise` reads values on the host; all else can be captured as a CUDA graph."""

    def __init__(self, config: MarketsConfig, split: Split, device: torch.device | str) -> None:
        self.config, self.split, self.device = config, split, device
        self.spec = config.spec
        markets = load(config.data, config.suspensions, config.days, config.protocol)
        self.tables: Tables = build(markets, config.max_assets, config.temperature).to(device)
        host = windows(markets, split, config.protocol)
        self.windows = Windows(market_W=host.market_W.to(device), start_W=host.start_W.to(device), counts=host.counts)
        self.count_M = torch.tensor(host.counts, device=device)
        by_market = torch.stack([host.start_W[host.market_W == m][0] for m in range(len(markets))])
        self.first_M = by_market.to(device)
        self.grown_XA = grown(markets, self.tables.relative_XA, split, config.protocol)

    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        ids_B = episode_ids.to(self.device, non_blocking=True)
        if self.split != "train":
            row_B = ids_B % sum(self.windows.counts)
            return {"market": self.windows.market_W[row_B], "start": self.windows.start_W[row_B]}
        market_B = ids_B % len(self.windows.counts)
        place_B = uniform(seed, "markets.window", ids_B, 1)[:, 0]
        return {"market": market_B, "start": self.first_M[market_B] + (place_B * self.count_M[market_B]).long()}

    def reset(self, noise: Noise) -> tuple[World, Tensor]:
        start_B = noise["start"]
        held_BA = torch.zeros(len(start_B), self.spec.action.count, device=start_B.device)
        held_BA[:, 0] = 1.0
        ended_B = torch.zeros_like(start_B, dtype=torch.bool)
        world = World(market_B=noise["market"], start_B=start_B, held_BA=held_BA, ended_B=ended_B)
        return world, self.tables.feature_XNF[start_B]

    def expert(self, world: World) -> Tensor:
        return self.tables.target_XA[world.start_B + world.t]

    def allowed(self, world: World) -> Tensor:
        return self.tables.allowed_XA[world.start_B + world.t]

    def step(self, world: World, action: Tensor) -> Transition[World]:
        relative_BA = self.tables.relative_XA[world.start_B + world.t]
        become_BA = action * relative_BA
        worth_B = become_BA.sum(-1)
        reward_B = (action * (relative_BA - 1)).sum(-1) - self.config.cost * traded(world.held_BA, action)
        after = replace(world, held_BA=become_BA / worth_B[:, None], t=world.t + 1)
        seen = min(after.t, self.spec.steps - 1)  # there is no decision after the last day
        terminated_B = ~world.ended_B if after.t == self.spec.steps else world.ended_B
        return Transition(after, self.tables.feature_XNF[world.start_B + seen], reward_B, terminated_B)

    def facts(self, world: World) -> dict[str, Tensor]:
        day_B = world.start_B + world.t
        return {
            "market": world.market_B,
            "held": world.held_BA,
            "grown": self.grown_XA[day_B],
            "relative": self.tables.relative_XA[day_B],
        }


def traded(held_BA: Tensor, wanted_BA: Tensor) -> Tensor:
    """Return the money traded in assets, as a share of the portfolio; cash is not counted."""
    return (wanted_BA - held_BA)[..., 1:].abs().sum(-1)
