"""Curves inside an episode: their parts have known values, and their sums are the metrics of the same episodes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.builders import ALL_SPECS, call, random_trajectory, untrained
from uat.cli import main
from uat.config import RunConfig, override
from uat.domains import Domain
from uat.domains.darkroom.filter import DarkRoomFilter
from uat.evaluation import evaluate
from uat.evaluation.comparison import compare
from uat.evaluation.curve_figure import draw_curves
from uat.evaluation.curves import (
    BINS,
    FIRST,
    GAIN,
    LAST,
    LEAST,
    STEPS,
    bins,
    compare_curves,
    curve_rows,
    first_and_last,
    mean_in,
)
from uat.evaluation.scores import CEILING, EXPERT, RANDOM, Evaluation, joined
from uat.evaluation.tables import score_rows
from uat.feedback import CorruptedDomain, FeedbackConfig
from uat.metrics import Score
from uat.recipes import recipe
from uat.runs import Run
from uat.tensor_files import read_tensors

TINY: dict[str, Any] = {"domain.horizon": 8, "domain.size": 4, "evaluation.episodes": 16}
METHODS = ("uat", CEILING, EXPERT, RANDOM)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return untrained(override(recipe("darkroom", "uat", "smoke"), TINY), tmp_path / "run")


def padded(*episodes: list[float]) -> Tensor:
    """(E, T) values with NaN after the end of each episode."""
    longest = max(map(len, episodes))
    return torch.tensor([own + [math.nan] * (longest - len(own)) for own in episodes])


# ---------------------------------------------------------------- parts


def test_tenths_are_those_of_the_episodes_own_steps_rounded_up() -> None:
    ten, eleven = [float(t) for t in range(10)], [float(t) for t in range(11)]
    tenths = first_and_last(padded([5.0], ten, eleven, [1.0, 2.0]))
    assert tenths[FIRST].tolist() == [5.0, 0.0, 0.5, 1.0]
    assert tenths[LAST].tolist() == [5.0, 9.0, 9.5, 2.0]


def test_undefined_steps_are_no_steps() -> None:
    values = torch.tensor([[math.nan, 3.0, math.nan, 7.0], [math.nan] * 4])
    tenths = first_and_last(values)
    assert tenths[FIRST][0] == 3.0
    assert tenths[LAST][0] == 7.0
    assert tenths[FIRST][1].isnan()


@given(steps=st.integers(1, 3_000))
def test_ranges_cover_every_step_once_and_are_few(steps: int) -> None:
    ranges = bins(steps)
    assert [t for begin, end in ranges for t in range(begin, end)] == list(range(steps))
    assert len(ranges) <= BINS
    assert len({end - begin for begin, end in ranges[:-1]}) <= 1


def test_a_range_that_few_episodes_reach_is_left_out() -> None:
    values = torch.full((20, 4), math.nan)
    values[:, :2], values[:LEAST, 2], values[: LEAST - 1, 3] = 1.0, 2.0, 3.0
    assert mean_in(values, 0, 2).tolist() == [1.0] * 20
    assert mean_in(values, 2, 3).nanmean() == 2.0
    assert mean_in(values, 3, 4).isnan().all()
    assert mean_in(values[:3], 3, 4).tolist() == [3.0] * 3  # of three episodes, all reach it


def test_batches_of_different_lengths_are_joined() -> None:
    whole = joined([torch.tensor([[1.0, 2.0, math.nan]]), torch.tensor([[4.0]]), torch.full((1, 5), math.nan)])
    assert whole.shape == (3, 2)
    assert whole[0].tolist() == [1.0, 2.0]
    assert whole[1:].isnan().tolist() == [[False, True], [True, True]]


# ---------------------------------------------------------------- values


class Given(Domain):
    """A domain that is never played."""

    name = "given"

    def __init__(self, kind: str) -> None:
        self.spec = ALL_SPECS[kind]

    def simulator(self, split: Any, device: Any) -> Any:
        raise NotImplementedError


def test_a_curve_has_every_real_step_and_nothing_else() -> None:
    domain = Given("vector-discrete")
    trajectory = random_trajectory(domain.spec)
    valid, curves = trajectory.valid, domain.curves(trajectory)
    assert list(curves) == ["reward", "accuracy"]
    for values in curves.values():
        assert torch.equal(~values.isnan(), valid)
    assert torch.equal(curves["reward"][valid], trajectory.reward[valid].double())
    assert torch.equal(curves["accuracy"][valid] == 1, (trajectory.action == trajectory.target)[valid])


def test_unknown_rewards_are_undefined_and_accuracy_needs_ids_and_an_expert() -> None:
    domain = Given("vector-discrete")
    trajectory = random_trajectory(domain.spec, whole=True)
    known = torch.rand(trajectory.valid.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    curves = domain.curves(replace(trajectory, reward_known=known, target=None))
    assert list(curves) == ["reward"]
    assert torch.equal(~curves["reward"].isnan(), known)
    weights = Given("vector-weights")
    assert list(weights.curves(random_trajectory(weights.spec))) == ["reward"]


def test_corrupted_feedback_has_the_curves_of_the_clean_domain() -> None:
    class Own(Given):
        def curves(self, trajectory: Any) -> dict[str, Tensor]:
            return {"own": trajectory.reward}

    domain = CorruptedDomain(Own("vector-discrete"), FeedbackConfig(noise=1.0))
    assert list(domain.curves(random_trajectory(domain.spec))) == ["own"]


def test_a_curve_adds_up_to_the_metric_and_changes_no_row(run: Run) -> None:
    plain = evaluate(run, device="cpu")
    found = evaluate(run, curves=True, device="cpu")
    assert found.scores == plain.scores
    assert plain.curves == {}
    assert set(found.curves) == set(found.episodes) == set(METHODS)
    for method, curves in found.curves.items():
        assert {name: tuple(values.shape) for name, values in curves.items()} == {
            "reward": (16, 8),
            "accuracy": (16, 8),
        }
        assert torch.allclose(curves["reward"].sum(1).double(), found.episodes[method]["return"], atol=1e-5)
        assert torch.allclose(curves["accuracy"].mean(1).double(), found.episodes[method]["accuracy"])


def test_an_own_curve_is_kept_on_disk(run: Run) -> None:
    found = evaluate(run, curves=True, references=False, device="cpu")
    kept, _ = read_tensors(run.file("curves.safetensors"))
    assert set(kept) == {"uat/reward", "uat/accuracy"}
    assert torch.equal(kept["uat/reward"], found.curves["uat"]["reward"])
    assert not run.file("reference_curves.safetensors").exists()


def test_nothing_is_kept_unless_curves_are_wanted(run: Run) -> None:
    evaluate(run, device="cpu")
    assert not list(run.path.glob("*curves*"))


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows whenever the filter starts to play."""
    seen: list[int] = []
    start = DarkRoomFilter.init_state

    def counted(self: DarkRoomFilter, streams: int, *rest: Any) -> Any:
        seen.append(streams)
        return start(self, streams, *rest)

    monkeypatch.setattr(DarkRoomFilter, "init_state", counted)
    return seen


def damage(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-50])


@pytest.mark.parametrize("spoil", [None, damage, Path.unlink])
def test_curves_of_references_are_played_once(
    spoil: Callable[[Path], None] | None, run: Run, replays: list[int]
) -> None:
    evaluate(run, device="cpu")
    first = evaluate(run, curves=True, device="cpu")
    assert len(replays) == 2, "scores without curves do not suffice"
    if spoil is not None:
        spoil(run.file("reference_curves.safetensors"))
    again = evaluate(run, curves=True, device="cpu")
    assert len(replays) == 2 + (spoil is not None)
    for method in METHODS:
        assert torch.equal(again.curves[method]["reward"], first.curves[method]["reward"])
    evaluate(run, curves=True, episodes=5, device="cpu")
    assert len(replays) == 3 + (spoil is not None), "other episodes"


def test_recorded_episodes_have_no_curves(tmp_path: Path) -> None:
    run = Run.create(recipe("movielens", "uat", "smoke"), tmp_path / "run")
    with pytest.raises(ValueError, match="movielens replays recorded episodes"):
        evaluate(run, curves=True, device="cpu")


# ---------------------------------------------------------------- comparison


def of_curves(method: str, seed: int, values_ET: Tensor, **references: Tensor) -> Evaluation:
    """An evaluation with a curve of a method, and of references."""
    config: RunConfig = replace(override(recipe("darkroom", method, "smoke"), TINY), seed=seed)
    score = Score(
        run="r",
        method=method,
        domain="darkroom",
        task="gradual",
        setting="default",
        split="test",
        seed=seed,
        metric="return",
        value=0.0,
        n=len(values_ET),
    )
    curves = {name: {"reward": values} for name, values in {method: values_ET, **references}.items()}
    return Evaluation([score], {}, config, curves=curves)


@pytest.fixture
def two_methods() -> list[Evaluation]:
    """Two seeds of UAT, which rise from 0 to 1 and from 0 to 3, of Vanilla, which stays at 0.5, and a ceiling."""
    up, flat = torch.linspace(0, 1, 20).expand(12, -1), torch.full((12, 20), 0.5)
    return [
        evaluation
        for seed in (0, 1)
        for evaluation in (
            of_curves("uat", seed, up * (1 + 2 * seed), ceiling=flat + 1),
            of_curves("vanilla", seed, flat, ceiling=flat + 1),
        )
    ]


def test_methods_are_compared_by_part_with_paired_differences(two_methods: list[Evaluation]) -> None:
    parts = compare_curves(two_methods)
    value = {(p.summary.method, p.part): p.summary for p in parts if p.part != STEPS}
    first, last = torch.linspace(0, 1, 20)[:2].mean().item(), torch.linspace(0, 1, 20)[-2:].mean().item()
    assert value["uat", FIRST].value == pytest.approx(2 * first)
    assert value["uat", LAST].value == pytest.approx(2 * last)
    gain = value["uat", GAIN]
    assert gain.value == pytest.approx(2 * (last - first))
    assert gain.seeds == (0, 1)
    assert gain.low < gain.value < gain.high
    assert [d.other for d in gain.differences] == ["vanilla"]
    assert gain.differences[0].value == pytest.approx(gain.value)
    assert value["vanilla", GAIN].value == value["ceiling", GAIN].value == 0.0
    steps = [p for p in parts if p.part == STEPS and p.summary.method == "uat"]
    assert [(p.begin, p.end) for p in steps] == [(t, t + 1) for t in range(20)]
    assert [p.summary.value for p in steps] == pytest.approx((2 * torch.linspace(0, 1, 20)).tolist(), abs=1e-6)


def test_rows_are_those_of_a_summary_with_the_part(two_methods: list[Evaluation]) -> None:
    rows = [part.row() for part in compare_curves(two_methods)]
    assert {row["metric"] for row in rows} == {"reward"}
    assert {row["part"] for row in rows} == {FIRST, LAST, GAIN, STEPS}
    table = curve_rows(compare_curves(two_methods, each=True))
    assert [row["method"] for row in table] == ["ceiling", "uat", "uat", "uat", "vanilla", "vanilla", "vanilla"]
    assert {"curve", FIRST, LAST, GAIN, "gain less vanilla's", "p"} <= table[1].keys()
    assert "p" not in table[0]


def test_methods_of_different_lengths_share_their_ranges() -> None:
    long, short = torch.ones(12, 100), torch.ones(12, 30)
    parts = compare_curves([of_curves("uat", 0, long), of_curves("vanilla", 0, short)])
    steps = {p.summary.method: [] for p in parts}
    for part in parts:
        if part.part == STEPS:
            steps[part.summary.method].append((part.begin, part.end, math.isnan(part.summary.value)))
    assert [s[:2] for s in steps["uat"]] == [s[:2] for s in steps["vanilla"]] == bins(100)
    assert [end for _, end, undefined in steps["vanilla"] if not undefined][-1] == 30


# ---------------------------------------------------------------- undefined metrics


def test_a_metric_that_no_episode_defines_has_no_column_and_one_that_some_do_has_a_dash() -> None:
    def scored(method: str, **metrics: list[float]) -> Evaluation:
        episodes = {method: {name: torch.tensor(values) for name, values in metrics.items()}}
        return replace(of_curves(method, 0, torch.ones(2, 3)), episodes=episodes)

    nothing = [math.nan, math.nan]
    one = scored("uat", accuracy=[1.0, 2.0], success=nothing, rest=[math.nan, 4.0])
    other = scored("vanilla", accuracy=[1.0, 1.0], success=nothing, rest=nothing)
    rows = {row["method"]: row for row in score_rows(compare([one, other]))}
    assert all("success" not in row for row in rows.values())
    assert rows["vanilla"]["rest"] is None
    assert rows["uat"]["rest"].startswith("4.000 ")


# ---------------------------------------------------------------- command and figure


def test_a_figure_is_the_same_at_every_drawing_and_of_its_kind(two_methods: list[Evaluation], tmp_path: Path) -> None:
    parts, files = compare_curves(two_methods), [tmp_path / name for name in ("a.svg", "b.svg", "c.PNG", "d.pdf")]
    for file in files:
        draw_curves(parts, file)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert "uat, 2 seeds" in files[0].read_text()
    assert [file.read_bytes()[:4] for file in files[2:]] == [b"\x89PNG", b"%PDF"]


def test_the_command_draws_a_figure_and_prints_rows(run: Run, tmp_path: Path, capsys: Any) -> None:
    figure = tmp_path / "new" / "curves.svg"
    command = ["evaluate", str(run.path), "--device", "cpu", "--curves", str(figure)]
    code, out, err = call(capsys, main, *command)
    assert code == 0, err
    assert "first tenth" in out
    text = figure.read_text()
    assert all(name in text for name in ("ceiling", "expert", "random", "uat, seed 0", "reward per step"))
    rows = json.loads(call(capsys, main, *command, "--json")[1])
    parts = [row for row in rows if "part" in row]
    assert len(rows) - len(parts) == 4 * 4
    assert len(parts) == 4 * 2 * (3 + 8)


@pytest.mark.parametrize(("name", "problem"), [("curves.txt", "must end in .svg, .png or .pdf"), ("", "must end in")])
def test_a_figure_of_another_kind_is_refused_at_once(name: str, problem: str, run: Run, capsys: Any) -> None:
    code, out, err = call(capsys, main, "evaluate", str(run.path), "--curves", str(run.path / name))
    assert (code, out) == (2, "")
    assert problem in err
    assert not run.file("scores.jsonl").exists()


def test_without_matplotlib_the_command_says_how_to_install_it(
    run: Run, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = call(capsys, main, "evaluate", str(run.path), "--curves", "curves.svg")
    assert code == 2
    assert "pip install 'uat-transformer[report]'" in err
