"""Conversions between Gymnasium spaces and rows: what comes back is what went in, and other values are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from tests.adapters.envs import Counting
from uat.adapters.gymnasium import GymConfig, GymDomain
from uat.adapters.sources import Factory
from uat.adapters.spaces import ActionConverter, BadValueError, ObservationConverter
from uat.spec import Box, Discrete, Items, Named, Vector

SHAPES = st.sampled_from([(), (1,), (3,), (2, 3)])
IDS = st.one_of(
    st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 9), st.integers(-3, 3)),
    st.builds(lambda nvec: spaces.MultiDiscrete(nvec), st.lists(st.integers(1, 5), min_size=1, max_size=3)),
    st.sampled_from([(1,), (3,), (2, 2)]).map(lambda shape: spaces.MultiBinary(shape)),
)
NUMBERS = st.builds(lambda shape, kind: spaces.Box(-5, 5, shape, kind), SHAPES, st.sampled_from([np.float32, np.int16]))
FLAT = st.one_of(NUMBERS, IDS)
NESTED = st.recursive(
    FLAT,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3).map(spaces.Dict),
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
    ),
    max_leaves=5,
)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return np.array_equal(a, b)


@given(space=NESTED, seed=st.integers(0, 2**31 - 1))
def test_observations_come_back_from_their_rows(space: Any, seed: int) -> None:
    space.seed(seed)
    batch = [space.sample() for _ in range(3)]
    converter = ObservationConverter(space)
    back = converter.values(converter.rows(batch))
    assert all(map(equal, batch, back))
    assert all(space.contains(one) for one in back)


@given(space=FLAT, seed=st.integers(0, 2**31 - 1))
def test_actions_come_back_from_their_rows(space: Any, seed: int) -> None:
    space.seed(seed)
    batch = [space.sample() for _ in range(3)]
    converter = ActionConverter(space)
    back = converter.values(converter.rows(batch))
    assert all(map(equal, batch, back))
    assert all(space.contains(one) for one in back)


@given(space=IDS)
def test_ids_are_all_combinations_of_a_discrete_action(space: Any) -> None:
    converter = ActionConverter(space)
    ids = np.arange(converter.combinations)
    actions = converter.values(ids)
    assert all(space.contains(action) for action in actions)
    assert np.array_equal(converter.rows(actions), ids)
    assert len({np.asarray(action).tobytes() for action in actions}) == len(ids)


@given(numbers=st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=2), whole=st.booleans())
def test_numbers_stay_inside_the_limits(numbers: list[float], whole: bool) -> None:
    space = (
        spaces.Box(-2, 3, (2,), np.int32) if whole else spaces.Box(np.float64(-0.1), np.float64(0.1), (2,), np.float64)
    )
    (action,) = ActionConverter(space).values(np.array([numbers], dtype=np.float32))
    assert space.contains(action)


def spec_of(observations: Any, actions: Any = None) -> Any:
    """The spec of an environment with these spaces."""
    env = Counting()
    env.observation_space = observations
    env.action_space = spaces.Discrete(2) if actions is None else actions
    return GymDomain(GymConfig(), "object:env", Factory("env", lambda: env)).spec


def test_spaces_become_parts_with_readable_names() -> None:
    pose = spaces.Dict({"angle": spaces.Box(-1, 1, (2, 2)), "gear": spaces.Discrete(3)})
    nested = spaces.Dict({"pose": pose, "pair": spaces.Tuple([spaces.MultiBinary(4), spaces.MultiDiscrete([2, 5])])})
    parts = {
        "pose.angle": Vector(4),
        "pose.gear": Items(3),
        "pair.0": Vector(4),
        "pair.1.0": Items(2),
        "pair.1.1": Items(5),
    }
    assert spec_of(nested).obs == Named(parts)
    assert spec_of(spaces.MultiDiscrete([3, 2])).obs == Named({"0": Items(3), "1": Items(2)})
    assert spec_of(spaces.Discrete(6, start=-2)).obs == Items(6)
    assert spec_of(spaces.Box(0, 1, ())).obs == Vector(1)
    assert spec_of(spaces.Box(0, 1, ()), spaces.MultiBinary(3)).action == Discrete(8)
    limits = spaces.Box(np.array([[0, -1]], np.float32), np.array([[1, 2]], np.float32))
    assert spec_of(spaces.Box(0, 1, ()), limits).action == Box(low=(0.0, -1.0), high=(1.0, 2.0))


def test_rows_of_named_parts_are_packed_as_the_spec_packs_them() -> None:
    space = spaces.Dict({"b": spaces.Box(-1, 1, (2,)), "a": spaces.Discrete(4), "c": spaces.MultiDiscrete([2, 3])})
    converter, spec = ObservationConverter(space), spec_of(space)
    space.seed(0)
    rows = converter.rows([space.sample() for _ in range(5)])
    parts = {name: torch.from_numpy(value) for name, value in converter.named(rows).items()}
    assert torch.equal(spec.obs.pack(parts), torch.from_numpy(rows))
    assert {name: tuple(value.shape) for name, value in parts.items()} == {
        "a": (5,),
        "b": (5, 2),
        "c.0": (5,),
        "c.1": (5,),
    }


@pytest.mark.parametrize(
    ("space", "sentence"),
    [
        (spaces.Box(0, 255, (8, 8, 3), np.uint8), "images"),
        (spaces.Dict({"eye": spaces.Box(0, 255, (8, 8), np.uint8)}), "at 'eye' are images"),
        (spaces.Text(5), "Text(1, 5"),
        (spaces.Sequence(spaces.Discrete(2)), "is not supported"),
        (spaces.Box(0, 1, (0,)), "is not supported"),
        (spaces.Dict({}), "holds nothing"),
        (spaces.Dict({"a.b": spaces.Discrete(2), "a": spaces.Dict({"b": spaces.Discrete(2)})}), "the name 'a.b'"),
        (spaces.Discrete(10**9), "Items.count=1000000000 must be"),
    ],
)
def test_other_observations_are_refused(space: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=r"^env: ") as error:
        spec_of(space)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("space", "sentence"),
    [
        (spaces.Box(-np.inf, np.inf, (2,)), "gymnasium.wrappers.TransformAction"),
        (spaces.Box(-1e38, 1e38, (2,)), "no finite limits"),
        (spaces.Box(np.array([0, 1], np.float32), np.array([1, 1], np.float32)), "number 1 is always 1"),
        (spaces.MultiDiscrete([50, 50, 50]), "125,000 combinations"),
        (spaces.MultiBinary(13), "8,192 combinations"),
        (spaces.Dict({"a": spaces.Discrete(2)}), "is not supported"),
        (spaces.Box(0, 1, (0,)), "holds nothing"),
    ],
)
def test_other_actions_are_refused(space: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=r"^env: actions are ") as error:
        spec_of(spaces.Discrete(2), space)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("space", "batch", "sentence", "row"),
    [
        (spaces.Box(-1, 1, (2,)), [[0, 0], [0, np.inf]], "inf as number 1", 1),
        (spaces.Box(-1, 1, (2,)), [[0, 0], [0]], "of shape (1,)", 1),
        (spaces.Box(-1, 1, (2,)), [[0, 0], "no"], "of shape ()", 1),
        (spaces.Discrete(3, start=1), [1, 3, 4], "the id 4 as its observation, where its space has 1 to 3", 2),
        (spaces.Discrete(3), [0.5], "the id 0.5", 0),
        (spaces.MultiDiscrete([2, 2]), [[0, 1], [0, -1]], "the id -1 as its observation at '1'", 1),
        (spaces.Dict({"a": spaces.Discrete(2)}), [{"b": 1}], "without the part 'a'", 0),
        (spaces.Tuple([spaces.Discrete(2)]), [(1,), 3], "without the part '0'", 1),
    ],
)
def test_values_outside_their_space_are_refused(space: Any, batch: list[Any], sentence: str, row: int) -> None:
    with pytest.raises(BadValueError) as error:
        ObservationConverter(space).rows(batch)
    assert sentence in str(error.value)
    assert error.value.row == row


def test_masks_are_of_all_ids_or_of_each_element() -> None:
    converter = ActionConverter(spaces.MultiDiscrete([2, 3]))
    whole = converter.allowed(np.array([0, 0, 0, 1, 0, 1], dtype=np.int8))
    assert np.array_equal(whole, converter.allowed((np.array([0, 1]), np.array([1, 0, 1]))))
    with pytest.raises(BadValueError, match="with 5 entries, where its actions have 6"):
        converter.allowed(np.ones(5))
    with pytest.raises(BadValueError, match="cannot be masked"):
        ActionConverter(spaces.Box(0, 1, (2,))).allowed(np.ones(2))
