"""Objectives: what a training minimises. A third axis, beside methods and domains."""

from __future__ import annotations

from uat.objectives.advantage import Advantage, AdvantageConfig
from uat.objectives.logged import Clone, CloneConfig, Filtered, FilteredConfig
from uat.objectives.objective import Imitation, ImitationConfig, Objective, ObjectiveEntry, has_own_phases
from uat.objectives.ppo import PPO, PPOConfig
from uat.settings import MOST_EPOCHS

__all__ = ["OBJECTIVES", "Imitation", "ImitationConfig", "Objective", "ObjectiveEntry", "PPOConfig", "has_own_phases"]

OBJECTIVES: dict[str, ObjectiveEntry] = {
    "imitation": ObjectiveEntry(
        build=Imitation, config=ImitationConfig, summary="clone the expert, or train as the method defines itself"
    ),
    "ppo": ObjectiveEntry(
        build=PPO,
        config=PPOConfig,
        summary="proximal policy optimization: learn from rewards alone, by playing",
        settings={
            "train.batch_size": 32,
            "train.lr": 5e-4,
            "train.utility_lr": 5e-3,
            "train.lr_schedule": "linear",
            "train.last_lr": 0.1,
            "train.warmup": 5,
            "train.weight_decay": 0.0,
            "train.clip": 0.5,
            "train.validation_episodes": 64,
            "train.patience": MOST_EPOCHS,
            "train.epochs": MOST_EPOCHS,
            "method.dropout": 0.0,
        },
        presets={
            "smoke": {"train.epochs": 4, "train.batch_size": 8, "train.validation_episodes": 8, "train.warmup": 1},
            "quick": {"train.steps": 200_000},
            "paper": {"train.steps": 1_000_000},
        },
    ),
    "clone": ObjectiveEntry(build=Clone, config=CloneConfig, summary="clone the logged actions, whatever they earned"),
    "filtered": ObjectiveEntry(
        build=Filtered,
        config=FilteredConfig,
        summary="clone the best share of a log, by return",
    ),
    "advantage": ObjectiveEntry(
        build=Advantage,
        config=AdvantageConfig,
        summary="clone logged actions by their advantage: learn from the rewards of a log alone",
        settings={"train.lr": 1e-3, "train.utility_lr": 1e-2, "train.patience": 300},
    ),
}
"""All objectives."""
