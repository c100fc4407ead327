"""Wrong arguments of `load`, `save`, `train` and similar functions are refused by name, and nothing is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import uat
from tests.builders import SPECS, build_random
from uat.files import check_path


class Odd:
    """Raises an error for every operation."""

    def __repr__(self) -> str:
        raise RuntimeError("no name")


class PathThatRaises:
    """A path-like object that raises an error when its path is read."""

    def __fspath__(self) -> str:
        raise OSError("no path")


NO_PATHS: dict[str, Any] = {
    "None": None,
    "number": 1.5,
    "bytes": b"run",
    "list": ["run"],
    "array": np.zeros(3),
    "tensor": torch.zeros(2),
    "class": Path,
    "odd": Odd(),
    "raises": PathThatRaises(),
    "empty": "",
    "null": "a\0b",
    "long": "x" * 300,
    "surrogate": "\ud800",
}
"""Values that cannot be the name of a file or folder."""


def policy(method: str = "uat") -> Any:
    return build_random(method, SPECS["vector-discrete"], dtype=torch.float32)


def not_none(path: Any) -> Any:
    """Without a source there is nothing to refuse."""
    return 0 if path is None else path


TAKE_PATHS: dict[str, Callable[[Any], Any]] = {
    "load": uat.load,
    "save": lambda path: uat.save(path, policy(), "uat"),
    "evaluate": uat.evaluate,
    "Run.open": uat.Run.open,
    "train": lambda path: uat.train(uat.recipe("darkroom", "uat", "quick"), path),
    "source": lambda path: uat.train(uat.recipe("darkroom", "uat", "quick"), "out", source=not_none(path)),
    "train_together": lambda path: uat.train_together([uat.recipe("darkroom", "uat", "quick")], [path]),
}
"""All functions that take a path."""


@pytest.fixture(autouse=True)
def _in_a_folder_that_stays_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", NO_PATHS.values(), ids=NO_PATHS)
@pytest.mark.parametrize("entrance", TAKE_PATHS)
def test_what_is_no_path_is_refused_by_its_name(entrance: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"(path|run|out|outs\[0\]|source)=.* (must be a path|is not the name of)"):
        TAKE_PATHS[entrance](value)


def test_any_other_name_is_a_path() -> None:
    for name in (".", "/", "a/b", Path("ü")):
        assert check_path(name, "path") == Path(name)


@pytest.mark.parametrize("value", [None, 3, object(), Odd(), [], torch.zeros(2), uat.RunConfig])
def test_what_is_no_config_is_not_trained(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^config=.* must be RunConfig"):
        uat.train(value, "out")
    with pytest.raises(ValueError, match=r"^configs\[0\]=.* must be RunConfig"):
        uat.train_together([value], ["out"])
    with pytest.raises(ValueError, match=r"^configs=3 must be Sequence"):
        uat.train_together(3, ["out"])  # pyright: ignore[reportArgumentType]


BAD_SAVES: dict[str, tuple[Callable[[], Any], str]] = {
    "no policy": (lambda: uat.save("p", None, "uat"), "policy=None must be Policy"),  # pyright: ignore[reportArgumentType]
    "a module": (lambda: uat.save("p", torch.nn.ReLU(), "uat"), "policy=ReLU() must be Policy"),  # pyright: ignore[reportArgumentType]
    "another method": (lambda: uat.save("p", policy(), "vanilla"), "is a Vanilla with a VanillaConfig; the policy is"),
    "unknown method": (lambda: uat.save("p", policy(), "wat"), "unknown method_name 'wat'"),
    "no method": (lambda: uat.save("p", policy(), 3), "method_name=3 must be str"),  # pyright: ignore[reportArgumentType]
    "an ablation": (lambda: uat.save("p", policy(), "uat-no-action"), "sets {'use_action': False}; the policy's"),
    "no weights": (lambda: uat.save("p", policy(), "uat", weights=3), "weights=3 must be Mapping"),  # pyright: ignore[reportArgumentType]
    "a tensor of weights": (
        lambda: uat.save("p", policy(), "uat", weights=torch.zeros(2)),  # pyright: ignore[reportArgumentType]
        "must be Mapping",
    ),
    "few weights": (lambda: uat.save("p", policy(), "uat", weights={"a": torch.zeros(1)}), "the weight a is unknown"),
    "lists": (
        lambda: uat.save("p", policy(), "uat", weights=dict.fromkeys(policy().state_dict(), 1)),  # pyright: ignore[reportArgumentType]
        "must be a tensor with values, got 1",
    ),
    "no values": (lambda: uat.save("p", policy().to("meta"), "uat"), "must be a tensor with values"),
    "a domain's name": (lambda: uat.save("p", policy(), "uat", domain="darkroom"), "must be the config of a domain"),
}


@pytest.mark.parametrize("name", BAD_SAVES)
def test_a_policy_that_could_not_be_loaded_is_not_saved(name: str) -> None:
    act, said = BAD_SAVES[name]
    with pytest.raises(ValueError, match=re.escape(said)):
        act()
