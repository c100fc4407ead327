"""What can be asked of the benchmark: the flags of `uat bench` and of `python -m uat.bench`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from uat.config import lookup
from uat.methods import METHODS

Case = Literal["rollout", "optimize", "epoch", "together", "step", "memory", "loss", "cold"]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Time every path beside its slow twin and, where they are installed, beside other libraries' policies."""

    cases: tuple[Case, ...] = ("rollout", "optimize", "epoch", "together", "step", "memory", "loss", "cold")
    """What to measure."""
    methods: tuple[str, ...] = ("vanilla", "uat")
    """Which methods."""
    device: str | None = None
    """Where to run, cpu or cuda; unset: CUDA if there is one."""
    threads: int | None = None
    """CPU threads; unset: one for a step (latency), all cores for the rest (throughput)."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Arithmetic: tf32 and bf16 let a GPU round the inputs of matrix products."""
    repeats: int = 10
    """Calls timed of each rollout, optimize step and epoch; of a step, twenty times as many. Slow ones get fewer."""
    quick: bool = False
    """Tiny sizes, in seconds: to see that everything runs. Its figures mean nothing."""
    json: bool = False
    """Print JSON instead of tables."""
    out: Path | None = None
    """File to write the rows to, as JSON."""
    plot: Path | None = None
    """File to draw the cost of a step against its context in (PNG, SVG or PDF)."""

    def __post_init__(self) -> None:
        for name in ("threads", "repeats"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        for name in ("cases", "methods"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: name at least one, or leave the flag out")
        for method in self.methods:
            lookup("method", method, METHODS)
        if self.plot is not None and "step" not in self.cases:
            raise ValueError("plot draws the cost of a step: add step to the cases")
