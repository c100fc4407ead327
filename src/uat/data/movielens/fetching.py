"""Download data sets from GroupLens. A data set appears on disk only when it is complete and verified."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from uat.files import opened_to_append

CHUNK = 1 << 20
TIMEOUT = 60


@dataclass(frozen=True, slots=True)
class Source:
    """URL of an archive, and the MD5 sum that GroupLens publishes for it."""

    url: str
    md5: str


BASE = "https://files.grouplens.org/datasets/movielens"
SOURCES: dict[str, Source] = {
    "movielens-100k": Source(f"{BASE}/ml-100k.zip", "0e33842e24a9c977be4e0107933c0723"),
    "movielens-1m": Source(f"{BASE}/ml-1m.zip", "c4d9eecfca2ab87c1945afe126590906"),
    "movielens-10m": Source(f"{BASE}/ml-10m.zip", "ce571fd55effeba0271552578f2648bd"),
    "movielens-20m": Source(f"{BASE}/ml-20m.zip", "cd245b17a1ae2cc31bb14903e1204af3"),
    "movielens-25m": Source(f"{BASE}/ml-25m.zip", "6b51fb2759a8657d3bfcbfc42b592ada"),
}


def fetch(name: str, folder: Path | str) -> Path:
    """Download and unpack a data set into `folder/name`, unless that folder exists; return its path.

    An interrupted download is resumed. A download with the wrong MD5 sum is removed.
    """
    if name not in SOURCES:
        raise ValueError(f"unknown data set {name!r}; known: {', '.join(SOURCES)}")
    source, target = SOURCES[name], Path(folder) / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    archive = target.with_name(f"{name}.zip.part")
    try:
        _download(source.url, archive)
    except (OSError, HTTPException) as error:
        raise ValueError(f"the download of {source.url} broke off ({error}); run it again to resume it") from None
    with archive.open("rb") as file:
        md5 = hashlib.file_digest(file, "md5").hexdigest()
    if md5 != source.md5:
        archive.unlink()
        raise ValueError(f"{source.url} has the MD5 sum {md5}, not {source.md5}; the download was removed")
    _unpack(archive, target)
    archive.unlink()
    return target


def _download(url: str, archive: Path) -> None:
    """Append the missing bytes to the archive; start again if the server does not support ranges."""
    have = archive.stat().st_size if archive.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing is missing
            error.close()
            return
        raise
    with response, opened_to_append(archive, empty=response.status != 206) as file:
        left = response.length
        while block := response.read(CHUNK):
            file.write(block)
            left = None if left is None else left - len(block)
    if left:
        raise OSError(f"{left} bytes are missing")


def _unpack(archive: Path, target: Path) -> None:
    """Unpack the archive's single folder into `target`, which is renamed into place at the end."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch, zipfile.ZipFile(archive) as content:
        folder = Path(scratch) / "unpacked"
        folder.mkdir()
        for member in content.infolist():
            if not member.is_dir():
                with content.open(member) as inside, (folder / Path(member.filename).name).open("wb") as file:
                    shutil.copyfileobj(inside, file, CHUNK)
        folder.rename(target)
