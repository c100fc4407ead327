"""One training on several processes (torchrun): each plays and learns from its share of every batch.

Worlds, sampled actions and starts come from (seed, id), so the ranks together see the episodes that one process would.
Sums and counts of losses, and gradients, are added up over ranks before anything is divided, so padding and uneven
shares change nothing: the losses are those of one process, up to the order of summation. Dropout differs by rank.

The first rank decides what all must agree on (validation, and so patience and the best weights) and alone writes the
run folder; the others keep a folder of their own until the end.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from uat.config import RunConfig
from uat.files import write_atomically
from uat.runs import Run
from uat.training.checkpoint import LOGS, STATE


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which of several processes this one is."""

    rank: int = 0
    count: int = 1

    def share(self, ids: Tensor) -> Tensor:
        """This rank's part of a batch."""
        return ids if self.count == 1 else ids.chunk(self.count)[self.rank]

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor added up over all ranks: one message for all of them, in the widest of their types."""
        if self.count == 1 or not tensors:
            return list(tensors)
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor).to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]

    def agreed(self, numbers: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the first rank says of these numbers."""
        if self.count == 1 or not numbers:
            return numbers
        flat = torch.stack([number.double() for number in numbers.values()])
        dist.broadcast(flat, src=0)
        return dict(zip(numbers, flat, strict=True))


ALONE = Ranks()


def launched() -> Ranks:
    """What torchrun says of this process; alone if it was not started by it."""
    return Ranks(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))


@contextlib.contextmanager
def joined(config: RunConfig, device: torch.device) -> Iterator[tuple[Ranks, torch.device]]:
    """The ranks of this training and this one's device, connected inside."""
    ranks = launched()
    if ranks.count == 1:
        yield ranks, device
        return
    if config.train.batch_size % ranks.count:
        raise ValueError(
            f"train.batch_size={config.train.batch_size} must be a multiple of the {ranks.count} processes"
        )
    if device.type == "cuda":
        device = _own_gpu(device, int(os.environ.get("LOCAL_RANK", 0)), ranks.count)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield ranks, device
    finally:
        dist.destroy_process_group()


def _own_gpu(device: torch.device, process: int, count: int) -> torch.device:
    if device.index is not None:
        raise ValueError(f"device '{device}' is one GPU for {count} processes: say 'cuda', and each takes its own")
    if process >= torch.cuda.device_count():
        raise ValueError(
            f"process {process} of this machine has no GPU of its own: there are {torch.cuda.device_count()}"
        )
    return torch.device("cuda", process)


@contextlib.contextmanager
def own_folder(run: Run | None, config: RunConfig, ranks: Ranks, device: torch.device) -> Iterator[Run]:
    """Where this rank's training stands: the run itself for the first, a passing copy for every other."""
    if ranks.count == 1:
        assert run is not None
        yield run
        return
    files = (STATE, *LOGS)
    there = [{} if run is None else {name: run.file(name).read_bytes() for name in files if run.file(name).exists()}]
    dist.broadcast_object_list(there, src=0)
    if run is not None:
        yield run
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Run.create(config, Path(folder) / "run", device=device)
        for name, content in there[0].items():
            write_atomically(copy.file(name), content)
        yield copy
