"""Runs beside each other: those that differ by seed alone become one, with its interval, the gap that it closes, and
its differences from the blind method and from the domain's rivals, episode by episode and seed by seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from uat.evaluation.intervals import LEVEL, Spread, filled, interval
from uat.evaluation.scores import BLIND, CEILING, Evaluation, gap_closed, variant_of
from uat.runs import describe

Place = tuple[str, str, str, str, int]
"""Domain, task, the domain's setting, split and number of episodes: numbers of one place may be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How much more of a metric a method has than another, on the same episodes, and the same seeds if it has any."""

    other: str
    value: float
    low: float
    high: float
    """95 % interval of the difference (intervals.py), which knows what both have in common."""
    p: float
    """The level at which that interval just reaches zero."""

    @property
    def significant(self) -> bool:
        return self.p < LEVEL


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One metric of one method in one task, over runs that differ by seed alone."""

    method: str
    preset: str
    domain: str
    task: str
    setting: str
    split: str
    metric: str
    value: float
    """Mean over seeds and episodes."""
    std: float | None
    """Deviation of the seeds' means; None for a single seed, and for references."""
    low: float
    high: float
    """95 % interval over seeds and episodes (intervals.py); over episodes alone where there are not several seeds."""
    gap_closed: float | None
    """Share of the way from the blind method, on the same seeds, to the ceiling; None where either is missing."""
    differences: tuple[Difference, ...]
    """From the blind method on the same seeds, and from each of the domain's rivals, where they are there."""
    n: int
    """Episodes, the same for every seed."""
    seeds: tuple[int, ...]
    """Empty for references."""
    runs: tuple[str, ...]
    finished: bool
    """Whether every training had come to its end."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Runs of one kind, or a reference."""

    place: Place
    method: str
    preset: str = ""
    variant: tuple[str, ...] = ()
    """Settings of method and training that are not the recipe's."""
    runs: dict[int, str]
    """Seed -> identity; empty for references."""
    episodes: dict[int, dict[str, Tensor]]
    """Seed -> metric -> one value per episode."""
    finished: bool = True
    block: float = 1.0
    """Mean length of the blocks in which episodes are resampled."""
    rivals: tuple[str, ...] = ()
    """References that it is held against."""
    headline: str = ""
    """The domain's first metric."""

    @property
    def setting(self) -> str:
        """What differs from the recipe, as in the rows."""
        domain = self.place[2]
        return ",".join([*([] if domain == "default" else [domain]), *self.variant]) or "default"

    def values(self, metric: str) -> Tensor:
        """(S, E), where a metric is not defined so filled that every seed's mean stays."""
        return filled(torch.stack([metrics[metric] for metrics in self.episodes.values()]))

    def mean(self, metric: str) -> float:
        return self.values(metric).mean().item()

    def only(self, seeds: Sequence[int]) -> Group:
        return replace(self, runs={s: self.runs[s] for s in seeds}, episodes={s: self.episodes[s] for s in seeds})


def compare(found: Sequence[Evaluation], *, each: bool = False) -> list[Summary]:
    """One row per method, task and metric; with `each`, also those of every single run, after its group's."""
    runs, references = run_groups(found), reference_groups(found)
    rows: list[Summary] = []
    for group in sorted([*runs, *references], key=lambda group: (*group.place, group.method, group.preset)):
        singles = [group.only([seed]) for seed in group.runs] if each and len(group.runs) > 1 else []
        for part in [group, *singles]:
            blind, ceiling = find_blind(part, runs), find_reference(CEILING, part, references)
            others = [find_reference(name, part, references) for name in part.rivals]
            rows += [summary(part, metric, blind, ceiling, others) for metric in next(iter(part.episodes.values()))]
    return rows


def run_groups(found: Sequence[Evaluation]) -> list[Group]:
    groups: dict[tuple[Place, str], Group] = {}
    for one in sorted(found, key=lambda one: one.config.seed):
        config, key = one.config, (place_of(one), one.config.kind())
        domain = config.build_true_domain()
        old = groups.get(key) or Group(
            place=key[0],
            method=config.method_name,
            preset=config.preset,
            variant=tuple(variant_of(config)),
            runs={},
            episodes={},
            block=one.block,
            rivals=domain.rivals,
            headline=domain.metrics[0].name,
        )
        if config.seed in old.runs:
            raise ValueError(f"the same run is named twice: {describe(config)}")
        groups[key] = replace(
            old,
            runs={**old.runs, config.seed: config.identity()},
            episodes={**old.episodes, config.seed: one.episodes[config.method_name]},
            finished=old.finished and one.finished,
        )
    return list(groups.values())


def reference_groups(found: Sequence[Evaluation]) -> list[Group]:
    """They belong to the domain: the same numbers, from whichever run they come."""
    return list(
        {
            (place_of(one), method): Group(
                place=place_of(one), method=method, runs={}, episodes={0: metrics}, block=one.block
            )
            for one in found
            for method, metrics in one.episodes.items()
            if method != one.config.method_name
        }.values()
    )


def place_of(one: Evaluation) -> Place:
    score = one.scores[0]
    return score.domain, score.task, one.config.build_domain().setting, score.split, score.n


def find_blind(group: Group, runs: Sequence[Group]) -> Group | None:
    """The blind method's runs of the same place, preset and seeds, and of the same settings where there are such;
    None if some seeds are missing, or several kinds fit."""
    fit = [g for g in runs if (g.method, g.place, g.preset) == (BLIND, group.place, group.preset)]
    fit = [g for g in fit if g.variant == group.variant] or fit
    if len(fit) != 1 or not fit[0].runs.keys() >= group.runs.keys():
        return None
    return fit[0].only(list(group.runs))


def find_reference(name: str, group: Group, references: Sequence[Group]) -> Group | None:
    return next((g for g in references if (g.method, g.place) == (name, group.place)), None)


def difference(group: Group, other: Group, metric: str) -> Difference:
    """Paired: of every episode, and of every seed where the other has the same; a reference is the same for all."""
    found = Spread.of(group.values(metric) - other.values(metric), group.block)
    low, high = found.interval()
    return Difference(other=other.method, value=found.mean, low=low, high=high, p=found.p_value())


def summary(
    group: Group, metric: str, blind: Group | None, ceiling: Group | None, others: Sequence[Group | None] = ()
) -> Summary:
    domain, task, _, split, n = group.place
    y_SE, ends = group.values(metric), None if blind is None or ceiling is None else (blind, ceiling)
    low, high = interval(y_SE, group.block)
    held = [other for other in (blind, *others) if other is not None and other.method != group.method]
    return Summary(
        method=group.method,
        preset=group.preset,
        domain=domain,
        task=task,
        setting=group.setting,
        split=split,
        metric=metric,
        value=group.mean(metric),
        std=y_SE.mean(1).std().item() if len(y_SE) > 1 else None,
        low=low,
        high=high,
        gap_closed=ends and gap_closed(group.mean(metric), *(end.mean(metric) for end in ends)),
        differences=tuple(difference(group, other, metric) for other in held if group.runs),
        n=n,
        seeds=tuple(group.runs),
        runs=tuple(group.runs.values()),
        finished=group.finished,
    )
