"""How policies run on a device. `plan` decides it, in one place; nothing that says what policies compute imports this.

plain           torch's own operations, launch by launch: what the policy's class says
NumPy step      few streams on a CPU
fused step      Triton kernels on a GPU: a step, the training pass, and whole episodes where the worlds have a kernel
CUDA graphs     record what any of these launches (`uat.engines.graph`), in rollouts and updates on a GPU
"""

from __future__ import annotations

from typing import Literal

from uat.engines import kernels
from uat.engines.engine import Engine, FusedEngine
from uat.engines.frozen import FrozenFusedEngine, NumpyEngine
from uat.engines.fused import unsupported_structure, utility_of
from uat.methods.policy import Policy, TransformerPolicy
from uat.methods.uat import UAT
from uat.methods.vanilla import Vanilla

__all__ = ["Engine", "FusedEngine", "NumpyEngine", "plan", "plan_session"]

NUMPY_STREAMS = 8
"""Up to here a CPU's NumPy step, one stream after the other, beats the plain one, which takes all at once."""


def plan(policy: Policy, *, prefer: Literal["fast", "plain"] = "fast", concurrent_policies: int = 1) -> Engine:
    """Choose how a policy acts and learns on the device where it lies: the fastest way that computes the same.

    The engine's `name` says what was chosen, and `refused` why nothing faster was. Weights may change at any time.
    concurrent_policies: how many policies, this one among them, will act on the device at a time.
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
    """Why a policy cannot take the fused step on its device; None if it can."""
    if not isinstance(policy, TransformerPolicy):
        return f"{type(policy).__name__} has no fused step"
    if difference := unsupported_structure(policy):
        return f"no fused step: {difference}"
    return kernels.unsupported_step(policy.backbone, utility_of(policy))


def plan_session(policy: Policy, streams: int, *, prefer: Literal["auto", "fast", "plain"] = "auto") -> Engine:
    """Choose how a policy acts in so many streams, with its weights as they are now if the engine is a fast one.

    prefer: "auto" takes the plain step where that is faster, which "fast" does not.
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
