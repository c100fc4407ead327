"""Revisions of numerics: rows of a flawed build are marked and made again, those of any other build are done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import uat
from uat import numerics
from uat.files import FileError, read_rows, row_lines
from uat.paper.report.rows import Rows
from uat.paper.report.score_tables import number
from uat.paper.studies import Reproduce, reproduce
from uat.paper.studies.files import FLAWED, Results
from uat.paper.studies.reproduce import cells_of, plan
from uat.tensor_files import read_tensors, write_tensors
from uat.training.checkpoint import STATE, progress_of

RESULTS = Path(__file__).parents[3] / "results" / "paper"
TINY = ("domain.horizon=5", "domain.size=4", "train.epochs=2", "train.validate_every=1", "evaluation.episodes=4")


def tiny(out: Path) -> Reproduce:
    chosen = {"domains": ("darkroom",), "tasks": ("cyclic",), "methods": ("vanilla", "tent")}
    return Reproduce(study="main", preset="smoke", device="cpu", set=TINY, out=out, workers=1, **chosen)


def rows(out: Path) -> list[dict[str, Any]]:
    return read_rows(out / "darkroom.jsonl")


def rewrite(out: Path, **columns: Any) -> None:
    """Give the rows of runs other values; None removes the column."""
    made = [{**row, **columns} if row["run"] else row for row in rows(out)]
    made = [{name: value for name, value in row.items() if value is not None} for row in made]
    (out / "darkroom.jsonl").write_text(row_lines(made))


def retell(run: uat.Run, said: str | None) -> None:
    """Change what a checkpoint says of the builds that trained it."""
    tensors, meta = read_tensors(run.file(STATE))
    meta.pop("numerics")
    write_tensors(run.file(STATE), tensors, meta if said is None else {**meta, "numerics": said})


def left(options: Reproduce) -> list[str]:
    """Methods that a study would train."""
    return [row["method"] for row in plan(options)[:-1] if row["left"] != "done"]


def test_flaws_are_those_of_the_revisions_that_have_one() -> None:
    assert numerics.current("cpu") == "cpu-1"
    assert numerics.current("xpu") == "xpu-1"
    assert all(numerics.flaw_of(numerics.current(kind)) is None for kind in numerics.REVISIONS)
    for kind, revision in numerics.FLAWS:
        assert revision < numerics.REVISIONS[kind]
        assert numerics.flaw_of(f"{kind}-{revision}") == numerics.FLAWS[kind, revision]
        assert numerics.flaw_of(f"cpu-1+{kind}-{revision}") == numerics.FLAWS[kind, revision]
    assert numerics.flaw_of("") is None
    assert numerics.flaw_of("anything") is None
    assert numerics.joined("cuda-1", "cpu-1") == "cpu-1+cuda-1"
    assert numerics.joined("cpu-1", "cpu-1") == "cpu-1"
    assert numerics.joined(None, "cpu-1") is None  # what is not known stays so


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("study") / "results"
    assert reproduce(tiny(out)).trained == 2
    return out


def test_rows_and_checkpoints_say_which_build_trained_them(trained: Path) -> None:
    assert {row["numerics"] for row in rows(trained) if row["run"]} == {"cpu-1"}
    assert {row["numerics"] for row in rows(trained) if not row["run"]} == {""}
    run = uat.Run.open(next((trained / "runs").glob("*vanilla*")))
    progress = progress_of(run)
    assert progress is not None
    assert progress.numerics == "cpu-1"
    more = uat.override(run.config, {"train.epochs": 3})
    (run.path / "config.json").write_text(json.dumps(uat.config.to_json(more)))  # pyright: ignore
    tensors, meta = read_tensors(run.file(STATE))
    unfinished = {**meta, "finished": False, "run": more.identity(), "numerics": "cuda-1"}
    write_tensors(run.file(STATE), tensors, unfinished)
    progress = progress_of(uat.train(more, run.path, resume=True, device="cpu"))
    assert progress is not None
    assert progress.numerics == "cpu-1+cuda-1"


def test_a_study_makes_rows_of_flawed_builds_again_and_no_others(tmp_path: Path) -> None:
    out = tmp_path / "results"
    options = tiny(out)
    reproduce(options)
    before, vanilla = rows(out), next(cell for cell in cells_of(options) if cell.config.method_name == "vanilla")
    assert left(options) == []

    rewrite(out, numerics=None)  # without a build in their rows: finished unless they are listed
    retell(uat.Run.open(vanilla.folder(options.results.runs)), None)
    assert left(options) == []
    listed = {"noise": {"what": "noisy gradients", "runs": [vanilla.identity, "0123456789abcdef"]}}
    (out / FLAWED).write_text(json.dumps(listed))
    assert left(options) == ["vanilla"]
    assert Results(out).flaws() == {vanilla.identity: "noisy gradients"}
    report = Rows.of(out, "smoke")
    marked = {key[3] for key in report.values if number(report.number(key)).endswith("†")}
    assert marked == {"vanilla"}
    assert "† Includes runs of a build with a known flaw (1 of 2 runs): noisy gradients" in report.flaw_notes()

    assert reproduce(options).trained == 1
    assert [folder.name for folder in (out / "flawed").iterdir()] == [vanilla.name]
    assert left(options) == []
    assert Rows.of(out, "smoke").flaw_notes() == ""
    strip = lambda made: [{**row, "numerics": ""} for row in made]  # noqa: E731
    assert strip(rows(out)) == strip(before)  # a CPU gives the same numbers again


def test_a_revision_with_a_flaw_is_seen_without_a_list(trained: Path) -> None:
    rewrite(trained, numerics="cuda-1")
    assert left(tiny(trained)) == ["vanilla", "tent"]
    rewrite(trained, numerics="cuda-2")
    assert left(tiny(trained)) == []


@pytest.mark.parametrize("content", ['{"a": 1}', '{"a": {"what": "x"}}', '{"a": {"what": 1, "runs": []}}', "[]", "x"])
def test_a_list_of_anything_else_is_one_sentence(content: str, tmp_path: Path) -> None:
    (tmp_path / FLAWED).write_text(content)
    with pytest.raises(FileError, match=FLAWED) as caught:
        Results(tmp_path).listed_flaws()
    assert "\n" not in str(caught.value)


def test_the_committed_list_is_what_the_page_on_speed_says() -> None:
    """DarkRoom's boundary and mechanism, sepsis but CaDM and the sensitivity, MovieLens but late and false rewards."""
    every, scores = Results(RESULTS).flaws(), Results(RESULTS).read("scores")
    assert every.keys() == Results(RESULTS).listed_flaws().keys()  # each has its rows
    listed = json.loads((RESULTS / "flawed.json").read_text(encoding="utf-8"))
    noisy, cut_off = (set(listed[name]["runs"]) for name in ("shared-workspace", "patience"))
    assert every.keys() == noisy | cut_off
    late = [row for row in scores if row["run"] in cut_off]
    assert {(row["domain"], row["method"]) for row in late} == {("movielens", "uat")}
    flaws = {run: what for run, what in every.items() if run in noisy}
    unfused = {"gtrxl", "sasrec", "bert4rec", "cadm"}
    for row in (row for row in scores if row["run"]):
        wanted = {
            "darkroom": row["setting"] != "default",
            "sepsis": row["setting"] in ("default", "reward_scale=20.0") and row["method"] != "dt",
            "movielens": row["setting"] == "path=ml-1m",
            "markets": False,
        }[row["domain"]]
        assert (row["run"] in flaws) == (wanted and row["method"] not in unfused), row
    page = (RESULTS.parents[1] / "docs" / "speed.md").read_text()
    assert f"lists the {len(flaws)} runs" in page
    assert {what for run, what in flaws.items() if run not in cut_off} == {numerics.FLAWS["cuda", 1]}
