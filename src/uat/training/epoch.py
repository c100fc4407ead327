"""One update of rollout-then-optimize (paper, algorithm 1): a function of weights, optimizer state, seed and index.

A phase that learns from logs generates them the same way: the worlds and the actions of its behaviour policy depend on
(seed, id) alone, so the log is never stored and can be regenerated at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from uat.config import RunConfig
from uat.domains import split_seed
from uat.engines import Engine, SerialReplay
from uat.engines.kernels import compiles
from uat.engines.rollout import RolloutRunner
from uat.engines.update import UpdateRunner, alone
from uat.engines.warm_up import warm_up
from uat.episode import Trajectory
from uat.methods import Phase
from uat.nn.blocks import TransformerConfig
from uat.noise import derive, integers
from uat.training.checkpoint import Checkpoint
from uat.training.optimizing import set_rates
from uat.training.pace import Pace
from uat.training.ranks import ALONE, Ranks
from uat.training.reusing import ReusingUpdates


class Epoch:
    """Run the updates of one phase, each on the episodes of one rollout. Every update reseeds torch's generator, so
    call `run` inside `seeded`."""

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        phase: Phase,
        rollouts: RolloutRunner,
        checkpoint: Checkpoint,
        ranks: Ranks = ALONE,
        serial: SerialReplay | None = None,
        steps: int = 0,
    ) -> None:
        """steps: environment steps before the phase's next epoch."""
        self.config, self.phase, self.rollouts, self.checkpoint, self.ranks = config, phase, rollouts, checkpoint, ranks
        self.optimizer = checkpoint.optimizer
        self.train = replace(config.train, epochs=phase.epochs(config.train.epochs))
        """Training settings with the number of epochs of this phase."""
        self.updates = UpdateRunner(
            engine,
            phase,
            self.optimizer,
            config.train.clip,
            preserve=lambda: checkpoint.tensors().values(),
            add_up=alone if ranks.count == 1 else ranks.sum,
            serial=serial,
        )
        self.path = "eager pass" if rollouts.device.type != "cuda" else engine.update_path
        """Name of the code path of the update, shown with the progress."""
        self.warm, self.warmed_up_with = False, list[Callable[[], Callable[[], object]]]()
        """Whether the kernels have been compiled; and other work between updates, such as validations, whose kernels
        are compiled along with those of the first update."""
        self.rate: float | None = None
        """Factor on the peak learning rates; None: not set yet."""
        self.reusing: ReusingUpdates | None = None
        if phase.reuse is not None:
            self.warm, self.path = True, "several updates"
            self.reusing = ReusingUpdates(engine, phase.reuse, self.optimizer, config.train.clip, self.updates.add_up)
        self.steps = steps
        """Environment steps so far, in phases that count them."""
        self.pace = Pace(rollouts.simulator, ahead=engine.runs_ahead)

    def run(self, index: int, epoch: int) -> dict[str, Tensor]:
        """Play the index-th batch of worlds, then learn from it with the learning rates of this epoch.

        epoch: counted from 1.
        """
        c = self.config
        ids = self.ranks.share(torch.arange(index * c.train.batch_size, (index + 1) * c.train.batch_size))
        self._draw_starts(ids)
        self._warm_up(len(ids))
        if self.reusing is not None:
            return self._reuse(ids, index, epoch)
        trajectory = self.rollouts.play(ids, split_seed("train", c.seed))
        self.rate = set_rates(self.optimizer, self.train, epoch, self.rate)
        dropout = derive(c.seed, "dropout", index, *([self.ranks.rank] if self.ranks.rank else []))
        return self.updates.update(trajectory, dropout, capture=self.rollouts.captured is not None)

    def _reuse(self, ids: Tensor, index: int, epoch: int) -> dict[str, Tensor]:
        """Play these episodes and take several updates on them; all processes get the same seed."""
        with self.pace.playing():
            trajectory = self.rollouts.play(ids, split_seed("train", self.config.seed))
        with self.pace.learning():
            numbers = self._several_updates(trajectory, index, epoch, place=int(ids[0]) - index * self.train.batch_size)
        self.steps += int(numbers["steps"])
        self.pace.add(numbers)
        return numbers

    def _several_updates(self, trajectory: Trajectory, index: int, epoch: int, *, place: int) -> dict[str, Tensor]:
        assert self.reusing is not None
        t = self.train
        share_done = (epoch - 1) / max(1, t.epochs - 1)
        share_done = min(1.0, max(share_done, 0.0 if t.steps is None else self.steps / t.steps))
        self.rate = set_rates(self.optimizer, t, epoch, self.rate, share_done=share_done)
        return self.reusing.update(
            trajectory,
            derive(self.config.seed, "dropout", index),
            place=place,
            episodes=t.batch_size,
            share_done=share_done,
        )

    def _warm_up(self, episodes: int) -> None:
        if self.warm or not (self.updates.capturable and compiles(self.rollouts.device)):
            return

        def prepare() -> Callable[[], None]:
            play, others = self.rollouts.prepare(episodes), [other() for other in self.warmed_up_with]

            def everything() -> None:
                self.updates.plain(play())
                for other in others:
                    other()

            return everything

        self.warm, serial = True, self.updates.serial is None
        key = repr(replace(self.config, seed=0)), self.phase.name, self.rollouts.path, self.path, serial
        warm_up(prepare, self.rollouts.device, key, preserve=self.checkpoint.tensors().values())

    def close(self) -> None:
        """Free the captured graphs."""
        self.updates.close()

    def _draw_starts(self, ids: Tensor) -> None:
        """Draw the start of each episode in the table of positions."""
        if not self.config.train.random_start:
            return
        horizon, method = self.rollouts.simulator.spec.steps, self.config.method
        rows = method.max_positions if isinstance(method, TransformerConfig) else None
        spare = max(0, (rows or horizon + 1) - horizon)
        start_B = integers(self.config.seed, "start", ids, 1, below=spare + 1)[:, 0]
        self.updates.start_at(start_B.to(self.rollouts.device))
