"""One step of a few streams on a CPU in NumPy: no compiler, fewer calls than torch, and cheaper ones.

The slow twin is `Policy.step`, that is `UtilityGates.step`, `Transformer.step` and `Head.logits`; tests check that the
results are equal. A step of one stream makes about 70 small calls, so the number of calls and the overhead of each
dominate. The weights are copied once and multiplied together (in float64) where possible:

  scales and biases of norms become part of the following product; a bias is an extra row, multiplied by a constant 1;
  only norms read the residual stream, so all weights that write to it are centred, and a norm needs one dot product;
  1/√E becomes part of the queries; Q, K, V and their utility twins are one product, and so are the gates of all layers,
  and all matrices U;
  the embedding of an action is multiplied with the layer that reads it.

Ablations use the same step: missing parts are zeros, and a linear encoder is W x = max(W x, 0) - max(-W x, 0).

Streams are processed in a loop, each with its own length, and only filled slots are read. Keys and values are stored
with time as the last axis, in rows aligned with the CPU's cache lines, so BLAS reads them at memory bandwidth, the main
cost of a long context. The last row of values is all ones, so the product that sums the values also sums the attention
weights. The weights are exponentials of the raw scores; if a sum leaves the safe range, they are recomputed with the
maximum subtracted, as in the slow twin. With a window, the slots form a ring buffer; attention ignores their order.

Threads: NumPy's OpenBLAS computes products of the paper's sizes in one thread, so no number of threads is set here. For
wide policies (from about 256), two threads gain a little on idle cores and can be several times slower on busy ones.
For steady latency, set OPENBLAS_NUM_THREADS=1 before Python starts.

Shapes: B streams, D width, H heads, E head size, S cached steps, L layers, U utility width, A actions, I inputs,
F hidden units, X projections of a layer (3D, or 6D with twins), K matrices U of all layers; D1 is D and a constant 1,
E1 is E and a constant 1, R the rows of a head's memory (E keys, E values, ones), P the pairs of entries of a head that
rotary positions rotate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from uat.episode import Step
from uat.nn.attention import UtilityAffine
from uat.nn.blocks import Block, Transformer
from uat.nn.encoders import IdEmbedding, VectorEncoder, ZeroMap
from uat.nn.heads import Head
from uat.nn.positions import RADIANS_PER_UNIT
from uat.nn.utility import UtilityEncoder, UtilityGates

Floats = NDArray[Any]
DTYPES = {torch.float32: np.float32, torch.float64: np.float64}
LINE = 64
"""Bytes of a cache line of the CPU."""
SAFE = (1e-15, 1e15)
"""Range in which sums of exponentials are accurate: underflow is below a rounding error, and there is no overflow."""


def _array(x: Tensor) -> Floats:
    return x.detach().double().numpy()


def _centred(x: Floats) -> Floats:
    return x - x.mean(-1, keepdims=True)


def _after(norm: nn.LayerNorm, weight_OI: Floats, bias_O: Floats | float = 0.0) -> Floats:
    """Return a linear map (I + 1, O) of a norm's output that includes the norm's scale and bias."""
    return np.vstack([(weight_OI * _array(norm.weight)).T, weight_OI @ _array(norm.bias) + bias_O])


def _writing(linear: nn.Linear) -> Floats:
    """Return a linear map (I + 1, O) to the residual stream, centred, with its bias in the last row."""
    return _centred(np.vstack([_array(linear.weight).T, _array(linear.bias)]))


def _pairs(qkv: Floats, heads: int) -> Floats:
    """Reorder (3D, ...) from queries, keys, values to the order in memory: queries, then key and value of each head."""
    queries, keys_values = qkv[: len(qkv) // 3], qkv[len(qkv) // 3 :]
    paired = keys_values.reshape(2, heads, -1, *qkv.shape[1:]).swapaxes(0, 1)
    return np.concatenate([queries, paired.reshape(keys_values.shape)])


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Floats:
    """Return zeros whose last axis is aligned with cache lines. Each row has a spare line, since rows a power of two
    apart would compete for the same cache sets."""
    per_line = LINE // dtype.itemsize
    rows, length = math.prod(shape[:-1]), (-(-shape[-1] // per_line) + 1) * per_line
    flat = np.zeros(rows * length + per_line, dtype)
    start = -flat.ctypes.data % LINE // dtype.itemsize
    return flat[start : start + rows * length].reshape(*shape[:-1], length)[..., : shape[-1]]


def _rows(encoder: nn.Module) -> Floats:
    """Return (I, O), one row for each id or entry of a vector. Ids have an extra last row of zeros, for the id -1."""
    if isinstance(encoder, IdEmbedding):
        return np.vstack([_array(encoder.weight), np.zeros(encoder.weight.shape[1])])
    linear = encoder if isinstance(encoder, ZeroMap) else cast(VectorEncoder, encoder).linear
    return _array(linear.weight).T


def _projections(project: UtilityAffine) -> Floats:
    """Return W (3D, D), or W and W^u (6D, D) if the projections use feedback."""
    base_3DD, d_model = _array(project.base_weight), project.weight.shape[1]
    if not project.modulated:
        return base_3DD
    twins_3DD = _spread(project, _array(project.twin_weight).reshape(-1, d_model, d_model))
    return np.vstack([base_3DD, twins_3DD.reshape(-1, d_model)])


def _offsets(project: UtilityAffine) -> Floats:
    """Return U (3, H, E, E)."""
    if project.bias_3HEE is not None:
        return _spread(project, _array(project.bias_3HEE))
    d_head = project.weight.shape[1] // project.num_heads
    return np.zeros((3, project.num_heads, d_head, d_head))


def _spread(project: UtilityAffine, weights: Floats) -> Floats:
    """Return one entry for each of Q, K and V, with zeros for those without feedback."""
    spread = np.zeros((3, *weights.shape[1:]))
    spread[["qkv".index(name) for name in project.modulated]] = weights
    return spread


def _layers(encoder: UtilityEncoder) -> tuple[Floats, Floats]:
    """Return the two layers (F, I) and (F, U) of the utility encoder, before and after its ReLU."""
    first_FI, *rest = [_array(weight) for weight in encoder.mlp.parameters()]
    if rest:
        return first_FI, rest[0].T
    same_UU = np.eye(len(first_FI))
    return np.vstack([first_FI, -first_FI]), np.vstack([same_UU, -same_UU])


@dataclass(slots=True)
class LayerWeights:
    project_D1X: Floats
    out_D1D: Floats
    up_D1F: Floats
    down_F1D: Floats

    @staticmethod
    def of(block: Block) -> LayerWeights:
        a, up, down = block.attention, cast(nn.Linear, block.ff[0]), cast(nn.Linear, block.ff[2])
        width = a.out.in_features
        projections_XD = _projections(a.project)
        parts = np.split(projections_XD, len(projections_XD) // (3 * width))  # W, and W^u
        project_XD = np.concatenate([_pairs(part_3DD, a.num_heads) for part_3DD in parts])
        for queries_DD in np.split(project_XD, len(project_XD) // width)[::3]:
            queries_DD *= (width // a.num_heads) ** -0.5
        return LayerWeights(
            project_D1X=_after(block.attention_norm, project_XD),
            out_D1D=_writing(a.out),
            up_D1F=_after(block.ff_norm, _array(up.weight), _array(up.bias)),
            down_F1D=_writing(down),
        )


@dataclass(slots=True)
class UtilityWeights:
    """Weights of the utility channel. Gates and offsets of all layers are ordered like the projections."""

    action_IF: Floats
    reward_F: Floats
    utility_F2U: Floats
    """Maps to u and to (1-λ) u, side by side."""
    gates_2UX: Floats
    offsets_KEE: Floats
    """U transposed, for each layer, each of Q, K and V, and each head."""
    decay_1: Floats

    @staticmethod
    def of(utility: UtilityGates, blocks: list[Block]) -> UtilityWeights:
        first_FI, last_FU = _layers(utility.encoder)
        regime_UD, none_UD = _array(utility.regime.weight).T, np.zeros(utility.regime.weight.T.shape)
        heads, tokens = blocks[0].attention.num_heads, np.split(_array(utility.token.weight).T, len(blocks), axis=1)
        gates = [np.block([[none_UD, token_UD, token_UD], [regime_UD, none_UD, none_UD]]) for token_UD in tokens]
        offsets_L3HEE = np.stack([_offsets(block.attention.project) for block in blocks])
        offsets_L3HEE[:, 0] *= offsets_L3HEE.shape[-1] ** -0.5
        offsets_KEE = np.concatenate([_pairs(np.concatenate(offsets_3HEE), heads) for offsets_3HEE in offsets_L3HEE])
        return UtilityWeights(
            action_IF=_rows(utility.encoder.action) @ first_FI[:, :-1].T,
            reward_F=first_FI[:, -1] * utility.encoder.use_reward,
            utility_F2U=np.hstack([last_FU, (1 - utility.feedback_decay) * last_FU]),
            gates_2UX=np.hstack([_pairs(gates_2U3D.T, heads).T for gates_2U3D in gates]),
            offsets_KEE=offsets_KEE.swapaxes(1, 2),
            decay_1=np.array([utility.feedback_decay]),
        )


@dataclass(slots=True)
class EndWeights:
    """Weights before the first layer and after the last."""

    obs_ID: Floats
    positions_SD: Floats
    embed_D1D: Floats
    head_D1A: Floats

    @staticmethod
    def of(backbone: Transformer, head: Head) -> EndWeights:
        learned, encoder = backbone.config.positions == "learned", backbone.encoder
        positions_SD = _array(backbone.positions) if learned else np.zeros((1, backbone.config.d_model))
        if isinstance(encoder, VectorEncoder):
            positions_SD = positions_SD + _array(encoder.linear.bias)
        return EndWeights(
            obs_ID=_centred(_rows(encoder)),
            positions_SD=_centred(positions_SD),
            embed_D1D=_centred(_after(backbone.norm, np.eye(positions_SD.shape[1]))),
            head_D1A=_after(backbone.last_norm, _array(head.linear.weight), _array(head.linear.bias)),
        )


class Scratch:
    """Buffers that every stream overwrites, and views of them in the shapes needed. A copy allocates new buffers, since
    their contents are not kept between steps."""

    def __init__(self, layer: LayerWeights, utility: UtilityWeights | None, heads: int, capacity: int) -> None:
        self._made_of = layer, utility, heads, capacity
        (d_in, d_project), d_ff, dtype = layer.project_D1X.shape, layer.up_D1F.shape[1], layer.out_D1D.dtype
        width, d_head = d_in - 1, (d_in - 1) // heads
        self.x_D, self.change_D = np.empty((2, width), dtype)
        self.z_D1, self.h_D1 = np.ones((2, width + 1), dtype)
        self.f_F1, self.zeros_F, self.scale = np.ones(d_ff + 1, dtype), np.zeros(d_ff, dtype), np.empty((), dtype)
        self.z_D, self.f_F = self.z_D1[:-1], self.f_F1[:-1]
        self.h_HE1 = self.h_D1[:-1].reshape(heads, d_head, 1)
        self.project_X = np.empty(d_project, dtype)
        self.qkv_3D, self.twin_3D = self.project_X[: 3 * width], self.project_X[3 * width :]
        self.q_H1E = self.qkv_3D[:width].reshape(heads, 1, d_head)
        self.kv_H2E = self.qkv_3D[width:].reshape(heads, 2 * d_head)
        if d_head % 2 == 0:  # queries and keys for rotary positions
            self.q_H2P = self.qkv_3D[:width].reshape(heads, 2, d_head // 2)
            self.k_H2P = self.qkv_3D[width:].reshape(heads, 4, d_head // 2)[:, :2]
            self.cos_P, self.sin_2P = np.empty(d_head // 2, dtype), np.empty((2, d_head // 2), dtype)
            self.turned_H2P, self.across_H2P = np.empty((2, heads, 2, d_head // 2), dtype)
        self.scores_HS = np.empty(heads * capacity, dtype)
        self.sums_HE1 = np.empty((heads, d_head + 1, 1), dtype)
        self.value_HE1, self.total_H11 = self.sums_HE1[:, :-1], self.sums_HE1[:, -1:]
        self.totals_H = self.sums_HE1[:, -1, 0]
        if utility is not None:
            self.hidden_F, self.zeros_hidden_F = np.zeros((2, len(utility.reward_F)), dtype)
            self.u_2U = np.empty(len(utility.gates_2UX), dtype)
            self.u_late_U = self.u_2U[len(self.u_2U) // 2 :]
            self.gates_K1E, self.offsets_K1E = np.empty((2, len(utility.offsets_KEE), 1, d_head), dtype)
            self.gates_X = self.gates_K1E.reshape(-1)
            self.gates_L3D = list(self.gates_K1E.reshape(-1, 3 * width))
            self.offsets_L3D = list(self.offsets_K1E.reshape(-1, 3 * width))

    def turn(self) -> None:
        """Rotate this step's queries and keys: each pair (i, i + P) of a head by its angle."""
        for x_H2P in (self.q_H2P, self.k_H2P):
            np.multiply(x_H2P, self.cos_P, self.turned_H2P)
            np.multiply(x_H2P[:, ::-1], self.sin_2P, self.across_H2P)
            np.add(self.turned_H2P, self.across_H2P, x_H2P)

    def __reduce__(self) -> tuple[Any, ...]:
        return Scratch, self._made_of


@dataclass(slots=True)
class Memory:
    """Memory of one stream. A copy contains the filled slots, with the same alignment as the original."""

    kv_LHRS: list[Floats]
    ubar_U: Floats
    length: int = 0

    @staticmethod
    def empty(layers: int, heads: int, rows: int, capacity: int, ubar_U: Floats) -> Memory:
        kv_LHRS = _aligned((layers, heads, rows, capacity), ubar_U.dtype)
        kv_LHRS[:, :, -1] = 1
        return Memory(list(kv_LHRS), ubar_U)

    def __reduce__(self) -> tuple[Any, ...]:
        filled = [kv_HRS[..., : self.length].copy() for kv_HRS in self.kv_LHRS]
        return _restored, (filled, self.kv_LHRS[0].shape[-1], self.ubar_U.copy(), self.length)


def _restored(filled_LHRT: list[Floats], capacity: int, ubar_U: Floats, length: int) -> Memory:
    """Return a memory with these filled slots."""
    heads, rows, filled = filled_LHRT[0].shape
    memory = Memory.empty(len(filled_LHRT), heads, rows, capacity, ubar_U)
    for kv_HRS, filled_HRT in zip(memory.kv_LHRS, filled_LHRT, strict=True):
        kv_HRS[..., :filled] = filled_HRT
    memory.length = length
    return memory


@dataclass(slots=True)
class CPUState:
    streams: list[Memory]
    scratch: Scratch


class CPUStep:
    """The step of a policy with a copy of its current weights; later changes of the policy have no effect."""

    sampled: ClassVar[bool] = False

    def __init__(self, backbone: Transformer, head: Head, utility: UtilityGates | None = None) -> None:
        weights, d_model = backbone.like, backbone.config.d_model
        if weights.device.type != "cpu" or weights.dtype not in DTYPES:
            raise ValueError(f"it takes float32 or float64 on a CPU, not {weights.dtype} on {weights.device}")
        self.dtype = np.dtype(DTYPES[weights.dtype])
        self.heads, self.d_head = backbone.config.num_heads, d_model // backbone.config.num_heads
        self.check_range, self.context = backbone.check_range, backbone.config.context
        self.units_P = None if backbone.rotary is None else backbone.rotary.units_F.numpy().copy()
        self.root, self.epsilon = math.sqrt(d_model), d_model * backbone.norm.eps
        blocks = [cast(Block, block) for block in backbone.blocks]
        self.ends = self._own(EndWeights.of(backbone, head))
        self.layers = [self._own(LayerWeights.of(block)) for block in blocks]
        self.utility = None if utility is None else self._own(UtilityWeights.of(utility, blocks))

    def _own(self, weights: Any) -> Any:
        """Return contiguous copies in the policy's dtype."""
        return type(weights)(*(np.array(getattr(weights, f.name), self.dtype, order="C") for f in fields(weights)))

    def init_state(self, streams: int, capacity: int, device: torch.device | str = "cpu") -> CPUState:
        self.check_range(capacity)
        capacity = capacity if self.context is None else min(capacity, self.context)
        rows, d_utility = 2 * self.d_head + 1, 0 if self.utility is None else len(self.utility.gates_2UX) // 2
        ubar_BU = np.zeros((streams, d_utility), self.dtype)
        memories = [Memory.empty(len(self.layers), self.heads, rows, capacity, ubar_U) for ubar_U in ubar_BU]
        return CPUState(memories, Scratch(self.layers[0], self.utility, self.heads, capacity))

    def step(self, state: CPUState, step: Step) -> tuple[Tensor, CPUState]:
        """Return the logits (B, A) and the state, like `Policy.step`; the state is updated in place."""
        obs, action, allowed = step.obs.numpy(), step.prev_action.numpy(), step.allowed
        allowed_BA = None if allowed is None else allowed.numpy()
        reward, first = step.prev_reward.tolist(), step.first.tolist()
        return torch.from_numpy(self.decide(state, obs, action, reward, first, allowed_BA)), state

    def decide(
        self,
        state: CPUState,
        obs: Floats,
        action: Floats,
        reward: list[float],
        first: list[bool],
        allowed_BA: NDArray[np.bool_] | None = None,
    ) -> Floats:
        """Return logits (B, A) without using torch."""
        obs_B, action_B = self._by_stream(obs), self._by_stream(action)
        logits_BA = np.empty((len(first), self.ends.head_D1A.shape[1]), self.dtype)
        with np.errstate(over="ignore", invalid="ignore"):  # `_attend` handles overflow
            for b, memory in enumerate(state.streams):
                if first[b]:
                    memory.length = 0
                self._decide(state.scratch, memory, obs_B[b], action_B[b], reward[b], logits_BA[b])
        if allowed_BA is not None:
            logits_BA[~allowed_BA] = -np.inf
        return logits_BA

    def _by_stream(self, x: Floats) -> Any:
        """Return one entry per stream: an id, or a flat vector."""
        return x.tolist() if x.ndim == 1 else x.reshape(len(x), -1).astype(self.dtype, copy=False)

    def _decide(self, s: Scratch, memory: Memory, obs: Any, action: Any, reward: float, logits_A: Floats) -> None:
        """Compute the step of one stream."""
        if self.utility is not None:
            self._gates(self.utility, s, memory, action, reward)
        self._embed(s, obs, memory.length)
        slot, slots = memory.length, memory.length + 1
        if self.context is not None:  # the newest step replaces the oldest one of the window
            slot, slots = slot % self.context, min(slots, self.context)
        if self.units_P is not None:
            self._angles(self.units_P, s, memory.length)
        for layer, weights in enumerate(self.layers):
            self._project(weights, s, layer)
            if self.units_P is not None:
                s.turn()
            self._attend(weights, s, memory.kv_LHRS[layer], slot, slots)
            self._feed_forward(weights, s)
        memory.length += 1
        self._norm(s)
        s.z_D1.dot(self.ends.head_D1A, logits_A)

    def _gates(self, w: UtilityWeights, s: Scratch, memory: Memory, action: Any, reward: float) -> None:
        """Compute the gates of all layers, and the offsets U gate."""
        ubar_U = memory.ubar_U
        if memory.length == 0:
            ubar_U.fill(0)
        np.multiply(w.reward_F, reward, s.hidden_F)
        np.add(s.hidden_F, _look_up(w.action_IF, action), s.hidden_F)
        np.maximum(s.hidden_F, s.zeros_hidden_F, out=s.hidden_F)
        s.hidden_F.dot(w.utility_F2U, s.u_2U)
        np.multiply(ubar_U, w.decay_1, ubar_U)
        np.add(ubar_U, s.u_late_U, ubar_U)
        s.u_late_U[:] = ubar_U
        s.u_2U.dot(w.gates_2UX, s.gates_X)
        np.tanh(s.gates_X, s.gates_X)
        np.matmul(s.gates_K1E, w.offsets_KEE, s.offsets_K1E)

    def _embed(self, s: Scratch, obs: Any, position: int) -> None:
        p_D = self.ends.positions_SD[min(position, len(self.ends.positions_SD) - 1)]
        np.add(_look_up(self.ends.obs_ID, obs), p_D, s.x_D)
        self._norm(s)
        s.z_D1.dot(self.ends.embed_D1D, s.x_D)

    def _angles(self, units_P: NDArray[np.int64], s: Scratch, position: int) -> None:
        """Compute cosines and sines for this position, with angles that wrap around as in `nn.positions.Rotary`."""
        angle_P = (units_P * np.int64(position)) * RADIANS_PER_UNIT
        s.cos_P[:], s.sin_2P[1] = np.cos(angle_P), np.sin(angle_P)
        np.negative(s.sin_2P[1], s.sin_2P[0])

    def _project(self, w: LayerWeights, s: Scratch, layer: int) -> None:
        self._norm(s)
        s.z_D1.dot(w.project_D1X, s.project_X)
        if self.utility is not None:
            np.multiply(s.twin_3D, s.gates_L3D[layer], s.twin_3D)
            np.add(s.qkv_3D, s.twin_3D, s.qkv_3D)
            np.add(s.qkv_3D, s.offsets_L3D[layer], s.qkv_3D)

    def _attend(self, w: LayerWeights, s: Scratch, kv_HRS: Floats, slot: int, slots: int) -> None:
        kv_HRS[:, :-1, slot] = s.kv_H2E
        scores_HS = s.scores_HS[: self.heads * slots]
        scores_H1S, weights_HS1 = scores_HS.reshape(self.heads, 1, -1), scores_HS.reshape(self.heads, -1, 1)
        k_HES, v_HE1S = kv_HRS[:, : self.d_head, :slots], kv_HRS[:, self.d_head :, :slots]
        np.matmul(s.q_H1E, k_HES, scores_H1S)
        np.exp(scores_HS, scores_HS)
        np.matmul(v_HE1S, weights_HS1, s.sums_HE1)
        totals = s.totals_H.tolist()
        if not (SAFE[0] < min(totals) and max(totals) < SAFE[1]):
            np.matmul(s.q_H1E, k_HES, scores_H1S)
            np.subtract(scores_H1S, scores_H1S.max(axis=2, keepdims=True), scores_H1S)
            np.exp(scores_HS, scores_HS)
            np.matmul(v_HE1S, weights_HS1, s.sums_HE1)
        np.divide(s.value_HE1, s.total_H11, s.h_HE1)
        s.h_D1.dot(w.out_D1D, s.change_D)
        np.add(s.x_D, s.change_D, s.x_D)

    def _feed_forward(self, w: LayerWeights, s: Scratch) -> None:
        self._norm(s)
        s.z_D1.dot(w.up_D1F, s.f_F)
        np.maximum(s.f_F, s.zeros_F, out=s.f_F)
        s.f_F1.dot(w.down_F1D, s.change_D)
        np.add(s.x_D, s.change_D, s.x_D)

    def _norm(self, s: Scratch) -> None:
        """Compute z = x / √(|x|²/D + ε) for x with mean zero."""
        s.scale[()] = self.root / math.sqrt(float(s.x_D.dot(s.x_D)) + self.epsilon)
        np.multiply(s.x_D, s.scale, s.z_D)


def _look_up(rows_IO: Floats, value: Any) -> Floats:
    """Return the row of an id, or the product of a vector with all rows."""
    return rows_IO[value] if isinstance(value, int) else value.dot(rows_IO)
