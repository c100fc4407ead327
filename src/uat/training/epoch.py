"""One epoch of rollout-then-optimize (paper, algorithm 1): a function of weights, optimizer state, seed and index.

A phase that learns from logs plays them the same way: worlds and actions of its behaviour come from (seed, id), so the
log is written nowhere and is the same whenever it is read.

On a CPU both halves run plainly; on CUDA each is captured once and replayed. The worlds are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from uat.config import RunConfig
from uat.domains import split_seed
from uat.engines.graph import Captured, InTurn, captured_or_none
from uat.engines.kernels import fused_operations
from uat.engines.rollout import Player
from uat.engines.warm_up import rehearse
from uat.episode import Trajectory
from uat.methods import Phase, Policy
from uat.noise import derive, integers
from uat.training.checkpoint import Checkpoint
from uat.training.optimizing import optimize, set_rates
from uat.training.ranks import ALONE, Ranks


class Epoch:
    """Runs the epochs of one phase, on what its player plays. Each reseeds torch's generator: call it in `seeded`."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        phase: Phase,
        player: Player,
        checkpoint: Checkpoint,
        ranks: Ranks = ALONE,
        in_turn: InTurn | None = None,
    ) -> None:
        self.config, self.policy, self.phase, self.player, self.checkpoint = config, policy, phase, player, checkpoint
        self.optimizer, self.ranks = checkpoint.optimizer, ranks
        self.train = replace(config.train, epochs=phase.epochs(config.train.epochs))
        """The settings of this phase's own length."""
        self.start_B: Tensor | None = None
        self.captured: Captured[dict[str, Tensor]] | None = None
        self.capturable = ranks.count == 1
        """False once a capture has failed; messages between ranks are not captured."""
        self.path = "eager pass" if player.device.type != "cuda" else policy.fuse_pass() or "fused pass"
        """Which code the optimize step runs, for whoever watches."""
        self.dropout_seeds = policy.dropout_seeds()
        self.in_turn = in_turn
        """With others that train side by side: their optimize steps take turns."""
        self.rehearsed, self.rehearsed_with = False, list[Callable[[], Callable[[], object]]]()
        """Whether kernels have been compiled; rehearsals of what follows some epochs, as validations do: its kernels
        are compiled with those of the first."""
        self.rate: float | None = None
        """The share of their highest at which learning rates are; None: not set yet."""

    def run(self, index: int, epoch: int) -> dict[str, Tensor]:
        """Play the index-th batch of worlds, then one optimizer step at the rates of this epoch (the first is 1)."""
        c = self.config
        ids = self.ranks.share(torch.arange(index * c.train.batch_size, (index + 1) * c.train.batch_size))
        self._place(ids)
        if self.capturable and not self.rehearsed:
            self._rehearse(len(ids))
        trajectory = self.player.play(ids, split_seed("train", c.seed))
        self.rate = set_rates(self.optimizer, self.train, epoch, self.rate)
        if self.capturable and self.captured is None and self.player.captured is not None:
            tensors = self.checkpoint.tensors().values()
            self.captured = captured_or_none(lambda: self.optimize(trajectory), "the optimize step", preserve=tensors)
            self.capturable = self.captured is not None
        dropout = derive(c.seed, "dropout", index, *([self.ranks.rank] if self.ranks.rank else []))
        self.policy.reseed(dropout, self.dropout_seeds)
        if self.captured is None:
            return self.optimize(trajectory)
        numbers = self.captured() if self.in_turn is None else self.in_turn(self.captured)
        kept = torch.stack(list(numbers.values()))  # the next epoch writes over them
        return dict(zip(numbers, kept.unbind(), strict=True))

    def optimize(self, trajectory: Trajectory) -> dict[str, Tensor]:
        self.policy.train()
        with fused_operations():
            batch = self.policy.spec.clock.batch(trajectory)
            batch.start = self.start_B
            return optimize(self.phase, batch, self.optimizer, self.train.clip, self.ranks)

    def _rehearse(self, episodes: int) -> None:
        def prepare() -> Callable[[], None]:
            play, others = self.player.rehearsal(episodes), [rehearsal() for rehearsal in self.rehearsed_with]

            def everything() -> None:
                self.optimize(play())
                for other in others:
                    other()

            return everything

        self.rehearsed = True
        key = repr(replace(self.config, seed=0)), self.phase.name, self.player.path, self.path, self.in_turn is None
        rehearse(prepare, self.player.device, key, preserve=self.checkpoint.tensors().values())

    def close(self) -> None:
        """Give back what was captured."""
        if self.captured is not None:
            self.captured.close()
            self.captured = None

    def _place(self, ids: Tensor) -> None:
        """Where these episodes start in the position table, written into the same tensor each time."""
        if not self.config.train.random_start:
            return
        horizon = self.policy.spec.steps
        spare = max(0, (getattr(self.config.method, "max_positions", None) or horizon + 1) - horizon)
        start_B = integers(self.config.seed, "start", ids, 1, below=spare + 1)[:, 0].to(self.player.device)
        self.start_B = start_B if self.start_B is None else self.start_B.copy_(start_B)
