"""Runs that differ only by seed become one line; the gap starts at the blind method on the same seeds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from uat.config import RunConfig, override
from uat.evaluation.comparison import Summary, compare
from uat.evaluation.intervals import interval
from uat.evaluation.scores import CEILING, EXPERT, Evaluation, rows_of
from uat.evaluation.tables import difference_rows, score_rows
from uat.recipes import recipe

BASE = torch.tensor([0.0, 0.1, -0.1, 0.05], dtype=torch.float64)
"""Difficulty of the episodes, shared by all methods."""


def config_of(method: str, seed: int = 0, preset: str = "smoke", changes: dict[str, Any] | None = None) -> RunConfig:
    return override(recipe("darkroom", method, preset, seed=seed), changes or {})


def scored(config: RunConfig, value: float, *, ceiling: float | None = None, finished: bool = True) -> Evaluation:
    """An evaluation whose accuracy has this mean, and whose return is ten times that."""

    def metrics(mean: float) -> dict[str, Tensor]:
        return {"accuracy": mean + BASE - BASE.mean(), "return": 10 * mean + BASE - BASE.mean()}

    found = {config.method_name: metrics(value)}
    found |= {} if ceiling is None else {CEILING: metrics(ceiling), EXPERT: metrics(1.0)}
    rows = [row for method, each in found.items() for row in rows_of(config, config.build_domain(), method, each)]
    return Evaluation(rows, found, config, finished=finished)


def runs(
    method: str,
    values: list[float],
    changes: dict[str, Any] | None = None,
    *,
    seeds: list[int] | None = None,
    preset: str = "smoke",
    ceiling: float | None = 0.9,
) -> list[Evaluation]:
    return [
        scored(config_of(method, seed, preset, changes), value, ceiling=ceiling)
        for seed, value in zip(seeds or range(len(values)), values, strict=True)
    ]


def accuracy(rows: list[Summary], method: str) -> Summary:
    [row] = [row for row in rows if (row.method, row.metric) == (method, "accuracy")]
    return row


def test_seeds_become_one_row_with_mean_deviation_and_interval() -> None:
    row = accuracy(compare(runs("uat", [0.6, 0.7, 0.8])), "uat")
    assert row.value == pytest.approx(0.7)
    assert row.std == pytest.approx(0.1)
    y_SE = torch.tensor([0.6, 0.7, 0.8])[:, None].double() + BASE - BASE.mean()
    assert (row.low, row.high) == pytest.approx(interval(y_SE), abs=1e-6)
    assert (row.seeds, row.n, row.finished) == ((0, 1, 2), 4, True)
    assert row.runs == tuple(config_of("uat", seed).identity() for seed in range(3))


def test_the_order_of_runs_changes_nothing() -> None:
    found = [*runs("uat", [0.6, 0.7, 0.8]), *runs("vanilla", [0.3, 0.4, 0.5])]
    assert compare(found) == compare(found[::-1]) == compare([*found[3:], *found[:3]])


def test_a_single_seed_has_no_deviation_and_an_interval_over_episodes() -> None:
    found = runs("uat", [0.6])
    row = accuracy(compare(found), "uat")
    assert row.std is None
    assert (row.low, row.high) == found[0].interval("uat", "accuracy")


def test_references_come_once_with_episodes_alone() -> None:
    found = [*runs("uat", [0.6, 0.7, 0.8]), *runs("vanilla", [0.3, 0.4, 0.5])]
    rows = compare(found)
    assert sorted((row.method, row.metric) for row in rows) == sorted(
        (method, metric) for method in (CEILING, EXPERT, "uat", "vanilla") for metric in ("accuracy", "return")
    )
    row = accuracy(rows, CEILING)
    assert (row.std, row.seeds, row.runs, row.gap_closed) == (None, (), (), None)
    assert (row.low, row.high) == found[0].interval(CEILING, "accuracy")


def test_episodes_in_which_a_metric_is_undefined_are_left_out_of_every_mean() -> None:
    """Each seed leaves other episodes undefined: the mean is that of the seeds' means over their defined episodes."""
    found = runs("uat", [0.6, 0.8])
    found[0].episodes["uat"]["accuracy"][1] = torch.nan
    found[1].episodes["uat"]["accuracy"][2:] = torch.nan
    means = [one.episodes["uat"]["accuracy"].nanmean().item() for one in found]
    for one, mean in zip(found, means, strict=True):
        score = rows_of(one.config, one.config.build_domain(), "uat", one.episodes["uat"])[0]
        assert (score.value, score.n) == (pytest.approx(mean), 4)
    row = accuracy(compare(found), "uat")
    assert row.value == pytest.approx(sum(means) / 2)
    assert row.std == pytest.approx(abs(means[0] - means[1]) / 2**0.5)
    assert row.low < row.value < row.high
    assert row.gap_closed is None


# ---------------------------------------------------------------- the gap


def test_the_gap_is_counted_from_the_blind_mean_over_the_same_seeds() -> None:
    rows = compare([*runs("vanilla", [0.1, 0.5, 0.3]), *runs("uat", [0.6, 0.7, 0.8])])
    assert accuracy(rows, "uat").gap_closed == pytest.approx((0.7 - 0.3) / (0.9 - 0.3))
    assert accuracy(rows, "vanilla").gap_closed == pytest.approx(0)


def test_the_gap_of_fewer_seeds_is_counted_from_those() -> None:
    rows = compare([*runs("vanilla", [0.1, 0.5, 0.3]), *runs("uat", [0.8], seeds=[1])])
    assert accuracy(rows, "uat").gap_closed == pytest.approx((0.8 - 0.5) / (0.9 - 0.5))


def test_every_metric_has_its_own_gap() -> None:
    rows = compare([*runs("vanilla", [0.3]), *runs("uat", [0.6])])
    assert [row.gap_closed for row in rows if row.method == "uat"] == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(
    "blind",
    [
        [],
        runs("vanilla", [0.3]),
        runs("vanilla", [0.3, 0.4], preset="quick"),
        runs("vanilla", [0.3, 0.4], {"domain.schedule": "cyclic"}),
        [
            *runs("vanilla", [0.3, 0.4], {"method.dropout": 0.4}),
            *runs("vanilla", [0.3, 0.4], {"method.dropout": 0.5}),
        ],
    ],
    ids=["none", "a seed short", "another preset", "another task", "two kinds"],
)
def test_there_is_no_gap_without_the_one_blind_method_of_the_same_seeds(blind: list[Evaluation]) -> None:
    rows = compare([*runs("uat", [0.6, 0.7]), *blind])
    assert accuracy(rows, "uat").gap_closed is None


def test_the_blind_method_under_the_same_settings_goes_before_others() -> None:
    changed = {"method.dropout": 0.5}
    blind = [*runs("vanilla", [0.3]), *runs("vanilla", [0.5], changed)]
    for settings, expected in (({}, (0.7 - 0.3) / (0.9 - 0.3)), (changed, (0.7 - 0.5) / (0.9 - 0.5))):
        rows = compare([*runs("uat", [0.7], settings), *blind])
        assert accuracy(rows, "uat").gap_closed == pytest.approx(expected)


def test_there_is_no_gap_without_a_ceiling() -> None:
    rows = compare([*runs("vanilla", [0.3], ceiling=None), *runs("uat", [0.6], ceiling=None)])
    assert accuracy(rows, "uat").gap_closed is None


# ---------------------------------------------------------------- differences


def test_a_method_is_held_against_the_blind_one_on_the_same_episodes_and_seeds() -> None:
    """Difficulty shared by both methods cancels in the difference, whose interval is that of three equal numbers."""
    rows = compare([*runs("vanilla", [0.3, 0.4, 0.5]), *runs("uat", [0.6, 0.7, 0.81])])
    [found] = accuracy(rows, "uat").differences
    assert (found.other, found.value) == ("vanilla", pytest.approx((0.3 + 0.3 + 0.31) / 3))
    assert found.low > 0.28
    assert found.significant
    assert accuracy(rows, "vanilla").differences == accuracy(rows, CEILING).differences == ()
    [shown] = difference_rows(rows)
    assert (shown["method"], shown["less"], shown["metric"]) == ("uat", "vanilla", "accuracy")
    assert shown["difference"].startswith("+0.303 [+0.2")


def test_a_method_is_held_against_the_domains_rivals() -> None:
    config, generator = recipe("markets", "uat", "smoke"), torch.Generator().manual_seed(0)
    shared = torch.randn(400, generator=generator, dtype=torch.float64)
    own = 0.02 + 0.1 * torch.randn(400, generator=generator, dtype=torch.float64)
    found = {"uat": {"sharpe": shared + own}, "equal-weight": {"sharpe": shared}}
    scores = [row for m, each in found.items() for row in rows_of(config, config.build_domain(), m, each)]
    [row] = [row for row in compare([Evaluation(scores, found, config)]) if row.method == "uat"]
    [against] = row.differences
    low, high = interval(own[None], config.build_domain().block)
    assert (against.other, against.low, against.high) == ("equal-weight", pytest.approx(low), pytest.approx(high))
    assert against.significant == (low > 0)
    assert row.high - row.low > 5 * (high - low)


# ---------------------------------------------------------------- grouping into lines


def test_two_runs_that_differ_in_a_setting_stay_two_lines() -> None:
    """Two runs of the same method, task and seed with different settings: neither may hide the other."""
    found = [*runs("uat", [0.25], ceiling=None), *runs("uat", [0.75], {"method.feedback_decay": 0.5}, ceiling=None)]
    rows = score_rows(compare(found))
    assert sorted(row["accuracy"][:5] for row in rows) == ["0.250", "0.750"]


def test_another_task_is_another_line() -> None:
    found = [*runs("uat", [0.25]), *runs("uat", [0.75], {"domain.schedule": "cyclic"}, seeds=[1])]
    rows = [row for row in compare(found) if (row.method, row.metric) == ("uat", "accuracy")]
    assert [(row.task, row.seeds) for row in rows] == [("cyclic", (1,)), ("gradual", (0,))]


def test_the_same_run_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"named twice: uat on darkroom, preset smoke, seed 0"):
        compare([*runs("uat", [0.25]), *runs("uat", [0.75])])


def test_each_adds_the_single_runs_after_their_line() -> None:
    found = [*runs("uat", [0.6, 0.7]), *runs("vanilla", [0.3, 0.5]), *runs("uat-no-q", [0.4])]
    rows = [row for row in compare(found, each=True) if row.metric == "accuracy" and row.seeds]
    assert [(row.method, row.seeds) for row in rows] == [
        *(("uat", seeds) for seeds in ((0, 1), (0,), (1,))),
        ("uat-no-q", (0,)),
        *(("vanilla", seeds) for seeds in ((0, 1), (0,), (1,))),
    ]
    assert [row.gap_closed for row in rows[1:3]] == pytest.approx([0.3 / 0.6, 0.2 / 0.4])


def test_one_unfinished_run_makes_its_line_unfinished() -> None:
    found = runs("uat", [0.6, 0.7])
    rows = compare([found[0], replace(found[1], finished=False)])
    assert not accuracy(rows, "uat").finished
    assert accuracy(rows, CEILING).finished


# ---------------------------------------------------------------- the table


def test_a_line_holds_every_metric_and_the_gap_of_the_first() -> None:
    rows = score_rows(compare([*runs("uat", [0.6, 0.8]), *runs("vanilla", [0.3, 0.5])]))
    assert [row["method"] for row in rows] == [CEILING, EXPERT, "uat", "vanilla"]
    assert rows[2]["accuracy"].startswith("0.700 ± 0.141 [")
    assert rows[2]["return"].startswith("7.000 ± 1.414 [")
    assert rows[2]["gap closed"] == pytest.approx(0.6)
    assert (rows[2]["seeds"], rows[0]["seeds"], rows[0]["preset"]) == ([0, 1], None, "-")
    assert "±" not in rows[0]["accuracy"]
    assert list(rows[2]) == [
        *("task", "setting", "preset", "method", "seeds", "episodes", "accuracy", "return", "gap closed")
    ]
