"""The markets domain: one policy for all markets, scored by the last decision of every window.

Axes: B windows, T time, A cash and assets, E windows in the order of time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from uat.contracts import Agent
from uat.domains.domain import Domain, Split
from uat.domains.markets.performance import cagr, max_drawdown, sharpe, volatility
from uat.domains.markets.tables import load, names, windows
from uat.domains.markets.world import MarketsConfig, MarketsSimulator, traded
from uat.episode import Step, Trajectory
from uat.metrics import Metric
from uat.spec import Spec

PERFORMANCE: dict[str, tuple[str, bool, Callable[[Tensor], Tensor]]] = {
    "sharpe": ("Sharpe ratio", True, sharpe),
    "cagr": ("CAGR", True, cagr),
    "volatility": ("Volatility", False, volatility),
    "max_drawdown": ("Max drawdown", False, max_drawdown),
}
"""Performance measure -> its label, whether higher is better, and the function that computes it from returns."""


class Markets(Domain):
    """Portfolios: weights over cash and the assets of one of several markets, chosen each day."""

    name = "markets"
    train_tasks = ("joint",)
    rivals = ("equal-weight",)
    """The reference that a method must beat to be useful."""
    block = 10.0
    """Mean length of the blocks in which episodes are resampled, since they follow each other in time."""

    def __init__(self, config: MarketsConfig) -> None:
        self.config = config
        self.spec = config.spec
        self.task = "joint"
        self.setting = config.setting
        self.markets = names(config.data)
        self.metrics = _metrics(self.markets)

    @property
    def episodes(self) -> Mapping[str, int]:
        c = self.config
        markets = load(c.data, c.suspensions, c.days, c.protocol)
        return {split: sum(windows(markets, split, c.protocol).counts) for split in ("validation", "test")}

    def simulator(self, split: Split, device: torch.device | str) -> MarketsSimulator:
        return MarketsSimulator(self.config, split, device)

    def measure(self, trajectory: Trajectory) -> dict[str, Tensor]:
        """Return the return and the turnover of the last decision of each window, and its market."""
        row_B, last_B = torch.arange(len(trajectory.valid), device=trajectory.valid.device), trajectory.valid.sum(1) - 1
        held_BA, wanted_BA = trajectory.facts["held"][row_B, last_B], trajectory.action[row_B, last_B]
        return {
            "return": trajectory.reward[row_B, last_B],
            "turnover": traded(held_BA, wanted_BA),
            "market": trajectory.facts["market"][row_B, last_B].float(),
        }

    def summarise(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return, for each metric, values whose mean is the metric, given `measure` of episodes in order of time."""
        by_market: list[dict[str, Tensor]] = []
        for m in range(len(self.markets)):
            own_E = values["market"] == m
            return_E = values["return"][own_E].double()
            own = {name: f(return_E) for name, (_, _, f) in PERFORMANCE.items()}
            by_market.append({**own, "turnover": values["turnover"][own_E].double()})
        joint = {name: _mean_of_means([own[name] for own in by_market]) for name in by_market[0]}
        single = {
            f"{name}_{market}": value
            for market, own in zip(self.markets, by_market, strict=True)
            for name, value in own.items()
        }
        return {**joint, **single}

    def references(self) -> dict[str, Agent[Any]]:
        return {
            "equal-weight": EqualWeight(self.spec, cash=False),
            "buy-and-hold": BuyAndHold(self.spec),
            "random": EqualWeight(self.spec, cash=True),
        }


class EqualWeight(Agent[None]):
    """Equal weights over all tradable assets, with or without cash."""

    def __init__(self, spec: Spec, *, cash: bool) -> None:
        self.spec, self.cash = spec, cash

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> None:
        return None

    def step(self, state: None, step: Step) -> tuple[Tensor, None]:
        assert step.allowed is not None
        logits_BA = torch.zeros(step.allowed.shape, device=step.allowed.device).masked_fill(~step.allowed, -torch.inf)
        if not self.cash:
            cash_only_B = ~step.allowed[:, 1:].any(1)
            logits_BA[:, 0] = torch.where(cash_only_B, 0.0, -torch.inf)
        return logits_BA, None


class BuyAndHold(Agent["Tensor | None"]):
    """Equal money in every asset on the first scored day, without any trade after it."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> None:
        return None

    def look(self, state: Tensor | None, facts: dict[str, Tensor]) -> Tensor:
        """Return the logarithm of each asset's growth since the first scored day; the policy never holds cash."""
        return facts["grown"].log()

    def step(self, state: Tensor | None, step: Step) -> tuple[Tensor, None]:
        assert step.allowed is not None
        assert state is not None
        logits_BA = state.masked_fill(~step.allowed, -torch.inf)
        cash_only_B = ~step.allowed[:, 1:].any(1)
        cash_B = torch.where(cash_only_B, 0.0, -torch.inf)
        return torch.cat([cash_B[:, None], logits_BA[:, 1:]], dim=1), None


def _metrics(markets: tuple[str, ...]) -> tuple[Metric, ...]:
    """Return the metrics averaged over all markets, then those of each market."""
    measures = [*((name, label, up) for name, (label, up, _) in PERFORMANCE.items()), ("turnover", "Turnover", False)]
    return tuple(
        Metric(name=f"{name}{f'_{market}' if market else ''}", label=f"{label} {market}".strip(), higher_is_better=up)
        for market in ("", *markets)
        for name, label, up in measures
    )


def _mean_of_means(parts: list[Tensor]) -> Tensor:
    """Return all values in one row, weighted so that its mean is the mean of the parts' means."""
    total = sum(len(part) for part in parts)
    return torch.cat([part * (total / (len(parts) * max(len(part), 1))) for part in parts])
