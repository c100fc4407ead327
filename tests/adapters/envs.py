"""Small environments for the tests of the adapter, each with one property of interest.

Worker processes import this module, so it needs no torch.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Counting(gymnasium.Env[Any, Any]):
    """Episodes of a random length, in which the observation counts the steps; action 1 pays."""

    def __init__(self, most: int = 9, masked: bool = False, limit: bool = False) -> None:
        self.most, self.masked, self.limit = most, masked, limit
        self.observation_space: Any = spaces.Box(-np.inf, np.inf, (2,))
        self.action_space: Any = spaces.Discrete(3)
        self.t = self.length = 0

    def seen(self) -> Any:
        return np.array([self.t, self.length], dtype=np.float32)

    def info(self) -> dict[str, Any]:
        return {"action_mask": np.array([True, self.t % 2 == 0, False])} if self.masked else {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.length = 0, int(self.np_random.integers(2, self.most))
        return self.seen(), self.info()

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.t += 1
        over = self.t >= self.length
        info = self.info() | ({"is_success": self.length % 2 == 0} if over else {})
        reward = float(action == 1) + float(self.np_random.normal())
        return self.seen(), reward, over and not self.limit, over and self.limit, info


class Broken(Counting):
    """Does one thing wrong in its third step."""

    def __init__(self, how: str) -> None:
        super().__init__(most=6)
        self.how = how

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        obs, info = super().reset(seed=seed)
        self.length = 5
        if self.how == "spaces":
            self.observation_space = spaces.Box(-1, 1, (3,))
        return (obs, info) if self.how != "reset" else (obs,)  # pyright: ignore[reportReturnType]

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, over, cut, info = super().step(action)
        if self.t == 3:
            if self.how == "raises":
                raise RuntimeError("no\nfuel")
            reward = {"reward": np.nan, "words": "high"}.get(self.how, reward)
            obs = {"nan": np.array([0.0, np.nan]), "shape": np.zeros(3), "large": np.array([0.0, 1e300])}.get(
                self.how, obs
            )
            masks = {"late mask": [1, 1, 1], "no mask": None}
            if (mask := masks.get(self.how)) is not None:
                info["action_mask"] = np.array(mask)
        if self.how == "four" and self.t == 3:
            return obs, reward, over, cut  # pyright: ignore[reportReturnType]
        return obs, reward, over, cut, info


class Forbidding(Counting):
    """Allows nothing in its second step, or gives masks that do not fit."""

    def __init__(self, mask: tuple[bool, ...]) -> None:
        super().__init__(masked=True)
        self.mask = mask

    def info(self) -> dict[str, Any]:
        return {"action_mask": np.array(self.mask if self.t == 1 else (True,) * 3)}


class Endless(Counting):
    """Never ends, and says at every step whether all is well."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.t += 1
        return self.seen(), 1, False, False, {"success": True}


class Mixed(Counting):
    """Observes a nested dictionary, and acts by several ids at once."""

    def __init__(self) -> None:
        super().__init__()
        inner = spaces.Dict({"angle": spaces.Box(-1, 1, (2,)), "gear": spaces.Discrete(3, start=2)})
        self.observation_space = spaces.Dict({"pose": inner, "dice": spaces.MultiDiscrete([2, 4])})
        self.action_space = spaces.MultiDiscrete([2, 3])

    def seen(self) -> Any:
        pose = {"angle": np.array([0.5, -self.t]), "gear": 2 + self.t % 3}
        return {"pose": pose, "dice": np.array([self.t % 2, self.t % 4])}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        return super().step(int(action[0]))


class Steering(Counting):
    """Acts by numbers within limits."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Box(np.array([-2.0, 0.0]), np.array([2.0, 1.0]), dtype=np.float64)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        return super().step(action[0] > 0)
