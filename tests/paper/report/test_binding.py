"""The tables and the figure of the study of binding, from rows whose answers are known."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from uat.domains.rule.world import RuleConfig
from uat.evaluation.scores import Score, setting_of
from uat.methods import METHODS
from uat.paper.report.binding_tables import (
    Reached,
    binding_tables,
    parameters,
    plus_table,
    rates_table,
    ratio,
    reached,
)
from uat.paper.report.family_tables import BASELINES, binding_family_table
from uat.paper.report.figures import draw_binding
from uat.paper.report.rows import Rows
from uat.paper.studies import binding
from uat.paper.studies.binding import BINDING, RATE_SEED, RATES, WAYS, WIDTHS, Way, main_sweep, rate_sweep, world_sweep
from uat.paper.studies.cells import Sweep, build_cell
from uat.paper.studies.grids import GATED, STUDIES

LATE, PAPER, PREVIOUS = Way("observation", "late"), Way("observation", "early"), Way("transition", "none")


def ceiling(width: int, value: float = 0.9) -> dict[str, Any]:
    sweep = main_sweep(PAPER, width)
    return dataclasses.asdict(
        Score(
            domain="rule", task="fixed", setting=place(sweep, "uat"), method="ceiling", seed=0, split="test",
            metric="accuracy", value=value, n=8, run="",
        )
    )  # fmt: skip


def place(sweep: Sweep, method: str) -> str:
    return setting_of(build_cell("rule", "fixed", method, "paper", 0, sweep.settings).config)


def curve(way: Way, sweep: Sweep, seed: int, *points: tuple[int, float]) -> dict[str, Any]:
    about = {"domain": "rule", "task": "fixed", "method": way.method, "metric": "accuracy", "run": f"{way}{seed}"}
    return {**about, "setting": place(sweep, way.method), "seed": seed, "points": [list(p) for p in points]}


def rows_of(*curves: dict[str, Any], width: int = 10) -> Rows:
    return Rows(preset="paper", scores=[ceiling(width)], curves=list(curves))


def test_updates_are_counted_from_chance_to_the_filter() -> None:
    """From 0.5 to 0.9, 50 % is 0.7 and 80 % is 0.82."""
    sweep = main_sweep(LATE, 10)
    rows = rows_of(
        curve(LATE, sweep, 0, (50, 0.5), (100, 0.71), (150, 0.83)),
        curve(LATE, sweep, 1, (50, 0.69), (100, 0.81), (150, 0.819)),
    )
    assert reached(rows, sweep, "uat-late", 0.5) == Reached((100.0, 100.0), 150)
    assert reached(rows, sweep, "uat-late", 0.8) == Reached((150.0, math.inf), 150)
    assert reached(rows, sweep, "uat", 0.8) is None
    assert reached(Rows(preset="paper", scores=[], curves=rows.curves), sweep, "uat-late", 0.8) is None


def test_the_seed_that_chose_a_rate_is_not_among_those_that_judge_it() -> None:
    """The recipe's rate has the same setting in both studies, so that their curves differ by seed alone."""
    sweep = main_sweep(LATE, 10)
    assert place(sweep, "uat-late") == place(rate_sweep(LATE, 10, 1e-3), "uat-late")
    rows = rows_of(
        curve(LATE, sweep, 0, (50, 0.5), (300, 0.9)),
        curve(LATE, sweep, RATE_SEED, (50, 0.5), (100, 0.9)),
    )
    assert reached(rows, sweep, "uat-late", 0.8) == Reached((300.0,), 300)
    assert reached(rows, sweep, "uat-late", 0.8, chooses=(RATE_SEED,)) == Reached((100.0,), 100)
    table = rates_table(rows)
    assert table is not None
    assert table.rows[0] == ["10", "observation", "late", "", "100", "", "0.001"]


def test_a_way_has_its_own_rate_in_other_worlds_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(binding.CHOSEN_RATES, ("observation", "late", 10), 3e-3)
    assert main_sweep(LATE, 10).settings["train.lr"] == 3e-3
    assert world_sweep(LATE, "flips").settings["train.lr"] == 3e-3
    assert "train.lr" not in world_sweep(PAPER, "flips").settings
    assert RuleConfig().d_obs == binding.DEFAULT_WIDTH


@pytest.mark.parametrize(
    ("updates", "text"),
    [
        ((100.0,), "100"),
        ((math.inf,), "> 8,000"),
        ((100.0, 300.0, 200.0), "200 [100, 300]"),
        ((100.0, math.inf, 200.0), "200 [100, 200; 2 of 3]"),
        ((100.0, math.inf, math.inf), "> 8,000 [100, 100; 1 of 3]"),
    ],
)
def test_updates_say_which_seeds_never_got_there(updates: tuple[float, ...], text: str) -> None:
    assert str(Reached(updates, 8000)) == text


def test_ratios_are_of_geometric_means_and_say_when_they_are_bounds() -> None:
    own, paper = Reached((100.0, 400.0), 8000), Reached((1600.0, 400.0), 8000)
    never = (math.inf,) * 3
    assert ratio(own, paper) == "4.0"
    assert ratio(own, Reached((8000.0, math.inf), 8000)) == "≥ 40.0"
    assert ratio(Reached((math.inf,), 8000), paper) == "≤ 0.1"
    assert ratio(Reached((math.inf,), 8000), Reached((math.inf,), 8000)) == "?"
    assert ratio(Reached((100.0,) * 3, 8000), Reached((800.0,) * 3, 8000)) == "8.0 [8.0, 8.0]"
    assert ratio(Reached((100.0,) * 3, 8000), Reached(never, 8000)) == "≥ 80.0 [80.0, ∞)"
    assert ratio(Reached(never, 8000), Reached((800.0,) * 3, 8000)) == "≤ 0.1 (0, 0.1]"


def test_a_way_compared_with_itself_has_no_interval() -> None:
    """Resampling the same seeds twice would give one."""
    curves = [curve(PAPER, main_sweep(PAPER, 10), seed, (50, 0.5), (100 * (seed + 1), 0.9)) for seed in range(5)]
    table = next(t for t in binding_tables(rows_of(*curves)) if t.name == "binding-ratio-10")
    assert table.rows[0][table.head.index("early")] == "1.0"


def test_tables_hold_the_product_of_tokens_and_gates() -> None:
    curves = [
        curve(way, main_sweep(way, 10), 0, (50, 0.5), (at, 0.9))
        for way, at in ((LATE, 200), (PAPER, 4000), (PREVIOUS, 500))
    ]
    tables = {table.name: table for table in binding_tables(rows_of(*curves))}
    assert list(tables) == ["binding-10-50", "binding-10-80", "binding-ratio-10", "binding-parameters"]
    by_tokens = {
        row[0]: dict(zip(tables["binding-10-80"].head, row, strict=True)) for row in tables["binding-10-80"].rows
    }
    assert by_tokens["observation"]["late"] == "200"
    assert by_tokens["observation"]["early"] == "4,000"
    assert by_tokens["transition"]["none"] == "500"
    ratios = {
        row[0]: dict(zip(tables["binding-ratio-10"].head, row, strict=True)) for row in tables["binding-ratio-10"].rows
    }
    assert ratios["observation"]["late"] == "20.0"
    assert ratios["observation"]["early"] == "1.0"
    pytest.importorskip("matplotlib")
    figure = draw_binding(rows_of(*curves))
    assert [len(axis.lines) for axis in figure.axes] == [1, 0, 1, 1]


def test_the_best_rate_is_the_one_with_the_fewest_updates() -> None:
    ends = dict(zip(RATES, (0.6, 0.9, 0.7), strict=True))
    curves = [curve(LATE, rate_sweep(LATE, 10, rate), 100, (50, 0.5), (100, end)) for rate, end in ends.items()]
    table = rates_table(rows_of(*curves))
    assert table is not None
    assert table.rows[0] == ["10", "observation", "late", "> 100", "100", "> 100", "0.001"]


def test_the_way_of_uat_plus_is_the_one_with_the_fewest_updates_on_seeds_of_its_own() -> None:
    found = {(LATE, 200): 100, (LATE, 201): 200, (PAPER, 200): 300, (PAPER, 201): None, (PAPER, 0): 50}
    curves = [
        curve(way, main_sweep(way, 10), seed, (50, 0.9 if at == 50 else 0.5), (at or 400, 0.8 if at is None else 0.9))
        for (way, seed), at in found.items()
    ]
    table = plus_table(rows_of(*curves))
    assert table is not None
    assert table.head == ["gates and tokens", "mean", "to 80%", "to 50%", "end, %"]
    assert table.rows == [
        ["width 10: late gates, observation", "150", "150 [100, 200]", "150 [100, 200]", "90.0 [90.0, 90.0]"],
        [
            "width 10: early gates, observation",
            "≥ 350",
            "> 400 [300, 300; 1 of 2]",
            "350 [300, 400]",
            "85.0 [80.0, 90.0]",
        ],
    ]
    shorter = [{**row, "setting": f"{row['setting']},train.epochs=400".removeprefix("default,")} for row in curves]
    assert plus_table(rows_of(*shorter)) == table
    [judged] = [t for t in binding_tables(rows_of(*curves)) if t.name == "binding-10-80"]
    assert dict(zip(judged.head, judged.rows[0], strict=True))["early"] == "50"
    assert {cell.config.seed for cell in STUDIES["plus"].cells("quick")} == {200, 201}
    assert plus_table(rows_of()) is None


def five(way: Way, *updates: int | None) -> list[dict[str, Any]]:
    """Curves of seeds that reached the goal after these updates, or not in 8,000."""
    sweep = main_sweep(way, 10)
    ends = [(at or 8000, 0.5 if at is None else 0.9) for at in updates]
    return [curve(way, sweep, seed, (50, 0.5), end) for seed, end in enumerate(ends)]


def test_families_of_binding_compare_ranks_and_count_what_is_not_measured() -> None:
    """Five seeds that are all faster than five others: p = 2 / C(10, 5) = 0.0079, times the size of the family."""
    seeds = five(LATE, 100, 110, 120, 130, 140) + five(BASELINES["adt-prev"], 500, 600, None, 700, 800)
    table = binding_family_table(rows_of(*seeds))
    assert table is not None
    count = len(BASELINES) * len([name for name in GATED if name in METHODS])
    [line] = [row for row in table.rows if "uat-late against" in str(row[0])]
    assert line[0] == "width 10: uat-late against adt-prev"
    assert str(line[1]).startswith("≥ ")
    assert line[2:] == ["0.008", f"{2 / 252 * count:.3f}", "5"]
    assert f"The least p (Holm) that 5 seeds can give is {2 / 252 * count:.3f}" in table.note
    assert binding_family_table(rows_of(*five(LATE, 100))) is None
    assert "The least p" not in str(binding_family_table(rows_of(*five(LATE, *[100] * 7), *five(PREVIOUS, *[300] * 7))))


def test_every_way_is_a_cell_at_every_width() -> None:
    cells = STUDIES["binding"].cells("paper")
    fixed = {
        c.identity
        for c in cells
        if not dict(c.settings).keys() & {"domain.label_noise", "domain.reward"} and c.task == "fixed"
    }
    assert len(fixed) == len(WAYS) * len(WIDTHS) * 5  # five seeds
    assert len(WAYS) == 18
    assert {cell.config.method_name for cell in cells} == {"vanilla", "adt", "adt-prev", "dpt", "uat", "uat-late"}
    assert all(not sweep.missing() for sweep in BINDING)
    assert {cell.config.seed for cell in STUDIES["binding-rates"].cells("paper")} == {100}


def test_tokens_and_gates_change_the_number_of_parameters() -> None:
    assert parameters(PAPER) == parameters(LATE)
    assert parameters(PREVIOUS) - parameters(Way("feedback", "none")) == 10 * 64  # W_p
