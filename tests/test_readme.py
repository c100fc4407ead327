"""The README: what it tells you to type works."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from uat.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
"""Language and text of every block, in order."""


def shell_commands(language: str, text: str) -> list[list[str]]:
    """The commands of a shell block, split as a shell would."""
    lines = text.replace("\\\n", " ").splitlines() if language in ("bash", "sh", "console") else []
    split = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
    return [words for words in split if words]


def commands(program: str) -> list[list[str]]:
    """Every call of a program."""
    return [words for block in BLOCKS for words in shell_commands(*block) if words[0] == program]


def quickened(words: list[str]) -> list[str]:
    """Return the command at smoke size and with few episodes, if it takes long as written."""
    if len(words) > 1 and words[1] in ("train", "demo"):
        wants = "--preset" in words or any(word.startswith("--preset=") for word in words)
        words = words if wants else [*words, "--preset", "smoke"]
    text = re.sub(r"--preset(=|\x00)(quick|paper)", r"--preset\1smoke", "\0".join(words))
    text = re.sub(r"--episodes(=|\x00)\d{3,}", r"--episodes\g<1>16", text)
    return re.sub(r"(runs/[\w-]+)-(quick|paper)-(\d+)", r"\1-smoke-\3", text).split("\0")


def test_there_is_something_to_try() -> None:
    assert [language for language, _ in BLOCKS].count("python") >= 1
    assert len(commands("uat")) >= 1
    assert len(commands("make")) >= 2


def test_no_placeholder_is_left() -> None:
    assert re.findall(r"@@\w+@@|TODO|FIXME|XXX", README) == []


def test_make_targets_exist() -> None:
    for words in commands("make"):
        for target in words[1:]:
            done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"make {target}: {done.stderr}"


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", README)
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_commands_and_then_the_python_run_in_the_order_they_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after another in one folder, as a reader would; committed runs exist there, as in a checkout.

    Blocks of Python share a new process and no name.
    """
    monkeypatch.chdir(tmp_path)
    if (ROOT / "results").exists():
        shutil.copytree(ROOT / "results", tmp_path / "results")
    for language, text in BLOCKS:
        for words in shell_commands(language, text):
            if words[0] == "uat":
                main(quickened(words)[1:])
    blocks = [text for language, text in BLOCKS if language == "python"]
    program = f"for text in {blocks!r}:\n    print(text, flush=True)\n    exec(text, {{'__name__': '__main__'}})"
    command, surroundings = [sys.executable, "-W", "error", "-c", program], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=surroundings)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(
    ("written", "run_as"),
    [
        ("uat demo", "uat demo --preset smoke"),
        ("uat demo --preset quick --out a", "uat demo --preset smoke --out a"),
        ("uat train darkroom --preset=paper", "uat train darkroom --preset=smoke"),
        ("uat evaluate runs/darkroom-uat-quick-0", "uat evaluate runs/darkroom-uat-smoke-0"),
        ("uat evaluate results/paper/darkroom-gradual-uat-0", "uat evaluate results/paper/darkroom-gradual-uat-0"),
        ("uat evaluate results/paper/a --episodes 512 --json", "uat evaluate results/paper/a --episodes 16 --json"),
        ("uat audit runs/a --episodes 64", "uat audit runs/a --episodes 64"),
        ("uat list", "uat list"),
    ],
)
def test_only_what_takes_long_is_made_smaller(written: str, run_as: str) -> None:
    assert quickened(written.split()) == run_as.split()
