"""Any Gymnasium environment as a domain: `gym:CartPole-v1`, or `gym:PACKAGE:ID` for ids that a package registers.

    uat train gym:CartPole-v1 --method uat
    uat.train(env)                                  an environment, a vector of them, or a factory

One row of a rollout is one episode, which starts with `env.reset(seed=...)`; the seed depends on the run's seed and the
number of the episode alone. In a loop of your own, `domain.observation` and `domain.action` convert values between the
environment and a session:

    import uat.adapters.gymnasium

    domain = uat.adapters.gymnasium.domain("gym:CartPole-v1")
    obs, reward, terminated, truncated, info = env.step(domain.action(session.act(domain.observation(obs))))
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType, MethodType
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from uat.acting import rollout
from uat.adapters.chance import RandomAgent
from uat.adapters.environments import LocalEnvironments, Rules, Stepping
from uat.adapters.simulator import GymSimulator
from uat.adapters.sources import Copies, Factory, GivenVector, Registered, Source, check_registered, imported_gymnasium
from uat.adapters.spaces import ActionConverter, ObservationConverter, Values
from uat.adapters.vector import VectorEnvironments
from uat.adapters.workers import WorkerEnvironments
from uat.contracts import Agent
from uat.distributions import action_noise
from uat.domains import DOMAINS, Domain, DomainEntry, Split
from uat.episode import Trajectory
from uat.metrics import Metric
from uat.noise import derive
from uat.registry import is_address
from uat.settings import (
    LEAST_SCALE,
    MOST_SCALE,
    Between,
    Scale,
    Steps,
    changed_fields,
    check_fields,
    execution,
    execution_fields,
    shown,
)
from uat.spec import Box, Discrete, Items, Named, Spec, Vector

MOST_STEPS_UNSET = 1_000
"""Limit of an episode's steps if neither the settings nor the environment have one."""
MEASURED_EPISODES, MEASURED_STEPS = 8, 250
"""Number of episodes in which the scale of rewards is measured, and the most steps of each."""


EPISODES = {"evaluation.episodes": 256}
"""Test episodes, each of which is played in Python."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GymConfig:
    max_steps: Steps | None = None
    """Steps after which an episode is cut off as truncated; unset: the environment's time limit, or 1,000."""
    reward_scale: Scale | None = None
    """Factor on the rewards that policies see; unset: training measures it in episodes of random actions, such that
    rewards are about one."""
    mask_key: str = "action_mask"
    """Key of the mask of allowed actions in the environment's `info`."""
    arguments: str = "{}"
    """Arguments of the environment as JSON, such as {"gravity": 5.0}."""
    workers: Annotated[int, Between(0, 1024)] = field(default=0, metadata=execution())
    """Processes that step the environments; 0: this process. The numbers are the same."""

    def __post_init__(self) -> None:
        check_fields(self, "domain.")
        try:
            arguments = json.loads(self.arguments)
        except ValueError as error:
            raise ValueError(f"domain.arguments={shown(self.arguments)} is not valid JSON: {error}") from None
        if not isinstance(arguments, dict):
            raise ValueError(f"domain.arguments={shown(self.arguments)} must be a JSON object, such as {{}}")


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenConfig(GymConfig):
    given: str = ""
    """Description of the environment, which was passed as an object."""


class GymDomain(Domain):
    """A Gymnasium environment."""

    metrics = (
        Metric(name="return", label="Return"),
        Metric(name="length", label="Steps"),
        Metric(name="success", label="Success", partial=True),
    )

    def __init__(self, config: GymConfig, name: str, source: Source) -> None:
        self.config, self.name, self.source = config, name, source
        without = execution_fields(type(config)) | {"given"}
        changed = [f"{key}={value}" for key, value in changed_fields(config).items() if key not in without]
        self.setting = ",".join(changed) or "default"
        self.spaces, limit = self._probe()
        try:
            self._observations, self._actions = ObservationConverter(self.spaces[0]), ActionConverter(self.spaces[1])
            limits = [steps for steps in (config.max_steps, limit) if steps is not None]
            self.spec = Spec(
                obs=_observations(self._observations),
                action=_actions(self._actions),
                horizon=min(limits, default=MOST_STEPS_UNSET),
                reward_scale=1.0 if config.reward_scale is None else config.reward_scale,
            )
        except ValueError as error:
            raise ValueError(f"{source.label}: {error}") from None

    def _probe(self) -> tuple[tuple[Any, Any], int | None]:
        """Return the spaces and the time limit of a first environment."""
        if isinstance(self.source, GivenVector):
            vector = self.source.vector
            if self.config.workers:
                raise ValueError(
                    f"domain.workers={self.config.workers} is for single environments: {self.source.label} steps its "
                    "environments itself"
                )
            return (vector.single_observation_space, vector.single_action_space), _time_limit(vector)
        env = self.source()
        spaces, limit = (env.observation_space, env.action_space), _time_limit(env)
        env.close()
        return spaces, limit

    @property
    def registered(self) -> tuple[str, Any]:
        return self.name, self.config

    def simulator(self, split: Split, device: torch.device | str) -> GymSimulator:
        return GymSimulator(self.spec, self._stepping(), device)

    def _stepping(self) -> Stepping:
        rules, workers = Rules(self.spec.steps, self.config.mask_key), self.config.workers
        if isinstance(self.source, GivenVector):
            return VectorEnvironments(self.source.label, self.source.vector, rules)
        if workers:
            return WorkerEnvironments(self.source, rules, self.spaces, workers)
        return LocalEnvironments(self.source, rules, self.spaces)

    def measure(self, trajectory: Trajectory) -> dict[str, Tensor]:
        success_BT, valid_BT = trajectory.facts["success"], trajectory.valid
        last_B1 = valid_BT.sum(1, keepdim=True) - 1
        return {
            **super().measure(trajectory),
            "length": valid_BT.sum(1).to(success_BT.dtype),
            "success": success_BT.gather(1, last_B1)[:, 0],
        }

    def references(self) -> Mapping[str, Agent[Any]]:
        return {"random": RandomAgent(self.spec)}

    def settled(self) -> GymConfig:
        """Return the settings with a measured scale of rewards: one over the root mean square of rewards that are not
        zero, to two digits; 1 if all are zero."""
        if self.config.reward_scale is not None:
            return self.config
        worlds, agent, ids = self.simulator("train", "cpu"), RandomAgent(self.spec), torch.arange(MEASURED_EPISODES)
        steps = min(self.spec.steps, MEASURED_STEPS)
        try:
            drawn = action_noise(self.spec, 0, "reward scale", ids, steps)
            played = rollout(agent, worlds, worlds.noise(ids, derive(0, "reward scale")), drawn, steps=steps)
        finally:
            worlds.close()
        reward = played.reward[played.valid].double()
        reward = reward[reward != 0]
        size = float(reward.square().mean().sqrt()) if len(reward) else 1.0
        return replace(self.config, reward_scale=float(f"{min(max(1 / size, LEAST_SCALE), MOST_SCALE):.1e}"))

    # ------------------------------------------------------------ loops of your own

    def observation(self, *observations: Any) -> Values | dict[str, Values]:
        """Return what `Session.act` takes, given one of the environment's observations for each stream."""
        rows = self._observations.rows(observations)
        return rows if self._observations.single else self._observations.named(rows)

    def action(self, actions: Any, stream: int = 0) -> Any:
        """Return what `env.step` takes, given what `Session.act` returned."""
        return self._actions.values(np.asarray(actions)[stream : stream + 1])[0]


def _time_limit(env: Any) -> int | None:
    return None if env.spec is None else env.spec.max_episode_steps


def _observations(converter: ObservationConverter) -> Vector | Items | Named:
    parts = {name: Vector(width) if count is None else Items(count) for name, (count, width) in converter.sizes.items()}
    return next(iter(parts.values())) if converter.single else Named(parts)


def _actions(converter: ActionConverter) -> Discrete | Box:
    return Discrete(converter.combinations) if converter.counts else Box(*converter.limits)


# ---------------------------------------------------------------- names and objects


def entry_of(name: str) -> DomainEntry:
    """Return the entry of a domain `gym:ID` or `gym:PACKAGE:ID`; raise a ValueError if Gymnasium lacks the id."""
    check_registered(name)
    return DomainEntry(
        build=partial(_built, name),
        config=GymConfig,
        tasks=("default",),
        summary=f"the Gymnasium environment {name}",
        objective="ppo",
        settings=EPISODES,
        settle=lambda config: _built(name, config).settled(),
    )


def _built(name: str, config: GymConfig) -> GymDomain:
    return GymDomain(config, name, Registered(name, config.arguments))


def domain(value: Any, **settings: Any) -> GymDomain:
    """Return the domain of a name such as "gym:CartPole-v1", an environment, a vector of them, or a factory.

    settings: fields of GymConfig, such as max_steps=200.
    """
    if isinstance(value, str):
        if is_address(value):
            DOMAINS.adopt(value)
        if not value.startswith("gym:") or value not in DOMAINS:
            raise ValueError(
                DOMAINS.unsupported_reason(value) or f"{shown(value)} must be a name such as gym:CartPole-v1"
            )
        return _built(value, GymConfig(**settings))
    if (found := domain_of(value)) is None:
        raise ValueError(f"{shown(value)} must be a gymnasium.Env, a VectorEnv, or a function that makes an Env")
    return GymDomain(replace(found.config, **settings), found.name, found.source) if settings else found


_SOURCES: dict[str, Source] = {}
"""Description -> source, of objects passed in this process. Of two with the same description, the later is kept."""


def domain_of(value: Any) -> GymDomain | None:
    """Return the domain of an environment, a vector of them, or a factory; None for any other value."""
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is not None and isinstance(value, gymnasium.Env):
        return _by_name(value) or _given_env(value)
    if gymnasium is not None and isinstance(value, gymnasium.vector.VectorEnv):
        return _given_vector(value)
    is_class = isinstance(value, type) and gymnasium is not None and issubclass(value, gymnasium.Env)
    if is_class or isinstance(value, FunctionType | MethodType | partial):
        env = Factory(shown(value), value)()
        env.close()
        kind = type(env.unwrapped)
        return _given(Factory(kind.__name__, value), kind, (env.observation_space, env.action_space))
    return None


def _given_env(env: Any) -> GymDomain:
    kind = type(env.unwrapped)
    return _given(Copies(kind.__name__, env), kind, (env.observation_space, env.action_space))


def _given_vector(vector: Any) -> GymDomain:
    kind, spaces = type(vector.unwrapped), (vector.single_observation_space, vector.single_action_space)
    return _given(GivenVector(f"{kind.__name__}({vector.num_envs})", vector), kind, spaces)


def _given(source: Source, kind: type, spaces: tuple[Any, Any]) -> GymDomain:
    """Keep an object for later runs in this process, and return its domain."""
    described = f"{kind.__module__}:{kind.__qualname__}, {spaces[0]}, {spaces[1]}"
    name = f"object:{kind.__name__}"
    _SOURCES[described] = source
    DOMAINS[name] = DomainEntry(
        build=partial(_rebuilt, name),
        config=GivenConfig,
        tasks=("default",),
        summary=f"the environment {kind.__name__}",
        objective="ppo",
        settings=EPISODES,
        settle=lambda config: _rebuilt(name, config).settled(),
    )
    return GymDomain(GivenConfig(given=described), name, source)


def _rebuilt(name: str, config: GivenConfig) -> GymDomain:
    if config.given not in _SOURCES:
        raise ValueError(
            f"the domain of this run was an environment passed as an object ({config.given}): pass it again (in Python "
            "domain=...)"
        )
    return GymDomain(config, name, _SOURCES[config.given])


def _by_name(env: Any) -> GymDomain | None:
    """Return the domain of an environment that `gymnasium.make` can make again from its id; None if it cannot.

    Attributes that were changed after the environment was made are lost: pass a factory to keep them.
    """
    gymnasium, spec = imported_gymnasium(), env.spec
    if spec is None or spec.id not in gymnasium.registry or spec.additional_wrappers:
        return None
    usual = gymnasium.registry[spec.id]
    if spec.entry_point != usual.entry_point:
        return None
    arguments = {
        key: value for key, value in spec.kwargs.items() if key != "render_mode" and usual.kwargs.get(key) != value
    }
    if spec.max_episode_steps != usual.max_episode_steps:
        arguments["max_episode_steps"] = spec.max_episode_steps
    try:
        text = json.dumps(arguments, sort_keys=True)
    except (TypeError, ValueError):
        return None
    package = _package(spec.entry_point)
    name = f"gym:{package}:{spec.id}" if package else f"gym:{spec.id}"
    try:
        DOMAINS.adopt(name) if package else check_registered(name)
    except ValueError:
        return None
    return _built(name, GymConfig(arguments=text))


def _package(entry_point: Any) -> str:
    """Return the package whose import registers an environment; empty for those of Gymnasium and of a script."""
    module = entry_point if isinstance(entry_point, str) else entry_point.__module__
    package = module.partition(":")[0].partition(".")[0]
    return "" if package in ("gymnasium", "__main__") else package
