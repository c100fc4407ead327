"""The demo page: its data is unchanged, no text escapes from the script, and it loads nothing."""

import json
import re
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest

from uat.paper.page import fill, write_page

T, L = 3, 2


class Reader(HTMLParser):
    """Collects the tags of a page and the text of each script, the way a browser splits them."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.in_script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.in_script = True
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.in_script = self.in_script and tag != "script"

    def handle_data(self, data: str) -> None:
        if self.in_script:
            self.scripts[-1] += data


def policy(gates: object) -> dict[str, object]:
    rows = [[1.0, 0.0, 0.0], [0.25, 0.75, 0.0], [0.2, 0.3, 0.5]]
    return {
        "position": [0, 1, 11],
        "goal": [11] * T,
        "action": [4, 2, 0],
        "target": [4, 2, 0],
        "reward": [0.49, 1.99, 1.99],
        "cue": [0, 1, 0],
        "attention": [rows] * L,
        "gates": gates,
    }


def example(title: str = "A demo") -> dict[str, object]:
    row = {"accuracy": 0.9, "low": 0.89, "high": 0.91, "optimal_accuracy": 0.95, "efficiency": 0.66}
    none = {"gap_closed": None, "parameters": None, "seconds": None}
    return {
        "title": title,
        "subtitle": "two policies",
        "command": "uat demo",
        "device": "cpu",
        "version": "0",
        "task": "gradual",
        "table": [{"method": "uat", "label": "UAT", **row, **none}],
        "curves": {"uat": [{"epoch": 1, "loss": 1.6, "accuracy": None}]},
        "grid": 10,
        "actions": ["stay", "up", "down", "left", "right"],
        "episodes": [
            {
                "name": "episode 3",
                "policies": {
                    "uat": policy({"rho": [0.0, 0.1, 0.2], "g": [[0.0, 0.5, 0.4]] * L}),
                    "vanilla": policy(None),
                },
            }
        ],
    }


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    return reader


def embedded(page: str) -> object:
    return json.loads(read(page).scripts[0])


def template() -> str:
    return resources.files("uat.evaluation").joinpath("demo.html").read_text(encoding="utf-8")


def test_data_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "demo.html"
    write_page(example(), path)
    assert embedded(path.read_text(encoding="utf-8")) == example()


@pytest.mark.parametrize(
    "text",
    [
        "</script><b>out</b>",
        "</SCRIPT >",
        "<!--<script>",
        "]]> & \" ' \\u003c \\",
        "__DATA__",
        "naïve ρ \u2028 \U0001f600",
    ],
)
def test_no_text_breaks_out(text: str, tmp_path: Path) -> None:
    path = tmp_path / "demo.html"
    write_page(example(title=text), path)
    page = path.read_text(encoding="utf-8")
    assert embedded(page) == example(title=text)
    assert read(page).tags == read(template()).tags


def test_the_script_turns_no_text_into_markup() -> None:
    code = read(template()).scripts[-1]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", code)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_json_cannot_hold_is_refused_and_the_old_page_stays(value: float, tmp_path: Path) -> None:
    path = tmp_path / "demo.html"
    path.write_text("old", encoding="utf-8")
    with pytest.raises(ValueError, match="JSON compliant"):
        write_page({**example(), "table": [{"accuracy": value}]}, path)
    assert path.read_text(encoding="utf-8") == "old"


def test_a_page_replaces_the_old_one_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "demo.html"
    path.write_text("old", encoding="utf-8")
    write_page(example(title="new"), path)
    assert [file.name for file in tmp_path.iterdir()] == ["demo.html"]
    assert "new" in path.read_text(encoding="utf-8")


def test_a_failed_replace_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = tmp_path / "demo.html"
    folder.mkdir()
    with pytest.raises(OSError):
        write_page(example(), folder)
    assert [file.name for file in tmp_path.iterdir()] == ["demo.html"]


def test_the_page_loads_nothing() -> None:
    page = template()
    assert not re.search(
        r"https?:|//[a-z0-9-]+\.[a-z]|@import|\bfetch\(|XMLHttpRequest|\bimport\(", page, re.IGNORECASE
    )
    assert not re.search(r"url\((?!#)", page)
    tags = read(page).tags
    assert not {tag for tag, _ in tags} & {"link", "img", "iframe", "object", "embed", "base"}
    assert not [(tag, attrs) for tag, attrs in tags if {"src", "srcset", "data", "action"} & set(attrs)]
    assert all((attrs.get("href") or "#").startswith("#") for _, attrs in tags)
    policies = [attrs["content"] for _, attrs in tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert len(policies) == 1
    assert "default-src 'none'" in (policies[0] or "")


@pytest.mark.parametrize("text", ["nothing here", "__DATA__ and __DATA__"])
def test_a_template_without_one_place_for_the_data_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="once"):
        fill(text, example())
