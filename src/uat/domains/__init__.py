"""Domains: one file or folder is one column of the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uat.data.contents import checksum
from uat.domains.darkroom import DarkRoom, DarkRoomConfig
from uat.domains.domain import Domain, Split, split_seed
from uat.domains.markets import Markets, MarketsConfig
from uat.domains.movielens import MovieLens, MovieLensConfig
from uat.domains.sepsis import Sepsis, SepsisConfig

__all__ = [
    "DOMAINS",
    "Domain",
    "DomainEntry",
    "Split",
    "split_seed",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainEntry:
    """An entry of the registry: how to build the domain from its config."""

    build: Callable[[Any], Domain]
    config: type[Any]
    tasks: tuple[str, ...]
    summary: str
    task_field: str | None = None
    """The setting that chooses the task; None: there is one task."""
    revision: int = 1
    """Raised when the same config starts to mean other worlds, metrics or references."""
    files: tuple[str, ...] = ()
    """Settings that name files of a user's."""

    def content(self, config: Any) -> dict[str, str]:
        """What stands for the files of a config in the identity of a run; folders, and other kinds, count by name."""
        named = {name: getattr(config, name) for name in self.files}
        return {name: found for name, path in named.items() if path and (found := checksum(path))}


DOMAINS: dict[str, DomainEntry] = {
    "darkroom": DomainEntry(
        build=DarkRoom,
        config=DarkRoomConfig,
        tasks=DarkRoom.train_tasks,
        summary="a grid with a hidden goal that moves from episode to episode",
        task_field="domain.schedule",
    ),
    "sepsis": DomainEntry(
        build=Sepsis,
        config=SepsisConfig,
        tasks=Sepsis.train_tasks,
        summary="treatment whose effect depends on a hidden regime that changes within the episode",
        files=("cohort",),
        revision=2,
    ),
    "markets": DomainEntry(
        build=Markets,
        config=MarketsConfig,
        tasks=Markets.train_tasks,
        summary="portfolios of stocks in several markets whose regimes change",
        revision=2,
        files=("data",),
    ),
    "movielens": DomainEntry(
        build=MovieLens,
        config=MovieLensConfig,
        tasks=MovieLens.train_tasks,
        summary="recommendation from logs in which rewards of a hidden preference come late",
        files=("path",),
    ),
}
