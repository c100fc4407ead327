"""Run a study: skip cells that are done, report cells that fail, and continue with the rest."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from uat.evaluation.comparison import Group, compare, run_groups
from uat.evaluation.scores import Evaluation, by_method, read_evaluation
from uat.evaluation.statistics import Pair, holm, paired
from uat.executors import Executor, executor_for, keep_failure
from uat.executors.kinds import on_gpu
from uat.files import FileError
from uat.lock import locked
from uat.methods import METHODS, training_name
from uat.paper.studies import efficiency
from uat.paper.studies.cells import Cell, jobs, merged
from uat.paper.studies.estimate import grid_seconds, in_words, seconds
from uat.paper.studies.files import CURVE_KEY, PAIR_KEY, SCORE_KEY, SUMMARY_KEY, TIMING_KEY, Results, flaw_of_run, merge
from uat.paper.studies.grids import STUDIES, TIMED, chosen_studies
from uat.paper.studies.options import Reproduce
from uat.paper.studies.probes import read_trace, run_probe
from uat.paper.studies.work import Reference, Task, scores_of, task_rows
from uat.rows import EFFICIENCY, NUMBER, check_row
from uat.runs import Run
from uat.tensor_files import read_tensors
from uat.terminal import say
from uat.threads import cpu_threads
from uat.training.checkpoint import progress_of
from uat.training.progress import Board, show_board
from uat.training.surroundings import pick_device


@dataclass(slots=True)
class StudyOutcome:
    """Counts and failures of a call of `reproduce`."""

    cells: int = 0
    """Number of cells of the study."""
    done_before: int = 0
    trained: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    """Job -> reason of the failure."""
    missing: list[str] = field(default_factory=list)
    """Reasons why this version cannot run parts of the study."""


def reproduce(options: Reproduce, board: Callable[[int], Board] = show_board) -> StudyOutcome:
    """Run the remaining part of a study, while the folder of results is locked."""
    cells = cells_of(options)
    with (
        locked(options.results.path, f"the study {options.study}, preset {options.preset}"),
        cpu_threads(options.threads),
    ):
        return _reproduce(options, cells, board)


def _reproduce(options: Reproduce, cells: Sequence[Cell], board: Callable[[int], Board]) -> StudyOutcome:
    results, totals = options.results, StudyOutcome()
    studies = [STUDIES[name] for name in chosen_studies(options.study)]
    totals.missing = list(dict.fromkeys(reason for study in studies for reason in study.missing()))
    existing = measured(results)
    todo = [cell for cell in cells if not is_done(cell, results, existing)]
    totals.cells, totals.done_before = len(cells), len(cells) - len(todo)
    left = [] if options.references_only else jobs(todo, seeds_together=on_gpu(options.device))
    set_aside_flawed([cell for job in left for cell in job.cells], results)
    tasks: list[Task] = [*references(cells, existing), *left]
    run(tasks, chosen_executor(options), results, totals, retries=options.retries, board=board)
    if options.references_only:
        return totals
    if any(study.timed for study in studies):
        time_methods(options, results, totals)
    conclude(results)
    run_probes(cells_of(replace(options, methods=())), results, totals, pick_device(options.device))
    return totals


def cells_of(options: Reproduce) -> list[Cell]:
    studies = [STUDIES[name] for name in chosen_studies(options.study)]
    return merged(cell for study in studies for cell in study.cells(options.preset, options.seeds, options.filter))


Measured = set[tuple[str, str, str, str, str]]
"""Domain, task, setting, run ("" for references) and metric of the existing rows."""


def measured(results: Results) -> Measured:
    flaws = results.flaws()
    rows = [row for row in results.read("scores") if row["run"] not in flaws]
    return {(row["domain"], row["task"], row["setting"], row["run"], row["metric"]) for row in rows}


def set_aside_flawed(cells: Sequence[Cell], results: Results) -> None:
    """Move run folders from builds with a known flaw to the folder `flawed`, so that they are trained again."""
    listed = results.listed_flaws()
    for cell in cells:
        folder = cell.folder(results.runs)
        if not (folder / "config.json").exists() or Run.open(folder).config.identity() != cell.identity:
            continue
        progress = progress_of(Run.open(folder))
        numerics = "" if progress is None else progress.numerics or ""
        if flaw := flaw_of_run(cell.identity, numerics, listed):
            place = results.path / "flawed" / folder.name
            if place.exists():
                raise FileError(f"{folder} should be set aside as {place}, which exists: remove one of them")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(folder, place)
            say(f"{folder} will be trained again; the old folder was moved to {place}: {flaw}")


def is_done(cell: Cell, results: Results, existing: Measured) -> bool:
    """Whether the cell's rows exist, and for every probe its trace or the run folder that it needs.

    Rows without a metric that the domain has now are kept, unless the run folder is there and can be scored again.
    """
    if cell.identity not in {run for _, _, _, run, _ in existing}:
        return False
    if (cell.folder(results.runs) / "config.json").exists():
        known = {metric for *_, run, metric in existing if run == cell.identity}
        if not known >= {metric.name for metric in cell.config.build_true_domain().metrics}:
            return False
    traces = [trace for probe in cell.probes if (trace := read_trace(results.path, probe))]
    probed = [trace for trace in traces if cell.identity in trace.runs]
    return len(probed) == len(cell.probes) or scores_of(cell, results.runs) is not None


def references(cells: Sequence[Cell], existing: Measured) -> list[Reference]:
    """One job for each task and kind of feedback whose references have no rows yet, or none of a metric that the domain
    has now."""
    missing: dict[str, Reference] = {}
    for cell in cells:
        task, c = Reference(cell=cell), cell.config
        if task.key not in missing:
            domain = c.build_domain()
            place = (c.domain_name, cell.task, domain.setting, "")
            if not existing >= {(*place, metric.name) for metric in domain.metrics}:
                missing[task.key] = task
    return list(missing.values())


# ---------------------------------------------------------------- running


def chosen_executor(options: Reproduce) -> Executor:
    return executor_for(
        options.executor,
        workers=options.workers,
        address=options.address,
        device=options.device,
        threads=options.threads,
    )


def run(
    tasks: Sequence[Task],
    executor: Executor,
    results: Results,
    totals: StudyOutcome,
    *,
    retries: int = 0,
    board: Callable[[int], Board] = show_board,
) -> None:
    """Run all tasks and write rows as they arrive, so that a kill loses only the tasks in progress."""
    notes, do = results.path / "progress", partial(task_rows, runs=results.runs)
    waiting = list(tasks)
    for attempt in range(1 + retries):
        failed: list[Task] = []
        with board(len(waiting)) as shown, _removed(notes):
            for index, outcome in executor.outcomes(waiting, do, notes, lambda shown=shown: shown.watch(notes)):
                task = waiting[index]
                if outcome.failure is None:
                    results.add("scores", outcome.rows, SCORE_KEY)
                    totals.failed.pop(task.name, None)
                    totals.trained += 0 if isinstance(task, Reference) else sum(c.scored for c in task.cells)
                else:
                    failed.append(task)
                    totals.failed[task.name] = outcome.failure
                    file = keep_failure(results.path / "failures", replace(outcome, name=task.name))
                    shown.say(f"failed: {task.name}: {outcome.failure} ({file})")
                shown.done(task.name, outcome.seconds, failed=outcome.failure is not None)
        waiting = failed
        if not waiting:
            return
        if attempt < retries:
            say(f"{len(waiting)} failed; trying again")


@contextlib.contextmanager
def _removed(folder: Path) -> Any:
    """Remove a folder before and after the block: notes of killed workers are meaningless."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def time_methods(options: Reproduce, results: Results, totals: StudyOutcome) -> None:
    """Measure speed and memory, one method after the other, after all other work."""
    file = results.path / "efficiency.jsonl"
    if options.domains and efficiency.DOMAIN not in options.domains:
        return
    place = (options.preset, efficiency.device_name(options.device))
    measure = efficiency.measure_apart if pick_device(options.device).type == "cuda" else efficiency.measure
    timed = {row["method"] for row in results.timings() if (row["preset"], row["device"]) == place}
    for method in TIMED:
        if options.filter.wants_method(method) and method not in timed:
            say(f"timing {method}")
            try:
                merge(file, measure(method, options.preset, options.device), TIMING_KEY, EFFICIENCY)
            except (ValueError, RuntimeError) as error:
                totals.failed[f"efficiency of {method}"] = str(error).splitlines()[0]


# ---------------------------------------------------------------- intervals and pairs


def conclude(results: Results) -> None:
    """Compute intervals, paired differences and learning curves of all rows whose run folders exist.

    They do not depend on the part of the study that was selected: a smaller selection must not remove seeds from an
    interval, nor pairs from Holm's correction.
    """
    evaluated = evaluations(results)
    if not evaluated:
        return
    results.add("intervals", [asdict(row) for row in compare(evaluated)], SUMMARY_KEY)
    results.add("pairs", [asdict(pair) for pair in pairs(run_groups(evaluated))], PAIR_KEY)
    results.add("curves", learning_curves(results), CURVE_KEY)


def learning_curves(results: Results) -> list[dict[str, Any]]:
    """One row per run with rows and a training of its own: its first metric on validation episodes."""
    rows = {row["run"] for row in results.read("scores")}
    curves = []
    for folder in sorted(file.parent for file in results.runs.glob("*/scores.jsonl")):
        try:
            run = Run.open(folder)
            name, score = run.config.method_name, next(iter(run.rows("scores.jsonl")), None)
            if score is None or score["run"] not in rows or training_name(name) != name:
                continue
            column = f"validation/{score['metric']}"
            points = [
                check_row(row, {column: NUMBER}, str(folder)) for row in run.rows("metrics.jsonl") if column in row
            ]
        except FileError as error:  # a folder of another version, or a modified one
            say(f"left out of the learning curves: {error}")
            continue
        about = {key: score[key] for key in CURVE_KEY} | {"run": score["run"]}
        curves.append({**about, "points": [[row["epoch"], row[column]] for row in points]})
    return [row for row in curves if row["points"]]


def evaluations(results: Results) -> list[Evaluation]:
    """Evaluations of the rows from their run folders, with the references, in the registry's order of methods."""
    rows = {(row["run"], row["n"]) for row in results.read("scores")}
    by_identity: dict[str, Evaluation] = {}
    for folder in sorted(file.parent for file in results.runs.glob("*/scores.jsonl")):
        try:
            one = read_evaluation(Run.open(folder))
            identity, score = one.config.identity(), one.scores[0]
            if (identity, score.n) in rows:
                own = Cell(config=one.config, task=score.task)
                references = reference_numbers(own, one, results)
                by_identity[identity] = replace(one, episodes={**one.episodes, **references})
        except FileError as error:  # a folder of another version, or a modified one
            say(f"left out of intervals and pairs: {error}")
    order = list(METHODS)
    return sorted(by_identity.values(), key=lambda one: order.index(one.config.method_name))


def run_probes(cells: Sequence[Cell], results: Results, totals: StudyOutcome, device: torch.device) -> None:
    """Run each probe on the finished runs, with the same seeds of every method, once all its methods are finished."""
    for probe in sorted({probe for cell in cells for probe in cell.probes}):
        own = [cell for cell in cells if probe in cell.probes]
        ready = [cell for cell in own if (cell.folder(results.runs) / "scores.jsonl").exists()]
        methods = list(dict.fromkeys(cell.config.method_name for cell in own))
        by_seed = {(cell.config.method_name, cell.config.seed): cell for cell in ready}
        seeds = sorted({s for _, s in by_seed if all((method, s) in by_seed for method in methods)})
        if not seeds:
            continue
        say(f"probing {probe}")
        runs = {m: [Run.open(by_seed[m, seed].folder(results.runs)) for seed in seeds] for m in methods}
        try:
            run_probe(probe, runs, results.path, device)
        except (ValueError, KeyError, RuntimeError) as error:
            totals.failed[f"probe {probe}"] = f"{type(error).__name__}: {error}".splitlines()[0]


def reference_numbers(cell: Cell, one: Evaluation, results: Results) -> dict[str, dict[str, Any]]:
    """Metrics of the references on the episodes of this run; empty if they were not kept."""
    file = Reference(cell=cell).folder(results.runs) / "references.safetensors"
    if not file.exists():
        return {}
    references, wanted = by_method(read_tensors(file)[0], file), one.episodes[cell.config.method_name]
    for name, metrics in references.items():
        if any(metric not in metrics or metrics[metric].shape != x.shape for metric, x in wanted.items()):
            raise FileError(f"{file} does not hold the metrics and episodes of {cell.folder(results.runs)} for {name}")
    return references


def pairs(groups: Sequence[Group]) -> list[Pair]:
    """Compare every two methods of a place with the same settings, in its first metric, on their common seeds."""
    by_place: dict[tuple[Any, ...], list[Group]] = {}
    for group in groups:
        by_place.setdefault((group.place, group.preset, group.variant), []).append(group)
    result: list[Pair] = []
    for (place, _, _), rivals in by_place.items():
        rivals.sort(key=lambda group: list(METHODS).index(group.method))  # independent of the seeds that exist
        domain, task, _, _, n = place
        setting = rivals[0].setting
        metric, own = rivals[0].headline, []
        for i, a in enumerate(rivals):
            for b in rivals[:i]:
                seeds = tuple(sorted(a.runs.keys() & b.runs.keys()))
                if seeds:
                    names = {"method": a.method, "other": b.method, "metric": metric}
                    a_SE, b_SE = (group.only(seeds).values(metric) for group in (a, b))
                    difference, low, high, p = paired(a_SE, b_SE, a.block)
                    numbers = {"difference": difference, "low": low, "high": high, "p": p, "p_holm": p}
                    about = {"domain": domain, "task": task, "setting": setting, "n": n, "seeds": seeds}
                    own.append(Pair(**names, **numbers, **about))
        result += holm(own)
    return result


# ---------------------------------------------------------------- dry run


def plan(options: Reproduce) -> list[dict[str, Any]]:
    """One row per cell that says whether it is done, and a last row with the total; or the references left to score."""
    results, gpu = options.results, on_gpu(options.device)
    existing, rows, left = measured(results), [], {}
    if options.references_only:
        missing = references(cells_of(options), existing)
        return [{"domain": t.cell.config.domain_name, "task": t.cell.task, "setting": t.setting} for t in missing]
    for cell in cells_of(options):
        done = is_done(cell, results, existing)
        alone = 0.0 if done else seconds(cell, on_gpu=gpu)
        left[cell.identity] = (cell, alone)
        c, changed = cell.config, ", ".join(f"{name}={value}" for name, value in cell.settings)
        head = {"domain": c.domain_name, "task": cell.task, "method": c.method_name, "seed": c.seed}
        rows.append({**head, "setting": changed or "-", "left": "done" if done else in_words(alone)})
    workers = chosen_executor(options).workers
    whole = in_words(grid_seconds(left, workers, on_gpu=gpu)) if left else "nothing"
    where = "GPU" if gpu else "CPU"
    count = f"{len(rows)} cells"
    return [*rows, {"domain": count, "setting": f"{workers} at a time on a {where}", "left": f"about {whole}"}]
