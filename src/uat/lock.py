"""Lock a folder for one writer at a time. The lock is released when its process ends, even if it is killed.

The lock is the operating system's (flock), on a file `.lock` in the folder that also records which process holds it.
The file stays when the lock is released. Without flock (on Windows) nothing is locked.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from uat.files import NO_FOLLOW

try:
    import fcntl
except ImportError:  # pragma: no cover (Windows)
    fcntl = None

FILE = ".lock"
NOTE_SECONDS = 1.0
"""How long to wait for the record of a holder that has just taken the lock."""


class LockedError(ValueError):
    """Another process is writing in this folder."""


@contextlib.contextmanager
def locked(folder: Path, what: str, *, wait_seconds: float = 0.0) -> Iterator[None]:
    """Hold the lock of a folder, which is created if necessary. LockedError names the process that holds the lock.

    what: a short description of what this process does in the folder, shown to other processes.
    """
    file, begun = folder / FILE, time.monotonic()
    while (descriptor := _take(file)) is None:
        holder, waited = _holder(file), time.monotonic() - begun
        if waited >= (wait_seconds if holder else max(wait_seconds, NOTE_SECONDS)):
            raise LockedError(
                f"{folder} is in use by {holder or 'another process'}; wait for it, or choose another folder"
            )
        time.sleep(0.02)
    try:
        _write(descriptor, _about(what))
        try:
            yield
        finally:
            _write(descriptor, b"")
    finally:
        os.close(descriptor)  # releases the lock


def _take(file: Path) -> int | None:
    """Open and lock the file; None if another process holds the lock. The last holder may have removed the folder."""
    while True:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o666)
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(file)):  # noqa: PTH116
                    return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _about(what: str) -> bytes:
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])[:200]
    about = {"what": what, "process": os.getpid(), "machine": platform.node(), "since": since, "command": command}
    return json.dumps(about).encode()


def _write(descriptor: int, content: bytes) -> None:
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.write(descriptor, content)


def _holder(file: Path) -> str | None:
    """Describe the process that holds the lock, from the record in the file; None if there is no whole record."""
    with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        machine = "" if record["machine"] == platform.node() else f" on {record['machine']}"
        return f"process {record['process']}{machine} ({record['what']}, since {record['since']})"
    return None
