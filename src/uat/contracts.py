"""The contracts: agents act, simulators are acted in, recordings are read.

Each is a base class: subclasses implement the abstract methods; every optional part has a default that says "there is
none".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from uat.distributions import choose
from uat.episode import Batch, Noise, Step, Told, Trajectory
from uat.spec import Spec

State = TypeVar("State")
World = TypeVar("World")


# ---------------------------------------------------------------- agents


class Memory:
    """The memory of an agent: a dataclass of tensors, lists of tensors, and nested memories.

    As everywhere, the name of a field ends with its axes; streams lie along B: `ubar_BU`, `kv_L2BHSE`. Tensors without
    a B are shared by all streams. A memory never holds weights.
    """

    __slots__ = ()

    def take(self, rows: Tensor) -> Self:
        """Return a copy of the memory of some streams, given by number."""
        return replace(self, **{name: _taken(name, value, rows) for name, value in self._fields()})  # pyright: ignore[reportArgumentType]

    def put(self, rows: Tensor, other: Self) -> None:
        """Overwrite these streams with those of another memory of the same capacity."""
        with torch.no_grad():
            for (name, own), (_, theirs) in zip(self._fields(), other._fields(), strict=True):
                if isinstance(own, Memory):
                    own.put(rows, theirs)
                    continue
                for x, y in zip(_as_list(own), _as_list(theirs), strict=True):
                    if isinstance(x, Tensor) and (axis := stream_axis(name)) is not None:
                        x.index_copy_(axis, rows, y.to(x))

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, such as "cache.kv_L2BHSE"; tensors of a list are numbered."""
        tensors: dict[str, Tensor] = {}
        for name, value in self._fields():
            if isinstance(value, Memory):
                tensors |= {f"{name}.{inner}": x for inner, x in value.tensors().items()}
            elif isinstance(value, Tensor):
                tensors[name] = value
            elif isinstance(value, list | tuple):
                tensors |= {f"{name}.{i}": x for i, x in enumerate(value)}
        return tensors

    def _fields(self) -> list[tuple[str, Any]]:
        return [(item.name, getattr(self, item.name)) for item in fields(self)]  # pyright: ignore[reportArgumentType]


def stream_axis(name: str) -> int | None:
    """Return the position of B among the axes of a field; None: the field has no streams."""
    _, _, axes = name.rpartition("_")
    return axes.index("B") if "B" in axes else None


def _taken(name: str, value: Any, rows: Tensor) -> Any:
    if isinstance(value, Memory):
        return value.take(rows)
    if isinstance(value, list | tuple):
        return type(value)(_taken(name, x, rows) for x in value)
    axis = stream_axis(name)
    return value.index_select(axis, rows) if isinstance(value, Tensor) and axis is not None else value


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


class Answers(Protocol):
    """Scores of actions at the last step of B episodes, or at all steps of theirs, episode after episode (see
    `Reader.read_every`). All scores of all episodes never exist at once."""

    def among(self, candidate_BK: Tensor) -> Tensor:
        """(B, K) scores of these actions."""
        ...

    def every(self, episodes: slice) -> Tensor:
        """(R, A) scores of all actions, for some of the episodes."""
        ...


@dataclass(frozen=True, slots=True)
class Logits:
    """Answers of an agent that gives the logits of all actions."""

    logits_BA: Tensor

    def among(self, candidate_BK: Tensor) -> Tensor:
        return self.logits_BA.gather(1, candidate_BK)

    def every(self, episodes: slice) -> Tensor:
        return self.logits_BA[episodes]


class Reader(ABC):
    """Scores actions at the end of recorded episodes: every agent, and references that never act."""

    sampled: ClassVar[bool] = False
    """Whether evaluation samples actions from the logits instead of taking their arg-max."""

    @abstractmethod
    def read(self, batch: Batch) -> Answers:
        """Return the answers at the last real step of each episode."""

    def read_every(self, batch: Batch) -> Answers:
        """Return the answers at every step: row b * T + t is step t of episode b, and padding may hold anything."""
        raise ValueError(f"{type(self).__name__} answers at the last step of an episode alone")


class Agent(Reader, Generic[State]):
    """Acts step by step: every policy, and every reference such as a Bayes filter."""

    spec: Spec
    """The problem in which the agent acts."""

    @abstractmethod
    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> State:
        """Return empty memory for `streams` streams of at most `capacity` steps."""

    @abstractmethod
    def step(self, state: State, step: Step) -> tuple[Tensor, State]:
        """Return logits over actions and the state after this step; the given state must not be used again."""

    def decide(self, state: State, step: Step, gumbel_BA: Tensor | None = None) -> tuple[Tensor, State]:
        """Return the action of each stream (see `choose`) and the state after this step."""
        logits_BA, state = self.step(state, step)
        return choose(logits_BA, self.spec, gumbel_BA), state

    def look(self, state: State, facts: dict[str, Tensor]) -> State:
        """Return the state after a reference has seen facts that the world hides; called before each step. Policies
        never override it."""
        return state

    def read(self, batch: Batch) -> Answers:
        return read_by_steps(self, batch)

    def read_every(self, batch: Batch) -> Answers:
        return read_every_by_steps(self, batch)


def read_by_steps(agent: Agent[Any], batch: Batch) -> Answers:
    """Return an agent's answers at the last real step, computed step by step: the slow twin of an overridden `read`."""
    streams, steps = batch.valid.shape
    state, last = agent.init_state(streams, steps, batch.obs.device), batch.last_B[:, None]
    logits_BA = None
    for t in range(steps):
        now_BA, state = agent.step(state, batch.step(t))
        logits_BA = now_BA if logits_BA is None else torch.where(last >= t, now_BA, logits_BA)
    assert logits_BA is not None
    return Logits(logits_BA)


def read_every_by_steps(agent: Agent[Any], batch: Batch) -> Answers:
    """Return an agent's answers at every step, computed step by step: the slow twin of an overridden `read_every`."""
    streams, steps = batch.valid.shape
    state, parts = agent.init_state(streams, steps, batch.obs.device), []
    for t in range(steps):
        now_BA, state = agent.step(state, batch.step(t))
        parts.append(now_BA)
    return Logits(torch.stack(parts, dim=1).flatten(0, 1))


# ---------------------------------------------------------------- worlds


class Worlds(ABC):
    """B episodes at once on one device. All randomness is an argument, made by `noise`."""

    spec: Spec

    @abstractmethod
    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        """Return all randomness of these episodes; it depends on (seed, id) alone, not on the batch or the device."""

    @property
    def seconds(self) -> float:
        """Time spent in environments on the host so far."""
        return 0.0


@dataclass(slots=True)
class Transition(Generic[World]):
    """The result of one step."""

    world: World
    """The worlds after the action."""
    obs: Tensor
    """The next observation; after the end of an episode, it may be the first one of the next episode."""
    reward_B: Tensor
    """The reward of the action."""
    terminated_B: Tensor
    """True where the task ended the episode: no reward could follow."""
    truncated_B: Tensor | None = None
    """True where the episode was cut off, as by a time limit: more rewards could have followed. None: nowhere."""
    final_obs: Tensor | None = None
    """The last observation of ended episodes, in worlds whose `obs` already starts the next one. None: `obs`."""
    reward_known_B: Tensor | None = None
    """False where the reward is unknown. None: it is always known."""
    told: Told | None = None
    """Action and reward that the policy receives in place of the true ones. None: the true ones."""
    facts: dict[str, Tensor] = field(default_factory=dict)
    """Data of the result for metrics, recorded with the facts of the step under names of their own."""


class Simulator(Worlds, Generic[World]):
    """Worlds that actions change."""

    on_host: bool = False
    """Whether a step runs code that must not be captured as a CUDA graph, such as an environment in Python. Rollouts in
    such worlds stop when all episodes have ended."""
    most_streams: int | None = None
    """Limit of the episodes that can be played at a time; a rollout of more plays them in turns. None: no limit."""

    @abstractmethod
    def reset(self, noise: Noise) -> tuple[World, Tensor]:
        """Return the worlds at their first step and the first observations."""

    @abstractmethod
    def step(self, world: World, action: Tensor) -> Transition[World]:
        """Return the result of the action in each world."""

    def expert(self, world: World) -> Tensor | None:
        """Return the privileged expert's action in each world, to be imitated; None: there is no expert."""
        return None

    def allowed(self, world: World) -> Tensor | None:
        """Return (B, A) True where the action is allowed at this step; None: all are."""
        return None

    def facts(self, world: World) -> dict[str, Tensor]:
        """Return data of this step for metrics and references; methods see only the facts that the spec names."""
        return {}

    def close(self) -> None:
        """Free what the worlds hold, such as environments and processes; the next `reset` acquires it again."""

    def frame(self, world: World) -> Any:
        """Return an image (height, width, 3) of the first world as uint8, for `uat watch`; None: there is none."""
        return None


class Recording(Worlds):
    """Episodes that no action changes, such as those of a log: all steps exist in advance, and agents only read them.

    Training takes the episodes as they are. In evaluation an agent receives the recorded actions and rewards, never its
    own, and answers at the last step of each episode, or at every step.
    """

    every_step: bool = False
    """Whether agents answer at every step, by `read_every`, instead of at the last one."""

    @abstractmethod
    def trajectory(self, noise: Noise) -> Trajectory:
        """Return the episodes as they happened, with the recorded actions."""

    @abstractmethod
    def judged(self, trajectory: Trajectory, noise: Noise, answers: Answers) -> Trajectory:
        """Return the episodes with scores of the answers added to their facts, one per episode, for the metrics."""
