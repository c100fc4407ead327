"""Invalid values are refused with the argument's name, and a value that slips through has no lasting effect."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import uat
from tests.builders import SPECS, build_random
from uat.checks import MOST_NUMBER
from uat.methods import METHODS, Policy
from uat.serving.session import Session


class Raising:
    """An array of a foreign class."""

    def __array__(self, *args: Any, **named: Any) -> Any:
        raise RuntimeError("not\nhere")


def of_no_plain_numbers(shape: tuple[int, ...]) -> dict[str, Any]:
    """Values that have the right shape (if any) but do not hold plain numbers."""
    ones = torch.ones(shape)
    cut = np.ma.masked_array(np.ones(shape), mask=np.ones(shape, dtype=bool))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's words on quantised and nested tensors
        made = {
            "sparse": ones.to_sparse(),
            "quantised": torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8),
            "nested": torch.nested.nested_tensor([ones]),
        }
    return made | {
        "meta": ones.to("meta"),
        "complex tensor": ones.to(torch.complex64),
        "complex": np.ones(shape, dtype=complex),
        "long double": np.ones(shape, dtype=np.longdouble),
        "objects": np.full(shape, None),
        "dates": np.full(shape, np.datetime64("2020-01-01")),
        "texts": np.full(shape, "1"),
        "records": np.zeros(shape, dtype=[("a", float)]),
        "masked": cut,
        "None": None,
        "text": "1.0",
        "bytes": b"\x00" * 8,
        "dictionary": {"a": 1},
        "set": {1, 2},
        "generator": (x for x in [1.0]),
        "function": len,
        "module": np,
        "ragged": [[1.0], [1.0, 2.0]],
        "deep": [[[[[[1.0]]]]]],
        "with a None": [[None] * 5] * 2,
        "huge integers": [[10**400] * 5] * 2,
        "a foreign class": Raising(),
        "list of meta tensors": [ones.to("meta")],
    }


ODD = list(of_no_plain_numbers((1,)))
every_odd_value = pytest.mark.parametrize("odd", ODD)
SPEC = SPECS["vector-discrete"]
SHAPES: dict[str, tuple[int, ...]] = {"obs": (2, 5), "reward": (2,), "action": (2,), "allowed": (2, 4)}


@pytest.mark.parametrize("name", ["obs", "action", "reward", "target", "valid", "allowed"])
@every_odd_value
def test_logs_of_no_plain_numbers_are_refused_by_name(name: str, odd: str) -> None:
    shape = {**{key: (2, *side[1:]) for key, side in SHAPES.items()}, "target": (2,), "valid": (2,)}[name]
    log = {"obs": np.zeros((2, 3, 5)), "action": np.zeros((2, 3), int), "reward": np.zeros((2, 3))}
    value = of_no_plain_numbers((2, 3, *shape[1:]))[odd]
    if value is None and name in ("target", "valid", "allowed"):
        return  # left out
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        uat.episodes(SPEC, **{**log, name: value})


@pytest.mark.parametrize("name", SHAPES)
@every_odd_value
def test_steps_of_no_plain_numbers_are_refused_by_name_and_leave_no_trace(name: str, odd: str) -> None:
    policy = build_random("uat", SPEC, dtype=torch.float32)
    session, untouched = Session(policy, streams=2), Session(policy, streams=2)
    told = {"obs": np.ones((2, 5)), "reward": [0.5, 0.5]}
    session.act(**told)
    untouched.act(**told)
    value = of_no_plain_numbers(SHAPES[name])[odd]
    if value is not None or name in ("obs", "reward"):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            session.act(**{**told, name: value})
    assert_same_thoughts(session, untouched, told)


def assert_same_thoughts(session: Session, untouched: Session, told: dict[str, Any]) -> None:
    """Compare sessions: weights reveal every bit of their memory; ids are compared over several steps."""
    for _ in range(4):
        assert torch.equal(session.act(**told), untouched.act(**told))


# ---------------------------------------------------------------- numbers out of range

TOO_LARGE = (1e39, 1e300, -1e39, 1e20, 1.01e12, np.inf, -np.inf, np.nan)
LARGE = (MOST_NUMBER, -MOST_NUMBER, 1e-45, -0.0)
WEIGHTS = SPECS["vector-weights"]
every_path = pytest.mark.parametrize("path", ["fast", "cached"])


@pytest.mark.parametrize("kind", [np.float64, np.float32, torch.float64, torch.bfloat16, list])
@pytest.mark.parametrize("number", TOO_LARGE)
@pytest.mark.parametrize("name", ["obs", "reward"])
@every_path
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_numbers_that_float32_does_not_square_are_refused(path: Any, name: str, number: float, kind: Any) -> None:
    """A session that has run for some steps also refuses the value, and then continues unchanged."""
    policy = build_random("uat", WEIGHTS, dtype=torch.float32)
    session, untouched = (Session(policy, streams=2, path=path) for _ in range(2))
    told = {"obs": np.ones((2, 5)), "reward": np.full(2, 0.5)}
    for one in (session, untouched):
        one.act(**told)
    with pytest.raises(ValueError, match=f"{name}: expected (finite )?numbers"):
        session.act(**{**told, name: as_kind(np.full(told[name].shape, number), kind)})
    assert_same_thoughts(session, untouched, told)


def as_kind(values: np.ndarray[Any, Any], kind: Any) -> Any:
    if isinstance(kind, torch.dtype):
        return torch.from_numpy(values).to(kind)
    return values.tolist() if kind is list else values.astype(kind)


@pytest.mark.parametrize("number", TOO_LARGE)
@pytest.mark.parametrize("name", ["obs", "reward"])
def test_logs_beyond_float32_are_refused(name: str, number: float) -> None:
    log: dict[str, Any] = {"obs": np.zeros((1, 2, 5)), "action": [[0, 1]], "reward": np.zeros((1, 2))}
    log[name] = np.full(log[name].shape, number)
    with pytest.raises(ValueError, match=f"{name}: expected (finite )?numbers"):
        uat.episodes(SPEC, **log)


def test_a_reward_is_judged_as_it_is_told() -> None:
    """Rewards are checked after scaling: with a scale of a million, 1e-6 of the largest number is too large."""
    spec = replace(WEIGHTS, reward_scale=1e7)
    session = Session(build_random("uat", spec, dtype=torch.float32))
    session.act(np.ones((1, 5)))
    with pytest.raises(ValueError, match="reward: expected numbers from -100000 to 100000, got 1e\\+06 at"):
        session.act(np.ones((1, 5)), reward=[1e-6 * MOST_NUMBER])
    assert session.act(np.ones((1, 5)), reward=[1e5]).isfinite().all()


@pytest.mark.parametrize("method", [m for m, entry in METHODS.items() if not entry.changes])
@pytest.mark.parametrize("number", LARGE)
def test_the_largest_numbers_that_are_taken_do_no_harm(method: str, number: float) -> None:
    """In every method, the answer to the largest accepted numbers and all later answers stay finite."""
    spec = next((spec for spec in SPECS.values() if METHODS[method].policy.unsupported_reason(spec) is None), None)
    if spec is None or spec.obs == uat.Items(11):
        pytest.skip("observes no numbers")
    policy = build_random(method, spec, dtype=torch.float32)
    session = Session(policy, streams=2)
    shape = session._checks.obs_shape
    earned = number / max(1.0, spec.reward_scale)
    for t in range(spec.steps):
        odd = t in (1, 3)
        allowed = None if isinstance(spec.action, uat.Discrete) else np.ones((2, spec.action.count), dtype=bool)
        answer = session.act(
            np.full(shape, number if odd else 0.5), reward=np.full(2, earned if odd else 0.5), allowed=allowed
        )
        assert answer.float().isfinite().all()


@every_path
@pytest.mark.parametrize("spec", [SPECS["vector-weights"], SPECS["vector-discrete"]], ids=["weights", "ids"])
def test_an_answer_that_is_not_finite_is_refused_and_forgotten(spec: uat.Spec, path: Any) -> None:
    """If weights are so large that an ordinary observation overflows, the session reports it and restarts."""
    policy = build_random("vanilla", spec, dtype=torch.float32)
    with torch.no_grad():
        policy.get_parameter("backbone.encoder.linear.weight")[::2, 0] = 1e38
    session, fresh = Session(policy, streams=2, path=path), Session(policy, streams=2, path=path)
    good, bad = np.array([[0, 1, 1, 1, 1]] * 2), np.array([[0, 1, 1, 1, 1], [9, 1, 1, 1, 1]])
    session.act(good)
    with pytest.raises(ValueError, match=r"answer is not finite.* all streams .* begin a new episode"):
        session.act(bad)
    for _ in range(spec.steps):
        assert torch.equal(session.act(good), fresh.act(good))


@every_path
@pytest.mark.parametrize("spec", [SPECS["vector-weights"], SPECS["vector-discrete"]], ids=["weights", "ids"])
def test_an_answer_of_minus_infinity_in_one_stream_is_refused(spec: uat.Spec, path: Any) -> None:
    """Logits that are all -inf would give the id 0 or NaN weights, while the other stream has finite values."""
    policy, obs = build_random("vanilla", spec, dtype=torch.float32), np.eye(5)[:2]
    h_BD: list[torch.Tensor] = []
    hook = policy.get_submodule("backbone.last_norm").register_forward_hook(
        lambda *seen: h_BD.append(seen[2].reshape(2, -1))
    )
    Session(policy, streams=2, path="cached").act(obs)
    hook.remove()
    usual_D, odd_D = h_BD[0]
    turned_D = odd_D - usual_D * (odd_D @ usual_D) / usual_D.square().sum()
    with torch.no_grad():
        policy.get_parameter("head.linear.weight")[:] = -3e38 * turned_D / turned_D.square().sum()
        policy.get_parameter("head.linear.bias")[:] = -1e38
    session = Session(policy, streams=2, path=path)
    with pytest.raises(ValueError, match="answer is not finite"):
        session.act(obs)
    assert session.act(obs[[0, 0]]).float().isfinite().all()


# ---------------------------------------------------------------- masks


LOG: dict[str, Any] = {
    "obs": np.zeros((2, 3, 5)),
    "action": [[0, 1, 2], [3, 0, 0]],
    "reward": [[0.0, 1, 0], [1, 0, 0]],
    "valid": [[True, True, True], [True, True, False]],
}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"valid": [[True, False, True], [True] * 3]}, r"valid: padding may only follow .* at \(0, 2\)"),
        ({"valid": [[True] * 3, [False, True, True]]}, r"valid: every episode must begin with .* at \(1, 0\)"),
        ({"valid": [[True] * 3, [False] * 3]}, r"valid: every episode must begin with .* at \(1, 0\)"),
        ({"allowed": np.zeros((2, 3, 4), bool)}, r"allowed: every step needs .* none at \(0, 0\)"),
        ({"allowed": np.eye(4, dtype=bool)[[[0, 1, 2], [0, 0, 0]]]}, r"target: expected an allowed .* 3 at \(1, 0\)"),
        (
            {"allowed": np.eye(4, dtype=bool)[[[0, 1, 2], [3, 0, 0]]], "target": [[0, 1, 3], [3, 0, 0]]},
            r"target: expected an allowed action at every step, got 3 at \(0, 2\)",
        ),
        ({"obs": np.zeros((0, 3, 5)), "action": np.zeros((0, 3), int), "reward": np.zeros((0, 3))}, "reward: .*0, 3"),
    ],
)
def test_masks_that_make_no_sense_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        uat.episodes(SPEC, **{**LOG, **changes})


def test_padding_may_hold_any_mask_and_a_loss_stays_finite() -> None:
    allowed = np.eye(4, dtype=bool)[[[0, 1, 2], [3, 0, 0]]]
    allowed[1, 2] = False
    policy = build_random("uat", SPEC, dtype=torch.float32)
    total, count = policy.loss(SPEC.clock.batch(uat.episodes(SPEC, **LOG, allowed=allowed)))["imitation"]
    total.backward()
    assert int(count) == 5
    assert all(p.grad is None or p.grad.isfinite().all() for p in policy.parameters())


def test_weights_are_held_in_allowed_assets_alone() -> None:
    halves = np.array([[[0.5, 0.5, 0, 0]]])
    with pytest.raises(ValueError, match=r"target: expected an allowed action"):
        uat.episodes(
            WEIGHTS, obs=np.zeros((1, 1, 5)), action=halves, reward=[[0.0]], allowed=[[[True, False, True, True]]]
        )


@pytest.mark.parametrize(
    ("streams", "sentence"),
    [
        ([0, 0, 1], "restart: expected different stream numbers"),
        ([[0, 1, 2]], "restart: expected stream numbers"),
        ([0.0, 1.0], "restart: expected stream numbers"),
        ([True, False], "restart: expected stream numbers"),
        ({"a": 1}, "restart: expected stream numbers"),
        (np.array([2**63], dtype=np.uint64), "restart: expected stream numbers"),
        ([10**30], "restart: "),
        (torch.tensor([1]).to_sparse(), "restart: expected stream numbers"),
    ],
)
def test_streams_that_cannot_be_meant_do_not_restart(streams: Any, sentence: str) -> None:
    session = Session(build_random("uat", SPEC, dtype=torch.float32), streams=3)
    with pytest.raises(ValueError, match=sentence):
        session.restart(streams)


@pytest.fixture(scope="module")
def long() -> Policy:
    """A policy with room for a million steps, so that memory is the first limit."""
    return build_random("uat", SPEC, dtype=torch.float32, max_positions=1_000_000)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"streams": 0}, "streams=0 must be at least 1"),
        ({"streams": 1.0}, "streams=1.0 must be int"),
        ({"streams": True}, "streams=True must be int"),
        ({"streams": "2"}, "streams='2' must be int"),
        ({"streams": 10**9}, "streams=1000000000 must be .* at most"),
        ({"capacity": 2.5}, "capacity=2.5 must be int"),
        ({"capacity": 10**12}, "capacity=1000000000000 must be .* at most"),
        ({"path": None}, "path=None must be one of"),
        ({"path": "quick"}, "path='quick' must be one of 'auto', 'fast', 'cached'"),
    ],
)
def test_sessions_that_cannot_be_are_refused_by_argument(
    arguments: dict[str, Any], sentence: str, long: Policy
) -> None:
    with pytest.raises(ValueError, match=sentence):
        Session(long, **arguments)


@pytest.mark.parametrize("policy", [None, "uat", SPEC, torch.nn.Linear(1, 1), uat.UAT], ids=repr)
def test_only_policies_have_sessions(policy: Any) -> None:
    with pytest.raises(ValueError, match=r"policy=.* must be Policy"):
        Session(policy)


def test_policies_without_numbers_have_no_sessions() -> None:
    policy = build_random("uat", SPEC, dtype=torch.float32)
    with torch.no_grad():
        policy.head.linear.bias[1] = torch.nan
    with pytest.raises(ValueError, match=r"policy: the weight head.linear.bias holds nan"):
        Session(policy)
    with pytest.raises(ValueError, match="policy: expected a UAT with weights, got one without values"):
        Session(policy.to("meta"))
