"""Many episodes of one agent: the plain loop on a CPU, one captured graph per rollout on CUDA, the same worlds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from uat.acting import Behaviour, rollout
from uat.methods import Policy
from uat.noise import gumbel
from uat.training.capture import Captured, captured_or_none
from uat.types import Agent, Discrete, Noise, Reader, Recording, Simulator, Trajectory

AHEAD, MOST_BYTES = 32, 32 * 2**20
"""Batches whose noise is drawn at once on CUDA, and the memory that may be kept for it; drawing takes some more."""


class Drawn(NamedTuple):
    """The noise of successive episodes."""

    seed: int
    begin: int
    end: int
    noise: Noise

    def holds(self, seed: int, begin: int, count: int) -> bool:
        return seed == self.seed and self.begin <= begin <= self.end - count

    def next(self, begin: int, count: int) -> int:
        """How many batches of so many to draw from here. Whoever goes on gets twice as many as before, while they fit;
        whoever starts again, as with each validation, all that it came to, if they do."""
        batches, taken = (self.end - self.begin) // count, sum(value.nbytes for value in self.noise.values())
        if begin >= self.end:
            return max(1, min(AHEAD, 2 * batches) if 2 * taken <= MOST_BYTES else batches)
        again = self.end - begin
        return max(1, again // count) if taken * again <= MOST_BYTES * (self.end - self.begin) else 1


class Player:
    """Plays any episodes, given by id, `streams` at a time."""

    def __init__(
        self,
        agent: Agent[Any] | Reader | Behaviour | None,
        simulator: Simulator[Any] | Recording,
        *,
        device: torch.device,
        sampled: bool,
    ) -> None:
        self.agent, self.simulator, self.device, self.sampled = agent, simulator, device, sampled
        self.stream = "behaviour" if isinstance(agent, Behaviour) else "actions"
        """The random stream that its actions are sampled with."""
        self.captured: Captured[Trajectory] | None = None
        self.capturable = True
        """False once a capture has failed."""
        self.inputs: Noise = {}
        self.drawn: Drawn | None = None
        self.path = self._choose_path()

    def _choose_path(self) -> str:
        """Which code will run, for whoever watches: no silent fallback to a slow one."""
        if self.device.type != "cuda":
            return f"{self.device.type} eager"
        if not isinstance(self.agent, Policy):
            return "cuda graph"
        reason = self.agent.fuse()
        return f"cuda graph, {reason or ('fused rollout' if self.agent.plays(self.simulator) else 'fused step')}"

    def play(self, episode_ids: Tensor, seed: int) -> Trajectory:
        """One episode per id. Where it is captured, the next call with as many ids writes over the result."""
        if self.device.type != "cuda":
            return self._rollout(self.noise(episode_ids, seed))
        noise = self._drawn_ahead(episode_ids, seed)
        if not self.capturable:
            return self._rollout(noise)
        if self.captured is None or len(episode_ids) != len(next(iter(self.inputs.values()))):
            self.inputs = {name: value.clone() for name, value in noise.items()}
            self.captured = captured_or_none(lambda: self._rollout(self.inputs), "the rollout")
            if self.captured is None:
                self.capturable, self.path = False, self.path.replace("cuda graph", "cuda eager, no graph")
                return self._rollout(noise)
        for name, value in noise.items():
            self.inputs[name].copy_(value)
        return self.captured()

    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        noise = self.simulator.noise(episode_ids, seed)
        spec = self.simulator.spec
        played = not isinstance(self.simulator, Recording)
        if played and self.sampled and isinstance(spec.action, Discrete):
            ids_B = episode_ids.to(self.device, non_blocking=True)
            flat = gumbel(seed, self.stream, ids_B, spec.horizon * spec.action.count)
            noise["actions"] = flat.view(-1, spec.horizon, spec.action.count).float()
        return noise

    def _drawn_ahead(self, episode_ids: Tensor, seed: int) -> Noise:
        """The noise of these episodes. Where one batch follows another, it is drawn for several: its hundreds of small
        launches cost once."""
        begin, count = int(episode_ids[0]), len(episode_ids)
        if not torch.equal(episode_ids, torch.arange(begin, begin + count)):
            return self.noise(episode_ids, seed)
        drawn = self.drawn
        if drawn is None or not drawn.holds(seed, begin, count):
            batches = 1 if drawn is None or drawn.seed != seed else drawn.next(begin, count)
            end = begin + count * batches
            drawn = self.drawn = Drawn(seed, begin, end, self.noise(torch.arange(begin, end), seed))
        offset = begin - drawn.begin
        return {name: value[offset : offset + count] for name, value in drawn.noise.items()}

    def _rollout(self, noise: Noise) -> Trajectory:
        if isinstance(self.agent, torch.nn.Module):
            self.agent.eval()
        world = {name: value for name, value in noise.items() if name != "actions"}
        return rollout(self.agent, self.simulator, world, noise.get("actions"))


def play_all(
    player: Player, episodes: int, seed: int, measure: Callable[[Trajectory], dict[str, Tensor]], at_once: int = 1024
) -> dict[str, Tensor]:
    """The metrics of episodes 0 .. n-1, in batches of one size (the last is filled up and cut); still on the device.

    NaN where an episode leaves a metric undefined: means are taken over the others.
    """
    at_once = min(at_once, episodes)
    parts: dict[str, list[Tensor]] = {}
    for begin in range(0, episodes, at_once):
        measured = measure(player.play(torch.arange(begin, begin + at_once), seed))
        for name, values in measured.items():
            own = values[: episodes - begin].to(torch.float64, copy=True)  # the next play may write over what it gave
            parts.setdefault(name, []).append(own)
    return {name: torch.cat(values) for name, values in parts.items()}
