"""The dark room's fused step against its slow twin: on a GPU where there is one, by Triton's interpreter elsewhere."""

# ruff: noqa: E402 (what needs Triton is imported where there is Triton)
from __future__ import annotations

import pytest
import torch

CUDA = torch.cuda.is_available()
pytest.importorskip("triton")

from uat.domains.darkroom.world import DarkRoomConfig, DarkRoomSimulator
from uat.engines.triton.darkroom import FusedDarkRoom

DEVICE = "cuda" if CUDA else "cpu"


@pytest.mark.parametrize("shifts", [(), (3, 5)])
@pytest.mark.parametrize("tie_break", ["larger-axis", "random"])
def test_one_launch_looks_up_what_many_do(shifts: tuple[int, ...], tie_break: str) -> None:
    config = DarkRoomConfig(horizon=8, shift_steps=shifts, tie_break=tie_break, size=7)  # pyright: ignore[reportArgumentType]
    slow = DarkRoomSimulator(config, DEVICE)
    fast = FusedDarkRoom(slow)
    noise = slow.noise(torch.arange(37), seed=5)
    (world, obs), (fast_world, fast_obs) = slow.reset(noise), fast.reset(noise)
    generator = torch.Generator().manual_seed(0)
    for _ in range(config.horizon):
        assert torch.equal(obs, fast_obs)
        assert torch.equal(slow.expert(world), fast.expert(fast_world))
        for name, fact in slow.facts(world).items():
            assert torch.equal(fact, fast.facts(fast_world)[name])
        action = torch.randint(0, 5, (37,), generator=generator).to(DEVICE)
        after, fast_after = slow.step(world, action), fast.step(fast_world, action)
        world, obs, fast_world, fast_obs = after.world, after.obs, fast_after.world, fast_after.obs
        assert torch.equal(after.reward_B, fast_after.reward_B)
        assert torch.equal(after.terminated_B, fast_after.terminated_B)
