"""Rollout and optimize step, every path beside its slow twin in one run.

    python -m benchmarks.speed --out benchmarks/results/cpu.json

Paths: recompute (the whole history at each step), eager (cached, launch by launch), graph (captured; CUDA alone).
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import uat
from benchmarks.recompute import Recomputing
from uat.acting import rollout
from uat.domains import split_seed
from uat.runs import Run
from uat.training.surroundings import pick_device, precision
from uat.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Timing:
    device: str
    case: str
    method: str
    path: str
    batch: int
    context: int
    metric: str
    value: float
    unit: str = "ms"


def milliseconds(function: Callable[[], Any], repeats: int, device: torch.device) -> list[float]:
    """Wall times of single calls after a warm-up, the device idle before and after each."""

    def once() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - start)

    once()
    return [once() for _ in range(repeats)]


def cases(method: str, batch: int, device: torch.device, arithmetic: str) -> dict[tuple[str, str], Callable[[], Any]]:
    """What is timed, by (case, path)."""
    changes = {"train.batch_size": batch, "train.precision": arithmetic}
    config = uat.override(uat.recipe("darkroom", method), changes)
    trainer = Trainer(Run.create(config, Path(tempfile.mkdtemp()) / "run"), device)
    epoch, ids, seed = trainer.epoch(trainer.policy.phases()[0]), torch.arange(batch), split_seed("train", 0)
    simulator, policy = trainer.player.simulator, trainer.policy
    noise = trainer.player.noise(ids.to(device), seed)
    sampling = noise.pop("actions")
    trajectory = trainer.player.play(ids, seed)

    found: dict[tuple[str, str], Callable[[], Any]] = {
        ("rollout", "recompute"): lambda: rollout(Recomputing(policy.eval()), simulator, noise, sampling),
        ("rollout", "eager"): lambda: rollout(policy.eval(), simulator, noise, sampling),
        ("optimize", "eager"): lambda: epoch.optimize(trajectory),
    }
    if device.type == "cuda":
        found["rollout", "graph"] = lambda: trainer.player.play(ids, seed)
        epoch.run(0, 1)
        captured = epoch.captured
        assert captured is not None
        found["optimize", "graph"] = captured
        found["epoch", "graph"] = lambda: epoch.run(0, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["vanilla", "uat"])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    device = pick_device(args.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    rows = []
    for method in args.methods:
        with precision(args.precision):
            for (case, path), function in cases(method, args.batch, device, args.precision).items():
                times = milliseconds(function, args.repeats, device)
                row = Timing(
                    device=name,
                    case=case,
                    method=method,
                    path=path,
                    batch=args.batch,
                    context=60,
                    metric="p50",
                    value=round(statistics.median(times), 3),
                )
                rows.append(row)
                print(f"{method:8} {case:8} {path:9} {row.value:9.2f} ms  (least {min(times):.2f})", flush=True)
    if args.out:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        versions = {"uat": uat.__version__, "torch": torch.__version__, "python": platform.python_version()}
        head = {"date": date, "device": name, "precision": args.precision, **versions}
        args.out.write_text(json.dumps({**head, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
