"""Intervals have known values and the stated coverage, which simpler intervals do not reach."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from uat.evaluation.intervals import Spread, filled, interval, student, variance_of_mean

Interval = Callable[[Tensor], tuple[float, float]]
T = {freedom: student(freedom) for freedom in (2, 59)}


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (10, 2.2281), (100, 1.9840), (4095, 1.9605)]
)
def test_student_has_its_known_values(freedom: int, t: float) -> None:
    assert student(freedom) == pytest.approx(t, abs=1e-4)


def test_one_seed_is_students_interval_over_episodes() -> None:
    low, high = interval(torch.tensor([[0.0, 1.0, 2.0, 3.0]]))
    half = 3.182446 * (5 / 3) ** 0.5 / 2  # sample variance 5/3, four episodes
    assert (low, high) == pytest.approx((1.5 - half, 1.5 + half), abs=1e-5)


def test_effects_of_seeds_alone_give_students_interval_over_seeds() -> None:
    y_SE = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)[:, None].expand(3, 40)
    half = T[2] * 7**0.5 / 3**0.5  # variance of 1, 2, 6
    assert interval(y_SE) == pytest.approx((3 - half, 3 + half))


def test_effects_of_episodes_alone_are_the_same_however_many_seeds_play_them() -> None:
    y_E = torch.randn(60, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    once = interval(y_E[None])
    assert interval(y_E.expand(7, 60)) == pytest.approx(once)
    assert once[1] - once[0] == pytest.approx(2 * T[59] * y_E.std().item() / 60**0.5)


def test_the_formula_by_hand() -> None:
    """Two seeds, two episodes: A = 1/2·(2-5)², B = 1/2·(2-5)², C from the remainders ±1."""
    y_SE = torch.tensor([[1.0, 3.0], [3.0, 7.0]])  # seeds' means 2 and 5, episodes' means 2 and 5, mean 3.5
    between_seeds, shared_episodes = 4.5 / 2, 4.5 / 2 - 1.0 / 4  # four remainders of ±1/2: C = 4·(1/2)² = 1
    half = math.sqrt(student(1) ** 2 * (between_seeds + shared_episodes))
    assert interval(y_SE) == pytest.approx((3.5 - half, 3.5 + half))


def test_seeds_that_agree_by_luck_leave_the_doubt_about_episodes() -> None:
    """Both seeds' means are 1/2 by chance; the interval is no narrower than the one over other episodes."""
    y_SE = torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 1.0, 1.0]])
    by_episode = interval(y_SE.mean(0, keepdim=True))
    assert interval(y_SE) == pytest.approx(by_episode)
    assert by_episode[1] - by_episode[0] > 1


def test_zero_spread_gives_a_point_and_one_episode_gives_nan() -> None:
    assert interval(torch.full((3, 5), 0.5)) == (0.5, 0.5)
    assert all(math.isnan(end) for end in (*interval(torch.rand(3, 1)), *interval(torch.rand(1, 1))))


# ---------------------------------------------------------------- episodes that leave a metric undefined


def test_gaps_are_filled_without_moving_a_mean() -> None:
    y_SE = torch.tensor([[0.0, 1.0, torch.nan, 2.0], [4.0, torch.nan, torch.nan, 6.0]])
    z_SE = filled(y_SE)
    assert z_SE.mean(1).tolist() == [1.0, 5.0]
    assert z_SE[:, 2].tolist() == [1.0, 5.0]
    whole = torch.rand(3, 4)
    assert torch.equal(filled(whole), whole.double())
    assert filled(torch.full((1, 3), torch.nan)).isnan().all()


def test_an_interval_with_gaps_is_that_of_the_defined_episodes() -> None:
    """Only nearly equal: the ratio's variance divides by n², that of a mean of n values by n (n - 1)."""
    y_E = torch.randn(400, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gappy_E = y_E.clone()
    gappy_E[::4] = torch.nan
    alone = interval(gappy_E[~gappy_E.isnan()][None])
    assert interval(gappy_E[None]) == pytest.approx(alone, abs=1e-3)
    half, naive = (alone[1] - alone[0]) / 2, 1.96 * gappy_E.nan_to_num(gappy_E.nanmean().item()).std().item() / 400**0.5
    assert naive < 0.9 * half  # putting the mean into the gaps, as if it had been seen, is too sure


# ---------------------------------------------------------------- coverage


def pooled(y_SE: Tensor) -> tuple[float, float]:
    """The interval for independent episodes of each seed."""
    half = 1.96 * y_SE.std().item() / y_SE.numel() ** 0.5
    return y_SE.mean().item() - half, y_SE.mean().item() + half


def over_seeds(y_SE: Tensor) -> tuple[float, float]:
    """The interval for fixed episodes."""
    means_S = y_SE.mean(1)
    half = T[2] * means_S.std().item() / len(means_S) ** 0.5
    return means_S.mean().item() - half, means_S.mean().item() + half


def coverage(method: Interval, effects: tuple[float, float, float], seeds: int = 3, episodes: int = 60) -> float:
    """Share of intervals that contain the true mean, zero."""
    generator, hits, draws = torch.Generator().manual_seed(0), 0, 300
    for _ in range(draws):
        shapes = ((seeds, 1), (1, episodes), (seeds, episodes))
        noise = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        low, high = method(sum((size * z for size, z in zip(effects, noise, strict=True)), torch.zeros(())))
        hits += low <= 0 <= high
    return hits / draws


@pytest.mark.parametrize("effects", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0.1, 1, 1), (0.3, 1, 1), (1, 1, 1)])
def test_the_interval_holds_the_truth_in_at_least_95_of_100_cases(effects: tuple[float, float, float]) -> None:
    assert coverage(interval, effects) >= 0.925  # 300 draws: two deviations below


def test_simpler_intervals_do_not() -> None:
    """Three seeds on the same episodes are neither 180 independent episodes nor three independent tests."""
    assert coverage(pooled, (0.1, 1, 1)) < 0.85
    assert coverage(over_seeds, (0, 1, 0.1)) < 0.5


def test_the_interval_holds_the_truth_with_gaps_that_differ_from_seed_to_seed() -> None:
    generator = torch.Generator().manual_seed(1)

    def with_gaps(y_SE: Tensor) -> tuple[float, float]:
        return interval(y_SE.masked_fill(torch.rand(y_SE.shape, generator=generator) < 0.3, torch.nan))

    for effects in ((0, 1, 0), (0, 0, 1), (0.3, 1, 1)):
        assert coverage(with_gaps, effects) >= 0.925


@pytest.mark.parametrize("block", [2.0, 5.0])
def test_blocks_give_the_variance_that_the_stationary_bootstrap_draws(block: float) -> None:
    """An explicit stationary bootstrap: take the next episode (on a circle), or jump with probability 1 / block."""
    rng, count, draws = np.random.default_rng(0), 40, 20_000
    y = np.convolve(rng.normal(size=count + 3), np.ones(4), "valid")
    jump = rng.random((draws, count)) < 1 / block
    place = rng.integers(0, count, (draws, count))
    for t in range(1, count):
        place[:, t] = np.where(jump[:, t], place[:, t], (place[:, t - 1] + 1) % count)
    expected = y[place].mean(1).var() * count / (count - 1)
    assert variance_of_mean(torch.from_numpy(y), block) == pytest.approx(expected, rel=0.05)


def test_episodes_that_lean_on_each_other_widen_the_interval_and_single_ones_leave_it() -> None:
    rng = np.random.default_rng(1)
    free = torch.from_numpy(rng.normal(size=400))
    tied = torch.from_numpy(np.convolve(rng.normal(size=403), np.ones(4), "valid"))
    assert variance_of_mean(tied, 10.0) > 2 * variance_of_mean(tied, 1.0)
    assert interval(tied[None], 1.0) == interval(tied[None])
    wide, narrow = (variance_of_mean(free, block) for block in (5.0, 1.0))
    assert wide == pytest.approx(narrow, rel=0.4)


# ---------------------------------------------------------------- p values


@pytest.mark.parametrize(("t", "freedom", "p"), [(2.228139, 10, 0.05), (3.169273, 10, 0.01), (12.7062, 1, 0.05)])
def test_p_values_are_students(t: float, freedom: int, p: float) -> None:
    """Known points of the tables; episodes of mean t and standard error 1."""
    y_E = torch.linspace(-1, 1, freedom + 1, dtype=torch.float64)
    y_E = y_E / (y_E.std() / math.sqrt(freedom + 1)) + t
    assert Spread.of(y_E[None]).p_value() == pytest.approx(p, rel=1e-4)


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("block", [1.0, 10.0])
def test_a_p_value_is_the_level_at_which_the_interval_reaches_zero(seeds: int, block: float) -> None:
    generator = torch.Generator().manual_seed(seeds)
    for shift in (0.0, 0.1, 0.3):
        found = Spread.of(torch.randn(seeds, 200, generator=generator, dtype=torch.float64) + shift, block)
        assert found.half(found.p_value()) == pytest.approx(abs(found.mean), rel=1e-3)
        assert (found.p_value() < 0.05) == (abs(found.mean) > found.half())


def test_without_a_difference_p_values_are_uniform_also_for_episodes_that_follow_each_other() -> None:
    """About 5 % of p values lie below 5 %; a few more, since blocks of 10 do not capture the whole autocorrelation."""
    generator, low = torch.Generator().manual_seed(0), 0
    x_RE = torch.randn(200, 500, generator=generator, dtype=torch.float64)
    y_RE = x_RE.clone()
    for e in range(1, 500):
        y_RE[:, e] = 0.5 * y_RE[:, e - 1] + x_RE[:, e]
    for y_E in y_RE:
        low += Spread.of(y_E[None], 10.0).p_value() < 0.05
    assert 0.02 < low / 200 < 0.11
    assert sum(Spread.of(y_E[None]).p_value() < 0.05 for y_E in y_RE) > 2 * low  # as if they were independent


def test_one_episode_gives_nan() -> None:
    assert math.isnan(Spread.of(torch.ones(3, 1)).p_value())
