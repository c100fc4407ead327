"""A study, from its grid to rows: what is done is skipped, what fails is told and does not stop the rest."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from uat.evaluation.comparison import Group, compare, run_groups
from uat.evaluation.scores import Evaluation, by_method, read_evaluation
from uat.evaluation.statistics import Pair, holm, paired
from uat.files import FileError
from uat.lock import locked
from uat.methods import METHODS
from uat.paper.studies import efficiency
from uat.paper.studies.cells import Cell, jobs, merged
from uat.paper.studies.estimate import grid_seconds, in_words, seconds
from uat.paper.studies.executors import Executor, InProcess, Pool, Ray
from uat.paper.studies.files import PAIR_KEY, SCORE_KEY, SUMMARY_KEY, TIMING_KEY, Results, merge
from uat.paper.studies.grids import STUDIES, TIMED, chosen_studies
from uat.paper.studies.options import Reproduce
from uat.paper.studies.probes import look, seen
from uat.paper.studies.work import Reference, Task, keep_failure, scores_of
from uat.rows import EFFICIENCY
from uat.runs import Run
from uat.tensor_files import read_tensors
from uat.terminal import say
from uat.threads import cores, cpu_threads, thread_count
from uat.training.progress import Board, show_board
from uat.training.surroundings import pick_device


@dataclass(slots=True)
class Summing:
    """What a call did."""

    cells: int = 0
    """Cells of the study."""
    done_before: int = 0
    trained: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    """Job -> sentence."""
    missing: list[str] = field(default_factory=list)
    """What this version cannot run yet."""


def reproduce(options: Reproduce, board: Callable[[int], Board] = show_board) -> Summing:
    """Run what is left of a study. Nobody else may write in the folder of results meanwhile."""
    cells = cells_of(options)
    with (
        locked(options.results.path, f"the study {options.study}, preset {options.preset}"),
        cpu_threads(options.threads),
    ):
        return _reproduce(options, cells, board)


def _reproduce(options: Reproduce, cells: Sequence[Cell], board: Callable[[int], Board]) -> Summing:
    results, summing = options.results, Summing()
    studies = [STUDIES[name] for name in chosen_studies(options.study)]
    summing.missing = list(dict.fromkeys(said for study in studies for said in study.missing()))
    there = measured(results)
    todo = [cell for cell in cells if not is_done(cell, results, there)]
    summing.cells, summing.done_before = len(cells), len(cells) - len(todo)
    tasks: list[Task] = [*references(cells, there), *jobs(todo, seeds_together=on_gpu(options))]
    run(tasks, executor_for(options), results, summing, retries=options.retries, board=board)
    if any(study.timed for study in studies):
        time_methods(options, results, summing)
    conclude(results)
    look_inside(cells_of(replace(options, methods=())), results, summing, pick_device(options.device))
    return summing


def cells_of(options: Reproduce) -> list[Cell]:
    studies = [STUDIES[name] for name in chosen_studies(options.study)]
    return merged(cell for study in studies for cell in study.cells(options.preset, options.seeds, options.filter))


Measured = set[tuple[str, str, str, str]]
"""Domain, task, setting and run ("" for references) of rows that are there."""


def measured(results: Results) -> Measured:
    return {(row["domain"], row["task"], row["setting"], row["run"]) for row in results.read("scores")}


def is_done(cell: Cell, results: Results, there: Measured) -> bool:
    """Whether its rows are there, and what probes are to look at, or have seen."""
    if cell.identity not in {run for _, _, _, run in there}:
        return False
    looked = [found for probe in cell.probes if (found := seen(results.path, probe)) and cell.identity in found.runs]
    return len(looked) == len(cell.probes) or scores_of(cell, results.runs) is not None


def references(cells: Sequence[Cell], there: Measured) -> list[Reference]:
    """One for each task whose references have no rows yet."""
    found: dict[str, Reference] = {}
    for cell in cells:
        task, c = Reference(cell=cell), cell.config
        if task.key not in found and (c.domain_name, cell.task, c.build_true_domain().setting, "") not in there:
            found[task.key] = task
    return list(found.values())


# ---------------------------------------------------------------- running


def on_gpu(options: Reproduce) -> bool:
    return options.device == "cuda" or (options.device is None and torch.cuda.is_available())


def executor_for(options: Reproduce) -> Executor:
    gpus = torch.cuda.device_count() if on_gpu(options) else 0
    workers, threads = options.workers or gpus or cores(), thread_count(options.threads)
    if options.executor == "ray":
        return Ray(workers=workers, address=options.address, device=options.device, threads=threads)
    if workers == 1:
        return InProcess(device=options.device, threads=threads)
    return Pool(workers=workers, device=options.device, threads=threads)


def run(
    tasks: Sequence[Task],
    executor: Executor,
    results: Results,
    summing: Summing,
    *,
    retries: int = 0,
    board: Callable[[int], Board] = show_board,
) -> None:
    """Do all tasks; rows are written as they come, so that a kill loses only what was under way."""
    notes = results.path / "progress"
    waiting = list(tasks)
    for attempt in range(1 + retries):
        failed: list[Task] = []
        with board(len(waiting)) as shown, _removed(notes):
            for index, outcome in executor.outcomes(
                waiting, results.runs, notes, lambda shown=shown: shown.watch(notes)
            ):
                task = waiting[index]
                if outcome.failure is None:
                    results.add("scores", outcome.rows, SCORE_KEY)
                    summing.failed.pop(task.name, None)
                    summing.trained += 0 if isinstance(task, Reference) else sum(c.scored for c in task.cells)
                else:
                    failed.append(task)
                    summing.failed[task.name] = outcome.failure
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
    """Without this folder before and after: notes of workers that were killed tell nothing."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def time_methods(options: Reproduce, results: Results, summing: Summing) -> None:
    """Speed and memory, one method after the other, when all else is done."""
    file = results.path / "efficiency.jsonl"
    if options.domains and efficiency.DOMAIN not in options.domains:
        return
    here = (options.preset, efficiency.device_name(options.device))
    measure = efficiency.measure_apart if pick_device(options.device).type == "cuda" else efficiency.measure
    there = {row["method"] for row in results.timings() if (row["preset"], row["device"]) == here}
    for method in TIMED:
        if options.filter.wants_method(method) and method not in there:
            say(f"timing {method}")
            try:
                merge(file, measure(method, options.preset, options.device), TIMING_KEY, EFFICIENCY)
            except (ValueError, RuntimeError) as error:
                summing.failed[f"efficiency of {method}"] = str(error).splitlines()[0]


# ---------------------------------------------------------------- intervals and pairs


def conclude(results: Results) -> None:
    """Intervals and paired differences, of all rows whose run folders are here, whichever part was asked for now: a
    smaller grid must not take the seeds of a larger one out of an interval, nor pairs out of Holm's rule."""
    found = evaluations(results)
    if not found:
        return
    results.add("intervals", [asdict(row) for row in compare(found)], SUMMARY_KEY)
    results.add("pairs", [asdict(pair) for pair in pairs(run_groups(found))], PAIR_KEY)


def evaluations(results: Results) -> list[Evaluation]:
    """What the run folders hold of the rows, with the references' numbers; methods in the registry's order."""
    rows = {(row["run"], row["n"]) for row in results.read("scores")}
    found: dict[str, Evaluation] = {}
    for folder in sorted(file.parent for file in results.runs.glob("*/scores.jsonl")):
        try:
            one = read_evaluation(Run.open(folder))
            identity, score = one.config.identity(), one.scores[0]
            if (identity, score.n) in rows:
                own = Cell(config=one.config, task=score.task)
                found[identity] = replace(one, episodes={**one.episodes, **reference_numbers(own, one, results)})
        except FileError as error:  # a folder of another version, or one that somebody changed
            say(f"left out of intervals and pairs: {error}")
    order = list(METHODS)
    return sorted(found.values(), key=lambda one: order.index(one.config.method_name))


def look_inside(cells: Sequence[Cell], results: Results, summing: Summing, device: torch.device) -> None:
    """Let each probe look at the runs that are here, the same seeds of every method; it waits until all methods are."""
    for probe in sorted({probe for cell in cells for probe in cell.probes}):
        own = [cell for cell in cells if probe in cell.probes]
        ready = [cell for cell in own if (cell.folder(results.runs) / "scores.jsonl").exists()]
        methods = list(dict.fromkeys(cell.config.method_name for cell in own))
        by_seed = {(cell.config.method_name, cell.config.seed): cell for cell in ready}
        seeds = sorted({s for _, s in by_seed if all((method, s) in by_seed for method in methods)})
        if not seeds:
            continue
        say(f"looking at {probe}")
        runs = {m: [Run.open(by_seed[m, seed].folder(results.runs)) for seed in seeds] for m in methods}
        try:
            look(probe, runs, results.path, device)
        except (ValueError, KeyError, RuntimeError) as error:
            summing.failed[f"probe {probe}"] = f"{type(error).__name__}: {error}".splitlines()[0]


def reference_numbers(cell: Cell, one: Evaluation, results: Results) -> dict[str, dict[str, Any]]:
    """What the references scored on the episodes of this run; nothing where they were not kept."""
    file = Reference(cell=cell).folder(results.runs) / "references.safetensors"
    if not file.exists():
        return {}
    found, wanted = by_method(read_tensors(file)[0], file), one.episodes[cell.config.method_name]
    for name, metrics in found.items():
        if any(metric not in metrics or metrics[metric].shape != x.shape for metric, x in wanted.items()):
            raise FileError(f"{file} does not hold the metrics and episodes of {cell.folder(results.runs)} for {name}")
    return found


def pairs(groups: Sequence[Group]) -> list[Pair]:
    """Every two methods of a place under the same settings, by its first metric, on the seeds that both have."""
    by_place: dict[tuple[Any, ...], list[Group]] = {}
    for group in groups:
        by_place.setdefault((group.place, group.preset, group.variant), []).append(group)
    found: list[Pair] = []
    for (place, _, _), there in by_place.items():
        there.sort(key=lambda group: list(METHODS).index(group.method))  # whichever seeds are here
        domain, task, _, _, n = place
        setting = there[0].setting
        metric, own = there[0].headline, []
        for i, a in enumerate(there):
            for b in there[:i]:
                seeds = tuple(sorted(a.runs.keys() & b.runs.keys()))
                if seeds:
                    names = {"method": a.method, "other": b.method, "metric": metric}
                    ours, theirs = (group.only(seeds).values(metric) for group in (a, b))
                    difference, low, high, p = paired(ours, theirs, a.block)
                    numbers = {"difference": difference, "low": low, "high": high, "p": p, "p_holm": p}
                    about = {"domain": domain, "task": task, "setting": setting, "n": n, "seeds": seeds}
                    own.append(Pair(**names, **numbers, **about))
        found += holm(own)
    return found


# ---------------------------------------------------------------- what would be done


def plan(options: Reproduce) -> list[dict[str, Any]]:
    """One row per cell, and whether it is done; the last row sums up."""
    results, gpu = options.results, on_gpu(options)
    there, rows, left = measured(results), [], {}
    for cell in cells_of(options):
        done = is_done(cell, results, there)
        alone = 0.0 if done else seconds(cell, on_gpu=gpu)
        left[cell.identity] = (cell, alone)
        c, changed = cell.config, ", ".join(f"{name}={value}" for name, value in cell.settings)
        head = {"domain": c.domain_name, "task": cell.task, "method": c.method_name, "seed": c.seed}
        rows.append({**head, "setting": changed or "-", "left": "done" if done else in_words(alone)})
    workers = executor_for(options).workers
    whole = in_words(grid_seconds(left, workers, on_gpu=gpu)) if left else "nothing"
    where = "GPU" if gpu else "CPU"
    count = f"{len(rows)} cells"
    return [*rows, {"domain": count, "setting": f"{workers} at a time on a {where}", "left": f"about {whole}"}]
