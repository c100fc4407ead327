"""Requests for too much memory or time, or for a missing device, are refused in advance."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

import uat
from tests.builders import ALL_SPECS, PAIRS, SPECS, build, small_config
from uat import memory
from uat.cli import main
from uat.domains.darkroom import DarkRoom, DarkRoomConfig
from uat.evaluation.auditing import audit_run
from uat.files import FileError, check_path
from uat.methods import METHODS
from uat.runs import empty_policy
from uat.tensor_files import RunError
from uat.training.memory import check_memory
from uat.training.surroundings import pick_device

CPU = torch.device("cpu")
FOUR_GIB = 4 * 2**30


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_of", lambda device: FOUR_GIB)


# ---------------------------------------------------------------- devices


@pytest.mark.parametrize("device", ["mps", "meta", "xpu", "xyz", "", "cpu:7", "cuda:99", "x" * 5000, "a\nb"])
def test_the_cpu_and_cuda_are_the_only_devices(device: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="device") as caught:
        uat.train(uat.recipe("darkroom", "uat", "smoke"), tmp_path / "run", device=device)
    assert len(str(caught.value)) < 200
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("device", [0, 10**30, [1, 2], torch.zeros(2), True])
def test_a_device_is_named_by_text(device: Any) -> None:
    with pytest.raises(ValueError, match="device="):
        pick_device(device)
    assert pick_device("cpu") == pick_device(CPU) == CPU


def test_the_command_line_says_it_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", "darkroom", "--preset", "smoke", "--device", "mps", "--out", str(tmp_path / "run")])
    assert capsys.readouterr().err == "uat: unknown device 'mps'; use 'cpu' or 'cuda'\n"


# ---------------------------------------------------------------- memory

HUGE: list[tuple[str, dict[str, Any], str]] = [
    ("uat", {"train.batch_size": 10_000_000}, r"train\.batch_size=10000000, horizon=60"),
    ("uat", {"method.d_model": 65_536}, r"method\.d_model=65536, method\.num_layers=2"),
    ("vanilla", {"method.d_ff": 65_536, "method.num_layers": 30, "method.d_model": 512}, r"method\.d_ff=65536"),
    ("vanilla", {"domain.horizon": 1_000_000, "train.batch_size": 256}, "horizon=1000000"),
]


@pytest.mark.parametrize(("method", "changes", "said"), HUGE)
@pytest.mark.usefixtures("small_machine")
def test_a_training_that_cannot_fit_is_refused_by_its_settings(
    method: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    config = uat.override(uat.recipe("darkroom", method, "smoke"), changes)
    with pytest.raises(ValueError, match=rf"training {method} with .*{said}.* would take about .* GiB of memory"):
        uat.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("small_machine")
def test_published_settings_fit_into_a_small_machine() -> None:
    for domain in ("darkroom", "sepsis"):
        config = uat.recipe(domain, "uat", "paper")
        check_memory(config, config.build_domain().spec, CPU)


DOMAINS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a room": ("darkroom", {"domain.size": 1000}, "a room of size=1000"),
    "a catalogue": ("movielens", {"domain.items": 10_000_000}, "a catalogue of users=150 and items=10000000"),
    "assets": ("markets", {"domain.max_assets": 65_536}, "max_assets=65536 on"),
    "days": ("markets", {"domain.days": 1_000_000}, "days=1000000 of all embedded markets"),
}


@pytest.mark.parametrize("name", DOMAINS)
@pytest.mark.usefixtures("small_machine")
def test_worlds_that_cannot_fit_are_refused_by_their_settings(name: str, tmp_path: Path) -> None:
    domain, changes, said = DOMAINS[name]
    with pytest.raises(ValueError, match=rf"{said}.* would take about .* GiB"):
        uat.train(uat.override(uat.recipe(domain, "uat", "smoke"), changes), tmp_path / "run")


def test_what_fits_is_let_through(small_machine: None) -> None:
    memory.check_fits(FOUR_GIB, "this")
    with pytest.raises(ValueError, match=r"^this would take about 4 GiB of memory, but only 4\.0 GiB are available$"):
        memory.check_fits(FOUR_GIB + 1, "this")
    DarkRoom(DarkRoomConfig(size=20)).simulator("train", "cpu")


def test_the_machine_says_how_much_memory_it_has() -> None:
    assert 2**27 < memory.memory_of(CPU) < 2**63


# ---------------------------------------------------------------- policies on disk


@pytest.mark.parametrize(("method", "spec"), [pair for pair, reason in PAIRS.items() if not reason])
def test_an_empty_policy_has_the_shapes_of_a_real_one_and_no_values(method: str, spec: str) -> None:
    config, before = small_config(method), torch.random.get_rng_state()
    empty = empty_policy(METHODS[method], ALL_SPECS[spec], config).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(weight.is_meta for weight in empty.values())
    real = build(method, ALL_SPECS[spec], dtype=torch.float32).state_dict()
    assert {name: (x.shape, x.dtype) for name, x in empty.items()} == {n: (x.shape, x.dtype) for n, x in real.items()}


def test_a_small_file_that_claims_a_huge_policy_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.asdict(uat.UATConfig(d_model=60_000, num_layers=2))
    spec = {"obs": {"kind": "Vector", "width": 10}, "action": {"kind": "Discrete", "count": 5}, "horizon": 60}
    spec |= {"reward_scale": 1.0, "reward_lag": 1, "facts": {}}
    meta = {"format": 1, "method": "uat", "config": config, "spec": spec, "domain": None}
    file = tmp_path / "policy.safetensors"
    file.write_bytes(save({"x": torch.zeros(1)}, metadata={"uat": json.dumps(meta)}))
    assert file.stat().st_size < 1500
    devices: list[torch.device] = []
    built = METHODS["uat"].policy.__init__

    def noted(self: Any, *args: Any) -> None:
        devices.append(torch.empty(0).device)
        built(self, *args)

    monkeypatch.setattr(METHODS["uat"].policy, "__init__", noted)
    with pytest.raises(RunError, match=r"the weight .* is missing"):
        uat.load(file)
    assert [device.type for device in devices] == ["meta"]


WRONG_SAVES: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "no policy": (lambda policy: {"policy": torch.nn.Linear(2, 2)}, "policy="),
    "no method": (lambda policy: {"method_name": float("nan")}, "method_name=nan"),
    "another method": (lambda policy: {"method_name": "dt"}, "method_name='dt' is a DT"),
    "no weights": (lambda policy: {"weights": 7}, "weights=7 must be"),
    "other weights": (lambda policy: {"weights": {"x": torch.zeros(1)}}, "was not written: the weight .* is missing"),
    "no values": (lambda policy: {"policy": policy.to("meta")}, "was not written: .* with values"),
    "complex": (lambda policy: {"policy": policy.to(torch.complex64)}, "was not written: .* is of torch.complex64"),
    "no domain": (lambda policy: {"domain": {1, 2}}, "domain="),
    "no path": (lambda policy: {"path": 7}, "path=7 must be a path"),
}


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize("name", WRONG_SAVES)
def test_what_cannot_be_loaded_again_is_not_saved(name: str, tmp_path: Path) -> None:
    policy, file = build("uat", SPECS["vector-discrete"], dtype=torch.float32), tmp_path / "policy.safetensors"
    change, said = WRONG_SAVES[name]
    given: dict[str, Any] = {"path": file, "policy": policy, "method_name": "uat", **change(policy)}
    with pytest.raises(ValueError, match=said):
        uat.save(**given)
    assert not file.exists()


# ---------------------------------------------------------------- arguments and sentences


NO_PATHS = [None, 7, 10**5000, b"x", [], "", "a\0b", "x" * 256, "\ud800", object()]


@pytest.mark.parametrize("place", range(len(NO_PATHS)))
def test_a_path_is_text_that_can_be_a_name(place: int) -> None:
    with pytest.raises(ValueError, match="out=") as caught:
        check_path(NO_PATHS[place], "out")
    assert len(str(caught.value)) < 200
    assert check_path("a/b", "out") == check_path(Path("a/b"), "out")


ARGUMENTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "config": (lambda run: uat.train(7, run), "config=7"),  # pyright: ignore[reportArgumentType]
    "progress": (lambda run: uat.train(uat.recipe("darkroom", "uat"), run, progress="x"), "progress="),  # pyright: ignore[reportArgumentType]
    "source": (lambda run: uat.train(uat.recipe("darkroom", "tent"), run, source=[]), "source="),  # pyright: ignore[reportArgumentType]
    "evaluated": (lambda run: uat.evaluate(run, episodes=1e39), "episodes="),  # pyright: ignore[reportArgumentType]
    "evaluated for ever": (lambda run: uat.evaluate(run, episodes=10**7), "episodes=10000000 must be at least 1"),
    "audited": (lambda run: audit_run(run, episodes=10**7), "audit: episodes=10000000 must lie|must be at least 2"),
    "drawn": (lambda run: audit_run(run, draws=10**9), "audit: draws=1000000000 must be"),
    "trusted": (lambda run: uat.evaluate(run, trust="no"), "trust='no' must be bool"),  # pyright: ignore[reportArgumentType]
    "trusted when open": (lambda run: uat.evaluate(uat.Run.open(run), trust=1), "trust=1 must be bool"),  # pyright: ignore[reportArgumentType]
    "run": (lambda run: uat.evaluate({}), "run={} must be a path"),  # pyright: ignore[reportArgumentType]
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.robustness.fuzz.run_folders import tiny

    return uat.train(tiny("uat"), tmp_path_factory.mktemp("limits") / "run").path


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_is_refused_by_its_name(name: str, trained: Path, tmp_path: Path) -> None:
    call, said = ARGUMENTS[name]
    with pytest.raises(ValueError, match=said):
        call(tmp_path / "new" if name in ("config", "progress", "source") else trained)


def test_a_sentence_that_ends_a_command_has_a_readable_length(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["evaluate", "x" * 50_000])
    assert len(capsys.readouterr().err) < 1100


def test_too_few_days_are_said_with_the_file(tmp_path: Path) -> None:
    pytest.importorskip("polars")
    from uat.domains.markets import Markets, MarketsConfig

    file = tmp_path / "us.csv"
    file.write_text("date,ticker,open,high,low,close,volume\n2020-01-01,AA,10,12,9,11,100\n")
    with pytest.raises(FileError, match=rf"^{file}: us: 1 days are too few"):
        Markets(MarketsConfig(data=str(file))).simulator("train", "cpu")


def test_ratings_out_of_range_are_said_with_the_folder(tmp_path: Path) -> None:
    pytest.importorskip("polars")
    from uat.data.movielens.sources import load

    (tmp_path / "movies.csv").write_text("movieId,title,genres\n1,One,Action\n")
    for rating, said in ((99, "are not within"), (3, "nothing is left of 1 ratings")):
        (tmp_path / "ratings.csv").write_text(f"userId,movieId,rating,timestamp\n1,1,{rating},1\n")
        with pytest.raises(FileError, match=rf"^{tmp_path}: .*{said}"):
            load(tmp_path)


@pytest.mark.parametrize("value", [10**5000, torch.zeros(2, 2).to_sparse()], ids=["digits", "sparse"])
def test_odd_threads_are_refused_in_one_line(value: Any) -> None:
    with pytest.raises(ValueError, match="threads=") as caught:
        uat.Session(build("uat", SPECS["vector-discrete"], dtype=torch.float32), threads=value)
    assert "\n" not in str(caught.value)


def test_restart_refuses_bfloat16_as_every_other_float() -> None:
    session = uat.Session(build("uat", SPECS["vector-discrete"], dtype=torch.float32))
    with pytest.raises(ValueError, match="restart: expected stream numbers"):
        session.restart(torch.zeros(1, dtype=torch.bfloat16))


def test_a_whole_number_serves_as_the_bias_of_gtrxls_gates() -> None:
    assert build("gtrxl", SPECS["vector-discrete"], gate_bias=2) is not None
