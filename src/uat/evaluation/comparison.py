"""Compare runs. Runs that differ only by seed become one summary with its interval, the share of the gap that it
closes, and its paired differences from the blind method and from the domain's rivals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from uat.evaluation.intervals import LEVEL, Spread, filled, interval
from uat.evaluation.scores import BLIND, CEILING, Evaluation, gap_closed, variant_of
from uat.runs import describe

Place = tuple[str, str, str, str, int]
"""Domain, task, the domain's setting, split and number of episodes. Only numbers of the same place are comparable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Paired difference of a metric between two methods, on the same episodes and (if both have any) seeds."""

    other: str
    value: float
    low: float
    high: float
    """95 % interval of the paired difference (intervals.py)."""
    p: float
    """The p value: the level at which the interval just reaches zero."""

    @property
    def significant(self) -> bool:
        return self.p < LEVEL


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One metric of one method in one task, over runs that differ only by seed."""

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
    """Standard deviation of the seeds' means; None for a single seed and for references."""
    low: float
    high: float
    """95 % interval over seeds and episodes (intervals.py); over episodes only, without several seeds."""
    gap_closed: float | None
    """Share of the gap between the blind method, on the same seeds, and the ceiling; None if either is missing."""
    differences: tuple[Difference, ...]
    """Differences from the blind method on the same seeds and from each of the domain's rivals, as far as available."""
    n: int
    """Episodes, the same for every seed."""
    seeds: tuple[int, ...]
    """Empty for references."""
    runs: tuple[str, ...]
    finished: bool
    """Whether every run's training is complete."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Runs that differ only by seed, or a reference."""

    place: Place
    method: str
    preset: str = ""
    variant: tuple[str, ...] = ()
    """Settings of method and training that differ from the recipe."""
    runs: dict[int, str]
    """Seed -> identity; empty for references."""
    episodes: dict[int, dict[str, Tensor]]
    """Seed -> metric -> one value per episode."""
    finished: bool = True
    block: float = 1.0
    """Mean length of the blocks in which episodes are resampled."""
    rivals: tuple[str, ...] = ()
    """References that the runs are compared with."""
    headline: str = ""
    """The domain's first metric."""

    @property
    def setting(self) -> str:
        """Differences from the recipe, as in the column "setting"."""
        domain = self.place[2]
        return ",".join([*([] if domain == "default" else [domain]), *self.variant]) or "default"

    def values(self, metric: str) -> Tensor:
        """The metric per seed and episode (S, E); undefined values are filled so that every seed keeps its mean."""
        return filled(torch.stack([metrics[metric] for metrics in self.episodes.values()]))

    def mean(self, metric: str) -> float:
        return self.values(metric).mean().item()

    def only(self, seeds: Sequence[int]) -> Group:
        return replace(self, runs={s: self.runs[s] for s in seeds}, episodes={s: self.episodes[s] for s in seeds})


def compare(evaluations: Sequence[Evaluation], *, each: bool = False) -> list[Summary]:
    """One summary per method, task and metric; `each` adds the summaries of the single runs after those of a group."""
    runs, references = run_groups(evaluations), reference_groups(evaluations)
    rows: list[Summary] = []
    for group in sorted([*runs, *references], key=lambda group: (*group.place, group.method, group.preset)):
        singles = [group.only([seed]) for seed in group.runs] if each and len(group.runs) > 1 else []
        for part in [group, *singles]:
            blind, ceiling = find_blind(part, runs), find_reference(CEILING, part, references)
            others = [find_reference(name, part, references) for name in part.rivals]
            rows += [summary(part, metric, blind, ceiling, others) for metric in next(iter(part.episodes.values()))]
    return rows


def run_groups(evaluations: Sequence[Evaluation]) -> list[Group]:
    """Group runs that differ only by seed."""
    groups: dict[tuple[Place, str], Group] = {}
    for one in sorted(evaluations, key=lambda one: one.config.seed):
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


def reference_groups(evaluations: Sequence[Evaluation]) -> list[Group]:
    """One group per reference. References belong to the domain, so their numbers are equal in every run."""
    return list(
        {
            (place_of(one), method): Group(
                place=place_of(one), method=method, runs={}, episodes={0: metrics}, block=one.block
            )
            for one in evaluations
            for method, metrics in one.episodes.items()
            if method != one.config.method_name
        }.values()
    )


def place_of(one: Evaluation) -> Place:
    score = one.scores[0]
    return score.domain, score.task, one.config.build_domain().setting, score.split, score.n


def find_blind(group: Group, runs: Sequence[Group]) -> Group | None:
    """Runs of the blind method with the same place, preset and seeds, and the same settings if there are any.

    None if seeds are missing or several groups match.
    """
    matches = [g for g in runs if (g.method, g.place, g.preset) == (BLIND, group.place, group.preset)]
    matches = [g for g in matches if g.variant == group.variant] or matches
    if len(matches) != 1 or not matches[0].runs.keys() >= group.runs.keys():
        return None
    return matches[0].only(list(group.runs))


def find_reference(name: str, group: Group, references: Sequence[Group]) -> Group | None:
    return next((g for g in references if (g.method, g.place) == (name, group.place)), None)


def difference(group: Group, other: Group, metric: str) -> Difference:
    """Difference paired by episode and, unless the other is a reference, by seed."""
    spread = Spread.of(group.values(metric) - other.values(metric), group.block)
    low, high = spread.interval()
    return Difference(other=other.method, value=spread.mean, low=low, high=high, p=spread.p_value())


def summary(
    group: Group, metric: str, blind: Group | None, ceiling: Group | None, others: Sequence[Group | None] = ()
) -> Summary:
    domain, task, _, split, n = group.place
    y_SE, ends = group.values(metric), None if blind is None or ceiling is None else (blind, ceiling)
    low, high = interval(y_SE, group.block)
    compared = [other for other in (blind, *others) if other is not None and other.method != group.method]
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
        differences=tuple(difference(group, other, metric) for other in compared if group.runs),
        n=n,
        seeds=tuple(group.runs),
        runs=tuple(group.runs.values()),
        finished=group.finished,
    )
