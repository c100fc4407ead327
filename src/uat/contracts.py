"""The contracts: agents act, simulators are acted in, recordings are read."""

from __future__ import annotations

from typing import ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from uat.episode import Batch, Noise, Step, Trajectory
from uat.spec import Spec

State = TypeVar("State")
World = TypeVar("World")


class Agent(Protocol[State]):
    """Whoever can play: every policy, and every reference such as a Bayes filter."""

    sampled: ClassVar[bool]
    """Whether, when judged, it plays a sample of its logits instead of their arg-max."""

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> State:
        """Memory for `streams` streams of at most `capacity` steps."""
        ...

    def step(self, state: State, step: Step) -> tuple[Tensor, State]:
        """Logits over actions, and the state after this step; the state that came in is consumed."""
        ...


class Simulator(Protocol[World]):
    """B worlds at once on one device, driven by randomness that is handed in.

    A simulator may also say `told(world)`: of the step that led to this world, the action and the reward that a
    policy is told of, (B, ...) and (B,), where these are not what happened.
    """

    spec: Spec

    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        """All randomness of these episodes: the same for the same (seed, id), whatever the batch or device."""
        ...

    def reset(self, noise: Noise) -> tuple[World, Tensor]:
        """The worlds at their first step, and what is observed there."""
        ...

    def expert(self, world: World) -> Tensor:
        """The privileged expert's action in each world."""
        ...

    def allowed(self, world: World) -> Tensor | None:
        """(B, A) True where the action may be taken now; None: all may."""
        ...

    def step(self, world: World, action: Tensor) -> tuple[World, Tensor, Tensor, Tensor]:
        """The worlds after the action, the next observation, the reward, and whether the episode ended."""
        ...

    def facts(self, world: World) -> dict[str, Tensor]:
        """What the domain's metrics need to know of this step; methods see only what the spec names."""
        ...


class Answers(Protocol):
    """What an agent thinks of actions at the last step of B episodes. Nobody holds the scores of all by all at once."""

    def among(self, candidate_BK: Tensor) -> Tensor:
        """(B, K) scores of these actions."""
        ...

    def every(self, episodes: slice) -> Tensor:
        """(R, A) scores of all actions, for some of the episodes."""
        ...


class Reader(Protocol):
    """Whoever can be asked about recorded episodes: every policy, and references that never act."""

    sampled: ClassVar[bool]

    def read(self, batch: Batch) -> Answers:
        """What it answers at the last real step of each episode."""
        ...


@runtime_checkable
class Recording(Protocol):
    """Episodes that no action changes, such as those of a log: all there at once, and agents are asked about them.

    Training needs no play. Whoever is judged is told what happened, never what it would have done; it is asked at the
    last step of each episode.
    """

    spec: Spec

    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        """All randomness of these episodes: the same for the same (seed, id), whatever the batch or device."""
        ...

    def trajectory(self, noise: Noise) -> Trajectory:
        """The episodes as they happened; their actions are the recorded ones."""
        ...

    def judged(self, trajectory: Trajectory, noise: Noise, answers: Answers) -> Trajectory:
        """The episodes with facts, one per episode, of how good the answers were: what the metrics are made of."""
        ...
