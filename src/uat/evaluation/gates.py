"""Norms of UAT's gates at every step: ‖ρ_t‖ of the regime gate, over all heads, and ‖g_t‖ of each layer's token gate.

Axes: L layers, B episodes, T time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from uat.episode import Batch
from uat.methods import Policy
from uat.methods.uat import UAT

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateNorms:
    rho_BT: Floats
    g_LBT: Floats


@torch.no_grad()
def gate_norms(policy: Policy, batch: Batch) -> GateNorms:
    """‖ρ_t‖, and ‖g_t‖ of every layer, at every step."""
    if not isinstance(policy, UAT):
        raise ValueError(f"{type(policy).__name__} has no gates")
    gates, last = policy.gates(batch), slice(policy.tokens_per_step - 1, None, policy.tokens_per_step)
    rho_BT, g_LBT = gates.rho[:, last].norm(dim=-1), gates.known_LBTD[:, :, last].norm(dim=-1)
    return GateNorms(rho_BT=rho_BT.double().cpu().numpy(), g_LBT=g_LBT.double().cpu().numpy())
