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

SMALL = ("method.d_model=32", "method.num_heads=2", "method.d_ff=64")
"""A width that is not the number of steps read at a time: shapes that must not be mistaken for each other."""


IN_LAYOUT = 24 * 1024
"""Most shared memory of a kernel that reads its weights, keys and values into registers: all of them are more."""
ONLY_IN_LAYOUT = (("uat", "_play"), ("uat", "three", "_play"))
EXACT: dict[tuple[str, ...], int] = {
    ("uat", "_step", "_play"): 136,
    ("vanilla", "_step", "_play"): 96,
    ("vanilla", "method.d_model=128", "_play"): 184,
}
"""KB of shared memory of exact products, as `triton_step.memory_taken` has them."""
WIDE, HALF_WIDE = ("method.d_utility=256", "method.d_hidden=128"), ("method.d_utility=64", "method.d_hidden=64")
"""Gates whose weights take much of shared memory."""
ALL = {
    "_pack",
    "_step",
    "_play",
    "rows_backward",
    "_attend_backward",
    "_gates_backward",
    "_weights",
    "_nll_backward",
    "_embed_backward",
    "_adam",
}


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("architecture", "precision", "given"),
    [
        ("90", "fp32", ("uat", *SMALL, "_pack", "_step", "_play")),
        ("90", "tf32", ("uat", "_pack")),
        ("90", "tf32", ("uat", "gates-outside", "_weights")),
        ("90", "tf32", ("uat", "_play")),
        ("90", "tf32", ("uat", "three", "_play")),
        *[pytest.param("86", "fp32", given, marks=pytest.mark.slow) for given in EXACT],
        pytest.param("90", "tf32", ("uat", *SMALL, "_step", "_play"), marks=pytest.mark.slow),
        pytest.param("90", "tf32", ("uat", *WIDE, "_step", "_play"), marks=pytest.mark.slow),
        pytest.param("80", "fp32", ("uat", *HALF_WIDE, "_step", "_play"), marks=pytest.mark.slow),
        pytest.param("90", "tf32", ("uat", "gates-outside"), marks=pytest.mark.slow),
        pytest.param("90", "tf32", ("uat", "vanilla", "dt"), marks=pytest.mark.slow),
        pytest.param("90", "fp32", ("uat", *SMALL), marks=pytest.mark.slow),
        pytest.param("80", "tf32", ("uat",), marks=pytest.mark.slow),
        pytest.param("80", "fp32", ("uat",), marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_and_keep_to_their_registers(
    architecture: str, precision: str, given: tuple[str, ...], tmp_path: Path
) -> None:
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-m", "tests.engines.compile_kernels", architecture, precision, *given],
        cwd=Path(__file__).parents[2],
        env={**surroundings, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    kernels = [json.loads(line) for line in found.stdout.splitlines()]
    only = {word for word in given if word.startswith("_")}
    assert (only or ALL - ({"_gates_backward"} if "gates-outside" in given else set())) <= {
        kernel["kernel"] for kernel in kernels
    }
    most = 4 * SPILLED if {*WIDE, *HALF_WIDE} & {*given} else SPILLED
    for kernel in kernels:
        assert kernel["spilled"] <= most, kernel
        assert kernel["shared"] <= (IN_LAYOUT if given in ONLY_IN_LAYOUT else EXACT.get(given, 160) * 1024), kernel
    if given in EXACT:
        assert max(kernel["shared"] for kernel in kernels) == EXACT[given] * 1024
