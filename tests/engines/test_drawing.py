"""Noise of successive batches is drawn at once, and equals the noise of each batch drawn alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from uat.engines.rollout import AHEAD, RolloutRunner, apart, side_by_side
from uat.episode import Noise
from uat.recipes import recipe

CPU, COUNT = torch.device("cpu"), 4


class Drawing(RolloutRunner):
    """A simulator that records the episodes whose noise it draws."""

    def __init__(self, domain: str = "darkroom") -> None:
        simulator = recipe(domain, "uat", "smoke").build_domain().simulator("train", CPU)
        super().__init__(None, simulator, device=CPU, sampled=True)
        self.asked: list[tuple[int, int]] = []

    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        self.asked.append((int(episode_ids[0]), len(episode_ids)))
        return super().noise(episode_ids, seed)

    def batch(self, begin: int, seed: int = 0) -> Noise:
        return apart(*self._drawn_ahead(torch.arange(begin, begin + COUNT), seed))


@pytest.mark.parametrize("domain", ["darkroom", "sepsis"])
def test_each_batch_has_its_own_noise(domain: str) -> None:
    ahead, plain = Drawing(domain), Drawing(domain)
    for begin in (0, 4, 8, 12, 16, 4, 20, 96, 100):
        own = plain.noise(torch.arange(begin, begin + COUNT), 0)
        found = ahead.batch(begin)
        assert found.keys() == own.keys()
        assert all(torch.equal(found[name], own[name]) for name in own)


def test_batches_that_follow_are_drawn_together_each_time_twice_as_many() -> None:
    player = Drawing()
    for index in range(3 * AHEAD):
        player.batch(COUNT * index)
    counts = [count // COUNT for _, count in player.asked]
    assert counts[:7] == [1, 2, 4, 8, 16, 32, 32]
    assert sum(counts) >= 3 * AHEAD
    assert [begin for begin, _ in player.asked] == [COUNT * sum(counts[:n]) for n in range(len(counts))]


def test_the_same_batch_again_is_drawn_once_and_nothing_ahead_of_it() -> None:
    player = Drawing()
    for _ in range(5):
        player.batch(0)
    assert player.asked == [(0, COUNT)]


def test_a_few_batches_again_and_again_are_drawn_until_all_are_there() -> None:
    player = Drawing()
    for _ in range(3):
        for begin in (0, 4, 8):
            player.batch(begin)
    assert player.asked == [(0, COUNT), (COUNT, 2 * COUNT), (0, 3 * COUNT)]


def test_another_seed_starts_anew() -> None:
    player = Drawing()
    for seed in (0, 1, 0):
        player.batch(0, seed)
    assert player.asked == [(0, COUNT)] * 3


def test_no_more_is_drawn_than_memory_is_meant_for(monkeypatch: pytest.MonkeyPatch) -> None:
    player = Drawing()
    size = player._drawn_ahead(torch.arange(COUNT), 0)[0].nbytes
    monkeypatch.setattr("uat.engines.rollout.MOST_BYTES", 5 * size)
    for index in range(1, 20):
        player.batch(COUNT * index)
    assert [count // COUNT for _, count in player.asked[:5]] == [1, 2, 4, 4, 4]
    player.batch(0)
    assert player.asked[-1] == (0, COUNT)


def test_a_larger_batch_after_small_ones_is_drawn_whole() -> None:
    player = Drawing()
    player.batch(0)
    found = apart(*player._drawn_ahead(torch.arange(COUNT, 5 * COUNT), 0))
    assert all(len(value) == 4 * COUNT for value in found.values())


def test_a_batch_between_two_that_are_there_is_drawn() -> None:
    player = Drawing()
    for begin in (0, 4, 8):
        player.batch(begin)
    own = Drawing().noise(torch.arange(6, 6 + COUNT), 0)
    assert all(torch.equal(value, own[name]) for name, value in player.batch(6).items())
    assert player.asked[-1] == (6, COUNT)


def test_tensors_of_any_type_lie_side_by_side() -> None:
    given = {
        "flag": torch.tensor([True, False, True, True]),
        "number": torch.randn(4, 3, dtype=torch.float64),
        "turned": torch.randn(2, 4).T,
        "id": torch.arange(4),
        "none": torch.empty(4, 0),
    }
    rows, places = side_by_side(given, 2)
    for index, row in enumerate(rows):
        found = apart(row, places)
        assert all(torch.equal(found[name], value[2 * index : 2 * index + 2]) for name, value in given.items())
        assert all(found[name].dtype == value.dtype for name, value in given.items())


def test_batches_of_one_process_of_several_lie_apart() -> None:
    """Each batch is shared out, and the rest of it belongs to others."""
    player = Drawing()
    for index in range(32):
        player.batch(2 * COUNT * index)
    assert len(player.asked) < 10
