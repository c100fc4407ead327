"""A Session: raw observations and rewards in, actions out, step by step.

Here values enter from outside, so here they are checked. Inside, the same clock and the same `step` as in
training decide what the policy knows.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from uat.acting import choose
from uat.methods import Policy
from uat.types import Assets, Discrete, Items, Step, Vector

Array = Any
"""A tensor, a numpy array, or nested lists of numbers."""


class Session:
    """Plays a policy in `streams` streams at once.

    >>> session = Session(policy, streams=2)
    >>> action = session.act(obs)                       # the first step of both streams
    >>> action = session.act(obs, reward=earned)        # `earned` is what the last action brought
    """

    def __init__(self, policy: Policy, *, streams: int = 1, capacity: int | None = None) -> None:
        if streams < 1:
            raise ValueError(f"streams={streams} must be at least 1")
        self.policy, self.spec, self.streams = policy.eval(), policy.spec, streams
        self.capacity = policy.spec.horizon if capacity is None else capacity
        if self.capacity < 1:
            raise ValueError(f"capacity={capacity} must be at least 1")
        self.device = next(policy.parameters()).device
        self._state = policy.init_state(streams, self.capacity, self.device)
        self._steps = np.zeros(streams, dtype=np.int64)
        self._fresh = np.ones(streams, dtype=bool)
        self._last = self.spec.no_action(self.streams)
        self._rewards: deque[Tensor] = deque(maxlen=max(1, self.spec.reward_lag))

    @torch.no_grad()
    def act(
        self, obs: Array, *, reward: Array | None = None, action: Array | None = None, allowed: Array | None = None
    ) -> Tensor:
        """The policy's decision in each stream.

        reward: what the previous step earned in each stream (for logs: what the step just logged earned);
        action: what was really done in the previous step, if not what this session answered;
        allowed: True where an action may be taken now.
        """
        first = torch.from_numpy(self._fresh.copy())
        steps = np.where(self._fresh, 0, self._steps)
        if steps.max() >= self.capacity:
            raise ValueError(
                f"stream {steps.argmax()} has seen {steps.max()} steps, and the session holds {self.capacity}: "
                "restart the stream, or open the session with a larger capacity"
            )
        seen = self._check_obs(obs)
        earned = torch.zeros(self.streams) if reward is None else self._numbers("reward", reward, (self.streams,))
        done = self._last if action is None else self._check_action(action)
        may = None if allowed is None else self._check_allowed(allowed)

        first_like = first.view(-1, *[1] * (done.dim() - 1))
        done = torch.where(first_like, self.spec.no_action(self.streams), done)
        step = Step(obs=seen, prev_action=done, prev_reward=self._delayed(earned, first), first=first, allowed=may).to(
            self.device
        )
        logits_BA, self._state = self.policy.step(self._state, step)
        self._last = choose(logits_BA, self.spec).cpu()
        self._steps = np.where(self._fresh, 1, self._steps + 1)
        self._fresh[:] = False
        return self._last.clone()

    def restart(self, streams: Array | None = None) -> None:
        """Some streams (their numbers, or a mask; all, if none are named) begin a new episode with their next step."""
        chosen = np.arange(self.streams) if streams is None else np.atleast_1d(np.asarray(streams))
        if chosen.dtype == bool and chosen.shape == (self.streams,):
            chosen = np.flatnonzero(chosen)
        if not np.issubdtype(chosen.dtype, np.integer) and chosen.size:
            raise ValueError(f"restart: expected stream numbers or a mask of {self.streams} booleans, got {streams!r}")
        if chosen.size and (chosen.min() < 0 or chosen.max() >= self.streams):
            raise ValueError(f"restart: streams must lie in [0, {self.streams}), got {chosen.tolist()}")
        self._fresh[chosen.astype(np.int64)] = True

    def _delayed(self, earned_B: Tensor, first_B: Tensor) -> Tensor:
        """The reward channel of this step, as the clock defines it: late by the lag, and scaled."""
        lag = self.spec.reward_lag
        if lag > 0:  # what an episode's last action earned must not leak into the next episode
            earned_B = earned_B.masked_fill(first_B, 0.0)
        while len(self._rewards) < lag:
            self._rewards.append(torch.zeros(self.streams))
        kept = [old_B.masked_fill(first_B, 0.0) for old_B in self._rewards]
        self._rewards = deque([*kept, earned_B], maxlen=self._rewards.maxlen)
        return (self._rewards[0] if lag > 0 else earned_B) * self.spec.reward_scale

    # ------------------------------------------------------------ what comes in

    def _check_obs(self, obs: Array) -> Tensor:
        match self.spec.obs:
            case Vector(width):
                return self._numbers("obs", obs, (self.streams, width))
            case Assets(count, features):
                return self._numbers("obs", obs, (self.streams, count, features))
            case Items(count):
                return self._ids("obs", obs, count)

    def _check_action(self, action: Array) -> Tensor:
        if isinstance(self.spec.action, Discrete):
            return self._ids("action", action, self.spec.action.count)
        weights = self._numbers("action", action, (self.streams, self.spec.action.count))
        sums_B = weights.sum(-1)
        if (weights < 0).any() or ((sums_B - 1).abs() > 1e-4).any():
            raise ValueError(
                "action: weights must be non-negative and sum to 1 in each stream, "
                f"got sums {sums_B.tolist()} and a least weight of {weights.min().item()}"
            )
        return weights

    def _check_allowed(self, allowed: Array) -> Tensor:
        mask = _tensor("allowed", allowed, "booleans")
        shape = (self.streams, self.spec.action.count)
        if mask.dtype != torch.bool or tuple(mask.shape) != shape:
            raise ValueError(
                f"allowed: expected booleans of shape {shape}, got {mask.dtype} of shape {tuple(mask.shape)}"
            )
        if not mask.any(-1).all():
            stream = int((~mask.any(-1)).int().argmax())
            raise ValueError(f"allowed: every stream needs at least one allowed action, got none in stream {stream}")
        return mask

    def _numbers(self, name: str, values: Array, shape: tuple[int, ...]) -> Tensor:
        x = _tensor(name, values)
        if tuple(x.shape) != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {tuple(x.shape)}")
        if not x.isfinite().all():
            where = tuple((~x.isfinite()).nonzero()[0].tolist())
            raise ValueError(f"{name}: expected finite numbers, got {x[where].item()} at {where}")
        return x.float()

    def _ids(self, name: str, values: Array, count: int) -> Tensor:
        x = _tensor(name, values)
        if x.is_floating_point() or x.dtype == torch.bool:
            raise ValueError(f"{name}: expected integer ids, got {x.dtype}")
        if tuple(x.shape) != (self.streams,):
            raise ValueError(f"{name}: expected shape {(self.streams,)}, got {tuple(x.shape)}")
        if ((x < 0) | (x >= count)).any():
            raise ValueError(f"{name}: ids must lie in [0, {count}), got {x.tolist()}")
        return x.long()


def _tensor(name: str, values: Array, what: str = "numbers") -> Tensor:
    try:
        return values.detach().cpu() if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: expected {what}, got {type(values).__name__} ({error})") from None
