"""Published settings, composed: domain, pair of domain and method, preset, preset of the pair. Later ones win."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from uat.config import PRESETS, EvaluationConfig, RunConfig, TrainConfig, lookup, override, setting_names
from uat.domains import DOMAINS
from uat.domains import known_as as domain_known_as
from uat.files import safe_name
from uat.methods import METHODS
from uat.methods import known_as as method_known_as
from uat.registry import is_address

Settings = Mapping[str, Any]

BACKBONE: dict[str, Settings] = {
    "darkroom": {
        "method.d_model": 64,
        "method.num_heads": 4,
        "method.num_layers": 3,
        "method.d_ff": 128,
        "method.dropout": 0.05,
    },
    "sepsis": {
        "method.d_model": 64,
        "method.num_heads": 4,
        "method.num_layers": 3,
        "method.d_ff": 128,
        "method.dropout": 0.2,
    },
    "markets": {
        "method.d_model": 128,
        "method.num_heads": 4,
        "method.num_layers": 4,
        "method.d_ff": 256,
        "method.dropout": 0.05,
    },
    "movielens": {
        "method.d_model": 64,
        "method.num_heads": 4,
        "method.num_layers": 3,
        "method.d_ff": 128,
        "method.dropout": 0.1,
    },
}
"""The paper's table of hyperparameters, its shared rows: the same backbone for every Transformer of a domain."""

TRAINING: dict[str, Settings] = {
    "darkroom": {"train.batch_size": 256, "train.lr": 2e-3, "train.epochs": 500, "train.patience": 100},
    "sepsis": {"train.batch_size": 256, "train.lr": 2e-3, "train.epochs": 500, "train.patience": 500},
    "markets": {  # about 14 batches are one pass over the windows: 500 passes, patience 15, judged after each
        "train.batch_size": 384,
        "train.lr": 2e-3,
        "train.epochs": 7000,
        "train.patience": 210,
        "train.validate_every": 14,
    },
    "movielens": {  # 45 batches are one pass over the windows of ML-1M: 500 passes, patience 60, judged after each;
        # UAT stays at the blind level for 30 to 45 passes before it rises, so that the paper's 15 would cut it off
        "train.batch_size": 256,
        "train.lr": 1e-3,
        "train.epochs": 22_500,
        "train.patience": 2700,
        "train.validate_every": 45,
    },
}
"""The same table, its rows on training."""

PAIRS: dict[tuple[str, str], Settings] = {
    ("darkroom", "uat"): {
        "method.d_utility": 16,
        "method.d_action": 8,
        "method.d_hidden": 32,
        "method.decay": 0.7,
        "train.utility_lr": 2e-2,
    },
    ("sepsis", "uat"): {
        "method.d_utility": 16,
        "method.d_action": 8,
        "method.d_hidden": 32,
        "method.decay": 0.8,
        "train.utility_lr": 2e-2,
    },
    ("sepsis", "cadm"): {  # a model of the world wants many steps, and gives nothing to act on before
        "train.batch_size": 32,
        "train.epochs": 4000,
        "train.patience": 4000,
        "train.validate_every": 200,
    },
    ("markets", "uat"): {
        "method.d_utility": 32,
        "method.d_action": 64,
        "method.d_hidden": 64,
        "method.decay": 0.9,
        "train.utility_lr": 2e-2,
    },
    ("markets", "deeptrader"): {"method.dropout": 0.5},  # its authors', not the Transformers'
    ("movielens", "uat"): {
        "method.d_utility": 16,
        "method.d_action": 8,
        "method.d_hidden": 32,
        "method.decay": 0.95,
        "train.utility_lr": 2e-2,
    },
}
"""The same table, its rows on UAT, and what others need of their own; a variant takes its family's (see `family`)."""

PRESET: dict[tuple[str, str], Settings] = {
    ("darkroom", "smoke"): {
        "train.epochs": 4,
        "train.batch_size": 16,
        "train.validate_every": 2,
        "train.validation_episodes": 16,
        "evaluation.episodes": 16,
        "method.d_model": 16,
        "method.num_heads": 2,
        "method.num_layers": 2,
        "method.d_ff": 32,
    },
    ("darkroom", "quick"): {
        "train.epochs": 120,
        "train.batch_size": 128,
        "train.validation_episodes": 256,
        "evaluation.episodes": 1024,
        "method.dropout": 0.0,
    },
    ("darkroom", "paper"): {"train.precision": "tf32"},
    ("sepsis", "smoke"): {
        "train.epochs": 4,
        "train.batch_size": 16,
        "train.validate_every": 2,
        "train.validation_episodes": 16,
        "evaluation.episodes": 16,
        "method.d_model": 16,
        "method.num_heads": 2,
        "method.num_layers": 2,
        "method.d_ff": 32,
    },
    ("markets", "smoke"): {
        "domain.days": 240,
        "domain.horizon": 8,
        "train.epochs": 4,
        "train.batch_size": 12,
        "train.validate_every": 2,
        "method.d_asset": 8,
        "method.d_model": 16,
        "method.num_heads": 2,
        "method.num_layers": 2,
        "method.d_ff": 32,
    },
    ("sepsis", "quick"): {
        "train.epochs": 120,
        "train.batch_size": 128,
        "train.validation_episodes": 256,
        "evaluation.episodes": 1024,
        "method.dropout": 0.0,
    },
    ("sepsis", "paper"): {"train.precision": "tf32"},
    ("markets", "quick"): {
        "domain.days": 1200,
        "train.epochs": 84,
        "train.batch_size": 96,
        "method.d_model": 64,
        "method.num_layers": 2,
        "method.d_ff": 128,
        "method.d_asset": 16,
    },
    ("markets", "paper"): {"train.precision": "tf32"},
    ("movielens", "smoke"): {
        "domain.users": 150,
        "domain.items": 300,
        "domain.horizon": 20,
        "domain.draws": 2,
        "domain.validation_draws": 1,
        "train.epochs": 4,
        "train.batch_size": 16,
        "train.validate_every": 2,
        "method.d_model": 16,
        "method.num_heads": 2,
        "method.num_layers": 2,
        "method.d_ff": 32,
    },
    ("movielens", "quick"): {
        "domain.items": 300,
        "train.epochs": 1200,
        "train.batch_size": 64,
        "train.lr": 2e-3,
        "train.validate_every": 50,
        "train.patience": 600,
        "method.num_layers": 2,
        "method.dropout": 0.0,
    },
    ("movielens", "paper"): {"train.precision": "tf32"},
}
"""What a preset changes: smoke runs in seconds, quick shows the effect in minutes on two cores."""

SMALL: Settings = {"method.d_model": 16, "method.num_heads": 2, "method.num_layers": 2, "method.d_ff": 32}
ANY_PRESET: dict[str, Settings] = {
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
"""What a preset changes in a domain that has no row above, such as somebody else's: all else is at its default."""

PRESET_PAIRS: dict[tuple[str, str, str], Settings] = {
    ("sepsis", "cadm", "quick"): {
        "train.batch_size": 32,
        "train.epochs": 800,
        "train.patience": 800,
        "train.validate_every": 100,
        "train.validation_episodes": 96,
        "method.members": 2,
        "method.d_hidden": 100,
        "method.num_hidden": 3,
        "method.future_steps": 3,
    },
}
"""What a preset changes for one method of a domain."""


def recipe(domain: str, method: str, preset: str = "paper", *, seed: int = 0) -> RunConfig:
    """The settings under which a method is trained in a domain: published ones, or defaults where there are none."""
    lookup("domain", domain, DOMAINS)
    lookup("method", method, METHODS)
    lookup("preset", preset, PRESETS)
    config = RunConfig(
        domain_name=domain,
        method_name=method,
        preset=preset,
        seed=seed,
        domain=DOMAINS[domain].config(),
        method=METHODS[method].configure(),
        train=TrainConfig(),
        evaluation=EvaluationConfig(),
    )
    pair = PAIRS.get((domain, family(method)), {})
    own = PRESET_PAIRS.get((domain, method, preset), {})
    usual = shared(config, PRESET.get((domain, preset), ANY_PRESET[preset]))
    for settings in (shared(config, BACKBONE.get(domain, {})), TRAINING.get(domain, {}), pair, usual, own):
        config = override(config, settings)
    return config


def compose(
    domain: Any, method: Any = "uat", preset: str = "paper", *, seed: int = 0, settings: Settings | None = None
) -> RunConfig:
    """The recipe of a domain and a method that are at hand, with some settings changed.

    domain: a name, an address such as "python:bandit:Bandit", or an object;
    method: a name, an address, a policy class, or a config, which is taken as it is;
    settings: what differs from the recipe, such as {"train.epochs": 50}.
    """
    (domain_name, own_domain), (method_name, own_method) = domain_known_as(domain), method_known_as(method)
    config = recipe(domain_name, method_name, preset, seed=seed)
    if own_domain is not None:
        config = replace(config, domain=own_domain)
    if own_method is not None:
        config = replace(config, method=own_method)
    return override(config, settings or {})


def default_folder(config: RunConfig) -> Path:
    """The run folder of a config where none is named: runs/DOMAIN-METHOD-PRESET-SEED."""
    domain, method = (name.rpartition(":")[2] for name in (config.domain_name, config.method_name))
    return Path("runs") / safe_name(f"{domain}-{method}-{config.preset}-{config.seed}")


def pairs() -> list[tuple[str, str]]:
    """Every domain with every method that serves it."""
    return [(domain, name) for domain in DOMAINS for name, method in METHODS.items() if method.serves(domain)]


def shared(config: RunConfig, settings: Settings) -> Settings:
    """Settings meant for every method of a domain, without those that this method's config does not have."""
    known = setting_names(config)
    return {name: value for name, value in settings.items() if name in known or not name.startswith("method.")}


def family(method: str) -> str:
    """The method whose published settings a variant shares: `uat-no-kv` is of the family `uat`."""
    return method if is_address(method) else method.split("-")[0]
