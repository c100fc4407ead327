"""Read untrusted files with polars: every error becomes one sentence that names the file."""

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
    """Yield polars; its errors while reading this file become a FileError."""
    polars = need("polars", "data", f"reading {path}")
    try:
        yield polars
    except polars.exceptions.NoDataError:
        raise FileError(f"{path} is empty") from None
    except polars.exceptions.PolarsError as error:
        message = (str(error).strip().splitlines() or [type(error).__name__])[0]
        ragged = ragged_line(path, separator) if message.startswith("found more fields") else None
        raise FileError(f"{path} cannot be read: {ragged or message:.200}") from None
    except (OSError, MemoryError, OverflowError) as error:
        raise FileError(f"{path} cannot be read: {str(error) or type(error).__name__}") from None
    except polars.exceptions.PanicException as error:  # raised for damaged files; not a subclass of Exception
        raise FileError(f"{path} cannot be read, it is damaged: {str(error).splitlines()[0]:.100}") from None


def ragged_line(path: Path, separator: str) -> str | None:
    """Describe the first line that has more fields than line 1; None if there is none."""
    with contextlib.suppress(OSError, csv.Error, UnicodeDecodeError), path.open(encoding="utf-8", newline="") as file:
        lines = csv.reader(file, delimiter=separator)
        expected = len(next(lines, []))
        for fields in lines:
            if len(fields) > expected:
                return f"line {lines.line_num} has {len(fields)} fields, the first line {expected}"
    return None


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Discard standard error, where the threads of polars print messages about damaged parquet files."""
    try:
        saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    except OSError:  # there is no standard error
        yield
        return
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
