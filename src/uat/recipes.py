"""Recipes: the settings under which a method is trained in a domain, with working defaults for every domain.

A domain may name a module with published settings (`DomainEntry.recipes`), which is imported when a recipe of that
domain is asked for. All others take the defaults below.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from uat.config import PRESETS, EvaluationConfig, RunConfig, TrainConfig, lookup, override, setting_names
from uat.domains import DOMAINS
from uat.domains import known_as as domain_known_as
from uat.files import safe_name
from uat.methods import METHODS
from uat.methods import known_as as method_known_as
from uat.objectives import OBJECTIVES, has_own_phases
from uat.registry import is_address

Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipes:
    """The settings of one domain that differ from the defaults of its configs."""

    backbone: Settings = field(default_factory=dict)
    """Settings of every method whose config has them."""
    training: Settings = field(default_factory=dict)
    """Training settings of every method."""
    methods: Mapping[str, Settings] = field(default_factory=dict)
    """Method -> settings; a variant takes those of its family (see `family`)."""
    presets: Mapping[str, Settings] = field(default_factory=dict)
    """Preset -> settings; smoke runs in seconds, quick shows the effect in minutes on two cores."""
    preset_methods: Mapping[tuple[str, str], Settings] = field(default_factory=dict)
    """(preset, method) -> settings."""


SMALL: Settings = {"method.d_model": 16, "method.num_heads": 2, "method.num_layers": 2, "method.d_ff": 32}
DEFAULT = Recipes(
    presets={
        "smoke": {
            "train.epochs": 4,
            "train.batch_size": 16,
            "train.validate_every": 2,
            "train.validation_episodes": 16,
            "evaluation.episodes": 16,
            **SMALL,
        },
        "quick": {
            "train.epochs": 120,
            "train.batch_size": 128,
            "train.validation_episodes": 256,
            "evaluation.episodes": 1024,
        },
        "paper": {},
    }
)
"""The recipes of domains without recipes of their own, such as a user's."""


def recipe(
    domain: str, method: str, preset: str = "paper", *, seed: int = 0, objective: str | None = None
) -> RunConfig:
    """Return the settings under which a method is trained in a domain: published ones if they exist, else defaults.

    objective: what is minimised, such as "ppo"; unset: the domain's usual objective.
    """
    lookup("domain", domain, DOMAINS)
    lookup("method", method, METHODS)
    lookup("preset", preset, PRESETS)
    name = usual_objective(domain, method) if objective is None else lookup("objective", objective, OBJECTIVES)
    learnt_by = OBJECTIVES[name]
    config = RunConfig(
        domain_name=domain,
        method_name=method,
        preset=preset,
        seed=seed,
        domain=DOMAINS[domain].config(),
        method=METHODS[method].configure(),
        train=TrainConfig(),
        evaluation=EvaluationConfig(),
        objective_name=name,
        objective=learnt_by.config(),
    )
    of_domain = recipes_of(domain)
    for settings in (
        DOMAINS[domain].settings,
        shared(config, of_domain.backbone),
        of_domain.training,
        of_domain.methods.get(family(method), {}),
        shared(config, of_domain.presets.get(preset, {})),
        of_domain.preset_methods.get((preset, method), {}),
        shared(config, learnt_by.settings),
        shared(config, learnt_by.presets.get(preset, {})),
    ):
        config = override(config, settings)
    return config


def usual_objective(domain: str, method: str) -> str:
    """Return the objective of a domain unless another is named; methods that define their own training keep it."""
    entry = DOMAINS[domain]
    return "imitation" if has_own_phases(METHODS[method].policy) else entry.objective


def recipes_of(domain: str) -> Recipes:
    """Return the published recipes of a domain, or the defaults."""
    module = DOMAINS[domain].recipes
    return DEFAULT if module is None else importlib.import_module(module).RECIPES[domain]


def compose(
    domain: Any,
    method: Any = "uat",
    preset: str = "paper",
    *,
    seed: int = 0,
    settings: Settings | None = None,
    objective: str | None = None,
) -> RunConfig:
    """Return the recipe of a domain and a method, given by name or as objects, with some settings changed.

    domain: a name, an address such as "python:bandit:Bandit", or an object;
    method: a name, an address, a policy class, or a config, which replaces the recipe's;
    settings: what differs from the recipe, such as {"train.epochs": 50};
    objective: what is minimised, such as "ppo"; unset: the domain's usual objective.
    """
    (domain_name, own_domain), (method_name, own_method) = domain_known_as(domain), method_known_as(method)
    config = recipe(domain_name, method_name, preset, seed=seed, objective=objective)
    if own_domain is not None:
        config = replace(config, domain=own_domain)
    if own_method is not None:
        config = replace(config, method=own_method)
    return override(config, settings or {})


def default_folder(config: RunConfig) -> Path:
    """Return the default run folder of a config: runs/DOMAIN-METHOD-PRESET-SEED."""
    domain, method = (name.rpartition(":")[2] for name in (config.domain_name, config.method_name))
    learnt_by = "" if config.objective_name == DOMAINS[config.domain_name].objective else f"-{config.objective_name}"
    return Path("runs") / safe_name(f"{domain}-{method}{learnt_by}-{config.preset}-{config.seed}")


def pairs() -> list[tuple[str, str]]:
    """Return every pair of a domain and a method that serves it."""
    return [(domain, name) for domain in DOMAINS for name, method in METHODS.items() if method.serves(domain)]


def shared(config: RunConfig, settings: Settings) -> Settings:
    """Return the domain's settings for all methods, without those that this method's config does not have."""
    known = setting_names(config)
    return {name: value for name, value in settings.items() if name in known or not name.startswith("method.")}


def family(method: str) -> str:
    """Return the method whose published settings a variant shares: `uat` for `uat-no-kv`."""
    return method if is_address(method) else method.split("-")[0]
