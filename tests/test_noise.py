"""Randomness as data: SplitMix64 against plain integers, and what must not matter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from uat import noise
from uat.noise import derive, gumbel, integers, uniform

MASK = 2**64 - 1


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def split_mix(state: int, count: int) -> list[int]:
    """The generator as published, in unbounded integers."""
    out = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        out.append(mix(state))
    return out


def signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def test_plain_generator_gives_the_published_numbers() -> None:
    first = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert split_mix(1234567, 5) == first
    assert split_mix(0, 2) == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@pytest.mark.parametrize("state", [0, 1234567, 2**63, MASK])
def test_tensor_generator_equals_the_plain_one(state: int) -> None:
    steps = torch.arange(1, 6) * noise.GOLDEN + signed(state)
    assert [x & MASK for x in noise._mix(steps).tolist()] == split_mix(state, 5)


@given(seed=st.integers(0, 2**40), id_=st.integers(0, 2**62), name=st.text(min_size=1, max_size=8))
def test_uniform_equals_plain_integers(seed: int, id_: int, name: str) -> None:
    state = mix(mix((id_ + derive(seed, name)) & MASK))
    expected = [((bits >> 12) + 0.5) * 2.0**-52 for bits in split_mix(state, 4)]
    assert uniform(seed, name, torch.tensor([id_]), 4)[0].tolist() == expected


def test_derived_seeds_never_move() -> None:
    assert derive(0, "worlds", "test") == 4240445836344381052  # or every world would be another
    assert derive(0, "worlds", "test") != derive(0, "worlds", "train") != derive(1, "worlds", "train")


@given(seed=st.integers(0, 2**40), parts=st.lists(st.one_of(st.text(), st.integers()), max_size=3))
def test_derived_seeds_are_seeds(seed: int, parts: list[str | int]) -> None:
    assert 0 <= derive(seed, *parts) < 2**63


@given(order=st.permutations(range(6)))
def test_numbers_depend_on_the_id_and_not_on_the_batch(order: list[int]) -> None:
    ids = torch.tensor([3, 1, 4, 159, 26, 535])
    whole = uniform(5, "cue", ids, 7)
    assert torch.equal(uniform(5, "cue", ids[order], 7), whole[order])
    assert torch.equal(uniform(5, "cue", ids[order[:1]], 7), whole[order[:1]])
    assert torch.equal(uniform(5, "cue", ids, 3), whole[:, :3])  # asking for more moves nothing


def test_seed_name_and_id_each_give_other_numbers() -> None:
    ids = torch.arange(100)
    base = uniform(0, "a", ids, 10)
    for other in (uniform(1, "a", ids, 10), uniform(0, "b", ids, 10), uniform(0, "a", ids + 100, 10)):
        assert not (base == other).any()
        correlation = torch.corrcoef(torch.stack([base.flatten(), other.flatten()]))[0, 1].item()
        assert abs(correlation) < 0.12  # 1,000 pairs: four deviations


def test_numbers_are_uniform_in_the_open_interval() -> None:
    x = uniform(3, "uniform", torch.arange(2000), 50)
    assert x.dtype == torch.float64
    assert x.min() > 0
    assert x.max() < 1
    seen = torch.histc(x.flatten(), bins=100, min=0, max=1)
    assert ((seen - 1000) ** 2 / 1000).sum() < 150  # 99 degrees of freedom: below 149 with probability 0.999
    along_ids = torch.corrcoef(torch.stack([x[1:].flatten(), x[:-1].flatten()]))[0, 1].item()
    along_count = torch.corrcoef(torch.stack([x[:, 1:].flatten(), x[:, :-1].flatten()]))[0, 1].item()
    assert max(abs(along_ids), abs(along_count)) < 0.013  # 98,000 pairs: four deviations


def test_integers_cover_their_range_evenly() -> None:
    x = integers(4, "integers", torch.arange(7000), 10, below=7)
    assert x.dtype == torch.int64
    seen = torch.bincount(x.flatten(), minlength=7)
    assert len(seen) == 7
    assert ((seen - 10_000).double() ** 2 / 10_000).sum() < 23  # 6 degrees of freedom: 0.999


def test_gumbel_has_its_moments() -> None:
    x = gumbel(6, "gumbel", torch.arange(4000), 25)
    assert x.isfinite().all()
    assert x.mean().item() == pytest.approx(0.5772, abs=0.016)
    assert x.var().item() == pytest.approx(torch.pi**2 / 6, abs=0.05)
