"""Corruption of the feedback channel: what a policy is told of its actions and rewards, as far as it is not true.

The world goes on as it was: observations, targets, earned rewards and metrics are those of the clean channel, bit for
bit. Only what the clock tells a policy changes. What is told in place of r_s, the reward that step s earned, is

  true       r_s                    shuffled   r_j, with j drawn uniformly from 0 .. s
  null       0                      inverted   -r_s

plus `noise` times a standard normal number, and it comes `delay` steps later than it would. A null action is "none".
Draws depend on (seed, episode, step) alone, so they are the same for every policy and in every batch.

Any simulator:    corrupt(simulator, noise=2.0)              a simulator like any other, captured as a CUDA graph too
Any logs:         corrupt(trajectory, reward="shuffled")     with the episodes' ids and a seed
Any training:     RunConfig.feedback, on the command line --feedback.reward null

Axes: B episodes, T time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from uat.checks import check_ids, check_valid
from uat.clock import NO_ACTION, known_rewards, shift
from uat.contracts import Agent, Answers, Reader, Recording, Simulator, Transition, Worlds
from uat.domains.domain import Domain, Split
from uat.episode import Noise, Told, Trajectory
from uat.noise import uniform
from uat.settings import Amount, Delay, Seed, changed_fields, check_fields, checked, shown

PREFIX = "feedback."
"""Names of the channel's own noise begin so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedbackConfig:
    reward: Literal["true", "null", "shuffled", "inverted"] = "true"
    """What is told in place of a reward: itself, zero, one of those earned so far in the episode, or its negative."""
    noise: Amount = 0.0
    """Deviation of the normal noise added to what is told, in units of the domain's own reward."""
    action: Literal["true", "null"] = "true"
    """What is told of an action: itself, or that there was none."""
    delay: Delay = 0
    """Steps by which rewards arrive later than the domain says."""

    def __post_init__(self) -> None:
        check_fields(self, PREFIX)

    @property
    def is_true(self) -> bool:
        return self == FeedbackConfig()

    @property
    def setting(self) -> str:
        """What differs from the truth, in a few words: "feedback.reward=null,feedback.action=null"."""
        changed = changed_fields(self)
        return ",".join(f"{PREFIX}{name}={value}" for name, value in changed.items())

    def draw(self, episode_ids: Tensor, seed: int, steps: int) -> Noise:
        """The randomness of the channel in these episodes; empty where it has none."""
        drawn: Noise = {}
        if self.reward == "shuffled":
            share_BT = uniform(seed, "feedback.pick", episode_ids, steps)
            drawn[PREFIX + "pick"] = (share_BT * torch.arange(1, steps + 1, device=share_BT.device)).long()
        if self.noise:
            drawn[PREFIX + "normal"] = torch.special.ndtri(uniform(seed, "feedback.noise", episode_ids, steps)).float()
        return drawn

    def change(self, action: Tensor, reward: Tensor) -> tuple[Tensor, Tensor]:
        """All that needs neither randomness nor the past."""
        if self.action == "null":
            action = torch.full_like(action, 0 if action.is_floating_point() else NO_ACTION)
        if self.reward == "null":
            reward = torch.zeros_like(reward)
        elif self.reward == "inverted":
            reward = -reward
        return action, reward

    def tell(self, trajectory: Trajectory, noise: Noise) -> Trajectory:
        """Whole episodes, of which a policy is told something else: what a simulator's channel tells, all at once."""
        true = trajectory if trajectory.told is None else trajectory.told
        action, sent_BT = self.change(true.action, known_rewards(true.reward, true.reward_known))
        known_BT = true.reward_known
        if (pick_BT := noise.get(PREFIX + "pick")) is not None:
            sent_BT = sent_BT.gather(1, pick_BT)
            known_BT = None if known_BT is None else known_BT.gather(1, pick_BT)
        if (normal_BT := noise.get(PREFIX + "normal")) is not None:
            sent_BT = sent_BT + self.noise * normal_BT
        if known_BT is not None:
            known_BT = shift(known_BT.float(), self.delay).bool()
        return replace(trajectory, told=Told(action=action, reward=shift(sent_BT, self.delay), reward_known=known_BT))


TRUE = FeedbackConfig()


# ---------------------------------------------------------------- simulators and recordings


@dataclass(frozen=True, slots=True)
class CorruptedWorld:
    inner: Any
    noise: Noise
    earned: tuple[Tensor, ...] = ()
    """What every step so far has earned; kept where draws need it."""
    knew: tuple[Tensor, ...] = ()
    """Where that is known, if it is not known everywhere."""
    sent: tuple[tuple[Tensor, Tensor | None], ...] = ()
    """What has been put into the channel so far, and where it is known."""

    @property
    def t(self) -> int:
        return len(self.sent)


def _drawn(worlds: Worlds, config: FeedbackConfig, episode_ids: Tensor, seed: int) -> Noise:
    """The worlds' noise with the channel's own beside it."""
    found = worlds.noise(episode_ids, seed)
    device = next(iter(found.values())).device if found else episode_ids.device
    return {**found, **config.draw(episode_ids.to(device), seed, worlds.spec.steps)}


def _apart(noise: Noise) -> tuple[Noise, Noise]:
    """The worlds' noise, and the channel's."""
    own = {name: value for name, value in noise.items() if name.startswith(PREFIX)}
    return {name: value for name, value in noise.items() if name not in own}, own


class CorruptedRecording(Recording):
    """Episodes that no action changes, of which policies are told something else than what happened."""

    def __init__(self, worlds: Recording, config: FeedbackConfig) -> None:
        self.worlds, self.config, self.spec = worlds, config, worlds.spec

    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        return _drawn(self.worlds, self.config, episode_ids, seed)

    def trajectory(self, noise: Noise) -> Trajectory:
        theirs, own = _apart(noise)
        return self.config.tell(self.worlds.trajectory(theirs), own)

    def judged(self, trajectory: Trajectory, noise: Noise, answers: Answers) -> Trajectory:
        return self.worlds.judged(trajectory, _apart(noise)[0], answers)


class CorruptedSimulator(Simulator[CorruptedWorld]):
    """A simulator whose policies are told something else than what happens."""

    def __init__(self, worlds: Simulator[Any], config: FeedbackConfig) -> None:
        self.worlds, self.config, self.spec, self.on_host = worlds, config, worlds.spec, worlds.on_host

    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        return _drawn(self.worlds, self.config, episode_ids, seed)

    def reset(self, noise: Noise) -> tuple[CorruptedWorld, Tensor]:
        theirs, own = _apart(noise)
        inner, obs = self.worlds.reset(theirs)
        return CorruptedWorld(inner, own), obs

    def expert(self, world: CorruptedWorld) -> Tensor | None:
        return self.worlds.expert(world.inner)

    def allowed(self, world: CorruptedWorld) -> Tensor | None:
        return self.worlds.allowed(world.inner)

    def facts(self, world: CorruptedWorld) -> dict[str, Tensor]:
        return self.worlds.facts(world.inner)

    def step(self, world: CorruptedWorld, action: Tensor) -> Transition[CorruptedWorld]:
        after = self.worlds.step(world.inner, action)
        true = Told(action=action, reward=after.reward_B, reward_known=after.reward_known_B)
        true, known_B = after.told or true, true.reward_known if after.told is None else after.told.reward_known
        told_action, sent_B = self.config.change(true.action, known_rewards(true.reward, known_B))
        earned, knew = world.earned, world.knew
        if (pick_BT := world.noise.get(PREFIX + "pick")) is not None:
            earned, pick_B1 = (*earned, sent_B), pick_BT[:, world.t, None]
            sent_B = torch.stack(earned, dim=1).gather(1, pick_B1)[:, 0]
            if known_B is not None:
                knew = (*knew, known_B)
                known_B = torch.stack(knew, dim=1).gather(1, pick_B1)[:, 0]
        if (normal_BT := world.noise.get(PREFIX + "normal")) is not None:
            sent_B = sent_B + self.config.noise * normal_BT[:, world.t]
        sent, arrived = (*world.sent, (sent_B, known_B)), world.t - self.config.delay
        told_B, known_B = sent[arrived] if arrived >= 0 else (torch.zeros_like(sent_B), _never(known_B))
        inner = replace(world, inner=after.world, earned=earned, knew=knew, sent=sent)
        return replace(after, world=inner, told=Told(action=told_action, reward=told_B, reward_known=known_B))


def _never(known_B: Tensor | None) -> Tensor | None:
    return None if known_B is None else torch.zeros_like(known_B)


# ---------------------------------------------------------------- the one line, and domains


@overload
def corrupt(what: Trajectory, config: FeedbackConfig = ..., /, **settings: Any) -> Trajectory: ...
@overload
def corrupt(what: Simulator[Any], config: FeedbackConfig = ..., /, **settings: Any) -> CorruptedSimulator: ...
@overload
def corrupt(what: Recording, config: FeedbackConfig = ..., /, **settings: Any) -> CorruptedRecording: ...
def corrupt(
    what: Simulator[Any] | Recording | Trajectory,
    config: FeedbackConfig = TRUE,
    /,
    *,
    episode_ids: Tensor | None = None,
    seed: int = 0,
    **settings: Any,
) -> CorruptedSimulator | CorruptedRecording | Trajectory:
    """A simulator, or logged episodes, of which policies are told something else: `corrupt(simulator, noise=2.0)`.

    Settings are those of FeedbackConfig, and change the config where one is given. Logs take the ids of their
    episodes (unset: 0, 1, ...) and a seed; a simulator is handed both with each rollout.
    """
    known = {f.name for f in fields(FeedbackConfig)}
    if unknown := sorted(settings.keys() - known):
        raise ValueError(f"unknown feedback setting {unknown[0]!r}; known: {', '.join(sorted(known))}")
    config = replace(checked(config, FeedbackConfig, "config"), **settings)
    checked(seed, Seed, "seed")
    if not isinstance(what, Trajectory):
        return corrupted_worlds(what, config)
    check_valid(what.valid, tuple(what.valid.shape))
    ids_B = torch.arange(len(what.valid))
    if episode_ids is not None:
        ids_B = check_ids("episode_ids", episode_ids, (len(what.valid),), 2**63 - 1)
    return config.tell(what, config.draw(ids_B.to(what.valid.device), seed, what.valid.shape[1]))


def corrupted_worlds(
    worlds: Simulator[Any] | Recording, config: FeedbackConfig
) -> CorruptedSimulator | CorruptedRecording:
    """Whatever is recorded stays so."""
    if isinstance(worlds, CorruptedSimulator | CorruptedRecording):
        raise ValueError("this feedback is corrupted already: give all settings at once")
    if isinstance(worlds, Recording):
        return CorruptedRecording(worlds, config)
    if not isinstance(worlds, Simulator):
        raise ValueError(f"what={shown(worlds)} must be a simulator, a recording or a Trajectory")
    return CorruptedSimulator(worlds, config)


class CorruptedDomain(Domain):
    """A domain whose policies are told something else; metrics, references and all other facts are the domain's own.

    Its references are agents for the true channel: a Bayes filter that meets evidence which cannot be knows nothing.
    """

    def __init__(self, domain: Domain, config: FeedbackConfig) -> None:
        self.clean, self.feedback = domain, config
        self.name, self.spec, self.train_tasks, self.task = domain.name, domain.spec, domain.train_tasks, domain.task
        self.metrics, self.rivals, self.block = domain.metrics, domain.rivals, domain.block
        self.setting = ",".join([*([] if domain.setting == "default" else [domain.setting]), config.setting])

    def __getattr__(self, name: str) -> Any:
        """Whatever else the domain holds."""
        if name == "clean":  # asked for before there is one, by who copies or unpickles
            raise AttributeError(name)
        return getattr(self.clean, name)

    def simulator(self, split: Split, device: torch.device | str) -> CorruptedSimulator | CorruptedRecording:
        return corrupted_worlds(self.clean.simulator(split, device), self.feedback)

    def measure(self, trajectory: Trajectory) -> dict[str, Tensor]:
        return self.clean.measure(trajectory)

    def summarise(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.clean.summarise(values)

    def references(self) -> Mapping[str, Agent[Any] | Reader]:
        return self.clean.references()

    @property
    def episodes(self) -> Mapping[str, int]:
        return self.clean.episodes
