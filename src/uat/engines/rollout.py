"""Rollouts of many episodes by one agent: a plain loop on a CPU, one captured graph per rollout on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from uat.acting import Behaviour, rollout
from uat.contracts import Agent, Reader, Recording, Simulator
from uat.distributions import action_noise
from uat.engines import Engine, plan
from uat.engines.graph import Captured, captured_or_none
from uat.engines.kernels import fused_operations
from uat.engines.worlds import fused_simulator
from uat.episode import Noise, Trajectory
from uat.methods import Policy

AHEAD, MOST_BYTES = 32, 32 * 2**20
"""Most batches whose noise is drawn at once on CUDA, and most bytes stored for them; drawing needs some more."""
ALIGNED = 16
"""Alignment in bytes of the tensors in a row of noise."""


class Place(NamedTuple):
    """Position of a tensor in a row, in bytes."""

    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]


Places = dict[str, Place]


def side_by_side(noise: Noise, batches: int) -> tuple[Tensor, Places]:
    """Pack the noise of several batches into a matrix of bytes: one row per batch, so that one copy moves a batch."""
    places, at = Places(), 0
    for name, value in noise.items():
        end = at + value.nbytes // batches
        places[name] = Place(at, end, value.dtype, (len(value) // batches, *value.shape[1:]))
        at = -(-end // ALIGNED) * ALIGNED
    device = next(iter(noise.values())).device
    rows = torch.empty(batches, at, dtype=torch.uint8, device=device)
    for name, value in noise.items():
        rows[:, places[name].begin : places[name].end] = value.reshape(batches, -1).view(torch.uint8)
    return rows, places


def apart(row: Tensor, places: Places) -> Noise:
    """Return the tensors packed in one row, as views of it."""
    return {name: row[p.begin : p.end].view(p.dtype).view(p.shape) for name, p in places.items()}


class Drawn(NamedTuple):
    """The noise of successive batches of episodes, drawn ahead."""

    seed: int
    begin: int
    end: int
    each: int
    rows: Tensor
    """One row per batch; see `side_by_side`."""
    places: Places

    def holds(self, seed: int, begin: int, count: int) -> bool:
        same = seed == self.seed and count == self.each and (begin - self.begin) % count == 0
        return same and self.begin <= begin < self.end

    def next(self, begin: int, count: int) -> int:
        """Return how many batches of `count` episodes to draw from episode `begin` on.

        A caller that continues gets twice as many batches as before, as long as they fit into memory. A caller that
        starts over, as each validation does, gets all batches up to the previous end, if they fit.
        """
        batches, taken = (self.end - self.begin) // count, self.rows.nbytes
        if (begin - self.begin) % count:
            return 1  # not a successor of the earlier batches
        if begin >= self.end:
            return max(1, min(AHEAD, 2 * batches) if 2 * taken <= MOST_BYTES else batches)
        episodes = self.end - begin
        return max(1, episodes // count) if taken * episodes <= MOST_BYTES * (self.end - self.begin) else 1


class RolloutRunner:
    """Play episodes, given by id, of one agent in one simulator."""

    def __init__(
        self,
        agent: Agent[Any] | Reader | Behaviour | None,
        simulator: Simulator[Any] | Recording,
        *,
        device: torch.device,
        sampled: bool,
    ) -> None:
        self.agent, self.device, self.sampled = plan(agent) if isinstance(agent, Policy) else agent, device, sampled
        self.simulator = fused_simulator(simulator, device)
        self.stream = "behaviour" if isinstance(agent, Behaviour) else "actions"
        """Name of the random stream for sampling actions."""
        self.captured: Captured[Trajectory] | None = None
        self.capturable = not (isinstance(self.simulator, Simulator) and self.simulator.on_host)
        """False for worlds that must not be captured, and after a failed capture."""
        self.row, self.places = torch.empty(0), Places()
        """Noise of the captured rollout, always written into the same tensor."""
        self.drawn: Drawn | None = None
        self.path = self._choose_path()

    def _choose_path(self) -> str:
        """Name the code path, so that no fallback to a slow path is silent."""
        if self.device.type != "cuda":
            return f"{self.device.type} eager"
        how = "cuda graph" if self.capturable else "cuda eager, no graph"
        return f"{how}, {self.agent.rollout_path(self.simulator)}" if isinstance(self.agent, Engine) else how

    def play(self, episode_ids: Tensor, seed: int) -> Trajectory:
        """Play one episode per id. On CUDA, the next call with the same number of ids overwrites the result."""
        if self.device.type != "cuda":
            return self._rollout(self.noise(episode_ids, seed))
        row, places = self._drawn_ahead(episode_ids, seed)
        if not self.capturable:
            return self._rollout(apart(row, places))
        if self.captured is None or self.places != places:
            self.row, self.places = row.clone(), places
            noise = apart(self.row, places)
            self.captured = captured_or_none(lambda: self._rollout(noise), "the rollout")
            if self.captured is None:
                self.capturable, self.path = False, self.path.replace("cuda graph", "cuda eager, no graph")
                return self._rollout(apart(row, places))
        self.row.copy_(row)
        return self.captured()

    def prepare(self, episodes: int) -> Callable[[], Trajectory]:
        """Return a function with the launches of `play` for this number of episodes; its noise is drawn now."""
        noise = self.noise(torch.arange(episodes), 0)
        return lambda: self._rollout(noise)

    def close(self) -> None:
        """Free the captured graph, the drawn noise and what the worlds hold. The next `play` makes them again."""
        if self.captured is not None:
            self.captured.close()
        self.captured = self.drawn = None
        if isinstance(self.simulator, Simulator):
            self.simulator.close()

    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        with fused_operations():
            noise = self.simulator.noise(episode_ids, seed)
            spec = self.simulator.spec
            if self.sampled and not isinstance(self.simulator, Recording):
                ids_B = episode_ids.to(self.device, non_blocking=True)
                drawn = action_noise(spec, seed, self.stream, ids_B, spec.steps)
                if drawn is not None:
                    noise["actions"] = drawn
            return noise

    def _drawn_ahead(self, episode_ids: Tensor, seed: int) -> tuple[Tensor, Places]:
        """Return the packed noise of these episodes. For successive batches, draw the noise of several at once, which
        saves launches."""
        begin, count = int(episode_ids[0]), len(episode_ids)
        if not torch.equal(episode_ids, torch.arange(begin, begin + count)):
            rows, places = side_by_side(self.noise(episode_ids, seed), 1)
            return rows[0], places
        drawn = self.drawn
        if drawn is None or not drawn.holds(seed, begin, count):
            batches = 1 if drawn is None or drawn.seed != seed else drawn.next(begin, count)
            end = begin + count * batches
            rows, places = side_by_side(self.noise(torch.arange(begin, end), seed), batches)
            drawn = self.drawn = Drawn(seed, begin, end, count, rows, places)
        return drawn.rows[(begin - drawn.begin) // count], drawn.places

    def _rollout(self, noise: Noise) -> Trajectory:
        world = {name: value for name, value in noise.items() if name != "actions"}
        with fused_operations():
            if isinstance(self.agent, Engine):
                return self.agent.rollout(self.simulator, world, noise.get("actions"))
            return rollout(self.agent, self.simulator, world, noise.get("actions"))


AT_ONCE = 1024
"""Episodes that are played and measured at a time."""


def play_all(
    player: RolloutRunner,
    episodes: int,
    seed: int,
    measure: Callable[[Trajectory], dict[str, Tensor]],
    at_once: int = AT_ONCE,
) -> dict[str, Tensor]:
    """Return the metrics of episodes 0 .. n-1, still on the device. The last batch is filled up to the same size and
    its extra episodes are dropped.

    A metric is NaN if an episode leaves it undefined; means skip such episodes.
    """
    at_once = min(at_once, episodes)
    parts: dict[str, list[Tensor]] = {}
    for begin in range(0, episodes, at_once):
        measured = measure(player.play(torch.arange(begin, begin + at_once), seed))
        for name, values in measured.items():
            own = values[: episodes - begin].to(
                torch.float64, copy=True
            )  # the next call of play may overwrite the trajectory
            parts.setdefault(name, []).append(own)
    return {name: torch.cat(values) for name, values in parts.items()}
