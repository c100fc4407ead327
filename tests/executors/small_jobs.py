"""Jobs for worker processes: they answer, wait or kill themselves.

`python -m tests.executors.small_jobs FOLDER` is a parent whose workers wait."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

from uat.executors.workers import run_jobs


def begin(place: int, folder: Path) -> None:
    (folder / f"{os.getpid()}.worker").write_text(str(place))


def answer(place: int, job: str) -> str:
    if job == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if job == "wait":
        time.sleep(300)
    return f"{job}, done"


if __name__ == "__main__":
    try:
        list(run_jobs(["wait"] * 3, answer, 2, lambda: None, 0.1, partial(begin, folder=Path(sys.argv[1]))))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
