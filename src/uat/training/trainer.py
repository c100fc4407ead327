"""Rollout-then-optimize (paper, algorithm 1), with validation, best checkpoint, patience and exact resume.

An epoch is a function of the train state alone: its worlds, sampled actions, position offsets and dropout
all come from (seed, epoch). So a run that was killed and resumed gives the numbers of one that was not.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uat.config import RunConfig
from uat.domains import Domain, split_seed
from uat.methods import METHODS, Phase, Policy
from uat.noise import derive, integers
from uat.runs import Run, RunError, manifest, read_tensors, save_policy, write_tensors
from uat.training.capture import Captured
from uat.training.optimizing import build_optimizer, optimize, set_rates
from uat.training.playing import Player, play_all
from uat.training.progress import Progress
from uat.training.surroundings import pick_device, precision, seeded
from uat.types import Trajectory

ShowProgress = Callable[[str, int], Progress]


def train(
    config: RunConfig,
    out: Path | str,
    *,
    resume: bool = False,
    device: torch.device | str | None = None,
    progress: ShowProgress | None = None,
) -> Run:
    """Train a policy and leave its run folder at `out`. With `resume`, go on where a run of this config stopped."""
    chosen = pick_device(device)
    run = Run.create(config, out, resume=resume)
    with seeded(derive(config.seed, "init"), chosen), precision(config.train.precision):
        Trainer(run, chosen).train(progress or (lambda label, total: Progress()))
    return run


def build_policy(config: RunConfig, domain: Domain, device: torch.device) -> Policy:
    """The policy with its first weights, which depend on the seed alone."""
    with seeded(derive(config.seed, "init"), torch.device("cpu")):
        policy = METHODS[config.method_name].build(domain.spec, config.method)
    dtype = torch.float64 if config.train.precision == "fp64" else torch.float32
    return policy.to(device=device, dtype=dtype)


@dataclass(slots=True)
class Standing:
    """Where training stands; with the tensors of policy and optimizer, all that a checkpoint needs."""

    phase: int = 0
    epoch: int = 0
    """Epochs done in this phase."""
    total: int = 0
    """Epochs done in all phases: the index of the next epoch's worlds."""
    best_value: float | None = None
    best_epoch: int = 0
    finished: bool = False


@dataclass(slots=True)
class Pending:
    """Rows whose numbers still lie on the device."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def drain(self) -> list[dict[str, Any]]:
        rows, self.rows = self.rows, []
        return [{k: v.item() if isinstance(v, Tensor) else v for k, v in row.items()} for row in rows]


class Trainer:
    """One training: policy, optimizer, worlds and where it stands."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self.run, self.device, self.config = run, device, run.config
        self.domain = run.config.build_domain()
        self.policy = build_policy(run.config, self.domain, device)
        self.optimizer = build_optimizer(self.policy, run.config.train)
        self.standing = Standing()
        self.best: dict[str, Tensor] = {}
        self.pending = Pending()
        simulator, validation = (self.domain.simulator(split, device) for split in ("train", "validation"))
        self.player = Player(self.policy, simulator, device=device, sampled=True)
        self.judge = Player(self.policy, validation, device=device, sampled=False)

    def train(self, progress: ShowProgress) -> None:
        self._restore()
        with self._tensorboard() as board:
            for index, phase in enumerate(self.policy.phases()):
                if index == self.standing.phase and not self.standing.finished:
                    self._train_phase(phase, progress, board)
                    self.standing.phase, self.standing.epoch, self.standing.best_value = index + 1, 0, None
            if not self.standing.finished:
                self.standing.finished = True
                self._save()

    def _train_phase(self, phase: Phase, progress: ShowProgress, board: Any) -> None:
        c, standing = self.config.train, self.standing
        epoch = Epoch(self, phase)
        label = f"{self.config.method_name} on {self.config.domain_name}/{self.domain.task} ({self.player.path})"
        started = time.perf_counter()
        with progress(label, c.epochs) as bar:
            while standing.epoch < c.epochs and not self._out_of_patience():
                numbers = epoch.run()
                standing.epoch, standing.total = standing.epoch + 1, standing.total + 1
                row: dict[str, Any] = {"epoch": standing.total, "phase": phase.name, **numbers}
                self.pending.rows.append(row)
                note = ""
                if standing.epoch % c.validate_every == 0 or standing.epoch == c.epochs:
                    row.update({f"validation/{name}": value for name, value in self.validate().items()})
                    note = self._checkpoint(board)
                    self.run.append(
                        "timing.jsonl", [{"epoch": standing.total, "seconds": time.perf_counter() - started}]
                    )
                bar.update(standing.epoch, note)

    def validate(self) -> dict[str, float]:
        """Greedy play on the validation episodes."""
        episodes = play_all(
            self.judge, self.config.train.validation_episodes, split_seed("validation", 0), self.domain.measure
        )
        return {name: values.mean().item() for name, values in episodes.items()}

    def _checkpoint(self, board: Any) -> str:
        rows, standing, first = self.pending.drain(), self.standing, self.domain.metrics[0]
        last = rows[-1]
        for row in rows:
            if not all(torch.isfinite(torch.tensor(v)) for k, v in row.items() if k.startswith("loss/")):
                raise FloatingPointError(
                    f"the loss is not finite at epoch {row['epoch']}; the last checkpoint in {self.run.path} is kept: "
                    "train anew with a lower train.lr, or look for NaN in the data"
                )
        value = last[f"validation/{first.name}"]
        if standing.best_value is None or first.better(value, standing.best_value):
            standing.best_value, standing.best_epoch = value, standing.epoch
            self.best = {name: tensor.detach().clone() for name, tensor in self.policy.state_dict().items()}
        self.run.append("metrics.jsonl", rows)
        self._save()
        for row in rows if board else ():
            for name, number in row.items():
                if isinstance(number, float):
                    board.add_scalar(name, number, row["epoch"])
        losses = ", ".join(f"{k.removeprefix('loss/')} loss {v:.3f}" for k, v in last.items() if k.startswith("loss/"))
        return f"{losses}, validation {first.name} {value:.3f} (best {standing.best_value:.3f})"

    def _out_of_patience(self) -> bool:
        return (
            self.standing.epoch - self.standing.best_epoch >= self.config.train.patience
            and self.standing.best_value is not None
        )

    # ------------------------------------------------------------ checkpoints

    @property
    def _state_file(self) -> Path:
        return self.run.file("state/train.safetensors")

    def _tensors(self) -> dict[str, Tensor]:
        """Everything that an epoch changes, by name."""
        tensors = {f"policy.{name}": tensor for name, tensor in self.policy.state_dict().items()}
        for name, parameter in self.policy.named_parameters():
            for key, tensor in self.optimizer.state[parameter].items():
                tensors[f"adam.{key}.{name}"] = tensor
        return tensors

    def _save_policy(self) -> None:
        save_policy(self.run.file("policy.safetensors"), self.policy, self.config.method_name, self.best)

    def _save(self) -> None:
        self._save_policy()
        best = {f"best.{name}": tensor for name, tensor in self.best.items()}
        write_tensors(self._state_file, {**self._tensors(), **best}, asdict(self.standing))

    def _restore(self) -> None:
        """Back to the last checkpoint, if there is one; what was logged after it is dropped and done again."""
        if not self.run.file("manifest.json").exists():
            self.run.write_json("manifest.json", manifest())
        if self._state_file.exists():
            saved, meta = read_tensors(self._state_file)
            self.standing = Standing(**{name: meta[name] for name in Standing.__dataclass_fields__})
            self.best = {
                name.removeprefix("best."): t.to(self.device) for name, t in saved.items() if name.startswith("best.")
            }
            own = self._tensors()
            if missing := sorted(own.keys() - saved.keys()):
                raise RunError(f"{self._state_file} does not fit this run: {missing[0]} is missing")
            with torch.no_grad():
                for name, tensor in own.items():
                    tensor.copy_(saved[name])
            self._save_policy()  # a kill may have left the policy of a later checkpoint
        for name in ("metrics.jsonl", "timing.jsonl"):
            rows = self.run.rows(name)
            kept = [row for row in rows if row["epoch"] <= self.standing.total]
            if len(kept) < len(rows) or not self.run.file(name).exists():
                self.run.write_rows(name, kept)

    @contextlib.contextmanager
    def _tensorboard(self) -> Iterator[Any]:
        """TensorBoard's writer if it is installed, else None."""
        if importlib.util.find_spec("tensorboard") is None:
            yield None
            return
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(self.run.file("tensorboard")), purge_step=self.standing.total + 1) as board:
            yield board


class Epoch:
    """Rollout, then optimize. On CUDA both are captured once and replayed."""

    def __init__(self, trainer: Trainer, phase: Phase) -> None:
        self.trainer, self.phase = trainer, phase
        self.start_B: Tensor | None = None
        self.captured: Captured[dict[str, Tensor]] | None = None

    def run(self) -> dict[str, Tensor]:
        trainer, c = self.trainer, self.trainer.config
        index = trainer.standing.total
        ids = torch.arange(index * c.train.batch_size, (index + 1) * c.train.batch_size)
        trajectory = trainer.player.play(ids, split_seed("train", c.seed))
        self._place(ids)
        set_rates(trainer.optimizer, c.train, trainer.standing.epoch + 1)
        torch.manual_seed(derive(c.seed, "dropout", index))  # inside `seeded`: the caller's generator is untouched
        trainer.policy.train()
        if trainer.device.type != "cuda":
            return self._optimize(trajectory)
        if self.captured is None:
            self.captured = Captured(lambda: self._optimize(trajectory), preserve=trainer._tensors().values())
            torch.manual_seed(derive(c.seed, "dropout", index))
        return {name: value.clone() for name, value in self.captured().items()}

    def _optimize(self, trajectory: Trajectory) -> dict[str, Tensor]:
        batch = self.trainer.domain.spec.clock.batch(trajectory)
        batch.start = self.start_B
        return optimize(self.phase, batch, self.trainer.optimizer, self.trainer.config.train.clip)

    def _place(self, ids: Tensor) -> None:
        """Where these episodes start in the position table, written into the same tensor each time."""
        c, horizon = self.trainer.config, self.trainer.domain.spec.horizon
        if not c.train.random_start:
            return
        spare = (getattr(c.method, "max_positions", None) or horizon + 1) - horizon
        start_B = integers(c.seed, "start", ids, 1, below=spare + 1)[:, 0].to(self.trainer.device)
        self.start_B = start_B if self.start_B is None else self.start_B.copy_(start_B)
