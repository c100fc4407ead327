"""Train on several processes (torchrun): each plays and learns from its share of every batch.

Worlds, sampled actions and starts depend on (seed, id) alone, so the ranks together play the episodes of a single
process. Sums and counts of losses, and gradients, are summed over ranks before dividing, so padding and uneven shares
change nothing: the losses equal those of a single process up to the order of summation. Dropout differs by rank.

The first rank decides everything that all ranks must agree on (validation, and so patience and the best weights), and
only the first rank writes the run folder. The others use a temporary folder.
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
    """Index of this process, and the number of processes."""

    rank: int = 0
    count: int = 1

    def share(self, ids: Tensor) -> Tensor:
        """Return this rank's part of a batch."""
        return ids if self.count == 1 else ids.chunk(self.count)[self.rank]

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return each tensor summed over all ranks, with a single message in the widest of their dtypes."""
        if self.count == 1 or not tensors:
            return list(tensors)
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor).to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]

    def agreed(self, numbers: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the first rank's values of these numbers."""
        if self.count == 1 or not numbers:
            return numbers
        flat = torch.stack([number.double() for number in numbers.values()])
        dist.broadcast(flat, src=0)
        return dict(zip(numbers, flat, strict=True))

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite these tensors with the first rank's values."""
        if self.count > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)


ALONE = Ranks()


def launched() -> Ranks:
    """Return the rank that torchrun gave this process; rank 0 of 1 without torchrun."""
    return Ranks(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))


@contextlib.contextmanager
def joined(config: RunConfig, device: torch.device) -> Iterator[tuple[Ranks, torch.device]]:
    """Connect the processes of this training; yield this process's rank and device."""
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
    """Yield the run folder of this rank: the run itself for the first rank, a temporary copy for the others."""
    if ranks.count == 1:
        assert run is not None
        yield run
        return
    files = (STATE, *LOGS)
    contents = [{} if run is None else {name: run.file(name).read_bytes() for name in files if run.file(name).exists()}]
    dist.broadcast_object_list(contents, src=0)
    if run is not None:
        yield run
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Run.create(config, Path(folder) / "run", device=device)
        for name, content in contents[0].items():
            write_atomically(copy.file(name), content)
        yield copy
