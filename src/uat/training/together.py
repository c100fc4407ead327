"""Train several runs at once on one device, each on its own CUDA stream, so that their small launches overlap.

A small model leaves much of a large GPU idle, so three seeds take less than three times as long as one. The runs share
nothing, and all random numbers depend on (seed, epoch) alone, so each run has the same numbers as when trained alone,
wherever the GPU is deterministic (see docs/speed.md). The optimize steps take turns, since each of them fills the
device; rollouts of the other runs overlap with them.

Torch's generator is the exception: it is shared. If the training of any policy uses it on the device (dropout outside
the fused pass), all runs share one stream and take turns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from pathlib import Path

import torch

from uat.config import RunConfig
from uat.engines import SerialReplay
from uat.engines.graph import own_stream
from uat.files import check_path
from uat.noise import derive
from uat.runs import Run
from uat.settings import checked
from uat.threads import cpu_threads
from uat.training.progress import Progress
from uat.training.surroundings import current, pick_device, precision, seeded
from uat.training.trainer import ShowProgress, Trainer


def train_together(
    configs: Sequence[RunConfig],
    outs: Sequence[Path | str],
    *,
    resume: bool = False,
    device: torch.device | str | None = None,
    threads: int | None = None,
    progress: ShowProgress | None = None,
) -> list[Run]:
    """Train each config into its folder, like `train`. Progress is shown for the first run only."""
    configs, outs = checked(configs, Sequence, "configs"), checked(outs, Sequence, "outs")
    configs = [checked(config, RunConfig, f"configs[{index}]") for index, config in enumerate(configs)]
    outs = [check_path(out, f"outs[{index}]") for index, out in enumerate(outs)]
    if len(configs) != len(outs) or len({str(out) for out in outs}) != len(outs):
        raise ValueError(f"train_together: {len(configs)} configs need as many folders, each its own, got {len(outs)}")
    arithmetic = {config.train.precision for config in configs}
    if len(arithmetic) > 1:
        raise ValueError(f"train_together: precision is one for all, got {', '.join(sorted(arithmetic))}")
    if not configs:
        return []
    chosen = pick_device(device)
    runs = [Run(out, config) for config, out in zip(configs, outs, strict=True)]
    with (
        cpu_threads(threads),
        contextlib.ExitStack() as kept,
        current(chosen),
        seeded(derive(configs[0].seed, "train"), chosen),
        precision(arithmetic.pop()),
    ):
        for run in runs:
            run.is_there(resume=resume)
            kept.enter_context(run.training())
            Run.create(run.config, run.path, resume=resume, device=chosen)
        serial = SerialReplay() if chosen.type == "cuda" else None
        trainers = [Trainer(run, chosen, concurrent_policies=len(runs), serial=serial) for run in runs]
        streams = [_stream(trainers, chosen) for _ in trainers]
        turns: list[Generator[None, None, None]] = []
        for trainer, stream in zip(trainers, streams, strict=True):
            shown = progress if progress is not None and trainer is trainers[0] else _silent
            with stream:
                turns.append(trainer.turns(shown))
        unfinished = list(range(len(turns)))
        try:
            while unfinished:
                for index in list(unfinished):
                    with streams[index]:
                        if next(turns[index], _DONE) is _DONE:
                            unfinished.remove(index)
        finally:  # if one run fails, the others free their captured graphs, each on its own stream
            for turn, stream in zip(turns, streams, strict=True):
                with stream:
                    turn.close()
        if chosen.type == "cuda":
            torch.cuda.synchronize(chosen)
    return runs


_DONE = object()


def _silent(label: str, total: int) -> Progress:
    return Progress()


def _stream(trainers: list[Trainer], device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a new stream if no trainer uses torch's generator; otherwise keep the current one."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    if not all(trainer.engine.leaves_generator_alone for trainer in trainers):
        return contextlib.nullcontext()
    stream = own_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)
