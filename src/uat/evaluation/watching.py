"""Watch a run: its policy plays test episodes greedily, as in `evaluate`, and the frames become a film.

Worlds have frames if their simulator's `frame` returns images; Gymnasium environments render them (`rgb_array`).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from uat.acting import rollout
from uat.adapters.gymnasium import GymDomain
from uat.adapters.rendering import rendered
from uat.config import RunConfig
from uat.contracts import Recording, Simulator, Transition
from uat.distributions import action_noise
from uat.domains import split_seed
from uat.episode import Noise, Trajectory
from uat.evaluation.film import Frame, Packed, check_film, write_film
from uat.evaluation.gates import gate_norms
from uat.feedback import corrupted_worlds
from uat.files import check_path
from uat.methods import Policy
from uat.methods.uat import UAT
from uat.noise import derive
from uat.runs import Run, load_policy, opened
from uat.settings import Between, Seed, Steps, checked
from uat.threads import cpu_threads
from uat.training.surroundings import precision

MOST_STEPS_UNSET = 1_000
"""Limit of a watched episode in worlds without a horizon, unless one is given."""
MOST_NUMBERS = 4
"""Numbers of an action that a caption shows."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A film and its episodes."""

    file: Path
    rows: list[dict[str, Any]]
    """One row per episode: its number, steps, return and end."""


@cpu_threads()
def watch(
    run: Run | Path | str,
    out: Path | str | None = None,
    *,
    episodes: int = 1,
    seed: int | None = None,
    fps: int = 20,
    max_steps: int | None = None,
    trust: bool = False,
    domain: Any = None,
) -> Watched:
    """Play episodes with a run's policy and write them to a GIF or MP4, with a caption under each frame.

    out: file that ends in .gif or .mp4; unset: watch.gif in the run folder.
    seed: seed of other worlds; unset: the first test episodes, which `evaluate` scores.
    fps: frames per second, one frame for each step.
    max_steps: steps after which an episode is cut off; unset: its end.
    trust: allow importing the code that the run's config names (`python:module:name`), which is refused by default.
    domain: the domain object or environment that was passed to `uat.train`, if it has no name.
    """
    checked(episodes, Annotated[int, Between(1, 1_000)], "episodes")
    checked(seed, Seed | None, "seed")
    checked(fps, Annotated[int, Between(1, 50)], "fps")
    checked(max_steps, Steps | None, "max_steps")
    run = opened(run, trust=trust, domain=domain)
    file = check_film(run.file("watch.gif") if out is None else check_path(out, "out"))
    policy, frames, rows = load_policy(run.path, trust=trust), list[Frame](), []
    with contextlib.closing(Filmed(worlds_of(run.config), run.config.domain_name)) as worlds:
        for episode in range(episodes):
            with precision(run.config.train.precision):
                played = _played(policy, worlds, episode, seed, max_steps)
            title = f"episode {episode + 1} of {episodes}   " if episodes > 1 else ""
            frames += _captioned(played, worlds.images, bars_of(policy, played), title)
            rows.append({"episode": episode, **_result(played)})
    write_film(file, frames, fps)
    return Watched(file, rows)


def worlds_of(config: RunConfig) -> Simulator[Any]:
    """Return worlds that have frames, with the feedback that the run's policy receives."""
    domain = config.build_true_domain()
    worlds = rendered(domain) if isinstance(domain, GymDomain) else domain.simulator("test", "cpu")
    if isinstance(worlds, Recording) or type(worlds).frame is Simulator.frame:
        raise ValueError(
            f"{config.domain_name} cannot be watched: its worlds have no frames (`Simulator.frame`), unlike those of "
            "darkroom and Gymnasium environments that render rgb_array"
        )
    if config.feedback.is_true:
        return worlds
    corrupted = corrupted_worlds(worlds, config.feedback)
    assert isinstance(corrupted, Simulator)
    return corrupted


class Filmed(Simulator[Any]):
    """Worlds whose frames are kept, from the reset on. The agent plays as in the worlds themselves."""

    def __init__(self, worlds: Simulator[Any], label: str) -> None:
        self.worlds, self.label, self.spec, self.on_host = worlds, label, worlds.spec, worlds.on_host
        self.images: list[Packed] = []

    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        return self.worlds.noise(episode_ids, seed)

    def reset(self, noise: Noise) -> tuple[Any, Tensor]:
        self.images = []
        world, obs = self.worlds.reset(noise)
        self._keep(world)
        return world, obs

    def step(self, world: Any, action: Tensor) -> Transition[Any]:
        after = self.worlds.step(world, action)
        self._keep(after.world)
        return after

    def allowed(self, world: Any) -> Tensor | None:
        return self.worlds.allowed(world)

    def facts(self, world: Any) -> dict[str, Tensor]:
        return self.worlds.facts(world)

    def close(self) -> None:
        self.worlds.close()

    def _keep(self, world: Any) -> None:
        image = Packed.of(self.worlds.frame(world), self.label)
        if self.images and image.shape != self.images[0].shape:
            raise ValueError(
                f"{self.label} rendered an image of shape {image.shape} after one of shape {self.images[0].shape}: all "
                "must have one shape"
            )
        self.images.append(image)


def _played(policy: Policy, worlds: Filmed, episode: int, seed: int | None, max_steps: int | None) -> Trajectory:
    """Return an episode played by the policy."""
    ids_B, spec = torch.tensor([episode]), worlds.spec
    own = split_seed("test", 0) if seed is None else derive(seed, "worlds", "watch")
    steps = min(max_steps or MOST_STEPS_UNSET, spec.horizon) if spec.horizon and max_steps else spec.horizon
    steps = steps or max_steps or MOST_STEPS_UNSET
    gumbel_BTA = action_noise(spec, own, "actions", ids_B, steps) if policy.sampled else None
    return rollout(policy, worlds, worlds.noise(ids_B, own), gumbel_BTA, steps=steps)


def bars_of(policy: Policy, played: Trajectory) -> list[tuple[float, ...]]:
    """Return, for each step, the root mean squares of UAT's gates ρ and g, from 0 to 1; empty for other policies."""
    steps = int(played.valid.sum())
    if not isinstance(policy, UAT):
        return [()] * steps
    norms, root = gate_norms(policy, policy.spec.clock.batch(played)), policy.config.d_model**0.5
    rho_T, g_T = norms.rho_BT[0] / root, norms.g_LBT[:, 0].mean(0) / root
    return [(float(rho), float(g)) for rho, g in zip(rho_T[:steps], g_T[:steps], strict=True)]


def _captioned(played: Trajectory, images: list[Packed], bars: list[tuple[float, ...]], title: str) -> list[Frame]:
    """Return the frames of an episode: its start, then the result of every step with the gates of its decision."""
    frames, earned, steps = [Frame(images[0], (f"{title}start",), bars[0] and (0.0,) * len(bars[0]))], 0.0, len(bars)
    for t in range(steps):
        reward = float(played.reward[0, t])
        earned += reward
        gates = f"gates: rho {bars[t][0]:.2f}, g {bars[t][1]:.2f}" if bars[t] else ""
        first = f"{title}step {t + 1}   action {_action(played.action[0, t])}"
        lines = (first, f"reward {reward:.3g}   return {earned:.4g}   {gates}".rstrip())
        frames.append(Frame(images[t + 1], lines, bars[t], last=t == steps - 1))
    return frames


def _action(action: Tensor) -> str:
    """Return an id, or the first few numbers of an action."""
    if action.dim() == 0:
        return str(action.item())
    numbers = [f"{x:.2f}" for x in action.tolist()[:MOST_NUMBERS]]
    return ", ".join([*numbers, "..."] if len(action) > MOST_NUMBERS else numbers)


def _result(played: Trajectory) -> dict[str, Any]:
    steps = int(played.valid.sum())
    ended = bool(played.terminated[0, steps - 1])
    earned = float(torch.where(played.valid, played.reward, 0.0).sum())
    return {"steps": steps, "return": earned, "end": "terminated" if ended else "truncated"}
