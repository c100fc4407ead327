"""Plans: which engine runs a policy and why no faster one, and how much code a plain update passes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import uat
from tests.builders import CPU, SPECS, build_random
from tests.training.small_runs import tiny
from uat.domains.darkroom.world import DarkRoomConfig, DarkRoomSimulator
from uat.engines import NUMPY_STREAMS, Engine, FusedEngine, kernels, plan, plan_session
from uat.engines import rollout as rollout_module
from uat.engines.fused import PackedCache
from uat.engines.rollout import RolloutRunner
from uat.methods.policy import TransformerPolicy
from uat.methods.sasrec import SASRec
from uat.runs import Run
from uat.training.trainer import Trainer

SPEC = SPECS["vector-discrete"]
METHODS = ("uat", "vanilla", "adt", "dt")
PACKAGE = Path(uat.__file__).parent


def build(method: str, **settings: Any) -> TransformerPolicy:
    return cast(TransformerPolicy, build_random(method, SPEC, dtype=torch.float32, **settings))


@pytest.fixture
def gpu_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan as on a GPU that supports policies of any size."""
    monkeypatch.setattr(kernels, "unsupported_step", lambda *parts: None)
    monkeypatch.setattr(kernels, "unsupported_pass", lambda *parts: None)


# ---------------------------------------------------------------- what is chosen, and why


@pytest.mark.parametrize("method", METHODS)
def test_a_plan_says_what_it_chose_and_why_nothing_faster(method: str) -> None:
    policy = build(method)
    engine = plan(policy)
    assert (engine.name, engine.learner, engine.policy) == ("plain", policy, policy)
    assert engine.refused == "the fused step needs CUDA"
    assert plan(policy, prefer="plain").refused is None


@pytest.mark.usefixtures("gpu_of_any_size")
@pytest.mark.parametrize("method", METHODS)
def test_a_fused_engine_learns_by_a_view_that_shares_all_of_the_policy(method: str) -> None:
    policy = build(method, dropout=0.1)
    engine = plan(policy, concurrent_policies=3)
    assert isinstance(engine, FusedEngine)
    assert (engine.name, engine.refused, engine.update_path) == ("fused step", None, "fused pass")
    assert [id(p) for p in engine.learner.parameters()] == [id(p) for p in policy.parameters()]
    assert list(engine.learner.state_dict()) == list(policy.state_dict())
    with engine.learning() as learner:
        assert policy.training
        assert all(module.training for module in learner.modules())
    policy.eval()
    assert not engine.learner.training
    policy.head = build(method).head
    assert engine.learner.head is policy.head
    assert engine.leaves_generator_alone
    assert not Engine(policy).leaves_generator_alone


@pytest.mark.usefixtures("gpu_of_any_size")
@pytest.mark.parametrize("method", METHODS)
def test_streams_of_a_fused_memory_are_taken_without_its_weights(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "pack", lambda *parts: None)
    state = plan(build(method)).init_state(3, 4, CPU)
    cache: Any = state if isinstance(state, PackedCache) else state.cache
    cache.packed = weights = object()
    cache.length_B.copy_(torch.tensor([1, 2, 3]))
    few = cache.take(torch.tensor([2, 0]))
    assert few.packed is weights
    assert few.length_B.tolist() == [3, 1]
    assert set(cache.tensors()) == {"kv_L2BHSE", "length_B"}
    cache.put(torch.tensor([1]), few.take(torch.tensor([0])))
    assert cache.length_B.tolist() == [1, 3, 3]


@pytest.mark.parametrize(
    ("streams", "prefer", "name", "refused"),
    [
        (NUMPY_STREAMS, "auto", "NumPy step", None),
        (NUMPY_STREAMS + 1, "auto", "plain", "more than 8 streams are faster all at once"),
        (NUMPY_STREAMS + 1, "fast", "NumPy step", None),
        (1, "plain", "plain", None),
    ],
)
def test_a_session_on_a_cpu_steps_few_streams_by_numpy(
    streams: int, prefer: Any, name: str, refused: str | None
) -> None:
    engine = plan_session(build("uat"), streams, prefer=prefer)
    assert (engine.name, engine.refused) == (name, refused)


def test_a_seed_decides_what_a_loss_samples_and_what_torch_drops() -> None:
    policy = build_random("sasrec", SPECS["items-discrete"], dropout=0.5)
    assert isinstance(policy, SASRec)
    engine = Engine(policy)
    drawn = []
    for seed in (5, 6, 5):
        engine.reseed(seed)
        drawn.append((int(policy.sampling_seed), torch.rand(3)))
    assert [seed for seed, _ in drawn] == [5, 6, 5]
    assert torch.equal(drawn[0][1], drawn[2][1])
    assert not torch.equal(drawn[0][1], drawn[1][1])


def test_worlds_on_the_host_are_never_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnHost(DarkRoomSimulator):
        on_host = True

    def capture(*given: Any, **named: Any) -> None:
        raise AssertionError("captured")

    monkeypatch.setattr(rollout_module, "captured_or_none", capture)
    runner = RolloutRunner(None, OnHost(DarkRoomConfig(horizon=3), CPU), device=CPU, sampled=False)
    runner.device = cast(Any, type("Device", (), {"type": "cuda"})())
    assert (runner.play(torch.arange(2), 0).action >= 0).all()
    other = RolloutRunner(None, DarkRoomSimulator(DarkRoomConfig(horizon=3), CPU), device=CPU, sampled=False)
    other.device = runner.device
    with pytest.raises(AssertionError, match="captured"):
        other.play(torch.arange(2), 0)


# ---------------------------------------------------------------- structure


def subclassed(module: nn.Module) -> None:
    module.__class__ = type("Other", (type(module),), {})


def hooked(module: nn.Module) -> None:
    module.register_forward_hook(lambda *given: None)


def own_forward(module: nn.Module) -> None:
    vars(module)["forward"] = lambda *given: torch.zeros(1)


CHANGES: dict[str, Callable[[nn.Module], None]] = {"class": subclassed, "hook": hooked, "forward": own_forward}


@pytest.mark.usefixtures("gpu_of_any_size")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("method", METHODS)
def test_a_change_of_any_module_is_refused_by_every_engine(method: str, change: str) -> None:
    for name in dict(build(method).named_modules()):
        policy = build(method)
        CHANGES[change](policy.get_submodule(name))
        engine = plan(policy)
        session = plan_session(policy, 1)
        assert (engine.name, session.name) == ("plain", "plain"), name
        for reason in (engine.refused, engine.refused_pass, session.refused):
            assert reason is not None, name
            known = type(policy).__name__ in reason or "the policy" in reason or "Other" in reason
            assert known if name == "" else name in reason or "has no fast step" in reason, (name, reason)


@pytest.mark.usefixtures("gpu_of_any_size")
@pytest.mark.parametrize("method", METHODS)
def test_a_change_of_any_parameter_is_refused_by_every_engine(method: str) -> None:
    for name, parameter in list(build(method).named_parameters()):
        policy = build(method)
        owner, _, last = name.rpartition(".")
        setattr(policy.get_submodule(owner), last, nn.Parameter(torch.cat([parameter.detach()] * 2)))
        engine = plan(policy)
        assert name in (engine.refused or ""), name
        assert name in (engine.refused_pass or ""), name


# ---------------------------------------------------------------- one update reads like the paper


def files_called(function: Callable[[], object]) -> list[str]:
    """Return the files of the package whose functions are called."""
    found: set[str] = set()

    def see(frame: Any, event: str, arg: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(PACKAGE):
            found.add(str(file.relative_to(PACKAGE)))

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(before)
    return sorted(found)


MOST_FILES = {"training step": 15, "with its rollout": 23, "epoch of the trainer": 27}
"""Files that a reader opens to follow each of these on a CPU. Bounds to be lowered, not raised."""


def test_a_plain_training_step_passes_few_files(tmp_path: Path) -> None:
    """A training step is the loss on a batch of episodes, its gradients, and Adam; an epoch also has the rollout that
    makes the batch, its worlds, and the trainer's schedules."""
    trainer = Trainer(Run.create(tiny(), tmp_path / "run"), CPU)
    epoch = trainer.epoch(trainer.engine.learner.phases()[0])
    trajectory = epoch.rollouts.play(torch.arange(4), 0)
    files = {"training step": files_called(lambda: epoch.updates.update(trajectory, 0))}
    files["with its rollout"] = files_called(lambda: epoch.updates.update(epoch.rollouts.play(torch.arange(4), 0), 0))
    files["epoch of the trainer"] = files_called(lambda: epoch.run(0, 1))
    for name, most in MOST_FILES.items():
        assert len(files[name]) <= most, files[name]
        assert {"methods/uat.py", "nn/attention.py", "clock.py", "engines/update.py"} <= set(files[name])
        assert not any(file.startswith("engines/triton") for file in files[name])
