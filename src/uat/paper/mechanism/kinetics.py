"""Accuracy of trained policies around the shifts of sepsis (paper, figure "Adaptation kinetics")."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from uat.domains import split_seed
from uat.domains.sepsis import kinetics as sepsis_kinetics
from uat.domains.sepsis.kinetics import Kinetics
from uat.engines.rollout import RolloutRunner
from uat.runs import Run, load_policy
from uat.threads import cpu_threads
from uat.training.surroundings import pick_device

EPISODES = 64
"""Number of episodes, as in the paper."""


@cpu_threads()
def kinetics_of(run: Run, *, episodes: int = EPISODES, device: torch.device | str | None = None) -> Kinetics:
    """Accuracy around every shift of the first test episodes, played greedily."""
    domain, chosen = run.config.build_domain(), pick_device(device)
    if domain.name != "sepsis":
        raise ValueError(f"{run.path}: kinetics are measured on sepsis, not on {domain.name}")
    policy = load_policy(run.path).to(chosen)
    player = RolloutRunner(policy, domain.simulator("test", chosen), device=chosen, sampled=policy.sampled)
    with contextlib.closing(player):
        return sepsis_kinetics.kinetics([player.play(torch.arange(episodes), split_seed("test", 0))])


def kinetics_rows(run: Run, kinetics: Kinetics) -> list[dict[str, Any]]:
    """One row per offset, then the means before and after a shift (offset None), each with its standard error."""
    head = {"domain": run.config.domain_name, "method": run.config.method_name, "seed": run.config.seed}
    at = zip(kinetics.offset, kinetics.accuracy, kinetics.sem, kinetics.shifts, strict=True)
    rows: list[dict[str, Any]] = [
        {**head, "quantity": "accuracy", "offset": offset, "value": value, "sem": sem, "n": n}
        for offset, value, sem, n in at
    ]
    recovered = None if kinetics.steps_to_recover is None else float(kinetics.steps_to_recover)
    means = {
        "accuracy_before": (kinetics.before, kinetics.before_sem),
        "accuracy_after": (kinetics.after, kinetics.after_sem),
        "steps_to_recover": (recovered, None),
    }
    shifts = max(kinetics.shifts)
    rows += [
        {**head, "quantity": name, "offset": None, "value": value, "sem": sem, "n": shifts}
        for name, (value, sem) in means.items()
    ]
    return rows
