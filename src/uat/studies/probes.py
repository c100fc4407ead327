"""What is looked at in a trained policy beside its scores; each leaves numbers for a figure in the run folder.

A probe gives plain numbers (rows of a table) and arrays. Files are NAME.safetensors in the run folder: the arrays,
and the plain numbers as their description.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from uat.domains import split_seed
from uat.domains.sepsis.kinetics import kinetics
from uat.runs import Run, load_policy, read_tensors, write_tensors
from uat.training.playing import Player
from uat.training.surroundings import precision

KINETICS_EPISODES = {"smoke": 16, "quick": 256, "paper": 1024}


@dataclass(frozen=True, slots=True)
class Trace:
    """What a probe saw."""

    numbers: dict[str, Any]
    arrays: dict[str, Tensor]


def probe_kinetics(run: Run, device: torch.device) -> Trace:
    """Accuracy around every shift of the first test episodes."""
    domain, policy = run.config.build_domain(), load_policy(run.path).to(device)
    player = Player(policy, domain.simulator("test", device), device=device, sampled=False)
    count = KINETICS_EPISODES[run.config.preset]
    with precision(run.config.train.precision):
        found = kinetics([player.play(torch.arange(count), split_seed("test", 0))])
    numbers = {**asdict(found), "episodes": count}
    arrays = {name: torch.tensor(numbers.pop(name), dtype=torch.float64) for name in ("offset", "accuracy", "sem")}
    return Trace(numbers, arrays)


PROBES: dict[str, Callable[[Run, torch.device], Trace]] = {"kinetics": probe_kinetics}


def look(run: Run, name: str, device: torch.device) -> None:
    """Let a probe look at the run, unless it has."""
    if not run.file(f"{name}.safetensors").exists():
        seen = PROBES[name](run, device)
        write_tensors(run.file(f"{name}.safetensors"), seen.arrays, {"numbers": seen.numbers})


def seen(run: Run, name: str) -> Trace:
    """What a probe saw in this run."""
    arrays, meta = read_tensors(run.file(f"{name}.safetensors"))
    return Trace(meta["numbers"], arrays)
