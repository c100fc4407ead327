"""A run folder has one writer, is unchanged by a failure before training, and refuses files of other runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.small_runs import Crash, crash_at, everything, numbers, tiny
from uat.cli import main
from uat.config import override
from uat.lock import LockedError, locked
from uat.paper.report.writing import write_report
from uat.paper.studies import Reproduce, reproduce
from uat.recipes import recipe
from uat.runs import Run, load_policy
from uat.tensor_files import RunError
from uat.training import train, train_together

pytestmark = pytest.mark.usefixtures("without_tensorboard", "save_always")


# ---------------------------------------------------------------- two at once


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_training_is_told_who_trains(resume: bool, tmp_path: Path) -> None:
    folder = train(tiny(), tmp_path / "run", device="cpu").path
    before = everything(folder)
    with locked(folder, "training"), pytest.raises((LockedError, RunError)) as caught:
        train(tiny(), folder, resume=resume, device="cpu")
    assert ("is in use by process" if resume else "already holds this run") in str(caught.value)
    assert everything(folder).keys() == before.keys()


def test_two_seeds_started_together_do_not_share_a_folder(tmp_path: Path) -> None:
    """Start the second writer when the first has made the folder and written nothing yet."""
    with locked(tmp_path / "run", "training"), pytest.raises(LockedError, match="in use by process"):
        train(tiny(seed=1), tmp_path / "run", device="cpu")
    with locked(tmp_path / "b", "training"), pytest.raises(LockedError, match="b is in use by process"):
        train_together([tiny(seed=1), tiny(seed=2)], [tmp_path / "a", tmp_path / "b"], device="cpu")
    assert not (tmp_path / "a").exists()


def test_a_grid_and_a_report_take_their_folder(tmp_path: Path) -> None:
    options = Reproduce(
        study="main", preset="smoke", domains=("darkroom",), methods=("vanilla",), out=tmp_path / "grid"
    )
    with locked(tmp_path / "grid", "another study"), pytest.raises(LockedError, match="another study"):
        reproduce(options)
    assert [file.name for file in (tmp_path / "grid").iterdir()] == [".lock"]
    with locked(tmp_path / "report", "another report"), pytest.raises(LockedError, match="another report"):
        write_report(Path("results/paper"), tmp_path / "report", preset="paper")


# ---------------------------------------------------------------- failures before training


@pytest.mark.parametrize("there_before", [False, True])
def test_a_failure_while_preparing_leaves_the_folder_as_it_was(
    there_before: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    if there_before:
        folder.mkdir()
    with pytest.raises(SystemExit):
        main(["train", "movielens", "--preset", "smoke", "--domain.path", str(tmp_path / "none"), "--out", str(folder)])
    assert "none" in capsys.readouterr().err
    assert folder.exists() == there_before
    assert not there_before or list(folder.iterdir()) == []
    train(tiny(), folder, device="cpu")


def test_what_a_kill_left_before_the_first_epoch_is_no_hindrance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill before the first checkpoint, the same run or another one can start without --resume."""
    for config, resume in ((tiny(), False), (tiny(), True), (tiny(seed=7), False)):
        folder = tmp_path / f"{config.seed}-{resume}"
        Run.create(tiny(), folder)
        assert numbers(train(config, folder, resume=resume, device="cpu").path)
        assert Run.open(folder).config == config


def test_an_interrupted_training_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        crash_at(6, patch)
        with pytest.raises(Crash):
            train(tiny(), tmp_path, device="cpu")
    assert (tmp_path / "metrics.jsonl").exists()


# ---------------------------------------------------------------- what belongs to a run


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def drop_a_row(folder: Path) -> None:
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join([lines[0], *lines[2:]]))


def change_a_number(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[1]["loss/imitation"] += 0.5
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def state_of_another_seed(folder: Path) -> None:
    other = train(tiny(seed=9), folder.parent / "other", device="cpu").path
    shutil.copy(other / "state/train.safetensors", folder / "state/train.safetensors")


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a bit of a weight": (
        lambda folder: flip(folder / "state/train.safetensors", -1),
        r"train\.safetensors is damaged",
    ),
    "a lost row": (drop_a_row, r"metrics\.jsonl was changed"),
    "no rows": (lambda folder: (folder / "metrics.jsonl").unlink(), r"metrics\.jsonl was changed"),
    "a changed number": (change_a_number, r"metrics\.jsonl was changed"),
    "another seed's state": (state_of_another_seed, r"train\.safetensors belongs to another run"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_that_was_changed_is_not_resumed(damage: str, tmp_path: Path) -> None:
    folder = train(tiny(), tmp_path / "run", device="cpu").path
    change, said = DAMAGES[damage]
    change(folder)
    before = everything(folder)
    with pytest.raises(RunError, match=said):
        train(tiny(), folder, resume=True, device="cpu")
    assert everything(folder) == before


def test_a_flipped_bit_of_a_policy_is_seen_when_it_is_loaded(tmp_path: Path) -> None:
    folder = train(tiny(), tmp_path / "run", device="cpu").path
    flip(folder / "policy.safetensors", -1)
    with pytest.raises(RunError, match=r"policy\.safetensors is damaged"):
        load_policy(folder)


def test_rows_after_the_checkpoint_are_cut_off_and_done_again(tmp_path: Path) -> None:
    folder = train(tiny(), tmp_path / "run", device="cpu").path
    whole = numbers(folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 99, "phase": "imitation"}\n')
    train(tiny(), folder, resume=True, device="cpu")
    assert numbers(folder) == whole


def test_files_of_before_checksums_are_still_read() -> None:
    """State files such as the committed checkpoint's have no owner."""
    policy = load_policy("results/paper/darkroom-gradual-uat-0")
    assert all(parameter.isfinite().all() for parameter in policy.parameters())


def test_a_run_handed_on_belongs_to_its_new_owner(tmp_path: Path) -> None:
    source = train(override(recipe("darkroom", "vanilla", "smoke"), SHORT), tmp_path / "vanilla", device="cpu")
    config = override(recipe("darkroom", "tent", "smoke"), SHORT)
    taken = train(config, tmp_path / "tent", source=source, device="cpu")
    train(config, taken.path, resume=True, device="cpu")


SHORT: dict[str, Any] = {"domain.horizon": 5, "train.epochs": 2, "train.batch_size": 4, "train.validation_episodes": 4}
