"""Data: sources, caches and checks. Nothing is loaded or downloaded before it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One kind of thing that a check came upon."""

    what: str
    count: int
    first: str = ""
    """The first one: where it is, and what is there."""
    refused: bool = False
    """Whether data with such a thing cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a check found in one file."""

    path: str
    facts: dict[str, Any]
    """Counts and ranges: what the file holds."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def refusal(self) -> str | None:
        """One sentence that says why the file cannot be used; None if it can."""
        for finding in self.findings:
            if finding.refused:
                more = f" ({finding.count - 1} more like it)" if finding.count > 1 else ""
                return f"{self.path}: {finding.first}{more}"
        return None

    def rows(self) -> list[dict[str, Any]]:
        """One row per fact and finding, for a table."""
        facts = [{"file": self.path, "what": name, "found": value, "first": ""} for name, value in self.facts.items()]
        found = [
            {"file": self.path, "what": f.what, "found": f.count, "first": f.first if f.count else ""}
            for f in self.findings
        ]
        return facts + found


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An entry of the registry: data that a user may bring along."""

    check: Callable[[Path], list[Report]]
    """A report per file; raises ValueError where a file cannot be read at all."""
    summary: str
    archives: tuple[str, ...] = ()
    """Names under which it may be downloaded."""
    fetch: Callable[[str, Path], Path] | None = None
    """Downloads an archive into a folder and says where it lies; nothing half-done is ever there."""
    prepare: Callable[[Path, Path], dict[str, Any]] | None = None
    """Reads a user's files and writes one file that needs none of the readers' libraries; says what it holds."""


def archives() -> dict[str, Source]:
    """All that may be downloaded, by name."""
    return {name: source for source in SOURCES.values() for name in source.archives}


def need(library: str, extra: str, why: str) -> Any:
    """An optional library, or a sentence that says how to get it."""
    try:
        return importlib.import_module(library)
    except ImportError:
        raise ValueError(f"{why} needs {library}: pip install 'uat-transformer[{extra}]'") from None


def _markets(path: Path) -> list[Report]:
    need("polars", "data", "reading market files")
    from uat.data.markets.files import check

    return check(path)


def _movielens(path: Path) -> list[Report]:
    need("polars", "data", "reading MovieLens files")
    from uat.data.movielens.sources import check

    return [Report(path=str(path), facts=asdict(check(path)))]


def _fetch_movielens(name: str, folder: Path) -> Path:
    from uat.data.movielens.fetching import fetch

    return fetch(name, folder)


def _prepare_movielens(path: Path, file: Path) -> dict[str, Any]:
    need("polars", "data", "reading MovieLens files")
    from uat.data.movielens.sources import pack

    log = pack(path, file)
    return {"interactions": len(log.item_N), "users": log.num_users, "items": log.num_items}


SOURCES: dict[str, Source] = {
    "markets": Source(check=_markets, summary="daily bars (date, ticker, open, high, low, close, volume)"),
    "movielens": Source(
        check=_movielens,
        summary="MovieLens or RecBole ratings, in any of their published formats",
        archives=tuple(f"movielens-{size}" for size in ("100k", "1m", "10m", "20m", "25m")),
        fetch=_fetch_movielens,
        prepare=_prepare_movielens,
    ),
}
