"""Kernels whose launches are recorded and that are compiled in parallel instead of one after another."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.training.small_runs import numbers, tiny
from uat.engines import warm_up as warm_up_module
from uat.engines.rollout import RolloutRunner
from uat.engines.warm_up import compile_all, record_launches, warm_up
from uat.episode import Noise, Trajectory
from uat.training import epoch as epoch_module
from uat.training import train

pytest.importorskip("triton")
import triton.language as tl
from triton.runtime.autotuner import Autotuner, Config
from triton.runtime.jit import JITFunction

CPU, CUDA = torch.device("cpu"), torch.cuda.is_available()


def kernel() -> Any:
    """A kernel that is never interpreted: launched without a GPU it would fail."""

    def doubled(x_ptr: Any, n: Any, plain: Any, BLOCK: tl.constexpr) -> None:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n) * 2, mask=at < n)

    return JITFunction(doubled, do_not_specialize=["plain"])


def test_launches_are_written_down_and_not_made() -> None:
    run, x, double = JITFunction.run, torch.ones(5), kernel()
    with record_launches() as launches:
        assert double[(1,)](x, 5, 0, BLOCK=16) is None
    assert [(launch.kernel, launch.grid, launch.named) for launch in launches] == [(double, (1,), {"BLOCK": 16})]
    assert launches[0].args[0].numel() == 0  # its memory is not kept
    assert launches[0].args[1:] == (5, 0)
    assert JITFunction.run is run


def test_launches_are_made_again_after_an_error() -> None:
    run = JITFunction.run
    with pytest.raises(RuntimeError, match="no more"), record_launches():
        raise RuntimeError("no more")
    assert JITFunction.run is run


def test_what_differs_where_it_is_compiled_in_is_compiled_apart() -> None:
    double, x = kernel(), torch.ones(64)
    with record_launches() as launches:
        for given in ((x, 5, 0), (x, 7, 1), (x, 9, 16)):  # all alike
            double[(1,)](*given, BLOCK=16)
        for given in ((x, 1, 0), (x, 16, 0), (x, 2**33, 0), (x.double(), 5, 0), (x[1:], 5, 0)):  # each another
            double[(1,)](*given, BLOCK=16)
        double[(1,)](x, 5, 0, BLOCK=32)
        double[(1,)](x, 5, 0, BLOCK=16, num_warps=8)
        kernel()[(1,)](x, 5, 0, BLOCK=16)
    assert len({launch.compilation for launch in launches[:3]}) == 1
    assert len({launch.compilation for launch in launches}) == len(launches) - 2


def test_what_nobody_has_written_is_zero() -> None:
    like = torch.ones(1000)
    with record_launches():
        made = torch.empty(1000, dtype=torch.long), torch.empty_like(like), like.new_empty(1000), like.clone()
    assert [x.abs().sum().item() for x in made] == [0, 0, 0, 1000]


def test_other_threads_launch_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **named: made.append(args[1]))
    double, x = kernel(), torch.ones(5)
    with record_launches() as launches:
        other = threading.Thread(target=lambda: double[(1,)](x, 1, 0, BLOCK=16))
        other.start()
        other.join()
        double[(1,)](x, 2, 0, BLOCK=16)
    assert (made, [launch.args[1] for launch in launches]) == ([1], [2])


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Warm up as on a GPU, without compiling, and record the number of launches of each warm-up."""
    found: list[int] = []
    for module in (warm_up_module, epoch_module):
        monkeypatch.setattr(module, "compiles", lambda device: True)
    monkeypatch.setattr(warm_up_module, "compile_all", lambda launches, device: found.append(len(launches)))
    monkeypatch.setattr(warm_up_module, "_warmed_up", set())
    return found


def test_a_warm_up_leaves_no_trace(compiled: list[int]) -> None:
    weight, double = torch.arange(3.0), kernel()

    def change() -> None:
        weight.mul_(7)
        double[(1,)](weight, 3, 0, BLOCK=16)

    warm_up(lambda: change, CPU, "one", preserve=[weight])
    assert weight.tolist() == [0, 1, 2]
    assert compiled == [1]


def test_what_is_prepared_happens(compiled: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise, for example, must be real: worlds cannot be made from zeros."""
    made: list[int] = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **named: made.append(args[1]))
    double, x = kernel(), torch.ones(5)

    def prepare() -> Any:
        double[(1,)](x, 1, 0, BLOCK=16)
        return lambda: double[(1,)](x, 2, 0, BLOCK=16)

    for _ in range(2):
        warm_up(prepare, CPU, "one", preserve=[])
    assert (made, compiled) == ([1], [1])


def test_each_is_warmed_up_once(compiled: list[int]) -> None:
    double, x = kernel(), torch.ones(5)
    for key in ("one", "one", "another"):
        warm_up(lambda: lambda: double[(1,)](x, 5, 0, BLOCK=16), CPU, key, preserve=[])
    assert compiled == [1, 1]


def test_what_cannot_be_warmed_up_costs_nothing(compiled: list[int]) -> None:
    weight, double = torch.arange(3.0), kernel()

    def fail() -> None:
        double[(1,)](weight, 3, 0, BLOCK=16)
        weight.zero_()
        raise ValueError("zeros will not do")

    warm_up(lambda: fail, CPU, "one", preserve=[weight])
    assert weight.tolist() == [0, 1, 2]
    assert compiled == [1]


def test_what_cannot_be_told_apart_is_left_to_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up_module, "compiles", lambda device: True)
    monkeypatch.setattr(warm_up_module, "_warmed_up", set())
    double, x = kernel(), torch.ones(5)
    warm_up(lambda: lambda: double[(1,)](x, 5, 0, BLOCK=[16]), CPU, "one", preserve=[])


def test_a_kernel_that_is_tuned_is_refused() -> None:
    tuned = Autotuner(kernel(), ["x_ptr", "n", "plain"], [Config({"BLOCK": 16})], ["n"], None, None)
    with pytest.raises(RuntimeError, match="doubled is tuned"), record_launches():
        tuned[(1,)](torch.ones(5), 5, 0)


def test_named_tuples_stay_so() -> None:
    class Pair(NamedTuple):
        a: Tensor
        b: int

    double = kernel()
    with record_launches() as launches:
        double[(1,)](Pair(torch.ones(5), 3), 5, 0, BLOCK=16)
    assert isinstance(launches[0].args[0], Pair)
    assert launches[0].args[0].b == 3


def test_two_threads_that_write_down_take_turns() -> None:
    run, double, x = JITFunction.run, kernel(), torch.ones(5)
    found: list[int] = []

    def note(times: int) -> None:
        with record_launches() as launches:
            for _ in range(times):
                double[(1,)](x, 5, 0, BLOCK=16)
                time.sleep(0.001)
        found.append(len(launches))

    others = [threading.Thread(target=note, args=(times,)) for times in (3, 5, 7)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert sorted(found) == [3, 5, 7]
    assert JITFunction.run is run


def test_each_compilation_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(JITFunction, "warmup", lambda self, *args, grid, **named: asked.append(args[1]))
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    double, x = kernel(), torch.ones(5)
    with record_launches() as launches:
        for n in (5, 7, 16, 1):
            double[(1,)](x, n, 0, BLOCK=16)
    compile_all(launches, CPU)
    assert sorted(asked) == [1, 7, 16]


def test_names_are_given_in_order_before_threads_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JITFunction, "warmup", lambda self, *args, grid, **named: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    kernels, named = [kernel() for _ in range(5)], []
    monkeypatch.setattr(JITFunction, "cache_key", property(lambda self: named.append((self, threading.get_ident()))))
    with record_launches() as launches:
        for double in kernels:
            double[(1,)](torch.ones(5), 5, 0, BLOCK=16)
    compile_all(launches, CPU)
    assert named == [(double, threading.get_ident()) for double in kernels]


def test_a_training_warms_up_an_epoch_and_a_validation_once(
    tmp_path: Path, compiled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm-up launches nothing, and the numbers are those of a training without it."""
    played: list[int] = []
    play = RolloutRunner._rollout

    def counted(self: RolloutRunner, noise: Noise) -> Trajectory:
        played.append(len(next(iter(noise.values()))))
        return play(self, noise)

    plain = train(tiny(), tmp_path / "plain", device="cpu")
    monkeypatch.setattr(warm_up_module, "_warmed_up", set())
    monkeypatch.setattr(RolloutRunner, "_rollout", counted)
    config = tiny(train__batch_size=6, train__validation_episodes=3)
    train(config, tmp_path / "one", device="cpu")
    assert played == [6, 3, 6, 6, 3, 6, 6, 3]  # a warm-up, then epochs, and a validation after each two
    assert compiled == [0, 0]
    train(config, tmp_path / "again", device="cpu")
    assert played[8:] == [6, 6, 3, 6, 6, 3]
    for module in (warm_up_module, epoch_module):
        monkeypatch.setattr(module, "compiles", lambda device: False)
    cold = train(tiny(), tmp_path / "cold", device="cpu")
    assert numbers(plain.path) == numbers(cold.path)


ON_A_GPU = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")


class Doubled(torch.autograd.Function):
    """On a GPU, the backward pass runs in a thread of autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, double: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.double = double
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.double[(1,)](grad, 3, 0, BLOCK=16)
        return torch.empty_like(grad), None


@pytest.mark.gpu
@ON_A_GPU
def test_a_backward_pass_is_written_down_too() -> None:
    x = torch.ones(3, device="cuda", requires_grad=True)
    with record_launches() as launches:
        Doubled.apply(x, kernel()).sum().backward()  # pyright: ignore[reportFunctionMemberAccess]
    assert len(launches) == 1
    assert x.grad is not None
    assert x.grad.tolist() == [0, 0, 0]


COMPILED_BY = """
import json, sys, threading
import triton.compiler
compile, by = triton.compiler.compile, {True: [], False: []}

def counted(source, **named):
    by[threading.current_thread() is threading.main_thread()].append(source.fn.__name__)
    return compile(source, **named)

triton.compiler.compile = counted
from uat.config import override
from uat.recipes import recipe
from uat.training import train
small = {"domain.horizon": 9, "train.epochs": 4, "train.validate_every": 2, "train.precision": "tf32"}
small |= {"method.d_model": 32, "method.num_heads": 2, "method.d_ff": 32}
train(override(recipe("darkroom", "uat", "smoke"), small), sys.argv[1], device="cuda")
print(json.dumps([by[True], by[False]]))
"""


@pytest.mark.gpu
@ON_A_GPU
def test_threads_compile_all_that_a_training_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    command = [sys.executable, "-c", COMPILED_BY, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    here, elsewhere = json.loads(done.stdout)
    assert set(here) <= {"_uniform"}, "all but noise, which is drawn for real"
    assert len(elsewhere) > 20
