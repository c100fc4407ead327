"""A vector of environments (`gymnasium.vector.VectorEnv`) that a user passes, in any of the three autoreset modes.

Every reset starts one episode in each environment of the vector. Those that have ended, and those without a stream, are
stepped along with the others, and what they return is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from uat.adapters.environments import Episodes, Results, Rules, Stepping
from uat.adapters.sources import in_words
from uat.adapters.spaces import ActionConverter, ObservationConverter, Values

MODES = {"NextStep", "SameStep", "Disabled"}


class VectorEnvironments(Stepping):
    """Steps a vector of environments. `close` leaves it open, since it belongs to the caller."""

    def __init__(self, label: str, vector: Any, rules: Rules) -> None:
        self.vector, self.most_streams, self.mode = vector, int(vector.num_envs), autoreset_mode(label, vector)
        converters = ObservationConverter(vector.single_observation_space), ActionConverter(vector.single_action_space)
        self.episodes = Episodes(label, *converters, rules)
        self._over = np.zeros(vector.num_envs, dtype=bool)
        """Environments whose latest step ended an episode, which does not restart by itself if the mode is Disabled."""
        self._masks: list[Any] = []

    def reset(self, seeds: Sequence[int]) -> Results:
        count = len(seeds)
        spare = [seeds[-1]] * (self.vector.num_envs - count)
        self.episodes.begin(seeds)
        begun = time.perf_counter()
        obs, infos = self._called(lambda: self.vector.reset(seed=[*seeds, *spare]))
        seconds = time.perf_counter() - begun
        self._over[:] = False
        self._note_masks(infos)
        own = [_info(infos, i) for i in range(count)]
        return replace(self.episodes.started(self._iterated(obs)[:count], own), seconds=seconds)

    def step(self, streams: Sequence[int], actions: Values) -> Results:
        begun = time.perf_counter()
        if self.mode == "Disabled" and self._over.any():
            self._note_masks(self._called(lambda: self.vector.reset(options={"reset_mask": self._over.copy()}))[1])
        batch = self._batch(streams, actions)
        obs, reward, terminated, truncated, infos = self._called(lambda: self.vector.step(batch))
        seconds = time.perf_counter() - begun
        self._over = np.asarray(terminated, dtype=bool) | np.asarray(truncated, dtype=bool)
        self._note_masks(infos)
        observations, outcomes = self._iterated(obs), []
        for i in streams:
            seen, info = observations[i], _info(infos, i)
            if self.mode == "SameStep" and self._over[i]:
                seen, info = self._last(infos, i)
            outcomes.append((seen, reward[i], terminated[i], truncated[i], info))
        return replace(self.episodes.stepped(streams, outcomes), seconds=seconds)

    def close(self) -> None:
        pass

    def _last(self, infos: dict[str, Any], i: int) -> tuple[Any, dict[str, Any]]:
        """Return the last observation and info of an episode after which the environment has restarted already."""
        finals = infos.get("final_obs")
        if finals is None or finals[i] is None:
            self.episodes.steps[i] += 1
            raise self.episodes.error(i, "restarts in the step that ends an episode, but gives no info['final_obs']")
        return finals[i], _info(infos.get("final_info", {}), i)

    def _batch(self, streams: Sequence[int], actions: Values) -> Any:
        """Return the actions of all environments; those without a live stream take their first allowed action."""
        from gymnasium.vector import utils

        converter, count = self.episodes.actions, self.vector.num_envs
        whole = np.zeros((count, *actions.shape[1:]), dtype=actions.dtype)
        for i, mask in enumerate(self._masks):
            if mask is not None and converter.counts:
                whole[i] = converter.allowed(mask).argmax()
        whole[list(streams)] = actions
        space = self.vector.single_action_space
        return utils.concatenate(space, converter.values(whole), utils.create_empty_array(space, count))

    def _note_masks(self, infos: dict[str, Any]) -> None:
        """Remember the mask of each environment."""
        key = self.episodes.rules.mask_key
        self._masks = [_info(infos, i).get(key) for i in range(self.vector.num_envs)] if key in infos else []

    def _iterated(self, obs: Any) -> list[Any]:
        from gymnasium.vector import utils

        return list(utils.iterate(self.vector.observation_space, obs))

    def _called(self, call: Any) -> Any:
        try:
            return call()
        except Exception as error:  # an environment may raise anything
            raise ValueError(
                f"{self.episodes.label} raised {in_words(error)}, after {max(self.episodes.steps, default=0)} steps of "
                f"the episodes that start with env.reset(seed={self.episodes.seeds})"
            ) from error


def autoreset_mode(label: str, vector: Any) -> str:
    """Return how a vector of environments restarts: "NextStep", "SameStep" or "Disabled"."""
    mode = vector.metadata.get("autoreset_mode")
    name = mode if isinstance(mode, str) or mode is None else mode.value
    if name not in MODES:
        raise ValueError(
            f"{label} does not say how it restarts: set metadata['autoreset_mode'] to a gymnasium.vector.AutoresetMode"
        )
    return name


def _info(infos: dict[str, Any], i: int) -> dict[str, Any]:
    """Return the info of one environment; `_key` says which environments have the key."""
    own = {}
    for key, value in infos.items():
        if key.startswith("_") or isinstance(value, dict) or np.ndim(value) == 0:
            continue
        if f"_{key}" not in infos or infos[f"_{key}"][i]:
            own[key] = value[i]
    return own
