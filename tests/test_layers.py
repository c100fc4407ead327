"""The arrows: methods and domains never import each other, and the core needs torch, numpy and safetensors alone."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import uat

ROOT = Path(uat.__file__).parent
ON_DISK = {"files", "archives", "tensor_files"}
CORE_TYPES = {"spec", "episode", "clock", "metrics", "contracts", "distributions"}
"""The types that methods and domains exchange."""
MAY_IMPORT: dict[str, set[str]] = {
    "memory": set(),
    "files": {"settings"},
    "archives": {"files"},
    "lock": {"files"},
    "settings": set(),
    "rows": {"files", "settings"},
    "numerics": set(),
    "manifest": set(),
    "registry": {"files", "settings"},
    "tensor_files": {"files"},
    "terminal": set(),
    "threads": {"settings"},
    "episode": set(),
    "clock": {"episode"},
    "spec": {"settings", "clock"},
    "metrics": set(),
    "distributions": {"spec", "noise"},
    "contracts": {"spec", "episode", "distributions"},
    "noise": set(),
    "nn": {"settings", *CORE_TYPES},
    "methods": {"settings", "registry", *CORE_TYPES, "nn", "noise", "acting"},
    "data": {"settings", *CORE_TYPES, "noise", "files", "archives", "memory"},
    "domains": {
        "settings",
        "registry",
        *CORE_TYPES,
        "noise",
        "files",
        "archives",
        "data",
        "acting",
        "channel",
        "memory",
    },
    "adapters": {
        "settings",
        "registry",
        *CORE_TYPES,
        "noise",
        "acting",
        "files",
        "archives",
        "checks",
        "data",
        "domains",
    },
    "acting": {"settings", *CORE_TYPES},
    "channel": {"settings", *CORE_TYPES, "noise"},
    "engines": {
        "settings",
        "threads",
        *CORE_TYPES,
        "noise",
        "nn",
        "methods",
        "domains",
        "acting",
        "feedback",
    },
    "checks": {"settings", *CORE_TYPES},
    "logs": {"settings", *CORE_TYPES, "checks"},
    "feedback": {"settings", *CORE_TYPES, "checks", "noise", "acting", "channel", "domains"},
    "objectives": {"settings", *CORE_TYPES, "noise", "nn", "acting", "methods"},
    "config": {"settings", "registry", *CORE_TYPES, "methods", "domains", "objectives", "feedback"},
    "recipes": {"files", "registry", *CORE_TYPES, "methods", "domains", "objectives", "config"},
    "runs": {
        "manifest",
        "settings",
        "registry",
        "files",
        "lock",
        "tensor_files",
        *CORE_TYPES,
        "methods",
        "domains",
        "config",
        "rows",
    },
    "training": {
        "files",
        "settings",
        *ON_DISK,
        "memory",
        "threads",
        *CORE_TYPES,
        "noise",
        "nn",
        "methods",
        "domains",
        "objectives",
        "acting",
        "engines",
        "config",
        "recipes",
        "runs",
        "terminal",
        "rows",
        "manifest",
        "numerics",
    },
    "evaluation": {
        "adapters",
        "checks",
        "feedback",
        *ON_DISK,
        "settings",
        "threads",
        *CORE_TYPES,
        "noise",
        "nn",
        "data",
        "methods",
        "domains",
        "acting",
        "engines",
        "config",
        "recipes",
        "runs",
        "training",
        "terminal",
    },
    "tuning": {
        "settings",
        "threads",
        "files",
        "tensor_files",
        "lock",
        *CORE_TYPES,
        "noise",
        "methods",
        "domains",
        "config",
        "recipes",
        "runs",
        "training",
        "evaluation",
        "executors",
    },
    "executors": {"files", "threads", "training"},
    "serving": {"threads", "settings", "tensor_files", *CORE_TYPES, "checks", "nn", "methods", "acting", "engines"},
    "flags": set(),
    "bench": {
        *ON_DISK,
        "threads",
        "flags",
        *CORE_TYPES,
        "nn",
        "methods",
        "domains",
        "acting",
        "engines",
        "config",
        "recipes",
        "runs",
        "training",
        "evaluation",
        "serving",
        "terminal",
    },
    "paper": {
        *ON_DISK,
        *CORE_TYPES,
        "acting",
        "config",
        "data",
        "domains",
        "engines",
        "evaluation",
        "executors",
        "flags",
        "lock",
        "manifest",
        "methods",
        "nn",
        "noise",
        "numerics",
        "recipes",
        "rows",
        "runs",
        "settings",
        "terminal",
        "threads",
        "training",
    },
    "cli": {
        "registry",
        "settings",
        "threads",
        "terminal",
        "paper",
        *CORE_TYPES,
        "data",
        "methods",
        "domains",
        "objectives",
        "config",
        "recipes",
        "runs",
        "training",
        "evaluation",
        "executors",
        "tuning",
        "bench",
        "the public API",
        "rows",
    },
    "__main__": {"cli", "terminal"},
}
"""Each file or folder of the package, and which others it may import."""

CORE = {"torch", "numpy", "safetensors"}
CONSOLE = {"tyro", "rich"}


def files(layer: str) -> list[Path]:
    return sorted((ROOT / layer).rglob("*.py")) if (ROOT / layer).is_dir() else [ROOT / f"{layer}.py"]


def imports(tree: ast.AST, *, at_load: bool) -> Iterator[str]:
    """Dotted names that a file imports; with `at_load`, not those inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written from the root"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not (at_load and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            yield from imports(node, at_load=at_load)


def layers_of(file: Path) -> set[str]:
    """Which parts of the package a file imports, also inside functions."""
    found = set()
    for name in imports(ast.parse(file.read_text()), at_load=False):
        package, _, rest = name.partition(".")
        first = rest.split(".")[0]
        if package == "uat" and first != "__version__":
            found.add(first if first in MAY_IMPORT else "the public API")
    return found


def third_party(file: Path, *, at_load: bool) -> set[str]:
    names = {name.split(".")[0] for name in imports(ast.parse(file.read_text()), at_load=at_load)}
    return names - set(sys.stdlib_module_names) - {"uat"}


def test_every_part_of_the_package_has_its_arrows() -> None:
    parts = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert parts - {"__init__"} == MAY_IMPORT.keys()


def test_no_two_parts_may_import_each_other() -> None:
    both = [(a, b) for a, allowed in MAY_IMPORT.items() for b in allowed if a in MAY_IMPORT.get(b, ())]
    assert both == []
    assert "domains" not in MAY_IMPORT["methods"]
    assert "methods" not in MAY_IMPORT["domains"]


@pytest.mark.parametrize("layer", MAY_IMPORT)
def test_layer_imports_only_what_it_may(layer: str) -> None:
    for file in files(layer):
        extra = layers_of(file) - MAY_IMPORT[layer] - {layer}
        assert not extra, f"{file.relative_to(ROOT)} imports {sorted(extra)}"


LOADED_WHEN_USED = {
    **{
        f"engines/triton/{part}.py": {"triton"}
        for part in (
            "acting",
            "adam",
            "attend",
            "block",
            "clock",
            "darkroom",
            "dropout",
            "embed",
            "ends",
            "gates",
            "nll",
            "noise",
            "outer",
            "pack",
            "parts",
            "past",
            "play",
            "rows",
            "sepsis",
            "step",
            "tensor_core_layout",
            "train",
            "weights",
        )
    },
    "data/markets/files.py": {"polars"},
}
"""Files that only each other may import at load time, and the libraries that they may need."""


def test_files_that_need_more_are_imported_inside_functions_alone() -> None:
    modules = tuple("uat." + name.removesuffix(".py").replace("/", ".") for name in LOADED_WHEN_USED)
    for file in (file for file in ROOT.rglob("*.py") if str(file.relative_to(ROOT)) not in LOADED_WHEN_USED):
        assert not any(i.startswith(modules) for i in imports(ast.parse(file.read_text()), at_load=True)), file


@pytest.mark.parametrize("layer", [layer for layer in MAY_IMPORT if layer != "cli"])
def test_the_core_loads_torch_numpy_and_safetensors_alone(layer: str) -> None:
    for file in files(layer):
        extra = third_party(file, at_load=True) - CORE - LOADED_WHEN_USED.get(str(file.relative_to(ROOT)), set())
        assert not extra, f"{file.relative_to(ROOT)} loads {sorted(extra)}"


def test_the_console_libraries_are_imported_by_the_command_line_and_the_progress_bar_alone() -> None:
    users = {str(file.relative_to(ROOT)) for file in ROOT.rglob("*.py") if third_party(file, at_load=False) & CONSOLE}
    assert users == {"cli.py", "training/progress.py"}


def test_the_reader_of_imports_sees_what_it_should() -> None:
    text = "import numpy as np\nif np:\n    from uat.nn import heads\ndef f():\n    import rich.console\n"
    assert list(imports(ast.parse(text), at_load=True)) == ["numpy", "uat.nn.heads"]
    assert list(imports(ast.parse(text), at_load=False)) == ["numpy", "uat.nn.heads", "rich.console"]
