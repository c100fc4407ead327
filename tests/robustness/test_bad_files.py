"""Untrusted files: every reader refuses every kind of damage with one sentence that names the file."""

from __future__ import annotations

import io
import os
import stat
import zipfile
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib import format as npy

from uat import archives
from uat.archives import read_arrays, write_arrays
from uat.data.contents import checksum
from uat.data.markets import prepared
from uat.data.movielens.log import Filters, Log
from uat.data.movielens.synthetic import SyntheticConfig, synthetic
from uat.domains.sepsis.cohort import KEY
from uat.domains.sepsis.cohort import load as load_cohort
from uat.executors import Note
from uat.files import FileError, append_rows, write_atomically
from uat.paper.next_item import Sequences
from uat.paper.page import write_page


def refused(call: Callable[[], Any], path: Path) -> str:
    """The error message, checked to be one of our sentences with the file's name."""
    with pytest.raises(FileError) as caught:
        call()
    said = str(caught.value)
    assert "\n" not in said
    assert str(path) in said
    assert len(said) < 600 + len(str(path))
    return said


# ---------------------------------------------------------------- archives of arrays


def market_arrays() -> dict[str, Any]:
    days, tickers = np.arange("2020-01-01", "2020-03-01", dtype="M8[D]"), np.array(["AA", "BB"])
    table = np.random.default_rng(0).uniform(10, 11, (len(days), 2, 5))
    table[:, :, 1], table[:, :, 2] = 12, 9
    return {"us/date": days, "us/ticker": tickers, "us/bars": table}


def log_arrays() -> dict[str, Any]:
    log = synthetic(SyntheticConfig(num_users=12, num_items=300), Filters(min_ratings=1, min_interactions=1))
    return {"checksum": np.array(log.checksum()), **{item.name: getattr(log, item.name) for item in fields(log)}}


def sequence_arrays() -> dict[str, Any]:
    return {"item_N": np.arange(40) % 9, "first_U": np.arange(0, 41, 8)}


def cohort_arrays() -> dict[str, Any]:
    return {KEY: np.random.default_rng(0).standard_normal((200, 47))}


READERS: dict[str, tuple[Callable[[Path], Any], Callable[[], dict[str, Any]]]] = {
    "markets": (prepared.read, market_arrays),
    "names": (prepared.names, market_arrays),
    "log": (Log.load, log_arrays),
    "sequences": (Sequences.load, sequence_arrays),
    "cohort": (lambda path: load_cohort(str(path)), cohort_arrays),
}


def packed(arrays: dict[str, Any]) -> bytes:
    content = io.BytesIO()
    archives.write_into(content, arrays)
    return content.getvalue()


def of_members(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """An archive with exactly these members, valid or not."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", method) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return content.getvalue()


def array_bytes(header: bytes, data: bytes = b"") -> bytes:
    """A member with a false header."""
    return npy.MAGIC_PREFIX + b"\x01\x00" + len(header).to_bytes(2, "little") + header + data


def with_first(change: Callable[[np.ndarray], Any]) -> Callable[[dict[str, Any]], bytes]:
    """The archive with its last array changed."""
    return lambda arrays: packed({**arrays, list(arrays)[-1]: change(list(arrays.values())[-1])})


def all_encrypted(content: bytes) -> bytes:
    """The archive with the encryption flag set in every entry of its directory."""
    at = content.find(b"PK\x01\x02")
    return content[: at + 8] + b"\x01" + content[at + 9 :]


def damaged_inside(content: bytes) -> bytes:
    """The archive with invalid compressed bytes."""
    at = content.find(b"PK\x03\x04", 4) - 40
    return content[:at] + bytes(255 - x for x in content[at : at + 30]) + content[at + 30 :]


def named(*names: str) -> Callable[[dict[str, Any]], bytes]:
    def made(arrays: dict[str, Any]) -> bytes:
        content = io.BytesIO()
        npy.write_array(content, np.zeros(3))
        return of_members(dict.fromkeys(names, content.getvalue()))

    return made


def lying(header: str, data: bytes = b"") -> Callable[[dict[str, Any]], bytes]:
    return lambda arrays: of_members({f"{name}.npy": array_bytes(header.encode(), data) for name in arrays})


BOMB = 2**31
DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], bytes], str]] = {
    "empty": (lambda arrays: b"", "not a zip file"),
    "text": (lambda arrays: b"date,ticker\n" * 50, "not a zip file"),
    "an array": (lambda arrays: array_bytes(b"{}"), "a single array, not an archive"),
    "half": (lambda arrays: packed(arrays)[: len(packed(arrays)) // 2], "not a zip file"),
    "without its last byte": (lambda arrays: packed(arrays)[:-1], "cannot be read"),
    "without its first half": (lambda arrays: packed(arrays)[len(packed(arrays)) // 2 :], "cannot be read"),
    "damaged inside": (lambda arrays: damaged_inside(packed(arrays)), "cannot be read"),
    "encrypted": (lambda arrays: all_encrypted(packed(arrays)), "encrypted"),
    "no members": (lambda arrays: of_members({}), ""),
    "compressed otherwise": (lambda arrays: of_members({"x.npy": b"x" * 99}, zipfile.ZIP_LZMA), "does not use"),
    "no array": (lambda arrays: of_members({"x.npy": b"nothing"}), "cannot be read"),
    "a cut header": (lambda arrays: of_members({"x.npy": npy.MAGIC_PREFIX + b"\x01\x00\xff\xff{"}), "cannot be read"),
    "another suffix": (lambda arrays: of_members({"x.txt": b"x"}), "is not the name of an array"),
    "a way out": (named("../../x.npy"), "is not the name of an array"),
    "an absolute name": (named("/x.npy"), "is not the name of an array"),
    "a line in a name": (named("x\ny.npy"), "is not the name of an array"),
    "objects": (lying("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", b"cos\nsystem\n"), "unsupported type"),
    "records": (
        lying("{'descr': [('a', '<f8')], 'fortran_order': False, 'shape': (1,)}", b"8" * 8),
        "unsupported type",
    ),
    "complex": (lying("{'descr': '<c16', 'fortran_order': False, 'shape': (1,)}", b"8" * 16), "unsupported type"),
    "too few bytes": (lying("{'descr': '<f8', 'fortran_order': False, 'shape': (10**9,)}"), "cannot be read"),
    "far too few": (lying("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000, 47)}"), "but has 0 bytes"),
    "more bytes": (lying("{'descr': '<f8', 'fortran_order': False, 'shape': (1,)}", b"8" * 16), "but has 16 bytes"),
    "less than nothing": (lying("{'descr': '<f8', 'fortran_order': False, 'shape': (-1, -1)}", b"8" * 8), "the shape"),
    "text of no letters": (lying("{'descr': '<U0', 'fortran_order': False, 'shape': (9999999999999,)}"), "0 bytes"),
    "no letters": (lying("{'descr': '<U1', 'fortran_order': False, 'shape': (1,)}", b"\xff" * 4), "invalid Unicode"),
    "nested brackets": (lying("[" * 9000), "cannot be read"),
    "no dictionary": (lying("7"), "cannot be read"),
    "unhashable": (lying("{[]: 1}"), "cannot be read"),
    "a format to come": (
        lambda arrays: of_members({"x.npy": npy.MAGIC_PREFIX + b"\x09\x00" + b"x" * 9}),
        "cannot be read",
    ),
    "others": (lambda arrays: packed({"x": np.zeros(3)}), ""),
    "text for numbers": (with_first(lambda x: np.full(x.shape, "x")), ""),
    "another shape": (with_first(lambda x: x[None]), ""),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_sound_archive_is_read(reader: str, tmp_path: Path) -> None:
    read, arrays = READERS[reader]
    write_arrays(tmp_path / "x.npz", arrays())
    assert read(tmp_path / "x.npz") is not None


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("reader", READERS)
def test_a_damaged_archive_gets_one_sentence(reader: str, damage: str, tmp_path: Path) -> None:
    if (reader, damage) in {("names", "text for numbers"), ("names", "another shape")}:
        pytest.skip("only names are asked for")
    read, arrays = READERS[reader]
    make, said = DAMAGES[damage]
    path = tmp_path / "x.npz"
    path.write_bytes(make(arrays()))
    assert said in refused(lambda: read(path), path)
    assert checksum(path) is not None


@pytest.mark.parametrize("reader", READERS)
def test_a_folder_or_nothing_is_no_archive(reader: str, tmp_path: Path) -> None:
    read, _ = READERS[reader]
    (tmp_path / "folder.npz").mkdir()
    assert "is not a file" in refused(lambda: read(tmp_path / "folder.npz"), tmp_path / "folder.npz")
    assert "does not exist" in refused(lambda: read(tmp_path / "none.npz"), tmp_path / "none.npz")


@pytest.mark.parametrize("reader", READERS)
def test_flipped_bits_are_refused_or_harmless(reader: str, tmp_path: Path) -> None:
    read, arrays = READERS[reader]
    whole, path, random = packed(arrays()), tmp_path / "x.npz", np.random.default_rng(0)
    said: list[str] = []
    for _ in range(60):
        content = bytearray(whole)
        for at in random.integers(len(content), size=random.integers(1, 4)):
            content[at] ^= 1 << int(random.integers(8))
        path.write_bytes(content)
        try:
            read(path)
        except ValueError as error:
            said.append(str(error))
    assert len(said) > 20
    assert all(str(path) in one and "\n" not in one for one in said)


@pytest.mark.parametrize("reader", READERS)
def test_a_bomb_is_refused_before_it_is_unpacked(reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 GiB in a file of 2 MiB are refused from its directory, without decompressing anything."""
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", bytes(2**21))
        [info] = file.infolist()
        info.compress_type, info.file_size = zipfile.ZIP_DEFLATED, BOMB
    monkeypatch.setattr(zipfile.ZipExtFile, "read", lambda *_: pytest.fail("something was inflated"))
    said = refused(lambda: READERS[reader][0](path), path)
    assert "would become 2,147,483," in said


def test_two_arrays_of_one_name_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as file:
        file.writestr("x.npy", b"")
        with pytest.warns(UserWarning, match="Duplicate name"):
            file.writestr("x.npy", b"")
    assert "have the name of another" in refused(lambda: read_arrays(tmp_path / "x.npz"), tmp_path / "x.npz")


def test_arrays_come_back_as_they_were(tmp_path: Path) -> None:
    arrays = {
        "a/b": np.arange(6.0).reshape(2, 3).T,
        "text": np.array([["ü", "xyz"]]),
        "day": np.array(["2020-01-01", "NaT"], dtype="M8[D]"),
        "none": np.zeros((0, 3), np.int8),
        "one": np.array(True),
    }
    for small in (True, False):
        write_arrays(tmp_path / "x.npz", arrays, small=small)
        found = read_arrays(tmp_path / "x.npz")
        assert list(found) == list(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[name], array)
            assert found[name].dtype == array.dtype
    numpys = io.BytesIO()
    np.savez(numpys, **arrays)
    assert numpys.getvalue() == (tmp_path / "x.npz").read_bytes()


LIES: dict[str, Callable[[Log], Log]] = {
    "lengths": lambda log: replace(log, time_N=log.time_N[1:]),
    "first_U": lambda log: replace(log, first_U=log.first_U[::-1].copy()),
    "an item too many": lambda log: replace(log, item_N=log.item_N + 1),
    "a group too many": lambda log: replace(log, group_I=log.group_I - 1),
    "no rating": lambda log: replace(log, rating_N=np.full_like(log.rating_N, np.nan)),
    "users": lambda log: replace(log, user_names=log.user_names[:0]),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_log_that_contradicts_itself_is_refused_though_its_checksum_is_right(lie: str, tmp_path: Path) -> None:
    arrays = log_arrays()
    del arrays["checksum"]
    LIES[lie](Log(**arrays)).save(tmp_path / "x.npz")
    assert "is not a log of ratings" in refused(lambda: Log.load(tmp_path / "x.npz"), tmp_path / "x.npz")


@pytest.mark.parametrize("first", [[0, 8], [1, 8, 16, 24, 32, 40], [0, 24, 8, 40], []])
def test_sequences_that_contradict_themselves_are_refused(first: list[int], tmp_path: Path) -> None:
    write_arrays(tmp_path / "x.npz", {"item_N": np.arange(40), "first_U": np.array(first, np.int64)})
    assert "does not divide" in refused(lambda: Sequences.load(tmp_path / "x.npz"), tmp_path / "x.npz")


# ---------------------------------------------------------------- market files and ratings

BARS = "date,ticker,open,high,low,close,volume\n"
BAR = "2020-01-01,AA,10,12,9,11,100\n"
CSV: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "blank lines": (b"\n\n\n", "is empty"),
    "header alone": (BARS.encode(), "not one complete bar"),
    "more fields": (f"{BARS}{BAR}{BAR.strip()},7,8\n".encode(), "line 3 has 9 fields, the first line 7"),
    "fewer fields": (f"{BARS}{BAR}2020-01-02\n".encode(), "row 2, column ticker is empty"),
    "Latin-1": (f"{BARS}2020-01-01,".encode() + b"\xe4\xff,1,1,1,1,1\n", "cannot be read: invalid utf-8"),
    "UTF-16": (f"{BARS}{BAR}".encode("utf-16"), "column date is not there"),
    "an open quote": (f'{BARS}{BAR}"2020-01-02,AA,1\n'.encode(), "cannot be read"),
    "letters": (f"{BARS}{BAR}2020-01-02,AA,ten,12,9,11,100\n".encode(), "row 2, column open: 'ten' is not a number"),
    "no date": (f"{BARS}{BAR}yesterday,AA,10,12,9,11,100\n".encode(), "row 2, column date: 'yesterday' is not a date"),
    "infinite": (f"{BARS}2020-01-01,AA,10,inf,9,11,100\n".encode(), "column high: inf is not a positive price"),
    "NaN alone": (f"{BARS}2020-01-01,AA,10,nan,9,11,100\n".encode(), "not one complete bar"),
    "zeros": (bytes(3000), "column date is not there"),
}


@pytest.mark.parametrize("damage", CSV)
def test_a_bad_csv_of_bars_gets_one_sentence(damage: str, tmp_path: Path) -> None:
    pytest.importorskip("polars")
    from uat.data.markets.files import read

    content, said = CSV[damage]
    path = tmp_path / "us.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"us\.csv") as caught:
        read(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_damaged_parquet_file_gets_one_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pl = pytest.importorskip("polars")
    from uat.data.markets.files import read

    path, random = tmp_path / "us.parquet", np.random.default_rng(0)
    frame = pl.DataFrame({"date": ["2020-01-01"] * 200, **{n: [1.0] * 200 for n in ("open", "high", "low", "close")}})
    frame.write_parquet(path)
    whole = path.read_bytes()
    for size in (0, 3, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert "cannot be read" in refused(lambda: read(path), path)
    for _ in range(60):
        content = bytearray(whole)
        for at in random.integers(len(content), size=4):
            content[at] ^= 1 << int(random.integers(8))
        path.write_bytes(content)
        refused(lambda: read(path), path)  # in any case it lacks two columns
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ["List(Float64)", "Struct", "Binary"])
def test_columns_of_odd_types_get_one_sentence(kind: str, tmp_path: Path) -> None:
    pl = pytest.importorskip("polars")
    from uat.data.markets.files import read

    odd = {"List(Float64)": [[1.0, 2.0]], "Struct": [{"a": 1}], "Binary": [b"\xff\xfe"]}[kind]
    usual: dict[str, Any] = {"date": ["2020-01-01"], "ticker": ["AA"], "volume": [1.0]}
    usual |= {name: [1.0] for name in ("open", "high", "low", "close")}
    for name in usual:
        pl.DataFrame({**usual, name: odd}).write_parquet(tmp_path / "us.parquet")
        refused(lambda: read(tmp_path / "us.parquet"), tmp_path / "us.parquet")


RATINGS: dict[str, tuple[str, bytes, str, bytes, str]] = {
    "empty csv": ("ratings.csv", b"", "movies.csv", b"movieId,title,genres\n", "ratings.csv is empty"),
    "empty items": ("ratings.csv", b"userId,movieId,rating,timestamp\n1,1,3,1\n", "movies.csv", b"", "is empty"),
    "more fields": (
        "ratings.csv",
        b"userId,movieId,rating,timestamp\n1,1,3,1\n1,2,3,1,9\n",
        "movies.csv",
        b"movieId,title,genres\n",
        "line 3 has 5 fields, the first line 4",
    ),
    "empty dat": ("ratings.dat", b"", "movies.dat", b"", "ratings.dat is empty"),
    "a line of text": ("ratings.dat", b"hello\n", "movies.dat", b"", "ratings.dat"),
    "empty tabs": ("u.data", b"", "u.item", b"", "u.data is empty"),
    "few flags": ("u.data", b"1\t1\t3\t1\n", "u.item", b"1|Toy Story|1\n", "u.item, line 1 has fewer than 19"),
    "empty atomic": ("x.inter", b"", "x.item", b"", "x.inter is empty"),
    "no item header": (
        "x.inter",
        b"user_id:token\titem_id:token\trating:float\ttimestamp:float\n1\t1\t3\t1\n",
        "x.item",
        b"",
        "has no column item_id",
    ),
    "bytes": ("ratings.csv", bytes(range(256)) * 9, "movies.csv", bytes(range(256)), "has no column"),
}


@pytest.mark.parametrize("damage", RATINGS)
def test_bad_ratings_get_one_sentence(damage: str, tmp_path: Path) -> None:
    pytest.importorskip("polars")
    from uat.data.movielens.sources import read

    ratings, content, items, tags, said = RATINGS[damage]
    (tmp_path / ratings).write_bytes(content)
    (tmp_path / items).write_bytes(tags)
    assert said in refused(lambda: read(tmp_path), tmp_path)


# ---------------------------------------------------------------- writing


def write_bars(path: Path) -> None:
    pytest.importorskip("polars")
    from uat.data.markets.bars import Bars
    from uat.data.markets.files import write

    one: dict[str, Any] = {name: np.ones(1) for name in ("open", "high", "low", "close", "volume")}
    write(Bars(date=np.zeros(1, "M8[D]"), ticker=np.array(["A"]), **one), path)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "bytes": lambda path: write_atomically(path, b"x"),
    "arrays": lambda path: write_arrays(path, {"x": np.zeros(3)}),
    "page": lambda path: write_page({"a": 1}, path),
    "note": lambda path: Note(path, "job"),
    "bars": write_bars,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_writing_keeps_the_mode_and_follows_no_symbolic_link(writer: str, tmp_path: Path) -> None:
    """Symbolic links in place of the file, or of temporary names that writers used, are not followed."""
    victim, file = tmp_path / "victim", tmp_path / "x.json"
    victim.write_text("precious")
    file.write_text("old")
    file.chmod(0o600)
    for name in (f".x.json.{os.getpid()}.part", f".x.json.{os.getpid()}", "x.partial", "x.json.part"):
        (tmp_path / name).symlink_to(victim)
    WRITERS[writer](file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_bytes() != b"old"
    file.unlink()
    file.symlink_to(victim)
    WRITERS[writer](file)
    assert not file.is_symlink()
    assert victim.read_text() == "precious"


def test_nothing_is_appended_through_a_symbolic_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "x.jsonl").symlink_to(victim)
    with pytest.raises(OSError, match=r"x\.jsonl"):
        append_rows(tmp_path / "x.jsonl", [{"a": 1}])
    assert victim.read_text() == "precious"


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_text("old")
    with pytest.raises(ValueError, match="allow_pickle"):
        write_arrays(tmp_path / "x.npz", {"x": np.zeros(3), "y": np.array([object()])})
    assert [file.name for file in tmp_path.iterdir()] == ["x.npz"]
    assert (tmp_path / "x.npz").read_text() == "old"
