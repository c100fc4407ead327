"""How policies run on a device. `plan` chooses the engine; `nn`, `methods` and `domains` never import this package.

plain           torch's own operations, launch by launch, as written in the policy's class
NumPy step      few streams on a CPU
fused step      Triton kernels on a GPU: a step, the training pass, and whole episodes of worlds that have a kernel
CUDA graphs     record the launches of any of these (`uat.engines.graph`), in rollouts and updates on a GPU
"""

from __future__ import annotations

from typing import Literal

from uat.engines import kernels
from uat.engines.engine import Engine, FusedEngine
from uat.engines.frozen import FrozenFusedEngine, NumpyEngine
from uat.engines.fused import unsupported_structure, utility_of
from uat.engines.graph import SerialReplay
from uat.methods.policy import Policy, TransformerPolicy
from uat.methods.uat import UAT
from uat.methods.vanilla import Vanilla

__all__ = ["Engine", "FrozenFusedEngine", "FusedEngine", "NumpyEngine", "SerialReplay", "plan", "plan_session"]

NUMPY_STREAMS = 8
"""Most streams for which the NumPy step, one stream after the other, is faster than the batched plain step."""


def plan(policy: Policy, *, prefer: Literal["fast", "plain"] = "fast", concurrent_policies: int = 1) -> Engine:
    """Choose the fastest engine that supports a policy on its device and computes the same results.

    The engine's `name` is the choice, and `refused` is the reason why no faster one was chosen. The engine always uses
    the policy's current weights.
    concurrent_policies: number of policies, including this one, that act on the device at a time.
    """
    if prefer == "plain":
        return Engine(policy)
    if refused := unsupported_step(policy):
        return Engine(policy, refused=refused, refused_pass=refused.replace("fused step", "fused pass"))
    assert isinstance(policy, TransformerPolicy)
    backbone, horizon = policy.backbone, policy.spec.horizon
    refused_pass = "no fused pass: it takes episodes of a horizon, and the problem has none"
    if horizon is not None:
        steps = backbone.tokens_per_step * horizon
        refused_pass = kernels.unsupported_pass(backbone, utility_of(policy), steps)
    return FusedEngine(policy, refused_pass=refused_pass, concurrent_policies=concurrent_policies)


def unsupported_step(policy: Policy) -> str | None:
    """Return why the fused step does not support a policy on its device; None if it does."""
    if not isinstance(policy, TransformerPolicy):
        return f"{type(policy).__name__} has no fused step"
    if difference := unsupported_structure(policy):
        return f"no fused step: {difference}"
    return kernels.unsupported_step(policy.backbone, utility_of(policy))


def plan_session(policy: Policy, streams: int, *, prefer: Literal["auto", "fast", "plain"] = "auto") -> Engine:
    """Choose the engine of a session with this number of streams. Fast engines copy the current weights.

    prefer: "auto" takes the plain step if it is faster; "fast" takes it only if no fast step supports the policy.
    """
    if prefer == "plain":
        return Engine(policy)
    if on_gpu(policy):
        if refused := unsupported_step(policy):
            return Engine(policy, refused=refused)
        assert isinstance(policy, TransformerPolicy)
        engine = FrozenFusedEngine
    else:
        if prefer == "auto" and streams > NUMPY_STREAMS:
            return Engine(policy, refused=f"more than {NUMPY_STREAMS} streams are faster all at once")
        if type(policy) not in (UAT, Vanilla):  # a subclass may compute anything
            return Engine(policy, refused=f"{type(policy).__name__} has no fast step")
        assert isinstance(policy, UAT | Vanilla)
        if difference := unsupported_structure(policy):
            return Engine(policy, refused=difference)
        engine = NumpyEngine
    try:
        return engine(policy)
    except ValueError as error:
        return Engine(policy, refused=str(error))


def on_gpu(policy: Policy) -> bool:
    return next(policy.parameters()).is_cuda
