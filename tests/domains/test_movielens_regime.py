"""Regimes, rewards, targets and negatives follow their laws, and depend on seed and id alone."""

from __future__ import annotations

import pytest
import torch

from uat.domains.movielens.regime import Catalogue, RegimeLaw, rewards

LAW, T, SEED = RegimeLaw(), 50, 3
IDS = torch.arange(4000)
GROUPS = torch.tensor([0, 1, 2, 3, 3, 2, 1, 3, 3, 0])
CATALOGUE = Catalogue.of(GROUPS, 4)


def test_segments_last_12_to_20_steps_and_change_the_group() -> None:
    regime_BT = LAW.draw(SEED, IDS, T)
    runs = [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in regime_BT]
    whole = torch.tensor([length for run in runs for length in run[:-1]])  # the last is cut by the end
    assert whole.min() == 12
    assert whole.max() == 20
    first = torch.tensor([run[0] for run in runs])
    counts = torch.bincount(first)[12:] / len(first)
    torch.testing.assert_close(counts, torch.full((9,), 1 / 9), rtol=0, atol=0.02)
    assert torch.bincount(regime_BT[:, 0]).min() > 900


def test_every_other_group_is_as_likely_after_a_switch() -> None:
    regime_BT = RegimeLaw(shortest=5, longest=5).draw(SEED, IDS, 10)
    jump_B = (regime_BT[:, 9] - regime_BT[:, 0]) % 4
    counts = torch.bincount(jump_B, minlength=4) / len(jump_B)
    torch.testing.assert_close(counts, torch.tensor([0, 1 / 3, 1 / 3, 1 / 3]), rtol=0, atol=0.03)


def test_the_hazard_is_that_of_a_uniform_length() -> None:
    hazard = RegimeLaw(shortest=2, longest=4).hazard()
    torch.testing.assert_close(hazard, torch.tensor([0, 1 / 3, 1 / 2, 1], dtype=torch.float64))


def test_rewards() -> None:
    group, regime = torch.tensor([[0, 1, 2]]), torch.tensor([[0, 2, 2]])
    reward = rewards(group, torch.tensor([[5.0, 5.0, 2.0]]), regime)
    torch.testing.assert_close(reward, torch.tensor([[1.0, -0.2, 0.4]]))


def test_targets_are_uniform_in_the_group() -> None:
    regime_BT = LAW.draw(SEED, IDS, T)
    target_BT = CATALOGUE.targets(SEED, IDS, regime_BT)
    assert torch.equal(GROUPS[target_BT], regime_BT)
    counts = torch.bincount(target_BT[regime_BT == 3], minlength=10)[GROUPS == 3].double()
    torch.testing.assert_close(counts / counts.sum(), torch.full((4,), 0.25, dtype=torch.float64), rtol=0, atol=0.01)


def test_negatives_are_uniform_sets_without_the_target() -> None:
    target_B = torch.full_like(IDS, 4)
    negative_BK = CATALOGUE.negatives(SEED, IDS, 49, target_B, count=3)
    assert all(len(set(row)) == 3 for row in negative_BK.tolist())
    sets = torch.unique(negative_BK.sort(1).values, dim=0, return_counts=True)[1]
    assert len(sets) == 84  # 9 over 3
    assert (sets.double() / len(IDS) * 84 - 1).abs().max() < 0.7
    assert not (negative_BK == 4).any()
    everything = CATALOGUE.negatives(SEED, IDS[:5], 49, target_B[:5], count=9)
    assert (everything.sort(1).values == torch.tensor([0, 1, 2, 3, 5, 6, 7, 8, 9])).all()


def test_questions_depend_on_seed_id_and_step_alone() -> None:
    some = torch.tensor([17, 3])
    regime_BT = LAW.draw(SEED, IDS, T)
    assert torch.equal(LAW.draw(SEED, some, T), regime_BT[some])
    target_BT = CATALOGUE.targets(SEED, IDS, regime_BT)
    assert torch.equal(CATALOGUE.targets(SEED, some, regime_BT[some]), target_BT[some])
    draw = [CATALOGUE.negatives(seed, some, t, some * 0, 5) for seed, t in ((1, 49), (1, 49), (1, 48), (2, 49))]
    assert torch.equal(draw[0], draw[1])
    assert not torch.equal(draw[0], draw[2])
    assert not torch.equal(draw[0], draw[3])


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="shortest=9 must be at least 1 and at most longest=8"):
        RegimeLaw(shortest=9, longest=8)
    with pytest.raises(ValueError, match=r"each of 4 groups needs an item; their sizes are \[1, 1, 0, 0\]"):
        Catalogue.of(torch.tensor([0, 1]), 4)
    with pytest.raises(ValueError, match="99 negatives cannot be drawn from 9 items"):
        CATALOGUE.negatives(0, IDS, 0, IDS)
