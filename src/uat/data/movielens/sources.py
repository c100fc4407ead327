"""Read the published formats of MovieLens with polars into one tidy frame: user, item, rating, time.

25M, 20M, latest   ratings.csv  movies.csv    comma-separated, with a header
10M, 1M            ratings.dat  movies.dat    fields between '::'
100K               u.data       u.item        tabs; '|' and one column per genre
RecBole            *.inter      *.item        tabs, names with types in the header, ids may be text
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from uat.archives import SUFFIX, Array, is_archive
from uat.data.frames import reading
from uat.data.movielens.genres import group_of, is_tag
from uat.data.movielens.log import Filters, Log, Ratings, group_sizes
from uat.files import FileError

REVISION = 1
"""Increase this when the same files start to give a different log; older caches are then ignored."""

Lazy = Any
Frame = Any
"""Lazy frames and frames of polars, which is imported only when needed."""

Tags = dict[str, list[str]]
"""The genre tags of each item, by its name."""

FLAGS = (
    *("unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama"),
    *("Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"),
)
"""The genres of the last 19 columns of u.item."""


@dataclass(frozen=True, slots=True)
class Format:
    """One published format: the names of its files and how to read them."""

    name: str
    ratings: str
    items: str
    scan: Callable[[Path], Lazy]
    tags: Callable[[Path], Tags]
    separator: str
    """Field separator in the file of ratings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Result of `check`."""

    format: str
    ratings: int
    users: int
    items: int
    repeated: int
    """Number of ratings that their user later replaced by another rating of the same item."""
    untagged: int
    """Number of items without a genre."""
    kept_ratings: int
    kept_users: int
    kept_items: int
    group_sizes: tuple[int, ...]
    checksum: str


def load(path: Path | str, filters: Filters | None = None, cache: Path | str | None = None) -> Log:
    """Load the log of a folder, or of a file made by `pack`. A cache folder spares parsing the text a second time.

    A packed file or a cached log can be read without polars.
    """
    filters = filters or Filters()
    if is_archive(path):
        try:
            return Log.load(Path(path))
        except FileError as error:
            raise FileError(f"{error}; `uat data prepare movielens` makes such files") from None
    kind, folder = find_format(Path(path))
    files = [_only(folder, kind.ratings), _only(folder, kind.items)]
    if cache is None:
        return _log(path, read(path), filters)
    about = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    key = json.dumps([REVISION, str(folder.resolve()), about, asdict(filters)], sort_keys=True)
    saved = Path(cache) / f"movielens-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}.npz"
    with contextlib.suppress(FileError):  # missing or damaged
        return Log.load(saved)
    log = _log(path, read(path), filters)
    log.save(saved)
    return log


def _log(path: Path | str, ratings: Ratings, filters: Filters) -> Log:
    """Build the log of a folder's ratings; errors name the folder."""
    try:
        return Log.of(ratings, filters)
    except ValueError as error:
        raise FileError(f"{path}: {error}") from None


def pack(path: Path | str, file: Path | str, filters: Filters | None = None) -> Log:
    """Write the log of a folder as one file of arrays, which can be read without polars; return the log."""
    file = Path(file)
    if not is_archive(file):
        raise ValueError(f"{file} must end in {SUFFIX}")
    log = load(path, filters)
    log.save(file, small=True)
    return log


def check(path: Path | str, filters: Filters | None = None) -> Summary:
    """Read a data set and summarise its contents; raise ValueError if it cannot be used."""
    kind, _ = find_format(Path(path))
    ratings = read(path)
    log = _log(path, ratings, filters or Filters())
    pairs = np.unique(ratings.user_N.astype(np.int64) * len(ratings.item_names) + ratings.item_N)
    return Summary(
        format=kind.name,
        ratings=len(ratings.rating_N),
        users=len(ratings.user_names),
        items=len(ratings.item_names),
        repeated=len(ratings.rating_N) - len(pairs),
        untagged=ratings.untagged,
        kept_ratings=len(log.item_N),
        kept_users=log.num_users,
        kept_items=log.num_items,
        group_sizes=tuple(map(int, group_sizes(log))),
        checksum=log.checksum(),
    )


def read(path: Path | str) -> Ratings:
    """All ratings of a folder, unfiltered."""
    kind, folder = find_format(Path(path))
    try:
        return _read(kind, folder)
    except FileError:
        raise
    except ValueError as error:
        raise FileError(f"{folder}: {error}") from None


def _read(kind: Format, folder: Path) -> Ratings:
    source, items = _only(folder, kind.ratings), _only(folder, kind.items)
    with reading(source, kind.separator):
        frame = _collect(kind.scan(source), source)
    user_N, user_names = _codes(frame["user"])
    item_N, item_names = _codes(frame["item"])
    with reading(items):
        tags = kind.tags(items)
    tags_I = [[tag for tag in tags.get(name, []) if is_tag(tag)] for name in item_names]
    return Ratings(
        user_N=user_N,
        item_N=item_N,
        rating_N=frame["rating"].to_numpy(),
        time_N=frame["time"].to_numpy(),
        user_names=user_names,
        item_names=item_names,
        group_I=np.array([group_of(tags) for tags in tags_I], dtype=np.int8),
        untagged=sum(not tags for tags in tags_I),
    )


def find_format(path: Path) -> tuple[Format, Path]:
    """Return the format of a folder, and the folder: the path itself, or the only folder inside it."""
    if path.is_file():
        kind = "a zip archive; unpack it and name" if zipfile.is_zipfile(path) else "a file; name"
        raise ValueError(f"{path} is {kind} the folder that holds the ratings")
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder")
    inner = [entry for entry in path.iterdir() if entry.is_dir()]
    for folder in (path, *(inner if len(inner) == 1 else [])):
        for kind in FORMATS:
            if any(folder.glob(kind.ratings)):
                return kind, folder
    wanted = ", ".join(f"{kind.ratings} with {kind.items} ({kind.name})" for kind in FORMATS)
    raise ValueError(f"{path} holds no MovieLens ratings; looked for {wanted}")


def _only(folder: Path, pattern: str) -> Path:
    files = sorted(folder.glob(pattern))
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise ValueError(f"{folder} must hold one file {pattern}, has {names}")
    return files[0]


# ---------------------------------------------------------------- ratings


def _scan_csv(file: Path) -> Lazy:
    names = {"userId": "user", "movieId": "item", "rating": "rating", "timestamp": "time"}
    return _named(_scan(file), names, file)


def _scan_dat(file: Path) -> Lazy:
    """Scan fields separated by '::': with ':' as the separator, every second field is empty."""
    names = ["user", "_1", "item", "_2", "rating", "_3", "time"]
    return _scan(file, separator=":", names=names).select("user", "item", "rating", "time")


def _scan_tabs(file: Path) -> Lazy:
    return _scan(file, separator="\t", names=["user", "item", "rating", "time"])


def _scan_atomic(file: Path) -> Lazy:
    names = {"user_id": "user", "item_id": "item", "rating": "rating", "timestamp": "time"}
    frame = _scan(file, separator="\t")
    frame = frame.rename({name: name.split(":")[0] for name in frame.collect_schema().names()})
    return _named(frame, names, file)


def _scan(file: Path, separator: str = ",", names: list[str] | None = None) -> Lazy:
    """Scan every column as text, so that bad values are reported by us and not by the parser."""
    pl = _polars()
    return pl.scan_csv(
        file,
        separator=separator,
        has_header=names is None,
        new_columns=names,
        infer_schema=False,
        quote_char=None,
        encoding="utf8-lossy",
    )


def _named(frame: Lazy, names: dict[str, str], file: Path) -> Lazy:
    missing = names.keys() - frame.collect_schema().names()
    if missing:
        raise FileError(f"{file} has no column {', '.join(sorted(missing))}")
    return frame.select(list(names)).rename(names)


def _collect(frame: Lazy, file: Path) -> Frame:
    """Convert ratings and times to numbers, and ids if all of them are numbers."""
    pl = _polars()
    as_numbers = [
        pl.col("user").cast(pl.Int64, strict=False).cast(pl.Int32, strict=False).alias("user_number"),
        pl.col("item").cast(pl.Int64, strict=False).cast(pl.Int32, strict=False).alias("item_number"),
        pl.col("rating").cast(pl.Float32, strict=False),
        pl.col("time").cast(pl.Float64, strict=False).cast(pl.Int64, strict=False),
    ]
    tidy = frame.select("user", "item", *as_numbers)
    bad = tidy.select(pl.all().null_count(), pl.len().alias("rows")).collect(engine="streaming").row(0, named=True)
    for name in ("user", "item", "rating", "time"):
        if bad[name]:
            raise FileError(f"{bad[name]} rows of {file} have no {name}, or one that is not a number")
    if not bad["rows"]:
        raise FileError(f"{file} holds no ratings")
    ids = [pl.col(name) if bad[f"{name}_number"] else pl.col(f"{name}_number").alias(name) for name in ("user", "item")]
    return tidy.select(*ids, "rating", "time").collect(engine="streaming")


def _codes(ids: Any) -> tuple[Array, Array]:
    """Replace each id by its rank among all ids; return the ranks and the sorted names."""
    names = ids.unique().sort()
    if ids.dtype.is_integer():
        return np.searchsorted(names.to_numpy(), ids.to_numpy()).astype(np.int32), names.to_numpy().astype(str)
    pl = _polars()
    ranks = ids.replace_strict(names, pl.Series(range(len(names)), dtype=pl.Int32))
    return ranks.to_numpy(), np.array(names.to_list(), dtype=str)


# ---------------------------------------------------------------- genres: small files, read eagerly


def _tags_csv(file: Path) -> Tags:
    pl = _polars()
    frame = pl.read_csv(file, infer_schema=False, encoding="utf8-lossy")
    missing = {"movieId", "genres"} - set(frame.columns)
    if missing:
        raise FileError(f"{file} has no column {', '.join(sorted(missing))}")
    names, tags = frame["movieId"].to_list(), frame["genres"].fill_null("").to_list()
    return {name: str(tagged).split("|") for name, tagged in zip(names, tags, strict=True)}


def _tags_dat(file: Path) -> Tags:
    rows = (line.split("::") for line in _lines(file))
    return {row[0]: row[-1].split("|") for row in rows if len(row) > 2}


def _tags_flags(file: Path) -> Tags:
    rows = [line.split("|") for line in _lines(file)]
    if short := next((i for i, row in enumerate(rows, 1) if len(row) <= len(FLAGS)), None):
        raise FileError(f"{file}, line {short} has fewer than {len(FLAGS)} genre flags after the item's number")
    return {row[0]: [t for t, flag in zip(FLAGS, row[-len(FLAGS) :], strict=True) if flag == "1"] for row in rows}


def _tags_atomic(file: Path) -> Tags:
    """Read the genre column, which is called genre, genres or class, depending on the data set."""
    header, *lines = _lines(file) or [""]
    names = [name.split(":")[0] for name in header.split("\t")]
    column = next((names.index(name) for name in ("genre", "genres", "class") if name in names), None)
    if column is None or "item_id" not in names:
        raise FileError(f"{file} has no column item_id, or none of genre, genres, class")
    rows = (line.split("\t") for line in lines)
    return {row[names.index("item_id")]: row[column].split() for row in rows if len(row) == len(names)}


def _lines(file: Path) -> list[str]:
    """Lines that are not empty. 100K and 1M are not UTF-8, but their genres and ids are ASCII."""
    return [line for line in file.read_bytes().decode("utf-8", errors="replace").splitlines() if line]


def _polars() -> Any:
    try:
        import polars
    except ImportError:
        raise ValueError("reading MovieLens needs polars: pip install 'uat-transformer[data]'") from None
    return polars


FORMATS = (
    Format("25M, 20M or latest", "ratings.csv", "movies.csv", _scan_csv, _tags_csv, ","),
    Format("10M or 1M", "ratings.dat", "movies.dat", _scan_dat, _tags_dat, ":"),
    Format("100K", "u.data", "u.item", _scan_tabs, _tags_flags, "\t"),
    Format("RecBole", "*.inter", "*.item", _scan_atomic, _tags_atomic, "\t"),
)
