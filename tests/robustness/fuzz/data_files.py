"""Fuzz loaders of users' data: truncated, inconsistent and odd archives, CSV files and ratings."""

from __future__ import annotations

import io
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from tests.robustness.fuzz.hostile import WORDS, damaged_bytes
from tests.robustness.fuzz.verdict import Input, ask, ask_command
from uat.archives import write_arrays
from uat.data.contents import checksum
from uat.data.markets import prepared
from uat.data.markets.files import read as read_bars
from uat.data.movielens.log import Filters, Log
from uat.data.movielens.sources import load as load_ratings
from uat.data.movielens.synthetic import SyntheticConfig, synthetic
from uat.domains.markets import Markets, MarketsConfig
from uat.domains.movielens import MovieLens, MovieLensConfig
from uat.domains.sepsis.cohort import KEY
from uat.domains.sepsis.cohort import load as load_cohort
from uat.paper.next_item import Sequences

HEADERS = (
    *("{'descr': '<f8', 'fortran_order': False, 'shape': (10**9,)}", "{'descr': '|O', 'shape': (1,)}", "[" * 5000),
    *(
        "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000, 47)}",
        "7",
        "{'descr': '<U99999999', 'shape': ()}",
    ),
    *("{'descr': '<f8', 'fortran_order': False, 'shape': (-1, -1)}", "{'descr': '<U0', 'shape': (9999999999,)}"),
    *("{'descr': '<c16', 'fortran_order': True, 'shape': (2,)}", "{'descr': '<f8', 'shape': 'x'}", ""),
)
"""Claims in the header of an array."""


class DataFiles:
    name, share = "data files", 0.25

    def prepare(self, folder: Path) -> None:
        self.folder, random = folder, np.random.default_rng(0)
        days = np.arange("2020-01-01", "2020-06-01", dtype="M8[D]")
        bars = random.uniform(10, 11, (len(days), 2, 5))
        bars[:, :, 1], bars[:, :, 2] = 12, 9
        self.arrays: dict[str, dict[str, Any]] = {
            "markets": {"us/date": days, "us/ticker": np.array(["AA", "BB"]), "us/bars": bars},
            "sequences": {"item_N": np.arange(40) % 9, "first_U": np.arange(0, 41, 8)},
            "cohort": {KEY: random.standard_normal((200, 47))},
        }
        log = synthetic(SyntheticConfig(num_users=12, num_items=300), Filters(min_ratings=1, min_interactions=1))
        named = {item.name: getattr(log, item.name) for item in fields(log)}
        self.arrays["log"] = {"checksum": np.array(log.checksum()), **named}
        for name, arrays in self.arrays.items():
            write_arrays(folder / f"{name}.npz", arrays)
        lines = [f"{day},{t},10,12,9,{11 - i / 99},100" for i, day in enumerate(days[:40]) for t in ("AA", "BB")]
        (folder / "us.csv").write_text("\n".join(["date,ticker,open,high,low,close,volume", *lines]) + "\n")
        self._ratings(folder / "ml", random)

    def _ratings(self, folder: Path, random: np.random.Generator) -> None:
        """A folder of the newest format, of 30 users and 40 items."""
        folder.mkdir()
        ratings = [f"{u},{i},{1 + random.integers(5)},{1_000_000 + 60 * i}" for u in range(30) for i in range(40)]
        (folder / "ratings.csv").write_text("\n".join(["userId,movieId,rating,timestamp", *ratings]) + "\n")
        kinds = ("Action", "Comedy", "Drama", "Thriller", "Action|Crime")
        movies = [f"{i},Title {i},{kinds[i % 5]}" for i in range(40)]
        (folder / "movies.csv").write_text("\n".join(["movieId,title,genres", *movies]) + "\n")

    def draw(self, random: Random, folder: Path) -> Input:
        kind = random.choice(["archive", "archive", "bars", "ratings"])
        if kind == "archive":
            name = random.choice(list(self.arrays))
            path = folder / f"{name}.npz"
            path.write_bytes(damaged_archive(self.arrays[name], (self.folder / path.name).read_bytes(), random))
            ask_for = random.choice(ARCHIVES[name])
        elif kind == "bars":
            name, path = "bars", folder / "us.csv"
            path.write_bytes(damaged_table((self.folder / path.name).read_bytes(), random))
            ask_for = random.choice(BARS)
        else:
            name, path = "ratings", folder / "ml"
            shutil.copytree(self.folder / "ml", path)
            file = path / random.choice(["ratings.csv", "movies.csv"])
            file.write_bytes(damaged_table(file.read_bytes(), random))
            ask_for = random.choice(RATINGS)
        return Input(f"a damaged file of {name}", lambda: ask_for(path))


# ---------------------------------------------------------------- damage


def damaged_archive(arrays: dict[str, Any], content: bytes, random: Random) -> bytes:
    how = random.random()
    if how < 0.3:
        return damaged_bytes(content, random)
    if how < 0.55:
        return lying_archive(content, random)
    changed = dict(arrays)
    name = random.choice(list(changed))
    changed[name] = odd_array(changed[name], random)
    if how > 0.95:
        changed[random.choice(["x", "../../x", "us/x", "cn/bars", "a\nb"])] = changed.pop(name)
    out = io.BytesIO()
    np.savez(out, **changed)
    return out.getvalue()


def odd_array(x: Any, random: Random) -> Any:
    """Another type, shape or value."""
    changes: tuple[Callable[[Any], Any], ...] = (
        *(lambda x: x[None], lambda x: x.reshape(-1)[:1], lambda x: x[:0], lambda x: x[:-1], lambda x: x[::-1]),
        *(lambda x: x.astype(str), lambda x: np.zeros_like(x), lambda x: np.repeat(x, 2, axis=0)),
        *(lambda x: np.full(x.shape, np.nan), lambda x: np.full(x.shape, 1e300), lambda x: np.full(x.shape, -1)),
        *(lambda x: np.full(x.shape, 2**63 - 1), lambda x: np.full(x.shape, "x"), lambda x: np.array(7)),
        *(lambda x: np.full(x.shape, np.datetime64("NaT")), lambda x: np.zeros((0, 0, 0)), lambda x: np.zeros(5, bool)),
    )
    if random.random() < 0.4 and x.size and x.dtype.kind in "fi":
        changed = x.astype("f8" if x.dtype.kind == "f" else "i8")
        changed.reshape(-1)[random.randrange(x.size)] = random.choice(
            [np.nan, np.inf, -1.0, 0.0, 1e30, 1e300] if x.dtype.kind == "f" else [-1, 0, 99, 2**31, 2**62]
        )
        return changed
    return random.choice(changes)(x if x.ndim else x[None])


def lying_archive(content: bytes, random: Random) -> bytes:
    """An array with a false header, an extra member, or a member with a far too large declared size."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        chosen = random.choice(old.namelist())
        for name in old.namelist():
            data = old.read(name)
            if name == chosen:
                header = random.choice(HEADERS).encode()
                data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data[128:]
            new.writestr(name, data)
        if random.random() < 0.3:
            new.writestr(random.choice(["../../out.npy", "/out.npy", "x.txt", "bomb.npy"]), bytes(10**7))
        if random.random() < 0.2:
            new.infolist()[-1].file_size = 2**40
    return out.getvalue()


CELLS = (
    *(word for word in WORDS if len(word) < 400),
    "2020-13-01",
    "0000-00-00",
    "1e308",
    '"',
    "'",
    "9999-12-31",
    "::",
    "\t",
)


def damaged_table(content: bytes, random: Random) -> bytes:
    """Text with one odd field, row or column, or with arbitrary odd bytes."""
    if random.random() < 0.25:
        return damaged_bytes(content, random)
    rows = [line.split(",") for line in content.decode().splitlines()]
    for _ in range(random.choice([1, 1, 3, 40])):
        row = rows[random.choice([0, -1, random.randrange(len(rows))])]
        how, at = random.randrange(8), random.randrange(max(1, len(row)))
        if how <= 3 and row:
            row[at] = random.choice(CELLS)
        elif how == 4 and row:
            del row[at]
        elif how == 5:
            row.insert(at, random.choice(CELLS))
        elif how == 6:
            rows.insert(random.randrange(len(rows)), [] if random.random() < 0.5 else list(row))
        elif len(rows) > 2:
            del rows[random.randrange(1, len(rows)) :]
    end = random.choice(["\n", "\n", "\r\n", "\r"])
    return end.join(",".join(row) for row in rows).encode("utf-8", "surrogateescape")


# ---------------------------------------------------------------- loaders


def python(call: Callable[[Path], Any]) -> Callable[[Path], Any]:
    return lambda path: ask(lambda: call(path), (str(path),))


def market(path: Path) -> Any:
    domain = Markets(MarketsConfig(data=str(path), horizon=5))
    return domain.simulator("train", "cpu")


def movies(path: Path) -> Any:
    return MovieLens(MovieLensConfig(path=str(path), horizon=5, negatives=5)).simulator("train", "cpu")


def command(*argv: str) -> Callable[[Path], Any]:
    return lambda path: ask_command([str(path) if word == "PATH" else word for word in argv])


ARCHIVES: dict[str, list[Callable[[Path], Any]]] = {
    "markets": [
        *map(python, (prepared.read, prepared.names, market, checksum)),
        command("data", "check", "markets", "PATH"),
    ],
    "log": [*map(python, (Log.load, movies, checksum)), command("data", "check", "movielens", "PATH")],
    "sequences": [python(Sequences.load)],
    "cohort": [python(lambda path: load_cohort(str(path)))],
}
BARS = [
    *map(python, (read_bars, market)),
    command("data", "check", "markets", "PATH", "--json"),
    command("data", "prepare", "markets", "PATH", "--out", "made.npz"),
]
RATINGS = [
    *map(python, (load_ratings, movies)),
    command("data", "check", "movielens", "PATH"),
    command("data", "prepare", "movielens", "PATH", "--out", "made.npz"),
]
