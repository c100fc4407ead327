"""How fast decisions follow a change of regime: accuracy around the moment of the shift.

Axes: B episodes, T time, N offsets from the shift (0 = the first step of the new regime).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from uat.domains.sepsis.domain import since_shift
from uat.types import Trajectory

BEFORE, AFTER = 10, 15
"""Steps before and after a shift that are looked at."""
RECOVERED = 0.9
"""Share of the accuracy before a shift that counts as recovered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinetics:
    """Mean accuracy at each offset over all shifts, and its standard error."""

    offset: tuple[int, ...]
    accuracy: tuple[float, ...]
    sem: tuple[float, ...]
    shifts: tuple[int, ...]
    """How many shifts have a real step at this offset, in the segment before or after them."""
    before: float
    """Mean of the accuracies at -10 .. -1."""
    after: float
    """Mean of the accuracies at +1 .. +15."""
    steps_to_recover: int | None
    """First offset from 0 on whose accuracy is at least nine tenths of `before`; None if there is none."""


def kinetics(trajectories: Iterable[Trajectory]) -> Kinetics:
    """Over every shift of these episodes. An offset counts only within the two segments that meet at the shift."""
    right_N = torch.zeros(BEFORE + AFTER + 1, dtype=torch.float64)
    count_N = torch.zeros_like(right_N)
    for one in trajectories:
        regime_BT, valid_BT = one.facts["regime"], one.valid
        right_BT = (one.action == one.target) & valid_BT
        since_BT = since_shift(regime_BT)
        until_BT = -1 - since_shift(regime_BT.flip(1)).flip(1)  # -1 on the last step of a segment
        t_T = torch.arange(regime_BT.shape[1], device=regime_BT.device)
        follows_BT = t_T > since_BT  # not in the episode's first segment
        precedes_BT = (t_T - until_BT) < len(t_T)  # not in its last
        precedes_BT &= valid_BT.gather(1, (t_T - until_BT).clamp_max(len(t_T) - 1))  # and the patient saw the shift
        for n, offset in enumerate(range(-BEFORE, AFTER + 1)):
            here_BT = (until_BT == offset) & precedes_BT if offset < 0 else (since_BT == offset) & follows_BT
            here_BT = here_BT & valid_BT
            right_N[n] += (right_BT & here_BT).sum().cpu()
            count_N[n] += here_BT.sum().cpu()
    mean_N = right_N / count_N
    sem_N = (mean_N * (1 - mean_N) / (count_N - 1)).sqrt()  # of a mean of zeros and ones
    before, after = mean_N[:BEFORE].nanmean().item(), mean_N[BEFORE + 1 :].nanmean().item()
    back = [n for n, value in enumerate(mean_N[BEFORE:].tolist()) if value >= RECOVERED * before]
    return Kinetics(
        offset=tuple(range(-BEFORE, AFTER + 1)),
        accuracy=tuple(mean_N.tolist()),
        sem=tuple(x if math.isfinite(x) else math.nan for x in sem_N.tolist()),
        shifts=tuple(int(x) for x in count_N.tolist()),
        before=before,
        after=after,
        steps_to_recover=back[0] if back else None,
    )
