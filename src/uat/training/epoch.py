"""One update of rollout-then-optimize (paper, algorithm 1): a function of weights, optimizer state, seed and index.

A phase that learns from logs plays them the same way: worlds and actions of its behaviour come from (seed, id), so the
log is written nowhere and is the same whenever it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from uat.config import RunConfig
from uat.domains import split_seed
from uat.engines import Engine
from uat.engines.graph import SerialReplay
from uat.engines.rollout import RolloutRunner
from uat.engines.update import UpdateRunner, alone
from uat.engines.warm_up import warm_up
from uat.methods import Phase
from uat.noise import derive, integers
from uat.training.checkpoint import Checkpoint
from uat.training.optimizing import set_rates
from uat.training.ranks import ALONE, Ranks


class Epoch:
    """Runs the updates of one phase, on the episodes of its rollouts. Each reseeds torch's generator: call it in
    `seeded`."""

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        phase: Phase,
        rollouts: RolloutRunner,
        checkpoint: Checkpoint,
        ranks: Ranks = ALONE,
        serial: SerialReplay | None = None,
    ) -> None:
        self.config, self.phase, self.rollouts, self.checkpoint, self.ranks = config, phase, rollouts, checkpoint, ranks
        self.optimizer = checkpoint.optimizer
        self.train = replace(config.train, epochs=phase.epochs(config.train.epochs))
        """The settings of this phase's own length."""
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
        """Which code the update runs, for whoever watches."""
        self.warm, self.warmed_up_with = False, list[Callable[[], Callable[[], object]]]()
        """Whether kernels have been compiled; what else is launched between updates, as validations are: its kernels
        are compiled with those of the first update."""
        self.rate: float | None = None
        """The share of their highest at which learning rates are; None: not set yet."""

    def run(self, index: int, epoch: int) -> dict[str, Tensor]:
        """Play the index-th batch of worlds, then one optimizer step at the rates of this epoch (the first is 1)."""
        c = self.config
        ids = self.ranks.share(torch.arange(index * c.train.batch_size, (index + 1) * c.train.batch_size))
        self._place(ids)
        self._warm_up(len(ids))
        trajectory = self.rollouts.play(ids, split_seed("train", c.seed))
        self.rate = set_rates(self.optimizer, self.train, epoch, self.rate)
        dropout = derive(c.seed, "dropout", index, *([self.ranks.rank] if self.ranks.rank else []))
        return self.updates.update(trajectory, dropout, capture=self.rollouts.captured is not None)

    def _warm_up(self, episodes: int) -> None:
        if self.warm or not self.updates.capturable:
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
        """Give back what was captured."""
        self.updates.close()

    def _place(self, ids: Tensor) -> None:
        """Draw where these episodes start in the position table."""
        if not self.config.train.random_start:
            return
        horizon = self.rollouts.simulator.spec.steps
        spare = max(0, (getattr(self.config.method, "max_positions", None) or horizon + 1) - horizon)
        start_B = integers(self.config.seed, "start", ids, 1, below=spare + 1)[:, 0]
        self.updates.start_at(start_B.to(self.rollouts.device))
