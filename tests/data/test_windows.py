"""Windows of a log: newest first, without overlap, and no user in two splits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from uat.data.movielens.log import Log
from uat.data.movielens.windows import SHARES, split_users, windows


def log_of(lengths: list[int]) -> Log:
    count = sum(lengths)
    return Log(
        item_N=np.arange(count, dtype=np.int32),
        rating_N=np.arange(count, dtype=np.float32),
        time_N=np.arange(count),
        first_U=np.concatenate([[0], np.cumsum(lengths)]),
        user_names=np.array([str(i) for i in range(len(lengths))]),
        item_names=np.array([str(i) for i in range(count)]),
        group_I=np.zeros(count, dtype=np.int8),
    )


def test_the_newest_windows_come_first() -> None:
    log, users = log_of([7, 2, 4]), torch.tensor([2, 0, 1])
    cut = windows(log, users, horizon=3, most_per_user=5)
    assert cut.item_WT.tolist() == [[10, 11, 12], [4, 5, 6], [1, 2, 3]]
    assert cut.user_W.tolist() == [2, 0, 0]
    assert torch.equal(cut.rating_WT, cut.item_WT.float())
    assert windows(log, users, horizon=3, most_per_user=1).user_W.tolist() == [2, 0]
    assert windows(log, users, horizon=3, limit=1).user_W.tolist() == [2]


def test_every_user_is_in_one_split() -> None:
    parts = {split: split_users(1003, split) for split in SHARES}
    assert {split: len(part) for split, part in parts.items()} == {"train": 802, "validation": 101, "test": 100}
    assert sorted(torch.cat(list(parts.values())).tolist()) == list(range(1003))
    assert torch.equal(parts["test"], split_users(1003, "test"))
    assert not torch.equal(parts["test"], split_users(1003, "test", seed=1))


def test_logs_that_are_too_short_for_windows_are_refused() -> None:
    with pytest.raises(ValueError, match="no user of 2 has horizon=50 interactions"):
        windows(log_of([3, 4]), torch.arange(2))
    with pytest.raises(ValueError, match="limit=0 must be at least 1"):
        windows(log_of([3]), torch.arange(1), limit=0)
    with pytest.raises(ValueError, match="9 users are too few"):
        split_users(9, "test")
