"""Files and functions are short; those that are not are listed here, with the reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import uat

ROOT = Path(uat.__file__).parent
MOST_FILE, MOST_FUNCTION = 400, 60
KERNELS = ROOT / "engines" / "triton"
"""Kernels are exempt: a kernel cannot be split without passing its registers around."""
LONG_FILES = {
    "cli.py": "all commands: one class of options and one function for each",
    "engines/cpu.py": "the NumPy step: one loop over preallocated buffers, and the weights and buffers it needs",
    "evaluation/auditing.py": "the definition of feedback-blindness, its measurements and its sentence, read together",
    "paper/report/figures.py": "one short function for each figure of the paper",
}
LONG_FUNCTIONS: dict[str, str] = {}
"""File and function -> reason."""


def long_files() -> set[str]:
    files = (file for file in ROOT.rglob("*.py") if KERNELS not in file.parents)
    return {str(f.relative_to(ROOT)) for f in files if len(f.read_text(encoding="utf-8").splitlines()) > MOST_FILE}


def functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names of functions, and their numbers of lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def long_functions() -> set[str]:
    return {
        f"{file.relative_to(ROOT)}:{name}"
        for file in ROOT.rglob("*.py")
        if KERNELS not in file.parents
        for name, lines in functions(ast.parse(file.read_text(encoding="utf-8")))
        if lines > MOST_FUNCTION
    }


def test_long_files_are_exceptions_with_a_reason() -> None:
    assert long_files() == LONG_FILES.keys()


def test_long_functions_are_exceptions_with_a_reason() -> None:
    assert long_functions() == LONG_FUNCTIONS.keys()


def test_lines_of_a_function_are_counted_with_its_signature_and_end() -> None:
    text = "class A:\n    def f(\n        self,\n    ):\n        x = 1\n        return x\n"
    assert list(functions(ast.parse(text))) == [("f", 5)]
