"""Run folders: whole files or none, never another's folder, and a damaged one says which file and what is wrong."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from uat.config import RunConfig, override, to_json
from uat.files import replacing, write_atomically
from uat.methods import METHODS
from uat.recipes import recipe
from uat.runs import Run, load_policy, save_policy
from uat.tensor_files import RunError, copied, read_tensors, write_tensors
from uat.training import train

TINY: dict[str, Any] = {
    "domain.horizon": 4,
    "method.d_model": 8,
    "method.num_layers": 1,
    "method.d_ff": 8,
    "train.epochs": 2,
    "train.batch_size": 4,
    "train.validate_every": 1,
    "train.validation_episodes": 4,
    "evaluation.episodes": 4,
}


def tiny(method: str = "uat", **changes: Any) -> RunConfig:
    return override(recipe("darkroom", method, "smoke"), {**TINY, **changes})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny(), tmp_path_factory.mktemp("trained") / "run", device="cpu").path


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of a finished run, to damage."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# ---------------------------------------------------------------- atomic files


def test_a_write_replaces_the_file_and_makes_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "er" / "file"
    write_atomically(file, b"old")
    write_atomically(file, b"new")
    assert content(tmp_path) == {"deep/er/file": b"new"}


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_failing_write_leaves_the_old_file_and_no_temporary(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space left on device")

    write_atomically(tmp_path / "file", b"old")
    monkeypatch.setattr(os if broken == "fsync" else Path, broken, fail)
    with pytest.raises(OSError, match="no space left"):
        write_atomically(tmp_path / "file", b"new")
    assert content(tmp_path) == {"file": b"old"}


def test_a_reader_never_sees_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    write_atomically(tmp_path / "file", b"old")
    monkeypatch.setattr(os, "fsync", lambda _: seen.append((tmp_path / "file").read_bytes()))
    write_atomically(tmp_path / "file", b"new")
    assert seen == [b"old"]
    assert (tmp_path / "file").read_bytes() == b"new"


def test_what_a_killed_write_left_goes_with_the_next_one_and_nothing_else_does(tmp_path: Path) -> None:
    """The writer of a temporary file that is alive holds its lock; other names are not of this file."""
    write_atomically(tmp_path / "precious", b"years of work")
    others = {".other.0123abcd.partial", ".file.notes.partial", ".file.jsonl.0123abcd.partial"}
    for name in {*others, ".file.0123abcd.partial"}:
        (tmp_path / name).write_bytes(b"half a fi")
    (tmp_path / ".file.00000000.partial").symlink_to(tmp_path / "precious")
    with replacing(tmp_path / "file") as slow:
        slow.write(b"slow")
        slow.flush()
        [alive] = set(tmp_path.glob(".file.????????.partial")) - {tmp_path / ".file.00000000.partial"}
        write_atomically(tmp_path / "file", b"quick")
        assert alive.read_bytes() == b"slow"
        assert (tmp_path / "file").read_bytes() == b"quick"
    assert content(tmp_path).keys() == others | {"file", "precious", ".file.00000000.partial"}
    assert (tmp_path / "file").read_bytes() == b"slow"
    assert (tmp_path / "precious").read_bytes() == b"years of work"


def test_tensors_come_back_bit_for_bit_with_what_was_said_of_them(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4).mT, "b": torch.tensor(7), "c": torch.randn(2, dtype=torch.float64)}
    write_tensors(tmp_path / "file", tensors, {"epoch": 3, "best_value": None})
    back, meta = read_tensors(tmp_path / "file")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) and back[name].dtype == tensors[name].dtype for name in back)
    assert (meta["epoch"], meta["best_value"]) == (3, None)


# ---------------------------------------------------------------- rows


def test_rows_come_back_in_order(tmp_path: Path) -> None:
    run = Run.create(tiny(), tmp_path)
    run.append("metrics.jsonl", [{"epoch": 1}, {"epoch": 2}])
    run.append("metrics.jsonl", [{"epoch": 3}])
    assert run.rows("metrics.jsonl") == [{"epoch": 1}, {"epoch": 2}, {"epoch": 3}]
    assert run.rows("nothing.jsonl") == []


@pytest.mark.parametrize("cut", ['{"epoch": 2, "lo', '{"epoch": 2}', "{"])
def test_a_last_line_that_was_cut_off_is_left_out(cut: str, tmp_path: Path) -> None:
    run = Run.create(tiny(), tmp_path)
    run.file("metrics.jsonl").write_text('{"epoch": 1}\n' + cut)
    assert run.rows("metrics.jsonl") == [{"epoch": 1}]


# ---------------------------------------------------------------- whose folder it is


def test_a_new_run_writes_its_config_and_manifest(tmp_path: Path) -> None:
    run = Run.create(tiny(), tmp_path / "new" / "run")
    assert json.loads(run.file("config.json").read_text()) == to_json(tiny())
    said = json.loads(run.file("manifest.json").read_text())
    assert {"version", "commit", "device", "command", "data", "torch"} <= said.keys()
    assert Run.open(run.path) == run


def test_the_same_run_is_taken_only_to_resume(tmp_path: Path) -> None:
    Run.create(tiny(), tmp_path).append("metrics.jsonl", [{"epoch": 1}])
    before = content(tmp_path)
    with pytest.raises(RunError, match="already holds this run; continue it with --resume"):
        Run.create(tiny(), tmp_path)
    assert Run.create(tiny(), tmp_path, resume=True).config == tiny()
    assert content(tmp_path) == before


@pytest.mark.parametrize("resume", [False, True])
def test_another_run_is_never_touched(resume: bool, tmp_path: Path) -> None:
    Run.create(tiny(seed=1), tmp_path).append("metrics.jsonl", [{"epoch": 1}])
    before = content(tmp_path)
    with pytest.raises(RunError, match=r"holds another run \(uat on darkroom, preset smoke, seed 1, .*--out"):
        Run.create(tiny(seed=2), tmp_path, resume=resume)
    assert content(tmp_path) == before


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_with_other_files_is_refused(resume: bool, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunError, match="holds other files") as caught:
        Run.create(tiny(), tmp_path, resume=resume)
    assert str(tmp_path) in str(caught.value)
    assert content(tmp_path) == {"thesis.tex": b"years of work"}


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(RunError, match="run is a file"):
        Run.create(tiny(), tmp_path / "run")


def test_a_run_killed_while_it_wrote_its_config_can_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill runs no `finally`: the temporary of config.json stays, and nothing else is there."""

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", die)
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            Run.create(tiny(), tmp_path / "run")
    assert [file.name.startswith(".config.json.") for file in (tmp_path / "run").iterdir()] == [True]
    assert Run.create(tiny(), tmp_path / "run", resume=True).config == tiny()


def test_opening_what_is_no_run_says_so(tmp_path: Path) -> None:
    for path, why in ((tmp_path, r"it has no config\.json"), (tmp_path / "nowhere", "it does not exist")):
        with pytest.raises(RunError, match=f"is not a run folder: {why}") as caught:
            Run.open(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"domain_name": 3}', "\udcff\udcfe"])
def test_a_config_file_that_is_no_config_is_refused_by_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    for use in (lambda: Run.open(tmp_path), lambda: Run.create(tiny(), tmp_path, resume=True)):
        with pytest.raises(RunError, match=r"config\.json"):
            use()


# ---------------------------------------------------------------- damaged checkpoints


def retell(file: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], None]) -> None:
    """Write the file again with other tensors or other metadata."""
    tensors, meta = read_tensors(file)
    change(tensors, meta)
    save_file(tensors, file, metadata={"uat": json.dumps(meta)})


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def foreign(file: Path) -> None:
    save_file(load_file(file), file)


def foreign_with_our_word(file: Path) -> None:
    save_file(load_file(file), file, metadata={"uat": "1.0"})


def garbled(file: Path) -> None:
    save_file(load_file(file), file, metadata={"uat": "{not json"})


def newer_format(file: Path) -> None:
    retell(file, lambda _, meta: meta.update(format=99))


def rename_a_weight(file: Path) -> None:
    retell(file, lambda tensors, _: tensors.update({f"{name}x": tensors.pop(name) for name in list(tensors)[:1]}))


def add_a_weight(file: Path) -> None:
    retell(file, lambda tensors, _: tensors.update(surplus=torch.zeros(1)))


def widen_a_weight(file: Path) -> None:
    def widen(tensors: dict[str, Tensor], _: Any) -> None:
        name = next(name for name in sorted(tensors) if tensors[name].dim() == 2)
        tensors[name] = torch.zeros(tensors[name].shape[0] + 1, tensors[name].shape[1])

    retell(file, widen)


def narrow_a_weight(file: Path) -> None:
    """To a shape that broadcasting would let pass."""

    def narrow(tensors: dict[str, Tensor], _: Any) -> None:
        name = next(name for name in sorted(tensors) if tensors[name].dim() == 2)
        tensors[name] = torch.zeros(1, tensors[name].shape[1])

    retell(file, narrow)


def replace_by_pickle(file: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, file)


def empty(file: Path) -> None:
    file.write_bytes(b"")


DAMAGE = {
    truncate: "truncated or not a safetensors file",
    empty: "truncated or not a safetensors file",
    replace_by_pickle: "truncated or not a safetensors file",
    foreign: "was not written by uat",
    foreign_with_our_word: "safetensors",
    garbled: "safetensors",
    newer_format: "format 99",
    rename_a_weight: "is (missing|unknown)",
    widen_a_weight: "shape",
    narrow_a_weight: "shape",
}


@pytest.mark.parametrize(("damage", "message"), [*DAMAGE.items(), (add_a_weight, "surplus is unknown")])
@pytest.mark.parametrize("given", ["folder", "file"])
def test_a_damaged_policy_is_refused_with_its_file(
    given: str, damage: Callable[[Path], None], message: str, folder: Path
) -> None:
    file = folder / "policy.safetensors"
    damage(file)
    with pytest.raises(RunError, match=message) as caught:
        load_policy(folder if given == "folder" else file)
    assert str(file) in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("damage", "message"), DAMAGE.items())
def test_a_damaged_state_is_refused_with_its_file_and_the_run_stays(
    damage: Callable[[Path], None], message: str, folder: Path
) -> None:
    file = folder / "state" / "train.safetensors"
    damage(file)
    before = content(folder)
    with pytest.raises(RunError, match=message) as caught:
        train(tiny(), folder, resume=True, device="cpu")
    assert str(file) in str(caught.value)
    assert {name: now for name, now in content(folder).items() if not name.startswith("tensorboard")} == {
        name: then for name, then in before.items() if not name.startswith("tensorboard")
    }


def test_a_policy_is_no_training_state(folder: Path) -> None:
    shutil.copy(folder / "policy.safetensors", folder / "state" / "train.safetensors")
    with pytest.raises(RunError, match=r"train\.safetensors"):
        train(tiny(), folder, resume=True, device="cpu")


@pytest.mark.parametrize(
    "change",
    [{"method.feedback_decay": 0.5}, {"method.d_ff": 16}, {"method.past_table": "clamp"}, {"domain.horizon": 3}],
    ids=str,
)
def test_a_config_that_does_not_match_the_weights_is_refused(change: dict[str, Any], folder: Path) -> None:
    other = override(tiny(), change)
    (folder / "config.json").write_text(json.dumps(to_json(other)))
    with pytest.raises(RunError) as caught:
        load_policy(folder)
    assert str(folder / "policy.safetensors") in str(caught.value)
    assert str(folder / "config.json") in str(caught.value)
    assert next(iter(change)).split(".")[1] in str(caught.value)


@pytest.mark.parametrize(("section", "name"), [("config", "use_action"), ("domain", "shift_steps")])
def test_a_policy_from_before_a_setting_came_is_still_its_runs(section: str, name: str, folder: Path) -> None:
    tensors, meta = read_tensors(folder / "policy.safetensors")
    del meta[section][name]
    write_tensors(folder / "policy.safetensors", tensors, meta)
    assert load_policy(folder).config == Run.open(folder).config.method


def test_weights_of_another_method_are_refused(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(to_json(tiny("vanilla"))))
    with pytest.raises(RunError, match="its method is uat, expected vanilla"):
        load_policy(folder)


def test_a_method_from_the_future_is_refused_by_name(folder: Path) -> None:
    file = folder / "policy.safetensors"
    retell(file, lambda _, meta: meta.update(method="telepathy"))
    with pytest.raises(RunError, match=r"policy\.safetensors holds the method 'telepathy'"):
        load_policy(file)


def test_a_run_without_a_policy_says_what_may_have_happened(tmp_path: Path) -> None:
    Run.create(tiny(), tmp_path)
    with pytest.raises(RunError, match=r"policy\.safetensors does not exist; was the run stopped before"):
        load_policy(tmp_path)


class Trap:
    """Unpickling this leaves a file behind."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("name", ["policy.safetensors", "state/train.safetensors", "config.json"])
def test_loading_never_unpickles(name: str, folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    pickled = pickle.dumps(Trap(trace))
    (folder / name).write_bytes(pickled)
    with pytest.raises(RunError):
        train(tiny(), folder, resume=True, device="cpu") if name.startswith("state") else load_policy(folder)
    assert not trace.exists()
    pickle.loads(pickled)
    assert trace.exists()  # the trap works


# ---------------------------------------------------------------- policies


@pytest.mark.parametrize("given", ["folder", "file"])
def test_a_policy_comes_back_ready_to_act(given: str, folder: Path) -> None:
    file = folder / "policy.safetensors"
    policy = load_policy(folder if given == "folder" else str(file))
    assert not policy.training
    assert policy.config == tiny().method
    assert policy.spec == tiny().build_domain().spec
    saved, _ = read_tensors(file)
    assert all(torch.equal(saved[name], tensor) for name, tensor in policy.state_dict().items())


def test_the_rewards_scale_and_lag_travel_with_the_weights(tmp_path: Path) -> None:
    spec = dataclasses.replace(tiny().build_domain().spec, reward_scale=0.125, reward_lag=3)
    save_policy(tmp_path / "other.safetensors", METHODS["uat"].build(spec, tiny().method), "uat")
    assert load_policy(tmp_path / "other.safetensors").spec == spec


def test_double_weights_stay_double(tmp_path: Path) -> None:
    config = tiny()
    policy = METHODS["uat"].build(config.build_domain().spec, config.method).double()
    save_policy(tmp_path / "p.safetensors", policy, "uat")
    back = load_policy(tmp_path / "p.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), back.parameters(), strict=True))
    assert next(back.parameters()).dtype == torch.float64


def test_copies_are_the_tensors_and_share_nothing_with_them(tmp_path: Path) -> None:
    x = torch.arange(12.0).view(3, 4)
    tensors = {
        "whole": x,
        "turned": x.t(),
        "again": x,
        "spread": torch.ones(1, 3).expand(2, 3),
        "half": x.half(),
        "count": torch.tensor(7),
        "none": torch.empty(0, 5),
        "flags": x > 5,
    }
    before, copies = {name: tensor.clone() for name, tensor in tensors.items()}, copied(tensors)
    x.zero_()
    copies["again"].add_(1)
    assert list(copies) == list(tensors)
    for name, copy in copies.items():
        assert (copy.shape, copy.dtype) == (tensors[name].shape, tensors[name].dtype)
        assert torch.equal(copy, before[name] + 1 if name == "again" else before[name]), name
    write_tensors(tmp_path / "file.safetensors", copies, {})
    read, _ = read_tensors(tmp_path / "file.safetensors")
    assert all(torch.equal(read[name], copy) for name, copy in copies.items())
