"""Probabilities of actions that a policy would have taken in logged episodes, given the logged histories."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from uat.contracts import Agent
from uat.distributions import distribution
from uat.episode import Batch, Trajectory
from uat.methods.policy import Policy
from uat.settings import Count, Share, checked
from uat.spec import Discrete, Spec

CHUNK = 256
"""Number of episodes of one pass."""


@torch.no_grad()
def action_probabilities(
    agent: Agent[Any],
    trajectory: Trajectory,
    *,
    greedy: bool | None = None,
    smoothing: float = 0.0,
    chunk: int = CHUNK,
) -> Tensor:
    """Return (B, T, A) probabilities of all actions, float64 on the CPU; a policy computes them in one parallel pass.

    greedy: whether the agent takes its most likely action or samples; None: as in evaluation. smoothing: share of
    uniformly random allowed actions that are mixed in. A greedy agent without smoothing has probabilities 0 and 1, so
    that only episodes in which the logging policy took all of its actions count.
    """
    check_discrete(agent.spec)
    smoothing, chunk = checked(smoothing, Share, "smoothing"), checked(chunk, Count, "chunk")
    device, parts = device_of(agent), []
    with evaluation_mode(agent):
        for rows in torch.arange(len(trajectory.valid)).split(chunk):
            batch = agent.spec.clock.batch(trajectory.map(lambda x, rows=rows: x[rows.to(x.device)]).to(device))
            logits_BTA = agent.logits(batch) if isinstance(agent, Policy) else _by_steps(agent, batch)
            parts.append(as_probabilities(agent, logits_BTA, batch.allowed, greedy, smoothing).cpu())
    return torch.cat(parts)


def as_probabilities(
    agent: Agent[Any], logits: Tensor, allowed: Tensor | None, greedy: bool | None, smoothing: float
) -> Tensor:
    """Return the probabilities (..., A) with which an agent of these logits acts."""
    acting = distribution(agent.spec, logits.double(), allowed)
    count, action = logits.shape[-1], torch.arange(logits.shape[-1], device=logits.device)
    if greedy if greedy is not None else not agent.sampled:
        chosen = (acting.mode[..., None] == action).double()
    else:
        masked = logits.double() if allowed is None else logits.double().masked_fill(~allowed, -torch.inf)
        chosen = masked.softmax(-1)
    even = torch.full_like(chosen, 1 / count) if allowed is None else allowed / allowed.sum(-1, keepdim=True)
    return torch.lerp(chosen, even.to(chosen), smoothing)


def check_discrete(spec: Spec) -> None:
    """Refuse actions that are not ids."""
    if not isinstance(spec.action, Discrete):
        raise ValueError(
            f"off-policy estimates need discrete actions (ids), and this policy answers with {spec.action}"
        )


def device_of(agent: Any) -> torch.device:
    """Return the device of an agent's weights; the CPU if it has none."""
    weight = next(agent.parameters(), None) if isinstance(agent, nn.Module) else None
    return torch.device("cpu") if weight is None else weight.device


@contextmanager
def evaluation_mode(agent: Any) -> Iterator[None]:
    """Switch dropout off, and restore the mode of every module afterwards."""
    modes = {module: module.training for module in agent.modules()} if isinstance(agent, nn.Module) else {}
    try:
        for module in modes:
            module.training = False
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _by_steps(agent: Agent[Any], batch: Batch) -> Tensor:
    """Return logits (B, T, A) computed step by step, for agents without a parallel pass."""
    streams, steps = batch.valid.shape
    state, logits = agent.init_state(streams, steps, batch.obs.device), []
    facts = {} if batch.trajectory is None else batch.trajectory.facts
    for t in range(steps):
        state = agent.look(state, {name: x[:, t] for name, x in facts.items()})
        logits_BA, state = agent.step(state, batch.step(t))
        logits.append(logits_BA)
    return torch.stack(logits, dim=1)
