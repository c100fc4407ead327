"""`import uat`: the names a user may rely on, and nothing done along the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import uat

PUBLIC = [
    "DOMAINS",
    "METHODS",
    "UAT",
    "Assets",
    "Batch",
    "Box",
    "Clock",
    "Discrete",
    "Domain",
    "DomainEntry",
    "FeedbackConfig",
    "Items",
    "Method",
    "Metric",
    "Named",
    "Policy",
    "Recording",
    "Run",
    "RunConfig",
    "Score",
    "Session",
    "Simulator",
    "Spec",
    "Step",
    "Sweep",
    "Trajectory",
    "Transition",
    "UATConfig",
    "Vanilla",
    "VanillaConfig",
    "Vector",
    "Weights",
    "audit",
    "corrupt",
    "episodes",
    "evaluate",
    "load",
    "override",
    "recipe",
    "register_domain",
    "register_method",
    "save",
    "train",
    "train_together",
    "tune",
    "watch",
]
"""A name that leaves this list breaks users' code; a name that joins it is kept forever."""

OPTIONAL = ["tyro", "rich", "tensorboard", "hypothesis", "pytest", "matplotlib", "scipy", "pandas", "polars", "sklearn"]
OPTIONAL += [
    "gymnasium",
    "optuna",
    "sqlalchemy",
    "ray",
    "wandb",
    "mlflow",
    "onnx",
    "onnxruntime",
    "yfinance",
    "akshare",
    "talib",
    "docutils",
]


def test_the_public_names_are_these() -> None:
    assert sorted(uat.__all__) == sorted(PUBLIC)
    assert all(getattr(uat, name) is not None for name in PUBLIC)
    assert uat.__version__.count(".") >= 2


def test_a_name_that_is_not_there_is_an_attribute_error_and_a_module_is_found() -> None:
    with pytest.raises(AttributeError, match="module 'uat' has no attribute 'trian'"):
        _ = uat.trian  # type: ignore[attr-defined]
    assert uat.recipes.recipe is uat.recipe  # type: ignore[attr-defined]
    assert set(uat.__all__) <= set(dir(uat))


IMPORT = """
import json, logging, os, random, signal, sys, threading, time, warnings

OPTIONAL = json.loads(sys.argv[1])

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in OPTIONAL:
            raise ImportError(f"{name} is blocked")

import numpy as np
import torch

def surroundings():
    return {
        "torch seed": (torch.initial_seed(), hash(torch.get_rng_state().numpy().tobytes())),
        "other seeds": (hash(random.getstate()), hash(np.random.get_state()[1].tobytes())),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()),
        "precision": (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32,
                      torch.backends.cudnn.allow_tf32, str(torch.get_default_dtype())),
        "modes": (torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
                  torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "process": (sorted(os.environ.items()), os.getcwd(), str(signal.getsignal(signal.SIGINT)),
                    str(signal.getsignal(signal.SIGTERM)), sys.excepthook.__qualname__),
        "messages": (len(warnings.filters), len(logging.getLogger().handlers), logging.getLogger().level),
    }

sys.meta_path.insert(0, Blocked())
before, start = surroundings(), time.perf_counter()
import uat
for name in uat.__all__:  # each is imported when it is first asked for
    getattr(uat, name)
seconds = time.perf_counter() - start
after = surroundings()
result = {
    "seconds": seconds,
    "loaded": [name for name in OPTIONAL if name in sys.modules],
    "changed": [name for name in before if before[name] != after[name]],
    "cuda": torch.cuda.is_initialized(),
}
print("RESULT" + json.dumps(result))
"""


def import_in_a_new_process(bytecode: Path | None = None) -> tuple[dict[str, Any], str]:
    """Import in a new process and return its output. Bytecode may be kept in a folder of the test, as if installed."""
    surroundings = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    surroundings |= {} if bytecode is None else {"PYTHONPYCACHEPREFIX": str(bytecode)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT, json.dumps(OPTIONAL)],
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed, _, result = done.stdout.partition("RESULT")
    return json.loads(result), printed + done.stderr


def test_importing_needs_nothing_optional_and_does_nothing_but_import() -> None:
    result, printed = import_in_a_new_process()
    assert printed == ""
    assert result["loaded"] == []
    assert result["changed"] == []
    assert not result["cuda"]


@pytest.mark.slow
def test_importing_takes_little_longer_than_importing_torch(tmp_path: Path) -> None:
    """The best of three after the first, which compiles; other work on the machine only ever adds."""
    seconds = [import_in_a_new_process(tmp_path)[0]["seconds"] for _ in range(4)]
    assert min(seconds[1:]) < 0.3
