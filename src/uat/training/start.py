"""`uat.train`: start a training from a config, or from a domain and a method with defaults for everything else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from uat.config import RunConfig, lookup
from uat.domains import DOMAINS, Domain, adapted, known_as
from uat.files import check_path
from uat.methods import Policy
from uat.recipes import compose, default_folder
from uat.runs import Run
from uat.settings import shown
from uat.training import trainer
from uat.training.trainer import ShowProgress


def train(
    config: Any,
    out: Path | str | None = None,
    *,
    method: str | type[Policy] | Any = None,
    preset: str | None = None,
    seed: int | None = None,
    settings: Mapping[str, Any] | None = None,
    objective: str | None = None,
    resume: bool = False,
    source: Run | Path | str | None = None,
    device: torch.device | str | None = None,
    threads: int | None = None,
    progress: ShowProgress | None = None,
) -> Run:
    """Train a policy and write its run folder at `out`. With `resume`, continue an interrupted run of this config.

    config: a RunConfig, or a domain: its name, such as "darkroom" or "gym:CartPole-v1", an address such as
      "python:bandit:Bandit", or an object: a domain, a Gymnasium environment, a vector of them, or a factory. With a
      domain:
      method: a name, an address, a policy class, or a config; unset: "uat".
      preset: "smoke" (seconds), "quick" (minutes) or "paper"; unset: "paper", the whole training.
      seed: determines initial weights, training worlds, sampled actions and dropout; unset: 0.
      settings: changes to the recipe, such as {"train.epochs": 50}.
      objective: what is minimised: "imitation" of an expert; "ppo", which plays and learns from rewards alone; or
        "advantage", "filtered" or "clone", which learn from a log. Unset: what is usual in the domain.
    out: the run folder; unset, for a domain: runs/DOMAIN-METHOD-PRESET-SEED.
    source: a run with the same training (TENT and CoTTA train like Vanilla); its weights are copied instead of trained.
    device: unset: CUDA if available.
    threads: CPU threads; unset: UAT_THREADS, or one. Results differ only in floating-point rounding.
    Under torchrun, the processes share every batch, and the first process writes the run (see `uat.training.ranks`).
    """
    about = {"method": method, "preset": preset, "seed": seed, "settings": settings, "objective": objective}
    whole = resolved(config, about)
    if not isinstance(config, RunConfig) and out is None:
        out = default_folder(whole)
    how = {"resume": resume, "source": source, "device": device, "threads": threads, "progress": progress}
    return trainer.train(whole, check_path(out, "out"), **how)


def resolved(config: RunConfig | Domain | str, about: Mapping[str, Any]) -> RunConfig:
    """Return the config itself, or compose that of a domain; None in `about` stands for an argument not given."""
    given = {name: value for name, value in about.items() if value is not None}
    if not isinstance(config, RunConfig):
        return composed(config, given).settled()
    if given:
        name, value = next(iter(given.items()))
        raise ValueError(
            f"{name}={shown(value)} goes with a domain, and config= is a whole RunConfig: change it by uat.override"
        )
    return config.settled()


def composed(domain: Any, about: Mapping[str, Any]) -> RunConfig:
    """Compose the config of a training on a domain from the other arguments of `train`."""
    if not isinstance(domain, str | Domain) and adapted(domain) is None:
        raise ValueError(f"config={shown(domain)} must be RunConfig, a domain, or the name of one")
    try:
        lookup("domain", known_as(domain)[0], DOMAINS)
    except ValueError as error:
        raise ValueError(f"config={shown(domain)}: {error}") from None
    return compose(domain, **about)
