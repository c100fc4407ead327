"""Hostile values: command-line arguments, JSON, bytes of files, and Python objects."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

WORDS = (
    *("nan", "inf", "-inf", "1e39", "-1e39", "1e400", "-1", "0", "1.5", "1e-400", "-0.0", "1e12", "1e-30"),
    *("10000000", "65536", "1000000", "1000", "1000000000000", "9" * 50, "9" * 5000, "-9223372036854775809"),
    *(
        "",
        " ",
        "x",
        "None",
        "True",
        "[]",
        "{}",
        "[" * 200,
        "1,2",
        "1_000",
        "１２",
        "0x10",
        " 5",
        "+7",
        "1e3",
        "-",
        "--",
        "--x",
    ),
    *("../../x", "..", "/", "/dev/null", "/dev/null/x", "a/../b", "a\\b", "~", "$HOME", "%s%n", "{0}", "\\"),
    *(
        "a\nb",
        "\r",
        "\t",
        "\x1b[31mred\x1b[0m",
        "\x1b]0;t\x07",
        "\x7f",
        "\u202e",
        "\u2028",
        "\x85",
        "ü",
        "\udcff",
        "a\0b",
    ),
    *("x" * 300, "x" * 5000, "mps", "meta", "xyz", "cuda", "cuda:99", "cpu:7", "cpu", "@x", "=", "a=b", "--help", "-h"),
)
"""Texts that a user may type or paste in place of a value."""
JSON_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 1.5, -0.5, 1e39, -1e39, 1e300, math.nan, math.inf, -math.inf, 10**7, 10**12, 10**30),
    *("", "x", "nan", "1", "../../x", "/etc/x", "a\nb", "\x1b[31m", "\0", "\ud800", "x" * 2000, "uat", "darkroom"),
    *([], {}, [[]], [1], ["x"], [None], {"x": 1}, {"kind": "Vector"}, {"": []}, 65536, 10**6),
)


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def hostile_json(random: Random) -> Any:
    return deep(random.choice([3, 60, 300])) if random.random() < 0.04 else copy.deepcopy(random.choice(JSON_VALUES))


def damaged_json(value: Any, random: Random) -> Any:
    """The value with one part replaced, removed, added or renamed."""
    value = copy.deepcopy(value)
    owner, key = _somewhere(value, random)
    if owner is None:
        return hostile_json(random)
    how = random.random()
    if how < 0.6:
        owner[key] = hostile_json(random)
    elif how < 0.75:
        del owner[key]
    elif isinstance(owner, dict):
        owner[random.choice(["../x", "", "new", "\x1b[1m", "value", "format"])] = (
            hostile_json(random) if how < 0.9 else owner.pop(key)
        )
    else:
        owner.insert(0, hostile_json(random))
    return value


def _somewhere(value: Any, random: Random) -> tuple[Any, Any]:
    """A container inside the value, and one of its keys."""
    places: list[tuple[Any, Any]] = []

    def visit(one: Any) -> None:
        for key in list(one) if isinstance(one, dict) else range(len(one)):
            places.append((one, key))
            if isinstance(one[key], dict | list):
                visit(one[key])

    if isinstance(value, dict | list):
        visit(value)
    return random.choice(places) if places else (None, None)


# ---------------------------------------------------------------- bytes


def damaged_bytes(content: bytes, random: Random) -> bytes:
    """Bytes that are flipped, cut, repeated, emptied or replaced."""
    how, at = random.randrange(9), random.randrange(len(content) + 1)
    if how <= 2:
        changed = bytearray(content)
        for _ in range(random.choice([1, 1, 3, 30]) if content else 0):
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
        return bytes(changed)
    if how == 3:
        return content[:at]
    if how == 4:
        return content[at:]
    if how == 5:
        return content[:at] + random.randbytes(random.choice([1, 8, 200])) + content[at:]
    if how == 6:
        return content[:at] + content[at : at + random.choice([1, 10, 1000])] * 2 + content[at:]
    if how == 7:
        width = min(len(content) - at, random.choice([1, 8, 64]))
        return content[:at] + random.choice([b"\0", b"\xff", b"9", b"["]) * width + content[at + width :]
    return random.choice(
        [b"", b"{}", b"[]", b"\n", b"null", b"PK\x03\x04", b"[" * 100_000, random.randbytes(500), b"NaN"]
    )


def damage_json_file(path: Path, random: Random) -> str:
    """Change one part of a JSON or .jsonl file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        path.write_text(dumped(damaged_json(json.loads(text), random)))
        return f"a value of {path.name} changed"
    rows = [json.loads(line) for line in text.splitlines()] or [{}]
    at = random.randrange(len(rows))
    rows[at] = damaged_json(rows[at], random)
    path.write_text("".join(dumped(row) + "\n" for row in rows))
    return f"a value of {path.name} changed, row {at + 1}"


def dumped(value: Any) -> str:
    return json.dumps(value)


def damage_file(path: Path, random: Random) -> str:
    """Damage or remove a file; return a description of the damage."""
    how = random.random()
    if how < 0.45 and path.suffix in (".json", ".jsonl"):
        with contextlib.suppress(ValueError):  # it was damaged before
            return damage_json_file(path, random)
    if how < 0.9:
        path.write_bytes(damaged_bytes(path.read_bytes(), random))
        return f"bytes of {path.name} changed"
    path.unlink()
    if how > 0.96:
        path.mkdir()
        return f"{path.name} became a folder"
    if how > 0.94:
        path.symlink_to("nowhere" if how > 0.95 else path.name)
        return f"{path.name} became a link to nothing"
    return f"{path.name} removed"


# ---------------------------------------------------------------- objects


class Raises:
    """An object of a foreign class that raises an error for every operation."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise KeyError("no array")

    def __repr__(self) -> str:
        raise RuntimeError("no words\nof two lines")

    def __fspath__(self) -> str:
        raise OSError("no path")

    def __index__(self) -> int:
        raise ZeroDivisionError

    def __float__(self) -> float:
        raise ZeroDivisionError


SCALARS: tuple[Callable[[], Any], ...] = (
    *(lambda: None, lambda: "text", lambda: "", lambda: b"x", lambda: math.nan, lambda: math.inf, lambda: -math.inf),
    *(lambda: 1e39, lambda: -1, lambda: 0, lambda: 10**12, lambda: 10**400, lambda: 10**5000, lambda: 1j, lambda: True),
    *(
        lambda: 1.5,
        object,
        list,
        dict,
        tuple,
        set,
        lambda: len,
        lambda: int,
        lambda: ...,
        lambda: Raises(),
        lambda: "a\0b",
    ),
    *(lambda: "../../x", lambda: "\x1b[31m", lambda: "\ud800", lambda: "x" * 5000, lambda: np.float64("nan")),
    *(lambda: np.int8(3), lambda: np.array("x"), lambda: np.array(None), lambda: np.zeros(3), lambda: torch.zeros(3)),
    *(lambda: torch.tensor(1), lambda: torch.zeros(2, device="meta"), lambda: torch.zeros(2, 2).to_sparse()),
    *(lambda: [1, 2], lambda: [[1], [1, 2]], lambda: {"a": 1}, lambda: Path("/dev/null/x"), lambda: np.longdouble(1)),
)


def scalar(random: Random) -> Any:
    return random.choice(SCALARS)()


TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sparse": lambda x: x.to_sparse(),
    "on meta": lambda x: x.to("meta"),
    "quantised": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8),
    "complex": lambda x: x.to(torch.complex64),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "float8": lambda x: x.float().to(torch.float8_e4m3fn),
    "double": lambda x: x.double(),
    "int8": lambda x: x.to(torch.int8),
    "bool": lambda x: x.bool(),
    "negated": lambda x: -x,
    "with a gradient": lambda x: x.float().requires_grad_(),
    "transposed": lambda x: x.mT if x.dim() > 1 else x[None],
    "one row short": lambda x: x[:-1],
    "one axis more": lambda x: x[None],
    "one axis less": lambda x: x[0] if x.dim() else x,
    "flat": lambda x: x.reshape(-1),
    "empty": lambda x: x[:0],
    "nested": lambda x: torch.nested.nested_tensor([x.float().reshape(-1), x.float().reshape(-1)[:1]]),
    "repeated without memory": lambda x: x[..., :1].expand(x.shape) if x.dim() else x,
    "a list": lambda x: x.tolist(),
    "a ragged list": lambda x: [x.tolist(), [1]],
    "text": lambda x: np.array(x.tolist()).astype(str),
    "objects": lambda x: np.array(x.tolist(), dtype=object),
    "masked": lambda x: np.ma.masked_array(x.numpy(), mask=True),
    "unsigned": lambda x: np.full(x.shape, 2**64 - 1, dtype=np.uint64),
    "long doubles": lambda x: x.numpy().astype(np.longdouble),
    "dates": lambda x: np.zeros(x.shape, dtype="M8[D]"),
    "records": lambda x: np.zeros(x.shape, dtype=[("a", "f4")]),
    "other end first": lambda x: x.numpy().astype(x.numpy().dtype.newbyteorder()),
    "read-only": lambda x: _read_only(x.numpy().copy()),
    "backwards": lambda x: x.numpy()[::-1],
    "a matrix": lambda x: np.asmatrix(x.reshape(-1).numpy()),
    "ones": torch.ones_like,
    "zeros": torch.zeros_like,
    "False": lambda x: torch.zeros_like(x, dtype=torch.bool),
    "10**12": lambda x: torch.full(x.shape, 10**12),
    "-5": lambda x: torch.full_like(x.long(), -5),
}
INSIDE: tuple[float, ...] = (math.nan, math.inf, -math.inf, 1e39, -1e39, 1e30, 1e12, 1e20, -1, 2**31, 1e-45, 99, 0.5)
"""Numbers to insert at one position of a tensor."""


def _read_only(x: Any) -> Any:
    x.flags.writeable = False
    return x


def odd_tensor(good: torch.Tensor, random: Random) -> tuple[str, Any]:
    """A valid tensor made odd, and a description of the change."""
    how = random.random()
    if how < 0.25:
        value = scalar(random)
        return f"of type {type(value).__name__}", value
    if how < 0.55:
        number, at = random.choice(INSIDE), random.randrange(max(1, good.numel()))
        if good.dtype == torch.bool:
            changed = good.clone()
            changed.view(-1)[at] = ~changed.view(-1)[at]
            return f"flipped at {at}", changed
        changed = good.double().clone()
        changed.view(-1)[at] = number
        whole = not good.is_floating_point() and math.isfinite(number) and abs(number) < 2**62
        return f"with {number} at {at}", changed.long() if whole else changed
    name = random.choice(list(TENSORS))
    try:
        return name, TENSORS[name](good)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return "None", None
