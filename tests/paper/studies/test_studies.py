"""Studies: complete grids, no repeated cell, equal rows from every executor, and failures that do not affect others."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import uat
from tests.builders import call
from uat.cli import main
from uat.config import override
from uat.domains import DOMAINS
from uat.evaluation.comparison import Group, run_groups
from uat.executors import Note, kinds
from uat.methods import METHODS
from uat.paper.studies import STUDIES, Reproduce, efficiency, reproduce, work
from uat.paper.studies.__main__ import main as plain_main
from uat.paper.studies.cells import Filter, jobs
from uat.paper.studies.files import Results, read
from uat.paper.studies.grids import BOUNDARY, with_ablations
from uat.paper.studies.probes import read_trace
from uat.paper.studies.reproduce import cells_of, evaluations, measured, pairs, plan, references
from uat.rows import EFFICIENCY, SCORES
from uat.runs import Run
from uat.training.epoch import Epoch
from uat.training.progress import Board, Progress
from uat.training.trainer import Trainer

TINY = ("domain.horizon=5", "domain.size=4", "train.epochs=2", "train.validate_every=1", "evaluation.episodes=4")
Captured = pytest.CaptureFixture[str]


def tiny(out: Path, study: str = "main", **changes: Any) -> Reproduce:
    chosen = {"domains": ("darkroom",), "tasks": ("cyclic",), "methods": ("vanilla", "tent", "uat"), "workers": 1}
    return Reproduce(study=study, preset="smoke", device="cpu", set=TINY, out=out, **{**chosen, **changes})


def scores(folder: Path) -> list[dict[str, Any]]:
    return read(folder / "darkroom.jsonl", SCORES)


# ---------------------------------------------------------------- grids


def test_main_and_ablation_are_every_method_in_every_domain_once() -> None:
    cells = {name: STUDIES[name].cells("smoke") for name in ("main", "ablation")}
    for name, wanted in (("main", lambda m: not METHODS[m].ablation), ("ablation", with_ablations("uat"))):
        found = [(c.config.domain_name, c.task, c.config.method_name) for c in cells[name]]
        assert len(set(found)) == len(found)
        assert set(found) == {
            (d, t, m) for d in DOMAINS for t in DOMAINS[d].tasks for m in METHODS if METHODS[m].serves(d) and wanted(m)
        }


def test_a_cell_that_several_studies_ask_for_is_one() -> None:
    every = cells_of(Reproduce(study="all", preset="paper", seeds=(0,)))
    assert len({cell.identity for cell in every}) == len(every) == len({cell.name for cell in every})
    alone = [cell for study in STUDIES.values() for cell in study.cells("paper", [0])]
    assert {cell.identity for cell in alone} == {cell.identity for cell in every}
    assert len(alone) > len(every)


def test_sweeps_hold_the_values_of_the_paper_and_their_defaults_are_the_recipe() -> None:
    cells = STUDIES["sensitivity"].cells("paper", [0])
    assert {c.config.method.feedback_decay for c in cells} == {0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99}
    assert {c.config.method.d_utility for c in cells} == {4, 8, 16, 32, 64}
    assert [c.config for c in cells if not c.settings] == [uat.recipe("sepsis", "uat")]
    noise = {c.config.feedback.noise for c in STUDIES["boundary"].cells("paper", [0])}
    assert noise == {0.0, 0.5, 1.0, 2.0, 5.0}


def test_cells_that_share_a_training_are_one_job_and_seeds_can_be_separate() -> None:
    chosen = Filter(domains=("sepsis",), tasks=("regimes",), methods=("vanilla", "tent", "cotta"))
    cells = STUDIES["main"].cells("smoke", [0, 1], chosen)
    together, apart = jobs(cells, seeds_together=True), jobs(cells, seeds_together=False)
    assert [len(job.cells) for job in together] == [6]
    assert [len(job.cells) for job in apart] == [3, 3]
    lonely = jobs([c for c in cells if c.config.method_name == "tent"], seeds_together=False)
    assert [(c.config.method_name, c.scored) for c in lonely[0].cells] == [("vanilla", False), ("tent", True)]


# ---------------------------------------------------------------- running


def test_a_killed_grid_goes_on_and_no_cell_is_done_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: Counter[tuple[str, str, int]] = Counter()
    whole = Epoch.run

    def counted(self: Epoch, index: int, epoch: int) -> Any:
        done[self.config.method_name, self.config.identity(), epoch] += 1
        return whole(self, index, epoch)

    def killed_in_the_middle(self: Epoch, index: int, epoch: int) -> Any:
        if self.config.method_name == "uat" and epoch == 2:
            raise KeyboardInterrupt
        return counted(self, index, epoch)

    options = tiny(tmp_path / "killed", seeds=(0, 1), runs=tmp_path / "elsewhere")
    monkeypatch.setattr(Epoch, "run", killed_in_the_middle)
    with pytest.raises(KeyboardInterrupt):
        reproduce(options)
    monkeypatch.undo()
    left = {row["method"] for row in scores(options.folder)}
    assert {"vanilla", "tent"} <= left
    assert "uat" not in left
    monkeypatch.setattr(Epoch, "run", counted)
    summing = reproduce(options)
    assert (summing.cells, summing.done_before, summing.trained, summing.failed) == (6, 4, 2, {})
    assert set(done.values()) == {1}
    assert {method for method, _, _ in done} == {"vanilla", "uat"}  # TENT took Vanilla's weights over
    again = reproduce(options)
    assert (again.done_before, again.trained) == (6, 0)
    assert set(done.values()) == {1}
    monkeypatch.undo()
    straight = tiny(tmp_path / "straight", seeds=(0, 1))
    reproduce(straight)
    assert scores(straight.folder) == scores(options.folder)
    for kind in ("intervals", "pairs"):
        assert Results(straight.folder).read(kind) == Results(options.folder).read(kind) != []


def test_a_smaller_grid_leaves_the_intervals_and_pairs_of_the_larger_one(tmp_path: Path) -> None:
    """Selecting one seed and two methods keeps the intervals of all seeds, and Holm's correction for all pairs."""
    reproduce(tiny(tmp_path, seeds=(0, 1)))
    before = {kind: Results(tmp_path).read(kind) for kind in ("intervals", "pairs")}
    assert {tuple(row["seeds"]) for row in before["pairs"]} == {(0, 1)}
    reproduce(tiny(tmp_path, seeds=(0,), methods=("vanilla", "uat")))
    assert {kind: Results(tmp_path).read(kind) for kind in before} == before


def test_scores_of_weights_that_are_trained_on_do_not_count(tmp_path: Path) -> None:
    """Scores of an unfinished run do not count as those of the finished one."""
    options = tiny(tmp_path, methods=("uat",))
    [cell] = cells_of(options)
    folder = cell.folder(options.results.runs)
    trainer = Trainer(Run.create(cell.config, folder), torch.device("cpu"))
    for _ in zip(range(2), trainer.turns(lambda label, total: Progress()), strict=False):
        pass  # the first of two epochs is settled when the second begins
    uat.evaluate(folder, episodes=2, references=False, unfinished=True, device="cpu")
    assert reproduce(options).failed == {}
    assert {row["n"] for row in scores(tmp_path)} == {4}


def test_a_run_is_scored_once_all_of_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between the two files of an evaluation leaves a cell to be scored again, not one without intervals."""

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    [cell] = cells_of(tiny(tmp_path, methods=("uat",)))
    monkeypatch.setattr("uat.evaluation.scores._flat", killed)
    with pytest.raises(KeyboardInterrupt):
        work.cell_rows(
            jobs([cell], seeds_together=False)[0], tmp_path, torch.device("cpu"), Note(tmp_path / "0.json", "")
        )
    monkeypatch.undo()
    assert work.scores_of(cell, tmp_path) is None


def test_pairs_are_named_alike_whichever_seeds_are_there(tmp_path: Path) -> None:
    """Otherwise a study that is completed later would keep old pairs with their methods swapped."""
    options = tiny(tmp_path, seeds=(0, 1), methods=("vanilla", "uat"))
    reproduce(options)
    found = evaluations(options.results)
    part = [one for one in found if (one.config.method_name, one.config.seed) != ("vanilla", 0)]
    named = [{(pair.method, pair.other) for pair in pairs(run_groups(some))} for some in (found, part)]
    assert len(part) == len(found) - 1
    assert named == [{("uat", "vanilla")}] * 2


def test_a_probe_waits_for_both_methods_and_keeps_its_trace(tmp_path: Path) -> None:
    """A probe without all of its methods is no failure, and a smaller selection keeps the trace of a larger one."""
    whole = {"study": "mechanism", "methods": (), "seeds": (0, 1)}
    assert reproduce(tiny(tmp_path, **{**whole, "methods": ("uat",)})).failed == {}
    assert read_trace(tmp_path, "attention") is None
    assert reproduce(tiny(tmp_path, **whole)).failed == {}
    trace = read_trace(tmp_path, "attention")
    assert trace is not None
    assert len(trace.runs) == 4
    for fewer in ({"methods": ("uat",)}, {"seeds": (0,)}):
        assert reproduce(tiny(tmp_path, **{**whole, **fewer})).failed == {}
        now = read_trace(tmp_path, "attention")
        assert now is not None
        assert now.runs == trace.runs


def test_costs_of_methods_are_measured_on_every_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"domain": "darkroom", "batch": 4, "metric": "step_ms"}

    def measured(method: str, preset: str, device: str | None) -> list[dict[str, Any]]:
        return [{**about, "method": method, "preset": preset, "device": "here", "value": 1.0}]

    monkeypatch.setattr(efficiency, "measure", measured)
    monkeypatch.setattr(efficiency, "device_name", lambda device: "here")
    elsewhere = {**about, "method": "uat", "preset": "smoke", "device": "elsewhere", "value": 2.0}
    (tmp_path / "efficiency.jsonl").write_text(json.dumps(elsewhere) + "\n")
    for _ in range(2):
        reproduce(tiny(tmp_path, study="efficiency", methods=("uat",)))
        assert [row["device"] for row in read(tmp_path / "efficiency.jsonl", EFFICIENCY)] == ["elsewhere", "here"]


def test_costs_measured_in_a_process_of_their_own_are_the_same_metrics() -> None:
    rows = efficiency.measure_apart("vanilla", "smoke", "cpu")
    assert {row["metric"] for row in rows} == {"optimize_ms", "epoch_ms", "parameters", "step_ms"}
    assert all(row["value"] > 0 and row["method"] == "vanilla" for row in rows)


def test_a_failure_is_reported_and_retried_and_does_not_stop_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    whole, failures = work.evaluate, [1]

    def fails_once(run: Any, **how: Any) -> Any:
        if "-uat-" in str(run) and failures:
            raise MemoryError("no memory left for this")
        return whole(run, **how)

    monkeypatch.setattr(work, "evaluate", fails_once)
    options = tiny(tmp_path / "results", methods=("vanilla", "uat"))
    summing = reproduce(options)
    assert list(summing.failed.values()) == ["MemoryError: no memory left for this"]
    assert summing.trained == 1
    [story] = (options.folder / "failures").iterdir()
    assert "fails_once" in story.read_text()
    assert "failed: darkroom/cyclic uat" in capsys.readouterr().err
    failures.clear()
    assert reproduce(options).failed == {}


def test_a_failure_is_retried_immediately_with_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, attempts = work.evaluate, []

    def fails_first(run: Any, **how: Any) -> Any:
        attempts.append(run)
        if len(attempts) == 1:
            raise MemoryError
        return whole(run, **how)

    monkeypatch.setattr(work, "evaluate", fails_first)
    summing = reproduce(tiny(tmp_path, methods=("uat",), retries=1))
    assert (summing.failed, summing.trained, len(attempts)) == ({}, 1, 2)


def test_references_are_played_once_for_each_task_and_each_kind_of_feedback(tmp_path: Path) -> None:
    options = tiny(tmp_path, study="all", tasks=("cyclic", "gradual"), methods=("uat",))
    cells = cells_of(options)
    channels = {cell.config.feedback for cell in cells if not cell.config.feedback.is_true}
    assert len(channels) == 8
    assert len(cells) > 2 + len(channels)
    assert len(references(cells, set())) == 2 + len(channels)


def test_each_kind_of_feedback_has_a_ceiling_and_runs_have_learning_curves(tmp_path: Path) -> None:
    """The filter's rows name the channel, and nothing is done twice."""
    options = tiny(tmp_path, study="boundary", tasks=("gradual",), methods=("uat",))
    assert reproduce(options).failed == {}
    rows = [row for row in scores(tmp_path) if row["metric"] == "accuracy"]
    channels = {cell.config.build_domain().setting for cell in cells_of(options)}
    assert len(channels) == 9
    assert {row["setting"] for row in rows if row["method"] == "ceiling"} == channels
    intervals = Results(tmp_path).read("intervals")
    assert {row["setting"] for row in intervals if row["method"] == "ceiling"} == channels
    assert references(cells_of(options), measured(options.results)) == []
    curves = Results(tmp_path).read("curves")
    assert {row["run"] for row in curves} == {row["run"] for row in rows if row["run"]}
    for row in curves:
        assert [epoch for epoch, _ in row["points"]] == [1, 2]
        assert row["metric"] == "accuracy"
        assert all(0 <= value <= 1 for _, value in row["points"])
    before = Results(tmp_path).file("curves", "darkroom").read_bytes()
    assert reproduce(options).trained == 0
    assert Results(tmp_path).file("curves", "darkroom").read_bytes() == before


def test_references_can_be_scored_without_training(tmp_path: Path) -> None:
    options = replace(tiny(tmp_path, methods=("uat",), references_only=True), set=(*TINY, "feedback.noise=3.0"))
    [left] = plan(options)
    assert (left["domain"], left["task"]) == ("darkroom", "cyclic")
    done = reproduce(options)
    assert (done.trained, done.failed) == (0, {})
    assert {row["method"] for row in scores(tmp_path)} == {"ceiling", "expert", "random"}
    assert {row["setting"] for row in scores(tmp_path)} == {left["setting"]}
    assert "feedback.noise=3.0" in left["setting"]
    assert plan(options) == []


def test_methods_of_the_boundary_study_that_are_not_registered_are_left_out() -> None:
    cells = STUDIES["boundary"].cells("paper", [0])
    found = {cell.config.method_name for cell in cells if cell.config.feedback.noise == 1.0}
    assert found == {name for name in BOUNDARY if name in METHODS} >= {"uat", "adt", "vanilla"}


@pytest.mark.parametrize("kept", [True, False])
def test_a_metric_that_was_added_is_scored_without_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """Score again where a run folder is left, and keep rows without one. References are scored again in any case."""
    options = tiny(tmp_path, methods=("vanilla",))
    reproduce(options)
    whole = scores(options.folder)
    if not kept:
        shutil.rmtree(options.results.runs)
    for file in [options.folder / "darkroom.jsonl", *options.results.runs.glob("*/scores.jsonl")]:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows if row["metric"] != "return"))
    monkeypatch.delattr(Epoch, "run")
    done = reproduce(options)
    assert (done.failed, done.done_before) == ({}, 0 if kept else 1)
    found = scores(options.folder)
    assert {row["method"] for row in found if row["metric"] == "return"} >= {"ceiling", "expert", "random"}
    assert (found == whole) == kept


def test_sepsis_is_studied_with_the_papers_labels_and_with_aligned_ones() -> None:
    for study in ("main", "ablation", "diagnostics"):
        cells = STUDIES[study].cells("paper", [0], Filter(domains=("sepsis",)))
        by_task = {task: [c for c in cells if c.task == task] for task in ("regimes", "aligned")}
        assert [len(own) for own in by_task.values()] == [len(cells) / 2] * 2
        for papers, ours in zip(*by_task.values(), strict=True):
            assert override(papers.config, {"domain.task": "aligned"}) == ours.config
            assert papers.name.replace("-regimes-", "-aligned-") == ours.name
            assert papers.identity != ours.identity
    for study in ("mechanism", "sensitivity"):
        assert {c.task for c in STUDIES[study].cells("paper", [0], Filter(domains=("sepsis",)))} == {"regimes"}


def test_progress_is_reported_for_the_study_and_for_each_worker(tmp_path: Path, capsys: Captured) -> None:
    board = Board(4, every_seconds=0.0)
    (tmp_path / "0.json").write_text(json.dumps({"name": "darkroom", "epoch": 3, "total": 9, "note": "loss 0.1"}))
    (tmp_path / "1.json").write_text('{"name": "half')
    board.watch(tmp_path)
    board.done("darkroom", 2.0, failed=False)
    said = capsys.readouterr().err
    assert "worker 0: darkroom, epoch 3/9 loss 0.1" in said
    assert "[1/4, 0 s, about 0 s left]: done darkroom (2 s)" in said


# ---------------------------------------------------------------- executors


def straight(tmp_path: Path) -> list[dict[str, Any]]:
    options = tiny(tmp_path / "straight", seeds=(0, 1))
    reproduce(options)
    return scores(options.folder)


def test_a_worker_computes_on_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's device is also torch's current device, on which graphs are captured and kernels launched."""
    chosen: list[str] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    kinds._choose_device(3, "cuda")
    assert kinds.own_device(3, "cuda") == "cuda:1"
    assert chosen == ["cuda:1"]


@pytest.mark.slow
def test_two_processes_give_the_rows_of_one(tmp_path: Path) -> None:
    options = tiny(tmp_path / "pool", seeds=(0, 1), workers=2)
    assert reproduce(options).failed == {}
    assert scores(options.folder) == straight(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
@pytest.mark.filterwarnings("default")
def test_two_workers_of_ray_give_the_rows_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(uat.__file__).parents[1]))
    options = tiny(tmp_path / "ray", seeds=(0, 1), workers=2, executor="ray")
    assert reproduce(options).failed == {}
    assert scores(options.folder) == straight(tmp_path)


@pytest.mark.slow
def test_a_grid_of_processes_that_is_killed_goes_on(tmp_path: Path) -> None:
    """Send SIGKILL to all processes of a running study."""
    out = tmp_path / "killed"
    flags = ["--preset", "smoke", "--device", "cpu", "--domains", "darkroom", "--tasks", "cyclic", "--workers", "2"]
    flags += ["--methods", "vanilla", "uat", "adt", "--seeds", "0", "1", "--out", str(out), "--set", *TINY]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(uat.__file__).parents[1])}
    command = [sys.executable, "-m", "uat.paper.studies", "main", *flags]
    process = subprocess.Popen(command, env=surroundings, start_new_session=True, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while len({row["run"] for row in read(out / "darkroom.jsonl", SCORES)}) < 3:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = {file: file.stat().st_mtime_ns for file in (out / "runs").glob("*/scores.jsonl")}
    assert 0 < len(before) < 6
    subprocess.run(command, env=surroundings, check=True, capture_output=True)
    assert {file: file.stat().st_mtime_ns for file in before} == before
    options = tiny(tmp_path / "straight", seeds=(0, 1), methods=("vanilla", "uat", "adt"))
    reproduce(options)
    assert scores(options.folder) == scores(out)


# ---------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["mian"], "unknown study 'mian'; did you mean 'main'?"),
        (["main", "--preset", "slow"], "unknown preset 'slow'"),
        (["main", "--methods", "uta"], "unknown method 'uta'; did you mean 'uat'?"),
        (["main", "--workers", "0"], "workers=0 must be at least 1"),
        (["main", "--address", "here"], "address='here' is for --executor ray"),
        (["main", "--set", "domain.size"], "set 'domain.size' must be NAME=VALUE"),
        (["main", "--set", "domain.size=x"], "must be JSON"),
        (["main", "--data", "marketts=x"], "unknown data 'marketts'; did you mean 'markets'?"),
        (["main", "--set", "domain.sise=3", "--domains", "darkroom"], "unknown setting 'domain.sise'"),
    ],
)
def test_a_mistake_is_one_sentence(capsys: Captured, tmp_path: Path, argv: list[str], said: str) -> None:
    for run, start in ((lambda a: main(["reproduce", *a]), "uat: "), (plain_main, "uat.paper.studies: ")):
        code, out, err = call(capsys, run, *argv, "--out", str(tmp_path / "none"))
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(start)
        assert said in err
    assert not (tmp_path / "none").exists()


def test_a_dry_run_lists_cells_with_an_estimate_and_does_nothing(capsys: Captured, tmp_path: Path) -> None:
    argv = ["main", "--preset", "paper", "--domains", "darkroom", "--dry-run", "--json", "--out", str(tmp_path / "x")]
    code, out, _ = call(capsys, plain_main, *argv)
    rows = json.loads(out)
    assert code == 0
    assert len(rows) == 1 + 3 * 3 * len(
        [m for m in METHODS if METHODS[m].serves("darkroom") and not METHODS[m].ablation]
    )
    assert rows[-1]["left"].startswith("about ")
    assert not (tmp_path / "x").exists()


def test_studies_are_listed(capsys: Captured) -> None:
    code, out, _ = call(capsys, main, "list", "studies", "--json")
    assert code == 0
    assert [row["study"] for row in json.loads(out)] == list(STUDIES)


def test_pairs_use_the_domains_first_metric() -> None:
    place = ("markets", "joint", "default", "test", 3)
    episodes = {0: {"cagr": torch.ones(3), "sharpe": torch.tensor([1.0, 2.0, 4.0])}}
    groups = [
        Group(place=place, method=method, runs={0: method}, episodes=episodes, headline="sharpe")
        for method in ("vanilla", "uat")
    ]
    assert [pair.metric for pair in pairs(groups)] == ["sharpe"]


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_group_knows_its_domains_first_metric(domain: str, tmp_path: Path) -> None:
    """Metrics in files are sorted by name, so the first one there is not the headline metric."""
    what: dict[str, Any] = {"domains": (domain,), "methods": ("vanilla",), "workers": 1}
    options = Reproduce(study="main", preset="smoke", out=tmp_path, **what)
    done = reproduce(replace(options, tasks=tuple(DOMAINS[domain].tasks[:1])), board=Board)
    assert not done.failed
    first = cells_of(options)[0].config.build_domain().metrics[0].name
    assert {group.headline for group in run_groups(evaluations(options.results))} == {first}
