"""Paired differences, multiple-comparison corrections and means over tasks, against known answers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from uat.evaluation.intervals import Spread, student
from uat.evaluation.statistics import (
    Pair,
    aggregate,
    holm,
    holm_corrected,
    interquartile_mean,
    paired,
    rank_test,
)


def test_p_is_the_level_at_which_the_interval_touches_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    a_SE = torch.randn(3, 50, generator=generator)
    b_SE = a_SE - 0.1 + 0.3 * torch.randn(3, 50, generator=generator)
    difference, low, high, p = paired(a_SE, b_SE)
    assert low < difference < high
    found = Spread.of(a_SE - b_SE)
    assert found.half(p) == pytest.approx(abs(difference), rel=1e-3)
    assert (p < 0.05) == (low > 0 or high < 0)


def test_one_seed_gives_the_p_value_of_students_paired_test() -> None:
    """d = 1, 2, 3, 4: mean 2.5, t = 2.5 / (1.291 / 2) = 3.873 with 3 degrees of freedom, p = 0.0305."""
    a = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert paired(a, torch.zeros_like(a))[3] == pytest.approx(0.0305, abs=2e-4)
    assert student(3, 0.5) == pytest.approx(0.7649, abs=1e-4)


def test_pairing_sees_what_unpaired_noise_hides_and_its_negative() -> None:
    hard_E = 10 * torch.randn(40, generator=torch.Generator().manual_seed(1))
    small = 0.01 * torch.randn(40, generator=torch.Generator().manual_seed(2))
    assert paired((hard_E + 0.1 + small)[None], hard_E[None])[3] < 1e-6
    assert paired(hard_E[None], hard_E.flip(0)[None])[3] > 0.2
    assert paired(hard_E[None], hard_E[None])[3] == pytest.approx(1.0)
    assert paired((hard_E + 1)[None], hard_E[None])[3] < 1e-9
    with pytest.raises(ValueError, match="not the same seeds"):
        paired(hard_E[None], hard_E[None, :3])


def pair(p: float) -> Pair:
    names: dict[str, Any] = dict.fromkeys(("domain", "task", "setting", "metric", "method", "other"), "")
    return Pair(**names, difference=0.0, low=0.0, high=0.0, p=p, p_holm=p, n=1, seeds=(0,))


def test_holm_multiplies_the_smallest_by_all_and_never_falls() -> None:
    assert [x.p_holm for x in holm([pair(0.01), pair(0.04), pair(0.03), pair(0.005)])] == pytest.approx(
        [0.03, 0.06, 0.06, 0.02]
    )


def test_a_family_counts_hypotheses_that_are_not_measured_yet() -> None:
    assert holm_corrected([0.01, 0.04]) == pytest.approx([0.02, 0.04])
    assert holm_corrected([0.01, 0.04], 5) == pytest.approx([0.05, 0.16])
    assert holm_corrected([math.nan, 0.01], 3) == pytest.approx([math.nan, 0.03], nan_ok=True)
    assert holm_corrected([]) == []
    with pytest.raises(ValueError, match="count=1 is less than the 2 p values"):
        holm_corrected([0.01, 0.04], 1)


@pytest.mark.parametrize(
    ("own", "other", "p"),
    [
        ([1, 2, 3], [4, 5, 6], 2 / 20),
        ([4, 5, 6], [1, 2, 3], 2 / 20),
        ([1, 2, 3, 4, 5], [6, 7, 8, math.inf, math.inf], 2 / 252),
        ([1, 4], [2, 3], 1.0),
        ([1, 2, 4], [3, 5, 6], 4 / 20),  # ranks 1 + 2 + 4 = 7: as far from 10.5 as 7, 6, 14 and 15
        ([7, 7], [7, 7], 1.0),
        ([1, 1], [1, 2], 1.0),  # the 2 is on either side with chance one half
        ([math.inf], [5.0], 1.0),
    ],
)
def test_the_rank_test_counts_all_permutations(own: list[float], other: list[float], p: float) -> None:
    assert rank_test(own, other) == pytest.approx(p)


def test_the_rank_test_is_exact_for_more_seeds_than_can_be_enumerated() -> None:
    assert rank_test(range(20), range(20, 40)) == pytest.approx(2 / math.comb(40, 20))


def test_the_rank_test_refuses_what_cannot_be_ordered() -> None:
    with pytest.raises(ValueError, match="one of them is NaN"):
        rank_test([1.0], [math.nan])
    with pytest.raises(ValueError, match="got 0 and 1"):
        rank_test([], [1.0])


def test_the_interquartile_mean_leaves_out_the_outer_quarters() -> None:
    assert interquartile_mean([1, 2, 3, 4]) == 2.5
    assert interquartile_mean([-100, 2, 4, 1000]) == 3
    assert interquartile_mean([5.0]) == 5
    assert interquartile_mean([0, 1, 2]) == pytest.approx((0.25 / 3 * 0 + 1 + 0.25 / 3 * 2) / (1 + 0.5 / 3), abs=0.1)
    middle, low, high = aggregate({"a": [0.9, 1.0, 1.1], "b": [0.4, 0.5, 0.6]})
    assert low <= middle <= high
    assert aggregate({"a": [1.0], "b": [0.0]})[1:] == (0.5, 0.5)
