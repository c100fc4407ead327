"""Contents of a report: measured rows, intervals, pairs and traces of one folder, and the published numbers."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from uat.config import PRESETS
from uat.domains import DOMAINS
from uat.evaluation.scores import BLIND, CEILING, gap_closed
from uat.methods import METHODS
from uat.paper.studies.cells import DATA_FIELDS
from uat.paper.studies.files import Results
from uat.paper.studies.probes import PROBES, Trace, read_trace
from uat.recipes import recipe

DAGGER = "†"
"""Mark of numbers from builds with a known flaw."""
Row = Mapping[str, Any]
Key = tuple[str, str, str, str, str]
"""Domain, task, setting, method and metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A metric of a method over its seeds."""

    mean: float
    std: float | None
    """Standard deviation over seeds; None for one seed, for references, and if a seed's number is undefined."""
    seeds: tuple[int, ...]
    n: int
    """Number of episodes of each seed."""
    low: float | None = None
    high: float | None = None
    """95 % interval over seeds and episodes; None if the values per episode were not kept."""
    gap: float | None = None
    """Share of the gap between Vanilla and the filter that is closed."""
    flawed: bool = False
    """Whether some of the seeds were trained by a build with a known flaw."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Everything measured under one preset."""

    preset: str
    scores: list[dict[str, Any]]
    intervals: list[dict[str, Any]] = field(default_factory=list)
    pairs: list[dict[str, Any]] = field(default_factory=list)
    curves: list[dict[str, Any]] = field(default_factory=list)
    timings: list[dict[str, Any]] = field(default_factory=list)
    published: list[dict[str, Any]] = field(default_factory=list)
    folder: Path | None = None
    flaws: Mapping[str, str] = field(default_factory=dict)
    """Run -> known flaw of the build that trained it."""
    data: Mapping[str, str] = field(default_factory=dict)
    """Domain -> name of the data of its rows, unless they are the built-in data."""

    @staticmethod
    def of(folder: Path, preset: str | None = None) -> Rows:
        """Read the rows of a folder of results. The default preset is that of its intervals, or the folder's name."""
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder of results: `uat reproduce` writes one")
        results = Results(folder)
        scores = results.read("scores")
        if not scores:
            raise ValueError(f"{folder} holds no rows: `uat reproduce STUDY --out {folder}` writes some")
        intervals = results.read("intervals")
        candidates = [row["preset"] for row in intervals if row["preset"]] or [folder.name]
        preset = preset or next((name for name in candidates if name in PRESETS), "paper")
        data = chosen_data(scores)
        return Rows(
            preset=preset,
            scores=of_data(scores, data),
            intervals=of_data(intervals, data),
            pairs=of_data(results.read("pairs"), data),
            curves=of_data(results.read("curves"), data),
            timings=of_one_device(results.timings()),
            published=published(),
            folder=folder,
            flaws=results.flaws(),
            data=data,
        )

    @cached_property
    def values(self) -> dict[Key, dict[int, tuple[float, int]]]:
        """Every metric on test episodes: seed -> value and number of episodes."""
        values: dict[Key, dict[int, tuple[float, int]]] = {}
        for row in self.scores:
            key = (row["domain"], row["task"], row["setting"], row["method"], row["metric"])
            values.setdefault(key, {})[row["seed"]] = (row["value"], row["n"])
        return values

    @cached_property
    def flawed(self) -> set[Key]:
        """Metrics with seeds that were trained by a build with a known flaw."""
        return {
            (row["domain"], row["task"], row["setting"], row["method"], row["metric"])
            for row in self.scores
            if row["run"] in self.flaws
        }

    def flaw_notes(self, domain: str | None = None) -> str:
        """Sentences that explain the mark of flawed numbers, for all rows or for a domain under its recipe."""
        places = [None] if domain is None else [(domain, self.usual_setting(domain))]
        rows = [row for row in self.scores if None in places or (row["domain"], row["setting"]) in places]
        own = {row["run"] for row in rows if row["run"]}
        count = Counter(self.flaws[run] for run in own if run in self.flaws)
        notes = [
            f" {DAGGER} Includes runs of a build with a known flaw ({flaws} of {len(own)} runs): {what}; "
            "`uat reproduce` trains them again."
            for what, flaws in count.items()
        ]
        traces = {name: self.trace(name) for name in (PROBES if domain is None else ())}
        names = [name for name, trace in traces.items() if trace is not None and self.flaws.keys() & set(trace.runs)]
        return "".join(notes) + (f" The analyses of {' and '.join(names)} include such runs." if names else "")

    @cached_property
    def bounds(self) -> dict[tuple[Key, tuple[int, ...]], tuple[float, float]]:
        return {
            (
                (row["domain"], row["task"], row["setting"], row["method"], row["metric"]),
                tuple(row["seeds"]),
            ): (row["low"], row["high"])
            for row in self.intervals
        }

    def number(self, key: Key) -> Number | None:
        """A metric over its seeds; None if it was not measured."""
        by_seed = self.values.get(key)
        if not by_seed:
            return None
        values = [value for value, _ in by_seed.values()]
        seeds = tuple(sorted(by_seed)) if key[3] in METHODS else ()
        low, high = self.bounds.get((key, seeds), (None, None))
        return Number(
            mean=statistics.fmean(values),
            std=statistics.stdev(values) if len(values) > 1 and seeds and all(map(math.isfinite, values)) else None,
            seeds=seeds,
            n=max(n for _, n in by_seed.values()),
            low=low,
            high=high,
            gap=self.gap(key),
            flawed=key in self.flawed,
        )

    def gap(self, key: Key, seed: int | None = None) -> float | None:
        """Share of the gap between Vanilla and the filter that a method, or one of its seeds, closes."""
        domain, task, setting, method, metric = key
        own, blind = self.values.get(key, {}), self.values.get((domain, task, setting, BLIND, metric), {})
        ceiling = self.values.get((domain, task, setting, CEILING, metric), {})
        seeds = [s for s in own if s in blind and seed in (None, s)]
        if not ceiling or not seeds or method not in METHODS or (seed is None and len(seeds) < len(own)):
            return None
        mean = {name: statistics.fmean(by[s][0] for s in seeds) for name, by in (("own", own), ("blind", blind))}
        return gap_closed(mean["own"], mean["blind"], next(iter(ceiling.values()))[0])

    def published_number(self, key: Key) -> tuple[float, float | None] | None:
        """Mean and standard deviation in the paper's tables."""
        return self.published_by_key.get(key)

    def has_published(self, domain: str, task: str) -> bool:
        """Whether the paper has numbers of this task."""
        return any((row["domain"], row["task"]) == (domain, task) for row in self.published)

    @cached_property
    def published_by_key(self) -> dict[Key, tuple[float, float | None]]:
        """The published numbers by key; those without a setting belong to the recipe's setting."""
        by_key = {}
        for row in self.published:
            setting = row.get("setting") or self.usual_setting(row["domain"])
            key = (row["domain"], row["task"], setting, row["method"], row["metric"])
            by_key[key] = (row["mean"], row.get("std"))
        return by_key

    def usual_setting(self, domain: str) -> str:
        """The column "setting" of a domain's rows under its recipe."""
        return usual_setting(domain, self.preset)

    @property
    def published_costs(self) -> dict[tuple[str, str], float]:
        """Method and metric -> published time or memory; empty unless our sizes are those of the paper."""
        if self.preset != "paper":
            return {}
        return {(r["method"], r["metric"]): r["mean"] for r in self.published if r["task"] == "efficiency"}

    def trace(self, probe: str) -> Trace | None:
        """The trace of a probe; None if there is none."""
        return None if self.folder is None else read_trace(self.folder, probe)


@lru_cache(maxsize=64)
def usual_setting(domain: str, preset: str) -> str:
    return recipe(domain, "uat", preset).build_domain().setting if domain in DOMAINS else "default"


def split_data(setting: str) -> tuple[str, str]:
    """Split a setting into the name of its data and the rest: "data=hsi,cost=0.1" is ("hsi", "cost=0.1")."""
    parts = setting.split(",")
    named = [part for part in parts if part.split("=")[0] in DATA_FIELDS]
    rest = ",".join(part for part in parts if part not in named)
    return "".join(part.split("=", 1)[1] for part in named), rest or "default"


def chosen_data(scores: Iterable[Row]) -> dict[str, str]:
    """Domain -> the data on which most methods were measured; on a tie, a user's own data before the built-in data."""
    methods: dict[str, dict[str, set[str]]] = {}
    for row in scores:
        methods.setdefault(row["domain"], {}).setdefault(split_data(row["setting"])[0], set()).add(row["method"])
    chosen = {domain: max(own, key=lambda name: (len(own[name]), name != "")) for domain, own in methods.items()}
    return {domain: name for domain, name in chosen.items() if name}


def of_data(rows: Iterable[Row], data: Mapping[str, str]) -> list[dict[str, Any]]:
    """Rows of the chosen data, with the name of the data removed from their settings."""
    selected = []
    for row in rows:
        name, rest = split_data(row["setting"])
        if name == data.get(row["domain"], ""):
            selected.append({**row, "setting": rest})
    return selected


def of_one_device(timings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the device with most measurements, since numbers from different devices cannot be compared."""
    count = Counter(row["device"] for row in timings)
    return [row for row in timings if row["device"] == max(count, key=lambda device: count[device])]


def published() -> list[dict[str, Any]]:
    """The paper's tables, as rows."""
    text = resources.files("uat.paper.report").joinpath("published.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def ordered(names: Iterable[str], first: Iterable[str]) -> list[str]:
    """Unique names: those in `first` in its order, then all others in their own order."""
    unique = dict.fromkeys(names)
    return [name for name in dict.fromkeys([*first, *unique]) if name in unique]
