"""The flags of `uat bench` and of `python -m uat.bench`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from uat.config import lookup
from uat.methods import METHODS

Case = Literal["rollout", "optimize", "epoch", "together", "step", "memory", "loss", "cold"]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Time every execution path against the plain one and against other libraries' policies, if installed."""

    cases: tuple[Case, ...] = ("rollout", "optimize", "epoch", "together", "step", "memory", "loss", "cold")
    """Cases to measure."""
    methods: tuple[str, ...] = ("vanilla", "uat")
    """Methods to measure."""
    device: str | None = None
    """Device, cpu or cuda; by default CUDA if available."""
    threads: int | None = None
    """CPU threads; by default one for a step (latency) and all cores for the rest (throughput)."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Arithmetic: tf32 and bf16 let a GPU round the inputs of matrix products."""
    repeats: int = 10
    """Timed calls of each rollout, optimize step and epoch, and twenty times as many of a step; fewer of slow ones."""
    quick: bool = False
    """Use tiny sizes to test in seconds that everything runs; the numbers are meaningless."""
    json: bool = False
    """Print JSON instead of tables."""
    out: Path | None = None
    """File to write the rows to, as JSON."""
    plot: Path | None = None
    """File for a plot of the cost of a step against its context (PNG, SVG or PDF)."""

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
            raise ValueError(f"plot={self.plot} draws the cost of a step: add step to the cases")
