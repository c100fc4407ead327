"""Names of runs, which decide what a study finds done: a change that renames no run leaves them alone.

One line each: domain, method, preset, seed and settings, a tab, and the name. A renamed setting keeps the names of its
runs, and so does a new one at its default. New pairs of a domain and a method add lines:

    python -m tests.golden.identities
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from uat.config import PRESETS, RunConfig, override
from uat.recipes import pairs, recipe

FILE = Path(__file__).parent / "identities.tsv"

CHANGED: list[tuple[str, str, dict[str, Any]]] = [
    ("darkroom", "uat", {"method.decay": 0.5, "seed": 3}),
    ("darkroom", "uat", {"method.max_positions": 151, "train.random_start": True, "domain.schedule": "cyclic"}),
    ("darkroom", "uat", {"feedback.noise": 2.0, "feedback.reward": "shuffled", "feedback.delay": 3}),
    ("darkroom", "uat-no-kv", {"method.d_utility": 8, "train.precision": "fp64"}),
    ("darkroom", "gtrxl", {"method.dropout": 0.3, "domain.size": 6}),
    ("darkroom", "dt", {"method.include_actions": True}),
    ("sepsis", "uat", {"domain.reward_scale": 20.0, "method.decay": 0.99}),
    ("sepsis", "cadm", {"method.members": 3}),
    ("sepsis", "uat", {"domain.task": "aligned"}),
    ("sepsis", "iql", {"domain.task": "aligned", "method.random_share": 0.5, "method.random_steps": 10}),
    ("markets", "deeptrader", {"domain.days": 300, "seed": -1}),
    ("movielens", "adt", {"domain.delay": 5, "feedback.action": "null"}),
]
"""Settings that are not a recipe's."""


def configs() -> Iterator[tuple[str, RunConfig]]:
    for domain, method in pairs():
        for preset in PRESETS:
            yield f"{domain} {method} {preset} 0 {{}}", recipe(domain, method, preset)
    for domain, method, settings in CHANGED:
        config = override(recipe(domain, method, "quick"), settings)
        yield f"{domain} {method} quick {config.seed} {json.dumps(settings, separators=(',', ':'))}", config


def lines() -> list[str]:
    return [f"{what}\t{config.identity()}" for what, config in configs()]


if __name__ == "__main__":
    FILE.write_text("".join(f"{line}\n" for line in lines()))
