"""All lookups of a step of the dark room in one launch (Triton); the slow twin is `DarkRoomSimulator.step`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from uat.domains.darkroom.world import Grid

BLOCK = 32


class Moved(NamedTuple):
    """Where the agents are after their moves, what that earned, what they see there, what the expert would do."""

    position_B: Tensor
    reward_B: Tensor
    obs_BO: Tensor
    target_B: Tensor


def move(
    grid: Grid,
    action_B: Tensor,
    position_B: Tensor,
    goal_B: Tensor,
    next_goal_B: Tensor,
    fires_B: Tensor,
    coin_B: Tensor,
) -> Moved:
    """One step of every world. Columns of a table (goals, cue, coin) may lie any stride apart."""
    streams, cells, width = len(action_B), grid.walls_CO.shape[0], grid.obs_2CGO.shape[-1]
    moved = Moved(
        torch.empty_like(position_B),
        grid.reward_ACG.new_empty(streams),
        grid.obs_2CGO.new_empty(streams, width),
        torch.empty_like(position_B),
    )
    cast(Any, _move)[(triton.cdiv(streams, BLOCK),)](
        action_B, position_B, goal_B, next_goal_B, fires_B, coin_B, grid.next_AC, grid.reward_ACG, grid.obs_2CGO,
        grid.expert_2CG, *moved, streams, goal_B.stride(0), next_goal_B.stride(0), fires_B.stride(0), coin_B.stride(0),
        C=cells, WIDTH=width, ROOM=triton.next_power_of_2(width), BLOCK=BLOCK, num_warps=1,
    )  # fmt: skip
    return moved


@triton.jit
def _move(
    action_ptr, position_ptr, goal_ptr, next_goal_ptr, fires_ptr, coin_ptr, next_ptr, reward_ptr, obs_ptr, expert_ptr,
    to_position, to_reward, to_obs, to_target, B, goal_stride, next_goal_stride, fires_stride, coin_stride,
    C: tl.constexpr, WIDTH: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = b < B
    action = tl.load(action_ptr + b, mask=live, other=0)
    position = tl.load(position_ptr + b, mask=live, other=0)
    goal = tl.load(goal_ptr + b * goal_stride, mask=live, other=0)
    next_goal = tl.load(next_goal_ptr + b * next_goal_stride, mask=live, other=0)
    fires = tl.load(fires_ptr + b * fires_stride, mask=live, other=0)
    coin = tl.load(coin_ptr + b * coin_stride, mask=live, other=0)
    reward = tl.load(reward_ptr + (action * C + position) * C + goal, mask=live, other=0.0)
    after = tl.load(next_ptr + action * C + position, mask=live, other=0)
    target = tl.load(expert_ptr + (coin * C + after) * C + next_goal, mask=live, other=0)
    o = tl.arange(0, ROOM)
    inside = live[:, None] & (o < WIDTH)[None, :]
    row = ((fires * C + after) * C + next_goal)[:, None] * WIDTH + o[None, :]
    tl.store(to_position + b, after, mask=live)
    tl.store(to_reward + b, reward, mask=live)
    tl.store(to_target + b, target, mask=live)
    tl.store(to_obs + b[:, None] * WIDTH + o[None, :], tl.load(obs_ptr + row, mask=inside, other=0.0), mask=inside)
