"""Fused fast paths, each beside its slow twin. Their compilers are loaded when a path is taken, never before."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from uat.nn.blocks import Transformer
    from uat.nn.cache import KVCache
    from uat.nn.utility import UtilityGates
    from uat.types import Step


def unfit(backbone: Transformer, utility: UtilityGates | None) -> str | None:
    """Why a policy cannot take the fused step on its device; None if it can."""
    if backbone.positions.device.type != "cuda":
        return "the fused step needs CUDA"
    if importlib.util.find_spec("triton") is None:
        return "the fused step needs triton"
    from uat.nn.kernels.triton_step import unfit as too_odd

    reason = too_odd(backbone, utility)
    return None if reason is None else f"no fused step: {reason}"


def fused_step(
    backbone: Transformer, utility: UtilityGates | None, step: Step, cache: KVCache, ubar_BU: Tensor | None = None
) -> Tensor:
    """h (B, D) of one step of every stream, by Triton."""
    from uat.nn.kernels.triton_step import fused_step as fused

    return fused(backbone, utility, step, cache, ubar_BU)
