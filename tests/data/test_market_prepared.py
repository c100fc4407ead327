"""Prepared markets have the days, features and windows of their source files, and are identified by their contents."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from uat.cli import main
from uat.config import override
from uat.data.markets import prepared
from uat.data.markets.bars import COLUMNS, Bars
from uat.data.markets.synthetic import SIZES, generate
from uat.domains.markets import MarketsConfig, MarketsSimulator
from uat.recipes import recipe

DAYS = 240


def bars(name: str) -> Bars:
    """A market with one missing bar, and a stock that is suspended for three days."""
    found = generate(name, replace(SIZES[name], days=DAYS)).bars
    keep, assets = np.ones(len(found), bool), SIZES[name].assets
    keep[[assets * 50 + 2, *(assets * day + 4 for day in (190, 191, 192))]] = False
    return found.take(keep)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prepared") / "panels.npz"
    path.write_bytes(prepared.pack({name: bars(name) for name in ("cn", "us")}))
    return path


def test_bars_come_back_to_the_last_bit(file: Path) -> None:
    assert prepared.names(file) == ("cn", "us")
    found, before = prepared.read(file)["us"], bars("us")
    order = np.lexsort((before.ticker, before.date))
    for name in COLUMNS:
        assert np.array_equal(getattr(found, name), getattr(before, name)[order]), name


@pytest.mark.parametrize("suspensions", ["common", "mask"])
def test_worlds_are_those_of_the_files(file: Path, tmp_path: Path, suspensions: Any) -> None:
    pytest.importorskip("polars")
    from uat.data.markets.files import write

    for name in ("cn", "us"):
        write(bars(name), tmp_path / f"{name}.parquet")
    made = tmp_path / "made.npz"
    main(["data", "prepare", "markets", str(tmp_path), "--out", str(made)])
    assert made.read_bytes() == file.read_bytes()
    worlds = [
        MarketsSimulator(MarketsConfig(data=str(data), suspensions=suspensions, horizon=8), "test", "cpu")
        for data in (tmp_path, made)
    ]
    assert worlds[0].windows.counts == worlds[1].windows.counts
    for name in ("feature_XNF", "relative_XA", "allowed_XA", "target_XA"):
        assert torch.equal(getattr(worlds[0].tables, name), getattr(worlds[1].tables, name)), name


def test_identity_depends_on_the_contents_of_the_file(file: Path, tmp_path: Path) -> None:
    def identity(path: Path) -> str:
        return override(recipe("markets", "uat", "smoke"), {"domain.data": str(path)}).identity()

    moved, other = tmp_path / "elsewhere.npz", tmp_path / "other.npz"
    shutil.copy(file, moved)
    changed = bars("us")
    changed.close[77] *= 1.0001
    other.write_bytes(prepared.pack({"cn": bars("cn"), "us": changed}))
    assert identity(file) == identity(moved) != identity(other)
    assert identity(tmp_path / "gone.npz") != identity(file)


def test_reading_needs_no_further_library(file: Path) -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('polars', 'tyro', 'rich', 'talib')));"
        "from uat.domains.markets import Markets, MarketsConfig;"
        f"d = Markets(MarketsConfig(data={str(file)!r}, horizon=8)); print(d.markets, d.episodes['test'])"
    )
    root = Path(__file__).parents[2] / "src"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("('cn', 'us')")


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": np.zeros(3)}, "was not made by"),
        ({"us/date": np.zeros(1), "us/ticker": np.array(["A"])}, "it lacks us/bars"),
        (
            {"us/date": np.zeros(2, "M8[D]"), "us/ticker": np.array(["A"]), "us/bars": np.zeros((1, 1, 5))},
            r"us/bars' is \(1, 1, 5\) of float64, expected \(2, 1, 5\) of floats",
        ),
    ],
)
def test_other_files_are_refused(arrays: dict[str, Any], said: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(ValueError, match=said):
        prepared.read(tmp_path / "x.npz")


def test_broken_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(b"nothing")
    for name, said in (("x.npz", "cannot be read"), ("y.npz", "does not exist")):
        with pytest.raises(ValueError, match=said):
            prepared.read(tmp_path / name)
    with pytest.raises(ValueError, match=r"must be a \.npz file"):
        prepared.write({}, tmp_path / "x.parquet")
