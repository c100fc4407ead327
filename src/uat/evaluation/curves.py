"""Adaptation inside an episode: what policies earn at each step, averaged over test episodes and seeds.

A curve is cut into parts, each of which is a metric with one value per episode: the mean over the episode's own steps
in the part. So intervals, paired differences and the gap to the filter are those of every other metric. The parts are

  first tenth, last tenth   of the episode's own steps, rounded up to whole steps
  gain                      last tenth minus first tenth, paired by episode
  steps                     at most BINS ranges of steps of equal length, for the figure

A range of steps is left out for a method if fewer than LEAST episodes of one of its seeds reach it.

Axes: E episodes, T time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from uat.config import to_json
from uat.evaluation.comparison import Summary, compare, place_of
from uat.evaluation.scores import BLIND, Evaluation
from uat.evaluation.tables import score_cell, score_head

FIRST, LAST, GAIN, STEPS = "first tenth", "last tenth", "gain", "steps"
BINS = 50
"""The most points of a curve."""
LEAST = 10
"""Number of episodes that must reach a range of steps; all episodes, if there are fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A curve's mean over a part of the episode, of one method in one task, over runs that differ only by seed."""

    curve: str
    part: str
    """FIRST, LAST, GAIN or STEPS."""
    begin: int | None = None
    """First step of a range of steps, counted from 0."""
    end: int | None = None
    """End of the range: the step after its last one."""
    summary: Summary

    def row(self) -> dict[str, Any]:
        """Return the row of the summary, whose metric is the curve, with the part."""
        own = {"part": self.part, "begin": self.begin, "end": self.end}
        return {**to_json(self.summary), "metric": self.curve, **own}


def compare_curves(evaluations: Sequence[Evaluation], *, each: bool = False) -> list[Part]:
    """Return the parts of every curve, method and task, given evaluations that kept their curves."""
    by_place: dict[Any, list[Evaluation]] = {}
    for one in evaluations:
        by_place.setdefault(place_of(one), []).append(one)
    return [part for ours in by_place.values() for part in _compared(ours, each=each)]


def _compared(evaluations: Sequence[Evaluation], *, each: bool) -> Iterator[Part]:
    """Yield the parts in one task, with the same ranges of steps for all methods."""
    names = dict.fromkeys(name for one in evaluations for curves in one.curves.values() for name in curves)
    for curve in names:
        longest = max(
            curves[curve].shape[1] for one in evaluations for curves in one.curves.values() if curve in curves
        )
        ranges = {f"{STEPS} {begin}": (begin, end) for begin, end in bins(longest)}
        cut = [
            replace(
                one, episodes={m: _parts(curves[curve], ranges) for m, curves in one.curves.items() if curve in curves}
            )
            for one in evaluations
        ]
        for summary in compare(cut, each=each):
            begin, end = ranges.get(summary.metric, (None, None))
            part = summary.metric if begin is None else STEPS
            yield Part(curve=curve, part=part, begin=begin, end=end, summary=summary)


def _parts(values_ET: Tensor, ranges: dict[str, tuple[int, int]]) -> dict[str, Tensor]:
    """Return one value per episode (E,) of each part."""
    tenths = first_and_last(values_ET)
    return {**tenths, GAIN: tenths[LAST] - tenths[FIRST], **{n: mean_in(values_ET, *r) for n, r in ranges.items()}}


def first_and_last(values_ET: Tensor) -> dict[str, Tensor]:
    """Return the means over the first and the last tenth of each episode's defined steps."""
    values_ET = values_ET.double()
    defined_ET = ~values_ET.isnan()
    length_E1 = defined_ET.sum(1, keepdim=True)
    at_ET, tenth_E1 = defined_ET.cumsum(1) - 1, torch.div(length_E1 + 9, 10, rounding_mode="floor")
    inside = {FIRST: at_ET < tenth_E1, LAST: at_ET >= length_E1 - tenth_E1}
    return {name: values_ET.where(defined_ET & here_ET, torch.nan).nanmean(1) for name, here_ET in inside.items()}


def bins(steps: int) -> list[tuple[int, int]]:
    """Return at most BINS ranges [begin, end) of equal length, the last one possibly shorter, that cover all steps."""
    return list(pairwise([*range(0, steps, -(-steps // BINS)), steps]))


def mean_in(values_ET: Tensor, begin: int, end: int) -> Tensor:
    """(E,) mean over an episode's defined steps in a range; NaN everywhere if too few episodes reach it."""
    mean_E = values_ET[:, begin:end].double().nanmean(1)
    reached = int((~mean_E.isnan()).sum())
    return mean_E if reached >= min(LEAST, len(mean_E)) else torch.full_like(mean_E, torch.nan)


def curve_rows(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """One line per curve, method and task, or per run: the first and the last tenth, and the gain."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for part in parts:
        if part.part == STEPS:
            continue
        s = part.summary
        key = (part.curve, s.domain, s.task, s.setting, s.n, s.method, s.runs)
        row = rows.setdefault(key, {**score_head(s), "curve": part.curve})
        row[part.part] = score_cell(s)
        other = next((d for d in s.differences if d.other == BLIND), None)
        if part.part == GAIN and other is not None:
            row |= {f"gain less {BLIND}'s": f"{other.value:+.3f} [{other.low:+.3f}, {other.high:+.3f}]", "p": other.p}
    return list(rows.values())
