"""Kinetics of adaptation: accuracy of decisions before and after a change of regime.

Axes: B episodes, T time, X shifts, N offsets from the shift (0 = the first step of the new regime).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from uat.domains.sepsis.domain import since_shift
from uat.episode import Trajectory

BEFORE, AFTER = 10, 15
"""Number of steps before and after a shift."""
RECOVERED = 0.9
"""Share of the accuracy before a shift that counts as recovered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinetics:
    """Mean accuracy over all shifts at each offset, and its standard error."""

    offset: tuple[int, ...]
    accuracy: tuple[float, ...]
    sem: tuple[float, ...]
    shifts: tuple[int, ...]
    """Number of shifts with a real step at this offset, in the segment before or after the shift."""
    before: float
    """Mean of the accuracies at -10 .. -1."""
    before_sem: float
    """Standard error of `before` over shifts, each with the mean of its own steps."""
    after: float
    """Mean of the accuracies at +1 .. +15."""
    after_sem: float
    steps_to_recover: int | None
    """First offset from 0 on whose accuracy is at least nine tenths of `before`; None: the accuracy never recovers."""


def kinetics(trajectories: Iterable[Trajectory]) -> Kinetics:
    """Return the kinetics over all shifts of these episodes; only offsets in the two segments at a shift count."""
    right_XN = torch.cat([around_shifts(trajectory) for trajectory in trajectories])
    mean_N, count_N = right_XN.nanmean(0), (~right_XN.isnan()).sum(0)
    before, after = mean_N[:BEFORE].nanmean().item(), mean_N[BEFORE + 1 :].nanmean().item()
    back = [n for n, value in enumerate(mean_N[BEFORE:].tolist()) if value >= RECOVERED * before]
    return Kinetics(
        offset=tuple(range(-BEFORE, AFTER + 1)),
        accuracy=tuple(mean_N.tolist()),
        sem=tuple(_sem(column_X) for column_X in right_XN.T),
        shifts=tuple(count_N.tolist()),
        before=before,
        before_sem=_sem(right_XN[:, :BEFORE].nanmean(1)),
        after=after,
        after_sem=_sem(right_XN[:, BEFORE + 1 :].nanmean(1)),
        steps_to_recover=back[0] if back else None,
    )


def around_shifts(trajectory: Trajectory) -> Tensor:
    """(X, N) whether the decision was right at each offset from each shift; NaN where the offset is outside the two
    segments at the shift, or the episode is over."""
    regime_BT, valid_BT = trajectory.facts["regime"], trajectory.valid
    right_BT = (trajectory.action == trajectory.required_target).double()
    since_BT = since_shift(regime_BT)
    until_BT = -1 - since_shift(regime_BT.flip(1)).flip(1)  # -1 on the last step of a segment
    t_T = torch.arange(regime_BT.shape[1], device=regime_BT.device)
    row_X, shift_X = ((since_BT == 0) & (t_T > 0) & valid_BT).nonzero(as_tuple=True)
    offset_N = torch.arange(-BEFORE, AFTER + 1, device=regime_BT.device)
    at_XN = shift_X[:, None] + offset_N
    inside_XN = (at_XN >= 0) & (at_XN < len(t_T))
    row_XN, at_XN = row_X[:, None].expand_as(at_XN), at_XN.clamp(0, len(t_T) - 1)
    place_XN = torch.where(offset_N < 0, until_BT[row_XN, at_XN], since_BT[row_XN, at_XN])
    counts_XN = inside_XN & (place_XN == offset_N) & valid_BT[row_XN, at_XN]
    return torch.where(counts_XN, right_BT[row_XN, at_XN], torch.nan).cpu()


def _sem(x_X: Tensor) -> float:
    """Return the standard error of the mean over the defined values; NaN for fewer than two."""
    known = x_X[~x_X.isnan()]
    return (known.std() / len(known) ** 0.5).item() if len(known) > 1 else math.nan
