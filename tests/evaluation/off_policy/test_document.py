"""The page on off-policy estimates: its Python runs as one program, and its table says what the rows say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks.off_policy import Row, markdown

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "off-policy.md").read_text(encoding="utf-8")


def test_the_blocks_are_one_program(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    with torch.random.fork_rng():
        exec("\n".join(blocks), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert "no number" not in printed
    assert "refused" not in printed
    for name in ("log", "wis", "pdwis", "dm", "dr", "snips", "replay", "expected calibration error"):
        assert name in printed


def test_the_table_says_what_the_rows_say() -> None:
    made = json.loads((ROOT / "benchmarks" / "results" / "off-policy.json").read_text(encoding="utf-8"))
    assert markdown([Row(**row) for row in made["rows"]]) in PAGE
    assert made["command"] in PAGE
