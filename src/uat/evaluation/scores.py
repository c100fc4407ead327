"""Score runs: a run's policy and the domain's references play the same test episodes, and every metric is one row.

With `curves`, the values of each step are kept as well (curves.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uat.acting import has_expert
from uat.config import RunConfig, with_oldest_names
from uat.contracts import Recording
from uat.domains import DOMAINS, split_seed
from uat.engines.rollout import AT_ONCE, RolloutRunner, play_all
from uat.episode import Trajectory
from uat.evaluation.intervals import interval
from uat.files import read_json
from uat.metrics import Score
from uat.recipes import recipe, usual_objective
from uat.runs import Run, load_policy, opened
from uat.settings import Episodes, checked
from uat.tensor_files import RunError, read_tensors, write_tensors
from uat.threads import cpu_threads
from uat.training.checkpoint import progress_of
from uat.training.surroundings import current, pick_device, precision

CEILING, EXPERT, RANDOM = "ceiling", "expert", "random"
"""Names of the references in the column "method"."""
BLIND = "vanilla"
"""The method at the lower end of the gap to the Bayes filter."""
PerEpisode = dict[str, dict[str, Tensor]]
"""method -> metric or curve -> values, one row per episode."""
Measured = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Metrics (E,) and curves (E, T) of one method."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of a run: rows, and the values per episode behind them."""

    scores: list[Score]
    episodes: PerEpisode
    """method -> metric -> one value per episode, NaN if undefined."""
    config: RunConfig
    finished: bool = True
    """Whether the training is complete."""
    curves: PerEpisode = field(default_factory=dict)
    """method -> curve -> one value per episode and step (E, T), NaN if undefined; empty unless `evaluate` kept them."""

    @property
    def block(self) -> float:
        return self.config.build_domain().block

    def interval(self, method: str, metric: str) -> tuple[float, float]:
        """95 % interval of the mean over episodes."""
        return interval(self.episodes[method][metric][None], self.block)


def evaluate(
    run: Run | Path | str,
    *,
    episodes: int | None = None,
    references: bool = True,
    unfinished: bool = False,
    curves: bool = False,
    device: torch.device | str | None = None,
    threads: int | None = None,
    trust: bool = False,
    domain: Any = None,
) -> Evaluation:
    """Score a run's policy, the Bayes filter, the expert and chance on the same test episodes.

    The rows are written to the run's scores.jsonl, and the values per episode beside them. A run whose training is not
    complete is refused unless `unfinished` is set, which scores the best weights so far.

    curves: keep the values of each step (`Domain.curves`) too, and write them to the run's curves.safetensors.
    threads: CPU threads; unset: UAT_THREADS, or one.
    trust: import the code that the run's config names (`python:module:name`); it is refused otherwise.
    domain: the domain object or environment that was handed to `uat.train`, if it has no name.
    """
    run = opened(run, trust=trust, domain=domain)
    with cpu_threads(threads):
        return _evaluate(run, episodes, references, unfinished, curves, device)


def _evaluate(
    run: Run, episodes: int | None, references: bool, unfinished: bool, curves: bool, device: torch.device | str | None
) -> Evaluation:
    checked(episodes, Episodes | None, "episodes")
    for name, value in (("references", references), ("unfinished", unfinished), ("curves", curves)):
        checked(value, bool, name)
    if changed := changed_data(run):
        raise RunError(changed)
    progress, missing = progress_of(run), what_is_unfinished(run)
    if missing and not unfinished:
        raise RunError(f"{missing}; continue it with --resume, or score the best weights so far with --unfinished")
    chosen, config = pick_device(device), run.config
    domain = config.build_domain()
    count = domain.episode_count("test", config.evaluation.episodes if episodes is None else episodes)
    if episodes not in (None, count):
        raise ValueError(f"episodes={episodes} is not what {config.domain_name} is tested on: all of its {count}")
    if curves and isinstance(domain.simulator("test", chosen), Recording):
        raise ValueError(f"curves: {config.domain_name} replays recorded episodes, in which policies earn nothing")
    policy = load_policy(run.path).to(chosen)
    with current(chosen), precision(config.train.precision):
        drawn = config.evaluation.sampled
        played = {config.method_name: _measure(domain, policy, count, chosen, curves=curves, sampled=drawn)}
        if references:
            played |= _references(run, count, chosen, curves=curves)
    values, steps = _apart(played)
    numerics = "" if progress is None else progress.numerics or ""
    scores = [row for method, metrics in values.items() for row in rows_of(config, domain, method, metrics, numerics)]
    write_tensors(run.file("episodes.safetensors"), _flat(values), {"split": "test"})
    if curves:
        write_tensors(
            run.file("curves.safetensors"), _flat({config.method_name: steps[config.method_name]}), {"split": "test"}
        )
    run.write_rows("scores.jsonl", [asdict(score) for score in scores])  # last: a run with rows has all other files
    return Evaluation(scores, values, config, finished=missing is None, curves=steps if curves else {})


def what_is_unfinished(run: Run) -> str | None:
    """A sentence if the run's training is not complete; None if it is, or if the run was never trained here."""
    progress = progress_of(run)
    if progress is None or progress.finished:
        return None
    return f"{run.path} is unfinished: {progress.total} epochs are done, of at most {run.config.train.epochs} per phase"


def changed_data(run: Run) -> str | None:
    """A sentence if a data file of the run has other contents than in training; None if none has, or if that is
    unknown."""
    file, config = run.file("manifest.json"), run.config
    kept = read_json(file).get("data") if file.is_file() else None
    now = DOMAINS[config.domain_name].content(config.domain)
    if not isinstance(kept, dict):
        return None
    for name, digest in now.items():
        if kept.get(name, digest) != digest:
            path = getattr(config.domain, name)
            return f"{path} is not the file that {run.path} was trained on: its contents have changed (domain.{name})"
    return None


def rows_of(config: RunConfig, domain: Any, method: str, metrics: dict[str, Tensor], numerics: str = "") -> list[Score]:
    """One row per metric. References belong to the domain, not to a run or a seed."""
    own = method == config.method_name
    return [
        Score(
            run=config.identity() if own else "",
            method=method,
            domain=config.domain_name,
            task=domain.task,
            setting=setting_of(config) if own else domain.setting,
            split="test",
            seed=config.seed if own else 0,
            metric=metric,
            value=values.nanmean().item(),
            n=len(values),
            numerics=numerics if own else "",
        )
        for metric, values in metrics.items()
    ]


def setting_of(config: RunConfig) -> str:
    """Differences from the recipe in a few words: the domain's own description, then changed settings."""
    domain = config.build_domain().setting
    return ",".join([*([] if domain == "default" else [domain]), *variant_of(config)]) or "default"


def variant_of(config: RunConfig) -> list[str]:
    """The objective, if it is not the usual one of the domain, and settings of the method, of training and of the
    objective that differ from the recipe: ["decay=0.5", "train.lr=0.001"]."""
    published = recipe(config.domain_name, config.method_name, config.preset, objective=config.objective_name)
    usual_one = usual_objective(config.domain_name, config.method_name)
    changed = [] if config.objective_name == usual_one else [config.objective_name]
    for section, prefix in (("method", ""), ("train", "train."), ("objective", "objective.")):
        own, usual = with_oldest_names(getattr(config, section)), with_oldest_names(getattr(published, section))
        changed += [f"{prefix}{name}={value}" for name, value in own.items() if value != usual[name]]
    return changed


def reference_episodes(run: Run, count: int, device: torch.device) -> PerEpisode:
    """Metrics per episode of the filter, the expert and chance; cached in the run folder."""
    return {name: metrics for name, (metrics, _) in _references(run, count, device).items()}


def _references(run: Run, count: int, device: torch.device, *, curves: bool = False) -> dict[str, Measured]:
    """Metrics and curves of the references, from the run folder or played again.

    References that know the run's corrupted feedback receive it; all others receive true feedback.
    """
    feedback = run.config.feedback
    domain, corrupted = run.config.build_true_domain(), run.config.build_domain()
    informed = {} if feedback.is_true else domain.references_under(feedback)
    references = {**domain.references(), **informed}
    agents: dict[str, Any] = dict(references)
    if EXPERT in references or has_expert(domain.simulator("test", device)):
        agents[EXPERT] = references.get(EXPERT)
    key = {
        "domain": run.config.domain_name,
        "config": with_oldest_names(run.config.domain),
        "episodes": count,
        "revision": DOMAINS[run.config.domain_name].revision,
        **({"feedback": with_oldest_names(feedback)} if informed else {}),
    }
    with contextlib.suppress(RunError, KeyError):  # missing or damaged: compute again
        return _kept_references(run, list(agents), domain, key, curves=curves)
    values = {
        name: _measure(corrupted if name in informed else domain, agent, count, device, curves=curves)
        for name, agent in agents.items()
    }
    metrics, steps = _apart(values)
    write_tensors(run.file("references.safetensors"), _flat(metrics), {"key": key})
    if curves:
        write_tensors(run.file("reference_curves.safetensors"), _flat(steps), {"key": key})
    return values


def _kept_references(
    run: Run, names: list[str], domain: Any, key: Mapping[str, Any], *, curves: bool
) -> dict[str, Measured]:
    """Read the references' values from the run folder; raise a RunError or KeyError unless they are of this key."""
    count, steps = key["episodes"], {name: {} for name in names}
    kept, meta = read_tensors(run.file("references.safetensors"))
    metrics = {name: {m.name: kept[f"{name}/{m.name}"] for m in domain.metrics} for name in names}
    if meta["key"] != key or not all(is_per_episode(x, count) for own in metrics.values() for x in own.values()):
        raise KeyError("of other episodes")
    if curves:
        kept, meta = read_tensors(run.file("reference_curves.safetensors"))
        for place, values in kept.items():
            name, _, curve = place.partition("/")
            steps[name][curve] = values
        if meta["key"] != key or not all(x.dim() == 2 and len(x) == count for x in kept.values()):
            raise KeyError("of other episodes")
    return {name: (metrics[name], steps[name]) for name in names}


def read_evaluation(run: Run) -> Evaluation:
    """Read the results that `evaluate` left in the run folder: rows and values per episode."""
    file, names = run.file("episodes.safetensors"), [item.name for item in fields(Score)]
    scores = [Score(**{name: row[name] for name in names if name in row}) for row in run.rows("scores.jsonl")]
    kept, method, config = read_tensors(file)[0], run.config.method_name, run.config
    episodes = by_method(kept, file)
    own = {score.metric: score.n for score in scores if score.method == method}
    declared = {metric.name for metric in config.build_true_domain().metrics}
    if own.keys() != declared or any(not is_per_episode(episodes.get(method, {}).get(m), own[m]) for m in own):
        raise RunError(f"{file} and {run.file('scores.jsonl')} do not hold the same metrics and episodes of {method}")
    return Evaluation(scores, episodes, config, finished=what_is_unfinished(run) is None)


def by_method(kept: Mapping[str, Tensor], file: Path) -> dict[str, dict[str, Tensor]]:
    """Sort the tensors "METHOD/METRIC" of a file, each with one value per episode, by method."""
    nested: dict[str, dict[str, Tensor]] = {}
    for name, values in kept.items():
        method, slash, metric = name.partition("/")
        if not slash or not is_per_episode(values, len(values.reshape(-1))):
            raise RunError(f"{file}: {name!r:.80} is not METHOD/METRIC with one number per episode")
        nested.setdefault(method, {})[metric] = values
    return nested


def is_per_episode(values: Tensor | None, count: int) -> bool:
    return values is not None and values.shape == (count,) and values.is_floating_point() and count > 0


def gap_closed(value: float, blind: float, ceiling: float) -> float | None:
    """Share of the gap between the blind score and the filter's that a method closes; None if there is no gap."""
    return (value - blind) / (ceiling - blind) if abs(ceiling - blind) > 1e-9 else None


def _measure(
    domain: Any, agent: Any, count: int, device: torch.device, *, curves: bool = False, sampled: bool = False
) -> Measured:
    """Each metric on the test episodes 0 .. count-1, and each curve if wanted."""
    is_policy, steps = isinstance(agent, torch.nn.Module), {}
    player = RolloutRunner(
        agent, domain.simulator("test", device), device=device, sampled=sampled or (agent is not None and agent.sampled)
    )
    at_once = min(count, AT_ONCE if is_policy or agent is None else 128)

    def measure(trajectory: Trajectory) -> dict[str, Tensor]:
        for name, values_BT in domain.curves(trajectory).items() if curves else ():
            steps.setdefault(name, []).append(values_BT.to("cpu", torch.float32, copy=True))
        return domain.measure(trajectory)

    with contextlib.closing(player):
        values = play_all(player, count, split_seed("test", 0), measure, at_once)
    metrics = {name: per_episode.cpu() for name, per_episode in domain.summarise(values).items()}
    return metrics, {name: joined(parts)[:count] for name, parts in steps.items()}


def _apart(values: Mapping[str, Measured]) -> tuple[PerEpisode, PerEpisode]:
    """Split metrics and curves of every method."""
    return {name: own for name, (own, _) in values.items()}, {name: own for name, (_, own) in values.items()}


def _flat(nested: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{method}/{metric}": values for method, metrics in nested.items() for metric, values in metrics.items()}


def joined(parts: list[Tensor]) -> Tensor:
    """Concatenate batches of curves (B, T), filling those of fewer steps up with NaN, without the last undefined steps.

    Worlds on the host stop when their episodes have ended, so that batches may differ in their number of steps.
    """
    longest = max(part.shape[1] for part in parts)
    whole = torch.cat([torch.nn.functional.pad(x, (0, longest - x.shape[1]), value=torch.nan) for x in parts])
    return whole[:, : int((~whole.isnan()).any(0).nonzero().max()) + 1 if (~whole.isnan()).any() else 1].clone()
