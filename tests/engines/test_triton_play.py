"""Whole episodes in one launch against the slow rollout: on a GPU where there is one, interpreted elsewhere."""

# ruff: noqa: E402 (what needs Triton is imported where there is Triton)
from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.cuda.is_available()
pytest.importorskip("triton")

from tests.builders import interpreted, randomise
from uat.acting import rollout
from uat.domains.darkroom.world import DarkRoomConfig, DarkRoomSimulator
from uat.engines import FusedEngine, plan
from uat.engines import worlds as worlds_module
from uat.engines.fused import VIEWS, FusedPolicy, WhollyFusedPolicy, fused_view
from uat.engines.triton import pack as triton_pack
from uat.engines.triton import play as triton_play
from uat.engines.triton import step as triton_step
from uat.engines.triton.darkroom import FusedDarkRoom
from uat.episode import Noise, Step, Trajectory
from uat.methods import METHODS
from uat.methods.policy import TransformerPolicy
from uat.methods.uat import UAT
from uat.noise import gumbel
from uat.training.surroundings import precision

DEVICE = "cuda" if CUDA else "cpu"
SMALL = {"d_model": 32, "num_heads": 2, "num_layers": 1, "d_ff": 64, "dropout": 0.0}
LONG = 66 if CUDA else 18
"""More steps than are read at a time."""
PLAYS = [
    name
    for name, m in METHODS.items()
    if issubclass(VIEWS.get(m.policy, FusedPolicy), WhollyFusedPolicy) and name not in ("uat-late", "uat-plus")
]
FEW = 132
"""Policies that share the device, so that few programs serve all worlds: the interpreter runs them one by one."""


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow: there a past of eighteen steps is long."""
    if not CUDA:
        monkeypatch.setattr(triton_step, "CHUNK", 16)


def room(**settings: Any) -> DarkRoomSimulator:
    return DarkRoomSimulator(DarkRoomConfig(**{"size": 5, "horizon": 4, **settings}), DEVICE)


def build(method: str, simulator: DarkRoomSimulator, **sizes: int) -> TransformerPolicy:
    policy = METHODS[method].build(simulator.spec, METHODS[method].configure(**{**SMALL, **sizes}))
    assert isinstance(policy, TransformerPolicy)
    return randomise(policy, 1).float().to(DEVICE).eval()


def some_noise(simulator: DarkRoomSimulator, worlds: int) -> tuple[Noise, torch.Tensor]:
    ids, spec = torch.arange(worlds), simulator.spec
    drawn = gumbel(3, "actions", ids.to(DEVICE), spec.steps * 5).view(-1, spec.steps, 5).float()
    return simulator.noise(ids, 3), drawn


def both(
    policy: TransformerPolicy, simulator: DarkRoomSimulator, worlds: int, *, sampled: bool, policies: int = FEW
) -> list[Trajectory]:
    """Play the same episodes step by step, with nothing fused, and then in one launch."""
    noise, drawn = some_noise(simulator, worlds)
    gumbel_BTA = drawn if sampled else None
    view, room = fused_view(policy, concurrent_policies=policies), FusedDarkRoom(simulator)
    assert view.supports_fused_rollout(room)
    with torch.no_grad():
        return [rollout(policy, simulator, noise, gumbel_BTA), view.fused_rollout(room, noise, gumbel_BTA)]


def play(
    policy: TransformerPolicy, room: DarkRoomSimulator, noise: Noise, drawn: torch.Tensor, policies: int = FEW
) -> Trajectory:
    """Episodes of an engine that takes the policy's steps by kernels."""
    return FusedEngine(policy, concurrent_policies=policies).rollout(room, noise, drawn)


def check(
    policy: TransformerPolicy,
    simulator: DarkRoomSimulator,
    worlds: int,
    *,
    sampled: bool = True,
    policies: int = FEW,
) -> None:
    slow, fast = both(policy, simulator, worlds, sampled=sampled, policies=policies)
    for name in ("obs", "action", "reward", "done", "target", "valid"):
        assert torch.equal(getattr(slow, name), getattr(fast, name)), name
    assert slow.facts.keys() == fast.facts.keys()
    for name, fact in slow.facts.items():
        assert torch.equal(fact, fast.facts[name]), name
    assert len(fast.action.unique()) > 1


@pytest.mark.parametrize("method", PLAYS)
def test_episodes_played_in_one_launch_are_those_played_step_by_step(method: str) -> None:
    simulator = room()
    check(build(method, simulator, num_layers=2 if method in ("uat", "vanilla") else 1), simulator, 3)


@pytest.mark.parametrize(
    "settings", [{"shift_steps": (2, 3)}, {"tie_break": "random"}, {"horizon": 1}, {"horizon": LONG}]
)
def test_so_are_they_in_other_rooms(settings: dict[str, Any]) -> None:
    simulator = room(**settings)
    check(build("uat", simulator), simulator, 3 if simulator.spec.steps < 10 else 1)


def test_greedy_ones_too_and_several_streams_to_a_program() -> None:
    simulator = room()
    check(build("uat", simulator, num_heads=4), simulator, 9, sampled=False, policies=60)


def test_only_a_whole_step_in_a_room_that_is_fused_plays_so() -> None:
    simulator = room()
    fused, policy = FusedDarkRoom(simulator), build("uat", simulator)
    assert fused_view(policy).supports_fused_rollout(fused)
    assert not fused_view(policy).supports_fused_rollout(simulator)
    assert not fused_view(policy, fused_step=False).supports_fused_rollout(fused)
    assert not fused_view(build("dt", simulator)).supports_fused_rollout(fused)


def test_a_room_of_another_shape_is_played_step_by_step() -> None:
    """The kernel counts steps and rewards as the policy knows them."""
    simulator, longer = FusedDarkRoom(room()), FusedDarkRoom(room(horizon=8))
    policy = build("uat", longer)
    assert fused_view(policy).supports_fused_rollout(longer)
    assert not fused_view(policy).supports_fused_rollout(simulator)
    noise, drawn = some_noise(simulator, 2)
    assert play(policy, simulator, noise, drawn).action.shape == (2, 4)


def test_who_changes_a_room_or_a_step_is_not_played_by_the_kernel_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(DarkRoomSimulator):
        def expert(self, world: Any) -> torch.Tensor:
            return torch.zeros_like(world.position_B)

    class Another(UAT):
        def decide(self, *args: Any, **named: Any) -> Any:
            return super().decide(*args, **named)

    monkeypatch.setattr(worlds_module, "compiles", lambda device: True)
    simulator = room()
    other = Other(simulator.config, DEVICE)
    assert isinstance(worlds_module.fused_simulator(simulator, torch.device(DEVICE)), FusedDarkRoom)
    assert worlds_module.fused_simulator(other, torch.device(DEVICE)) is other
    policy = build("uat", simulator)
    assert isinstance(policy, UAT)
    assert "Another is a class of its own" in (plan(Another(simulator.spec, policy.config)).refused or "")


def test_noise_may_lie_in_any_order() -> None:
    simulator = FusedDarkRoom(room())
    policy = build("uat", simulator)
    noise, drawn = some_noise(simulator, 4)
    expected = play(policy, simulator, noise, drawn)
    turned = {name: value.t().contiguous().t() for name, value in noise.items()}
    found = play(policy, simulator, turned, drawn.transpose(0, 2).contiguous().transpose(0, 2))
    assert torch.equal(expected.action, found.action)
    assert torch.equal(expected.obs, found.obs)


@pytest.mark.parametrize(
    ("method", "sizes", "horizon", "worlds", "policies"),
    [
        ("uat", {"d_model": 16, "num_heads": 1, "d_ff": 16}, 2, 3, 132),
        interpreted("uat", {}, 4, 3, 132),
        interpreted("vanilla", {}, 4, 3, 132),
        interpreted("uat", {"d_model": 16, "num_heads": 1}, 16, 9, 60),  # as wide as a chunk; four streams to a program
        interpreted("vanilla", {"num_heads": 4, "d_ff": 256}, 18, 5, 60),  # more than a chunk
        interpreted("uat", {"d_model": 64, "num_heads": 4, "d_ff": 128}, 5, 5, 60),
    ],
)
def test_in_half_precision_they_are_those_of_the_fused_step(
    method: str, sizes: dict[str, int], horizon: int, worlds: int, policies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values that have not been written are NaN here, and do not matter."""
    simulator = FusedDarkRoom(room(horizon=horizon))
    policy = build(method, simulator, **sizes)
    noise, drawn = some_noise(simulator, worlds)
    view = fused_view(policy, concurrent_policies=policies)
    empty = triton_play._room

    monkeypatch.setattr(triton_play, "_room", lambda *given: empty(*given).fill_(torch.nan))
    with precision("tf32"):
        whole = play(policy, simulator, noise, drawn, policies)
        state, logits = view.init_state(worlds, horizon, DEVICE), []
        for t in range(horizon):
            told = {"prev_action": whole.action[:, t - 1], "prev_reward": whole.reward[:, t - 1]}
            if t == 0:
                told = {"prev_action": torch.full_like(whole.action[:, 0], -1), "prev_reward": whole.reward[:, 0] * 0}
            first = torch.full_like(whole.done[:, 0], t == 0)
            now, state = view.step(state, Step(obs=whole.obs[:, t], first=first, **told))
            logits.append(now)
    assert torch.equal((torch.stack(logits, 1) + drawn).argmax(-1), whole.action)


class Launches(TorchDispatchMode):
    """Names what would be launched: our own kernels, which do not run here, and what torch does beside views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    def kernel(self, name: str) -> Any:
        return defaultdict(lambda: lambda *args, **given: self.names.append(name))


@pytest.mark.parametrize("method", ["uat", "vanilla"])
def test_a_rollout_is_two_launches(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    simulator = FusedDarkRoom(room(horizon=2))
    policy = build(method, simulator, d_model=16, d_ff=16)
    noise, drawn = some_noise(simulator, 3)
    engine = FusedEngine(policy, concurrent_policies=FEW)
    with precision("tf32"):
        engine.rollout(simulator, noise, drawn)  # orders and the like are made once
        seen = Launches()
        monkeypatch.setattr(triton_pack, "_pack", seen.kernel("_pack"))
        monkeypatch.setattr(triton_play, "_play", seen.kernel("_play"))
        with seen:
            engine.rollout(simulator, noise, drawn)
    assert seen.names == ["_pack", "_play"]


def test_noise_may_be_of_double_precision() -> None:
    simulator = FusedDarkRoom(room())
    policy = build("vanilla", simulator)
    noise, drawn = some_noise(simulator, 2)
    found = [play(policy, simulator, noise, given).action for given in (drawn, drawn.double())]
    assert torch.equal(*found)


def test_methods_whose_whole_step_is_a_kernel_play_so() -> None:
    assert {"uat", "vanilla"} <= set(PLAYS)
    assert not {"adt", "dt"} & set(PLAYS)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["uat", "vanilla"])
@pytest.mark.parametrize(("worlds", "policies"), [(256, 1), (257, 3), (63, 1)])
def test_the_same_at_full_size(method: str, worlds: int, policies: int) -> None:
    """The kernel's float32 products sum in another order than torch's: one action in some thousands may differ, and so
    may the rest of its episode."""
    simulator = room(size=10, horizon=60)
    policy = build(method, simulator, d_model=64, num_heads=4, num_layers=3, d_ff=128)
    slow, fast = both(policy, simulator, worlds, sampled=True, policies=policies)
    same = (slow.action == fast.action).all(1)
    assert same.float().mean() > 0.97
    torch.testing.assert_close(slow.reward[same], fast.reward[same], rtol=0, atol=0)
    torch.testing.assert_close(slow.obs[same], fast.obs[same], rtol=0, atol=0)
