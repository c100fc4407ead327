"""Data sources, caches and checks. Nothing is loaded or downloaded on import."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One kind of observation made by a check."""

    what: str
    count: int
    first: str = ""
    """The first occurrence: its place and its value."""
    refused: bool = False
    """Whether this makes the data unusable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of checking one file."""

    path: str
    facts: dict[str, Any]
    """Counts and ranges of the file's contents."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def unsupported_reason(self) -> str | None:
        """One sentence that says why the file cannot be used; None if the file is usable."""
        for finding in self.findings:
            if finding.refused:
                more = f" ({finding.count - 1} more like it)" if finding.count > 1 else ""
                return f"{self.path}: {finding.first}{more}"
        return None

    def rows(self) -> list[dict[str, Any]]:
        """One row per fact and finding, for a table."""
        facts = [{"file": self.path, "what": name, "found": value, "first": ""} for name, value in self.facts.items()]
        findings = [
            {"file": self.path, "what": f.what, "found": f.count, "first": f.first if f.count else ""}
            for f in self.findings
        ]
        return facts + findings


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An entry of the registry: a kind of data that users supply."""

    check: Callable[[Path], list[Report]]
    """Return one report per file; raise ValueError if a file cannot be read at all."""
    summary: str
    archives: tuple[str, ...] = ()
    """Names of the data sets that can be downloaded."""
    fetch: Callable[[str, Path], Path] | None = None
    """Download an archive into a folder and return its path. An interrupted download leaves no partial data set."""
    prepare: Callable[[Path, Path], dict[str, Any]] | None = None
    """Convert a user's files into one file that can be read with NumPy alone; return a summary of its contents."""


def archives() -> dict[str, Source]:
    """All data sets that can be downloaded, by name."""
    return {name: source for source in SOURCES.values() for name in source.archives}


def need(library: str, extra: str, why: str) -> Any:
    """Import an optional library, or raise a ValueError that says how to install it."""
    try:
        return importlib.import_module(library)
    except ImportError:
        raise ValueError(f"{why} needs {library}: pip install 'uat-transformer[{extra}]'") from None


def _markets(path: Path) -> list[Report]:
    need("polars", "data", "reading market files")
    from uat.data.markets.files import check

    return check(path)


def _prepare_markets(path: Path, file: Path) -> dict[str, Any]:
    need("polars", "data", "reading market files")
    from uat.data.markets.bars import market_files
    from uat.data.markets.files import read
    from uat.data.markets.prepared import write

    markets = {each.stem: read(each) for each in market_files(path)}
    write(markets, file)
    return {"markets": ", ".join(markets), "bars": sum(map(len, markets.values())), "bytes": file.stat().st_size}


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
    "markets": Source(
        check=_markets,
        summary="daily bars (date, ticker, open, high, low, close, volume)",
        prepare=_prepare_markets,
    ),
    "movielens": Source(
        check=_movielens,
        summary="MovieLens or RecBole ratings, in any of their published formats",
        archives=tuple(f"movielens-{size}" for size in ("100k", "1m", "10m", "20m", "25m")),
        fetch=_fetch_movielens,
        prepare=_prepare_movielens,
    ),
}
