"""MovieLens: every published format gives the same log, and bad input gives a clear error."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from uat.cli import main
from uat.data import archives
from uat.data.movielens import Filters, Log, check, group_of, load, pack
from uat.data.movielens.fetching import SOURCES
from uat.data.movielens.log import Ratings
from uat.data.movielens.sources import FLAGS, read
from uat.files import FileError

pytest.importorskip("polars")

FEW = Filters(min_ratings=2, min_interactions=2)

ROWS = [  # user, item, rating, time; users and times out of order, two ties in time
    (10, 20, 4.0, 300),
    (2, 30, 5.0, 100),
    (2, 4, 3.0, 100),
    (2, 20, 1.0, 50),
    (10, 4, 2.0, 300),
    (7, 4, 5.0, 10),
    (7, 99, 5.0, 11),
    (10, 30, 3.0, 400),
]
TAGS = {4: ["Drama"], 20: ["Children's", "Comedy"], 30: ["Action", "Thriller"], 99: []}


def as_csv(folder: Path, rows: list = ROWS) -> None:
    lines = ["userId,movieId,rating,timestamp", *(",".join(map(str, row)) for row in rows)]
    (folder / "ratings.csv").write_text("\n".join(lines) + "\n")
    movies = [f'{item},"A title, with a comma",{"|".join(tags) or "(no genres listed)"}' for item, tags in TAGS.items()]
    (folder / "movies.csv").write_text("\n".join(["movieId,title,genres", *movies]) + "\n")


def as_dat(folder: Path, rows: list = ROWS) -> None:
    (folder / "ratings.dat").write_text("".join("::".join(map(str, row)) + "\n" for row in rows))
    movies = "".join(f"{item}::Title: the café::{'|'.join(tags)}\n" for item, tags in TAGS.items())
    (folder / "movies.dat").write_bytes(movies.encode("latin-1"))


def as_100k(folder: Path, rows: list = ROWS) -> None:
    (folder / "u.data").write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    flags = {item: "|".join(str(int(f in (tags or ["unknown"]))) for f in FLAGS) for item, tags in TAGS.items()}
    movies = "".join(f"{item}|Caf\xe9 (1995)|01-Jan-1995||http://x|{flags[item]}\n" for item in TAGS)
    (folder / "u.item").write_bytes(movies.encode("latin-1"))


def as_atomic(folder: Path, rows: list = ROWS) -> None:
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float", *("\t".join(map(str, r)) for r in rows)]
    (folder / "ml.inter").write_text("\n".join(lines) + "\n")
    movies = [f"{item}\tA title\t{' '.join(tags)}" for item, tags in TAGS.items()]
    (folder / "ml.item").write_text("\n".join(["item_id:token\tmovie_title:token\tgenre:token_seq", *movies]) + "\n")


WRITERS = [as_csv, as_dat, as_100k, as_atomic]
every_format = pytest.mark.parametrize("write", WRITERS)


@every_format
def test_every_format_gives_the_same_log(write: Callable, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    write(one)
    as_csv(other)
    log = load(one, FEW)
    assert log.user_names.tolist() == ["2", "10"]  # in order of size; user 7 has one interaction left
    assert log.item_names.tolist() == ["4", "20", "30"]  # item 99 has one rating
    assert log.first_U.tolist() == [0, 3, 6]
    assert log.item_N.tolist() == [1, 0, 2, 0, 1, 2]  # by time, ties by item
    assert log.rating_N.tolist() == [1, 3, 5, 2, 4, 3]
    assert log.time_N.tolist() == [50, 100, 100, 300, 300, 400]
    assert log.group_I.tolist() == [2, 1, 3]
    assert log.checksum() == load(other, FEW).checksum()


@every_format
def test_the_order_of_rows_is_of_no_account(write: Callable, tmp_path: Path) -> None:
    write(tmp_path)
    before = load(tmp_path, FEW).checksum()
    write(tmp_path, ROWS[::-1])
    assert load(tmp_path, FEW).checksum() == before


def test_text_ids_are_ordered_as_text(tmp_path: Path) -> None:
    as_atomic(tmp_path)
    for file in tmp_path.iterdir():
        lines = file.read_text().splitlines()
        put = (lambda x: f"u{x}") if file.suffix == ".inter" else str
        file.write_text("\n".join([lines[0], *(put(line) for line in lines[1:])]) + "\n")
    log = load(tmp_path, FEW)
    assert log.user_names.tolist() == ["u10", "u2"]
    assert log.item_N[log.rows_of("u2")].tolist() == [1, 0, 2]


def test_items_are_filtered_before_users() -> None:
    """The second user has two interactions, but one of them is with an item that goes."""
    ratings = ratings_of(user=[0, 0, 1, 1], item=[0, 1, 0, 2])
    log = Log.of(ratings, Filters(min_ratings=2, min_interactions=1))
    assert log.item_names.tolist() == ["0"]
    assert log.first_U.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="nothing is left of 4 ratings: no user has 2 interactions"):
        Log.of(ratings, FEW)


def test_of_repeated_ratings_the_newest_counts(tmp_path: Path) -> None:
    as_csv(tmp_path, [*ROWS, (2, 20, 4.5, 60), (10, 20, 4.0, 300)])
    assert check(tmp_path, FEW).repeated == 2
    log = load(tmp_path, FEW)
    assert log.rating_N.tolist() == [4.5, 3, 5, 2, 4, 3]


def test_groups() -> None:
    assert group_of(["Action", "Sci-Fi", "Thriller"]) == 0
    assert group_of(["Animation", "Children's", "Comedy"]) == 1
    assert group_of(["Action", "Drama"]) == 2  # ties go to the last
    assert group_of(["Drama", "Film-Noir"]) == 3
    assert group_of([]) == group_of(["(no genres listed)"]) == group_of(["unknown"]) == 2
    with pytest.raises(ValueError, match="unknown genre 'Anime'"):
        group_of(["Anime"])


def test_missing_genres_are_counted(tmp_path: Path) -> None:
    as_csv(tmp_path)
    (tmp_path / "movies.csv").write_text("movieId,title,genres\n4,A,\n30,B,Action\n")
    assert check(tmp_path, FEW).untagged == 3  # 4 has none, 20 and 99 are not listed
    assert load(tmp_path, FEW).group_I.tolist() == [2, 2, 0]


# ---------------------------------------------------------------- bad input


def ratings_of(user: list[int], item: list[int], rating: float = 3.0) -> Ratings:
    names, count = np.array([str(i) for i in range(9)]), len(user)
    return Ratings(
        user_N=np.array(user),
        item_N=np.array(item),
        rating_N=np.full(count, rating),
        time_N=np.arange(count),
        group_I=np.zeros(9, dtype=np.int8),
        user_names=names,
        item_names=names,
    )


@pytest.mark.parametrize("rating", [7.0, 0.0, -1.0, float("nan")])
def test_ratings_out_of_range_are_refused(rating: float) -> None:
    with pytest.raises(ValueError, match=r"2 ratings are not within \[0.5, 5.0\]; the first is .* of user 4"):
        ratings_of(user=[4, 5], item=[0, 1], rating=rating)


@every_format
@pytest.mark.parametrize(
    ("row", "match"),
    [
        (("", 4, 3.0, 5), "1 rows of .* have no user"),
        ((2, 4, "good", 5), "1 rows of .* have no rating, or one that is not a number"),
        ((2, 4, 3.0, "noon"), "1 rows of .* have no time"),
        ((2, 4, 9.0, 5), "the first is 9.0 of user 2"),
    ],
)
def test_rows_that_do_not_fit_are_refused(write: Callable, row: tuple, match: str, tmp_path: Path) -> None:
    write(tmp_path, [*ROWS, row])
    with pytest.raises(ValueError, match=match):
        read(tmp_path)


def test_unknown_users_are_refused(tmp_path: Path) -> None:
    as_csv(tmp_path)
    with pytest.raises(ValueError, match="unknown user '7'; 2 users remain"):
        load(tmp_path, FEW).rows_of("7")


def test_paths_without_movielens_are_refused(tmp_path: Path) -> None:
    archive = tmp_path / "ml-1m.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("ml-1m/ratings.dat", "")
    with pytest.raises(ValueError, match="is a zip archive; unpack it and name the folder"):
        check(archive)
    with pytest.raises(ValueError, match="is not a folder"):
        check(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no MovieLens ratings; looked for ratings.csv"):
        check(tmp_path)
    (tmp_path / "ratings.csv").write_text("user,movieId,rating,timestamp\n")
    with pytest.raises(ValueError, match=r"must hold one file movies.csv, has none"):
        check(tmp_path)
    (tmp_path / "movies.csv").write_text("movieId,title,genres\n")
    with pytest.raises(ValueError, match="has no column userId"):
        check(tmp_path)
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n")
    with pytest.raises(ValueError, match=r"holds no ratings"):
        check(tmp_path)


# ---------------------------------------------------------------- the cache


def test_a_cached_log_is_the_same_and_follows_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache = tmp_path / "ml", tmp_path / "cache"
    source.mkdir()
    as_csv(source)
    log = load(source, FEW, cache)
    (saved,) = cache.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr("uat.data.movielens.sources.read", lambda path: pytest.fail("read again"))
        assert load(source, FEW, cache).checksum() == log.checksum()
    saved.write_bytes(saved.read_bytes()[:-200])
    assert load(source, FEW, cache).checksum() == log.checksum()  # a damaged file is rebuilt
    as_csv(source, ROWS[:-2])
    assert load(source, FEW, cache).checksum() != log.checksum()


def test_a_changed_number_in_the_cache_is_noticed(tmp_path: Path) -> None:
    as_csv(tmp_path)
    log = load(tmp_path, FEW)
    log.save(tmp_path / "log.npz")
    assert Log.load(tmp_path / "log.npz").checksum() == log.checksum()
    arrays = dict(np.load(tmp_path / "log.npz"))
    arrays["rating_N"][0] += 1
    np.savez(tmp_path / "log.npz", allow_pickle=False, **arrays)
    with pytest.raises(FileError, match=r"log\.npz is damaged: its arrays do not match the checksum"):
        Log.load(tmp_path / "log.npz")


# ---------------------------------------------------------------- one file to carry


def test_a_packed_file_is_the_log_and_needs_no_polars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_csv(tmp_path)
    packed = tmp_path / "few.npz"
    log = pack(tmp_path, packed, FEW)
    monkeypatch.setitem(sys.modules, "polars", None)
    assert load(packed).checksum() == log.checksum()
    packed.write_bytes(packed.read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"few\.npz cannot be read: .*; `uat data prepare movielens` makes such files"):
        load(packed)


def test_the_command_line_prepares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [(user, item, 3.0, item) for user in range(60) for item in range(110)]
    as_csv(tmp_path, rows)
    main(["data", "prepare", "movielens", str(tmp_path), "--out", str(tmp_path / "x.npz"), "--json"])
    [row] = json.loads(capsys.readouterr().out)
    assert row == {"file": str(tmp_path / "x.npz"), "interactions": 6600, "users": 60, "items": 110}
    for argv in (["movielens", str(tmp_path)], ["markets", "x", "--out", "y"], ["movielens", "x", "--out", "y"]):
        with pytest.raises(SystemExit) as stop:
            main(["data", "prepare", *argv])
        assert stop.value.code == 2


def test_every_archive_is_known_to_the_command_line() -> None:
    assert archives().keys() == SOURCES.keys()
