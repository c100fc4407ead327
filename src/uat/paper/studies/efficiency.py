"""Measure the cost of methods: parameters, milliseconds and memory, with nothing else running.

`optimize_ms` is one optimizer step on the episodes of a batch (the published "ms/ep" excludes the rollout), `epoch_ms`
the rollout and that step, and `step_ms` one decision in every stream of a batch: a rollout divided by its horizon.
Memory peaks are torch's own count on CUDA, including workspaces of matrix products; on a CPU there is no count. On CUDA
each method runs in a new process, since an old one would keep workspaces and graphs of earlier work.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from uat.config import RunConfig
from uat.engines.rollout import RolloutRunner
from uat.manifest import manifest
from uat.recipes import recipe
from uat.runs import Run
from uat.threads import cpu_threads, thread_count
from uat.training.surroundings import pick_device, precision, seeded
from uat.training.trainer import Trainer, build_policy

REPEATS = {"smoke": 2, "quick": 5, "paper": 30}
WARM_UP = 3
DOMAIN = "darkroom"


def measure_apart(method: str, preset: str, device: str | None) -> list[dict[str, Any]]:
    """Run `measure` in a new process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, method, preset, device, thread_count()).result()


def measure(method: str, preset: str, device: str | None, threads: int | None = None) -> list[dict[str, Any]]:
    """One row per metric of one method."""
    chosen, config = pick_device(device), recipe(DOMAIN, method, preset)
    about = {"method": method, "domain": DOMAIN, "batch": config.train.batch_size, "preset": preset}
    about |= {"device": device_name(device), "precision": config.train.precision}
    with cpu_threads(threads), precision(config.train.precision), seeded(0, chosen):
        values = {**_training(config, chosen), **_acting(config, chosen)}
    return [{**about, "metric": name, "value": value} for name, value in values.items()]


def device_name(device: str | None) -> str:
    """Name of the device in rows."""
    return manifest(pick_device(device))["device"]


def _training(config: RunConfig, device: torch.device) -> dict[str, float]:
    repeats, before = REPEATS[config.preset], _forget_peak(device)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(Run.create(config, Path(folder) / "run"), device)
    epoch, index = trainer.epoch(trainer.engine.learner.phases()[0]), itertools.count()
    whole = _milliseconds(lambda: epoch.run(i := next(index), i + 1), repeats, device)
    trajectory = epoch.rollouts.play(torch.arange(config.train.batch_size), 0)
    updates = epoch.updates
    step = updates.captured if updates.captured is not None else lambda: updates.plain(trajectory)
    return {"optimize_ms": _milliseconds(step, repeats, device), "epoch_ms": whole, **_peak("training", device, before)}


def _acting(config: RunConfig, device: torch.device) -> dict[str, float]:
    before, domain = _forget_peak(device), config.build_domain()
    policy = build_policy(config, domain, device)
    rollouts = RolloutRunner(policy, domain.simulator("test", device), device=device, sampled=False)
    ids = torch.arange(config.train.batch_size)
    rollout = _milliseconds(lambda: rollouts.play(ids, 0), REPEATS[config.preset], device)
    size = float(sum(p.numel() for p in policy.parameters()))
    return {"parameters": size, "step_ms": rollout / domain.spec.steps, **_peak("acting", device, before)}


def _milliseconds(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Median time of single calls, with the device idle before and after each."""
    times = []
    for turn in range(WARM_UP + repeats):
        _wait(device)
        started = time.perf_counter()
        call()
        _wait(device)
        if turn >= WARM_UP:
            times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _forget_peak(device: torch.device) -> int:
    """Reset the count of peak memory; return the bytes that are already in use."""
    if device.type != "cuda":
        return 0
    gc.collect()  # graphs of earlier measurements are in reference cycles
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(what: str, device: torch.device, before: int) -> dict[str, float]:
    if device.type != "cuda":
        return {}
    return {f"{what}_peak_mib": (torch.cuda.max_memory_allocated(device) - before) / 2**20}
