"""Gymnasium environments as a simulator: one episode for each row, seeded by data.

Axes: B episodes, A actions.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from uat.adapters.environments import Results, Stepping
from uat.adapters.spaces import Values
from uat.contracts import Simulator, Transition
from uat.episode import Noise
from uat.noise import integers
from uat.spec import Discrete, Spec

SEEDS = 2**31
"""Number of seeds of environments; some generators take no larger ones."""


@dataclass(frozen=True, slots=True)
class GymWorld:
    """The environments at one step. Only the latest one can be stepped, since environments cannot go back."""

    reset: int
    """Number of the reset with which the episodes began."""
    step: int
    live_B: Values
    """True where the episode has not ended."""
    obs: Tensor
    allowed_BA: Tensor | None


class GymSimulator(Simulator[GymWorld]):
    """Steps one environment for each episode that has not ended. An ended episode keeps its last observation."""

    on_host = True

    def __init__(self, spec: Spec, stepping: Stepping, device: torch.device | str) -> None:
        self.spec, self.stepping, self.device = spec, stepping, torch.device(device)
        self.most_streams = stepping.most_streams
        self._seconds, self._resets, self._steps = 0.0, 0, 0
        weakref.finalize(self, stepping.close)

    @property
    def seconds(self) -> float:
        return self._seconds

    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        return {"seed": integers(seed, "gymnasium.seed", episode_ids.to(self.device), 1, below=SEEDS)[:, 0]}

    def reset(self, noise: Noise) -> tuple[GymWorld, Tensor]:
        results = self.stepping.reset(noise["seed"].tolist())
        self._seconds += results.seconds
        self._resets, self._steps = self._resets + 1, 0
        live_B = np.ones(len(results.reward), dtype=bool)
        obs, allowed_BA = self._tensor(results.obs), self._masks(results, live_B)
        return GymWorld(self._resets, 0, live_B, obs, allowed_BA), obs

    def step(self, world: GymWorld, action: Tensor) -> Transition[GymWorld]:
        if (world.reset, world.step) != (self._resets, self._steps):
            raise ValueError(
                f"these environments are at step {self._steps} of reset {self._resets} and cannot go back to step "
                f"{world.step} of reset {world.reset}: step the world of the latest transition"
            )
        live_B = world.live_B
        streams = np.flatnonzero(live_B)
        results = self.stepping.step(streams.tolist(), action.detach().cpu().numpy()[streams])
        self._seconds += results.seconds
        self._steps += 1
        return self._transition(world, streams, results)

    def _transition(self, world: GymWorld, streams: Values, results: Results) -> Transition[GymWorld]:
        """Return the results of the live streams, with nothing new in all others."""
        count = len(world.live_B)
        at = torch.as_tensor(streams, device=self.device)

        def spread(values: Values, otherwise: float | bool) -> Tensor:
            whole = np.full(count, otherwise, dtype=values.dtype)
            whole[streams] = values
            return self._tensor(whole)

        live_B = world.live_B.copy()
        live_B[streams] = ~(results.terminated | results.truncated)
        obs = world.obs.index_copy(0, at, self._tensor(results.obs))
        allowed_BA = self._masks(results, world.live_B)
        return Transition(
            world=GymWorld(self._resets, self._steps, live_B, obs, allowed_BA),
            obs=obs,
            reward_B=spread(results.reward, 0.0),
            terminated_B=spread(results.terminated, False),
            truncated_B=spread(results.truncated, False),
            facts={"success": spread(results.success, np.nan)},
        )

    def allowed(self, world: GymWorld) -> Tensor | None:
        return world.allowed_BA

    def close(self) -> None:
        self.stepping.close()

    def _masks(self, results: Results, stepped_B: Values) -> Tensor | None:
        if results.allowed is None:
            return None
        assert isinstance(self.spec.action, Discrete)
        whole = np.ones((len(stepped_B), self.spec.action.count), dtype=bool)
        whole[stepped_B] = results.allowed
        return self._tensor(whole)

    def _tensor(self, values: Any) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)
