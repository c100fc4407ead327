"""The synthetic catalogue is reproducible by seed and matches the stated statistics of ML-1M."""

from __future__ import annotations

import numpy as np
import pytest

from uat.data.movielens import Log, SyntheticConfig, synthetic


@pytest.fixture(scope="module")
def log() -> Log:
    return synthetic()


def test_the_seed_decides_everything(log: Log) -> None:
    assert synthetic().checksum() == log.checksum()
    assert synthetic(SyntheticConfig(seed=1)).checksum() != log.checksum()


def test_it_passes_the_filters_as_real_logs_do(log: Log) -> None:
    assert np.diff(log.first_U).min() >= 100
    assert 1800 < log.num_users <= 2000
    assert 800 < log.num_items <= 1000
    for begin, end in zip(log.first_U[:-1], log.first_U[1:], strict=True):
        assert (np.diff(log.time_N[begin:end]) >= 0).all()
        assert len(np.unique(log.item_N[begin:end])) == end - begin


def test_it_is_like_movielens(log: Log) -> None:
    """The numbers in brackets are those of the filtered ML-1M."""
    lengths = np.diff(log.first_U)
    assert 180 < np.median(lengths) < 240  # 210
    popularity = np.sort(np.bincount(log.item_N))[::-1]
    assert 15 < popularity[0] / popularity[-1] < 120  # 61
    stars = np.bincount(log.rating_N.astype(int), minlength=6)[1:] / len(log.rating_N)
    np.testing.assert_allclose(stars, [0.056, 0.111, 0.268, 0.350, 0.215], atol=0.03)
    group_N = log.group_I[log.item_N]
    np.testing.assert_allclose(np.bincount(group_N) / len(group_N), [0.21, 0.22, 0.31, 0.26], atol=0.03)
    inside = np.ones(len(group_N) - 1, dtype=bool)
    inside[log.first_U[1:-1] - 1] = False
    assert (np.diff(group_N) == 0)[inside].mean() == pytest.approx(0.465, abs=0.04)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="num_items=5 must be at least 300"):
        SyntheticConfig(num_items=5)
