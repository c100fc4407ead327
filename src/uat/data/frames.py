"""Polars at work on files that anybody may have made: whatever it finds wrong becomes one sentence with the file."""

from __future__ import annotations

import contextlib
import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from uat.data import need
from uat.files import FileError


@contextlib.contextmanager
def reading(path: Path, separator: str = ",") -> Iterator[Any]:
    """The library, for reading this file inside."""
    polars = need("polars", "data", f"reading {path}")
    try:
        yield polars
    except polars.exceptions.NoDataError:
        raise FileError(f"{path} is empty") from None
    except polars.exceptions.PolarsError as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        where = ragged_line(path, separator) if said[0].startswith("found more fields") else None
        raise FileError(f"{path} cannot be read: {where or said[0]:.200}") from None
    except (OSError, MemoryError, OverflowError) as error:
        raise FileError(f"{path} cannot be read: {str(error) or type(error).__name__}") from None
    except polars.exceptions.PanicException as error:  # of damaged files; not an Exception
        raise FileError(f"{path} cannot be read, it is damaged: {str(error).splitlines()[0]:.100}") from None


def ragged_line(path: Path, separator: str) -> str | None:
    """The first line that has more fields than the first one, in words."""
    with contextlib.suppress(OSError, csv.Error, UnicodeDecodeError), path.open(encoding="utf-8", newline="") as file:
        lines = csv.reader(file, delimiter=separator)
        expected = len(next(lines, []))
        for fields in lines:
            if len(fields) > expected:
                return f"line {lines.line_num} has {len(fields)} fields, the first line {expected}"
    return None


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Without standard error inside: polars tells there what its threads met in a damaged parquet file."""
    try:
        before, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    except OSError:  # there is no standard error
        yield
        return
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)
