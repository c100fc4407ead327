"""Paired differences, multiple-comparison corrections and means over tasks, against known answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from uat.evaluation.intervals import Spread, student
from uat.evaluation.statistics import Pair, aggregate, holm, interquartile_mean, paired


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


def test_the_interquartile_mean_leaves_out_the_outer_quarters() -> None:
    assert interquartile_mean([1, 2, 3, 4]) == 2.5
    assert interquartile_mean([-100, 2, 4, 1000]) == 3
    assert interquartile_mean([5.0]) == 5
    assert interquartile_mean([0, 1, 2]) == pytest.approx((0.25 / 3 * 0 + 1 + 0.25 / 3 * 2) / (1 + 0.5 / 3), abs=0.1)
    middle, low, high = aggregate({"a": [0.9, 1.0, 1.1], "b": [0.4, 0.5, 0.6]})
    assert low <= middle <= high
    assert aggregate({"a": [1.0], "b": [0.0]})[1:] == (0.5, 0.5)
