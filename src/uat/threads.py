"""Number of CPU threads that torch uses: one, unless a setting or UAT_THREADS says otherwise.

Models of the paper's size gain little from a second thread on an idle machine, and become 10 to 100 times slower on a
busy one, where threads wait for each other in every operation. The number of threads also determines the order in which
sums are computed, and so the last bits of every result; training therefore records it.

This number is that of the threads that share one operation. Nothing here runs several operations at once, so torch's
other number (`torch.set_num_interop_threads`) has no effect. NumPy, which the fast step of a session uses, reads its
number of threads from the environment when it is imported (OPENBLAS_NUM_THREADS or MKL_NUM_THREADS); `uat.engines.cpu`
says when that matters.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from uat.settings import shown

VARIABLE = "UAT_THREADS"
MOST = max(64, os.cpu_count() or 1)

_enclosing: ContextVar[int | None] = ContextVar("threads of the enclosing block", default=None)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ThreadsWarning(UserWarning):
    """A resumed run uses a different number of threads than before."""


def thread_count(asked: int | None = None) -> int:
    """Return the requested number; by default that of the enclosing `cpu_threads`, else UAT_THREADS, else one."""
    name, value = "threads", asked
    if value is None:
        value = _enclosing.get()
    if value is None:
        name, value = VARIABLE, os.environ.get(VARIABLE, "1")
    is_text = isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= len(str(MOST))
    count = int(value) if is_text else value
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST:
        raise ValueError(f"{name}={shown(value, 40)} must be a whole number from 1 to {MOST}")
    return count


@contextlib.contextmanager
def cpu_threads(asked: int | None = None) -> Iterator[int]:
    """Let torch use `thread_count(asked)` threads inside the block, and restore the previous number afterwards.

    `@cpu_threads()` does the same for a function; the number is looked up at each call.
    """
    count, before, enclosing = thread_count(asked), torch.get_num_threads(), _enclosing.get()
    _enclosing.set(count)
    if count != before:
        torch.set_num_threads(count)
    try:
        yield count
    finally:
        _enclosing.set(enclosing)
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
