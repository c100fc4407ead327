"""Deployment by replay (Li et al. 2011): a policy acts on logged events and keeps those in which the log agrees.

Where the logging policy drew actions uniformly, and no action changes later observations or the reward of another step,
the events that a policy accepts have the distribution of its own deployment. At each event the policy proposes an
action. If the log took the same one, the policy sees the reward and its memory advances; otherwise the event leaves no
trace. Acceptance depends on a uniform draw alone, so streams that end early are missing by chance: the reward of the
k-th accepted event is averaged over the streams that reach it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from uat.clock import NO_ACTION
from uat.contracts import Agent, Memory, stream_axis
from uat.distributions import action_noise, distribution
from uat.episode import Step, Trajectory
from uat.evaluation.off_policy.estimates import DEFAULTS, Estimate, OffPolicyConfig
from uat.evaluation.off_policy.ratios import Ratios
from uat.evaluation.off_policy.steps import probabilities
from uat.evaluation.off_policy.target import check_discrete, device_of, evaluation_mode
from uat.settings import Steps, checked

UNIFORM = 1e-4
"""Largest distance of a propensity from that of a uniform choice."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The events that a policy accepted, in their order: a deployment of at most K steps in each stream."""

    event_BK: Tensor
    """Step of the log; -1 where a stream has ended before."""
    reward_BK: Tensor
    """Reward; 0 where a stream has ended before."""

    @property
    def reached_BK(self) -> Tensor:
        """(B, K) True for accepted events."""
        return self.event_BK >= 0


def replay_estimate(
    agent: Agent[Any],
    trajectory: Trajectory,
    propensity_BT: Any,
    *,
    steps: int,
    greedy: bool | None = None,
    config: OffPolicyConfig = DEFAULTS,
) -> Estimate:
    """Return the mean reward of a policy's first `steps` steps in deployment, from a log of uniform actions.

    Each row of the trajectory is one stream of events, and the policy starts each with empty memory. The effective
    sample size is the number of streams that reach the last of these steps.
    """
    accepted = accepted_events(agent, trajectory, propensity_BT, steps=steps, greedy=greedy, seed=config.seed)
    reached_BK = accepted.reached_BK.double()
    ess, episodes = reached_BK.sum(0).min().item(), len(reached_BK)
    about: dict[str, Any] = {"name": "replay", "question": "deployment by replay", "unit": "reward of a step"}
    if ess < config.least_ess:
        refused = (
            f"only {ess:.0f} of {episodes} streams hold {steps} accepted events, fewer than {config.least_ess:g}: ask "
            f"for fewer steps, or give more or longer streams"
        )
        return Estimate(**about, value=None, low=None, high=None, ess=ess, episodes=episodes, refused=refused)
    ratios = Ratios(accepted.reward_BK / steps, reached_BK)
    low, high = ratios.interval(resamples=config.resamples, seed=config.seed)
    return Estimate(**about, value=ratios.value, low=low, high=high, ess=ess, episodes=episodes)


@torch.no_grad()
def accepted_events(
    agent: Agent[Any],
    trajectory: Trajectory,
    propensity_BT: Any,
    *,
    steps: int,
    greedy: bool | None = None,
    seed: int = 0,
) -> Accepted:
    """Return the first `steps` events of each stream at which the policy proposes the logged action."""
    steps = checked(steps, Steps, "steps")
    _check(agent, trajectory, propensity_BT, steps)
    device = device_of(agent)
    with evaluation_mode(agent):
        return _accept(agent, trajectory.to(device), steps, agent.sampled if greedy is None else not greedy, seed)


def _accept(agent: Agent[Any], log: Trajectory, steps: int, sampled: bool, seed: int) -> Accepted:
    (streams, events), device = log.valid.shape, log.valid.device
    noise_BTA = action_noise(agent.spec, seed, "replay", torch.arange(streams), events) if sampled else None
    event_BK = torch.full((streams, steps), -1, device=device)
    reward_BK = torch.zeros(streams, steps, dtype=torch.float64, device=device)
    count_B, action_B = torch.zeros_like(event_BK[:, 0]), torch.full((streams,), NO_ACTION, device=device)
    reward_B = torch.zeros(streams, device=device)
    every_B, state = torch.arange(streams, device=device), agent.init_state(streams, steps, device)
    if not isinstance(state, Memory):
        raise ValueError(f"replay: the memory of {type(agent).__name__} must be a uat.contracts.Memory, to be restored")
    for t in range(events):
        ended_B, before = count_B == steps, state.take(every_B)
        allowed_BA = None if log.allowed is None else log.allowed[:, t]
        step = Step(
            obs=log.obs[:, t],
            prev_action=torch.where(ended_B, NO_ACTION, action_B),
            prev_reward=torch.where(ended_B, 0.0, reward_B),
            first=(count_B == 0) | ended_B,  # streams that have ended restart, so that they need no more memory
            allowed=allowed_BA,
        )
        logits_BA, state = agent.step(state, step)
        _check_shared(agent, before, state)
        acting = distribution(agent.spec, logits_BA, allowed_BA)
        proposed_B = acting.mode if noise_BTA is None else acting.sample(noise_BTA[:, t].to(device))
        accepted_B = (proposed_B == log.action[:, t]) & log.valid[:, t] & ~ended_B
        rejected_R, row_R = every_B[~accepted_B], every_B[accepted_B]
        state.put(rejected_R, before.take(rejected_R))
        event_BK[row_R, count_B[row_R]] = t
        reward_BK[row_R, count_B[row_R]] = log.reward[row_R, t].double()
        action_B = torch.where(accepted_B, log.action[:, t], action_B)
        reward_B = torch.where(accepted_B, log.reward[:, t].float() * agent.spec.reward_scale, reward_B)
        count_B = count_B + accepted_B
    return Accepted(event_BK.cpu(), reward_BK.cpu())


def _check_shared(agent: Agent[Any], before: Memory, after: Memory) -> None:
    """Refuse memory that counts steps of all streams together: a rejected event could not be undone in one of them."""
    for item in fields(before):  # pyright: ignore[reportArgumentType]
        old, new = getattr(before, item.name), getattr(after, item.name)
        if isinstance(old, Memory):
            _check_shared(agent, old, new)
        elif isinstance(old, Tensor):
            if stream_axis(item.name) is None and not torch.equal(old, new):
                raise ValueError(_shared(agent, item.name))
        elif isinstance(old, bool | int | float) and old != new:
            raise ValueError(_shared(agent, item.name))


def _shared(agent: Agent[Any], name: str) -> str:
    return f"replay: {type(agent).__name__} changes {name}, which all streams share, so that no event can be rejected"


def _check(agent: Agent[Any], log: Trajectory, propensity_BT: Any, steps: int) -> None:
    """Refuse logs and policies that replay does not fit, one sentence each."""
    check_discrete(agent.spec)
    shape, count = tuple(log.valid.shape), agent.spec.action.count
    if agent.spec.reward_lag != 1 or log.told is not None:
        raise ValueError(
            f"replay needs rewards that arrive before the next event: reward_lag={agent.spec.reward_lag} must be 1, "
            f"and the log must hold no corrupted feedback"
        )
    if agent.spec.horizon is not None and steps > agent.spec.horizon:
        raise ValueError(f"steps={steps} must be at most the policy's horizon of {agent.spec.horizon}")
    if log.reward_known is not None and not log.reward_known[log.valid].all():
        raise ValueError("replay needs all rewards, and some are unknown: leave those events out of the log")
    valid_BT = log.valid.cpu()
    given_BT = probabilities("propensity_BT", propensity_BT, shape, valid_BT, filling=1.0)
    choices_BT = torch.full(shape, count) if log.allowed is None else log.allowed.sum(-1).cpu()
    if (uneven_BT := ((given_BT * choices_BT - 1).abs() > UNIFORM * choices_BT) & valid_BT).any():
        where = tuple(uneven_BT.nonzero()[0].tolist())
        raise ValueError(
            f"replay needs uniform logging: expected a propensity of 1/{int(choices_BT[where])}, got "
            f"{given_BT[where].item():g} at {where}; use deployment estimates with weights instead"
        )
