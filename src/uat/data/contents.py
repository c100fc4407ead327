"""What stands for a file in the identity of a run: what it holds, not where it lies or when it was written."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import numpy as np

from uat.archives import is_archive, read_arrays
from uat.files import FileError


def checksum(path: Path | str) -> str | None:
    """Names what a .npz file holds, wherever it lies and whatever it is called; None if there is no such file."""
    path = Path(path)
    if not is_archive(path) or not path.is_file():
        return None
    stat = path.stat()
    return _checksum(path.resolve(), stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=16)
def _checksum(path: Path, size: int, changed: int) -> str:
    found = hashlib.blake2b(digest_size=16)
    try:
        for name, array in sorted(read_arrays(path).items()):
            found.update(f"{name} {array.dtype} {array.shape}".encode())
            found.update(np.ascontiguousarray(array).tobytes())
    except FileError:  # no arrays that may be read: whoever reads it will say so
        with path.open("rb") as file:
            while block := file.read(2**20):
                found.update(block)
    return found.hexdigest()
