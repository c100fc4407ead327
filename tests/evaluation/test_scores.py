"""Scores: rows have the documented keys, references are computed once, and the batch size changes no number."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from uat.config import RunConfig, override
from uat.domains import split_seed
from uat.domains.darkroom.filter import DarkRoomFilter
from uat.engines.rollout import RolloutRunner, play_all
from uat.evaluation import evaluate
from uat.evaluation.scores import CEILING, EXPERT, RANDOM, Evaluation, gap_closed, reference_episodes
from uat.evaluation.tables import columns
from uat.recipes import recipe
from uat.runs import Run, load_policy
from uat.tensor_files import RunError, read_tensors
from uat.training import train
from uat.training.checkpoint import STATE
from uat.training.epoch import Epoch

METRICS = ("accuracy", "optimal_accuracy", "efficiency", "return")
KEYS = ["run", "method", "domain", "task", "setting", "split", "seed", "metric", "value", "n", "numerics"]
TINY: dict[str, Any] = {
    "domain.horizon": 8,
    "domain.size": 4,
    "train.epochs": 2,
    "train.batch_size": 8,
    "train.validation_episodes": 8,
    "evaluation.episodes": 16,
}


def tiny(method: str = "uat", **changes: Any) -> RunConfig:
    return override(recipe("darkroom", method, "smoke"), {**TINY, **changes})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny(seed=5), tmp_path_factory.mktemp("trained") / "run", device="cpu").path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Run:
    return Run.open(shutil.copytree(trained, tmp_path / "run"))


# ---------------------------------------------------------------- rows


def test_rows_have_the_keys_of_a_score_and_one_row_is_one_number(run: Run) -> None:
    found = evaluate(run, device="cpu")
    rows = run.rows("scores.jsonl")
    assert rows == [dataclasses.asdict(score) for score in found.scores]
    assert all(list(row) == KEYS for row in rows)
    assert sorted((row["method"], row["metric"]) for row in rows) == sorted(
        (method, metric) for method in ("uat", CEILING, EXPERT, RANDOM) for metric in METRICS
    )
    assert {row["n"] for row in rows} == {16}
    assert {(row["domain"], row["task"], row["split"]) for row in rows} == {("darkroom", "gradual", "test")}


def test_rows_of_a_policy_name_its_run_and_those_of_references_do_not(run: Run) -> None:
    for row in evaluate(run, device="cpu").scores:
        own = row.method == "uat"
        assert (row.run, row.seed) == ((run.config.identity(), 5) if own else ("", 0))


def test_a_row_is_the_mean_of_its_episodes(run: Run) -> None:
    found = evaluate(run, device="cpu")
    for row in found.scores:
        assert row.value == found.episodes[row.method][row.metric].mean().item()
    kept, _ = read_tensors(run.file("episodes.safetensors"))
    assert torch.equal(kept["uat/accuracy"], found.episodes["uat"]["accuracy"])


def test_references_are_in_their_order(run: Run) -> None:
    value = {(row.method, row.metric): row.value for row in evaluate(run, episodes=64, device="cpu").scores}
    assert value[EXPERT, "accuracy"] == value[EXPERT, "efficiency"] == 1.0
    assert value[RANDOM, "accuracy"] < value[CEILING, "accuracy"] < 1.0


def test_references_can_be_left_out(run: Run) -> None:
    assert {row.method for row in evaluate(run, references=False, device="cpu").scores} == {"uat"}
    assert not run.file("references.safetensors").exists()


def test_a_run_is_given_as_itself_or_by_its_folder(run: Run) -> None:
    wanted = set(evaluate(run, device="cpu").scores)
    assert set(evaluate(run.path, device="cpu").scores) == wanted
    assert set(evaluate(str(run.path), device="cpu").scores) == wanted


def test_evaluating_twice_gives_the_same_rows_in_the_same_order(run: Run) -> None:
    first, rows = evaluate(run, device="cpu").scores, run.file("scores.jsonl").read_bytes()
    assert evaluate(run, device="cpu").scores == first
    assert run.file("scores.jsonl").read_bytes() == rows


@pytest.mark.parametrize("episodes", [0, -5])
def test_an_invalid_count_is_refused(episodes: int, run: Run) -> None:
    with pytest.raises(ValueError, match=f"episodes={episodes}"):
        evaluate(run, episodes=episodes, device="cpu")


# ---------------------------------------------------------------- runs that were stopped


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run that was killed after its second epoch of four."""
    config, done = override(tiny(), {"train.epochs": 4, "train.validate_every": 2}), Epoch.run

    def dying(self: Epoch, total: int, epoch: int) -> Any:
        if total == 2:
            raise KeyboardInterrupt
        return done(self, total, epoch)

    monkeypatch.setattr(Epoch, "run", dying)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "stopped", device="cpu")
    monkeypatch.undo()
    return Run.open(tmp_path / "stopped")


def test_an_unfinished_run_is_refused_with_where_it_stands(stopped: Run) -> None:
    with pytest.raises(RunError, match=r"stopped is unfinished: 2 epochs are done, of at most 4 .* --unfinished"):
        evaluate(stopped, device="cpu")
    assert not stopped.file("scores.jsonl").exists()


def test_an_unfinished_run_is_scored_with_the_flag(stopped: Run) -> None:
    assert not evaluate(stopped, unfinished=True, references=False, device="cpu").finished


def test_a_run_killed_before_its_first_complete_checkpoint_is_unfinished(stopped: Run) -> None:
    stopped.file(STATE).unlink()
    with pytest.raises(RunError, match="0 epochs are done"):
        evaluate(stopped, device="cpu")


def test_a_run_that_goes_on_to_its_end_is_finished(stopped: Run) -> None:
    train(stopped.config, stopped.path, resume=True, device="cpu")
    assert evaluate(stopped, references=False, device="cpu").finished


def test_a_policy_handed_on_without_its_training_is_finished(run: Run) -> None:
    for file in run.path.rglob("*"):
        if file.is_file() and file.name not in ("config.json", "policy.safetensors"):
            file.unlink()
    assert evaluate(run, references=False, device="cpu").finished


# ---------------------------------------------------------------- references are computed once


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


def test_references_are_played_once_and_then_read(run: Run, replays: list[int]) -> None:
    first = evaluate(run, device="cpu")
    assert len(replays) == 1
    second = evaluate(run, device="cpu")
    assert len(replays) == 1
    for method in (CEILING, EXPERT, RANDOM):
        assert second.episodes[method].keys() == first.episodes[method].keys()
        for metric, values in first.episodes[method].items():
            assert torch.equal(second.episodes[method][metric], values)


def test_references_are_played_again_for_another_number_of_episodes(run: Run, replays: list[int]) -> None:
    evaluate(run, device="cpu")
    found = evaluate(run, episodes=6, device="cpu")
    assert replays == [16, 6]
    assert {row.n for row in found.scores} == {6}


def test_references_are_played_again_for_another_domain_config(run: Run, replays: list[int]) -> None:
    evaluate(run, device="cpu")
    other = Run(run.path, override(run.config, {"domain.schedule": "cyclic"}))
    before = len(replays)
    reference_episodes(other, run.config.evaluation.episodes, torch.device("cpu"))
    assert len(replays) == before + 1


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-50])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def say_nothing(file: Path) -> None:
    save_file(load_file(file), file)


def say_nonsense(file: Path) -> None:
    save_file(load_file(file), file, metadata={"uat": "{not json"})


def say_something_else(file: Path) -> None:
    save_file(load_file(file), file, metadata={"uat": json.dumps({"format": 1})})


@pytest.mark.parametrize("damage", [truncate, empty, say_nothing, say_nonsense, say_something_else])
def test_a_damaged_cache_is_recomputed(damage: Callable[[Path], None], run: Run, replays: list[int]) -> None:
    first = evaluate(run, device="cpu").scores
    damage(run.file("references.safetensors"))
    assert set(evaluate(run, device="cpu").scores) == set(first)
    assert len(replays) == 2
    evaluate(run, device="cpu")
    assert len(replays) == 2


# ---------------------------------------------------------------- known answers


def of_values(*values: float) -> Evaluation:
    return Evaluation([], {"uat": {"accuracy": torch.tensor(values, dtype=torch.float64)}}, tiny())


def test_the_interval_has_its_known_value() -> None:
    low, high = of_values(0.0, 1.0, 2.0, 3.0).interval("uat", "accuracy")
    half = 3.182446 * (5 / 3) ** 0.5 / 2  # sample variance 5/3, four episodes
    assert (low, high) == pytest.approx((1.5 - half, 1.5 + half), abs=1e-5)
    assert of_values(0.5, 0.5).interval("uat", "accuracy") == (0.5, 0.5)


def test_one_episode_has_no_interval() -> None:
    low, high = of_values(0.5).interval("uat", "accuracy")
    assert low != low
    assert high != high


@pytest.mark.parametrize(
    ("value", "blind", "ceiling", "share"),
    [(0.6, 0.5, 0.9, 0.25), (0.9, 0.5, 0.9, 1.0), (0.4, 0.5, 0.9, -0.25), (1.0, 0.5, 0.9, 1.25), (0.6, 0.5, 0.5, None)],
)
def test_gap_closed_has_its_known_value(value: float, blind: float, ceiling: float, share: float | None) -> None:
    found = gap_closed(value, blind, ceiling)
    assert found == (share if share is None else pytest.approx(share))


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize("at_once", [1, 5, 16, 99])
def test_no_batch_size_moves_a_number(at_once: int, run: Run) -> None:
    domain = run.config.build_domain()
    agents = {"uat": load_policy(run.path), **domain.references(), EXPERT: None}
    whole = evaluate(run, device="cpu").episodes
    for name, agent in agents.items():
        player = RolloutRunner(
            agent, domain.simulator("test", "cpu"), device=torch.device("cpu"), sampled=name == RANDOM
        )
        found = play_all(player, 16, split_seed("test", 0), domain.measure, at_once)
        for metric, values in found.items():
            assert torch.equal(values, whole[name][metric]), (name, metric)


def test_fewer_episodes_are_the_first_ones(run: Run) -> None:
    whole, some = (evaluate(run, episodes=n, device="cpu").episodes for n in (16, 5))
    for method, metrics in some.items():
        for metric, values in metrics.items():
            assert torch.equal(values, whole[method][metric][:5]), (method, metric)


# ---------------------------------------------------------------- tables


def test_columns_are_aligned_text() -> None:
    rows = [
        {"method": "uat", "value": 0.5, "n": 16, "sees": ["action", "reward"]},
        {"method": "vanilla", "value": None, "n": 4, "sees": []},
        {"method": "x", "n": None, "value": 12.3456},
    ]
    assert columns(rows).splitlines() == [
        "method    value   n  sees",
        "-------  ------  --  --------------",
        "uat       0.500  16  action, reward",
        "vanilla       -   4  nothing",
        "x        12.346   -  -",
    ]


class Overwriting:
    """A player that overwrites the previous result at every play, as a captured rollout does."""

    def __init__(self) -> None:
        self.ids = torch.zeros(4, dtype=torch.float64)

    def play(self, episode_ids: torch.Tensor, seed: int) -> torch.Tensor:
        return self.ids.copy_(episode_ids)


def test_metrics_outlive_the_next_play() -> None:
    """Including float64 results, which no conversion copies."""
    found = play_all(cast(Any, Overwriting()), 10, 0, cast(Any, lambda ids: {"id": ids}), at_once=4)
    assert found["id"].tolist() == list(range(10))


def test_a_reference_that_knows_the_channel_is_played_in_it_and_cached_for_it(tmp_path: Path) -> None:
    """A goal that moves inside an episode: rewards that come late have no filter, so that the true one stays."""
    settings = {"domain.horizon": 12, "domain.size": 4}
    noisy, late = {"feedback.noise": 2.0}, {"feedback.delay": 2, "domain.shift_steps": (5,)}
    found = {}
    for name, changes in {"clean": {}, "noisy": noisy, "late": late, "moving": {"domain.shift_steps": (5,)}}.items():
        config = override(recipe("darkroom", "uat", "smoke"), {**settings, **changes})
        run = Run(tmp_path / "same" if name in ("clean", "noisy") else tmp_path / name, config)
        found[name] = reference_episodes(run, 64, torch.device("cpu"))
    accuracy = {name: values[CEILING]["accuracy"] for name, values in found.items()}
    assert accuracy["noisy"].mean() < accuracy["clean"].mean() - 0.05, "the cache of another channel was read"
    assert torch.equal(accuracy["late"], accuracy["moving"])
    assert torch.equal(found["clean"][EXPERT]["accuracy"], found["noisy"][EXPERT]["accuracy"])
