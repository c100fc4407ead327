"""The timed cases: rollout, optimize and epoch as in training (the single step is in `steps`). Paths:

recompute   baseline: the whole history is recomputed at each step, in eager mode
cached      with a KV cache, in eager mode
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
    "rollout": "draw a batch of worlds and play one episode in each",
    "optimize": "one optimizer step on the episodes of a batch: loss, gradient, clipping, Adam",
    "epoch": "rollout, then optimize",
    "together": "an epoch of one seed, and of three seeds side by side (mean of fifty epochs)",
    "step": "one decision in every stream, with `context` steps including the present one",
    "memory": "peak CUDA memory of an epoch and of a rollout, and the size of a stream's state",
    "loss": "forward and backward pass of cross-entropy over many items, with all logits at once or in blocks of rows",
    "cold": "the first call, including capture, compilation and packing of weights",
}
"""Each case, with a description of one call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    preset: str = "paper"
    batch: int = 256
    """Number of worlds in a rollout, an optimize step and an epoch."""
    context: int = 60
    """Steps of an episode, and the context at which steps of different batch sizes are compared."""
    batches: tuple[int, ...] = (1, 64, 1024)
    """Numbers of streams in a step."""
    contexts: tuple[int, ...] = (60, 256, 1024, 4096)
    """Context lengths of a step with one stream."""
    items: tuple[int, ...] = (10_000, 60_000)
    """Vocabulary sizes of the loss."""
    rows: tuple[int, int] = (256, 50)
    """Episodes and steps of the loss."""

    def steps(self) -> list[tuple[int, int]]:
        """(batch, context) of every timed step."""
        return list(dict.fromkeys([*((b, self.context) for b in self.batches), *((1, c) for c in self.contexts)]))


FULL = Sizes()
QUICK = Sizes(preset="smoke", batch=4, context=6, batches=(1, 3), contexts=(6, 12), items=(50, 200), rows=(4, 6))


def settings(method: str, sizes: Sizes, precision: str) -> RunConfig:
    changes = {"train.batch_size": sizes.batch, "train.precision": precision, "domain.horizon": sizes.context}
    return override(recipe("darkroom", method, sizes.preset), changes)


SEEDS = 3
"""Number of seeds that train side by side."""
EPOCHS = 50
"""Number of epochs that are timed as one call, since training launches epochs without waiting for the GPU."""


class Training:
    """One training on one path, as the trainer runs it; the slow paths are built from the same parts.

    Each call plays new worlds, with noise drawn as in training.
    """

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
        """Why this path is unsupported; None if it is supported."""
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
        """An optimize step on episodes that are already played."""
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
    """The call of a case; None if the case does not have this path."""
    if case == "optimize":
        return None if training.path == "recompute" else training.optimizing()
    return Call(training.rollout if case == "rollout" else training.epoch)


def together(config: RunConfig, seeds: int, device: torch.device) -> Call | str:
    """`EPOCHS` epochs of every seed, each on its own CUDA stream as in `train_together`; or why that is unsupported."""
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
