"""The clock in one launch against its slow twin, bit for bit: on a GPU where there is one, interpreted elsewhere."""

# ruff: noqa: E402 (what needs Triton is imported where there is Triton)
from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
pytest.importorskip("triton")

from uat.clock import Clock, nothing
from uat.engines import kernels
from uat.engines.kernels import can_shift, fused_operations
from uat.engines.triton import clock as clock_kernel
from uat.engines.triton.clock import BLOCK, fused_inputs
from uat.episode import Batch, Told, Trajectory

DEVICE = "cuda" if CUDA else "cpu"
STEPS = 12


def episodes(shape: tuple[int, ...] = (5, STEPS, 7), *, ids: bool = False) -> Trajectory:
    """Return episodes of all lengths, even 0, the first of full length; padding holds NaN and invalid ids."""
    generator = torch.Generator().manual_seed(0)
    steps = shape[:2]
    lengths_B = torch.randint(0, steps[1] + 1, steps[:1], generator=generator)
    lengths_B[:1] = steps[1]
    valid = torch.arange(steps[1]) < lengths_B[:, None]
    obs = torch.randint(1, 9, shape, generator=generator) if ids else torch.randn(shape, generator=generator)
    reward = torch.randint(-2, 3, steps, generator=generator) * 0.3
    reward[:, ::4] = -0.0
    return Trajectory(
        obs=obs.masked_fill(~valid.view(*steps, *[1] * (len(shape) - 2)), -77 if ids else torch.nan),
        action=torch.randint(0, 9, steps, generator=generator).masked_fill(~valid, 2**40),
        reward=reward.masked_fill(~valid, torch.nan),
        terminated=torch.zeros(steps, dtype=torch.bool),
        target=torch.randint(0, 9, steps, generator=generator),
        valid=valid,
    )


def parts(trajectory: Trajectory) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return trajectory.obs, trajectory.action, trajectory.reward, trajectory.valid


def fused(clock: Clock, trajectory: Trajectory) -> tuple[Tensor, Tensor, Tensor]:
    given = parts(trajectory.to(DEVICE))
    none = nothing(given[0]), nothing(given[1])
    obs, action, reward_BT = fused_inputs(*given, lag=clock.reward_lag, scale=clock.reward_scale, none=none)
    return obs.cpu(), action.cpu(), reward_BT.cpu()


def bits(x: Tensor) -> Tensor:
    """Return the bits of the numbers, which distinguish signed zeros and make NaN equal to itself."""
    return x.view(torch.int32) if x.dtype == torch.float32 else x


def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    assert [(x.dtype, x.shape) for x in found] == [(x.dtype, x.shape) for x in expected]
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(found, expected, strict=True))


def inputs_of(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return batch.obs.cpu(), batch.prev_action.cpu(), batch.prev_reward.cpu()


@pytest.mark.parametrize("scale", [1.0, 0.5, -2.0, 0.1])
@pytest.mark.parametrize("lag", [0, 1, 3, STEPS + 2])
def test_one_launch_tells_what_many_do_at_any_lag_and_scale(lag: int, scale: float) -> None:
    clock, trajectory = Clock(reward_lag=lag, reward_scale=scale), episodes()
    assert same(fused(clock, trajectory), inputs_of(clock.batch(trajectory)))


def test_padding_never_gets_through() -> None:
    """NaN times 0 is still NaN."""
    trajectory = episodes()
    padding = ~trajectory.valid
    obs, action, reward_BT = fused(Clock(reward_scale=-2.0), trajectory)
    for found, none in ((obs, 0), (action, -1), (reward_BT, 0)):
        assert not found.isnan().any()
        assert (found[padding] == none).all()
    assert reward_BT[padding].signbit().all()  # as 0 times a negative number


def test_padding_may_lie_between_real_steps() -> None:
    """The step after padding sees the stored values before it, valid or not."""
    clock, trajectory = Clock(reward_lag=2, reward_scale=0.5), episodes()
    trajectory.valid = torch.arange(5 * STEPS).view(5, STEPS) % 7 % 3 > 0
    trajectory.reward = trajectory.reward.nan_to_num(1e30)
    trajectory.obs = trajectory.obs.nan_to_num(1e30)
    assert same(fused(clock, trajectory), inputs_of(clock.batch(trajectory)))


@pytest.mark.parametrize(
    ("shape", "ids"),
    [
        ((5, STEPS), False),
        ((5, STEPS), True),
        ((5, STEPS, 4), True),
        ((5, STEPS, 3, 5), False),
        ((5, STEPS, 0), False),
        ((1, 1, 1), False),
        ((1, 1), True),
        ((64, 16, 1), False),  # whole blocks, and one more
        ((25, 41, 3), False),
        ((3, BLOCK + 1, 2), False),
        ((2, 3, BLOCK + 1), False),
    ],
)
def test_observations_of_any_shape_are_delivered(shape: tuple[int, ...], ids: bool) -> None:
    clock, trajectory = Clock(reward_lag=2, reward_scale=0.5), episodes(shape, ids=ids)
    found = fused(clock, trajectory)
    assert same(found, inputs_of(clock.batch(trajectory)))
    assert (found[0][~trajectory.valid] == (-1 if ids and len(shape) == 2 else 0)).all()


@pytest.mark.parametrize("shape", [(0, STEPS, 7), (5, 0, 7), (0, 0)])
def test_for_no_steps_nothing_is_launched(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_kernel, "_inputs", None)
    trajectory = episodes(shape)
    assert same(fused(Clock(), trajectory), inputs_of(Clock().batch(trajectory)))


@pytest.mark.parametrize("some", [(slice(None), slice(None, None, 2)), (slice(1, None, 3), slice(3, 9))])
def test_steps_may_lie_apart(some: tuple[slice, slice]) -> None:
    trajectory, clock = episodes((6, 2 * STEPS, 7)), Clock(reward_scale=-0.5)
    found = fused(clock, trajectory.to(DEVICE).map(lambda x: x[some]))
    assert same(found, inputs_of(clock.batch(trajectory.map(lambda x: x[some]))))


def test_nothing_is_written_past_the_end() -> None:
    trajectory = episodes()
    given, rows = parts(trajectory.to(DEVICE)), trajectory.valid.numel()
    kinds = torch.float32, torch.int64, torch.float32
    obs, action, reward = (torch.full((BLOCK,), -9, dtype=kind, device=DEVICE) for kind in kinds)
    sizes = {"rows": rows, "T": STEPS, "W": 7, "lag": 1, "scale": 1.0}
    cast(Any, clock_kernel._inputs)[(2,)](*given, obs, action, reward, **sizes, NO_OBS=0, NO_ACTION=-1, BLOCK=BLOCK)
    for out, size in ((obs, 7 * rows), (action, rows), (reward, rows)):
        assert (out[:size] != -9).all()
        assert (out[size:] == -9).all()


# ---------------------------------------------------------------- when the clock takes the kernel


def test_the_clock_hands_on_all_that_the_kernel_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel receives the clock's settings, corrupted feedback instead of the actual one, and ids as integers."""
    monkeypatch.setattr(kernels, "compiles", lambda device: True)
    clock, trajectory = Clock(reward_lag=2, reward_scale=-0.3), episodes((5, STEPS), ids=True)
    trajectory.reward = trajectory.reward.nan_to_num(1e30)  # after flipping, padding is visible, too
    other = replace(trajectory, told=Told(action=trajectory.action.flip(0), reward=trajectory.reward.flip(0) + 1))
    clicks = replace(trajectory, told=Told(action=trajectory.action, reward=trajectory.reward > 0))
    for each in (trajectory, other, clicks):
        action, reward = (None, None) if each.told is None else (each.told.action, each.told.reward)
        expected = clock.inputs(
            each.obs,
            each.action if action is None else action,
            each.reward if reward is None else reward.float(),
            each.valid,
        )
        with monkeypatch.context() as without, fused_operations():
            without.delattr(Clock, "inputs")
            batch = clock.batch(each.to(DEVICE))
        assert same(inputs_of(batch), expected)


def test_the_kernel_is_asked_for_plain_ids_and_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    trajectory = episodes()
    assert can_shift(*parts(trajectory.to(DEVICE))) == CUDA
    monkeypatch.setattr(kernels, "compiles", lambda device: True)
    plain = trajectory.to(DEVICE)
    assert can_shift(*parts(plain))
    weights = torch.zeros(5, STEPS, 3, device=DEVICE)
    for change in (
        {"obs": plain.obs.double()},
        {"obs": plain.obs.clone().requires_grad_()},
        {"reward": plain.reward.double()},
        {"reward": plain.reward.clone().requires_grad_()},
        {"action": weights},
        {"action": weights.long()},
        {"action": plain.action.int()},
        {"valid": plain.valid.float()},
        {"valid": plain.valid[:1]},
        {"reward": plain.reward.to("meta")},
    ):
        assert not can_shift(*parts(replace(plain, **change))), list(change)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize(("shape", "ids"), [((256, 60, 10), False), ((33, 50), True), ((3, 7, 30, 16), False)])
def test_a_gpu_tells_what_a_cpu_does_and_by_the_kernel(
    shape: tuple[int, ...], ids: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, trajectory = Clock(reward_lag=3, reward_scale=-0.3), episodes(shape, ids=ids)
    expected, moved = inputs_of(clock.batch(trajectory)), trajectory.to("cuda")
    with fused_operations():
        monkeypatch.delattr(Clock, "inputs")
        batch = clock.batch(moved)
    assert same(inputs_of(batch), expected)
    assert batch.target is moved.target
    assert batch.valid is moved.valid
    assert batch.trajectory is moved


def test_an_engine_sets_the_kernel_for_as_long_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is also unset after a failure; outside, only torch's own operations compute."""
    asked: list[Tensor] = []
    monkeypatch.setattr(kernels, "can_shift", lambda obs, *others: bool(asked.append(obs)))
    clock, trajectory = Clock(), episodes()
    clock.batch(trajectory)
    assert not asked
    with pytest.raises(AttributeError), fused_operations():
        clock.batch(replace(trajectory, reward=None))
    clock.batch(trajectory)
    assert not asked
    with fused_operations():
        clock.batch(trajectory)
    assert len(asked) == 1
