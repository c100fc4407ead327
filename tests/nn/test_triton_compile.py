"""Kernels compile for GPUs that are not here, within their registers: what the interpreter cannot tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SPILLED = 1024
"""Most bytes that a thread may put off to memory: more, and a kernel becomes many times slower."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "precision", "methods"),
    [("90", "tf32", ("uat", "vanilla", "dt")), ("80", "tf32", ("uat",)), ("80", "fp32", ("uat",))],
)
def test_kernels_compile_and_keep_to_their_registers(
    architecture: str, precision: str, methods: tuple[str, ...], tmp_path: Path
) -> None:
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-m", "tests.nn.compile_kernels", architecture, precision, *methods],
        cwd=Path(__file__).parents[2],
        env={**surroundings, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    kernels = [json.loads(line) for line in found.stdout.splitlines()]
    assert {"_step", "_play", "_rows_backward", "_attend_backward", "_gates_backward", "_outers"} <= {
        kernel["kernel"] for kernel in kernels
    }
    for kernel in kernels:
        assert kernel["spilled"] <= SPILLED, kernel
        assert kernel["shared"] <= 160 * 1024, kernel
