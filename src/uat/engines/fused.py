"""Views of policies on the shared backbone that compute steps, training passes and whole episodes in Triton kernels.

A fused view shares the `__dict__` of the policy, so weights, modules, hooks and mode are always the policy's own, and
the policy has no reference to the view. `Execution` holds everything else that the kernels need. Kernels read weights
and call no modules, so the structure of the policy is compared with that of a new policy whenever a memory is created,
a pass starts or an episode is played. A policy that has changed since then falls back to its own plain step and pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from uat.contracts import Memory
from uat.distributions import choose
from uat.engines import kernels
from uat.engines.worlds import FusedRollouts
from uat.episode import Batch, Losses, Noise, Step, Trajectory, masked_sum
from uat.methods.adt import ADT
from uat.methods.dt import DT
from uat.methods.iql import IQL
from uat.methods.policy import Policy, TransformerPolicy
from uat.methods.uat import UAT, UATState
from uat.methods.vanilla import Vanilla
from uat.nn import structure
from uat.nn.blocks import Transformer
from uat.nn.cache import KVCache
from uat.nn.utility import Gates, UtilityGates
from uat.spec import Box, Named


def unsupported_structure(policy: Policy) -> str | None:
    """Return the first feature of a policy that fast engines do not support; None if they support the policy."""
    if type(policy) not in VIEWS:
        return f"{type(policy).__name__} is a class of its own, and may compute anything"
    if isinstance(policy.spec.obs, Named):
        return "dictionary observations are encoded by the plain engine alone"
    if isinstance(policy.spec.action, Box):
        return "actions of a box are decided by the plain engine alone"
    if isinstance(policy, UAT) and policy.config.binding != "early":
        return f"{policy.config.binding} gates are computed by the plain engine alone"
    if isinstance(policy, UAT) and policy.config.tokens != "observation":
        return f"tokens={policy.config.tokens!r} with gates are computed by the plain engine alone"
    if isinstance(policy, UAT) and policy.config.use_return:
        return "gates that know the return so far are computed by the plain engine alone"
    return structure.difference(policy, policy.spec, policy.config)


def utility_of(policy: Policy) -> UtilityGates | None:
    """Return the module that turns feedback into gates; None if the method has none."""
    return policy.utility if isinstance(policy, UAT) else None


@dataclass(slots=True)
class Execution:
    """Settings and buffers of the kernels of one policy."""

    policy: TransformerPolicy
    fused_step: bool = True
    fused_pass: bool = False
    concurrent_policies: int = 1
    """Number of policies that act on the device at a time; a step launches its share of the programs."""
    dropout_seed: Tensor = field(init=False)
    """Seed of dropout in the fused pass. CUDA graphs read this tensor, so it is never replaced."""

    def __post_init__(self) -> None:
        self.dropout_seed = torch.zeros((), dtype=torch.long, device=self.policy.backbone.like.device)

    def takes_pass(self) -> bool:
        """Whether the training pass is fused. It is switched off for good once the policy has changed, or if only some
        modules of the backbone are in training mode: the kernels apply dropout everywhere or nowhere."""
        if self.fused_pass and self.policy.training:
            alike = all(module.training for module in self.policy.backbone.modules())
            self.fused_pass = alike and unsupported_structure(self.policy) is None
        return self.fused_pass and self.policy.training


@dataclass(slots=True)
class PackedCache(KVCache):
    """KV cache of a fused step, with the weights at the time of its creation in the layout that the step reads."""

    packed: Any = None

    def _fields(self) -> list[tuple[str, Any]]:
        """Return the fields that have an axis of streams, which excludes the weights."""
        return [(name, value) for name, value in Memory._fields(self) if name != "packed"]


class FusedTransformer(Transformer):
    """A view of a backbone that fuses attention over a sequence and over a cache."""

    __slots__ = ("execution",)
    execution: Execution

    @classmethod
    def of(cls, backbone: nn.Module, execution: Execution) -> Self:
        view = cls.__new__(cls)
        object.__setattr__(view, "__dict__", vars(backbone))
        object.__setattr__(view, "execution", execution)
        return view

    def attend(self, x_BTD: Tensor, gates: Gates | None = None, start_B: Tensor | None = None) -> Tensor:
        if gates is None and self.execution.takes_pass():
            return kernels.fused_attend(self, x_BTD, self.execution.dropout_seed)
        return super().attend(x_BTD, gates, start_B)

    def attend_step(
        self, x_BD: Tensor, cache: KVCache, gates: Gates | None = None, inputs: list[Tensor] | None = None
    ) -> Tensor:
        if isinstance(cache, PackedCache):
            return kernels.fused_token(self, x_BD, cache, cache.packed, self.execution.concurrent_policies)
        return super().attend_step(x_BD, cache, gates, inputs)

    def init_cache(self, streams: int, capacity: int) -> KVCache:
        policy = self.execution.policy
        if not self.execution.fused_step or unsupported_structure(policy) is not None:
            return super().init_cache(streams, capacity)
        self.check_range(capacity)
        c, packed = self.config, kernels.pack(self, utility_of(policy))
        cache = PackedCache.empty(
            layers=c.num_layers,
            streams=streams,
            heads=c.num_heads,
            capacity=self.tokens_per_step * capacity,
            d_head=c.d_model // c.num_heads,
            like=self.like if packed is None else packed.matrices,
        )
        cache.packed = packed
        return cache


class FusedPolicy(TransformerPolicy):
    """A view of a policy that fuses the blocks alone, for methods that make their own tokens."""

    __slots__ = ("_backbone", "execution")
    execution: Execution

    @classmethod
    def of(cls, execution: Execution) -> Self:
        view = cls.__new__(cls)
        object.__setattr__(view, "__dict__", vars(execution.policy))
        object.__setattr__(view, "execution", execution)
        object.__setattr__(view, "_backbone", FusedTransformer.of(execution.policy.backbone, execution))
        return view

    @property
    def backbone(self) -> FusedTransformer:  # pyright: ignore[reportIncompatibleVariableOverride]
        live = cast(nn.Module, self._modules["backbone"])
        if vars(self._backbone) is not vars(live):  # the policy's backbone was replaced
            object.__setattr__(self, "_backbone", FusedTransformer.of(live, self.execution))
        return self._backbone

    def loss(self, batch: Batch) -> Losses:
        """The loss of imitation, by a kernel where the pass and the head have one."""
        if not (self.execution.fused_pass and self.training and batch.allowed is None):
            return super().loss(batch)
        target, h_BTD = batch.required_target, self.features(batch)
        fused = None
        if self.execution.fused_pass:  # the features may have left it
            fused = kernels.fused_nll(self.head, h_BTD, target, batch.valid)
        return {"imitation": fused or masked_sum(self.head.nll(h_BTD, target), batch.valid)}

    def answer(self, state: Any, step: Step, gumbel_BA: Tensor | None = None) -> tuple[Tensor, Tensor, Any]:
        """Return the logits (B, A) of this step, the actions chosen from them, and the next state."""
        logits_BA, state = self.step(state, step)
        return logits_BA, choose(logits_BA, self.spec, gumbel_BA), state

    def supports_fused_rollout(self, worlds: Any) -> bool:
        """Whether `fused_rollout` plays these worlds."""
        return False

    def fused_rollout(self, worlds: FusedRollouts, noise: Noise, gumbel_BTA: Tensor | None = None) -> Trajectory:
        """Play one episode in each world, as `rollout` does, in one launch."""
        streams, world, execution = len(next(iter(noise.values()))), worlds.fused_world(noise), self.execution
        utility, policies = utility_of(execution.policy), execution.concurrent_policies
        action_BT = kernels.fused_play(
            self.backbone, utility, self.head, self.spec, streams, world, gumbel_BTA, policies
        )
        return world.trajectory(action_BT)


class WhollyFusedPolicy(FusedPolicy):
    """A view of a policy whose whole step, from the observation to the action, is one kernel."""

    __slots__ = ()

    def features(self, batch: Batch) -> Tensor:
        if self.execution.takes_pass():
            seed = self.execution.dropout_seed
            return kernels.fused_features(self.backbone, utility_of(self.execution.policy), batch, seed)
        return super().features(batch)

    def step(self, state: Any, step: Step) -> tuple[Tensor, Any]:
        if isinstance(_cache(state), PackedCache):
            return self._fused_step(state, step, None)[0], state
        return super().step(state, step)

    def decide(self, state: Any, step: Step, gumbel_BA: Tensor | None = None) -> tuple[Tensor, Any]:
        return self.answer(state, step, gumbel_BA)[1:]

    def answer(self, state: Any, step: Step, gumbel_BA: Tensor | None = None) -> tuple[Tensor, Tensor, Any]:
        if not isinstance(_cache(state), PackedCache):
            return super().answer(state, step, gumbel_BA)
        logits_BA, choice_B = self._fused_step(state, step, gumbel_BA)
        return logits_BA, choose(logits_BA, self.spec, gumbel_BA) if choice_B is None else choice_B, state

    def _fused_step(self, state: Any, step: Step, gumbel_BA: Tensor | None) -> tuple[Tensor, Tensor | None]:
        cache, execution = cast(PackedCache, _cache(state)), self.execution
        ubar_BU = state.ubar_BU if isinstance(state, UATState) else None
        utility, policies = utility_of(execution.policy), execution.concurrent_policies
        return kernels.fused_step(
            self.backbone, utility, self.head, step, cache, cache.packed, policies, ubar_BU, gumbel_BA
        )

    def supports_fused_rollout(self, worlds: Any) -> bool:
        if not self.execution.fused_step or not isinstance(worlds, FusedRollouts) or worlds.spec != self.spec:
            return False
        known = kernels.supports_rollout(self.backbone, self.head, self.spec)
        return known and unsupported_structure(self.execution.policy) is None


def _cache(state: Any) -> KVCache:
    return state.cache if isinstance(state, UATState) else state


class FusedUAT(WhollyFusedPolicy, UAT):  # pyright: ignore[reportIncompatibleVariableOverride, reportIncompatibleMethodOverride]
    __slots__ = ()


class FusedVanilla(WhollyFusedPolicy, Vanilla):  # pyright: ignore[reportIncompatibleVariableOverride, reportIncompatibleMethodOverride]
    __slots__ = ()


class FusedIQL(WhollyFusedPolicy, IQL):  # pyright: ignore[reportIncompatibleVariableOverride, reportIncompatibleMethodOverride]
    __slots__ = ()

    def loss(self, batch: Batch) -> Losses:
        return IQL.loss(self, batch)


class FusedADT(FusedPolicy, ADT):  # pyright: ignore[reportIncompatibleVariableOverride]
    __slots__ = ()


class FusedDT(FusedPolicy, DT):  # pyright: ignore[reportIncompatibleVariableOverride]
    __slots__ = ()


VIEWS: dict[type[Policy], type[FusedPolicy]] = {
    UAT: FusedUAT,
    Vanilla: FusedVanilla,
    IQL: FusedIQL,
    ADT: FusedADT,
    DT: FusedDT,
}
"""Classes that the kernels compute exactly. Subclasses may override anything, so they are not supported."""


def fused_view(policy: TransformerPolicy, **settings: Any) -> FusedPolicy:
    """Return a view of the policy with these settings of `Execution`; the caller checks that kernels support it."""
    return VIEWS[type(policy)].of(Execution(policy, **settings))
