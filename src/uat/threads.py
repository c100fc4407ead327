"""How many CPU threads torch computes with: one, unless a setting or UAT_THREADS says otherwise.

Models of the paper's size gain little from a second thread on an idle machine and lose 10 to 100 times on a busy one,
where threads wait for each other in every operation. The number also decides in which order sums are added, and so the
last bits of every result: training records it.

NumPy, which the fast step of a session uses, takes its number from the environment when it is loaded
(OPENBLAS_NUM_THREADS or MKL_NUM_THREADS); `uat.nn.kernels.cpu_step` says when that matters.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

VARIABLE = "UAT_THREADS"
MOST = 1024


def thread_count(asked: int | None = None) -> int:
    """The number asked for; unset, what UAT_THREADS says; else one."""
    name, value = ("threads", asked) if asked is not None else (VARIABLE, os.environ.get(VARIABLE, "1"))
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
        raise ValueError(f"{name}={value!r:.40} must be a whole number from 1 to {MOST}")
    return value


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """torch computes with this many threads inside, and with as many as before outside."""
    if count < 1:
        raise ValueError(f"threads: count={count} must be at least 1")
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
