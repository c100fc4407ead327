"""Advantages, returns and running moments of whole episodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from uat.engines.update import alone
from uat.episode import Trajectory
from uat.objectives.returns import (
    Moments,
    advantages,
    discounted_so_far,
    moments,
    sums,
    with_last_observation,
)

DISCOUNT, DECAY = 0.9, 0.8


def episodes(lengths: list[int], cut: list[bool], seed: int = 0) -> Trajectory:
    """Return episodes of these lengths, some of them truncated; observations are numbers that differ everywhere."""
    generator, streams, steps = torch.Generator().manual_seed(seed), len(lengths), max(lengths)
    last_B = torch.tensor(lengths) - 1
    valid_BT = torch.arange(steps) <= last_B[:, None]
    end_BT = torch.arange(steps) == last_B[:, None]
    cut_B1 = torch.tensor(cut)[:, None]
    return Trajectory(
        obs=torch.arange(streams * steps, dtype=torch.float64).view(streams, steps, 1),
        action=torch.randint(3, (streams, steps), generator=generator),
        reward=torch.randn(streams, steps, dtype=torch.float64, generator=generator),
        terminated=end_BT & ~cut_B1,
        truncated=end_BT & cut_B1,
        final_obs=torch.full((streams, 1), -7.0, dtype=torch.float64),
        valid=valid_BT,
    )


def test_advantages_equal_those_of_a_peer() -> None:
    """Stable-baselines3 has one buffer of steps, in which episodes follow each other, and adds the value after a
    truncated episode to its last reward."""
    buffers = pytest.importorskip("stable_baselines3.common.buffers")
    spaces = pytest.importorskip("gymnasium.spaces")
    lengths, cut = [5, 1, 7, 3, 4], [True, False, False, True, True]
    played = episodes(lengths, cut)
    value_BS = torch.randn(len(lengths), max(lengths) + 1, dtype=torch.float64)
    own_BT = advantages(played.reward, value_BS, played, discount=DISCOUNT, decay=DECAY)

    space = spaces.Box(-1, 1, (1,))
    peer = buffers.RolloutBuffer(sum(lengths), space, space, "cpu", gae_lambda=DECAY, gamma=DISCOUNT, n_envs=1)
    place = 0
    for row, length in enumerate(lengths):
        for t in range(length):
            last = t == length - 1
            bonus = DISCOUNT * value_BS[row, length] if last and cut[row] else 0.0
            peer.rewards[place] = played.reward[row, t] + bonus
            peer.values[place], peer.episode_starts[place] = value_BS[row, t], t == 0
            place += 1
    peer.compute_returns_and_advantage(torch.zeros(1), np.ones(1))
    expected = torch.from_numpy(peer.advantages[:, 0]).double()
    torch.testing.assert_close(own_BT[played.valid], expected, atol=1e-5, rtol=1e-5)  # the peer has float32
    assert (own_BT[~played.valid] == 0).all()


def test_the_value_after_an_episode_counts_only_if_it_was_truncated() -> None:
    played, value_BS = episodes([2, 2], [True, False]), torch.zeros(2, 3, dtype=torch.float64)
    value_BS[:, 2] = 10.0
    zero = replace(played, reward=torch.zeros_like(played.reward))
    own_BT = advantages(zero.reward, value_BS, zero, discount=DISCOUNT, decay=DECAY)
    assert own_BT[0].tolist() == pytest.approx([DISCOUNT * DECAY * DISCOUNT * 10, DISCOUNT * 10])
    assert own_BT[1].tolist() == [0.0, 0.0]


def test_advantages_with_a_decay_of_one_are_returns_minus_values() -> None:
    played = episodes([4, 2], [False, False])
    value_BS = torch.randn(2, 4, dtype=torch.float64)
    own_BT = advantages(played.reward, value_BS, played, discount=DISCOUNT, decay=1.0)
    reward = played.reward[0]
    expected = sum(DISCOUNT**k * reward[k] for k in range(4)) - value_BS[0, 0]
    assert own_BT[0, 0].item() == pytest.approx(float(expected))


def test_only_truncated_episodes_get_one_more_step() -> None:
    played = episodes([3, 1, 3], [True, True, False])
    longer = with_last_observation(played)
    assert longer.valid.sum(1).tolist() == [4, 2, 3]
    assert longer.obs[0, 3].item() == longer.obs[1, 1].item() == -7.0
    assert torch.equal(longer.obs[:, :3][played.valid], played.obs[played.valid])
    assert longer.obs[2, 3].item() == 0.0
    without = replace(played, truncated=torch.zeros_like(played.valid))
    assert with_last_observation(without) is without


def test_truncated_episodes_need_their_last_observation() -> None:
    with pytest.raises(ValueError, match="need final_obs"):
        with_last_observation(replace(episodes([2], [True]), final_obs=None))


def test_discounted_sums() -> None:
    reward_BT = torch.tensor([[1.0, 2.0, 3.0]])
    assert discounted_so_far(reward_BT, 0.5).tolist() == [[1.0, 2.5, 4.25]]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(0, 100), st.floats(-1e6, 1e6))
def test_merged_moments_equal_those_of_all_rows(counts: list[int], seed: int, shift: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randn(n, 2, dtype=torch.float64, generator=generator) + shift for n in counts]
    running, rows = Moments(2), torch.cat(batches)
    for batch in batches:
        running.add(*sums(batch, alone))
    if len(rows):
        torch.testing.assert_close(running.mean, rows.mean(0))
        torch.testing.assert_close(running.deviation, rows.std(0, correction=0), atol=1e-6, rtol=1e-6)
    assert running.count == len(rows)


def test_moments_of_real_steps() -> None:
    x_BT = torch.tensor([[1.0, 3.0], [5.0, 100.0]])
    mean, deviation = moments(x_BT, torch.tensor([[True, True], [True, False]]), alone)
    assert mean.item() == 3.0
    assert deviation.item() == pytest.approx((8 / 3) ** 0.5)
