"""Action-reward history -> utility -> gates (paper, section "Utility Encoder").

  u_t    = E([f_a(a_{t-1}); r_{t-1}])            utility of the latest feedback
  ubar_t = λ ubar_{t-1} + (1-λ) u_t              regime state
  g_t    = tanh(W_s^(l) u_t)                     gate of keys and values, per layer
  ρ_t    = tanh(W_ρ ubar_t)                      gate of queries, shared by all layers

Every map is bias-free: without feedback u = 0, and all gates are exactly zero.
Heads lie side by side in D: head h owns the entries [h·E, (h+1)·E) of a gate.
Shapes: B batch, T time, D width, U utility width, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from uat.nn.encoders import build_action_encoder
from uat.types import Spec


@dataclass(frozen=True, slots=True)
class Gates:
    """What feedback does to attention: everything lies in [-1, 1]; leading axes are (B, T), or (B,) in a step."""

    rho: Tensor
    """(..., D) on queries."""
    g: tuple[Tensor, ...]
    """One (..., D) per layer, on keys and values."""


class UtilityEncoder(nn.Module):
    """E with its action embedding f_a: a bias-free two-layer network."""

    def __init__(self, spec: Spec, *, d_action: int, d_hidden: int, d_utility: int) -> None:
        super().__init__()
        self.d_hidden = d_hidden
        self.action = build_action_encoder(spec, d_action)  # f_a
        self.mlp = nn.Sequential(
            nn.Linear(d_action + 1, d_hidden, bias=False), nn.ReLU(), nn.Linear(d_hidden, d_utility, bias=False)
        )

    def forward(self, prev_action: Tensor, prev_reward: Tensor) -> Tensor:
        a = self.action(prev_action)
        return self.mlp(torch.cat([a, prev_reward.to(a.dtype)[..., None]], dim=-1))


class UtilityGates(nn.Module):
    """From feedback to the gates of all layers, for all steps at once or one at a time."""

    def __init__(
        self, spec: Spec, *, d_model: int, num_layers: int, d_action: int, d_hidden: int, d_utility: int, decay: float
    ) -> None:
        super().__init__()
        self.encoder = UtilityEncoder(spec, d_action=d_action, d_hidden=d_hidden, d_utility=d_utility)
        self.token = nn.Linear(d_utility, num_layers * d_model, bias=False)  # W_s of all layers
        self.regime = nn.Linear(d_utility, d_model, bias=False)  # W_ρ
        nn.init.zeros_(self.token.weight)
        nn.init.zeros_(self.regime.weight)
        self.num_layers, self.d_utility, self.decay = num_layers, d_utility, decay

    def forward(self, prev_action_BT: Tensor, prev_reward_BT: Tensor) -> Gates:
        u_BTU = self.encoder(prev_action_BT, prev_reward_BT)
        return self.read(u_BTU, discounted(u_BTU, self.decay))

    def step(self, ubar_BU: Tensor, prev_action_B: Tensor, prev_reward_B: Tensor) -> tuple[Gates, Tensor]:
        u_BU = self.encoder(prev_action_B, prev_reward_B)
        ubar_BU = self.decay * ubar_BU + (1 - self.decay) * u_BU
        return self.read(u_BU, ubar_BU), ubar_BU

    def read(self, u: Tensor, ubar: Tensor) -> Gates:
        g = torch.tanh(self.token(u)).chunk(self.num_layers, dim=-1)
        return Gates(rho=torch.tanh(self.regime(ubar)), g=g)


def discounted(u_BTU: Tensor, decay: float) -> Tensor:
    """ubar at every step at once: the recurrence written as one lower-triangular product."""
    t = torch.arange(u_BTU.shape[1], device=u_BTU.device)
    age_TT = (t[:, None] - t).to(u_BTU.dtype)
    weight_TT = torch.where(age_TT >= 0, (1 - decay) * decay ** age_TT.clamp_min(0), 0.0)
    return weight_TT @ u_BTU
