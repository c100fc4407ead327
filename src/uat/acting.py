"""Playing: an agent in a simulator gives a trajectory.

The loop runs on tensors alone: no value is read back to the host, so that the whole rollout can be
captured as one CUDA graph. Randomness of worlds and of sampled actions is handed in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from uat.types import Agent, Discrete, Noise, Simulator, Spec, Trajectory, nothing


def choose(logits_BA: Tensor, spec: Spec, gumbel_BA: Tensor | None = None) -> Tensor:
    """The action of each stream: the arg-max (a sample, if Gumbel noise is given), or the softmax as weights."""
    if isinstance(spec.action, Discrete):
        return (logits_BA if gumbel_BA is None else logits_BA + gumbel_BA).argmax(-1)
    return logits_BA.softmax(-1)


@torch.no_grad()
def rollout(
    agent: Agent[Any] | None, simulator: Simulator[Any], noise: Noise, gumbel_BTA: Tensor | None = None
) -> Trajectory:
    """Play one episode in each world: greedily, or sampling with the noise given; without an agent the expert plays.

    After an episode ends its stream goes on as padding (`valid` False) until the horizon.
    """
    spec = simulator.spec
    if spec.reward_lag < 1:
        raise ValueError(f"reward_lag={spec.reward_lag} is for logs: in a simulator the reward comes after the action")
    world, obs = simulator.reset(noise)
    streams, device = obs.shape[0], obs.device
    state = agent.init_state(streams, spec.horizon, device) if agent else None
    action_BT, reward_BT = _blank_feedback(spec, streams, device)
    alive_B = torch.ones(streams, dtype=torch.bool, device=device)
    record: dict[str, list[Tensor]] = {}

    def remember(**values: Tensor | None) -> None:
        for name, value in values.items():
            if value is not None:
                record.setdefault(name, []).append(value)

    for t in range(spec.horizon):
        target, allowed, extras = simulator.expert(world), simulator.allowed(world), simulator.extras(world)
        if agent is None:
            action = target
        else:
            step = spec.clock.step(t, obs, action_BT, reward_BT, allowed)
            logits_BA, state = agent.step(state, step)
            action = choose(logits_BA, spec, None if gumbel_BTA is None else gumbel_BTA[:, t])
        remember(
            obs=obs, target=target, valid=alive_B, allowed=allowed, **{f"extras.{k}": v for k, v in extras.items()}
        )
        world, obs, reward_B, done_B = simulator.step(world, action)
        action_BT[:, t], reward_BT[:, t] = action, reward_B
        remember(done=done_B & alive_B)
        alive_B = alive_B & ~done_B

    stacked = {name: torch.stack(values, dim=1) for name, values in record.items()}
    extras = {name.removeprefix("extras."): stacked.pop(name) for name in list(stacked) if name.startswith("extras.")}
    return Trajectory(action=action_BT, reward=reward_BT, extras=extras, **stacked)


def _blank_feedback(spec: Spec, streams: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where actions and rewards of an episode are written as they happen; nothing in them yet."""
    reward_BT = torch.zeros(streams, spec.horizon, device=device)
    if isinstance(spec.action, Discrete):
        action = torch.zeros(streams, spec.horizon, dtype=torch.long, device=device)
    else:
        action = torch.zeros(streams, spec.horizon, spec.action.count, device=device)
    return action.fill_(nothing(action)), reward_BT
