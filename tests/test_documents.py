"""Links between documents lead to files and headings that exist, the index lists every page, and a world runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import uat
from tests.test_readme import quickened, shell_commands
from uat.cli import main
from uat.methods import METHODS

ROOT = Path(__file__).parents[1]
TABLES = ROOT / "docs" / "report" / "tables"
"""Tables of a report, which are generated and not committed."""
PAGES = sorted(
    page
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    if not page.is_relative_to(TABLES)
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Relative links of a page without a target."""
    plain = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    broken = []
    for link in LINK.findall(plain):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page: Path) -> None:
    assert broken_links(page) == []


def test_a_world_without_an_expert_is_trained_as_its_page_says(tmp_path: Path) -> None:
    """The blocks of the page are one program, as in a notebook."""
    page = (ROOT / "docs" / "howto" / "write-a-world.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "arms.py").write_text("\n".join(blocks), encoding="utf-8")
    command = [sys.executable, "arms.py"]
    path = {**os.environ, "PYTHONPATH": str(Path(uat.__file__).parents[1]), "UAT_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    value = re.search(r"value=([\d.]+)", done.stdout)
    assert value is not None, done.stdout
    assert float(value[1]) > 0.95  # one of three arms at random in each of five steps pays in 0.87 of the episodes


def test_commands_about_evaluation_run_in_the_order_of_their_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for text in re.findall(r"^```bash\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        for words in shell_commands("bash", text):
            main(quickened(words)[1:])
    main(["evaluate", "runs/CartPole-v1-uat-smoke-0", "--episodes", "4"])
    said = capsys.readouterr().out
    assert "validation/length" in said
    assert "success" not in said, "CartPole reports none"
    assert "nan" not in said
    assert {file.name for file in tmp_path.iterdir()} == {"runs", "curves.svg", "pole.gif"}
    assert (tmp_path / "runs" / "darkroom-uat-smoke-0" / "watch.gif").exists()


def test_the_page_on_tuning_works_as_it_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commands and its Python share a folder, as for a reader; the trials and their commands are the same."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "howto" / "tune.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(bash|python)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert [language for language, _ in blocks] == ["bash", "bash", "python"]
    for _, text in blocks[:2]:
        main(shlex.split(text)[1:])
    printed = capsys.readouterr().out
    exec(blocks[2][1], {})
    assert capsys.readouterr().out.startswith(printed[printed.rindex("trial  state") :])
    shown = re.findall(r"^ *\d  done .*$", page, re.MULTILINE)
    assert [line.split()[4:] for line in shown] == [line.split()[4:] for line in printed.splitlines()[2:4]]


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in LINK.findall(index.read_text("utf-8"))}
    missing = [page.name for page in PAGES if page.is_relative_to(index.parent) and page not in {index, *linked}]
    assert missing == []


def test_the_index_or_a_page_of_uat_names_every_method() -> None:
    """A method of the registry has a page of its name, or a name in the index or among UAT's ablations."""
    pages = {page.stem for page in (ROOT / "docs" / "methods").glob("*.md")}
    text = "".join((ROOT / "docs" / page).read_text("utf-8") for page in ("README.md", "methods/uat.md"))
    assert [name for name in METHODS.own if name not in pages and f"`{name}`" not in text] == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# A heading, with `code`\n", encoding="utf-8")
    text = "[1](b.md#a-heading-with-code) [2](b.md#none) [3](c.md) [4](https://example.org)\n"
    (tmp_path / "a.md").write_text(text, encoding="utf-8")
    assert broken_links(tmp_path / "a.md") == ["b.md#none", "c.md"]
