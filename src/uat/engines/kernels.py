"""Triton kernels: checks of what they support, and functions that call them. The first kernel call imports Triton."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from uat.clock import Clock, inputs_by, nothing
from uat.nn.positions import unsupported_positions
from uat.noise import uniform_by, uniform_of_key

if TYPE_CHECKING:
    from uat.engines.worlds import FusedWorld
    from uat.episode import Batch, Step
    from uat.nn.blocks import Transformer
    from uat.nn.cache import KVCache
    from uat.nn.heads import Head
    from uat.nn.utility import UtilityGates
    from uat.spec import Spec


def compiles(device: torch.device) -> bool:
    """Whether Triton is installed and this device is an NVIDIA GPU that supports the kernels' instructions."""
    if device.type != "cuda" or torch.version.hip is not None or not _has_triton():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory available to a Triton program on this device."""
    from triton.runtime import driver

    index, active = torch.cuda.current_device() if device.index is None else device.index, cast(Any, driver.active)
    return active.utils.get_device_properties(index)["max_shared_mem"]


def unsupported_step(backbone: Transformer, utility: UtilityGates | None) -> str | None:
    """Return why the fused step does not support a policy on its device; None if it does."""
    if (reason := unsupported_positions(backbone.config.positions, backbone.config.context)) is not None:
        return f"no fused step: {reason}"
    if backbone.positions.device.type != "cuda":
        return "the fused step needs CUDA"
    if importlib.util.find_spec("triton") is None:
        return "the fused step needs triton"
    if not compiles(backbone.positions.device):
        return "the fused step needs an NVIDIA GPU of compute capability 8.0 or newer, whose instructions it uses"
    from uat.engines.triton.step import memory_taken, unsupported_reason

    reason, room = unsupported_reason(backbone, utility), shared_memory(backbone.positions.device)
    if reason is None and (most := memory_taken(backbone, utility)) > room:
        reason = (
            f"a program needs up to {most // 1024} KB of shared memory, and this device has {room // 1024}; "
            "precision tf32 needs less"
        )
    return None if reason is None else f"no fused step: {reason}"


def unsupported_pass(backbone: Transformer, utility: UtilityGates | None, steps: int) -> str | None:
    """Return why the fused pass does not support training on episodes of this length; None if it does."""
    if (reason := unsupported_step(backbone, utility)) is not None:
        return reason.replace("fused step", "fused pass")
    from uat.engines.triton.train import unsupported_reason

    reason = unsupported_reason(backbone, steps)
    return None if reason is None else f"no fused pass: {reason}"


def fused_features(backbone: Transformer, utility: UtilityGates | None, batch: Batch, seed: Tensor) -> Tensor:
    """Return features h (B, T, D) of whole episodes, with gradients, by Triton."""
    from uat.engines.triton.train import fused_features as fused

    return fused(backbone, utility, batch, seed)


def fused_attend(backbone: Transformer, x_BTD: Tensor, seed: Tensor) -> Tensor:
    """Return features h (B, T, D) of tokens, with gradients, by Triton."""
    from uat.engines.triton.train import fused_attend as fused

    return fused(backbone, x_BTD, seed)


def fused_nll(head: Head, h_BTD: Tensor, target_BT: Tensor, valid_BT: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the sum of -log π(target) over real steps and their number, by Triton; None if the head is unsupported."""
    from uat.engines.triton import nll as triton_nll

    if not triton_nll.fits(head, h_BTD):
        return None
    return triton_nll.fused_nll(head, h_BTD, target_BT, valid_BT)


def pack(backbone: Transformer, utility: UtilityGates | None) -> Any:
    """Return the weights in the layout that the fused step reads."""
    from uat.engines.triton.step import pack as pack_weights

    return pack_weights(backbone, utility)


def fused_step(
    backbone: Transformer,
    utility: UtilityGates | None,
    head: Head,
    step: Step,
    cache: KVCache,
    packed: Any,
    policies: int,
    ubar_BU: Tensor | None = None,
    gumbel_BA: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the logits (B, A) of one step of every stream, and the chosen ids (B,), by Triton."""
    from uat.engines.triton.step import fused_step as fused

    return fused(backbone, utility, head, step, cache, packed, policies, ubar_BU, gumbel_BA)


def fused_token(backbone: Transformer, x_BD: Tensor, cache: KVCache, packed: Any, policies: int) -> Tensor:
    """Return features h (B, D) of one token of every stream, by Triton."""
    from uat.engines.triton.step import fused_token as fused

    return fused(backbone, x_BD, cache, packed, policies)


def fused_play(
    backbone: Transformer,
    utility: UtilityGates | None,
    head: Head,
    spec: Spec,
    streams: int,
    world: FusedWorld,
    gumbel_BTA: Tensor | None,
    policies: int = 1,
) -> Tensor:
    """Play one episode in each world and return the actions (B, T), by Triton."""
    from uat.engines.triton.play import fused_play as fused

    return fused(backbone, utility, head, spec, streams, world, gumbel_BTA, policies)


def supports_rollout(backbone: Transformer, head: Head, spec: Spec) -> bool:
    """Whether a policy whose step is fused can play whole episodes in one launch."""
    from uat.engines.triton.play import fits

    return fits(backbone, head, spec)


def can_drop(x: Tensor) -> bool:
    """Whether `fused_dropout` supports this tensor."""
    return compiles(x.device) and x.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")


def fused_dropout(x: Tensor, seed: Tensor, share: float) -> Tensor:
    """Apply dropout of this share to x, with random numbers from the seed, by Triton."""
    from uat.engines.triton.dropout import fused_dropout as fused

    return fused(x, seed, share)


def can_descend(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `fused_adam` supports this optimizer."""
    first = next((p for group in optimizer.param_groups for p in group["params"]), None)
    if first is None or not compiles(first.device):
        return False
    from uat.engines.triton.adam import fits

    return fits(optimizer)


def fused_adam(optimizer: torch.optim.Optimizer, clip: float) -> Tensor:
    """Take a step of Adam with the clipped gradient; return the gradient's norm () before clipping, by Triton."""
    from uat.engines.triton.adam import fused_adam as fused

    return fused(optimizer, clip)


@contextlib.contextmanager
def fused_operations() -> Iterator[None]:
    """Compute named random streams and the clock in kernels inside, for tensors on a supported GPU.

    The numbers are the same to the last bit; code outside is only slower.
    """
    uniform, inputs = uniform_by.set(_uniform), inputs_by.set(_inputs)
    try:
        yield
    finally:
        inputs_by.reset(inputs)
        uniform_by.reset(uniform)


def _uniform(key: int, ids_B: Tensor, count: int) -> Tensor:
    if not compiles(ids_B.device):
        return uniform_of_key(key, ids_B, count)
    from uat.engines.triton.noise import fused_uniform

    return fused_uniform(key, ids_B, count)


def _inputs(
    clock: Clock, obs: Tensor, action: Tensor, reward_BT: Tensor, valid_BT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if not can_shift(obs, action, reward_BT, valid_BT):
        return clock.inputs(obs, action, reward_BT, valid_BT)
    from uat.engines.triton.clock import fused_inputs

    lag, scale, none = clock.reward_lag, clock.reward_scale, (nothing(obs), nothing(action))
    return fused_inputs(obs, action, reward_BT, valid_BT, lag=lag, scale=scale, none=none)


def can_shift(obs: Tensor, action: Tensor, reward_BT: Tensor, valid_BT: Tensor) -> bool:
    """Whether `fused_inputs` supports these tensors: on a GPU, actions that are ids, common dtypes, no gradients."""
    return (
        compiles(obs.device)
        and obs.dtype in (torch.float32, torch.int64)
        and (action.dtype, reward_BT.dtype, valid_BT.dtype) == (torch.int64, torch.float32, torch.bool)
        and obs.shape[:2] == action.shape == reward_BT.shape == valid_BT.shape
        and all(x.device == obs.device and not x.requires_grad for x in (obs, action, reward_BT, valid_BT))
    )
