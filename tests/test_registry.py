"""Registries: names that are taken, packages that fail, code that is imported only if the user names it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import uat
from uat.config import lookup
from uat.domains.entry import as_entry
from uat.methods import METHODS, as_method
from uat.methods.vanilla import Vanilla, VanillaConfig
from uat.registry import Registry, import_address

CODE = """
import uat
from uat.methods.vanilla import Vanilla, VanillaConfig

class Mine(Vanilla):
    '''A method of another package.

    With a second paragraph.'''
    config: VanillaConfig
"""


class Package:
    """A folder on the path that looks as if pip had installed packages there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, package: str, points: str, **modules: str) -> None:
        info = self.folder / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[uat.methods]\n{points}\n")
        for name, code in modules.items():
            (self.folder / f"{name}.py").write_text(code)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield Package(tmp_path)
    for name in set(sys.modules) - before:
        del sys.modules[name]


def methods() -> Registry[uat.Method]:
    own = {name: METHODS[name] for name in METHODS.own}
    return Registry("method", "uat.methods", own, as_method, reserved=frozenset({"ceiling"}))


# ---------------------------------------------------------------- packages


def test_a_package_adds_a_method_and_is_imported_when_it_is_asked_for(package: Package) -> None:
    package.install("theirs", "mine = their_code:Mine", their_code=CODE)
    registry = methods()
    assert registry["uat"] is METHODS["uat"]
    assert "their_code" not in sys.modules
    assert registry["mine"].summary == "A method of another package"
    assert registry["mine"].config is VanillaConfig
    assert registry.owner("mine") == "theirs 1.0"
    assert list(registry) == [*METHODS.own, "mine"]
    assert registry.problems() == []


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import nothing_of_that_name", "importing their_code:Mine failed with ModuleNotFoundError: No module named"),
        ("raise SystemExit('bye')", "importing their_code:Mine failed with SystemExit: bye"),
        ("raise ValueError('bad day')", "importing their_code:Mine failed with ValueError: bad day"),
        ("x = 1", "importing their_code:Mine failed with AttributeError"),
        ("Mine = 3", "expected a subclass of uat.Policy or a uat.Method, got 3"),
        ("import uat\nclass Mine(uat.Policy): pass", "Mine does not declare its settings: annotate `config`"),
        (CODE + "    config: int", "Mine does not declare its settings"),
        (
            "from dataclasses import dataclass\nimport uat\n@dataclass\nclass C: pass\nclass Mine(uat.Policy):\n"
            "    config: C",
            "Mine does not define features, init_state, step",
        ),
        (
            CODE + "from dataclasses import dataclass\n@dataclass\nclass C: pass\nclass Mine(Vanilla):\n    config: C",
            "config=C must be frozen",
        ),
        (
            CODE + "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass C:\n    x: int\n"
            "class Mine(Vanilla):\n    config: C",
            "C.x needs a default",
        ),
    ],
)
def test_a_package_that_fails_is_named_where_it_is_asked_for_and_all_else_works(
    code: str, why: str, package: Package
) -> None:
    package.install("broken", "mine = their_code:Mine", their_code=code)
    package.install("whole", "good = good_code:Mine", good_code=CODE)
    registry = methods()
    assert list(registry) == [*METHODS.own, "good"]
    (problem,) = registry.problems()
    assert problem.sentence.startswith(f"the method 'mine' of broken 1.0 cannot be used: {why}")
    assert "\n" not in problem.sentence
    with pytest.raises(ValueError, match=r"^the method 'mine' of broken 1\.0 cannot be used"):
        lookup("method", "mine", registry)
    with pytest.raises(ValueError, match="unknown method 'god'; did you mean 'good'"):
        lookup("method", "god", registry)


def test_a_name_that_is_taken_is_refused_with_both_owners(package: Package) -> None:
    package.install("a", "mine = a_code:Mine\nuat = a_code:Mine\nceiling = a_code:Mine", a_code=CODE)
    package.install("b", "mine = b_code:Mine", b_code=CODE)
    registry = methods()
    assert registry.owner("mine") == "a 1.0"
    assert registry["uat"] is METHODS["uat"]
    assert sorted(problem.sentence for problem in registry.problems()) == [
        "the method 'ceiling' of a 1.0 cannot be used: 'ceiling' cannot name a method: rows use it for a reference",
        "the method 'mine' of b 1.0 cannot be used: a 1.0 offers a method of that name, too",
        "the method 'uat' of a 1.0 cannot be used: uat has a method of that name",
    ]
    entry = registry["mine"]
    with pytest.raises(ValueError, match=r"'mine' of notebook is refused: a 1\.0 has a method of that name; choose"):
        registry.register("mine", entry, "notebook")


# ---------------------------------------------------------------- what a program registers


@dataclass(frozen=True, kw_only=True)
class OwnConfig(VanillaConfig):
    twist: float = 0.5
    """A setting of its own."""


class Own(Vanilla):
    """A class of a notebook."""

    config: OwnConfig  # pyright: ignore[reportIncompatibleVariableOverride]


def test_a_class_can_be_registered_again_by_the_same_cell_and_by_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    uat.register_method("own", Own)
    try:
        entry = uat.register_method("own", Own, OwnConfig, summary="again", changes={"twist": 1.0}, domains=("sepsis",))
        assert METHODS["own"] is entry
        assert (entry.summary, entry.configure().twist, entry.serves("darkroom")) == ("again", 1.0, False)
        assert METHODS.owner("own") == __name__
        assert uat.recipe("sepsis", "own", "smoke").method.twist == 1.0
        with pytest.raises(ValueError, match=f"'own' of uat.methods.vanilla is refused: {__name__} has a method"):
            uat.register_method("own", Vanilla, VanillaConfig)
        with pytest.raises(ValueError, match="changes: OwnConfig has no setting 'twits'"):
            uat.register_method("own", Own, changes={"twits": 1.0})
    finally:
        del METHODS["own"]


@pytest.mark.parametrize("name", ["", "a b", "../up", "python:a:B", "random", 3])
def test_a_name_that_cannot_stand_in_rows_and_paths_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="cannot name a method"):
        uat.register_method(name, Own)


@dataclass(frozen=True, kw_only=True)
class RoomConfig:
    size: int = 3


def room(config: RoomConfig) -> Any:
    """A room of some size."""
    return config


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (3, "expected a class or function that makes a domain"),
        (lambda a, b: None, "takes 2 arguments"),
        (lambda a: None, "annotate a with the dataclass of its settings"),
    ],
)
def test_what_cannot_make_a_domain_is_refused(value: Any, why: str) -> None:
    with pytest.raises(TypeError, match=why):
        as_entry(value)


def test_a_function_can_make_a_domain() -> None:
    entry = as_entry(room)
    assert (entry.config, entry.tasks, entry.summary) == (RoomConfig, ("default",), "A room of some size")
    assert entry.build(RoomConfig(size=4)) == RoomConfig(size=4)
    assert as_entry(lambda: 5).build(None) == 5


# ---------------------------------------------------------------- addresses


def test_an_address_is_code_that_is_imported_where_somebody_says_so(package: Package) -> None:
    (package.folder / "their_code.py").write_text(CODE)
    registry = methods()
    with pytest.raises(ValueError, match=r"the method python:their_code:Mine is code.*--trust.*trust=True"):
        lookup("method", "python:their_code:Mine", registry)
    assert "their_code" not in sys.modules
    assert registry.adopt("python:their_code:Mine").config is VanillaConfig
    assert lookup("method", "python:their_code:Mine", registry) == "python:their_code:Mine"


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("python:json", "'python:json' is not an address: expected python:MODULE:NAME"),
        ("python:json;x:y", "is not an address"),
        ("python:/etc/passwd:y", "is not an address"),
        ("python:json:nothing", "python:json:nothing: the module json has no 'nothing'"),
        ("python:no_such_module:x", "python:no_such_module:x cannot be imported: ModuleNotFoundError: No module named"),
    ],
)
def test_an_address_that_leads_nowhere_is_one_sentence(address: str, why: str) -> None:
    with pytest.raises(ValueError) as caught:
        import_address(address)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_address_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"python:json:dumps is not a method: expected a subclass of uat\.Policy"):
        methods().adopt("python:json:dumps")
