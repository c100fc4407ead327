"""Causal attention whose projections depend on feedback (paper, section "Feedback Conditioned Attention").

  q_t = W_Q x_t + ρ_t ⊙ (W_Q^u x_t) + U_Q ρ_t
  k_j = W_K x_j + g_j ⊙ (W_K^u x_j) + U_K g_j
  v_j = W_V x_j + g_j ⊙ (W_V^u x_j) + U_V g_j
  h_t = Σ_{j≤t} softmax_j(⟨q_t, k_j⟩ / √E) v_j          per head

Without gates this is plain causal attention; gates of zero give the same result to the last bit. Ablations remove some
of the W^u and U, whose terms are then zero. With rotary positions, the complete q_t and k_j are rotated
(`uat.nn.positions`). With late gates, k_j and v_j depend on the age of step j: queries of the same step meet one gate,
and later queries, once the feedback on step j is known, another (`uat.nn.utility.LateGate`). With a window of `context`
steps, the sum of every layer starts at the window's first step.
Shapes: B batch, T time (tokens), D width, H heads, E head size, S cached steps, W tokens of a window, C chunks of an
episode, each of a window's length. Heads are concatenated along D.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uat.nn.cache import KVCache, Window
from uat.nn.positions import Rotation
from uat.nn.utility import Channels, LateGate


class Parts(NamedTuple):
    """The three summands of one utility-affine projection."""

    base: Tensor
    """W x"""
    modulated: Tensor
    """gate ⊙ (W^u x)"""
    offset: Tensor
    """U gate"""

    def total(self) -> Tensor:
        return self.base + self.modulated + self.offset


class UtilityAffine(nn.Module):
    """W x + gate ⊙ (W^u x) + U gate for queries, keys and values.

    One parameter holds all W and W^u: rows of Q, K, V, then of their utility twins. The base rows have a product of
    their own, exactly as without utility, so that zero gates change no bit.
    utility: the channels of feedback; True: all, False: none.
    """

    def __init__(self, d_model: int, num_heads: int, *, utility: Channels | bool) -> None:
        super().__init__()
        d_head = d_model // num_heads
        channels = utility if isinstance(utility, Channels) else Channels(queries=utility, keys_values=utility)
        self.num_heads, self.modulated = num_heads, channels.modulated
        twins = len(self.modulated)
        self.weight = nn.Parameter(torch.empty((3 + twins) * d_model, d_model))
        nn.init.uniform_(self.weight[: 3 * d_model], -(d_model**-0.5), d_model**-0.5)
        nn.init.normal_(self.weight[3 * d_model :], std=0.1)
        zeros = torch.zeros(twins, num_heads, d_head, d_head)  # U_Q, U_K, U_V, or the existing ones
        self.bias_3HEE = nn.Parameter(zeros) if twins and channels.offsets else None

    def forward(self, x: Tensor, rho: Tensor | None = None, g: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, each (..., D), for x of shape (..., D)."""
        if rho is None:
            q, k, v = F.linear(x, self.base_weight).chunk(3, dim=-1)
            return q, k, v
        q, ((k, v),) = self.by_gate(x, rho, [g])
        return q, k, v

    def by_gate(
        self, x: Tensor, rho: Tensor, gates: Sequence[Tensor | None]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return q, and k and v under each of several gates; None: no gate, so that k and v are W x."""
        base, twin = self._products(x)
        q, pairs = None, []
        for g in gates:
            if g is None:
                pairs.append((base[1], base[2]))
                continue
            parts = self._parts(base, twin, rho, g)
            q = parts[0].total() if q is None else q
            pairs.append((parts[1].total(), parts[2].total()))
        if q is None:
            q = self._parts(base, twin, rho, torch.zeros_like(rho))[0].total()
        return q, pairs

    def parts(self, x: Tensor, rho: Tensor, g: Tensor) -> tuple[Parts, Parts, Parts]:
        """Return the separate summands of q, k and v; zeros for missing channels."""
        return self._parts(*self._products(x), rho, g)

    def _products(self, x: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Return W x of queries, keys and values, and the existing W^u x by their letters."""
        base = F.linear(x, self.base_weight).chunk(3, dim=-1)
        twins = F.linear(x, self.twin_weight).chunk(len(self.modulated), dim=-1)
        return base, dict(zip(self.modulated, twins, strict=True))

    def _parts(
        self, base: tuple[Tensor, ...], twin: dict[str, Tensor], rho: Tensor, g: Tensor
    ) -> tuple[Parts, Parts, Parts]:
        offset = self._offsets(rho, g)

        def parts(name: str, base: Tensor, gate: Tensor) -> Parts:
            modulated = gate * twin[name] if name in twin else _zeros(base)
            return Parts(base, modulated, offset[name] if name in offset else _zeros(base))

        return parts("q", base[0], rho), parts("k", base[1], g), parts("v", base[2], g)

    @property
    def base_weight(self) -> Tensor:
        """W_Q, W_K, W_V as one (3D, D)."""
        return self.weight[: 3 * self.weight.shape[1]]

    @property
    def twin_weight(self) -> Tensor:
        """W_Q^u, W_K^u, W_V^u, or the existing ones, as one (up to 3D, D)."""
        return self.weight[3 * self.weight.shape[1] :]

    def _offsets(self, rho: Tensor, g: Tensor) -> dict[str, Tensor]:
        """Return U gate of each projection that has one."""
        offsets: dict[str, Tensor] = {}
        if self.bias_3HEE is not None and "q" in self.modulated:
            offsets["q"] = self._offset(rho, self.bias_3HEE[:1])[0]
        if self.bias_3HEE is not None and "k" in self.modulated:
            offsets["k"], offsets["v"] = self._offset(g, self.bias_3HEE[-2:])
        return offsets

    def _offset(self, gate: Tensor, bias_KHEE: Tensor) -> Tensor:
        """Return U gate within each head, for each of the K matrices: (K, ..., D)."""
        gate_HNE = gate.reshape(-1, self.num_heads, gate.shape[-1] // self.num_heads).transpose(0, 1)
        offset_KHNE = gate_HNE @ bias_KHEE.mT
        return offset_KHNE.transpose(1, 2).reshape(-1, *gate.shape)


def _zeros(x: Tensor) -> Tensor:
    """Zeros of the shape of x, expanded from one number to save memory."""
    return x.new_zeros(()).expand_as(x)


def attend_to_slots(q_BHRE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, visible_BS: Tensor | None) -> Tensor:
    """Return the attention (B, H, R, E) of a step's few queries over the visible slots; None: all slots are visible.

    For one query on a CPU, plain products take a third of the time of torch's attention. Types narrower than float32
    use torch's, since plain products would round more.
    """
    rows = q_BHRE.shape[2]
    mask_B1RS = None if visible_BS is None else visible_BS[:, None, None].expand(-1, -1, rows, -1)
    if q_BHRE.device.type != "cpu" or q_BHRE.dtype not in (torch.float32, torch.float64):
        return F.scaled_dot_product_attention(q_BHRE, k_BHSE, v_BHSE, attn_mask=mask_B1RS)
    logits_BHRS = (q_BHRE * q_BHRE.shape[-1] ** -0.5) @ k_BHSE.mT
    if mask_B1RS is not None:
        logits_BHRS = logits_BHRS.masked_fill(~mask_B1RS, -torch.inf)
    return logits_BHRS.softmax(-1) @ v_BHSE


LONG = 128
"""Number of queries from which keys of several ages are attended to in one call; fewer are faster with matrices."""


class AgedKeys(NamedTuple):
    """Keys and values (B, H, T, E) of tokens that are at least so many steps old."""

    least: int
    k_BHTE: Tensor
    v_BHTE: Tensor


class Geometry(NamedTuple):
    """Positions and window of the tokens in a pass over whole episodes; the default is plain causal attention."""

    rotation: Rotation | None = None
    context: int | None = None
    """Steps that a step attends to, itself included; None: all steps so far."""
    tokens_per_step: int = 1

    def turn(self, x: Tensor) -> Tensor:
        """Return the queries or keys (..., T, E), rotated if positions are rotary."""
        return x if self.rotation is None else self.rotation.turn(x)

    def age(self, tokens: int, device: torch.device | str) -> Tensor:
        """(T, T) steps from each key to the query; negative in the future."""
        step_T = torch.arange(tokens, device=device) // self.tokens_per_step
        return step_T[:, None] - step_T

    def expired(self, tokens: int, device: torch.device | str) -> Tensor:
        """(T, T) True where a key lies before the window of the query."""
        return self.age(tokens, device) >= (tokens if self.context is None else self.context)

    def visible(self, tokens: int, device: torch.device | str) -> Tensor:
        """(T, T) True where a query sees a key: not in the future, and inside the window."""
        future_TT = torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)
        return ~(future_TT | self.expired(tokens, device))

    def attend(self, q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, dropout: float = 0.0) -> Tensor:
        """Return the softmax attention (B, H, T, E) of rotated queries and keys.

        For episodes longer than the window, time and memory grow with T W instead of T².
        """
        tokens = q_BHTE.shape[-2]
        if self.context is None or tokens <= (width := self.context * self.tokens_per_step):
            return F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True, dropout_p=dropout)
        chunks = -(-tokens // width)
        q, k, v = (_chunked(x, chunks, width) for x in (q_BHTE, k_BHTE, v_BHTE))
        k, v = (_with_previous(x) for x in (k, v))
        visible_C1WX = self.visible(2 * width, q.device)[width:].expand(chunks, 1, -1, -1).clone()
        visible_C1WX[0, :, :, :width] = False  # nothing comes before the first chunk
        h_CXWE = F.scaled_dot_product_attention(q, k, v, attn_mask=visible_C1WX, dropout_p=dropout)
        return h_CXWE.unflatten(1, q_BHTE.shape[:2]).permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :tokens]

    def attend_by_age(self, q_BHTE: Tensor, by_age: Sequence[AgedKeys], dropout: float = 0.0) -> Tensor:
        """Return the attention (B, H, T, E) where the keys and values of a token change with its age in steps.

        by_age: the oldest first; each serves from its `least` age on, up to that of the one before.
        """
        tokens = q_BHTE.shape[-2]
        if self.context is None or tokens <= (width := self.context * self.tokens_per_step):
            visible_TT = self.visible(tokens, q_BHTE.device)
            return _weighted(q_BHTE, by_age, visible_TT, self.age(tokens, q_BHTE.device), dropout)
        chunks = -(-tokens // width)
        q_CXWE = _chunked(q_BHTE, chunks, width)
        pairs = [
            AgedKeys(least, *(_with_previous(_chunked(x, chunks, width)) for x in (k, v))) for least, k, v in by_age
        ]
        visible_C1WX = self.visible(2 * width, q_BHTE.device)[width:].expand(chunks, 1, -1, -1).clone()
        visible_C1WX[0, :, :, :width] = False  # nothing comes before the first chunk
        h_CXWE = _weighted(q_CXWE, pairs, visible_C1WX, self.age(2 * width, q_BHTE.device)[width:], dropout)
        return h_CXWE.unflatten(1, q_BHTE.shape[:2]).permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :tokens]


CAUSAL = Geometry()


def _logits_by_age(q: Tensor, by_age: Sequence[AgedKeys], age: Tensor) -> Tensor:
    """Return ⟨q, k⟩ / √E, with the key of each pair's age."""
    scaled = q * q.shape[-1] ** -0.5
    (older, key, _), *others = by_age
    logits = scaled @ key.mT
    for least, key, _ in others:
        logits = torch.where(age >= older, logits, scaled @ key.mT)
        older = least
    return logits


def _weighted(q: Tensor, by_age: Sequence[AgedKeys], visible: Tensor, age: Tensor, dropout: float) -> Tensor:
    """Return the sum of values of each pair's age, weighted by a softmax over the visible keys."""
    if not dropout and q.shape[-2] >= LONG:
        return _weighted_at_once(q, by_age, visible, age)
    weights = _logits_by_age(q, by_age, age).masked_fill(~visible, -torch.inf).softmax(-1)
    weights = F.dropout(weights, dropout) if dropout else weights
    (older, _, value), *others = by_age
    h = torch.where(age >= older, weights, 0.0) @ value
    for least, _, value in others:
        h = h + torch.where((age >= least) & (age < older), weights, 0.0) @ value
        older = least
    return h


def _weighted_at_once(q: Tensor, by_age: Sequence[AgedKeys], visible: Tensor, age: Tensor) -> Tensor:
    """Return the same as `_weighted` from one attention over the keys of all pairs, each visible at its ages alone, so
    that no matrix of logits is stored."""
    masks, older = [], None
    for least, _, _ in by_age:
        masks.append(visible & (age >= least) if older is None else visible & (age >= least) & (age < older))
        older = least
    keys, values = torch.cat([key for _, key, _ in by_age], dim=-2), torch.cat([value for *_, value in by_age], dim=-2)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=torch.cat(masks, dim=-1))


def _chunked(x_BHTE: Tensor, chunks: int, width: int) -> Tensor:
    """Split the episode into chunks of the window's length, (C, BH, W, E), with the last one padded."""
    padded = F.pad(x_BHTE, (0, 0, 0, chunks * width - x_BHTE.shape[-2]))
    return padded.unflatten(2, (chunks, width)).permute(2, 0, 1, 3, 4).flatten(1, 2)


def _with_previous(x_CXWE: Tensor) -> Tensor:
    """Prepend to each chunk the chunk before it: (C, BH, 2W, E)."""
    before = torch.cat([torch.zeros_like(x_CXWE[:1]), x_CXWE[:-1]])
    return torch.cat([before, x_CXWE], dim=2)


class Attention(nn.Module):
    """Multi-head causal attention over utility-affine projections, with a cached step."""

    def __init__(self, d_model: int, num_heads: int, *, dropout: float, utility: Channels | bool) -> None:
        super().__init__()
        self.project = UtilityAffine(d_model, num_heads, utility=utility)
        self.out = nn.Linear(d_model, d_model)
        self.num_heads, self.dropout = num_heads, dropout

    def forward(
        self, x_BTD: Tensor, rho_BTD: Tensor | None, g_BTD: Tensor | LateGate | None, geometry: Geometry = CAUSAL
    ) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        if isinstance(g_BTD, LateGate):
            h_BHTE = geometry.attend_by_age(*self._by_age(x_BTD, rho_BTD, g_BTD, geometry), dropout)
        else:
            q, k, v = (self._split(y).transpose(-2, -3) for y in self.project(x_BTD, rho_BTD, g_BTD))  # (B, H, T, E)
            h_BHTE = geometry.attend(geometry.turn(q), geometry.turn(k), v, dropout)
        return self.out(h_BHTE.transpose(1, 2).flatten(-2))

    def _by_age(
        self, x_BTD: Tensor, rho_BTD: Tensor | None, gate: LateGate, geometry: Geometry
    ) -> tuple[Tensor, list[AgedKeys]]:
        """Return queries (B, H, T, E), and keys and values by the age at which they are met."""
        assert rho_BTD is not None
        ages, gates = zip(*gate.by_age(), strict=True)
        q, pairs = self.project.by_gate(x_BTD, rho_BTD, gates)
        q, *keys_values = (self._split(y).transpose(-2, -3) for y in (q, *(y for pair in pairs for y in pair)))
        keys, values = keys_values[::2], keys_values[1::2]
        by_age = [AgedKeys(age, geometry.turn(k), v) for age, k, v in zip(ages, keys, values, strict=True)]
        return geometry.turn(q), by_age

    def step(
        self,
        x_BD: Tensor,
        rho_BD: Tensor | None,
        g_BD: Tensor | None,
        cache: KVCache,
        layer: int,
        window: Window,
        rotation: Rotation | None = None,
    ) -> Tensor:
        q_BHE, k_BHE, v_BHE = (self._split(y) for y in self.project(x_BD, rho_BD, g_BD))
        if rotation is not None:
            q_BHE, k_BHE = rotation.turn(q_BHE), rotation.turn(k_BHE)
        k_BHSE, v_BHSE = cache.write(layer, k_BHE, v_BHE, window)
        q_BH1E = q_BHE[:, :, None].to(k_BHSE.dtype)
        return self.out(attend_to_slots(q_BH1E, k_BHSE, v_BHSE, window.visible_BS).flatten(1))

    def rewrite(
        self, x_BD: Tensor, g_BD: Tensor, cache: KVCache, layer: int, back: int, rotation: Rotation | None = None
    ) -> None:
        """Replace the keys and values of the token `back` tokens before the next one, whose input was x, by those under
        the gate g. rotation: that of the token's own position."""
        _, [(k_BD, v_BD)] = self.project.by_gate(x_BD, torch.zeros_like(g_BD), [g_BD])
        k_BHE, v_BHE = self._split(k_BD), self._split(v_BD)
        cache.rewrite(layer, back, k_BHE if rotation is None else rotation.turn(k_BHE), v_BHE)

    def logit_terms(self, x_BTD: Tensor, rho_BTD: Tensor, g_BTD: Tensor, geometry: Geometry = CAUSAL) -> Tensor:
        """Return ⟨q_t, k_j⟩ / √E term by term: (3, 3, B, H, T, T), query part by key part, in the order of `Parts`.

        Entry [0, 0] is the logit from observations alone; the other entries are what feedback adds ("modulation").
        Rotation is linear, so each part can be rotated separately. Keys in the future or before the window have terms
        too.
        """
        q, k, _ = self.project.parts(x_BTD, rho_BTD, g_BTD)
        q_3BHTE, k_3BHTE = (geometry.turn(self._split(torch.stack(parts)).transpose(-2, -3)) for parts in (q, k))
        return q_3BHTE[:, None] @ k_3BHTE[None].mT / q_3BHTE.shape[-1] ** 0.5

    def logit_split(
        self, x_BTD: Tensor, rho_BTD: Tensor | None, g_BTD: Tensor | LateGate | None, geometry: Geometry = CAUSAL
    ) -> tuple[Tensor, Tensor]:
        """Split the logits into a part from observations and a part from feedback, both (B, H, T, T)."""
        if rho_BTD is None or g_BTD is None or isinstance(g_BTD, LateGate):
            q, k = (geometry.turn(self._split(y).transpose(-2, -3)) for y in self.project(x_BTD)[:2])
            base_BHTT = q @ k.mT / q.shape[-1] ** 0.5
            if isinstance(g_BTD, LateGate):
                return base_BHTT, self.logits(x_BTD, rho_BTD, g_BTD, geometry) - base_BHTT
            return base_BHTT, torch.zeros_like(base_BHTT)
        terms = self.logit_terms(x_BTD, rho_BTD, g_BTD, geometry).flatten(0, 1)
        return terms[0], terms[1:].sum(0)

    def weights(
        self, x_BTD: Tensor, rho_BTD: Tensor | None, g_BTD: Tensor | LateGate | None, geometry: Geometry = CAUSAL
    ) -> Tensor:
        """The attention weights (B, H, T, T), for inspection."""
        visible_TT = geometry.visible(x_BTD.shape[-2], x_BTD.device)
        logits_BHTT = self.logits(x_BTD, rho_BTD, g_BTD, geometry)
        return logits_BHTT.masked_fill(~visible_TT, -torch.inf).softmax(-1)

    def logits(
        self, x_BTD: Tensor, rho_BTD: Tensor | None, g_BTD: Tensor | LateGate | None, geometry: Geometry = CAUSAL
    ) -> Tensor:
        """Return ⟨q_t, k_j⟩ / √E (B, H, T, T), for inspection; keys in the future have logits too."""
        if isinstance(g_BTD, LateGate):
            q, by_age = self._by_age(x_BTD, rho_BTD, g_BTD, geometry)
            return _logits_by_age(q, by_age, geometry.age(x_BTD.shape[-2], x_BTD.device))
        projected = self.project(x_BTD, rho_BTD, g_BTD)[:2]
        q, k = (geometry.turn(self._split(y).transpose(-2, -3)) for y in projected)
        return q @ k.mT / q.shape[-1] ** 0.5

    def _split(self, y: Tensor) -> Tensor:
        return y.unflatten(-1, (self.num_heads, -1))  # (..., D) -> (..., H, E)
