"""What is timed: rollout, optimize and epoch as training runs them; `steps` has the single step. Paths:

recompute   the slow twin: the whole history at each step, launch by launch
cached      keys and values are kept, launch by launch
graph       cached, captured as CUDA graphs
fast        the fused step, or a rollout in one launch; on CUDA captured as well
"""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from uat.acting import rollout
from uat.bench.recompute import Recomputing
from uat.bench.timing import Call
from uat.config import RunConfig, override
from uat.domains import split_seed
from uat.engines.graph import SerialReplay, own_stream
from uat.episode import Trajectory
from uat.recipes import recipe
from uat.runs import Run
from uat.training.trainer import Trainer

CASES = {
    "rollout": "draw the worlds of a batch and play one episode in each",
    "optimize": "one optimizer step on the episodes of a batch: loss, gradient, clipping, Adam",
    "epoch": "rollout, then optimize",
    "together": "an epoch of one seed, and of three seeds side by side: the mean of fifty",
    "step": "one decision in every stream, when `context` steps have been seen with it",
    "memory": "most CUDA memory of an epoch and of a rollout, and what a stream's past takes",
    "loss": "cross-entropy over so many items, forwards and backwards, with whole logits and some rows at a time",
    "cold": "the first call, with all that it captures, compiles or packs",
}
"""Every case, and what one call of it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    preset: str = "paper"
    batch: int = 256
    """Worlds of a rollout, an optimize step and an epoch."""
    context: int = 60
    """Steps of an episode, and the context at which batches of a step are compared."""
    batches: tuple[int, ...] = (1, 64, 1024)
    """Streams of a step."""
    contexts: tuple[int, ...] = (60, 256, 1024, 4096)
    """Context of a step in one stream."""
    items: tuple[int, ...] = (10_000, 60_000)
    """Sizes of the vocabulary that a loss is over."""
    rows: tuple[int, int] = (256, 50)
    """Episodes and steps of that loss."""

    def steps(self) -> list[tuple[int, int]]:
        """(batch, context) of every step that is timed."""
        return list(dict.fromkeys([*((b, self.context) for b in self.batches), *((1, c) for c in self.contexts)]))


FULL = Sizes()
QUICK = Sizes(preset="smoke", batch=4, context=6, batches=(1, 3), contexts=(6, 12), items=(50, 200), rows=(4, 6))


def settings(method: str, sizes: Sizes, precision: str) -> RunConfig:
    changes = {"train.batch_size": sizes.batch, "train.precision": precision, "domain.horizon": sizes.context}
    return override(recipe("darkroom", method, sizes.preset), changes)


SEEDS = 3
"""Seeds that train side by side."""
EPOCHS = 50
"""Epochs of each that are timed as one, as training hands them over without waiting."""


class Training:
    """One training on one path, as the trainer runs it; the slow paths are put together from the same parts. Each call
    has worlds of its own, whose noise is drawn as in training."""

    def __init__(
        self,
        config: RunConfig,
        path: str,
        device: torch.device,
        *,
        concurrent_policies: int = 1,
        serial: SerialReplay | None = None,
    ) -> None:
        prefer = "fast" if path == "fast" else "plain"
        with tempfile.TemporaryDirectory() as folder:
            run = Run.create(config, Path(folder) / "run")
            trainer = Trainer(run, device, prefer=prefer, concurrent_policies=concurrent_policies, serial=serial)
        self.path, self.device = path, device
        self.policy, self.rollouts, engine = trainer.policy, trainer.rollouts, trainer.engine
        self.reason = engine.refused
        """Why this path cannot be taken; None if it can."""
        self._epoch = trainer.epoch(engine.learner.phases()[0])
        if path != "fast":
            self.rollouts.simulator = trainer.domain.simulator("train", device)
        self._batches, self._batch_size = itertools.count(), config.train.batch_size
        self._seed = split_seed("train", config.seed)
        self._agent: Any = Recomputing(self.policy) if path == "recompute" else engine
        self._captured = device.type == "cuda" and path in ("graph", "fast")

    def rollout(self) -> Trajectory:
        begin = next(self._batches) * self._batch_size
        ids = torch.arange(begin, begin + self._batch_size)
        if self._captured:
            return self.rollouts.play(ids, self._seed)
        noise = self.rollouts.noise(ids.to(self.device), self._seed)
        sampling = noise.pop("actions", None)
        self.policy.eval()
        return rollout(self._agent, self.rollouts.simulator, noise, sampling)

    def epoch(self) -> None:
        if self._captured:
            self._epoch.run(next(self._batches), 1)
        else:
            self._epoch.updates.plain(self.rollout())

    def optimizing(self) -> Call:
        """An optimize step on episodes that have been played."""
        updates = self._epoch.updates
        if self._captured:
            self.epoch()
            if updates.captured is not None:
                return Call(updates.captured)
        trajectory = self.rollout()
        return Call(lambda: updates.plain(trajectory))


def training_paths(device: torch.device) -> tuple[str, ...]:
    return ("recompute", "cached", "graph", "fast") if device.type == "cuda" else ("recompute", "cached", "fast")


def training_call(case: str, training: Training) -> Call | None:
    """The call of a case; None if the path is no path of that case."""
    if case == "optimize":
        return None if training.path == "recompute" else training.optimizing()
    return Call(training.rollout if case == "rollout" else training.epoch)


def together(config: RunConfig, seeds: int, device: torch.device) -> Call | str:
    """`EPOCHS` epochs of every seed, on streams of their own, as `train_together` has them; or why there are none."""
    serial = SerialReplay()
    trainings = [
        Training(override(config, {"seed": seed}), "fast", device, concurrent_policies=seeds, serial=serial)
        for seed in range(seeds)
    ]
    if trainings[0].reason is not None:
        return trainings[0].reason
    streams = [own_stream(device) for _ in trainings]

    def run() -> None:
        for _ in range(EPOCHS):
            for training, stream in zip(trainings, streams, strict=True):
                with torch.cuda.stream(stream):
                    training.epoch()

    return Call(run)
