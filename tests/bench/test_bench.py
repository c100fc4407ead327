"""`uat bench`: consistent rows, ratios with known answers, and a reason for every missing measurement."""

from __future__ import annotations

import gc
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.builders import IN_THE_DARK, Watch
from uat.bench import Bench
from uat.bench.__main__ import main as plain_main
from uat.bench.cases import CASES, FULL, QUICK, Training, settings
from uat.bench.losses import PATHS, Loss, unsupported_reason
from uat.bench.peers import MOST, PEERS, load
from uat.bench.recompute import Recomputing
from uat.bench.report import case_rows, tables
from uat.bench.run import Result, Running, bench
from uat.bench.steps import Stepping, tensors
from uat.bench.timing import Call, Row, measure, numpy_obeys, quantile, quiet, threads
from uat.cli import main
from uat.flags import parser
from uat.spec import Weights

CPU = torch.device("cpu")
KEYS = ["device", "case", "method", "path", "batch", "context", "metric", "value", "unit"]
QUICKLY = ["bench", "--quick", "--device", "cpu", "--repeats", "1"]
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the imports of the peers' libraries fail, whether or not they are installed."""
    for library in {library for library, _ in PEERS.values()}:
        monkeypatch.setitem(sys.modules, library, None)


def row(path: str, value: float, **other: Any) -> Row:
    same = {"device": "d", "case": "step", "method": "uat", "batch": 1, "context": 60, "metric": "p50", "unit": "ms"}
    return Row(**{**same, **other}, path=path, value=value)


# ---------------------------------------------------------------- the command


def test_measurements_before_a_kill_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is written case by case, so that an interrupted run loses only one."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Running, "_together", killed)
    rows = tmp_path / "rows.json"
    with pytest.raises(SystemExit, match="130"):
        plain_main([*QUICKLY[1:], "--methods", "vanilla", "--cases", "rollout", "together", "--out", str(rows)])
    assert {row["case"] for row in json.loads(rows.read_text())["rows"]} == {"rollout"}


@pytest.mark.usefixtures("no_peers")
def test_every_case_gives_rows_with_every_key(capsys: Captured, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    main([*QUICKLY, "--json", "--out", str(tmp_path / "new" / "rows.json")])
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert json.loads((tmp_path / "new" / "rows.json").read_text()) == found
    assert list(found)[:6] == ["date", "device", "precision", "uat", "torch", "python"]
    assert found["quick"] is True
    assert all(list(one) == KEYS and one["value"] > 0 for one in found["rows"])
    assert {one["case"] for one in found["rows"]} == set(CASES) - {"together"}  # that needs CUDA, and says so
    assert "seeds side by side need CUDA; on a CPU they take turns" in found["absent"]["fast"]
    losses, others = ([one for one in found["rows"] if (one["case"] == "loss") == is_loss] for is_loss in (True, False))
    assert {one["method"] for one in others} == {"vanilla", "uat"}
    assert {one["path"] for one in others} <= {"fast", "cached", "recompute"}
    assert {(one["method"], one["path"]) for one in losses} == {
        (f"{items} items", path) for items in QUICK.items for path in PATHS
    }
    timed = [one for one in found["rows"] if one["metric"] in ("p50", "p99")]
    assert all(one["unit"] == "ms" for one in timed)
    steps = {(one["batch"], one["context"]) for one in timed if one["case"] == "step"}
    assert steps == set(QUICK.steps())
    assert all(one["device"].startswith("CPU, 1 thread") for one in timed if one["case"] == "step")
    assert torch.get_num_threads() == before
    assert "step: uat, cached" in said.err


def test_both_losses_do_the_same_work() -> None:
    whole, pieces = (Loss(path, 30, 70, CPU).run() for path in PATHS)
    for a, b in zip(whole, pieces, strict=True):
        torch.testing.assert_close(a, b)


def test_logits_that_do_not_fit_are_not_tried() -> None:
    reason = unsupported_reason("whole", 1 << 20, 1 << 20, CPU)
    assert reason is not None
    assert "16384.0 GiB" in reason
    assert unsupported_reason("pieces", 1 << 20, 1 << 20, CPU) is None
    assert unsupported_reason("whole", 10, 10, CPU) is None


@pytest.mark.usefixtures("no_peers")
def test_a_missing_peer_is_reported_with_its_package(capsys: Captured) -> None:
    main([*QUICKLY, "--cases", "step", "--methods", "vanilla"])
    said = capsys.readouterr()
    missing = said.out.split("not measured:")[1]
    for name, (library, _) in PEERS.items():
        assert f"peer:{name}: {library} is not installed: pip install" in missing
        assert f"peer:{name} is not measured" in said.err
    for name, (library, build) in PEERS.items():
        config = settings("uat", QUICK, "fp32")
        reason = build(config.build_domain().spec, config.method, 1, 6, CPU)
        assert isinstance(reason, str), name
        assert library in reason


def test_a_library_that_fails_to_load_is_distinguished_from_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "halfthere.py").write_text("import surely_not_installed")
    monkeypatch.syspath_prepend(tmp_path)
    assert load("halfthere").startswith("halfthere does not load (No module named 'surely_not_installed')")
    assert load("surely_not_installed").startswith("surely_not_installed is not installed")
    assert load("json") is json


@pytest.mark.usefixtures("no_peers")
def test_without_the_console_libraries_it_runs_as_a_module(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_main(["--quick", "--device", "cpu", "--repeats", "1", "--cases", "rollout", "--methods", "uat", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [(one["path"], one["metric"]) for one in found["rows"]][:2] == [("recompute", "p50"), ("recompute", "p99")]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        plain_main(["--device", "cuda"])
    assert stop.value.code == 2
    assert "use device 'cpu'" in capsys.readouterr().err


def test_both_parsers_have_the_same_flags_and_defaults(capsys: Captured) -> None:
    assert Bench(**vars(parser(Bench, "uat.bench").parse_args([]))) == Bench()
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    help_text = capsys.readouterr().out
    for action in parser(Bench, "uat.bench")._actions[1:]:
        assert action.option_strings[0] in help_text
        assert action.help


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--device cuda", "use device 'cpu'"),
        ("--threads 0", "threads=0 must be at least 1"),
        ("--repeats 0", "repeats=0 must be at least 1"),
        ("--methods uta", "unknown method 'uta'; did you mean 'uat'?"),
        ("--cases stpe", "stpe"),
        ("--cases rollout --plot a.png", "add step to the cases"),
        ("--precision bf8", "bf8"),
        ("--precision tf32", "use precision 'fp32' on a CPU"),
    ],
)
def test_mistakes_are_answered_in_one_sentence(
    flags: str, said: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        main(["bench", *flags.split()])
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "matplotlib" else real(name, *a))
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--plot", str(tmp_path / "a.png")])
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    assert "pip install 'uat-transformer[bench]'" in err
    assert err.count("\n") == 1


def test_the_plot_is_drawn_where_matplotlib_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from uat.bench.plot import draw

    rows = [row(p, v * c, context=c) for p, v in (("recompute", 2.0), ("peer:x", 1.0)) for c in (60, 256)]
    draw(rows, tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------- ratios


def test_ratios_are_to_the_twin_of_the_same_method_and_size() -> None:
    rows = [
        row("recompute", 8.0),
        row("cached", 2.0),
        row("cached", 3.0, metric="p99"),
        row("recompute", 90.0, context=4096),
        row("cached", 3.0, context=4096),
        row("recompute", 5.0, method="vanilla"),
        row("cached", 1.0, method="vanilla"),
        row("peer:other", 20.0, method="library"),
    ]
    found = {(line["method"], line["path"], line["context"]): line for line in case_rows(rows)}
    assert found["uat", "cached", 60]["vs recompute"] == "4.00x"
    assert found["uat", "cached", 60]["vs other"] == "10.0x"
    assert found["uat", "cached", 60]["p99 ms"] == "3.00"
    assert found["uat", "recompute", 60]["vs recompute"] == "1.00x"
    assert found["uat", "cached", 4096]["vs recompute"] == "30.0x"
    assert found["uat", "cached", 4096]["growth"] == "1.50x"
    assert found["uat", "cached", 4096]["vs other"] is None
    assert found["vanilla", "cached", 60]["vs recompute"] == "5.00x"
    assert found["library", "peer:other", 60]["vs recompute"] is None


def test_without_a_recomputing_twin_the_baseline_is_the_cached_path_and_the_header_says_so() -> None:
    [first, second] = case_rows([row("cached", 9.0, case="optimize"), row("graph", 3.0, case="optimize")])
    assert (first["vs cached"], second["vs cached"]) == ("1.00x", "3.00x")
    assert "vs cached" in tables(Result(rows=[row("cached", 9.0, case="optimize")]))


def test_tables_are_grouped_by_case_and_list_missing_paths() -> None:
    rows = [row("cached", 1.0), row("cached", 2.0, case="rollout", batch=256)]
    text = tables(Result(rows=rows, absent={"fast": {"no reason": ["step of uat"]}}))
    assert [line.split(" (")[0] for line in text.splitlines() if "(d)" in line] == ["step", "rollout"]
    assert text.endswith("not measured:\n  fast: no reason (step of uat)")


# ---------------------------------------------------------------- timing


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """A fake clock that advances only in sleep."""
    watch = Watch()
    monkeypatch.setattr("uat.bench.timing.time", watch)
    return watch


def test_calls_take_turns_and_only_the_call_is_timed(watch: Watch) -> None:
    order: list[str] = []

    def run() -> None:
        order.append("a")
        watch.sleep(0.001)

    calls = {
        "a": Call(run, lambda: watch.sleep(0.02)),
        "b": Call(lambda: order.append("b")),
    }
    found = measure(calls, 10, CPU)
    assert {name: len(times) for name, times in found.items()} == {"a": 10, "b": 10}
    assert found["a"] == pytest.approx([1.0] * 10)
    assert "".join(order) == "aaabbb" * 5  # one call of three warms up


def test_a_slow_path_gets_fewer_calls_but_at_least_one(watch: Watch) -> None:
    calls = {
        "slow": Call(lambda: watch.sleep(0.11)),
        "never": Call(lambda: watch.sleep(9.0)),
        "fast": Call(lambda: None),
    }
    found = measure(calls, 50, CPU, seconds=0.2)
    assert found["slow"] == pytest.approx([110.0] * 2)
    assert found["never"] == pytest.approx([9000.0])
    assert len(found["fast"]) == 50


def test_quantiles_are_times_that_were_measured() -> None:
    times = [float(x) for x in range(100, 0, -1)]
    assert (quantile(times, 0.5), quantile(times, 0.99), quantile([7.0], 0.99)) == (50.0, 99.0, 7.0)


def test_threads_and_garbage_collection_are_put_back() -> None:
    def fail() -> None:
        assert torch.get_num_threads() == 1
        assert not gc.isenabled()
        raise KeyError

    before = torch.get_num_threads()
    with pytest.raises(KeyError), threads(1), quiet():
        fail()
    assert torch.get_num_threads() == before
    assert gc.isenabled()


def test_one_thread_is_claimed_for_numpy_only_where_it_obeys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    assert not numpy_obeys(1)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    assert numpy_obeys(1)


# ---------------------------------------------------------------- what is timed


@pytest.mark.parametrize("method", IN_THE_DARK)
def test_the_timed_cached_step_equals_the_recomputed_one(method: str) -> None:
    """Every call sees the same context, no matter how often it is repeated."""
    stepping = Stepping(settings(method, QUICK, "fp32"), 3, 12, CPU)
    said: dict[str, list[torch.Tensor]] = {"twin": [], "policy": []}
    step, twin_step = stepping.policy.step, Recomputing.step

    def heard(state: Any, told: Any) -> Any:
        logits, after = step(state, told)
        said["policy"].append(logits)
        return logits, after

    def twin_heard(self: Any, state: Any, told: Any) -> Any:
        logits, after = twin_step(self, state, told)
        said["twin"].append(logits)
        return logits, after

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stepping.policy, "step", heard)
        patch.setattr(Recomputing, "step", twin_heard)
        calls = {path: call for path, call in stepping.calls() if isinstance(call, Call)}
        said["policy"].clear()
        calls["cached"].run()
        calls["recompute"].run()
        calls["recompute"].run()
    [first] = said["policy"]
    torch.testing.assert_close(first, said["twin"][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(said["twin"][1], said["twin"][0], atol=0, rtol=0)


def test_a_step_can_be_repeated_at_the_edge_of_its_memory() -> None:
    stepping = Stepping(settings("uat", QUICK, "fp32"), 1, 6, CPU)
    cached = dict(stepping.calls())["cached"]
    assert isinstance(cached, Call)
    for _ in range(20):
        cached.run()


def test_each_replay_sees_the_same_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces capture, which calls three times to warm up: repeated calls must not run past the memory."""

    def capture(function: Any) -> Any:
        for _ in range(3):
            function()
        return function

    stepping = Stepping(settings("uat", QUICK, "fp32"), 2, 6, CPU)
    lengths: list[list[int]] = []
    step = stepping.policy.step

    def heard(state: Any, told: Any) -> Any:
        lengths.append(state.cache.length_B.tolist())
        return step(state, told)

    monkeypatch.setattr("uat.bench.steps.Captured", capture)
    monkeypatch.setattr(stepping, "device", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(stepping.policy, "step", heard)
    calls = dict(stepping.calls())
    assert list(calls) == ["recompute", "cached", "graph", "fast"]
    graph = calls["graph"]
    assert isinstance(graph, Call)
    lengths.clear()
    graph.run()
    graph.run()
    assert lengths == [[5, 5], [5, 5]]
    assert isinstance(calls["fast"], str)


@pytest.mark.parametrize("path", ["fast", "cached", "recompute"])
def test_a_training_takes_the_path_that_is_named(path: str) -> None:
    training = Training(settings("uat", QUICK, "fp32"), path, CPU)
    assert training.reason == ("the fused step needs CUDA" if path == "fast" else None)
    assert (training.rollout().action >= 0).all()


def test_the_sizes_are_those_that_are_quoted() -> None:
    assert FULL.steps() == [(1, 60), (64, 60), (1024, 60), (1, 256), (1, 1024), (1, 4096)]
    assert (FULL.batch, FULL.context) == (256, 60)
    config = settings("uat", FULL, "tf32")
    assert (config.train.batch_size, config.train.precision, config.domain.horizon) == (256, "tf32", 60)


def test_memory_grows_with_context_and_tensors_are_all_found() -> None:
    found = bench(Bench(cases=("memory",), methods=("uat",), quick=True, device="cpu"))
    sizes = {one.context: one.value for one in found.rows if one.metric == "state"}
    assert 1.5 < sizes[12] / sizes[6] < 2
    assert len(tensors(Stepping(settings("uat", QUICK, "fp32"), 1, 6, CPU).policy.init_state(1, 6, CPU))) == 3


@pytest.mark.parametrize("name", PEERS)
def test_peers_that_are_installed_can_be_called_again_and_again(name: str) -> None:
    library, build = PEERS[name]
    pytest.importorskip(library)
    config = settings("uat", QUICK, "fp32")
    call = build(config.build_domain().spec, config.method, 1, 6, CPU)
    assert isinstance(call, Call)
    assert len(measure({name: call}, 3, CPU)[name]) == 3


def test_d3rlpy_says_where_it_is_no_peer() -> None:
    config, (_, build) = settings("uat", QUICK, "fp32"), PEERS["d3rlpy"]
    spec = config.build_domain().spec
    assert build(spec, config.method, 2, 6, CPU) == "it supports one stream only"
    assert build(spec, config.method, 1, MOST + 1, CPU) == "beyond 1024 steps its attention weights take gigabytes"
    weights = replace(spec, action=Weights(3))
    assert build(weights, config.method, 1, 6, CPU) == "it takes vectors and discrete actions"


def test_d3rlpy_sees_as_many_steps_as_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network runs at each timed call, and never before the first one."""
    library = pytest.importorskip("d3rlpy")
    seen: list[int] = []
    predict = library.algos.DiscreteDecisionTransformer.predict

    def heard(self: Any, told: Any) -> Any:
        seen.append(told.length)
        return predict(self, told)

    monkeypatch.setattr(library.algos.DiscreteDecisionTransformer, "predict", heard)
    config = settings("uat", QUICK, "fp32")
    call = PEERS["d3rlpy"][1](config.build_domain().spec, config.method, 1, 6, CPU)
    assert isinstance(call, Call)
    assert seen == []
    actions = [call.run() for _ in range(3)]
    assert seen == [6, 6, 6]
    assert all(0 <= action < 5 for action in actions)
