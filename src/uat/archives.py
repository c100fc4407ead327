"""Read and write archives of arrays (.npz) without pickle, and without unpacking more than fits in memory.

Before any array is read, the archive's directory and every array's header are checked: names, types, shapes against the
sizes of the members, and the total size. Every error is one sentence that names the file.
"""

from __future__ import annotations

import math
import sys
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from uat.files import FileError, replacing

Array = np.ndarray[Any, Any]

SUFFIX = ".npz"
MEMBER = ".npy"
KINDS = "biufUSM"
"""Types of arrays: booleans, integers, floats, text, bytes and dates."""
MOST_BYTES = 16 * 2**30
"""Limit of the memory that the arrays of an archive may take."""
MOST_INFLATION = 100
"""Limit of the ratio between an archive's size in memory and its file size; real data compress by a small factor."""
FREE_BYTES = 64 * 2**20
"""Archives that need at most this much memory may exceed MOST_INFLATION."""
MOST_ARRAYS = 10_000
PLAIN = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
ENCRYPTED = 0x1


def is_archive(path: Path | str) -> bool:
    return Path(path).suffix == SUFFIX


def read_arrays(path: Path) -> dict[str, Array]:
    """Read all arrays of an archive, in the archive's order."""
    if not path.is_file():
        raise FileError(f"{path} {'is not a file' if path.exists() else 'does not exist'}")
    try:
        with path.open("rb") as file:
            if file.read(len(npy.MAGIC_PREFIX)) == npy.MAGIC_PREFIX:
                raise FileError("it is a single array, not an archive")
            file.seek(0)
            with zipfile.ZipFile(file) as content:
                members = _members(content, path.stat().st_size)
                for member in members:
                    _check_header(content, member)
                return {_name(member): _read(content, member) for member in members}
    except MemoryError:
        raise FileError(f"{path} cannot be read: there is not enough memory for its arrays") from None
    except Exception as error:  # zipfile, zlib and numpy raise many types of errors on damaged files
        message = str(error).strip().splitlines() or [type(error).__name__]
        raise FileError(f"{path} cannot be read: {message[0]:.200}") from None


def _members(content: zipfile.ZipFile, file_size: int) -> list[zipfile.ZipInfo]:
    """Members of the archive, checked: arrays with plain names that fit in memory."""
    members = content.infolist()
    if len(members) > MOST_ARRAYS:
        raise FileError(f"it holds {len(members):,} members, more than {MOST_ARRAYS:,}")
    if repeated := len(members) - len({member.filename for member in members}):
        raise FileError(f"{repeated} of its members have the name of another")
    for member in members:
        _check_name(member)
        if member.flag_bits & ENCRYPTED or member.compress_type not in PLAIN:
            raise FileError(f"{member.filename!r} is encrypted, or compressed by a method that NumPy does not use")
    size = sum(member.file_size for member in members)
    if size > MOST_BYTES or size > max(FREE_BYTES, MOST_INFLATION * file_size):
        raise FileError(f"its {file_size:,} bytes would become {size:,} in memory, which is implausible for real data")
    return members


def _check_name(member: zipfile.ZipInfo) -> None:
    name = member.filename
    parts = name.removesuffix(MEMBER).split("/")
    if not name.endswith(MEMBER) or not name.isprintable() or len(name) > 255 or {"", ".", ".."} & set(parts):
        raise FileError(f"{name!r:.80} is not the name of an array")


def _name(member: zipfile.ZipInfo) -> str:
    return member.filename.removesuffix(MEMBER)


def _check_header(content: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Check an array's type and shape, and that they match the size of its member."""
    with content.open(member) as file:
        shape, dtype = _header(file)
        begin = file.tell()
    name = _name(member)
    if dtype.kind not in KINDS or not dtype.isnative or (dtype.kind in "biuf" and dtype.itemsize > 8):
        raise FileError(f"the array {name!r} has the unsupported type {dtype}")
    if any(type(side) is not int or side < 0 for side in shape):
        raise FileError(f"the array {name!r} has the shape {shape!r:.60}")
    count = math.prod(shape)
    if begin + count * dtype.itemsize != member.file_size or (count and not dtype.itemsize):
        raise FileError(f"the array {name!r} is {shape!r:.60} of {dtype}, but has {member.file_size - begin:,} bytes")


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy warns about headers written by Python 2
        version = npy.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise FileError(f"it has arrays of format {version}")
        shape, _, dtype = (npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0)(file)
    return shape, dtype


def _read(content: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    with content.open(member) as file:
        array = npy.read_array(file, allow_pickle=False)
    if array.dtype.kind == "U" and array.size:
        letters = np.ascontiguousarray(array).reshape(-1).view(np.uint32)
        if ((letters > sys.maxunicode) | ((letters >= 0xD800) & (letters < 0xE000))).any():
            raise FileError(f"the array {_name(member)!r} holds invalid Unicode characters")
    return array


def write_arrays(path: Path, arrays: Mapping[str, Array], *, small: bool = True) -> None:
    """Write arrays to an archive atomically. `small` compresses the file, which takes longer."""
    with replacing(path) as file:
        write_into(file, arrays, small=small)


def write_into(file: IO[bytes], arrays: Mapping[str, Array], *, small: bool = True) -> None:
    """Write the contents of an archive; equal arrays give equal bytes."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if small else zipfile.ZIP_STORED) as content:
        for name, array in arrays.items():
            with content.open(f"{name}{MEMBER}", "w", force_zip64=True) as member:
                npy.write_array(member, np.asanyarray(array), allow_pickle=False)


def required(path: Path, arrays: Mapping[str, Array], name: str, kinds: str, shape: tuple[int | None, ...]) -> Array:
    """Return an array of the archive, checked for one of the kinds of types and for a shape (None: any length)."""
    if name not in arrays:
        raise FileError(f"{path} has no array {name!r}; it has {', '.join(map(repr, arrays)) or 'no arrays':.200}")
    array = arrays[name]
    fits = len(array.shape) == len(shape) and all(w in (None, n) for n, w in zip(array.shape, shape, strict=True))
    if array.dtype.kind not in kinds or not fits:
        wanted = " or ".join(WORDS[kind] for kind in kinds)
        sides = ", ".join("any" if side is None else str(side) for side in shape)
        raise FileError(f"{path}: the array {name!r} is {array.shape} of {array.dtype}, expected ({sides}) of {wanted}")
    return array


WORDS = {"b": "booleans", "i": "integers", "u": "counts", "f": "floats", "U": "text", "S": "bytes", "M": "dates"}
