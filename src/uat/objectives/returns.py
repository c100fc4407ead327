"""Returns and advantages of whole episodes: each row is one episode, from its first step to its last.

Shapes: B episodes, T time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from uat.clock import nothing
from uat.episode import Told, Trajectory
from uat.methods.policy import AddUp
from uat.nn.encoders import scale_of


def with_last_observation(episodes: Trajectory) -> Trajectory:
    """Return the episodes with one more column: the observation after a truncated episode, as one more real step.

    A value at that step estimates what the episode would still have earned.
    """
    if episodes.truncated is None or not episodes.truncated.any():
        return episodes
    if episodes.final_obs is None:
        raise ValueError("truncated episodes need final_obs, the observation after their last step")
    return with_column(episodes, episodes.truncated, episodes.final_obs)


def with_column(episodes: Trajectory, truncated_BT: Tensor, final_obs: Tensor) -> Trajectory:
    """Do the work of `with_last_observation`, whether or not an episode was truncated; the host reads no value."""
    streams, device = len(episodes.valid), episodes.valid.device
    row_B = torch.arange(streams, device=device)
    length_B, cut_B = episodes.valid.sum(1), truncated_BT.any(1)
    obs, valid_BT = _longer(episodes.obs), _longer(episodes.valid, False)
    last = obs[row_B, length_B]
    obs[row_B, length_B] = torch.where(cut_B.view(-1, *[1] * (last.dim() - 1)), final_obs.to(obs.dtype), last)
    valid_BT[row_B, length_B] = cut_B
    told, known = episodes.told, episodes.reward_known
    return Trajectory(
        obs=obs,
        action=_longer(episodes.action),
        reward=_longer(episodes.reward),
        terminated=_longer(episodes.terminated, False),
        valid=valid_BT,
        reward_known=None if known is None else _longer(known, False),
        allowed=None if episodes.allowed is None else _longer(episodes.allowed, True),
        facts={name: _longer(fact, 0) for name, fact in episodes.facts.items()},
        told=None
        if told is None
        else Told(
            action=_longer(told.action),
            reward=_longer(told.reward),
            reward_known=None if told.reward_known is None else _longer(told.reward_known, False),
        ),
    )


def _longer(x_BT: Tensor, value: float | bool | None = None) -> Tensor:
    """Return a copy with one more step, filled with a value; None: with "none" (id -1, or zero)."""
    fill = nothing(x_BT) if value is None else value
    return torch.cat([x_BT, torch.full_like(x_BT[:, :1], fill)], dim=1)


def advantages(
    reward_BT: Tensor,
    value_BS: Tensor,
    episodes: Trajectory,
    *,
    discount: float,
    decay: float,
    known_BT: Tensor | None = None,
) -> Tensor:
    """Return generalised advantage estimates (B, T).

    value_BS: values of all steps; a column after them holds the values after truncated episodes, at the step that
    follows each episode's last one (see `with_last_observation`). After a terminated episode nothing more is earned.
    known_BT: False where the reward or the next value is unknown: the advantage there is 0, which cuts the sums of
    earlier steps. None: all are known.
    """
    valid_BT = episodes.valid
    steps = valid_BT.shape[1]
    next_BT = torch.zeros_like(reward_BT)
    next_BT[:, : value_BS.shape[1] - 1] = value_BS[:, 1 : steps + 1]
    continues_BT = torch.cat([valid_BT[:, 1:], torch.zeros_like(valid_BT[:, :1])], dim=1)
    valued_BT = continues_BT if episodes.truncated is None else continues_BT | (episodes.truncated & valid_BT)
    error_BT = reward_BT + discount * torch.where(valued_BT, next_BT, 0.0) - value_BS[:, :steps]
    known_BT = valid_BT if known_BT is None else known_BT & valid_BT
    carry_BT = discount * decay * (continues_BT & known_BT).to(reward_BT.dtype)
    error_BT = torch.where(known_BT, error_BT, 0.0)
    advantage_BT, later_B = torch.empty_like(error_BT), torch.zeros_like(error_BT[:, 0])
    for t in reversed(range(steps)):
        later_B = error_BT[:, t] + carry_BT[:, t] * later_B
        advantage_BT[:, t] = later_B
    return advantage_BT


def discounted_so_far(reward_BT: Tensor, discount: float) -> Tensor:
    """Return (B, T) the discounted sums R_t = discount R_{t-1} + r_t, whose deviation is the scale of values."""
    so_far_B, sums = torch.zeros_like(reward_BT[:, 0]), []
    for t in range(reward_BT.shape[1]):
        so_far_B = discount * so_far_B + reward_BT[:, t]
        sums.append(so_far_B)
    return torch.stack(sums, dim=1)


class Moments(nn.Module):
    """Running count, mean and variance of some numbers, merged batch by batch (Chan et al. 1979)."""

    count: Tensor
    mean: Tensor
    square: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("square", torch.zeros(width, dtype=torch.float64))

    @torch.no_grad()
    def add(self, count: Tensor, total: Tensor, square: Tensor) -> None:
        """Merge the count, the sum and the sum of squared deviations from this batch's own mean of a new batch."""
        if not count:
            return
        merged = self.count + count
        gap = total / count - self.mean
        self.square += square + gap.square() * self.count * count / merged
        self.mean += gap * count / merged
        self.count.copy_(merged)

    @property
    def deviation(self) -> Tensor:
        return (self.square / self.count.clamp_min(1)).sqrt()

    @property
    def scale(self) -> Tensor:
        """The deviation; 1 for numbers that are constant so far."""
        return scale_of(self.mean, self.deviation)


def sums(rows: Tensor, add_up: AddUp) -> tuple[Tensor, Tensor, Tensor]:
    """Return the count, the sum and the sum of squared deviations from the mean of rows (N, width), over all
    processes."""
    rows = rows.double()
    count, total = add_up([torch.tensor(float(len(rows)), dtype=torch.float64, device=rows.device), rows.sum(0)])
    (square,) = add_up([(rows - total / count.clamp_min(1)).square().sum(0)])
    return count, total, square


def moments(x_BT: Tensor, valid_BT: Tensor, add_up: AddUp) -> tuple[Tensor, Tensor]:
    """Return the mean and the deviation over real steps, over all processes."""
    count, total, square = sums(x_BT[valid_BT][:, None], add_up)
    return (total / count.clamp_min(1))[0].to(x_BT.dtype), (square / count.clamp_min(1)).sqrt()[0].to(x_BT.dtype)
