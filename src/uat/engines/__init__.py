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
    if not isinstance(policy, TransformerPolicy):
        kind = type(policy).__name__
        return Engine(policy, refused=f"{kind} has no fused step", refused_pass=f"{kind} has no fused pass")
    if difference := unsupported_structure(policy):
        return Engine(policy, refused=f"no fused step: {difference}", refused_pass=f"no fused pass: {difference}")
    backbone, utility, horizon = policy.backbone, utility_of(policy), policy.spec.horizon
    refused_pass = "no fused pass: it takes episodes of a horizon, and the problem has none"
    if horizon is not None:
        refused_pass = kernels.unsupported_pass(backbone, utility, backbone.tokens_per_step * horizon)
    if refused := kernels.unsupported_step(backbone, utility):
        return Engine(policy, refused=refused, refused_pass=refused_pass)
    return FusedEngine(policy, refused_pass=refused_pass, concurrent_policies=concurrent_policies)


def plan_session(policy: Policy, streams: int, *, prefer: Literal["auto", "fast", "plain"] = "auto") -> Engine:
    """Choose how a policy acts in so many streams, with its weights as they are now if the engine is a fast one.

    prefer: "auto" takes the plain step where that is faster, which "fast" does not.
    """
    if prefer == "plain":
        return Engine(policy)
    if on_gpu(policy):
        planned = plan(policy)
        if not isinstance(planned, FusedEngine):
            return planned
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
