"""A Session: raw observations and rewards in, actions out, step by step.

Here values enter from outside, so here they are checked. Inside, the same clock and the same `step` as in
training decide what the policy knows.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from uat.acting import choose
from uat.checks import Array, check_actions, check_mask, check_numbers, check_observations
from uat.methods import Policy
from uat.methods.uat import UAT
from uat.methods.vanilla import Vanilla
from uat.nn.kernels.cpu_step import CPUStep
from uat.types import Agent, Step

FAST_STREAMS = 8
"""Up to here the fast step, which takes one stream after the other, beats the cached step, which takes all at once."""


def open_fast(policy: Policy) -> CPUStep | str:
    """The policy's weights as they are now, ready for the fast step; or why there is none."""
    if type(policy) not in (UAT, Vanilla):  # a subclass may compute anything
        return f"{type(policy).__name__} has no fast step"
    assert isinstance(policy, UAT | Vanilla)
    try:
        return CPUStep(policy.backbone, policy.head, policy.utility if isinstance(policy, UAT) else None)
    except ValueError as error:
        return str(error)


class Session:
    """Plays a policy in `streams` streams at once.

    >>> session = Session(policy, streams=2)
    >>> action = session.act(obs)                       # the first step of both streams
    >>> action = session.act(obs, reward=earned)        # `earned` is what the last action brought

    A few streams on a CPU take the fast step (`path` says so). It copies the weights when the session opens: open
    another one after training on. With path="cached" the policy's own `step` plays, whatever its weights are by then.
    """

    path: Literal["fast", "cached"]

    def __init__(
        self,
        policy: Policy,
        *,
        streams: int = 1,
        capacity: int | None = None,
        path: Literal["auto", "fast", "cached"] = "auto",
    ) -> None:
        if streams < 1:
            raise ValueError(f"streams={streams} must be at least 1")
        self.policy, self.spec, self.streams = policy.eval(), policy.spec, streams
        self.capacity = policy.spec.horizon if capacity is None else capacity
        if self.capacity < 1:
            raise ValueError(f"capacity={capacity} must be at least 1")
        self.device = next(policy.parameters()).device
        self._agent = self._choose_path(path)
        self.path = "cached" if self._agent is policy else "fast"
        self._state = self._agent.init_state(streams, self.capacity, self.device)
        self._steps = np.zeros(streams, dtype=np.int64)
        self._fresh = np.ones(streams, dtype=bool)
        self._last = self.spec.no_action(self.streams)
        self._rewards: deque[Tensor] = deque(maxlen=max(1, self.spec.reward_lag))

    def _choose_path(self, path: str) -> Agent[Any]:
        if path not in ("auto", "fast", "cached"):
            raise ValueError(f"path={path!r} must be 'auto', 'fast' or 'cached'")
        if path == "cached" or (path == "auto" and self.streams > FAST_STREAMS):
            return self.policy
        fast = open_fast(self.policy)
        if isinstance(fast, CPUStep):
            return fast
        if path == "fast":
            raise ValueError(f"path='fast' is not possible: {fast}")
        return self.policy

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
        seen = check_observations(obs, self.spec, (self.streams,))
        earned = torch.zeros(self.streams) if reward is None else check_numbers("reward", reward, (self.streams,))
        done = self._last if action is None else check_actions("action", action, self.spec, (self.streams,))
        may = None if allowed is None else self._check_allowed(allowed)

        if self._fresh.any():
            first_like = first.view(-1, *[1] * (done.dim() - 1))
            done = torch.where(first_like, self.spec.no_action(self.streams), done)
        step = Step(obs=seen, prev_action=done, prev_reward=self._delayed(earned, first), first=first, allowed=may)
        step = step if self.device.type == "cpu" else step.to(self.device)
        logits_BA, self._state = self._agent.step(self._state, step)
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
        while len(self._rewards) < lag:
            self._rewards.append(torch.zeros(self.streams))
        if self._fresh.any():
            if lag > 0:  # what an episode's last action earned must not leak into the next episode
                earned_B = earned_B.masked_fill(first_B, 0.0)
            kept = [old_B.masked_fill(first_B, 0.0) for old_B in self._rewards]
            self._rewards = deque(kept, maxlen=self._rewards.maxlen)
        self._rewards.append(earned_B.clone())  # whoever told it may write over it
        return (self._rewards[0] if lag > 0 else earned_B) * self.spec.reward_scale

    def _check_allowed(self, allowed: Array) -> Tensor:
        mask = check_mask("allowed", allowed, (self.streams, self.spec.action.count))
        if not mask.any(-1).all():
            stream = int((~mask.any(-1)).int().argmax())
            raise ValueError(f"allowed: every stream needs at least one allowed action, got none in stream {stream}")
        return mask
