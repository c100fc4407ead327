"""Committed rows are complete, unique and reproducible."""

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest

import uat
from uat.config import run_config_from_json
from uat.metrics import Score
from uat.paper.report.domain_pages import domain_page
from uat.paper.report.rows import Rows, published

RESULTS = Path(__file__).parents[1] / "results"
FILES = sorted(file for file in RESULTS.glob("*/*.jsonl") if file.stem != "efficiency")
CHECKPOINTS = sorted(path.parent for path in RESULTS.glob("*/*/policy.safetensors"))


def rows(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_rows_have_the_keys_of_a_score_and_measure_each_thing_once(file: Path) -> None:
    found = rows(file)
    assert found
    for row in found:
        assert row.keys() - {"numerics"} == {item.name for item in fields(Score)} - {"numerics"}
    what = [(r["task"], r["setting"], r["method"], r["seed"], r["split"], r["metric"]) for r in found]
    assert len(set(what)) == len(what)


@pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda path: path.name)
def test_a_committed_checkpoint_scores_what_its_row_says(folder: Path, tmp_path: Path) -> None:
    run = uat.Run.open(shutil.copytree(folder, tmp_path / folder.name))
    table = rows(folder.parent / f"{run.config.domain_name}.jsonl")
    row = next(r for r in table if r["run"] == run.config.identity() and r["metric"] == "accuracy")
    found = uat.evaluate(run, episodes=256, references=False, device="cpu")
    score = next(score for score in found.scores if score.metric == "accuracy")
    assert score.value == pytest.approx(row["value"], abs=0.01)


@pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda path: path.name)
def test_a_committed_checkpoint_is_small_and_whole(folder: Path) -> None:
    assert (folder / "policy.safetensors").stat().st_size < 1_000_000
    assert uat.load(folder).config == run_config_from_json(json.loads((folder / "config.json").read_text())).method


OURS = {"uat-late", "uat-plus", "adt-prev", "dpt", "dt-actions"}
"""Methods that the paper does not have."""


def test_published_numbers_are_of_known_methods_and_each_stands_once() -> None:
    found = published()
    what = [(r["domain"], r["task"], r.get("setting"), r["method"], r["metric"]) for r in found]
    assert len(set(what)) == len(what)
    tables = [row for row in found if "setting" not in row and row["std"] is not None]
    assert len(tables) == 144
    assert {r["method"] for r in tables} >= set(uat.METHODS) - OURS


@pytest.mark.parametrize("file", [file for file in FILES if file.stem in uat.DOMAINS], ids=lambda path: path.stem)
def test_the_page_of_results_is_what_the_rows_say(file: Path) -> None:
    page = RESULTS.parent / "docs" / "results" / f"{file.stem}.md"
    assert page.read_text() == domain_page(Rows.of(file.parent), file.stem), f"python results/make_table.py {file.stem}"
