"""Several trainings at once on one device: each on a CUDA stream of its own, their small launches side by side.

A small model leaves much of a large GPU idle, so three seeds cost less than three times one. Nothing is shared, and
every random number comes from (seed, epoch): each run's numbers are those of training it alone, where a GPU repeats
itself (docs/speed.md says where). Their optimize steps take turns: each fills the device, and so rollouts of the
others fall in between.

Torch's generator is one for all, though. A policy whose training asks it on the device (dropout outside the fused
pass) shares one stream with the others, and they take turns instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from pathlib import Path

import torch

from uat.config import RunConfig
from uat.engines.graph import SerialReplay, own_stream
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
    """As `train` for each config and its folder. Progress is shown for the first, which stands for all."""
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
        finally:  # one may have failed: the others give back what they captured, each on its own stream
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
    """A stream of its own where nobody asks torch's generator; else the common one."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    if not all(trainer.engine.leaves_generator_alone for trainer in trainers):
        return contextlib.nullcontext()
    stream = own_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)
