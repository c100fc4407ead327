"""Estimate the time of a cell by a rule of thumb, to prevent starting a long study by mistake.

An epoch plays T steps in sequence and then learns from all of them. Its time is T times a fixed cost per step, plus the
arithmetic of all episodes: two operations per parameter and token in rollouts, six in learning. The two rates below
were fitted to measured epochs of DarkRoom (benchmarks/results/) on two kinds of device. The estimate ignores early
stopping, which makes trainings shorter.
"""

from __future__ import annotations

from dataclasses import dataclass

from uat.domains import DOMAINS
from uat.methods import METHODS
from uat.paper.studies.cells import Cell


@dataclass(frozen=True, slots=True)
class Rates:
    step_seconds: float
    """Seconds per step of a rollout with few streams."""
    operations: float
    """Arithmetic operations per second."""
    together: float = 1.0
    """Cost of each further seed that trains side by side with the first, relative to it."""


CPU, CUDA = Rates(1.5e-3, 2.5e10), Rates(6e-5, 4e12, together=0.3)
ADAPTING = 8.0
"""Relative cost of a step of methods that learn while acting."""


def seconds(cell: Cell, *, on_gpu: bool) -> float:
    """Seconds of training and scoring a single cell."""
    c, rates = cell.config, CUDA if on_gpu else CPU
    domain = DOMAINS[c.domain_name].build(c.domain)
    policy = METHODS[c.method_name].build(domain.spec, c.method)
    size, horizon = sum(p.numel() for p in policy.parameters()), domain.spec.steps
    adapts = type(policy).trains_as is not None
    validated = domain.episode_count("validation", c.train.validation_episodes)
    tested = domain.episode_count("test", c.evaluation.episodes)

    def play(episodes: int) -> float:
        return horizon * rates.step_seconds * max(1, episodes / 1024) + 2 * size * horizon * episodes / rates.operations

    epoch = play(c.train.batch_size) + 6 * size * horizon * c.train.batch_size / rates.operations
    training = 0.0 if adapts else c.train.epochs * (epoch + play(validated) / c.train.validate_every)
    return training + play(tested) * (ADAPTING if adapts else 1.0)


def grid_seconds(by_cell: dict[str, tuple[Cell, float]], workers: int, *, on_gpu: bool) -> float:
    """Seconds of all cells, shared by the workers; on a GPU further seeds of a training cost less than the first."""
    kinds: set[str] = set()
    total = 0.0
    for cell, alone in by_cell.values():
        kind = cell.config.kind()
        total += alone * (CUDA.together if on_gpu and kind in kinds else 1.0)
        kinds.add(kind)
    return total / max(1, workers)


def in_words(duration: float) -> str:
    if duration < 90:
        return f"{max(1, round(duration))} s"
    return f"{duration / 60:.0f} min" if duration < 5400 else f"{duration / 3600:.1f} h"
