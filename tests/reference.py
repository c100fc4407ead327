"""The paper's equations one number at a time: slow, plain, in float64, and differentiable.

Loops run over episodes, layers, heads and steps. Nothing here is a module, a fused attention or a batched
product. Weights are read from a policy by name, so that gradients arrive at the same parameters as those of
the fast path, and both can be compared. What an ablation has no weights for is zero here.

  o observation   x token   u utility   ubar regime state   rho, g gates   q, k, v projections
  d width of x    d_m width of a head   lists run over steps, then over heads
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from uat.episode import Batch
from uat.methods import Policy
from uat.methods.uat import UATConfig
from uat.spec import Box, Named, Observations

Weights = Mapping[str, Tensor]
PROJECTIONS = ("Q", "K", "V")


def logits(policy: Policy, batch: Batch) -> Tensor:
    """(B, T, A), masked actions at minus infinity."""
    w = {name: parameter.double() for name, parameter in policy.named_parameters()}
    rows = []
    for b in range(len(batch.obs)):
        row = torch.stack(episode(policy, w, batch, b))
        rows.append(row if batch.allowed is None else row.masked_fill(~batch.allowed[b], -torch.inf))
    return torch.stack(rows)


def loss(policy: Policy, batch: Batch) -> Tensor:
    """Cross-entropy, or KL, summed over real steps."""
    logits_BTA, total = logits(policy, batch), torch.zeros((), dtype=torch.float64)
    for b, t in batch.valid.nonzero().tolist():
        pi, target = softmax(logits_BTA[b, t]), batch.required_target[b, t]
        if isinstance(policy.spec.action, Box):
            total = total - box_log_density(policy.spec.action, logits_BTA[b, t], target.double())
        elif target.is_floating_point():
            for a in target.nonzero()[:, 0].tolist():
                total = total + target[a].double() * (target[a].double().log() - pi[a].log())
        else:
            total = total - pi[int(target)].log()
    return total


def box_log_density(box: Box, numbers: Tensor, action: Tensor) -> Tensor:
    """Sum over numbers of log N(u; mean, std) - log |da / du|, where a = low + (high - low) (1 + tanh u) / 2."""
    total = torch.zeros((), dtype=torch.float64)
    for i, (low, high) in enumerate(zip(box.low, box.high, strict=True)):
        mean, std = numbers[i], numbers[box.count + i].clamp(-5.0, 2.0).exp()
        u = (2 * (action[i] - low) / (high - low) - 1).atanh()
        total = total - ((u - mean) / std) ** 2 / 2 - (std * (2 * torch.pi) ** 0.5).log()
        total = total - ((high - low) / 2 * (1 - u.tanh() ** 2)).log()
    return total


def episode(policy: Policy, w: Weights, batch: Batch, b: int) -> list[Tensor]:
    """W_head h_t + b_head at every step of one episode."""
    steps, start = range(batch.obs.shape[1]), 0 if batch.start is None else int(batch.start[b])
    x = [
        layer_norm(w, "backbone.norm", embed(w, batch.obs[b, t], policy.spec.obs) + w["backbone.positions"][start + t])
        for t in steps
    ]
    rho, g = gates(policy, w, batch, b)
    for layer in range(policy.config.num_layers):
        x = block(w, layer, policy.config.num_heads, x, rho, g[layer] if g else None)
    h = [layer_norm(w, "backbone.last_norm", x[t]) for t in steps]
    return [w["head.linear.weight"] @ h[t] + w["head.linear.bias"] for t in steps]


# ---------------------------------------------------------------- x = LN(W^E o + p)


def embed(w: Weights, o: Tensor, space: Observations | None = None, at: str = "backbone.encoder") -> Tensor:
    if isinstance(space, Named):
        parts = space.unpack(o)
        rows = [embed(w, parts[name], space.parts[name], f"{at}.parts.{i}") for i, name in enumerate(space.names)]
        return torch.stack(rows).sum(0)
    if f"{at}.weight" in w:
        return one_hot(o, len(w[f"{at}.weight"])) @ w[f"{at}.weight"]
    return w[f"{at}.linear.weight"] @ o.flatten().double() + w[f"{at}.linear.bias"]


def one_hot(index: Tensor, count: int) -> Tensor:
    """Zero everywhere for the id -1."""
    return torch.tensor([float(i == int(index)) for i in range(count)], dtype=torch.float64)


# ---------------------------------------------------------------- utility encoder


def gates(policy: Policy, w: Weights, batch: Batch, b: int) -> tuple[list[Tensor] | None, list[list[Tensor]] | None]:
    """rho_t, and g_j of every layer; none for an observation-only policy."""
    if not isinstance(policy.config, UATConfig):
        return None, None
    steps, d, c = range(batch.obs.shape[1]), policy.config.d_model, policy.config
    told = batch.prev_reward if c.use_reward else torch.zeros_like(batch.prev_reward)
    u = [utility(w, batch.prev_action[b, t], told[b, t]) for t in steps]
    W_rho = w.get("utility.regime.weight", torch.zeros(d, c.d_utility, dtype=torch.float64))
    W_s = w.get("utility.token.weight", torch.zeros(c.num_layers * d, c.d_utility, dtype=torch.float64))
    rho = [torch.tanh(W_rho @ ubar) for ubar in regime_states(u, c.feedback_decay)]
    g = [[torch.tanh(W_s[layer * d : (layer + 1) * d] @ u[j]) for j in steps] for layer in range(c.num_layers)]
    return rho, g


def utility(w: Weights, a: Tensor, r: Tensor) -> Tensor:
    """u = E([f_a(a); r]), or W [f_a(a); r] where E is linear"""
    first = w["utility.encoder.mlp.0.weight"]
    if "utility.encoder.action.weight" in w:
        W_a = w["utility.encoder.action.weight"].T
        f_a = W_a @ one_hot(a, W_a.shape[1])
    elif "utility.encoder.action.linear.weight" in w:
        f_a = w["utility.encoder.action.linear.weight"] @ a.double()
    else:
        f_a = torch.zeros(first.shape[1] - 1, dtype=torch.float64)
    hidden = first @ torch.cat([f_a, r.double()[None]])
    return w["utility.encoder.mlp.2.weight"] @ hidden.clamp_min(0) if "utility.encoder.mlp.2.weight" in w else hidden


def regime_states(u: Sequence[Tensor], decay: float) -> list[Tensor]:
    """ubar_t = λ ubar_{t-1} + (1-λ) u_t, from ubar_0 = 0"""
    ubar, states = torch.zeros_like(u[0]), []
    for u_t in u:
        ubar = decay * ubar + (1 - decay) * u_t
        states.append(ubar)
    return states


# ---------------------------------------------------------------- blocks


def block(
    w: Weights, layer: int, num_heads: int, x: list[Tensor], rho: list[Tensor] | None, g: list[Tensor] | None
) -> list[Tensor]:
    name, steps = f"backbone.blocks.{layer}", range(len(x))
    normed = [layer_norm(w, f"{name}.attention_norm", x[t]) for t in steps]
    heads = [
        attend(
            *(project(w, name, p, h, num_heads, normed, gate) for p, gate in zip(PROJECTIONS, (rho, g, g), strict=True))
        )
        for h in range(num_heads)
    ]
    W_O, b_O = w[f"{name}.attention.out.weight"], w[f"{name}.attention.out.bias"]
    x = [x[t] + W_O @ torch.cat([head[t] for head in heads]) + b_O for t in steps]
    return [x[t] + feed_forward(w, f"{name}.ff", layer_norm(w, f"{name}.ff_norm", x[t])) for t in steps]


def project(
    w: Weights, block_name: str, projection: str, head: int, num_heads: int, x: list[Tensor], gate: list[Tensor] | None
) -> list[Tensor]:
    """W x + gate ⊙ (W^u x) + U gate at every step, in one head."""
    W, W_u, U = matrices(w, f"{block_name}.attention.project", projection, head, num_heads)
    if gate is None:
        return [W @ x_t for x_t in x]
    own = rows_of(head, len(W))
    W_u, U = torch.zeros_like(W) if W_u is None else W_u, torch.zeros_like(W[:, own]) if U is None else U
    return [
        W @ x_t + torch.diag(gate_t[own]) @ W_u @ x_t + U @ gate_t[own] for x_t, gate_t in zip(x, gate, strict=True)
    ]


def matrices(
    w: Weights, name: str, projection: str, head: int, num_heads: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """W, W^u and U of one head; W^u and U are absent without feedback."""
    stacked = w[f"{name}.weight"]
    d = stacked.shape[1]
    own, blocks = rows_of(head, d // num_heads), [stacked[i : i + d] for i in range(0, len(stacked), d)]
    twins = {3: "", 4: "Q", 5: "KV", 6: "QKV"}[len(blocks)]
    W, which = blocks[PROJECTIONS.index(projection)][own], twins.find(projection)
    if which < 0:
        return W, None, None
    U = w.get(f"{name}.bias_3HEE")
    return W, blocks[3 + which][own], None if U is None else U[which, head]


def rows_of(head: int, d_m: int) -> slice:
    return slice(head * d_m, (head + 1) * d_m)


def attend(q: list[Tensor], k: list[Tensor], v: list[Tensor]) -> list[Tensor]:
    """h_t = Σ_{j≤t} softmax_j(⟨q_t, k_j⟩ / √d_m) v_j"""
    h = []
    for t in range(len(q)):
        alpha = softmax(torch.stack([(q[t] * k[j]).sum() / math.sqrt(len(q[t])) for j in range(t + 1)]))
        h_t = torch.zeros_like(v[0])
        for j in range(t + 1):
            h_t = h_t + alpha[j] * v[j]
        h.append(h_t)
    return h


def feed_forward(w: Weights, name: str, x: Tensor) -> Tensor:
    hidden = w[f"{name}.0.weight"] @ x + w[f"{name}.0.bias"]
    return w[f"{name}.2.weight"] @ hidden.clamp_min(0) + w[f"{name}.2.bias"]


def layer_norm(w: Weights, name: str, x: Tensor) -> Tensor:
    mean = x.sum() / len(x)
    variance = ((x - mean) ** 2).sum() / len(x)
    return (x - mean) / (variance + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def softmax(z: Tensor) -> Tensor:
    e = (z - z.max()).exp()
    return e / e.sum()
