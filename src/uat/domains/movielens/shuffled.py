"""The exact filter over regimes when rewards are shuffled: what arrives for step s is the reward of a step j <= s.

Such a reward depends on the whole course of the regime so far, which a belief about the present does not hold. An
episode has few switches, so that all courses can be enumerated: 50 steps of segments of 12 to 20 have 52,920. Given a
course, every reward is known, and the draws of different steps are independent.

Axes: P courses, T time or steps that send (j below), S steps that receive, B episodes, G groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from uat.domains.movielens.regime import RegimeLaw
from uat.episode import TensorFields

MOST_COURSES = 1 << 17
"""Maximum number of courses that are enumerated; longer episodes have more."""


@dataclass(slots=True, kw_only=True)
class Courses(TensorFields):
    """Every course of the regime over an episode."""

    group_PT: Tensor
    chance_P: Tensor
    """Probability of each course; they sum to 1."""

    @classmethod
    def of(cls, law: RegimeLaw, horizon: int) -> Courses:
        groups, chances = [], []
        for starts, chance in _switches(law, horizon):
            segment_T = torch.searchsorted(torch.tensor(starts), torch.arange(horizon), right=True) - 1
            group_NK = _sequences(law.num_groups, len(starts))
            groups.append(group_NK[:, segment_T].to(torch.uint8))
            chances.append(torch.full((len(group_NK),), chance / len(group_NK), dtype=torch.float64))
        return cls(group_PT=torch.cat(groups), chance_P=torch.cat(chances))


def count_courses(law: RegimeLaw, horizon: int) -> int:
    """Return the number of courses, without enumerating them."""
    count, begin_T = 0, [law.num_groups] + [0] * (horizon - 1)
    for t in range(horizon):
        count += begin_T[t] * (t + law.longest >= horizon)
        for after in range(t + law.shortest, min(t + law.longest + 1, horizon)):
            begin_T[after] += begin_T[t] * (law.num_groups - 1)
    return count


def _switches(law: RegimeLaw, horizon: int) -> Iterator[tuple[list[int], float]]:
    """Yield the first steps of the segments in every possible way, with its probability."""
    lengths = law.longest - law.shortest + 1

    def follow(starts: list[int], chance: float) -> Iterator[tuple[list[int], float]]:
        rest = horizon - starts[-1]
        for length in range(law.shortest, min(law.longest + 1, rest)):
            yield from follow([*starts, starts[-1] + length], chance / lengths)
        if (reach := law.longest + 1 - max(rest, law.shortest)) > 0:  # the lengths that last until the end
            yield starts, chance * reach / lengths

    return follow([0], 1.0)


def _sequences(num_groups: int, segments: int) -> Tensor:
    """(N, K) every sequence of groups in which neighbours differ."""
    group_NK = torch.arange(num_groups)[:, None]
    jump_J = torch.arange(1, num_groups)
    for _ in range(segments - 1):
        after_NJ = (group_NK[:, -1:] + jump_J) % num_groups
        before_NJK = group_NK[:, None].expand(-1, len(jump_J), -1)
        group_NK = torch.cat([before_NJK, after_NJ[..., None]], dim=2).flatten(0, 1)
    return group_NK


def last_posterior(courses: Courses, num_groups: int, group_BT: Tensor, hit_BTS: Tensor, miss_BS: Tensor) -> Tensor:
    """(B, G) probability of each regime at the last step.

    hit_BTS: likelihood of the number received at s if it is the reward of step j and the item of j was of the regime's
    group, and miss_BS if it was not. S may be smaller than T: later numbers have not arrived.
    """
    sent_TS = torch.ones(hit_BTS.shape[1:], dtype=torch.float64, device=group_BT.device).triu()  # j <= s
    gain_BTS, base_BS = (hit_BTS.double() - miss_BS.double()[:, None]) * sent_TS, miss_BS * sent_TS.sum(0)
    last_PG = (courses.group_PT[:, -1:] == torch.arange(num_groups, device=group_BT.device)).double()
    beliefs = []
    for group_T, gain_TS, base_S in zip(group_BT, gain_BTS, base_BS, strict=True):
        hits_PT = (courses.group_PT == group_T).double()
        likelihood_PS = (hits_PT @ gain_TS + base_S).clamp_min(0) / sent_TS.sum(0)
        beliefs.append((courses.chance_P * likelihood_PS.prod(1)) @ last_PG)
    belief_BG = torch.stack(beliefs)
    return belief_BG / belief_BG.sum(1, keepdim=True)
