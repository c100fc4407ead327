"""A setting with a new name: what is on disk under the old one is read, and keeps its place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import uat
from uat.cli import main
from uat.config import run_config_from_json, to_json
from uat.evaluation.scores import variant_of
from uat.methods import METHODS, Method
from uat.methods.vanilla import Vanilla, VanillaConfig
from uat.paper.studies.cells import build_cell
from uat.recipes import compose
from uat.settings import check_fields, renamed


@dataclass(frozen=True, kw_only=True)
class BeforeConfig(VanillaConfig):
    sees_far: bool = True
    """A flag."""
    memory: float = 0.5
    """A number."""


@dataclass(frozen=True, kw_only=True)
class AfterConfig(VanillaConfig):
    use_far: bool = field(default=True, metadata=renamed("sees_far"))
    """A flag."""
    feedback_memory: float = field(default=0.5, metadata=renamed("memory", "recall"))
    """A number, with a third name in between."""

    def __post_init__(self) -> None:
        check_fields(self, "method.")


class Before(Vanilla):
    config: BeforeConfig  # pyright: ignore[reportIncompatibleVariableOverride]


class After(Vanilla):
    config: AfterConfig  # pyright: ignore[reportIncompatibleVariableOverride]


ENTRIES = {
    "before": Method(policy=Before, config=BeforeConfig, summary="as it was"),
    "after": Method(policy=After, config=AfterConfig, summary="as it is"),
}
TINY = {"domain.size": 4, "domain.horizon": 6, "train.epochs": 2, "train.validation_episodes": 2}


@pytest.fixture
def version() -> Iterator[Any]:
    """Makes the method `own` that of one version or of the other."""

    def turn_to(name: str) -> None:
        METHODS["own"] = ENTRIES[name]

    yield turn_to
    del METHODS["own"]


def config(**settings: Any) -> uat.RunConfig:
    changed = {**TINY, **{f"method.{name}": value for name, value in settings.items()}}
    return compose("darkroom", "own", "smoke", settings=changed)


@pytest.mark.parametrize("settings", [{}, {"memory": 0.25}, {"memory": 0.5, "sees_far": False}])
def test_a_run_keeps_its_name_its_folder_and_its_rows(settings: dict[str, Any], version: Any) -> None:
    dotted = {f"method.{name}": value for name, value in settings.items()}
    seen = []
    for name in ("before", "after"):
        version(name)
        cell = build_cell("darkroom", "gradual", "own", "smoke", 0, dotted)
        seen.append((config(**settings).identity(), variant_of(config(**settings)), cell.identity, cell.name))
    assert seen[0] == seen[1]
    assert "feedback_memory" not in json.dumps(seen)


def test_old_names_are_read_and_new_ones_written(version: Any) -> None:
    version("before")
    old = to_json(config(memory=0.25, sees_far=False))
    version("after")
    back = run_config_from_json(old)
    assert (back.method.feedback_memory, back.method.use_far) == (0.25, False)
    assert back == config(feedback_memory=0.25, use_far=False) == config(recall=0.25, sees_far=False)
    assert to_json(back)["method"].keys() & {"feedback_memory", "memory", "recall"} == {"feedback_memory"}
    old["method"]["feedback_memory"] = 0.25
    with pytest.raises(ValueError, match=r"method\.memory is the old name of method\.feedback_memory, and both"):
        run_config_from_json(old)
    with pytest.raises(ValueError, match=r"method\.feedback_memory='x' must be"):
        config(memory="x")


def test_a_run_folder_of_before_is_scored_and_continued(version: Any, tmp_path: Path) -> None:
    version("before")
    run = uat.train(config(memory=0.25), tmp_path / "run", device="cpu")
    rows = run.rows("metrics.jsonl")
    version("after")
    assert uat.Run.open(run.path).config == config(feedback_memory=0.25)
    policy = uat.load(run.path)
    assert isinstance(policy.config, AfterConfig)
    assert policy.config.feedback_memory == 0.25
    again = uat.train(config(feedback_memory=0.25), run.path, resume=True, device="cpu")
    assert again.rows("metrics.jsonl") == rows
    (row,) = [r for r in uat.evaluate(run.path, episodes=2, references=False).scores if r.metric == "accuracy"]
    assert row.setting == "size=4,horizon=6,memory=0.25,train.epochs=2,train.validation_episodes=2"
    uat.save(tmp_path / "p.safetensors", policy, "own")
    assert uat.load(tmp_path / "p.safetensors").config == policy.config


@pytest.mark.parametrize(
    "flags",
    [
        ["--method.memory", "0.25", "--method.no-sees-far"],
        ["--method.recall=0.25", "--method.no_sees_far"],
        ["--method.feedback-memory", "0.25", "--method.no-use-far"],
    ],
)
def test_old_flags_still_work(flags: list[str], version: Any, capsys: pytest.CaptureFixture[str]) -> None:
    version("after")
    main(["train", "darkroom", "--method", "own", "--preset", "smoke", "--dry-run", *flags])
    section = json.loads(capsys.readouterr().out)["method"]
    assert (section["feedback_memory"], section["use_far"]) == (0.25, False)


@pytest.mark.parametrize("name", ["action", "reward"])
def test_uat_reads_the_old_names_of_its_ablations(name: str) -> None:
    old, new = (compose("darkroom", "uat", settings={f"method.{verb}_{name}": False}) for verb in ("sees", "use"))
    assert old == new
    assert old.identity() == new.identity()
    assert f"sees_{name}=False" in variant_of(new)[0]
    written = to_json(new)
    assert written["method"][f"use_{name}"] is False
    written["method"][f"sees_{name}"] = written["method"].pop(f"use_{name}")
    assert run_config_from_json(written) == new
