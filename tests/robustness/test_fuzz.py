"""The first inputs of every family of the fuzzing campaign, and tests that the campaign detects faults."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.robustness.fuzz import campaign
from tests.robustness.fuzz.__main__ import FAMILIES, table
from tests.robustness.fuzz.campaign import Case, Family, cases, judge, run
from tests.robustness.fuzz.verdict import Input, Verdict, ask, ask_command

pytest.importorskip("polars")
pytest.importorskip("matplotlib")
INPUTS = {"commands": 15, "run folders": 25, "result folders": 20, "data files": 60, "entrances": 80}


@pytest.mark.parametrize("kind", FAMILIES, ids=lambda kind: kind.name)
def test_the_first_inputs_are_taken_or_refused(
    kind: type[Family], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    family = kind()
    (tmp_path / "made").mkdir()
    family.prepare(tmp_path / "made")
    found = {case: judge(family, case, tmp_path) for case in cases([family], INPUTS[family.name], 1)}
    assert not [(str(case), what, one.said) for case, (what, one) in found.items() if one.kind == "broken"]
    assert {one.kind for _, one in found.values()} == {"refused", "taken"}


class Bad:
    """A family whose inputs have forbidden effects."""

    name, share = "bad", 1.0

    def __init__(self, call: Callable[[Path], Any]) -> None:
        self.call = call

    def prepare(self, folder: Path) -> None: ...

    def draw(self, random: Random, folder: Path) -> Input:
        return Input("bad", lambda: ask(lambda: self.call(folder)))


def loop(_: Path) -> None:
    while True:
        pass


def sleep(_: Path) -> None:
    time.sleep(1000)


def outside(folder: Path) -> None:
    (folder.parent.parent / "x").write_text("out")


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "an end": (lambda folder: os._exit(3), "the process ended or hung"),
    "a loop": (loop, "took longer than 0.2 s"),
    "a sleep": (sleep, "the process ended or hung"),
    "memory": (lambda folder: bytearray(2**30), "took all memory"),
    "a file outside": (outside, "changed files outside its folder"),
    "an error of others": (lambda folder: {}["x"], "not an error of ours"),
    "an error of Python's own": (lambda folder: int("x"), "not an error of ours"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_broken_is_seen_and_the_next_input_is_judged(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "SECONDS", 0.2)
    monkeypatch.setattr(campaign, "SILENCE", 1 if name == "a sleep" else 60)
    call, said = BAD[name]
    wanted = [Case("bad", 0, 0), Case("bad", 0, 1)]
    found = list(run([Bad(call)], wanted, tmp_path, 2**29))
    assert [one.case for one in found] == wanted
    assert all(one.verdict.kind == "broken" and said in one.verdict.said for one in found)
    assert table(found).splitlines()[-1].split()[:6] == ["in", "total", "2", "0", "0", "2"]


def test_sentences_are_looked_at() -> None:
    from uat.settings import Count, checked

    assert ask(lambda: checked(0, Count, "episodes"), ("episodes",)).kind == "refused"
    assert "names none of draws" in ask(lambda: checked(0, Count, "episodes"), ("draws",)).said
    assert "several lines" in ask(lambda: checked(0, Count, "a\nb")).said
    assert ask(lambda: 1, check=lambda _: "it is 1") == Verdict("broken", "accepted nonsense: it is 1")
    assert ask_command(["list", "nothing"]).kind == "refused"
    assert ask_command(["list"]).kind == "taken"


def test_inputs_are_shared_out_and_the_same_each_time() -> None:
    families = [kind() for kind in FAMILIES]
    found = cases(families, 10_000, 5)
    assert len(found) == len(set(found)) == 10_000
    assert {case.seed for case in found} == set(range(5))
    drawn = [Random(str(Case("commands", 1, 2))).random() for _ in range(2)]
    assert drawn[0] == drawn[1] != Random(str(Case("commands", 1, 3))).random()
