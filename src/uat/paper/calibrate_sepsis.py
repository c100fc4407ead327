"""Calibrate the response and noise of sepsis to the intended difficulty.

    python -m uat.paper.calibrate_sepsis > results/calibration/sepsis.json
    python -m uat.paper.calibrate_sepsis aligned > results/calibration/sepsis-aligned.json

Scores the constant-hazard filter over a grid of both settings, and every reference at the defaults, on validation and
test episodes. The defaults are calibrated if that filter scores 0.80 to 0.84 overall and 0.57 to 0.63 post-shift in
validation. All random draws are fixed, so the output is reproducible.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, cast, get_args

import torch
from torch import Tensor

from uat.acting import rollout
from uat.contracts import Agent
from uat.domains.domain import Split, split_seed
from uat.domains.sepsis.domain import Sepsis
from uat.domains.sepsis.treatment import Task
from uat.domains.sepsis.world import SepsisConfig
from uat.evaluation.intervals import interval
from uat.noise import gumbel

RESPONSES = (0.04, 0.05, 0.06, 0.07, 0.08)
NOISES = (0.008, 0.01, 0.012, 0.014, 0.016)
GOALS = {"accuracy": (0.80, 0.84), "post_shift_accuracy": (0.57, 0.63)}
EPISODES, AT_ONCE = 4096, 256
MEASURED = "constant-hazard"
"""The reference whose scores are calibrated."""


def calibrate(
    task: Task = "regimes",
    responses: Sequence[float] = RESPONSES,
    noises: Sequence[float] = NOISES,
    episodes: int = EPISODES,
) -> dict[str, Any]:
    """Scores over the grid, and scores of every reference at the defaults, in test episodes with 95 % intervals."""
    default = SepsisConfig(task=task)
    grid = []
    for response in responses:
        for noise in noises:
            domain = Sepsis(replace(default, response=response, state_noise=noise))
            means = scores(domain, domain.references()[MEASURED], episodes)
            row = {name: round(means[name], 4) for name in GOALS}
            grid.append({"response": response, "state_noise": noise, **row, "meets_goals": meets_goals(row)})
    domain = Sepsis(default)
    agents: dict[str, Agent[Any] | None] = {**domain.references(), "expert": None}
    at_defaults = {name: scores(domain, agent, episodes) for name, agent in agents.items()}
    test = {name: per_episode(domain, agent, episodes, "test") for name, agent in agents.items()}
    return {
        "defaults": asdict(default),
        "episodes": episodes,
        "goals": {name: list(ends) for name, ends in GOALS.items()},
        "at_defaults": {name: {k: round(v, 4) for k, v in means.items()} for name, means in at_defaults.items()},
        "test": {name: {k: _with_interval(v) for k, v in values.items()} for name, values in test.items()},
        "defaults_meet_goals": meets_goals(at_defaults[MEASURED]),
        "calibrated": MEASURED,
        "grid": grid,
    }


def meets_goals(means: dict[str, float]) -> bool:
    return all(low <= means[name] <= high for name, (low, high) in GOALS.items())


def scores(domain: Sepsis, agent: Agent[Any] | None, episodes: int) -> dict[str, float]:
    """Mean of each metric over validation episodes played by the agent, or by the expert if it is None."""
    values = per_episode(domain, agent, episodes, "validation")
    return {name: value.double().nanmean().item() for name, value in values.items()}


def per_episode(domain: Sepsis, agent: Agent[Any] | None, episodes: int, split: Split) -> dict[str, Tensor]:
    """Each metric in the episodes of a split, played by the agent, or by the expert if it is None."""
    simulator, seed, parts = domain.simulator(split, "cpu"), split_seed(split, 0), []
    spec, actions = domain.spec, simulator.physiology.effect_RA.shape[1]
    for begin in range(0, episodes, AT_ONCE):
        ids = torch.arange(begin, min(begin + AT_ONCE, episodes))
        sampled = agent is not None and agent.sampled
        flat = gumbel(seed, "actions", ids, spec.steps * actions) if sampled else None
        noise = None if flat is None else flat.view(len(ids), spec.steps, actions)
        parts.append(domain.measure(rollout(agent, simulator, simulator.noise(ids, seed), noise)))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _with_interval(values: Tensor) -> dict[str, float]:
    """Mean over episodes, with the ends of its 95 % interval."""
    low, high = interval(values[None])
    return {"mean": round(values.double().nanmean().item(), 4), "low": round(low, 4), "high": round(high, 4)}


if __name__ == "__main__":
    task = sys.argv[1] if len(sys.argv) > 1 else "regimes"
    if task not in get_args(Task):
        sys.exit(f"unknown task {task!r}; known: {', '.join(get_args(Task))}")
    json.dump(calibrate(cast(Task, task)), sys.stdout, indent=1)
    print()
