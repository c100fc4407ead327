"""The quick checks accept nothing that the thorough checks refuse, and change no value, type or message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.builders import SPECS
from uat.checks import MOST_NUMBER, check_actions, check_mask, check_observations, check_rewards
from uat.serving import input_checks
from uat.serving.input_checks import InputChecks
from uat.spec import Spec

STREAMS = 2
Check = Callable[[Any, Spec], Any]
FIELDS: dict[str, tuple[Check, Check]] = {
    "observations": (
        lambda x, spec: InputChecks(spec, STREAMS).observations(x),
        lambda x, spec: check_observations(x, spec, (STREAMS,)),
    ),
    "rewards": (
        lambda x, spec: InputChecks(spec, STREAMS).rewards(x),
        lambda x, spec: check_rewards(x, spec, (STREAMS,)),
    ),
    "actions": (
        lambda x, spec: InputChecks(spec, STREAMS).actions(x),
        lambda x, spec: check_actions("action", x, spec, (STREAMS,)),
    ),
    "allowed": (
        lambda x, spec: InputChecks(spec, STREAMS).allowed(x),
        lambda x, spec: check_mask("allowed", x, (STREAMS, spec.action.count)),
    ),
}
every_field = pytest.mark.parametrize("field", FIELDS)
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def outcome(check: Check, value: Any, spec: Spec) -> Any:
    """Return the dtype and numbers of the result, or the error message."""
    try:
        found = torch.as_tensor(check(value, spec))
    except ValueError as error:
        return str(error)
    return found.dtype, found.tolist()


def assert_same(field: str, value: Any, spec: Spec) -> None:
    lean, thorough = FIELDS[field]
    found, expected = outcome(lean, value, spec), outcome(thorough, value, spec)
    if isinstance(found, str) and found.startswith("allowed: every stream"):  # a check that comes after
        assert not isinstance(expected, str)
    else:
        assert found == expected, f"{field}: {value!r}"


KINDS: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "float32": lambda x: x.astype(np.float32),
    "float64": lambda x: x.astype(np.float64),
    "float16": lambda x: x.astype(np.float16),
    "int64": lambda x: x.astype(np.int64),
    "int32": lambda x: x.astype(np.int32),
    "bool": lambda x: x.astype(bool),
    "text": lambda x: x.astype(str),
    "big-endian": lambda x: x.astype(">f8"),
    "reversed": lambda x: x[::-1],
    "every-second": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "transposed": lambda x: np.asfortranarray(x),
    "list": lambda x: x.tolist(),
    "tuple": lambda x: tuple(x.tolist()),
    "list-of-rows": list,
    "list-of-tensors": lambda x: list(torch.as_tensor(x)),
    "tensor": lambda x: torch.as_tensor(x.copy()),
    "tensor-int": lambda x: torch.as_tensor(x.astype(np.int64)),
    "tensor-bfloat16": lambda x: torch.as_tensor(x.copy()).bfloat16(),
    "tensor-with-gradient": lambda x: torch.as_tensor(x.astype(np.float32)).requires_grad_(),
    "tensor-every-second": lambda x: torch.as_tensor(np.repeat(x, 2, axis=-1))[..., ::2],
    "parameter": lambda x: torch.nn.Parameter(torch.as_tensor(x.astype(np.float32))),
    "subclass": lambda x: x.view(type("Other", (np.ndarray,), {})),
    "scalar": lambda x: x.flat[0],
    "one-too-many": lambda x: np.concatenate([x, x[:1]]),
    "one-axis-more": lambda x: x[None],
    "nothing": lambda x: None,
    "ragged": lambda x: [x.tolist(), [[1.0]]],
}
VALUES: dict[str, Callable[[tuple[int, ...]], np.ndarray[Any, Any]]] = {
    "zeros": np.zeros,
    "ones": np.ones,
    "first": lambda shape: np.eye(max(shape))[: shape[0], : shape[-1]] if len(shape) == 2 else np.ones(shape),
    "counting": lambda shape: np.arange(np.prod(shape)).reshape(shape).astype(float),
    "negative": lambda shape: -np.ones(shape),
    "nan": lambda shape: np.where(np.arange(np.prod(shape)).reshape(shape) == 1, np.nan, 0.0),
    "infinities": lambda shape: np.where(np.arange(np.prod(shape)).reshape(shape) % 2 == 1, np.inf, -np.inf),
    "huge": lambda shape: np.full(shape, 1e300),
    "beyond-float32": lambda shape: np.full(shape, 1e39),
    "largest-float32": lambda shape: np.full(shape, float(np.finfo(np.float32).max)),
    "largest": lambda shape: np.full(shape, MOST_NUMBER),
    "beyond-the-largest": lambda shape: np.full(shape, 1.001 * MOST_NUMBER),
}


def shapes(field: str, spec: Spec) -> list[tuple[int, ...]]:
    """Return the valid shape of a field, or the shapes that an action or a mask could be confused with."""
    own = InputChecks(spec, STREAMS)
    return list({"observations": {own.obs_shape}, "rewards": {own.streams}}.get(field, {own.streams, own.shape_BA}))


@pytest.mark.filterwarnings(
    "ignore:invalid value encountered in cast", "ignore:overflow encountered in cast"
)  # of KINDS
@pytest.mark.filterwarnings("ignore:__array__ implementation")
@pytest.mark.parametrize("values", VALUES)
@every_field
@every_spec
def test_quick_and_thorough_checks_agree(spec: Spec, field: str, values: str) -> None:
    for shape in shapes(field, spec):
        for kind in KINDS.values():
            assert_same(field, kind(VALUES[values](shape)), spec)


@given(x=arrays.arrays(np.float32, (STREAMS, 4), elements=st.floats(0, 1, width=32)), off=st.floats(-2e-4, 2e-4))
def test_weights_at_the_edge_of_the_tolerance_are_judged_by_the_thorough_check(
    x: np.ndarray[Any, Any], off: float
) -> None:
    x = (x + 1e-3) / (x + 1e-3).sum(-1, keepdims=True) * (1 + off)
    assert_same("actions", x.astype(np.float32), SPECS["vector-weights"])


@pytest.mark.parametrize("kind", ["float32", "float64", "int64", "list", "tensor", "tensor-int"])
def test_common_input_never_meets_the_thorough_checks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this, the quick check would only cost time."""
    for name in ("check_observations", "check_actions", "check_rewards", "check_mask"):
        monkeypatch.setattr(input_checks, name, None)
    make, discrete = KINDS[kind], InputChecks(SPECS["items-discrete"], STREAMS)
    numbers = InputChecks(SPECS["vector-weights"], STREAMS)
    assert numbers.observations(make(np.ones((STREAMS, 5)))).dtype == np.float32
    assert numbers.rewards(make(np.ones(STREAMS))).dtype == np.float32
    assert numbers.actions(make(np.eye(4)[:STREAMS])).dtype == np.float32
    assert numbers.allowed(np.ones((STREAMS, 4), dtype=bool)).all()
    if kind in ("int64", "tensor-int"):
        assert discrete.observations(make(np.ones(STREAMS))).tolist() == [1, 1]
        assert discrete.actions(make(np.ones(STREAMS))).tolist() == [1, 1]


def test_what_may_not_be_written_to_is_read() -> None:
    x = np.ones((STREAMS, 5), dtype=np.float32)
    x.flags.writeable = False
    assert InputChecks(SPECS["vector-discrete"], STREAMS).observations(x) is x
