"""Next-item prediction: splits and metrics computed by hand, and recommenders that learn an alphabet."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from uat.methods import METHODS
from uat.paper.next_item import (
    Learner,
    LeaveOneOut,
    NextItemConfig,
    Outcome,
    Sequences,
    as_batch,
    learn,
    next_item_spec,
    rank,
)

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"d_model": 16, "num_heads": 2, "num_layers": 2, "d_ff": 32, "dropout": 0.0}


# ---------------------------------------------------------------- the log


def test_rare_items_go_and_equal_times_stay_as_they_came() -> None:
    user_N = np.array([1, 0, 0, 1, 0, 0, 1, 1, 1, 0])
    item_N = np.array([7, 3, 9, 9, 4, 7, 3, 4, 5, 3])
    time_N = np.array([5, 2, 1, 1, 2, 1, 9, 1, 2, 8])
    found = Sequences.of(user_N, item_N, time_N, least=2)  # item 5 came once
    assert found.first_U.tolist() == [0, 5, 9]
    names = np.array([3, 4, 7, 9])[found.item_N]
    assert names.tolist() == [9, 7, 3, 4, 3, 9, 4, 7, 3]
    assert (found.num_users, found.num_items) == (2, 4)


def test_leave_one_out_on_a_log_by_hand() -> None:
    log = Sequences(item_N=np.array([4, 2, 0, 3, 1, 0, 1, 2, 4], np.int32), first_U=np.array([0, 5, 9]))
    data = LeaveOneOut.of(log, length=3)
    assert data.obs_UT.tolist() == [[4, 2, -1], [0, -1, -1]]
    assert data.target_UT.tolist() == [[2, 0, -1], [1, -1, -1]]
    assert data.validation.obs_UT.tolist() == [[4, 2, 0], [0, 1, -1]]
    assert data.validation.target_U.tolist() == [3, 2]
    assert data.test.obs_UT.tolist() == [[2, 0, 3], [0, 1, 2]]
    assert data.test.target_U.tolist() == [1, 4]
    assert [row.nonzero()[:, 0].tolist() for row in data.validation.seen_UI] == [[0, 2, 4], [0, 1]]
    assert [row.nonzero()[:, 0].tolist() for row in data.test.seen_UI] == [[0, 2, 3, 4], [0, 1, 2]]


def test_the_newest_steps_are_kept() -> None:
    log = Sequences(item_N=np.arange(9, dtype=np.int32), first_U=np.array([0, 9]))
    data = LeaveOneOut.of(log, length=2)
    assert (data.obs_UT.tolist(), data.target_UT.tolist()) == ([[4, 5]], [[5, 6]])
    assert (data.validation.obs_UT.tolist(), data.test.obs_UT.tolist()) == ([[5, 6]], [[6, 7]])


def test_a_user_with_too_few_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 4 interactions"):
        Sequences(item_N=np.arange(7, dtype=np.int32), first_U=np.array([0, 4, 7]))


def test_a_log_comes_back_from_its_file(tmp_path: Path) -> None:
    log = Sequences(item_N=np.arange(9, dtype=np.int32), first_U=np.array([0, 5, 9]))
    log.save(tmp_path / "log.npz")
    found = Sequences.load(tmp_path / "log.npz")
    assert np.array_equal(found.item_N, log.item_N)
    assert np.array_equal(found.first_U, log.first_U)


# ---------------------------------------------------------------- metrics


def test_full_ranking_by_hand() -> None:
    """Thirty items, scores falling with the id."""
    score_BI = -torch.arange(30.0).expand(6, -1).clone()
    seen_BI = torch.zeros(6, 30, dtype=torch.bool)
    target_B = torch.tensor([0, 2, 9, 10, 12, 4])
    seen_BI[4, :5] = True  # five better ones were seen: the thirteenth becomes the eighth
    score_BI[5, :10] = 0.0  # ten are equal: the target is any of them
    found = rank(score_BI, target_B, seen_BI)
    gain = [1 / math.log2(place + 2) for place in range(30)]
    assert found["hr@10"].tolist() == [1, 1, 1, 0, 1, 1]
    assert found["hr@20"].tolist() == [1, 1, 1, 1, 1, 1]
    assert found["ndcg@10"].tolist() == pytest.approx([1, 0.5, gain[9], 0, gain[7], sum(gain[:10]) / 10])


def test_a_target_that_was_seen_is_last() -> None:
    seen_BI = torch.zeros(1, 30, dtype=torch.bool)
    seen_BI[0, 0] = True
    assert rank(-torch.arange(30.0)[None], torch.tensor([0]), seen_BI)["hr@20"].item() == 0


# ---------------------------------------------------------------- learning


def stretches(letters: int, users: int) -> Sequences:
    """Pieces of a circular alphabet with random starts and several lengths."""
    draw = np.random.default_rng(0)
    lengths_U, start_U = draw.integers(5, 12, users), draw.integers(0, letters, users)
    item_N = np.concatenate([(start + np.arange(n)) % letters for start, n in zip(start_U, lengths_U, strict=True)])
    return Sequences(item_N=item_N.astype(np.int32), first_U=np.concatenate([[0], lengths_U.cumsum()]))


@pytest.mark.parametrize(
    ("method", "own", "epochs"), [("sasrec", {}, 15), ("bert4rec", {"mask_share": 0.3, "last_share": 0.3}, 40)]
)
def test_a_recommender_learns_the_alphabet(method: str, own: dict[str, float], epochs: int) -> None:
    config = NextItemConfig(length=6, batch_size=50, lr=5e-3, epochs=epochs, patience=epochs)
    *lines, outcome = learn(method, {**SMALL, **own}, stretches(20, 280), config, CPU)
    assert isinstance(outcome, Outcome)
    assert len(lines) == outcome.epochs
    assert outcome.test["ndcg@10"] > 0.99, outcome
    assert outcome.validation["ndcg@10"] > 0.99
    rows = outcome.rows(method, "alphabet", 0, 280)
    assert {(row.split, row.metric) for row in rows} >= {("test", "ndcg@10"), ("test", "hr@10"), ("train", "seconds")}


def test_the_same_seed_gives_the_same_numbers() -> None:
    config = NextItemConfig(length=8, batch_size=48, epochs=2)
    first, second = (list(learn("sasrec", {**SMALL, "dropout": 0.2}, stretches(25, 100), config, CPU)) for _ in "ab")
    assert first[:2] == second[:2]


def test_padding_of_a_batch_changes_nothing() -> None:
    log = stretches(25, 10)
    data, spec = LeaveOneOut.of(log, 8), next_item_spec(25, 8)
    entry = METHODS["sasrec"]
    policy = entry.build(spec, entry.configure(**SMALL))
    total, count = policy.loss(as_batch(data.obs_UT, data.target_UT))["imitation"]
    learner = Learner(policy, data, NextItemConfig(length=8, batch_size=16))
    learner.row_B[:10] = torch.arange(10)
    assert learner.step()["loss/imitation"].item() == pytest.approx((total / count).item(), rel=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("method", ["sasrec", "bert4rec"])
def test_a_captured_step_equals_a_plain_one(method: str) -> None:
    data, entry = LeaveOneOut.of(stretches(25, 40), 8).to("cuda"), METHODS[method]
    losses = []
    for captured in (False, True):
        torch.manual_seed(0)
        policy = entry.build(next_item_spec(25, 8), entry.configure(**SMALL)).cuda()
        learner = Learner(policy, data, NextItemConfig(length=8, batch_size=16))
        if captured:
            learner.capture()
            assert learner.step is not learner.plain_step
        losses.append([learner.epoch(index) for index in (1, 2)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_script_writes_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stretches(25, 20).save(tmp_path / "log.npz")
    flags = ["--data", str(tmp_path / "log.npz"), "--method", "sasrec", "--device", "cpu", "--epochs", "1"]
    monkeypatch.setattr(sys, "argv", ["next_item.py", *flags, "--out", str(tmp_path / "rows.jsonl")])
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(str(root))
    runpy.run_path(str(root / "results" / "next_item.py"), run_name="__main__")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {"hr@10", "ndcg@10"} <= {row["metric"] for row in rows if row["split"] == "test"}
    assert all(row["method"] == "sasrec" and row["task"] == "ml-1m" for row in rows)
