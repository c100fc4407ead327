"""Corrupted feedback: policies receive altered actions and rewards, while the world stays the same.

Observations, targets, earned rewards and metrics equal those of the clean channel, bit for bit. Only the feedback that
the clock delivers to a policy changes, by the law of `uat.channel`.

Any simulator:    corrupt(simulator, noise=2.0)              another simulator; CUDA graphs capture it as well
Any logs:         corrupt(trajectory, reward="shuffled")     with the episodes' ids and a seed
Any training:     RunConfig.feedback, on the command line --feedback.reward null

Axes: B episodes, T time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, overload

import torch
from torch import Tensor

from uat.channel import PREFIX, TRUE, FeedbackConfig
from uat.checks import check_ids, check_valid
from uat.clock import known_rewards
from uat.contracts import Agent, Answers, Reader, Recording, Simulator, Transition, Worlds
from uat.domains.domain import Domain, Split
from uat.episode import Noise, Told, Trajectory
from uat.settings import Seed, checked, shown

# ---------------------------------------------------------------- simulators and recordings


@dataclass(frozen=True, slots=True)
class CorruptedWorld:
    inner: Any
    noise: Noise
    earned: tuple[Tensor, ...] = ()
    """Reward of every step so far; empty unless rewards are shuffled."""
    knew: tuple[Tensor, ...] = ()
    """Masks of known rewards for `earned`; empty while all are known."""
    sent: tuple[tuple[Tensor, Tensor | None], ...] = ()
    """Rewards put into the channel so far, with masks of known rewards; a mask of None: all are known."""

    @property
    def t(self) -> int:
        return len(self.sent)


def _drawn(worlds: Worlds, config: FeedbackConfig, episode_ids: Tensor, seed: int) -> Noise:
    """Return the worlds' noise together with the channel's."""
    drawn = worlds.noise(episode_ids, seed)
    device = next(iter(drawn.values())).device if drawn else episode_ids.device
    return {**drawn, **config.draw(episode_ids.to(device), seed, worlds.spec.steps)}


def _split(noise: Noise) -> tuple[Noise, Noise]:
    """Split noise into the worlds' and the channel's."""
    own = {name: value for name, value in noise.items() if name.startswith(PREFIX)}
    return {name: value for name, value in noise.items() if name not in own}, own


class CorruptedRecording(Recording):
    """A recording whose policies receive corrupted feedback."""

    def __init__(self, worlds: Recording, config: FeedbackConfig) -> None:
        self.worlds, self.config, self.spec = worlds, config, worlds.spec
        self.every_step = worlds.every_step

    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        return _drawn(self.worlds, self.config, episode_ids, seed)

    def trajectory(self, noise: Noise) -> Trajectory:
        worlds_noise, channel_noise = _split(noise)
        return self.config.tell(self.worlds.trajectory(worlds_noise), channel_noise)

    def judged(self, trajectory: Trajectory, noise: Noise, answers: Answers) -> Trajectory:
        return self.worlds.judged(trajectory, _split(noise)[0], answers)


class CorruptedSimulator(Simulator[CorruptedWorld]):
    """A simulator whose policies receive corrupted feedback."""

    def __init__(self, worlds: Simulator[Any], config: FeedbackConfig) -> None:
        self.worlds, self.config, self.spec, self.on_host = worlds, config, worlds.spec, worlds.on_host
        self.most_streams = worlds.most_streams

    @property
    def seconds(self) -> float:
        return self.worlds.seconds

    def close(self) -> None:
        self.worlds.close()

    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        return _drawn(self.worlds, self.config, episode_ids, seed)

    def reset(self, noise: Noise) -> tuple[CorruptedWorld, Tensor]:
        worlds_noise, channel_noise = _split(noise)
        inner, obs = self.worlds.reset(worlds_noise)
        return CorruptedWorld(inner, channel_noise), obs

    def expert(self, world: CorruptedWorld) -> Tensor | None:
        return self.worlds.expert(world.inner)

    def allowed(self, world: CorruptedWorld) -> Tensor | None:
        return self.worlds.allowed(world.inner)

    def facts(self, world: CorruptedWorld) -> dict[str, Tensor]:
        return self.worlds.facts(world.inner)

    def frame(self, world: CorruptedWorld) -> Any:
        return self.worlds.frame(world.inner)

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


# ---------------------------------------------------------------- corrupt, and domains


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
    """Return a simulator, a recording or logged episodes with corrupted feedback: `corrupt(simulator, noise=2.0)`.

    Settings are the fields of FeedbackConfig and override those of `config`. `episode_ids` (unset: 0, 1, ...) and
    `seed` are for logged episodes; simulators and recordings receive both with each rollout.
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
    """Return the corrupted simulator of a simulator, and the corrupted recording of a recording."""
    if isinstance(worlds, CorruptedSimulator | CorruptedRecording):
        raise ValueError("the feedback is already corrupted; give all settings in one call")
    if isinstance(worlds, Recording):
        return CorruptedRecording(worlds, config)
    if not isinstance(worlds, Simulator):
        raise ValueError(f"what={shown(worlds)} must be a simulator, a recording or a Trajectory")
    return CorruptedSimulator(worlds, config)


class CorruptedDomain(Domain):
    """A domain whose policies receive corrupted feedback; metrics, references and all else are the clean domain's.

    `references` are agents for the true channel: a Bayes filter returns NaN after evidence that its model excludes.
    `references_under` are those that know the corrupted one.
    """

    def __init__(self, domain: Domain, config: FeedbackConfig) -> None:
        self.clean, self.feedback = domain, config
        self.name, self.spec, self.train_tasks, self.task = domain.name, domain.spec, domain.train_tasks, domain.task
        self.metrics, self.rivals, self.block = domain.metrics, domain.rivals, domain.block
        self.plateau = domain.plateau
        self.setting = ",".join([*([] if domain.setting == "default" else [domain.setting]), config.setting])

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the clean domain."""
        if name == "clean":  # `clean` is not set yet while an object is copied or unpickled
            raise AttributeError(name)
        return getattr(self.clean, name)

    def simulator(self, split: Split, device: torch.device | str) -> CorruptedSimulator | CorruptedRecording:
        return corrupted_worlds(self.clean.simulator(split, device), self.feedback)

    def measure(self, trajectory: Trajectory) -> dict[str, Tensor]:
        return self.clean.measure(trajectory)

    def summarise(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.clean.summarise(values)

    def curves(self, trajectory: Trajectory) -> dict[str, Tensor]:
        return self.clean.curves(trajectory)

    def references(self) -> Mapping[str, Agent[Any] | Reader]:
        return self.clean.references()

    def references_under(self, feedback: FeedbackConfig) -> Mapping[str, Agent[Any] | Reader]:
        return self.clean.references_under(feedback)

    def preparation(self) -> Mapping[str, Any] | None:
        return self.clean.preparation()

    @property
    def episodes(self) -> Mapping[str, int]:
        return self.clean.episodes
