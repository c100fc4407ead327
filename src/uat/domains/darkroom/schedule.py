"""Goal schedules: draws of goals for the simulator, and their distribution for the Bayes filter.

A stage is a position in a world's goal sequence. Gradual and cyclic goals move at every episode, abrupt ones at every
sixth. Any stage is computed directly, without the episodes before it.

Axes: B episodes, W worlds, N stages from the first on, K requested stages, C or G cells (row * size + column).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from uat.noise import integers

Schedule = Literal["gradual", "abrupt", "cyclic"]

EPISODES_PER_BLOCK = 6
"""Number of episodes that an abrupt goal lasts."""
UNIT_MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))


def goals(
    schedule: Schedule, size: int, seed: int, world_B: Tensor, index_B: Tensor, shifts: int, worlds: int, furthest: int
) -> Tensor:
    """(B, 1 + shifts) goal cells of the index-th episode of each world: at its start and after each of its shifts.

    worlds, furthest: the number of worlds, and the largest index, known on the host. If there are more episodes than
    worlds, the sequence of each world is drawn once.
    """
    stage_B = index_B // EPISODES_PER_BLOCK if schedule == "abrupt" else index_B
    stages = (furthest // EPISODES_PER_BLOCK if schedule == "abrupt" else furthest) + shifts
    stage_BK = stage_B[:, None] + torch.arange(1 + shifts, device=index_B.device)
    each = torch.arange(min(worlds, len(world_B)), device=world_B.device)
    world_W, place_B = (each, world_B) if worlds < len(world_B) else (world_B, each)
    if schedule == "gradual":
        return _walk(size, seed, world_W, stages)[place_B[:, None], stage_BK]
    if schedule == "abrupt":
        cell_WN = integers(seed, "darkroom.goal.abrupt", world_W, stages + 1, below=size**2)
        return cell_WN[place_B[:, None], stage_BK]
    waypoints = waypoint_cells(size).to(index_B.device, non_blocking=True)
    phase_B1 = integers(seed, "darkroom.goal.phase", world_B, 1, below=len(waypoints))
    return waypoints[(stage_BK + phase_B1) % len(waypoints)]


def prior(schedule: Schedule, size: int) -> Tensor:
    """(G,) probability of each goal cell in an episode, as integer weights."""
    if schedule == "gradual":  # the walk starts stationary: half weight at a wall, a quarter in a corner
        axis = torch.full((size,), 2.0, dtype=torch.float64)
        axis[[0, -1]] = 1.0
        return torch.outer(axis, axis).flatten()
    if schedule == "abrupt":
        return torch.ones(size**2, dtype=torch.float64)
    return one_hot(waypoint_cells(size), size**2).sum(0).double()


def kernel(schedule: Schedule, size: int) -> Tensor:
    """(G, G) probability of each move of the goal at a shift, as integer weights with equal row sums."""
    if schedule == "gradual":
        cell_G = torch.arange(size**2)
        at_G2 = torch.stack([cell_G // size, cell_G % size], dim=-1)
        return one_hot(_fold(at_G2 + torch.tensor(UNIT_MOVES)[:, None], size), size**2).sum(0).double()
    if schedule == "abrupt":
        return torch.ones(size**2, size**2, dtype=torch.float64)
    waypoints = waypoint_cells(size)
    kernel_GG = torch.zeros(size**2, size**2, dtype=torch.float64)
    kernel_GG[waypoints, waypoints.roll(-1)] = 1.0
    return kernel_GG


def waypoint_cells(size: int) -> Tensor:
    """(4,) cyclic goals, clockwise, size // 5 cells away from the walls: (2,2) (2,7) (7,7) (7,2) for size 10."""
    near, far = size // 5, size - 1 - size // 5
    return torch.tensor([row * size + column for row, column in ((near, near), (near, far), (far, far), (far, near))])


def _walk(size: int, seed: int, world_W: Tensor, stages: int) -> Tensor:
    """(W, N) goals of a random walk reflected at the walls. The n-th move of a world does not depend on `stages`."""
    start_W2 = integers(seed, "darkroom.goal.start", world_W, 2, below=2 * (size - 1))
    move_WN = integers(seed, "darkroom.goal.move", world_W, stages, below=len(UNIT_MOVES))
    moves = torch.tensor(UNIT_MOVES).to(world_W.device, non_blocking=True)
    path_WN2 = torch.cat([start_W2[:, None], moves[move_WN]], dim=1).cumsum(1)
    return _fold(path_WN2, size)


def _fold(at: Tensor, size: int) -> Tensor:
    """Cells of (..., 2) unbounded coordinates, mirrored at the walls: -1 is 1, and `size` is size - 2."""
    period = 2 * (size - 1)
    at = at % period
    inside = torch.minimum(at, period - at)
    return inside[..., 0] * size + inside[..., 1]
