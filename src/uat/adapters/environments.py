"""Environments stepped in this process: one for each stream, with every value checked.

Axes: n streams that take part in a step, A actions. No torch here: worker processes run this module.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from uat.adapters.sources import GivenVector, Source, in_words
from uat.adapters.spaces import ActionConverter, BadValueError, ObservationConverter, Values
from uat.settings import shown


@dataclass(frozen=True, slots=True)
class Results:
    """Results of a reset or a step, one entry for each stream that took part."""

    obs: Values
    """Rows of observations (see ObservationConverter)."""
    reward: Values
    terminated: Values
    truncated: Values
    success: Values
    """1 or 0 at the end of an episode whose environment reports success, otherwise NaN."""
    allowed: Values | None
    """(n, A) True for allowed actions; None: the environments give no masks."""
    seconds: float = 0.0
    """Time spent in environments."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of episodes, beside those of the environment."""

    max_steps: int
    mask_key: str


class Stepping(ABC):
    """Steps the environments of some streams, each of which plays one episode after a reset."""

    most_streams: int | None = None
    """Limit of the streams of one reset; None: no limit."""

    @abstractmethod
    def reset(self, seeds: Sequence[int]) -> Results:
        """Start an episode in each stream."""

    @abstractmethod
    def step(self, streams: Sequence[int], actions: Values) -> Results:
        """Step these streams, given by number in ascending order, with their ids (n,) or numbers (n, A)."""

    @abstractmethod
    def close(self) -> None:
        """Close the environments; the next reset makes others."""


class Episodes:
    """Turns what environments return into results, and raises a ValueError that names environment, episode and step."""

    def __init__(self, label: str, observations: ObservationConverter, actions: ActionConverter, rules: Rules) -> None:
        self.label, self.observations, self.actions, self.rules = label, observations, actions, rules
        self.seeds: list[int] = []
        self.steps: list[int] = []
        """Steps that each stream has taken."""
        self.masked = False
        """Whether an environment has given a mask of actions at a reset."""

    def begin(self, seeds: Sequence[int]) -> None:
        self.seeds, self.steps = list(seeds), [0] * len(seeds)

    def started(self, observations: Sequence[Any], infos: Sequence[dict[str, Any]]) -> Results:
        """Return the results of a reset."""
        streams = range(len(self.seeds))
        self.masked |= any(self.rules.mask_key in info for info in infos)
        count = len(self.seeds)
        never = np.zeros(count, dtype=bool)
        obs, masks = self._rows(streams, observations), self._masks(streams, infos, never)
        return Results(obs, np.zeros(count, np.float32), never, never, np.full(count, np.nan, np.float32), masks)

    def stepped(self, streams: Sequence[int], outcomes: Sequence[tuple[Any, Any, Any, Any, dict[str, Any]]]) -> Results:
        """Return the results of a step, given what `env.step` returned in each stream."""
        observations, rewards, terminated, truncated, infos = zip(*outcomes, strict=True)
        for stream in streams:
            self.steps[stream] += 1
        obs = self._rows(streams, observations)
        reward = self._rewards(streams, rewards)
        ended = np.array([bool(x) for x in terminated])
        cut = np.array([self.steps[stream] >= self.rules.max_steps for stream in streams])
        cut = (np.array([bool(x) for x in truncated]) | cut) & ~ended
        done = ended | cut
        pairs = zip(streams, infos, done, strict=True)
        success = np.array([self._success(stream, info) if end else np.nan for stream, info, end in pairs], np.float32)
        return Results(obs, reward, ended, cut, success, self._masks(streams, infos, done))

    def error(self, stream: int, what: str) -> ValueError:
        """Return an error about one stream."""
        return ValueError(
            f"{self.label} {what}, in step {self.steps[stream]} of the episode that starts with "
            f"env.reset(seed={self.seeds[stream]}); step 0 is the reset"
        )

    def _rows(self, streams: Sequence[int], observations: Sequence[Any]) -> Values:
        try:
            return self.observations.rows(observations)
        except BadValueError as error:
            raise self.error(streams[error.row], f"returned {error}") from None

    def _rewards(self, streams: Sequence[int], rewards: Sequence[Any]) -> Values:
        try:
            array = np.asarray(rewards, dtype=np.float32)
        except (TypeError, ValueError, OverflowError):
            array = np.full(0, np.nan)
        if array.shape == (len(rewards), 1):
            array = array[:, 0]
        if array.shape == (len(rewards),) and np.isfinite(array).all():
            return array
        bad = next((i for i, reward in enumerate(rewards) if not _is_finite(reward)), 0)
        reward = rewards[bad].item() if isinstance(rewards[bad], np.generic) else rewards[bad]
        raise self.error(streams[bad], f"returned the reward {shown(reward)}, where a finite number is expected")

    def _success(self, stream: int, info: dict[str, Any]) -> float:
        value = info.get("is_success", info.get("success"))
        if value is None:
            return np.nan
        try:
            return float(np.asarray(value, dtype=np.float32).reshape(()))
        except (TypeError, ValueError):
            raise self.error(stream, f"reported the success {shown(value)}, where True or False is expected") from None

    def _masks(self, streams: Sequence[int], infos: Sequence[dict[str, Any]], done: Values) -> Values | None:
        key = self.rules.mask_key
        if not self.masked:
            given = next((i for i, info in enumerate(infos) if key in info and not done[i]), None)
            if given is not None:
                raise self.error(
                    streams[given], f"gave info[{key!r}] for the first time; give a mask from the reset on"
                )
            return None
        masks = np.ones((len(streams), self.actions.combinations), dtype=bool)
        for i, (stream, info) in enumerate(zip(streams, infos, strict=True)):
            if key not in info or done[i]:
                continue
            try:
                masks[i] = self.actions.allowed(info[key])
            except BadValueError as error:
                raise self.error(stream, f"gave {error} in info[{key!r}]") from None
            if not masks[i].any():
                raise self.error(stream, f"allows no action in info[{key!r}]; end the episode there, or allow one")
        return masks


def _is_finite(reward: Any) -> bool:
    try:
        return bool(np.isfinite(np.float32(reward)))
    except (TypeError, ValueError, OverflowError):
        return False


class LocalEnvironments(Stepping):
    """One environment for each stream, stepped one after another."""

    def __init__(self, source: Source, rules: Rules, spaces: tuple[Any, Any] | None = None) -> None:
        """Set up without making an environment.

        spaces: of observations and actions that every environment must have; None: those of the first one.
        """
        self.source, self.rules, self.spaces = source, rules, spaces
        self.envs: list[Any] = []
        self.episodes: Episodes | None = None
        self.first: Results | None = None
        """Results of the latest reset."""

    def reset(self, seeds: Sequence[int]) -> Results:
        begun = time.perf_counter()
        while len(self.envs) < len(seeds):
            self.envs.append(self._made())
        episodes = self._episodes()
        episodes.begin(seeds)
        firsts = []
        for stream, seed in enumerate(seeds):
            env = self.envs[stream]
            firsts.append(self._called(stream, "reset", lambda env=env, seed=seed: env.reset(seed=seed), 2))
            self._check_spaces(env, f"in the episode that starts with env.reset(seed={seed})")
        seconds = time.perf_counter() - begun
        results = episodes.started([obs for obs, _ in firsts], [info for _, info in firsts])
        self.first = replace(results, seconds=seconds)
        return self.first

    def step(self, streams: Sequence[int], actions: Values) -> Results:
        begun, episodes = time.perf_counter(), self._episodes()
        outcomes = [
            self._called(stream, "step", lambda env=self.envs[stream], action=action: env.step(action), 5)
            for stream, action in zip(streams, episodes.actions.values(actions), strict=True)
        ]
        seconds = time.perf_counter() - begun
        return replace(episodes.stepped(streams, outcomes), seconds=seconds)

    def give_masks(self) -> Results:
        """Return the results of the reset again, with masks, since environments of other processes have masks."""
        episodes, first = self._episodes(), self.first
        assert first is not None
        episodes.masked = True
        return replace(first, allowed=np.ones((len(first.reward), episodes.actions.combinations), dtype=bool))

    def close(self) -> None:
        while self.envs:
            self.envs.pop().close()

    def _called(self, stream: int, what: str, call: Callable[[], Any], values: int) -> Any:
        """Return what the environment returns; raise an error that names it if the call fails."""
        episodes = self._episodes()
        try:
            found = call()
        except Exception as error:  # an environment may raise anything
            episodes.steps[stream] += what == "step"
            raise episodes.error(stream, f"raised {in_words(error)}") from error
        if not isinstance(found, tuple) or len(found) != values or not isinstance(found[-1], dict):
            episodes.steps[stream] += what == "step"
            wanted = "(obs, info)" if what == "reset" else "(obs, reward, terminated, truncated, info)"
            raise episodes.error(stream, f"returned {shown(found)} from {what}, which must return {wanted}")
        return found

    def _made(self) -> Any:
        assert not isinstance(self.source, GivenVector)
        env = self.source()
        if self.spaces is None:
            self.spaces = env.observation_space, env.action_space
        self._check_spaces(env, "in another environment of the same source")
        return env

    def _check_spaces(self, env: Any, where: str) -> None:
        assert self.spaces is not None
        for name, own, first in zip(
            ("observation", "action"), (env.observation_space, env.action_space), self.spaces, strict=True
        ):
            if own is not first and own != first:
                raise ValueError(
                    f"{self.source.label} has another {name}_space {where}: {shown(own)}, at first {shown(first)}; "
                    "spaces must stay the same"
                )

    def _episodes(self) -> Episodes:
        if self.episodes is None:
            assert self.spaces is not None
            observations, actions = self.spaces
            converters = ObservationConverter(observations), ActionConverter(actions)
            self.episodes = Episodes(self.source.label, *converters, self.rules)
        return self.episodes
