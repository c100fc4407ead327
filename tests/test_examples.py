"""Every file in `examples` runs, at a size that takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import uat

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SMALLER = {"300_000": "1_500"}
"""Numbers of the examples, and what tests run instead."""


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(example: Path, tmp_path: Path) -> None:
    text = example.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    for number, smaller in SMALLER.items():
        text = text.replace(number, smaller)
    (tmp_path / example.name).write_text(text, encoding="utf-8")
    surroundings = {**os.environ, "PYTHONPATH": str(Path(uat.__file__).parents[1]), "UAT_THREADS": "1"}
    command = [sys.executable, example.name]
    done = subprocess.run(
        command, cwd=tmp_path, env=surroundings, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
