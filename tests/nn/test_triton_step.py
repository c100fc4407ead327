"""The fused step against its slow twin: on a GPU where there is one, by Triton's interpreter elsewhere."""

# ruff: noqa: E402 (Triton reads its setting when it is imported)
from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined
pytest.importorskip("triton")

from tests.builders import random_batch, randomise
from uat.acting import choose
from uat.methods import METHODS
from uat.methods.uat import UAT, UATConfig
from uat.methods.vanilla import Vanilla, VanillaConfig
from uat.nn.kernels.triton_step import WIDEST, fused_step, pack, unfit
from uat.types import Assets, Discrete, Items, Spec, Step, Vector, Weights

DEVICE = "cuda" if CUDA else "cpu"
SPEC = Spec(obs=Vector(5), action=Discrete(4), horizon=1000)
SMALL = {"d_model": 32, "num_heads": 2, "num_layers": 2, "d_ff": 64, "dropout": 0.0}
POISON = 1e18


def build(kind: type[UAT] | type[Vanilla], **sizes: int | float) -> UAT | Vanilla:
    config = UATConfig if kind is UAT else VanillaConfig
    policy = kind(SPEC, config(**{**SMALL, **sizes}))  # pyright: ignore[reportArgumentType]
    return randomise(policy, 1).float().to(DEVICE).eval()


def worst_difference(policy: UAT | Vanilla, streams: int, steps: int) -> float:
    """The largest difference between the two, relative to the largest logit, over steps with restarts on the way."""
    utility = policy.utility if isinstance(policy, UAT) else None
    slow: Any
    fast: Any
    slow, fast = (policy.init_state(streams, steps, DEVICE) for _ in range(2))
    cache, ubar_BU = (fast, None) if not isinstance(policy, UAT) else (fast.cache, fast.ubar_BU)
    cache.kv_L2BHSE.fill_(POISON)
    cache.layers = pack(policy.backbone)
    generator, worst = torch.Generator().manual_seed(0), 0.0

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    for t in range(steps):
        first = torch.ones(streams, dtype=torch.bool) if t == 0 else torch.rand(streams, generator=generator) < 0.05
        action = torch.randint(-1, 4, (streams,), generator=generator)
        known = {"prev_action": action.to(DEVICE), "prev_reward": random(streams), "first": first.to(DEVICE)}
        step = Step(obs=random(streams, 5), **known)
        with torch.no_grad():
            expected, slow = policy.step(slow, step)
            noise = -torch.log(-torch.log(torch.rand(streams, 4, generator=generator))).to(DEVICE)
            found, choice = fused_step(policy.backbone, utility, policy.head, step, cache, ubar_BU, noise)
            assert torch.equal(choice, choose(found, SPEC, noise))
        worst = max(worst, ((found - expected).abs().max() / expected.abs().max()).item())
    return worst


@pytest.mark.parametrize("kind", [UAT, Vanilla])
@pytest.mark.parametrize(("streams", "steps"), [(1, 70), (3, 4), (19, 2)])
def test_fused_step_equals_the_slow_one(kind: type[UAT] | type[Vanilla], streams: int, steps: int) -> None:
    assert worst_difference(build(kind), streams, steps) < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [UAT, Vanilla])
@pytest.mark.parametrize(("streams", "steps"), [(1, 1000), (63, 200), (256, 60), (257, 61), (1024, 33), (4096, 5)])
def test_fused_step_equals_the_slow_one_at_full_size(kind: type[UAT] | type[Vanilla], streams: int, steps: int) -> None:
    assert worst_difference(build(kind, d_model=64, num_heads=4, num_layers=3, d_ff=128), streams, steps) < 1e-5


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [({"d_model": 48}, "d_model is 48"), ({"d_ff": 96}, "d_ff is 96"), ({"d_model": 8}, "d_model is 8")],
)
def test_sizes_that_do_not_fit_are_named(sizes: dict[str, int], reason: str) -> None:
    policy = build(Vanilla, **sizes)
    assert reason in (unfit(policy.backbone, None) or "")


def test_doubles_take_the_slow_step() -> None:
    double = build(UAT).double()
    assert isinstance(double, UAT)
    assert "float64" in (unfit(double.backbone, double.utility) or "")


SPECS = [
    Spec(obs=Items(7), action=Discrete(3), horizon=4),
    Spec(obs=Assets(3, 2), action=Weights(3), horizon=4),
    Spec(obs=Vector(200), action=Discrete(150), horizon=4),
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("masked", [False, True])
def test_every_kind_of_observation_and_action(spec: Spec, masked: bool) -> None:
    policy = randomise(UAT(spec, UATConfig(**SMALL)), 1).float().to(DEVICE).eval()
    slow, fast = (policy.init_state(3, 4, DEVICE) for _ in range(2))
    fast.cache.layers = pack(policy.backbone)
    batch = random_batch(spec, whole=True).to(DEVICE)
    for t in range(4):
        allowed = torch.ones(3, spec.action.count, dtype=torch.bool, device=DEVICE)
        allowed[:, 1] = False
        told = {name: getattr(batch, name)[:, t] for name in ("obs", "prev_action", "prev_reward")}
        told = {name: x.float() if x.is_floating_point() else x for name, x in told.items()}
        first = torch.full((3,), t == 0, device=DEVICE)
        step = Step(**told, first=first, allowed=allowed if masked else None)
        with torch.no_grad():
            expected, slow = policy.step(slow, step)
            found, choice = fused_step(policy.backbone, policy.utility, policy.head, step, fast.cache, fast.ubar_BU)
        assert torch.equal(found.isinf(), expected.isinf())
        seen = expected.isfinite()
        assert (found - expected)[seen].abs().max() < 1e-5 * expected[seen].abs().max()
        if isinstance(spec.action, Weights) or spec.action.count > WIDEST:
            assert choice is None
        else:
            assert torch.equal(choice, choose(found, spec))


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.policy is UAT])
def test_an_ablation_takes_the_slow_step_and_says_why(method: str) -> None:
    policy = METHODS[method].build(SPEC, METHODS[method].configure(**SMALL))
    assert isinstance(policy, UAT)
    lacks = "it takes the whole of UAT, and this variant lacks a part"
    assert unfit(policy.backbone, policy.utility) == (lacks if METHODS[method].changes else None)


@pytest.mark.skipif(CUDA, reason="shows what happens without CUDA")
def test_a_policy_on_a_cpu_says_why_it_is_not_fused() -> None:
    policy = build(UAT)
    assert policy.fuse() == "the fused step needs CUDA"
    assert not policy.fused
