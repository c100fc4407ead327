"""Twenty training steps of a tiny policy in a tiny dark room, in double precision: numbers that should not move.

One text file per method, one loss per line, as `repr` writes it. A change that should not change numbers leaves
them alone; one that should rewrites them, and says so in its commit:

    python -m tests.golden.write
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from tests.builders import IN_THE_DARK, small_config
from uat.config import EvaluationConfig, RunConfig, TrainConfig
from uat.domains import DOMAINS
from uat.methods import METHODS
from uat.training import train

STEPS = 20
TRAINED = [name for name in IN_THE_DARK if METHODS[name].policy.trains_as is None]
"""Methods that have a training of their own, in the dark room."""


def file_of(method: str) -> Path:
    return Path(__file__).parent / f"{method}.txt"


def run_config(method: str) -> RunConfig:
    """Everything is set here, so that no recipe or preset moves a curve."""
    return RunConfig(
        domain_name="darkroom",
        method_name=method,
        preset="smoke",
        seed=0,
        domain=DOMAINS["darkroom"].config(size=4, horizon=8, num_worlds=8),
        method=small_config(method),
        train=TrainConfig(
            epochs=STEPS,
            batch_size=8,
            lr=5e-3,
            utility_lr=2e-2,
            lr_schedule="cosine",
            warmup=3,
            validate_every=STEPS,
            validation_episodes=4,
            precision="fp64",
        ),
        evaluation=EvaluationConfig(episodes=4),
    )


def curve(method: str) -> list[float]:
    """The loss of every step, its parts added up."""
    with TemporaryDirectory() as folder:
        rows = train(run_config(method), Path(folder) / "run", device="cpu").rows("metrics.jsonl")
    return [sum(value for name, value in row.items() if name.startswith("loss/")) for row in rows]
