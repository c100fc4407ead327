"""`uat demo` from end to end: two runs, a table, and a page."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from uat.cli import main
from uat.training.epoch import Epoch

METHODS = ("vanilla", "uat")


def demo(out: Path) -> tuple[list[dict[str, Any]], str]:
    """Rows from stdout, and text from stderr."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        main(["demo", "--preset", "smoke", "--out", str(out), "--device", "cpu", "--json"])
    return json.loads(stdout.getvalue()), stderr.getvalue()


def page_data(out: Path) -> dict[str, Any]:
    page = (out / "demo.html").read_text(encoding="utf-8")
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)
    return json.loads(scripts[0])


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], str]:
    out = tmp_path_factory.mktemp("demo") / "out"
    return out, *demo(out)


Shown = tuple[Path, list[dict[str, Any]], str]


def test_the_table_holds_both_methods_between_chance_and_expert(shown: Shown) -> None:
    _, rows, stderr = shown
    assert [row["method"] for row in rows] == ["random", "vanilla", "uat", "ceiling", "expert"]
    by = {row["method"]: row for row in rows}
    assert by["expert"]["accuracy"] == 1.0
    assert by["random"]["accuracy"] < by["ceiling"]["accuracy"]
    for row in rows:
        assert row["low"] <= row["accuracy"] <= row["high"]
        trained = row["method"] in METHODS
        assert all((row[name] is not None) == trained for name in ("gap_closed", "parameters", "seconds"))
    assert by["vanilla"]["gap_closed"] == 0.0
    assert by["vanilla"]["parameters"] < by["uat"]["parameters"]
    assert "demo.html" in stderr


def test_the_page_carries_the_table_and_the_curves(shown: Shown) -> None:
    out, rows, _ = shown
    data = page_data(out)
    assert data["table"] == rows
    for method in METHODS:
        curve = data["curves"][method]
        logged = [json.loads(line) for line in (out / method / "metrics.jsonl").read_text().splitlines()]
        assert [point["epoch"] for point in curve] == [1, 2, 3, 4]
        assert [point["loss"] for point in curve] == [row["loss/imitation"] for row in logged]
        assert [point["accuracy"] is None for point in curve] == [True, False, True, False]


def test_the_page_replays_the_same_episodes_for_both(shown: Shown) -> None:
    data = page_data(shown[0])
    cells = data["grid"] ** 2
    assert len(data["episodes"]) >= 1
    for episode in data["episodes"]:
        vanilla, uat = (episode["policies"][method] for method in METHODS)
        assert vanilla["goal"] == uat["goal"]
        assert vanilla["position"][0] == uat["position"][0]
        for policy in (vanilla, uat):
            steps = len(policy["action"])
            assert steps == 60
            assert all(len(policy[name]) == steps for name in ("position", "goal", "target", "reward", "cue"))
            assert set(policy["cue"]) <= {0, 1}
            assert set(policy["action"]) | set(policy["target"]) <= set(range(len(data["actions"])))
            assert all(0 <= cell < cells for cell in policy["position"] + policy["goal"])


def test_attention_looks_back_and_its_rows_sum_to_one(shown: Shown) -> None:
    for episode in page_data(shown[0])["episodes"]:
        for policy in episode["policies"].values():
            assert len(policy["attention"]) == 2  # layers
            for layer in policy["attention"]:
                for t, row in enumerate(layer):
                    assert sum(row) == pytest.approx(1, abs=0.0005 * (t + 1) + 1e-9)  # three decimals per entry
                    assert not any(row[t + 1 :])


def test_only_uat_has_gates(shown: Shown) -> None:
    for episode in page_data(shown[0])["episodes"]:
        assert episode["policies"]["vanilla"]["gates"] is None
        gates = episode["policies"]["uat"]["gates"]
        assert (len(gates["rho"]), [len(layer) for layer in gates["g"]]) == (60, [60, 60])
        assert gates["rho"][0] == gates["g"][0][0] == 0  # nothing has been done yet
        assert max(gates["rho"]) > 0
        assert max(gates["g"][0]) > 0


def test_the_command_on_the_page_is_the_one_that_made_it(shown: Shown) -> None:
    assert page_data(shown[0])["command"] == "uat demo --preset smoke --seed 0"


def test_a_second_demo_trains_nothing_and_prints_the_same(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    out, rows, _ = shown
    before = {method: (out / method / "metrics.jsonl").read_bytes() for method in METHODS}
    data = page_data(out)
    monkeypatch.setattr(Epoch, "run", lambda *_: pytest.fail("trained again"))
    again, _ = demo(out)
    assert again == rows
    assert page_data(out) == data
    assert {method: (out / method / "metrics.jsonl").read_bytes() for method in METHODS} == before


def test_another_demo_is_not_written_over_this_one(shown: Shown, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown[0]
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--preset", "smoke", "--seed", "1", "--out", str(out), "--device", "cpu"])
    assert stop.value.code == 2
    assert "holds another run" in capsys.readouterr().err
