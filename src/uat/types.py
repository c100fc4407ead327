"""What travels between methods and domains, and the one clock that decides what may be known when.

Axes, one letter each through the whole library:
  B batch or stream   T time   S cached steps   D width   H heads   E head size   L layers
  U utility width     O observation   A actions   N assets or items   G goals or groups
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import (
    Any,
    ClassVar,
    Protocol,
    Self,
    TypeVar,
    runtime_checkable,
)

import torch
from torch import Tensor

from uat.compiling import compiles
from uat.settings import Count, Delay, Number, Steps, check_fields, checked, shown

NO_ACTION = -1
"""The id of "no action yet"; its embedding is exactly zero."""


# ---------------------------------------------------------------- what a decision problem looks like


class Checked:
    """A dataclass whose fields are checked when it is created."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_fields(self, f"{type(self).__name__}.")


@dataclass(frozen=True, slots=True)
class Vector(Checked):
    """Observations are vectors: (B, T, width) floats."""

    width: Count


@dataclass(frozen=True, slots=True)
class Items(Checked):
    """Observations are item ids: (B, T) integers in [0, count), -1 where there is none."""

    count: Count


@dataclass(frozen=True, slots=True)
class Assets(Checked):
    """Observations are feature rows of assets: (B, T, count, features) floats."""

    count: Count
    features: Count


@dataclass(frozen=True, slots=True)
class Discrete(Checked):
    """Actions are ids: integers in [0, count), -1 where there is none."""

    count: Count


@dataclass(frozen=True, slots=True)
class Weights(Checked):
    """Actions are vectors of `count` non-negative weights that sum to one, zeros where there is none."""

    count: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The shape of one decision problem: all that a method needs to know of a domain."""

    obs: Vector | Items | Assets
    action: Discrete | Weights
    horizon: Steps
    """Steps of one episode."""
    reward_scale: Number = 1.0
    """Rewards reach a policy multiplied by this; the clock does it, nobody else."""
    reward_lag: Delay = 1
    """The reward channel at t carries r[t - reward_lag]: 1 for a simulator without delay, 1 + d with
    delay d; d for logs, whose interaction t is complete when the decision at t is made."""
    extras: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Facts of a step that a method may ask for, with their shapes; all other facts are hidden from methods."""

    def __post_init__(self) -> None:
        check_fields(self, "Spec.")
        for name, shape in self.extras.items():
            checked(name, str, "the name in Spec.extras")
            if not all(side > 0 for side in checked(shape, tuple[int, ...], f"Spec.extras[{name!r:.40}]")):
                raise ValueError(f"Spec.extras[{name!r:.40}]={shown(shape)} must be a shape: sides of at least 1")

    def no_action(self, streams: int, device: torch.device | str = "cpu") -> Tensor:
        """What was done before the first step of each stream."""
        if isinstance(self.action, Discrete):
            return torch.full((streams,), NO_ACTION, device=device)
        return torch.zeros(streams, self.action.count, device=device)

    @property
    def clock(self) -> Clock:
        return Clock(reward_lag=self.reward_lag, reward_scale=self.reward_scale, extras=tuple(self.extras))


# ---------------------------------------------------------------- what travels


class TensorFields:
    """A dataclass of tensors, dictionaries of tensors and None, moved and sliced as one."""

    def map(self, f: Callable[[Tensor], Tensor]) -> Self:
        def apply(value: Any) -> Any:
            if isinstance(value, Tensor):
                return f(value)
            if isinstance(value, TensorFields):
                return value.map(f)
            return {k: f(v) for k, v in value.items()} if isinstance(value, dict) else value

        return replace(self, **{item.name: apply(getattr(self, item.name)) for item in fields(self)})  # pyright: ignore[reportArgumentType]

    def to(self, device: torch.device | str) -> Self:
        return self.map(lambda x: x.to(device))


@dataclass(slots=True, kw_only=True)
class Step(TensorFields):
    """What B streams may know at one moment."""

    obs: Tensor
    prev_action: Tensor
    prev_reward: Tensor
    first: Tensor
    """(B,) True where the stream starts anew with this very observation."""
    allowed: Tensor | None = None
    """(B, A) True where the action may be taken; None: all may."""


@dataclass(slots=True, kw_only=True)
class Trajectory(TensorFields):
    """B episodes as they happened, unshifted: action[t] was chosen after obs[t] and earned reward[t]."""

    obs: Tensor
    action: Tensor
    reward: Tensor
    done: Tensor
    target: Tensor
    """The expert's action: ids (B, T), or weights (B, T, A)."""
    valid: Tensor
    """(B, T) True for real steps, False for padding."""
    allowed: Tensor | None = None
    facts: dict[str, Tensor] = field(default_factory=dict)
    """What metrics need to know of each step; hidden from methods unless the spec names it among its extras."""
    told_action: Tensor | None = None
    """What the feedback channel says in place of `action`; None: the truth."""
    told_reward: Tensor | None = None
    """What the feedback channel carries in place of `reward`, before the clock shifts it; None: the truth."""


@dataclass(slots=True, kw_only=True)
class Batch(TensorFields):
    """What a policy may know of B episodes at every step, and what it should answer. Made by the clock alone."""

    obs: Tensor
    prev_action: Tensor
    prev_reward: Tensor
    target: Tensor
    valid: Tensor
    allowed: Tensor | None = None
    start: Tensor | None = None
    """(B,) position of the first step in the policy's table; None: 0."""
    extras: dict[str, Tensor] = field(default_factory=dict)
    """Facts that the spec shows to methods."""
    happened: Trajectory | None = None
    """The episodes themselves, for losses that need actions, rewards or ends. Deciding never looks at them."""

    def step(self, t: int) -> Step:
        """What streams that begin with these episodes are told at t."""
        return Step(
            obs=self.obs[:, t],
            prev_action=self.prev_action[:, t],
            prev_reward=self.prev_reward[:, t],
            first=torch.full((len(self.obs),), t == 0, device=self.obs.device),
            allowed=None if self.allowed is None else self.allowed[:, t],
        )

    @property
    def last_B(self) -> Tensor:
        """The last real step of each episode."""
        return self.valid.sum(1) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A number that a domain reports per episode."""

    name: str
    higher_is_better: bool = True
    label: str = ""
    partial: bool = False
    """Whether an episode may leave it undefined: such an episode reports NaN and is left out of every mean."""

    def better(self, value: float, than: float) -> bool:
        """Whether a value is better than another; NaN, an undefined one, is worse than any number."""
        if math.isnan(than):
            return not math.isnan(value)
        return value > than if self.higher_is_better else value < than


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One measured number: a row of every table."""

    run: str
    method: str
    domain: str
    task: str
    setting: str
    split: str
    seed: int
    metric: str
    value: float
    n: int


# ---------------------------------------------------------------- the clock


def shift(x_BT: Tensor, lag: int) -> Tensor:
    """What x was `lag` steps before each t; nothing (id -1, or zero) before the start."""
    before = torch.full_like(x_BT[:, :lag], nothing(x_BT))
    return torch.cat([before, x_BT], dim=1)[:, : x_BT.shape[1]]


def blank(x_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """Nothing where a step is padding."""
    return torch.where(valid_BT.view(*valid_BT.shape, *[1] * (x_BT.dim() - 2)), x_BT, nothing(x_BT))


def nothing(x_BT: Tensor) -> int:
    """The value that stands for "none": -1 among ids (B, T), 0 among numbers and vectors."""
    return 0 if x_BT.is_floating_point() or x_BT.dim() > 2 else NO_ACTION


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The only place where feedback is shifted, delayed and scaled.

    `batch` serves training and `begin` serves acting; a test holds them equal.
    """

    reward_lag: int = 1
    reward_scale: float = 1.0
    extras: tuple[str, ...] = ()
    """Facts that methods may know."""

    def batch(self, trajectory: Trajectory) -> Batch:
        """Padding may hold anything; a policy finds nothing there."""
        valid = trajectory.valid
        action = trajectory.action if trajectory.told_action is None else trajectory.told_action
        reward_BT = _numbers(trajectory.reward if trajectory.told_reward is None else trajectory.told_reward)
        obs, prev_action, prev_reward = self._tell(trajectory.obs, action, reward_BT, valid)
        return Batch(
            obs=obs,
            prev_action=prev_action,
            prev_reward=prev_reward,
            target=trajectory.target,
            valid=valid,
            allowed=trajectory.allowed,
            extras={name: trajectory.facts[name] for name in self.extras},
            happened=trajectory,
        )

    def _tell(self, obs: Tensor, action: Tensor, reward_BT: Tensor, valid_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What is told at every step: the observation, the previous action, and the reward that has arrived."""
        if not _fusible(obs, action, reward_BT, valid_BT):
            return self._told(obs, action, reward_BT, valid_BT)
        from uat.clock_kernel import fused_told

        lag, scale, none = self.reward_lag, self.reward_scale, (nothing(obs), nothing(action))
        return fused_told(obs, action, reward_BT, valid_BT, lag=lag, scale=scale, none=none)

    def _told(self, obs: Tensor, action: Tensor, reward_BT: Tensor, valid_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The slow twin of `clock_kernel.fused_told`."""
        prev_action, prev_reward_BT = shift(action, 1), shift(reward_BT, self.reward_lag)
        return blank(obs, valid_BT), blank(prev_action, valid_BT), blank(prev_reward_BT, valid_BT) * self.reward_scale

    def earned(self, trajectory: Trajectory) -> Tensor:
        """(B, T) what each step earned, scaled as policies are told of it: for losses that learn from rewards."""
        return blank(_numbers(trajectory.reward), trajectory.valid) * self.reward_scale

    def begin(self, no_action_B: Tensor) -> History:
        """The feedback of B episodes that start now."""
        no_reward_B = torch.zeros(no_action_B.shape[0], device=no_action_B.device)
        return History(clock=self, actions=[no_action_B], rewards=[no_reward_B] * self.reward_lag)


def _numbers(reward_BT: Tensor) -> Tensor:
    """Clicks and counts are numbers, not ids."""
    return reward_BT if reward_BT.is_floating_point() else reward_BT.float()


def _fusible(obs: Tensor, action: Tensor, reward_BT: Tensor, valid_BT: Tensor) -> bool:
    """Whether one launch can tell of these: on a GPU, actions that are ids, plain types, no gradients."""
    return (
        compiles(obs.device)
        and obs.dtype in (torch.float32, torch.int64)
        and (action.dtype, reward_BT.dtype, valid_BT.dtype) == (torch.int64, torch.float32, torch.bool)
        and obs.shape[:2] == action.shape == reward_BT.shape == valid_BT.shape
        and all(x.device == obs.device and not x.requires_grad for x in (obs, action, reward_BT, valid_BT))
    )


@dataclass(slots=True, kw_only=True)
class History:
    """Feedback as it comes in, told when the clock says so. Entry t of each list is what step t is told."""

    clock: Clock
    actions: list[Tensor]
    rewards: list[Tensor]
    starts: tuple[Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        never_B = torch.zeros_like(self.actions[0].reshape(len(self.actions[0]), -1)[:, 0], dtype=torch.bool)
        self.starts = (~never_B, never_B)

    def step(self, obs: Tensor, allowed: Tensor | None = None) -> Step:
        """What is known now."""
        t = len(self.actions) - 1
        told = {"prev_action": self.actions[t], "prev_reward": self.rewards[t]}
        return Step(obs=obs, first=self.starts[min(t, 1)], allowed=allowed, **told)

    def add(self, action: Tensor, reward_B: Tensor) -> None:
        """What was done now, and what it earned, as policies are told."""
        scale = self.clock.reward_scale
        self.actions.append(action)
        self.rewards.append(reward_B if scale == 1 else reward_B * scale)


# ---------------------------------------------------------------- sums over real steps

Losses = dict[str, tuple[Tensor, Tensor]]
"""Named (sum, count) pairs, so that masks, ranks and micro-batches add up exactly."""


def masked_sum(x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over real steps, and how many there are. Padding may hold anything, even NaN."""
    return torch.where(valid, x, 0.0).sum(), valid.sum()


def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
    """Mean over real steps only; padding changes neither the sum nor the count."""
    total, count = masked_sum(x, valid)
    return total / count.clamp_min(1)


def episode_mean(x_BT: Tensor, valid_BT: Tensor) -> Tensor:
    """Mean over the real steps of each episode."""
    return torch.where(valid_BT, x_BT, 0.0).sum(1) / valid_BT.sum(1).clamp_min(1)


# ---------------------------------------------------------------- who acts, and where

State = TypeVar("State")
World = TypeVar("World")
Noise = dict[str, Tensor]
"""All the randomness of some episodes, as tensors whose first axis is the episode."""


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


@dataclass(frozen=True, slots=True)
class Inside:
    """Worlds that are played inside a policy's kernel: four Triton functions, and what these read and write.

    start(stream, live, world, T) gives where each world is at first, a number of 32 bits for each row.
    look(t, spot, stream, live, o, world, T, FETCH) gives what the streams observe at step t, a row each, and all that
    the other two need to know of it (one thing or a tuple). note(t, seen, known, stream, live, o, world, T, PUT) writes
    down what belongs to that step. move(t, known, stream, live, action, world, T) gives their rewards and where the
    worlds are then, as `start` does, and writes these down. FETCH(ptr, mask) and PUT(ptr, x, mask) read and write
    numbers of 32 bits without a wait for others; plain loads and stores do, too, in time.

    A stream may have several rows, which are alike: they write the same. What was written is not read again.
    """

    start: Any
    look: Any
    note: Any
    move: Any
    world: tuple[Tensor | int, ...]
    trajectory: Callable[[Tensor], Trajectory]
    """The episodes, once they are played with these actions (B, T)."""


class Simulator(Protocol[World]):
    """B worlds at once on one device, driven by randomness that is handed in.

    A simulator may also say `told(world)`: of the step that led to this world, the action and the reward that a
    policy is told of, (B, ...) and (B,), where these are not what happened. And where `plays_inside` is true it offers
    `inside(noise)`: the same episodes for a policy of the same spec that plays them in one launch; all actions are
    allowed there, and policies are told what happened.
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
