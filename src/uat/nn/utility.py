"""Action-reward history -> utility -> gates (paper, section "Utility Encoder").

  u_t    = E([f_a(a_{t-1}); r_{t-1}])            utility of the latest feedback; if E has a third channel, it is c R_t,
                                                 the return so far R_t = Σ_{s≤t} r_{s-1} times a factor c
  ubar_t = λ ubar_{t-1} + (1-λ) u_t              regime state
  g_t    = tanh(W_s^(l) u_t)                     gate of keys and values, per layer
  ρ_t    = tanh(W_ρ ubar_t)                      gate of queries, shared by all layers

Every map is bias-free: without feedback u = 0, and all gates are exactly zero. Ablations remove some of the maps; a
removed gate is zero, and so is the part of E's input that an ablation does not see.
Heads are concatenated along D: head h owns the entries [h·E, (h+1)·E) of a gate.
Shapes: B batch, T time, D width, U utility width, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from uat.clock import Clock
from uat.nn.encoders import ZeroMap, build_action_encoder
from uat.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """The projections that feedback changes: all of them in UAT, some of them in its ablations."""

    queries: bool = True
    """W_Q^u, U_Q and W_ρ."""
    keys_values: bool = True
    """W_K^u, W_V^u, U_K, U_V and W_s."""
    offsets: bool = True
    """The matrices U of the modulated projections."""

    @property
    def modulated(self) -> str:
        """The letters of q, k and v that have a utility twin."""
        return "q" * self.queries + "kv" * self.keys_values


class LateGate(NamedTuple):
    """Gates of keys and values that depend on the age of a token: on the steps between it and the query."""

    known_BTD: Tensor
    """Gate once the action and the reward of the token's step are known: from an age of `wait` steps on."""
    pending_BTD: Tensor | None
    """Gate while the reward is still to come: from an age of 1 up to `wait`. None: as for fresh tokens."""
    fresh_BTD: Tensor | None
    """Gate within the token's own step, in which no feedback on it exists yet. None: zero."""
    wait: int

    def by_age(self) -> list[tuple[int, Tensor | None]]:
        """Return each gate with the age from which on it applies, the oldest first."""
        pending = [] if self.pending_BTD is None or self.wait == 1 else [(1, self.pending_BTD)]
        return [(self.wait, self.known_BTD), *pending, (0, self.fresh_BTD)]


@dataclass(frozen=True, slots=True)
class Gates:
    """Gates by which feedback changes attention, all in [-1, 1]. Leading axes are (B, T), or (B,) in a step."""

    rho: Tensor
    """(..., D), the gate of queries."""
    g: tuple[Tensor | LateGate | None, ...]
    """One (..., D) per layer, the gate of keys and values. None: no gate, in a step whose feedback is still to come."""

    def repeated(self, tokens: int) -> Gates:
        """Return gates for steps of so many tokens, all of which have the gates of the step."""
        if tokens == 1:
            return self
        return Gates(self.rho.repeat_interleave(tokens, 1), tuple(g.repeat_interleave(tokens, 1) for g in self.plain))

    def of_queries(self) -> Gates:
        """Return the gates of queries alone."""
        return Gates(self.rho, (None,) * len(self.g))

    @property
    def plain(self) -> tuple[Tensor, ...]:
        """The gates of keys and values, none of which depends on age."""
        return tuple(g for g in self.g if isinstance(g, Tensor))

    @property
    def known_LBTD(self) -> Tensor:
        """The gates of keys and values once the feedback of their step is known, of all layers."""
        return torch.stack([g.known_BTD if isinstance(g, LateGate) else g for g in self.g if g is not None])


class UtilityEncoder(nn.Module):
    """The map E with its action embedding f_a: a bias-free two-layer network, or one linear map.

    return_scale: the factor c of the return so far, which is then a third channel; None: E has two channels.
    """

    def __init__(
        self,
        spec: Spec,
        *,
        d_action: int,
        d_hidden: int,
        d_utility: int,
        use_action: bool = True,
        use_reward: bool = True,
        nonlinear: bool = True,
        return_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.d_hidden, self.d_utility, self.return_scale = d_hidden, d_utility, return_scale
        self.use_action, self.use_reward, self.nonlinear = use_action, use_reward, nonlinear
        self.action = build_action_encoder(spec, d_action) if use_action else ZeroMap(spec.action.count, d_action)
        d_in = d_action + (1 if return_scale is None else 2)
        first = nn.Linear(d_in, d_hidden if nonlinear else d_utility, bias=False)
        rest = (nn.ReLU(), nn.Linear(d_hidden, d_utility, bias=False)) if nonlinear else ()
        self.mlp = nn.Sequential(first, *rest)

    def forward(self, prev_action: Tensor, prev_reward: Tensor, return_so_far: Tensor | None = None) -> Tensor:
        r = prev_reward.to(next(self.mlp.parameters()).dtype)[..., None]
        a = self.action(prev_action if self.use_action else r)
        channels = [a, r if self.use_reward else torch.zeros_like(r)]
        if self.return_scale is not None:
            assert return_so_far is not None
            channels.append(return_so_far.to(r.dtype)[..., None] * self.return_scale)
        return self.mlp(torch.cat(channels, dim=-1))

    def returns(self, prev_reward_BT: Tensor) -> Tensor | None:
        """Return the return so far R (B, T) of whole episodes; None if it is not a channel."""
        if self.return_scale is None:
            return None
        return prev_reward_BT.to(next(self.mlp.parameters()).dtype).cumsum(1)


class UtilityGates(nn.Module):
    """Compute the gates of all layers from feedback, for all steps at once or one step at a time."""

    def __init__(
        self,
        encoder: UtilityEncoder,
        *,
        d_model: int,
        num_layers: int,
        d_utility: int,
        feedback_decay: float,
        channels: Channels,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.token = _readout(d_utility, num_layers * d_model, exists=channels.keys_values)  # W_s of all layers
        self.regime = _readout(d_utility, d_model, exists=channels.queries)  # W_ρ
        self.num_layers, self.d_utility, self.channels = num_layers, d_utility, channels
        self.feedback_decay = feedback_decay

    def forward(self, prev_action_BT: Tensor, prev_reward_BT: Tensor) -> Gates:
        u_BTU = self.encoder(prev_action_BT, prev_reward_BT, self.encoder.returns(prev_reward_BT))
        return self.read(u_BTU, discounted(u_BTU, self.feedback_decay))

    def late(
        self, prev_action: Tensor, prev_reward_BT: Tensor, clock: Clock, *, pending: bool, transitions: bool = False
    ) -> Gates:
        """Return gates of which those of keys and values wait for the feedback on their own step.

        pending: gate a step by its action alone while its reward is still to come; otherwise its gate is zero.
        transitions: before each step's token there is one that holds the latest feedback, and is gated by it at once.
        """
        u_BTU = self.encoder(prev_action, prev_reward_BT)
        rho_BTD = torch.tanh(self.regime(discounted(u_BTU, self.feedback_decay)))
        action, reward_BT = clock.answers(prev_action, prev_reward_BT)
        known, waiting = self.keys_values(self.encoder(action, reward_BT)), None
        if pending and clock.wait > 1:
            waiting = self.keys_values(self.encoder(action, torch.zeros_like(reward_BT)))
        now = self.keys_values(u_BTU) if transitions else None

        def gate(layer: int) -> LateGate:
            later = None if waiting is None else waiting[layer]
            if now is None:
                return LateGate(known[layer], later, None, clock.wait)
            own, fresh = now[layer], _alternating(now[layer], torch.zeros_like(known[layer]))
            pending_B2TD = None if later is None else _alternating(own, later)
            return LateGate(_alternating(own, known[layer]), pending_B2TD, fresh, clock.wait)

        rho = rho_BTD.repeat_interleave(2, 1) if transitions else rho_BTD
        return Gates(rho, tuple(gate(layer) for layer in range(self.num_layers)))

    def step(
        self, ubar_BU: Tensor, prev_action_B: Tensor, prev_reward_B: Tensor, return_B: Tensor | None = None
    ) -> tuple[Gates, Tensor]:
        u_BU = self.encoder(prev_action_B, prev_reward_B, return_B)
        ubar_BU = self.feedback_decay * ubar_BU + (1 - self.feedback_decay) * u_BU
        return self.read(u_BU, ubar_BU), ubar_BU

    def read(self, u: Tensor, ubar: Tensor) -> Gates:
        return Gates(rho=torch.tanh(self.regime(ubar)), g=self.keys_values(u))

    def keys_values(self, u: Tensor) -> tuple[Tensor, ...]:
        """Return the gate (..., D) of keys and values in each layer."""
        return torch.tanh(self.token(u)).chunk(self.num_layers, dim=-1)


def _readout(d_in: int, d_out: int, *, exists: bool) -> nn.Linear | ZeroMap:
    """Linear map from utility to gates, initialised to zero; a `ZeroMap` if the variant has no such gate."""
    if not exists:
        return ZeroMap(d_in, d_out)
    readout = nn.Linear(d_in, d_out, bias=False)
    nn.init.zeros_(readout.weight)
    return readout


def _alternating(first_BTD: Tensor, second_BTD: Tensor) -> Tensor:
    """(B, 2T, D): the two of each step, one after the other."""
    return torch.stack([first_BTD, second_BTD], dim=2).flatten(1, 2)


def discounted(u_BTU: Tensor, decay: float) -> Tensor:
    """Return ubar at every step at once: the recurrence as one product with a lower-triangular matrix."""
    t = torch.arange(u_BTU.shape[1], device=u_BTU.device)
    age_TT = (t[:, None] - t).to(u_BTU.dtype)
    weight_TT = torch.where(age_TT >= 0, (1 - decay) * decay ** age_TT.clamp_min(0), 0.0)
    return weight_TT @ u_BTU
