"""The origin of a run's numbers: version, commit, device, libraries and command."""

from __future__ import annotations

import contextlib
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def manifest(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return the origin of the numbers, for readers; it is not part of the run's identity."""
    from uat import __version__

    cuda = torch.device(device).type == "cuda"
    return {
        "version": __version__,
        "commit": commit(),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "data": {},
    }


def commit() -> str | None:
    """Return the commit of the checkout that contains this package; None if it is not in one."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        own = Path(__file__)  # a package installed inside another project's checkout is not tracked by it

        def git(*args: str) -> str:
            command = ["git", "-C", str(own.parent), *args]
            return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()

        git("ls-files", "--error-unmatch", own.name)
        return git("describe", "--always", "--abbrev=40", "--dirty")
    return None
