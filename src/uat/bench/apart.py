"""What is measured once and apart from the rest: memory, and the cold start."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from uat.bench.cases import Sizes, Training, training_paths
from uat.bench.steps import Stepping, state_bytes
from uat.bench.timing import Call, once
from uat.config import RunConfig

Found = tuple[str, int, int, str, float | str, str]
"""path, batch, context, metric, value (or why there is none), unit"""


def memory(config: RunConfig, sizes: Sizes, device: torch.device) -> Iterator[Found]:
    """Peaks are above what was taken before the training was set up; its first call, captures included, is in them.

    A rollout on a CPU has no peak that torch could tell, so there `state` alone is measured: what one stream's past
    takes, by its length.
    """
    for path in training_paths(device) if device.type == "cuda" else ():
        for metric, use in (("training peak", Training.epoch), ("inference peak", Training.rollout)):
            value = peak(lambda path=path: Training(config, path, device), use, device)
            yield path, sizes.batch, sizes.context, metric, value, "MiB"
    for context in sizes.contexts:
        policy = Stepping(config, 1, context, device).policy
        yield "cached", 1, context, "state", state_bytes(policy, 1, context, device) / 2**10, "KiB"


def peak(build: Callable[[], Training], use: Callable[[Training], Any], device: torch.device) -> float | str:
    """MiB, or why the path cannot be taken."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    training = build()
    if training.reason is not None:
        return training.reason
    use(training)
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def cold(config: RunConfig, sizes: Sizes, device: torch.device) -> Iterator[Found]:
    """The first epoch of a training on each path: its captures, and what it compiles (Triton keeps that on disk)."""
    Training(config, "cached", device).epoch()  # torch's own start belongs to no path
    for path in training_paths(device):
        training = Training(config, path, device)
        value = training.reason or once(Call(training.epoch), device)
        yield path, sizes.batch, sizes.context, "first epoch", value, "ms"
