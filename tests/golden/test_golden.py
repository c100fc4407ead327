"""Loss curves that should not move."""

from __future__ import annotations

import math

import pytest

from tests.golden.curves import STEPS, TRAINED, curve, file_of

REWRITE = "if the numbers were meant to move, run `python -m tests.golden.write` and say why in the commit"


def first_difference(found: list[float], expected: list[float]) -> str | None:
    """The first step at which two curves part, in words."""
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=False), start=1):
        if not math.isclose(ours, theirs, rel_tol=1e-9, abs_tol=0):
            return f"step {step} differs first: {ours!r}, expected {theirs!r}"
    return None if len(found) == len(expected) else f"{len(found)} steps, expected {len(expected)}"


@pytest.mark.parametrize("method", TRAINED)
def test_losses_are_the_golden_ones(method: str) -> None:
    assert file_of(method).exists(), f"{method} has no golden curve; run `python -m tests.golden.write {method}`"
    expected = [float(line) for line in file_of(method).read_text().splitlines()]
    assert len(expected) >= STEPS
    difference = first_difference(curve(method), expected)
    assert difference is None, f"{method}: {difference}; {REWRITE}"


def test_every_golden_curve_has_its_method() -> None:
    assert {path.stem for path in file_of("any").parent.glob("*.txt")} == set(TRAINED)


def test_the_first_difference_is_named() -> None:
    assert first_difference([1.0, 2.0], [1.0, 2.0 + 1e-10]) is None
    assert first_difference([1.0, 2.0, 4.0], [1.0, 2.00001, 3.0]) == "step 2 differs first: 2.0, expected 2.00001"
    assert first_difference([1.0], [1.0, 2.0]) == "1 steps, expected 2"
    assert first_difference([math.nan], [1.0]) == "step 1 differs first: nan, expected 1.0"
