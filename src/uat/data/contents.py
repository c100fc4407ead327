"""Checksums that represent data files in the identity of a run: a file's contents count, not its path or its date."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import numpy as np

from uat.archives import is_archive, read_arrays
from uat.files import FileError


def checksum(path: Path | str) -> str | None:
    """Checksum of the arrays in a .npz file, independent of its path and name; None if there is no such file."""
    path = Path(path)
    if not is_archive(path) or not path.is_file():
        return None
    stat = path.stat()
    return _checksum(path.resolve(), stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=16)
def _checksum(path: Path, size: int, changed: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    try:
        for name, array in sorted(read_arrays(path).items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    except FileError:  # not readable as arrays: loading the data later raises the error
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()
