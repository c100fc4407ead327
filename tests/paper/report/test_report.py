"""Reports show exactly the rows, and list missing measurements by name."""

from __future__ import annotations

import csv
import dataclasses
import json
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.builders import call
from uat.cli import main
from uat.data.markets import prepared
from uat.data.markets.synthetic import Size, generate
from uat.methods import METHODS
from uat.metrics import Metric, Score
from uat.paper.report.__main__ import main as plain_main
from uat.paper.report.family_tables import boundary_family_table, main_family_table, planned
from uat.paper.report.figures import MissingError, draw_curves, draw_gate, reach
from uat.paper.report.rows import Number, Rows, chosen_data, of_data, of_one_device, split_data
from uat.paper.report.score_tables import metrics_of, pairs_table, rivals_table, score_table, signed
from uat.paper.report.study_tables import (
    boundary_tables,
    efficiency_table,
    gate_table,
    kinetics_table,
    sensitivity_table,
    shocks_table,
)
from uat.paper.report.tables import Entry, Table, ranked
from uat.paper.studies import STUDIES, Reproduce, reproduce
from uat.paper.studies.files import merge
from uat.paper.studies.grids import BOUNDARY
from uat.paper.studies.reproduce import cells_of
from uat.rows import EFFICIENCY, SCORES
from uat.tensor_files import write_tensors

Captured = pytest.CaptureFixture[str]
ACCURACY = Metric(name="accuracy", label="Accuracy")


def score(method: str, value: float, **changes: Any) -> dict[str, Any]:
    about = {"domain": "darkroom", "task": "gradual", "setting": "default", "split": "test", "seed": 0, "n": 8}
    run = "" if method in ("ceiling", "random") else f"{method}{changes}"
    return dataclasses.asdict(
        Score(**{"run": run, "metric": "accuracy", **about, **changes}, method=method, value=value)
    )


def rows_of(*scores: dict[str, Any], **more: Any) -> Rows:
    published = [
        {"domain": "darkroom", "task": "gradual", "method": "uat", "metric": "accuracy", "mean": 0.8, "std": 0.01},
    ]
    return Rows(preset="paper", scores=list(scores), published=published, **more)


TWO_SEEDS = (
    score("vanilla", 0.3),
    score("vanilla", 0.5, seed=1),
    score("uat", 0.8),
    score("uat", 0.9, seed=1),
    score("ceiling", 0.9),
)


def test_error_bars_show_the_interval_or_else_the_deviation_over_seeds() -> None:
    sure = Number(mean=0.5, std=0.01, seeds=(0, 1), n=4, low=0.25, high=1.0)
    assert reach([sure, Number(mean=0.5, std=0.01, seeds=(0, 1), n=4), None]) == [[0.25, 0.01, 0.0], [0.5, 0.01, 0.0]]


@pytest.mark.parametrize(
    ("value", "said"), [(0.0126, "+0.013"), (-0.0126, "−0.013"), (-0.0004, "0.000"), (0.0, "0.000"), (None, "")]
)
def test_a_difference_that_rounds_to_zero_has_no_sign(value: float | None, said: str) -> None:
    assert signed(value) == said


def test_a_table_shows_ours_the_published_number_and_the_difference() -> None:
    table = score_table(rows_of(*TWO_SEEDS), "darkroom", ACCURACY, ["vanilla", "uat", "ceiling"], name="x", title="X")
    assert table.head == ["method", "gradual ours", "gradual published", "gradual Δ", "seeds"]
    assert table.rows[1] == ["uat", Entry("0.850 ± 0.071", 1), "0.800 ± 0.01", "+0.050", "2"]
    assert table.rows[0][1:4] == [Entry("0.400 ± 0.141", 2), "", ""]
    assert table.rows[2][1] == Entry("0.900", 0)  # a reference is not in the race


def test_a_domain_without_published_numbers_says_so() -> None:
    about = {"domain": "rule", "task": "flip"}
    rows = rows_of(score("uat", 0.8, **about), score("uat", 0.7, metric="post_flip_accuracy", **about))
    table = score_table(rows, "rule", ACCURACY, ["uat"], name="x", title="X")
    assert table.head == ["method", "flip ours", "seeds"]
    assert table.note.endswith("there are no published numbers.")
    assert "post_flip_accuracy" in [metric.name for metric in metrics_of(rows, "rule")]  # of a task, not the default


def test_the_gap_is_closed_from_vanilla_to_the_filter_on_the_same_seeds() -> None:
    key = ("darkroom", "gradual", "default", "uat", "accuracy")
    assert rows_of(*TWO_SEEDS).gap(key) == pytest.approx((0.85 - 0.4) / (0.9 - 0.4))
    assert rows_of(*TWO_SEEDS).gap(key, seed=1) == pytest.approx((0.9 - 0.5) / (0.9 - 0.5))
    assert rows_of(*TWO_SEEDS, score("uat", 0.9, seed=2)).gap(key) is None
    assert rows_of(*TWO_SEEDS[:-1]).gap(key) is None


def test_intervals_are_those_of_the_same_seeds() -> None:
    key = ("darkroom", "gradual", "default", "uat", "accuracy")
    row = dict(zip(("domain", "task", "setting", "method", "metric"), key, strict=True)) | {"low": 0.7, "high": 0.99}
    for seeds, expected in (([0, 1], 0.7), ([0], None)):
        found = rows_of(*TWO_SEEDS, intervals=[{**row, "seeds": seeds}]).number(key)
        assert found is not None
        assert found.low == expected


def test_rows_of_other_settings_stay_out_of_the_main_table_and_stand_in_their_own() -> None:
    noisy = score("uat", 0.1, setting="feedback.noise=2.0")
    rows = rows_of(*TWO_SEEDS, noisy, score("vanilla", 0.2, setting="feedback.noise=2.0"))
    table = score_table(rows, "darkroom", ACCURACY, ["uat"], name="x", title="X")
    assert table.rows[0][1] == Entry("0.850 ± 0.071", 0)
    [boundary, *_] = boundary_tables(rows, "darkroom")
    assert [row[:4] for row in boundary.rows] == [
        ["clean", "0.850 ± 0.071", "0.400 ± 0.141", "+0.450"],
        ["σ = 2", "0.100", "0.200", "−0.100"],
    ]


NOISY = {"setting": "feedback.noise=1.0"}


def test_each_kind_of_feedback_stands_beside_its_own_filter() -> None:
    noisy = [score(name, x, **NOISY) for name, x in (("uat", 0.6), ("adt", 0.5), ("vanilla", 0.4), ("ceiling", 0.8))]
    scores, shares = boundary_tables(rows_of(*TWO_SEEDS, *noisy), "darkroom")
    assert scores.head == ["feedback", "uat", "adt", "vanilla", "difference", "published difference", "Bayes filter"]
    assert [row[-1] for row in scores.rows] == ["0.900", "0.800"]
    assert scores.rows[1][1:5] == ["0.600", "0.500", "0.400", "+0.200"]
    assert shares.head == ["feedback", "uat", "adt"]
    assert shares.rows == [["clean", "90.0%", ""], ["σ = 1", "50.0%", "25.0%"]]


def test_learning_curves_are_drawn_from_rows() -> None:
    pytest.importorskip("matplotlib")
    about = {"domain": "darkroom", "task": "gradual", "method": "uat", "metric": "accuracy", "run": "a", **NOISY}
    curves = [{**about, "seed": seed, "points": [[10, 0.2], [20, 0.5 + seed / 10]]} for seed in (0, 1)]
    rows = rows_of(score("uat", 0.6, **NOISY), score("ceiling", 0.8, **NOISY), curves=curves)
    [axis] = draw_curves(rows).axes
    assert [list(line.get_ydata()) for line in axis.lines[:2]] == [[0.2, 0.5], [0.2, 0.6]]
    assert list(axis.lines[0].get_xdata()) == [10, 20]
    assert axis.get_legend_handles_labels()[1] == ["uat", "Bayes filter, test episodes"]
    with pytest.raises(MissingError):
        draw_curves(rows_of(*TWO_SEEDS))


def test_a_task_that_the_paper_does_not_have_stands_beside_its_own() -> None:
    published = [{"domain": "sepsis", "task": "regimes", "method": "uat", "metric": "accuracy", "mean": 0.808}]
    own = [score("uat", x, domain="sepsis", task=task) for task, x in (("regimes", 0.8), ("aligned", 0.7))]
    rows = dataclasses.replace(rows_of(*own), published=published)
    table = score_table(rows, "sepsis", ACCURACY, ["uat"], name="x", title="X")
    assert table.head == ["method", "regimes ours", "regimes published", "regimes Δ", "aligned ours", "seeds"]
    assert "No published number: aligned (ours, not in the paper)." in table.note
    assert (
        "No published number" not in score_table(rows_of(*own), "sepsis", ACCURACY, ["uat"], name="x", title="X").note
    )


def test_sensitivity_takes_the_default_from_the_recipes_rows() -> None:
    about = {"domain": "sepsis", "task": "regimes"}
    rows = rows_of(score("uat", 0.8, **about), score("uat", 0.7, setting="decay=0.5", **about))
    table = sensitivity_table(rows)
    assert table is not None
    assert [row[:2] for row in table.rows] == [["λ = 0.5", "0.700"], ["λ = 0.8", "0.800"], ["d_u = 16", "0.800"]]


def test_costs_of_several_devices_are_not_mixed() -> None:
    about = {"method": "uat", "domain": "darkroom", "batch": 8, "preset": "paper"}
    measured = [("GPU", "step_ms", 0.5), ("GPU", "training_peak_mib", 9.0), ("CPU", "step_ms", 7.0)]
    timings = [{**about, "device": device, "metric": metric, "value": value} for device, metric, value in measured]
    assert of_one_device(timings) == timings[:2]
    assert of_one_device([]) == []


def test_a_users_data_go_before_the_embedded_ones() -> None:
    assert split_data("data=hsi,cost=0.1") == ("hsi", "cost=0.1")
    assert split_data("path=ml-1m") == ("ml-1m", "default")
    own = score("uat", 0.4, domain="movielens", task="movielens", setting="path=ml-1m,delay=3")
    found = [score("uat", 0.9, domain="movielens", task="movielens"), own, *TWO_SEEDS]
    data = chosen_data(found)
    assert data == {"movielens": "ml-1m"}
    kept = of_data(found, data)
    assert len(kept) == 1 + len(TWO_SEEDS)
    assert kept[0]["setting"] == "delay=3"
    two = [score(method, 0.5, domain="markets", task="joint") for method in ("uat", "vanilla")]
    gate = score("uat", 0.4, domain="markets", task="joint", setting="data=hsi")
    assert chosen_data([*two, gate]) == {}  # one market of one figure does not take the place of all the others


@pytest.mark.parametrize(("p", "said"), [(0.4, "None of these 1"), (0.01, "1 of these 1")])
def test_the_table_of_pairs_counts_significant_differences(p: float, said: str) -> None:
    place = {"domain": "darkroom", "task": "gradual", "setting": "default", "metric": "accuracy", "n": 8, "seeds": [0]}
    bounds = {"difference": 0.5, "low": -0.1, "high": 1.1, "p": p / 2, "p_holm": p}
    table = pairs_table(
        rows_of(*TWO_SEEDS, pairs=[{**place, **bounds, "method": "uat", "other": "vanilla"}]), "darkroom"
    )
    assert table is not None
    assert said in table.note
    assert "gradual: vanilla against uat" in table.markdown()


def test_families_compare_uat_with_every_baseline_and_correct_for_all_of_them() -> None:
    """Two pairs of a larger family, all of which Holm's method counts. Differences are UAT minus the baseline."""
    place = {"domain": "darkroom", "task": "gradual", "setting": "default", "metric": "accuracy", "n": 8}
    pairs = [
        {**place, "method": "adt", "other": "uat", "difference": -0.2, "low": -0.3, "high": -0.1, "p": 0.001}
        | {"p_holm": 0.5, "seeds": [0, 1]},
        {**place, "method": "uat", "other": "vanilla", "difference": 0.45, "low": -0.1, "high": 1.0, "p": 0.1}
        | {"p_holm": 0.5, "seeds": [0]},
        {**place, "method": "uat", "other": "uat-no-kv", "difference": 9.0, "low": 8.0, "high": 10.0, "p": 0.0}
        | {"p_holm": 0.0, "seeds": [0]},
    ]
    table = main_family_table(rows_of(*TWO_SEEDS, pairs=pairs), "darkroom")
    assert table is not None
    family = planned("darkroom", METHODS.own)
    assert ("uat-late", "dpt") in family
    assert not {"uat-no-kv", "iql", "uat"} & {other for _, other in family}
    assert table.rows == [
        ["gradual: uat against vanilla", "+0.450", "[−0.100, +1.000]", "0.100", "1.000", "1"],
        ["gradual: uat against adt", "+0.200", "[+0.100, +0.300]", "0.001", f"{len(family) / 1000:.3f}", "2"],
    ]
    assert f"the {len(family)} comparisons" in table.note
    assert "1 of these 2 differences is significant" in table.note
    assert main_family_table(rows_of(*TWO_SEEDS), "darkroom") is None


def test_families_under_degraded_feedback_are_one_for_each_kind() -> None:
    place = {"domain": "darkroom", "task": "gradual", "metric": "accuracy", "n": 8, "seeds": [0], "p_holm": 0.1}
    own = {"method": "uat", "other": "vanilla", "difference": 0.4, "low": 0.3, "high": 0.5, "p": 0.005}
    noisy = {**place, **own, "setting": "feedback.noise=2.0"}
    assert boundary_family_table(rows_of(pairs=[{**place, **own, "setting": "default"}]), "darkroom") is None
    table = boundary_family_table(rows_of(pairs=[noisy]), "darkroom")
    assert table is not None
    size = len(planned("darkroom", BOUNDARY))
    assert table.rows == [
        ["σ = 2: uat against vanilla", "+0.400", "[+0.300, +0.500]", "0.005", f"{0.005 * size:.3f}", "1"]
    ]


def market_score(method: str, metric: str, value: float) -> dict[str, Any]:
    where = {"domain": "markets", "task": "joint"}
    return score(method, value, metric=metric, **where)


def test_a_users_markets_have_metrics_of_their_names() -> None:
    """Metrics of a user's markets are grouped by market, in the order of the joint metrics."""
    names = ["turnover_us_b", "sharpe", "sharpe_us_b", "max_drawdown_a", "sharpe_a"]  # embedded: us and others
    rows = rows_of(*(market_score("uat", name, 1.0) for name in names), data={"markets": "mine"})
    found = metrics_of(rows, "markets")
    assert [metric.name for metric in found] == ["sharpe", "sharpe_a", "max_drawdown_a", "sharpe_us_b", "turnover_us_b"]
    assert [found[2].label, found[2].higher_is_better] == ["Max drawdown a", False]
    assert metrics_of(rows_of(*TWO_SEEDS), "darkroom")[0].name == "accuracy"


def test_methods_are_held_against_vanilla_and_equal_weight() -> None:
    held = [{"other": "vanilla", "value": 0.1, "low": -0.1, "high": 0.3, "p": 0.4}]
    held += [{"other": "equal-weight", "value": -0.5, "low": -0.9, "high": -0.1, "p": 0.01}]
    about = {"domain": "markets", "task": "joint", "setting": "default", "metric": "sharpe", "preset": "paper"}
    intervals = [{**about, "method": "uat", "differences": held, "seeds": [0], "low": 0.0, "high": 1.0}]
    scores = [market_score("uat", "sharpe", 1.0), market_score("vanilla", "sharpe", 0.9)]
    table = rivals_table(rows_of(*scores, intervals=intervals, data={"markets": "mine"}), "markets", bool)
    assert table is not None
    assert table.rows == [["uat", "+0.100 [−0.100, +0.300]", "0.400", "−0.500 [−0.900, −0.100]", "0.010"]]
    assert "1 of 2 differences is significant" in table.note
    assert rivals_table(rows_of(*TWO_SEEDS), "darkroom", bool) is None


def test_missing_measurements_have_no_table() -> None:
    rows = rows_of(*TWO_SEEDS)
    assert [table(rows) for table in (efficiency_table, kinetics_table, sensitivity_table)] == [None] * 3


def test_best_and_second_are_marked_and_ties_share_a_rank() -> None:
    entries = ranked(list("abcd"), [1.0, 3.0, 3.0, 2.0], higher=True, among=[True] * 4)
    assert [entry.rank for entry in entries] == [0, 1, 1, 2]
    entries = ranked(list("abc"), [1.0, 2.0, None], higher=False, among=[True, True, True])
    assert [entry.rank for entry in entries] == [1, 2, 0]


def test_a_table_goes_onto_every_kind_of_paper() -> None:
    table = Table(name="t", title="A_B", note="5 %", head=["method", "λ"], rows=[["a|b", Entry("0.1 ± 0.2", 1)]])
    assert table.markdown().splitlines()[-1] == r"| a\|b | **0.1 ± 0.2** |"
    assert list(csv.reader(table.csv().splitlines())) == [["method", "λ"], ["a|b", "0.1 ± 0.2"]]
    assert r"a|b & \textbf{0.1 $\pm$ 0.2} \\" in table.latex()
    assert r"\caption{A\_B. 5 \%}" in table.latex()
    xml.etree.ElementTree.fromstring(table.html())


# ---------------------------------------------------------------- the page


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "paper"
    merge(folder / "darkroom.jsonl", TWO_SEEDS, ("method", "seed"), SCORES)
    arrays = {f"uat/{name}": torch.arange(-10, 16)[None].double() for name in ("offset", "accuracy", "sem")}
    numbers = {"method": "uat", "seed": 0, "shifts": 9, "before": 0.9, "after": 0.6, "steps_to_recover": 5}
    write_tensors(folder / "traces" / "kinetics.safetensors", arrays, {"rows": [numbers], "runs": ["a"]})
    timing = {"method": "uat", "domain": "darkroom", "batch": 256, "preset": "paper", "device": "a GPU"}
    merge(
        folder / "efficiency.jsonl", [{**timing, "metric": "step_ms", "value": 1.5}], ("method", "metric"), EFFICIENCY
    )
    return folder


def test_the_page_is_self_contained_and_lists_missing_measurements(results: Path, capsys: Captured) -> None:
    pytest.importorskip("matplotlib")
    code, out, err = call(capsys, plain_main, str(results), "--json")
    assert code == 0
    made = json.loads(out)
    assert set(made["figures"]) == {"main", "kinetics", "efficiency"}
    assert made["missing"]["figure boundary"] == "uat reproduce boundary --preset paper"
    assert err == ""
    page = Path(made["page"]).read_text()
    for outside in ("<script", "<link", "<img", "src=", "@import", "url(http"):
        assert outside not in page
    ids = [part.split('"')[0] for part in page.split(' id="')[1:]]
    assert len(set(ids)) == len(ids)
    assert "Not measured yet: figure attention" in page
    assert "0.850 ± 0.071" in page
    report = results / "report"
    for figure in made["figures"]:
        assert (report / "figures" / f"{figure}.png").read_bytes().startswith(b"\x89PNG")
        xml.etree.ElementTree.parse(report / "figures" / f"{figure}.svg")
    for table in made["tables"]:
        assert all((report / "tables" / f"{table}.{ending}").stat().st_size for ending in ("md", "csv", "tex"))
    numbers = list(csv.DictReader((report / "numbers.csv").read_text().splitlines()))
    assert len(numbers) == 3
    assert float(numbers[1]["mean"]) == pytest.approx(0.85)


def test_mistakes_are_one_sentence(tmp_path: Path, capsys: Captured, results: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "x.jsonl").write_text("no row\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"epoch": 1}\n')
    for argv, said in (
        ([str(tmp_path / "nowhere")], "is not a folder of results"),
        ([str(tmp_path / "empty")], "holds no rows"),
        ([str(tmp_path / "bad")], "x.jsonl, line 1 is not valid JSON"),
        ([str(tmp_path / "run")], "metrics.jsonl, row 1 has no 'domain': expected a row with domain, task, setting"),
        ([str(results), "--preset", "papper"], "did you mean 'paper'?"),
    ):
        for run in (plain_main, lambda a: main(["report", *a])):
            code, out, err = call(capsys, run, *argv)
            assert (code, out, err.count("\n")) == (2, "", 1)
            assert said in err


def test_the_study_of_one_market_goes_from_its_file_to_tables_and_figure(tmp_path: Path) -> None:
    """Prepared bars are split at the start of 2020 with any preset, and settings of the call reach every cell."""
    pytest.importorskip("matplotlib")
    file, out = tmp_path / "hsi.npz", tmp_path / "results"
    prepared.write({"hsi": generate("hk", Size(assets=6, days=500, start="2018-10-01")).bars}, file)
    options = Reproduce(
        study="mechanism",
        preset="smoke",
        domains=("markets",),
        data=(f"hsi={file}",),
        set=("train.weight_decay=0.0", "train.epochs=2"),
        out=out,
        workers=1,
        device="cpu",
    )
    cells = cells_of(options)
    assert {cell.config.method_name for cell in cells} == {"uat", "vanilla"}
    for config in (cell.config for cell in cells):
        assert (config.domain.test_from, config.domain.days, config.train.weight_decay) == ("2020-01-01", 0, 0.0)
    embedded = [cell for cell in STUDIES["mechanism"].cells("paper") if "gate" in cell.probes]
    assert {cell.config.domain.test_from for cell in embedded} == {""}
    assert reproduce(options).failed == {}
    rows = Rows.of(out, "smoke")
    seen = rows.trace("gate")
    assert seen is not None
    first, daily = (seen.arrays[name].numpy().astype("datetime64[D]") for name in ("day", "daily/day"))
    new_year = np.datetime64("2020-01-01")
    assert new_year <= daily[0] < first[0], "days within windows begin earlier than their ends"
    gates, shocks = gate_table(rows), shocks_table(rows)
    assert gates is not None
    assert shocks is not None
    assert {str(row[0]).split(" (")[0] for row in gates.rows} >= {"bull", "bear", "shock", "calmest", "roughest"}
    assert "weights would differ by" in gates.note
    assert {str(row[0]) for row in shocks.rows} == {"uat ‖ρ_T‖, seed 0", "uat ‖h_T‖, seed 0", "vanilla ‖h_T‖, seed 0"}
    assert len(draw_gate(rows).axes[0].lines) == 4
