"""Measurements that are made once and separately: memory, and the cold start."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from uat.bench.cases import Sizes, Training, training_paths
from uat.bench.steps import Stepping, state_bytes
from uat.bench.timing import Call, once
from uat.config import RunConfig

Measurement = tuple[str, int, int, str, float | str, str]
"""path, batch, context, metric, value (or the reason why there is none), unit"""


def memory(config: RunConfig, sizes: Sizes, device: torch.device) -> Iterator[Measurement]:
    """Peak memory of training and rollout on CUDA, and the size of one stream's state by context length.

    Peaks are relative to the memory in use before the training is set up, and include its first call with all captures.
    On a CPU torch reports no peak, so only `state` is measured.
    """
    for path in training_paths(device) if device.type == "cuda" else ():
        for metric, use in (("training peak", Training.epoch), ("inference peak", Training.rollout)):
            value = peak(lambda path=path: Training(config, path, device), use, device)
            yield path, sizes.batch, sizes.context, metric, value, "MiB"
    for context in sizes.contexts:
        policy = Stepping(config, 1, context, device).policy
        yield "cached", 1, context, "state", state_bytes(policy, 1, context, device) / 2**10, "KiB"


def peak(build: Callable[[], Training], use: Callable[[Training], Any], device: torch.device) -> float | str:
    """Peak memory in MiB, or the reason why the path is not available."""
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


def cold(config: RunConfig, sizes: Sizes, device: torch.device) -> Iterator[Measurement]:
    """Time of a training's first epoch on each path, with captures and compilation (which Triton caches on disk)."""
    Training(config, "cached", device).epoch()  # so that no path includes the start of torch itself
    for path in training_paths(device):
        training = Training(config, path, device)
        value = training.reason or once(Call(training.epoch), device)
        yield path, sizes.batch, sizes.context, "first epoch", value, "ms"
