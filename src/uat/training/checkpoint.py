"""Checkpoints of a training: everything needed to resume it with the same numbers.

Random generators are not saved: worlds, sampled actions, position offsets and dropout of an epoch depend on
(seed, epoch) alone.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from uat import numerics
from uat.config import TrainConfig, from_json
from uat.manifest import manifest
from uat.methods import Policy
from uat.nn.encoders import Normalizer
from uat.runs import Run, save_policy
from uat.tensor_files import RunError, copied, first_not_finite, read_tensors, write_tensors

STATE = "state/train.safetensors"
LOGS = ("metrics.jsonl", "timing.jsonl")
SAVE_SECONDS = 5.0
"""Shortest time between two checkpoints; without it, short trainings would spend most of their time saving."""


class DivergedError(ValueError):
    """A loss, gradient or weight became NaN or infinite during training."""

    def __init__(self, what: str, run: Run) -> None:
        super().__init__(
            f"{what}; {run.path} keeps the last checkpoint; "
            f"train again with a learning rate below train.lr={run.config.train.lr}"
        )


@dataclass(slots=True)
class TrainingProgress:
    """Progress of a training, saved with its tensors."""

    phase: int = 0
    epoch: int = 0
    """Epochs done in this phase."""
    total: int = 0
    """Epochs done in all phases: the index of the next epoch's worlds."""
    steps: int = 0
    """Environment steps done, in phases that count them."""
    best_value: float | None = None
    best_epoch: int = 0
    settled: bool = True
    """Whether the last epoch was validated. Training stops and is saved only after a validated epoch."""
    finished: bool = False
    numerics: str | None = None
    """Revisions of the builds that trained the weights, such as "cuda-2" (see `uat.numerics`); None: unknown."""

    def advance(self, train: TrainConfig, steps: int | None = None) -> None:
        """Count a finished epoch. Epochs are validated at intervals, and the last one always.

        steps: environment steps of the epoch, in a phase that counts them.
        """
        self.epoch, self.total, self.steps = self.epoch + 1, self.total + 1, self.steps + (steps or 0)
        self.settled = self.epoch % train.validate_every == 0 or self.is_last(train, counted=steps is not None)

    def is_last(self, train: TrainConfig, *, counted: bool) -> bool:
        """Whether the phase has had all of its epochs; counted: it may end after a number of environment steps."""
        enough = counted and train.steps is not None and self.steps >= train.steps
        return enough or self.epoch >= train.epochs

    def begin(self, phase: int) -> None:
        """Start a phase, or resume it if it is the interrupted one."""
        if phase != self.phase:
            self.phase, self.epoch, self.best_value, self.best_epoch = phase, 0, None, 0


def progress_of(run: Run) -> TrainingProgress | None:
    """Return the progress of a run's training; None if its folder holds only a policy."""
    if run.file(STATE).exists():
        return read_state(run).progress
    return TrainingProgress() if any(run.file(name).exists() for name in LOGS) else None


@dataclass(frozen=True, slots=True)
class State:
    """A checkpoint read from disk."""

    tensors: dict[str, Tensor]
    progress: TrainingProgress
    meta: dict[str, Any]
    """The metadata: training progress, identity of the run, checksum of the log, number of CPU threads."""


def read_state(run: Run) -> State:
    """Read the last checkpoint; raise an error if it belongs to another run or does not match the log."""
    file = run.file(STATE)
    tensors, meta = read_tensors(file)
    if (owner := meta.get("run", run.config.identity())) != run.config.identity():
        raise RunError(f"{file} belongs to another run ({owner!r:.40}), not to {run.file('config.json')}")
    try:
        progress = from_json(
            TrainingProgress, {item.name: meta[item.name] for item in fields(TrainingProgress) if item.name in meta}, ""
        )
    except ValueError as error:
        raise RunError(f"{file}: {error}") from None
    weights = {name: tensor for name, tensor in tensors.items() if name.startswith(("policy.", "best."))}
    if problem := first_not_finite(weights):
        raise RunError(f"{file}: {problem}, where only finite numbers can be")
    if (logged := meta.get("metrics")) is not None:
        check_log(run, logged, file)
    return State(tensors, progress, meta)


def check_log(run: Run, logged: Any, state: Path) -> None:
    """Raise an error if the log up to the checkpoint has changed since it was written."""
    lines = run.lines("metrics.jsonl")
    if logged != checksum(lines[: logged.get("rows", 0)] if isinstance(logged, dict) else []):
        raise RunError(
            f"{run.file('metrics.jsonl')} was changed after it was written: its rows differ from the "
            f"{logged.get('rows') if isinstance(logged, dict) else '?'} rows logged before the checkpoint in {state}"
        )


def checksum(lines: Sequence[str]) -> dict[str, Any]:
    """Return the number of rows of a log and their checksum."""
    return {"rows": len(lines), "checksum": hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()}


class Checkpoint:
    """The tensors that training changes: save them to the run folder and restore them."""

    def __init__(
        self, run: Run, policy: Policy, optimizer: torch.optim.Optimizer, others: nn.Module | None = None
    ) -> None:
        """others: weights and statistics of the objective."""
        self.run, self.policy, self.optimizer, self.others = run, policy, optimizer, others
        self.best: dict[str, Tensor] = {}
        self.saved_threads: int | None = None
        """Number of CPU threads recorded in the restored checkpoint, if any."""
        self._saved_at = -math.inf

    def tensors(self) -> dict[str, Tensor]:
        """Return weights and optimizer state by name."""
        tensors = {f"policy.{name}": tensor for name, tensor in self.policy.state_dict().items()}
        named = list(self.policy.named_parameters())
        if self.others is not None:
            tensors |= {f"objective.{name}": tensor for name, tensor in self.others.state_dict().items()}
            named += [(f"objective.{name}", parameter) for name, parameter in self.others.named_parameters()]
        for name, parameter in named:
            for key, tensor in self.optimizer.state.get(parameter, {}).items():
                tensors[f"adam.{key}.{name}"] = tensor
        return tensors

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the policy's current weights."""
        return copied(self.policy.state_dict())

    @property
    def exists(self) -> bool:
        """Whether the run folder holds a checkpoint."""
        return self.run.file(STATE).exists()

    @property
    def due(self) -> bool:
        """Whether no checkpoint was saved in the last `SAVE_SECONDS`."""
        return time.monotonic() - self._saved_at >= SAVE_SECONDS

    def save(self, progress: TrainingProgress) -> None:
        """Save if a checkpoint is due or training has finished; raise an error, and save nothing, if a weight is not
        finite."""
        if not progress.finished and not self.due:
            return
        for weights in (self.policy.state_dict(), self.best):
            if problem := first_not_finite(copied(weights, torch.device("cpu"))):
                raise DivergedError(f"{problem} after epoch {progress.total}", self.run)
        self._saved_at = time.monotonic()
        self._save_policy()
        best = {f"best.{name}": tensor for name, tensor in self.best.items()}
        about = {"run": self.run.config.identity(), "threads": torch.get_num_threads()}
        logged = checksum(self.run.lines("metrics.jsonl"))
        write_tensors(
            self.run.file(STATE), {**self.tensors(), **best}, {**asdict(progress), **about, "metrics": logged}
        )

    def restore(self) -> TrainingProgress:
        """Restore the last checkpoint and drop the log rows after it; those epochs are trained again."""
        now = numerics.current(next(self.policy.parameters()).device.type)
        if self.exists:
            progress = self._load()
            progress.numerics = numerics.joined(progress.numerics, now)
        else:
            progress = TrainingProgress(numerics=now)
        for name in LOGS:
            rows = self.run.rows(name)
            self.run.write_rows(name, [row for row in rows if row["epoch"] <= progress.total])
        if not self.run.file("manifest.json").exists():
            self.run.write_json("manifest.json", manifest())
        return progress

    def _load(self) -> TrainingProgress:
        file = self.run.file(STATE)
        state = read_state(self.run)
        saved = state.tensors
        if self.run.config.train.standardise:
            self.policy.expect(name.removeprefix("policy.") for name in saved if name.startswith("policy."))
            if not any(isinstance(module, Normalizer) for module in self.policy.modules()):
                raise RunError(f"{file} does not fit this run: the statistics of train.standardise=True are missing")
        own = self.tensors()
        if missing := sorted(own.keys() - saved.keys()):
            raise RunError(f"{file} does not fit this run: {missing[0]} is missing")
        for name, tensor in own.items():
            if saved[name].shape != tensor.shape:
                shape, expected = tuple(saved[name].shape), tuple(tensor.shape)
                raise RunError(f"{file} does not fit this run: {name} has shape {shape}, expected {expected}")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(saved[name])
        device = next(self.policy.parameters()).device
        self.best = {name[5:]: t.to(device) for name, t in saved.items() if name.startswith("best.")}
        self.saved_threads = state.meta.get("threads")
        self._save_policy()  # a kill may have left the policy of a later checkpoint
        return state.progress

    def _save_policy(self) -> None:
        file, config = self.run.file("policy.safetensors"), self.run.config
        save_policy(file, self.policy, config.method_name, weights=self.best, domain=config.domain)


def adopt(run: Run, source: Run) -> None:
    """Copy another run's checkpoint and logs into a run that has no checkpoint. Loading it writes the policy file."""
    if run.file(STATE).exists():
        return
    state = read_state(source)
    for name in LOGS:
        run.write_rows(name, [row for row in source.rows(name) if row["epoch"] <= state.progress.total])
    about = {"run": run.config.identity(), "metrics": checksum(run.lines("metrics.jsonl"))}
    write_tensors(run.file(STATE), state.tensors, {**state.meta, **about})
