"""The page on off-policy estimates: its Python runs as one program, and its table says what the rows say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import uat
from benchmarks.off_policy import Row, markdown

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "off-policy.md").read_text(encoding="utf-8")


def test_the_blocks_are_one_program(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    (tmp_path / "page.py").write_text("\n".join(blocks), encoding="utf-8")
    path = {**os.environ, "PYTHONPATH": str(Path(uat.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "page.py"]
    done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "no number" not in done.stdout
    assert "refused" not in done.stdout
    for name in ("log", "wis", "pdwis", "dm", "dr", "snips", "replay", "expected calibration error"):
        assert name in done.stdout


def test_the_table_says_what_the_rows_say() -> None:
    made = json.loads((ROOT / "benchmarks" / "results" / "off-policy.json").read_text(encoding="utf-8"))
    assert markdown([Row(**row) for row in made["rows"]]) in PAGE
    assert made["command"] in PAGE
