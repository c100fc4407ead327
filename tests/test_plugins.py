"""A third-party package, built and installed: its method and its domain go through every command.

The package is the one of docs/plugins.md, and the commands are those of that page.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import uat

PAGE = (Path(__file__).parents[1] / "docs" / "plugins.md").read_text(encoding="utf-8")
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines()]
PROGRAM = next(text for language, text in BLOCKS if language == "python" and text.startswith("import uat"))

RUN = """
import shlex, sys
from uat.cli import main

for line in sys.stdin.read().splitlines():
    print(f"$ {line}", flush=True)
    main(shlex.split(line)[1:])
assert not any(name.startswith("tests") for name in sys.modules)
"""


def files() -> dict[str, str]:
    """The files of the package: blocks that begin with their name."""
    named = [(re.match(r"# (\S+)\n", text), text) for _, text in BLOCKS]
    return {match[1]: text for match, text in named if match is not None}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the package."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name, text in files().items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    command = [*pip, "--no-build-isolation", "--target", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return target


def run_outside(installed: Path, folder: Path, code: str, said: str = "") -> str:
    """Run code in some folder, with both packages installed."""
    path = os.pathsep.join((str(installed), str(Path(uat.__file__).parents[1])))
    surroundings = {**os.environ, "PYTHONPATH": path, "UAT_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=said,
        cwd=folder,
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_holds_a_whole_package() -> None:
    assert set(files()) == {"src/arms/gru.py", "src/arms/bandit.py", "pyproject.toml"}
    lines = [len(re.findall(r"^ +\S", files()[f"src/arms/{name}.py"], re.MULTILINE)) for name in ("gru", "bandit")]
    assert max(lines) < 45  # short enough to be copied


def test_an_installed_package_goes_through_every_command(installed: Path, tmp_path: Path) -> None:
    by_hand = f"{PROGRAM}\nprint('made of', run.config.domain_name, run.config.method_name, action)\n"
    out = run_outside(installed, tmp_path, by_hand + RUN, "\n".join([*COMMANDS, "uat list domains --json"]))
    first, *parts = out.split("$ ")
    assert "not feedback-blind" in first
    assert "made of bandit gru tensor([" in first  # a class at hand is known by the name under which it is offered
    said: dict[str, str] = {}
    for part in parts:
        command, _, text = part.partition("\n")
        said[command] = text
    (gru,) = [line for line in said["uat list methods"].splitlines() if line.startswith("gru ")]
    assert "A recurrent network that sees its last action and reward" in gru
    assert gru.endswith("arms 1.0")
    assert "bandit" in gru  # it serves every domain that it can be built for
    assert '"from": "arms 1.0"' in said["uat list domains --json"]
    scores = said["uat evaluate runs/bandit-gru-smoke-0"]
    assert "bandit/default" in scores
    assert "expert" in scores
    assert "gru" in scores
    assert "not feedback-blind" in said["uat audit runs/bandit-gru-smoke-0"]
    assert "python:arms.bandit:Bandit/default" in said["uat evaluate runs/by-address --trust"]
