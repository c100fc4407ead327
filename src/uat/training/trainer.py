"""Training: epochs, validation, best weights, patience and logs. A resumed training gives the same numbers."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from uat.config import RunConfig, lookup, to_json
from uat.contracts import Recording, Simulator
from uat.domains import Domain, split_seed
from uat.engines import SerialReplay, plan
from uat.engines.rollout import AT_ONCE, RolloutRunner, play_all
from uat.files import check_path
from uat.methods import METHODS, Phase, Policy, training_name
from uat.noise import derive
from uat.objectives import OBJECTIVES, Objective, PPOConfig
from uat.runs import Run, first_difference
from uat.settings import checked
from uat.tensor_files import RunError
from uat.threads import ThreadsWarning, cpu_threads
from uat.training.checkpoint import STATE, Checkpoint, adopt
from uat.training.epoch import Epoch
from uat.training.memory import check_memory
from uat.training.optimizing import build_optimizer
from uat.training.progress import Progress
from uat.training.ranks import ALONE, Ranks, joined, own_folder
from uat.training.standardising import standardise
from uat.training.surroundings import current, pick_device, precision, seeded
from uat.training.validation import Criterion, Validations, loss_criterion

ShowProgress = Callable[[str, int], Progress]
"""Make a progress display from a label and the number of epochs."""
PLATEAU_MARGIN = 0.05
"""Share by which a validation must exceed the level without feedback to have left it; blind policies vary by less."""


def train(
    config: RunConfig,
    out: Path | str,
    *,
    resume: bool = False,
    source: Run | Path | str | None = None,
    device: torch.device | str | None = None,
    threads: int | None = None,
    progress: ShowProgress | None = None,
) -> Run:
    """Train a policy and write its run folder at `out`. With `resume`, continue an interrupted run of this config.

    source: a run with the same training (TENT and CoTTA train like Vanilla); its weights are copied instead of trained.
    threads: CPU threads; unset: UAT_THREADS, or one. Results differ only in floating-point rounding.
    Under torchrun, the processes share every batch, and the first process writes the run (see `uat.training.ranks`).
    """
    checked(config, RunConfig, "config")
    checked(resume, bool, "resume")
    checked(progress, Callable[..., Any] | None, "progress")
    run, chosen = Run(check_path(out, "out"), config), pick_device(device)
    with (
        cpu_threads(threads),
        joined(config, chosen) as (ranks, own_device),
        contextlib.ExitStack() as kept,
    ):
        if source is not None:
            source = check_source(config, source if isinstance(source, Run) else Run.open(source, "source"))
        if writes := ranks.rank == 0:
            run.is_there(resume=resume)  # refuse a foreign folder before locking it
            kept.enter_context(run.training())
            Run.create(config, out, resume=resume, device=own_device)
            if source is not None:
                adopt(run, source)
        with (
            own_folder(run if writes else None, config, ranks, own_device) as own,
            current(own_device),
            seeded(derive(config.seed, "train"), own_device),
            precision(config.train.precision),
        ):
            shown = progress if progress is not None and ranks.rank == 0 else (lambda label, total: Progress())
            Trainer(own, own_device, ranks).train(shown)
    return run


def build_policy(config: RunConfig, domain: Domain, device: torch.device) -> Policy:
    """Build the policy with initial weights that depend on the seed alone."""
    with seeded(derive(config.seed, "init"), torch.device("cpu")):
        policy = METHODS[config.method_name].build(domain.spec, config.method)
    dtype = torch.float64 if config.train.precision == "fp64" else torch.float32
    return policy.to(device=device, dtype=dtype)


def build_objective(config: RunConfig, learner: Policy, worlds: Simulator[Any] | Recording) -> Objective:
    """Build the objective for a policy; raise a ValueError if the policy cannot learn by it in these worlds."""
    entry, name = OBJECTIVES[config.objective_name], config.objective_name
    if reason := entry.build.unsupported_reason(learner, worlds, config.objective):
        raise ValueError(f"objective {name!r} does not fit {config.method_name} on {config.domain_name}: {reason}")
    if config.train.random_start and name != "imitation":
        raise ValueError(f"train.random_start=True goes with imitation alone, and the objective is {name!r}")
    if config.train.standardise and isinstance(config.objective, PPOConfig) and config.objective.scale_observations:
        raise ValueError("train.standardise=True and objective.scale_observations=True both standardise: choose one")
    with seeded(derive(config.seed, "objective"), torch.device("cpu")):
        objective = entry.build(learner, config.objective)
    if config.train.steps is not None and all(phase.reuse is None for phase in objective.phases()):
        raise ValueError(
            f"train.steps={config.train.steps} is for objectives that count environment steps, such as ppo, and the "
            f"objective is {name!r}: set train.epochs"
        )
    return objective


def check_source(config: RunConfig, source: Run) -> Run:
    """Return the source run if training this config would give the same weights; otherwise raise an error that names
    the difference."""
    if not source.file(STATE).exists():
        raise RunError(f"{source.path} cannot be the source of this run: it has no checkpoint")
    theirs, ours = ({"method": training_name(c.method_name), **_settings(c)} for c in (source.config, config))
    if difference := first_difference(to_json(theirs), to_json(ours), ""):
        raise RunError(f"{source.path} cannot be the source of this run: {difference}")
    return source


def _settings(config: RunConfig) -> dict[str, Any]:
    """Return all settings that determine the trained weights."""
    learner = METHODS[config.method_name].build(config.build_domain().spec, config.method).learner
    return {
        "domain_name": config.domain_name,
        "seed": config.seed,
        "domain": config.domain,
        "train": config.train,
        "feedback": config.feedback,
        "objective_name": config.objective_name,
        "objective": config.objective,
        "settings": learner.config,
    }


class Trainer:
    """One training: policy, worlds, checkpoint and progress.

    The policy's learner, which shares the policy's weights, plays, learns and is validated. In a phase that learns from
    logs, a behaviour policy plays instead; the learner is still validated by its own play unless the phase declares
    otherwise. Recorded episodes, which actions do not change, are used as recorded, without a rollout.
    """

    def __init__(
        self,
        run: Run,
        device: torch.device,
        ranks: Ranks = ALONE,
        *,
        prefer: Literal["fast", "plain"] = "fast",
        concurrent_policies: int = 1,
        serial: SerialReplay | None = None,
    ) -> None:
        """Build the policy and its worlds, and restore the last checkpoint.

        prefer: which engine runs the policy, see `uat.engines.plan`.
        concurrent_policies: number of policies that train on the device at a time.
        serial: runs the updates of concurrent trainings one after another.
        """
        self.run, self.device, self.config, self.ranks, self.serial = run, device, run.config, ranks, serial
        self.domain = run.config.build_domain()
        check_memory(run.config, self.domain.spec, device, share=ranks.count)
        if (prepared := self.domain.preparation()) is not None:
            run.write_json("preparation.json", prepared)
        self.policy = build_policy(run.config, self.domain, device)
        self.learner = self.policy.learner
        worlds = self.domain.simulator("train", device)
        self.objective = build_objective(run.config, self.learner, worlds)
        others = self.objective.modules
        self.checkpoint = Checkpoint(run, self.policy, build_optimizer(self.learner, run.config.train, others), others)
        if run.config.train.standardise and not self.checkpoint.exists:
            standardise(self.learner, worlds, run.config, device, ranks)
        self.progress = self.checkpoint.restore()
        if ranks.rank == 0 and not self.progress.finished:
            self._compare_threads()
        recorded = isinstance(worlds, Recording)
        self.engine = plan(self.learner, prefer=prefer, concurrent_policies=concurrent_policies)
        if not self.objective.plain_pass:
            self.objective.policy = self.engine.learner
        self._runners: list[RolloutRunner] = []
        self.rollouts = self._runner(None if recorded else self.engine, worlds, sampled=True)
        validated = self.domain.simulator("validation", device)
        self.validation = self._runner(self.engine, validated, sampled=run.config.evaluation.sampled)

    def _compare_threads(self) -> None:
        """Warn if the run continues with another number of CPU threads."""
        before, now = self.checkpoint.saved_threads, torch.get_num_threads()
        if before not in (None, now):
            warnings.warn(
                f"{self.run.path} was trained with {before} CPU thread{'' if before == 1 else 's'} so far and goes on "
                f"with {now}: its last bits may differ from those of a run whose number of threads never changed",
                ThreadsWarning,
                stacklevel=4,
            )

    def _runner(self, agent: Any, simulator: Any, *, sampled: bool) -> RolloutRunner:
        """Return a runner of rollouts that is closed at the end of training."""
        self._runners.append(RolloutRunner(agent, simulator, device=self.device, sampled=sampled))
        return self._runners[-1]

    def train(self, show: ShowProgress) -> None:
        for _ in self.turns(show):
            pass

    def turns(self, show: ShowProgress) -> Generator[None, None, None]:
        """Train; yield whenever work has been launched, so that other trainings can launch theirs."""
        if self.progress.finished:
            return
        self.run.file("scores.jsonl").unlink(missing_ok=True)  # scores of weights that change now
        with contextlib.closing(self), tensorboard(self.run, after=self.progress.total) as write:
            for index, phase in enumerate(self.objective.phases()):
                if index >= self.progress.phase:
                    self.progress.begin(index)
                    yield from self._train_phase(phase, show, write)
        self.progress.finished = True
        self.checkpoint.save(self.progress)
        self.run.file("scores.jsonl").unlink(missing_ok=True)  # another process may have scored the unfinished run

    def close(self) -> None:
        """Free the graphs captured for rollouts."""
        for runner in self._runners:
            runner.close()

    def epoch(self, phase: Phase) -> Epoch:
        rollouts = self.rollouts
        if phase.behaviour is not None:
            rollouts = self._runner(phase.behaviour, rollouts.simulator, sampled=True)
        epoch = Epoch(
            self.config, self.engine, phase, rollouts, self.checkpoint, self.ranks, self.serial, self.progress.steps
        )
        if phase.judged_by == "play":
            count = min(AT_ONCE, self._validation_count)
            epoch.warmed_up_with.append(lambda: self.validation.prepare(count))
        return epoch

    def _train_phase(self, phase: Phase, show: ShowProgress, write: Callable[[dict[str, Any]], None]) -> Iterator[None]:
        progress, epoch = self.progress, self.epoch(phase)
        validations = Validations(
            phase, self.criterion(phase), self.engine, epoch.train, self.checkpoint, progress, self.ranks, write
        )
        what = f"{self.config.method_name} on {self.config.domain_name}/{self.domain.task}"
        label = f"{what} ({epoch.rollouts.path}, {epoch.path})"
        by_steps = phase.reuse is not None and epoch.train.steps is not None
        total = (epoch.train.steps if by_steps else None) or epoch.train.epochs
        with show(label, total) as shown, contextlib.closing(epoch):
            shown.unit = "step" if by_steps else "epoch"
            while not validations.ended:
                numbers = epoch.run(progress.total, progress.epoch + 1)  # roll out, then optimize
                progress.advance(epoch.train, None if phase.reuse is None else int(numbers["steps"]))
                validations.add(numbers)
                yield
                note, done = validations.keep_best(), progress.steps if by_steps else progress.epoch
                shown.update(min(done, total), f"{note}, {epoch.pace.report()}".rstrip(", ") if note else "")

    def validate(self) -> dict[str, Tensor]:
        """Play the validation episodes greedily and return mean metrics, still on the device."""
        return self._validated(self.validation)

    def _validated(self, runner: RolloutRunner) -> dict[str, Tensor]:
        measured = play_all(runner, self._validation_count, split_seed("validation", 0), self.domain.measure)
        return {name: x.nanmean() for name, x in self.domain.summarise(measured).items()}

    def plateau(self) -> float | None:
        """Return the score that a policy which sees rewards must exceed before patience may end its training; None if
        the domain has no such level."""
        name, metric = self.domain.plateau, self.objective.criterion(self.domain.metrics)
        if name is None or "reward" not in self.learner.sees:
            return None
        references = self.domain.references()
        lookup("plateau", name, references)
        runner = RolloutRunner(references[name], self.validation.simulator, device=self.device, sampled=False)
        with contextlib.closing(runner):
            blind = self._validated(runner)[metric.name].item()
        return blind + PLATEAU_MARGIN * abs(blind) * (1 if metric.higher_is_better else -1)

    def criterion(self, phase: Phase) -> Criterion:
        """Return the criterion by which the phase selects its best weights."""
        if phase.judged_by == "nothing":
            return Criterion(dict, None)
        if phase.judged_by == "play":
            return Criterion(self.validate, self.objective.criterion(self.domain.metrics), self.plateau())
        worlds = self.validation.simulator
        agent = None if isinstance(worlds, Recording) else phase.behaviour or self.engine
        rollouts = self._runner(agent, worlds, sampled=True)
        ids, seed = torch.arange(self._validation_count), split_seed("validation", 0)
        return loss_criterion(self.engine, phase, lambda: rollouts.play(ids, seed))

    @property
    def _validation_count(self) -> int:
        return self.domain.episode_count("validation", self.config.train.validation_episodes)


@contextlib.contextmanager
def tensorboard(run: Run, *, after: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that writes rows to TensorBoard if it is installed, and does nothing otherwise."""
    if importlib.util.find_spec("tensorboard") is None:
        yield lambda row: None
        return
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import scalar

    with SummaryWriter(str(run.file("tensorboard")), purge_step=after + 1) as board:

        def write(row: dict[str, Any]) -> None:
            """Write a row as one event; `add_scalar` would write one per number, and open the file each time."""
            numbers = [scalar(name, value) for name, value in row.items() if isinstance(value, float)]
            for other in numbers[1:]:
                numbers[0].MergeFrom(other)
            if numbers:
                cast(Any, board.file_writer).add_summary(numbers[0], row["epoch"])

        yield write
