"""Untrusted rows, traces and notes: every bad value is refused with one sentence that names the file."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.builders import call
from uat import recipe
from uat.cli import main
from uat.config import override
from uat.evaluation.scores import evaluate, read_evaluation
from uat.executors import Outcome, keep_failure
from uat.files import FileError, check_name, parse_json
from uat.metrics import Score
from uat.paper.report.rows import Rows
from uat.paper.report.writing import write_report
from uat.paper.studies.cells import Cell
from uat.paper.studies.files import SCORE_KEY, Results
from uat.paper.studies.options import Reproduce, settings_of
from uat.paper.studies.probes import PROBES, file_of, read_trace
from uat.paper.studies.work import Reference
from uat.rows import CURVES, EFFICIENCY, INTERVALS, PAIRS, SCORES, Columns, check_row
from uat.runs import Run
from uat.tensor_files import read_tensors, write_tensors
from uat.training import train
from uat.training.progress import read_notes

Captured = pytest.CaptureFixture[str]
COMMITTED = Path("results/paper")
KINDS: dict[str, tuple[Columns, Path]] = {
    "scores": (SCORES, Path("darkroom.jsonl")),
    "intervals": (INTERVALS, Path("intervals/darkroom.jsonl")),
    "pairs": (PAIRS, Path("pairs/darkroom.jsonl")),
    "curves": (CURVES, Path("curves/darkroom.jsonl")),
    "efficiency": (EFFICIENCY, Path("efficiency.jsonl")),
}
CURVE = {"domain": "darkroom", "task": "gradual", "setting": "default", "run": "a", "method": "uat", "seed": 0}
CURVE |= {"metric": "accuracy", "points": [[10, 0.5], [20, 0.75]]}
WRONG: list[Any] = [
    None,
    True,
    "x\x1b[2J",
    "a\nb",
    "\u202egnp",
    "\ud800",
    10**400,
    math.inf,
    1e300,
    [],
    [None],
    {},
    [[]],
]
"""Values that are invalid in columns of numbers, names or text; some columns accept one of them."""
LINES = {
    "no JSON": "{",
    "a list": "[1, 2]",
    "a number": "7",
    "text": '"row"',
    "null": "null",
    "brackets": "[" * 100_000,
    "deep": '{"a": ' * 200 + "1" + "}" * 200,
    "digits": '{"n": ' + "9" * 10_000 + "}",
    "nothing": "{}",
}


def first_row(kind: str) -> dict[str, Any]:
    if kind == "curves":
        return CURVE
    return json.loads((COMMITTED / KINDS[kind][1]).read_text().splitlines()[0])


def read(kind: str, folder: Path) -> list[dict[str, Any]]:
    return Results(folder).timings() if kind == "efficiency" else Results(folder).read(kind)


def write(kind: str, folder: Path, line: str) -> Path:
    file = folder / KINDS[kind][1]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(line + "\n")
    return file


def refused(do: Callable[[], Any], file: Path | str) -> str:
    with pytest.raises(FileError) as caught:
        do()
    said = str(caught.value)
    assert str(file) in said
    assert said.isprintable()
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_every_column_of_every_kind_of_row_is_checked_where_it_is_read(kind: str, tmp_path: Path) -> None:
    columns, row = KINDS[kind][0], first_row(kind)
    for name, column in columns.items():
        wrong = [value for value in WRONG if not column.holds(value)]
        assert len(wrong) >= len(WRONG) - 2
        for value in wrong:
            file = write(kind, tmp_path, json.dumps({**row, name: value}))
            assert f"{name}=" in refused(lambda: read(kind, tmp_path), file)
        if column.required:
            file = write(kind, tmp_path, json.dumps({key: row[key] for key in row if key != name}))
            assert f"has no {name!r}" in refused(lambda: read(kind, tmp_path), file)
    write(kind, tmp_path, json.dumps({**row, "of a later version": [{}]}))
    assert len(read(kind, tmp_path)) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", LINES)
def test_a_line_that_is_no_row_gets_one_sentence(kind: str, damage: str, tmp_path: Path) -> None:
    file = write(kind, tmp_path, LINES[damage])
    refused(lambda: read(kind, tmp_path), file)


def test_the_committed_rows_and_traces_are_read() -> None:
    for kind in KINDS:
        assert read(kind, COMMITTED) or kind == "curves"
    for probe in PROBES:
        assert read_trace(COMMITTED, probe) is not None


@pytest.mark.parametrize("kind", KINDS)
def test_report_says_which_row_is_wrong(kind: str, tmp_path: Path, capsys: Captured) -> None:
    pytest.importorskip("matplotlib")
    write("scores", tmp_path, json.dumps(first_row("scores")))
    file = write(kind, tmp_path, json.dumps({**first_row(kind), "metric": 7}))
    code, out, err = call(capsys, main, "report", str(tmp_path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{file}, row 1: metric=7 must be" in err


def test_a_number_that_is_undefined_for_one_seed_stops_no_report(tmp_path: Path) -> None:
    rows = [{**first_row("scores"), "seed": seed, "value": value} for seed, value in ((0, math.nan), (1, 0.5))]
    write("scores", tmp_path, "\n".join(map(json.dumps, rows)))
    found = Rows.of(tmp_path, "paper")
    [number] = [found.number(key) for key in found.values]
    assert number is not None
    assert math.isnan(number.mean)
    assert number.std is None


# ---------------------------------------------------------------- names that become paths

OUT_OF_FOLDER = ("../../x", "/etc/x", "..", "a/b", "a\\b", "", ".hidden", "x\0y", "x\ny", "x" * 200, 7, None)


@pytest.mark.parametrize("name", OUT_OF_FOLDER)
def test_a_name_that_leads_elsewhere_is_refused(name: Any) -> None:
    with pytest.raises(FileError, match="cannot be part of a file's name"):
        check_name(name, "the domain")


def score(**changes: Any) -> dict[str, Any]:
    return {**first_row("scores"), **changes}


@pytest.mark.parametrize("column", ["domain", "task", "method"])
def test_rows_with_a_path_for_a_name_are_neither_read_nor_written(column: str, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "results"
    row = score(**{column: "../../x"})
    with pytest.raises(FileError, match=f"{column}='../../x' must be a name"):
        Results(folder).add("scores", [row], SCORE_KEY)
    with pytest.raises(FileError, match="cannot be part"):
        Results(folder).file("scores", "../../x")
    file = write("scores", folder, json.dumps(row))
    refused(lambda: read("scores", folder), file)
    assert sorted(path.name for path in tmp_path.rglob("*.jsonl")) == ["darkroom.jsonl"]


def test_a_run_whose_rows_name_another_folder_writes_nothing_there(tmp_path: Path, capsys: Captured) -> None:
    """A study uses the rows of a run folder without scoring the run again."""
    out = tmp_path / "a" / "results"
    argv = ["reproduce", "main", "--preset", "smoke", "--domains", "darkroom", "--tasks", "cyclic", "--methods", "uat"]
    argv += ["--set", *TINY, "--out", str(out), "--workers", "1", "--device", "cpu", "--no-report"]
    assert call(capsys, main, *argv)[0] == 0
    [file] = list(out.glob("runs/*/scores.jsonl"))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({**row, "domain": "../../x"}) + "\n" for row in rows))
    (out / "darkroom.jsonl").unlink()
    code, _, err = call(capsys, main, *argv)
    assert code in (1, 2)
    assert "domain='../../x' must be a name" in err
    assert not list(tmp_path.rglob("x.jsonl"))


TINY = ("domain.horizon=5", "domain.size=4", "train.epochs=2", "train.validate_every=1", "evaluation.episodes=4")


def test_a_metric_of_any_name_becomes_a_table_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's markets may have any name, and their metrics are parts of the names of tables."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("uat.paper.report.writing.DRAWINGS", ())
    folder = tmp_path / "a" / "paper"
    about = {"domain": "markets", "task": "joint", "setting": "default", "method": "uat"}
    names = ["sharpe", "sharpe_../../../../out", "sharpe_my market", "sharpe_my+market", f"sharpe_{'x' * 300}"]
    lines = [json.dumps(score(**about, metric=name)) for name in names]
    write("scores", folder, "\n".join(lines))
    made = write_report(folder, preset="paper")
    assert len(set(made.tables)) == len(made.tables) >= 5
    assert {path.parent for path in tmp_path.rglob("*.csv")} == {folder / "report", folder / "report" / "tables"}


def test_run_folders_and_failures_stay_where_they_belong(tmp_path: Path) -> None:
    data = tmp_path / "\x1b[2J\n"
    data.mkdir()
    (data / "us.csv").write_text("")
    config = override(recipe("markets", "uat", "smoke"), {"domain.data": str(data)})
    for settings in ((), (("domain.data", "../../x\x1b[2J"), ("domain.test_from", "../.."))):
        cell = Cell(config=config, task="joint", settings=settings)
        for folder in (cell.folder(tmp_path), Reference(cell=cell).folder(tmp_path)):
            assert folder.parent == tmp_path
            assert folder.name.isprintable()
    outcome = Outcome(name="../../x\n\x1b[2J" + "y" * 400, rows=[], seconds=0.0, failure="no")
    file = keep_failure(tmp_path / "failures", outcome)
    assert file.parent == tmp_path / "failures"
    assert file.read_text().startswith("no")


@pytest.mark.parametrize("field", ["preset", "domain_name", "method_name"])
def test_names_in_a_config_are_known_ones(field: str, tmp_path: Path) -> None:
    run = Run.create(recipe("darkroom", "uat", "smoke"), tmp_path / "run")
    data = json.loads(run.file("config.json").read_text())
    for value in ("../../x", "\x1b[2J", 7, None, []):
        run.write_json("config.json", {**data, field: value})
        said = refused(lambda: Run.open(run.path), run.file("config.json"))
        assert field.removesuffix("_name") in said


# ---------------------------------------------------------------- traces

ODD_ROWS: list[Any] = [None, 7, {}, [], [7], [{}], [None], [[]], "rows"]


@pytest.mark.parametrize("probe", PROBES)
def test_a_damaged_trace_gets_one_sentence(probe: str, tmp_path: Path) -> None:
    arrays, meta = read_tensors(file_of(COMMITTED, probe))
    file = file_of(tmp_path, probe)
    row = meta["rows"][0]
    used = [name for name in row if name not in ("domain", "run", "std", "steps_to_recover", "seeds", "n")]
    used = [name for name in used if probe != "kinetics" or name != "n"]
    odd = [*ODD_ROWS, *([{**row, name: {"a": 1}}] for name in used)]
    for rows in odd:
        write_tensors(file, arrays, {"rows": rows, "runs": ["a"]})
        refused(lambda: read_trace(tmp_path, probe), file)
    for runs in (None, 7, [7], {}):
        write_tensors(file, arrays, {"rows": meta["rows"], "runs": runs})
        refused(lambda: read_trace(tmp_path, probe), file)
    drawn = {"attention": "told", "kinetics": "uat/accuracy", "gate": "daily/day", "terms": "share"}[probe]
    x = arrays[drawn]
    odd_arrays = [
        x[:0],
        x[None],
        x.new_zeros(()),
        x.bool(),
        x.reshape(-1)[:1],
        torch.zeros(x.shape, dtype=torch.bfloat16),
    ]
    for array in odd_arrays:
        write_tensors(file, {**arrays, drawn: array}, {"rows": meta["rows"], "runs": ["a"]})
        refused(lambda: read_trace(tmp_path, probe), file)
    write_tensors(file, {k: v for k, v in arrays.items() if k != drawn}, {"rows": meta["rows"], "runs": ["a"]})
    assert "has no array" in refused(lambda: read_trace(tmp_path, probe), file)


# ---------------------------------------------------------------- run folders

ODD_LINES = [*LINES.values(), '{"epoch": "1"}', '{"epoch": -1}', '{"epoch": 1.5}', '{"epoch": null}', '{"epoch": true}']


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from before log checksums, where only the rows themselves reveal the damage."""
    config = override(recipe("darkroom", "uat", "smoke"), settings_of(TINY))
    run = train(config, tmp_path_factory.mktemp("runs") / "run", device="cpu")
    evaluate(run, device="cpu")
    state = run.file("state/train.safetensors")
    tensors, meta = read_tensors(state)
    write_tensors(state, tensors, {key: value for key, value in meta.items() if key not in ("format", "metrics")})
    return run.path


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.mark.parametrize("name", ["metrics.jsonl", "timing.jsonl"])
def test_a_log_of_odd_rows_is_not_resumed(name: str, folder: Path) -> None:
    config = Run.open(folder).config
    for line in ODD_LINES:
        (folder / name).write_text(line + "\n")
        said = refused(lambda: train(config, folder, resume=True, device="cpu"), folder / name)
        assert "line 1" in said


def test_odd_scores_and_episodes_are_not_compared(folder: Path) -> None:
    run = Run.open(folder)
    whole = (folder / "scores.jsonl").read_text()
    assert read_evaluation(run).scores
    for line in [*ODD_LINES, json.dumps(first_row("scores"))]:
        run.file("scores.jsonl").write_text(line + "\n")
        refused(lambda: read_evaluation(run), folder)
    run.file("scores.jsonl").write_text("")
    refused(lambda: read_evaluation(run), folder)
    run.file("scores.jsonl").write_text(whole)
    kept, _ = read_tensors(run.file("episodes.safetensors"))
    name = "uat/accuracy"
    for changed in (kept[name][:2], kept[name][None], kept[name].long()):
        write_tensors(run.file("episodes.safetensors"), {**kept, name: changed}, {})
        refused(lambda: read_evaluation(run), folder)
    write_tensors(run.file("episodes.safetensors"), {key: x for key, x in kept.items() if key != name}, {})
    refused(lambda: read_evaluation(run), folder)


def test_references_of_another_shape_are_worked_out_anew(folder: Path) -> None:
    file = folder / "references.safetensors"
    kept, meta = read_tensors(file)
    key = {"key": meta["key"]}
    write_tensors(file, {name: x[:1].long() for name, x in kept.items()}, key)
    found = evaluate(folder, device="cpu")
    assert {len(x) for own in found.episodes.values() for x in own.values()} == {4}


def test_the_summary_of_a_training_survives_a_log_without_numbers(folder: Path, capsys: Captured) -> None:
    flags = ["--preset", "smoke", "--device", "cpu", "--out", str(folder), "--resume"]
    for text in TINY:
        name, value = text.split("=")
        flags += [f"--{name.replace('_', '-')}", value]
    for line in (
        '{"epoch": 2}',
        '{"epoch": 2, "validation/accuracy": "high"}',
        '{"epoch": 2, "validation/accuracy": null}',
    ):
        (folder / "metrics.jsonl").write_text(line + "\n")
        code, out, err = call(capsys, main, "train", "darkroom", *flags)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert "metrics.jsonl" in err
        assert "validation/accuracy" in err


ODD_CONFIGS = {
    **{name: line for name, line in LINES.items() if name != "digits"},
    "no text": "\xff",
    "a section of text": '{"domain_name": "darkroom", "method_name": "uat", "domain": "x"}',
    "a name of a list": '{"domain_name": [], "method_name": {}}',
}


@pytest.mark.parametrize("damage", ODD_CONFIGS)
def test_a_config_that_is_none_gets_one_sentence_from_every_command(
    damage: str, folder: Path, capsys: Captured
) -> None:
    (folder / "config.json").write_bytes(ODD_CONFIGS[damage].encode("latin-1"))
    for argv in (["evaluate"], ["audit"]):
        code, out, err = call(capsys, main, *argv, str(folder), "--device", "cpu")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "config.json" in err
        assert len(err) < 500
    code, out, err = call(capsys, main, "train", "darkroom", "--preset", "smoke", "--source", str(folder), "--out", "x")
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_a_manifest_of_anything_is_never_read(folder: Path) -> None:
    """The file is for people: resuming neither needs nor parses it."""
    (folder / "manifest.json").write_text("[" * 100_000)
    train(Run.open(folder).config, folder, resume=True, device="cpu")


# ---------------------------------------------------------------- notes and settings


def test_odd_notes_of_workers_are_left_out(tmp_path: Path) -> None:
    good = {"name": "job", "epoch": 1, "total": 2, "note": ""}
    (tmp_path / "good.json").write_text(json.dumps(good))
    odd = [
        *LINES.values(),
        *(json.dumps({**good, name: None}) for name in good),
        json.dumps({**good, "name": "\x1b[2J"}),
    ]
    for index, text in enumerate(odd):
        (tmp_path / f"{index}.json").write_text(text)
    assert read_notes(tmp_path) == {"good": good}


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[" * 900 + "]" * 900, "9" * 10_000, "{", "1 2", "\ud800", "nan", "'x'", ""]
)
def test_a_setting_that_is_no_json_gets_one_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="must be JSON") as caught:
        settings_of([f"train.lr={text}"])
    assert len(str(caught.value)) < 200


def test_what_is_given_twice_must_be_the_same() -> None:
    assert settings_of(["train.lr=1", "train.lr=1"]) == {"train.lr": 1}
    with pytest.raises(ValueError, match=r"set 'train\.lr' is given twice: '1' and '2'"):
        settings_of(["train.lr=1", "train.lr=2"])
    with pytest.raises(ValueError, match="data 'markets' is given twice"):
        Reproduce(study="main", data=("markets=a", "markets=b"))


def test_json_of_some_depth_is_read_and_deeper_is_not() -> None:
    assert parse_json("[" * 50 + "]" * 50, "x")
    with pytest.raises(FileError, match="nested deeper than 50"):
        parse_json("[" * 51 + "]" * 51, "x")


def test_a_checked_row_is_the_row_itself() -> None:
    row = asdict(
        Score(run="", method="uat", domain="d", task="t", setting="", split="test", seed=0, metric="m", value=1.0, n=2)
    )
    assert check_row(row, SCORES, "x") is row
