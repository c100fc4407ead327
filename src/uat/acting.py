"""Rollout: an agent plays in a simulator, and the result is a trajectory.

The loop runs on tensors alone: no value is read back to the host, so that the whole rollout can be
captured as one CUDA graph. Randomness of worlds and of sampled actions is handed in.

In a `Recording` no action changes anything: the agent reads the episodes and scores actions at the last step, or at
every step.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from uat.contracts import Agent, Reader, Recording, Simulator, Transition
from uat.distributions import choose, limits
from uat.episode import Noise, Told, Trajectory
from uat.settings import Share, Steps, check_fields, checked
from uat.spec import Box, Discrete, Spec


@dataclass(frozen=True, slots=True)
class Behaviour:
    """The policy that records logs: the privileged expert, with a share of uniformly random actions.

    It is not an `Agent`, because it sees the expert's action. Of discrete actions, a share is random; a weight vector
    is interpolated between the expert's and the uniform one by that share. With a share of 1 it needs no expert.

    With `random_steps` above 1, the steps of a stretch share their random numbers, so that a random action is held to
    the end of the stretch. The log then covers states that the expert never lets arise. The share stays the same.
    """

    random_share: Share = 0.3
    random_steps: Steps = 1

    def __post_init__(self) -> None:
        check_fields(self)

    def act(self, target: Tensor, spec: Spec, allowed_BA: Tensor | None, noise_BA: Tensor | None) -> Tensor:
        """Return the action of each stream; in a box, interpolate from the expert's to a uniformly random one."""
        if not isinstance(spec.action, Box):
            return choose(self.logits(target, spec, allowed_BA), spec, noise_BA)
        low, high = limits(spec.action, target.device, target.dtype)
        place = 0.5 if noise_BA is None else torch.special.ndtr(noise_BA).to(target)
        return torch.lerp(target, low + (high - low) * place, self.random_share)

    def logits(self, target: Tensor, spec: Spec, allowed_BA: Tensor | None) -> Tensor:
        """Return (B, A) log((1 - share) * expert + share * uniform over the allowed actions)."""
        if isinstance(spec.action, Discrete):
            target = target[:, None] == torch.arange(spec.action.count, device=target.device)
        expert_BA = target.double()
        every_BA = torch.ones_like(expert_BA) if allowed_BA is None else allowed_BA.double()
        uniform_BA = every_BA / every_BA.sum(-1, keepdim=True)
        return torch.lerp(expert_BA, uniform_BA, self.random_share).log().float()


@torch.no_grad()
def replay(agent: Agent[Any] | Reader | Behaviour | None, recording: Recording, noise: Noise) -> Trajectory:
    """Return recorded episodes with the answers of an agent, or as they are if there is no agent."""
    trajectory = recording.trajectory(noise)
    if agent is None or isinstance(agent, Behaviour):
        return trajectory
    batch = recording.spec.clock.batch(trajectory)
    answers = agent.read_every(batch) if recording.every_step else agent.read(batch)
    return recording.judged(trajectory, noise, answers)


def has_expert(worlds: Simulator[Any] | Recording) -> bool:
    """Whether an expert can play these worlds."""
    if isinstance(worlds, Recording) or type(worlds).expert is Simulator.expert:
        return False
    return worlds.expert(worlds.reset(worlds.noise(torch.arange(1), 0))[0]) is not None


@torch.no_grad()
def rollout(
    agent: Agent[Any] | Reader | Behaviour | None,
    worlds: Simulator[Any] | Recording,
    noise: Noise,
    gumbel_BTA: Tensor | None = None,
    *,
    steps: int | None = None,
) -> Trajectory:
    """Play one episode in each world: greedily, or sampling with the noise given; without an agent the expert plays.

    steps: number of steps to play; unset: the horizon, which endless streams do not have. Episodes that have not ended
    by then are truncated. After its episode ends, a stream continues as padding (`valid` False). Worlds on the host
    stop when all episodes have ended, so their trajectories may be shorter. Recorded episodes are replayed.
    """
    if isinstance(worlds, Recording):
        return replay(agent, worlds, noise)
    spec = worlds.spec
    if spec.reward_lag < 1:
        raise ValueError(f"reward_lag={spec.reward_lag} is for logs: in a simulator the reward comes after the action")
    if not (agent is None or isinstance(agent, Agent | Behaviour)):
        raise ValueError(f"{type(agent).__name__} only reads recorded episodes and cannot play")
    if worlds.most_streams is not None and len(next(iter(noise.values()))) > worlds.most_streams:
        return _in_turns(agent, worlds, noise, gumbel_BTA, steps)
    world, obs = worlds.reset(noise)
    streams, device = obs.shape[0], obs.device
    length = spec.steps if steps is None else checked(steps, Steps, "steps")
    state = agent.init_state(streams, length, device) if isinstance(agent, Agent) else None
    history = spec.clock.begin(spec.no_action(streams, device))
    record = _Record()
    for t in range(length):
        target, allowed, facts = worlds.expert(world), worlds.allowed(world), worlds.facts(world)
        drawn = t - t % agent.random_steps if isinstance(agent, Behaviour) else t
        gumbel_BA = None if gumbel_BTA is None else gumbel_BTA[:, drawn]
        if isinstance(agent, Agent):
            state = agent.look(state, facts)
            action, state = agent.decide(state, history.step(obs, allowed), gumbel_BA)
        elif target is None and (agent is None or agent.random_share < 1):
            raise ValueError(f"{type(worlds).__name__} has no expert: give an agent")
        else:
            best = spec.no_action(streams, device) if target is None else target
            action = best if agent is None else agent.act(best, spec, allowed, gumbel_BA)
        after = worlds.step(world, action)
        record.add(obs, target, allowed, facts, action, after)
        world, obs, told = after.world, after.obs, after.told
        if told is None:
            history.add(action, after.reward_B, after.reward_known_B)
        else:
            history.add(told.action, told.reward, told.reward_known)
        if worlds.on_host and record.ended:
            break
    played = record.trajectory()
    return played if length == spec.horizon or played.truncated is not None else _cut(played, obs)


def _cut(played: Trajectory, obs: Tensor) -> Trajectory:
    """Mark episodes that have not ended as truncated after the last step."""
    truncated_BT = torch.zeros_like(played.terminated)
    truncated_BT[:, -1] = played.valid[:, -1] & ~played.terminated[:, -1]
    return replace(played, truncated=truncated_BT, final_obs=obs)


def _in_turns(
    agent: Agent[Any] | Reader | Behaviour | None,
    worlds: Simulator[Any],
    noise: Noise,
    gumbel_BTA: Tensor | None,
    steps: int | None,
) -> Trajectory:
    """Play as many episodes at a time as the worlds can, and return all of them in their order."""
    count, at_once = len(next(iter(noise.values()))), worlds.most_streams or 1
    parts = []
    for begin in range(0, count, at_once):
        rows = slice(begin, begin + at_once)
        own = {name: value[rows] for name, value in noise.items()}
        parts.append(rollout(agent, worlds, own, None if gumbel_BTA is None else gumbel_BTA[rows], steps=steps))
    longest = max(part.valid.shape[1] for part in parts)
    return _joined([_padded(part, longest) for part in parts])


def _padded(played: Trajectory, steps: int) -> Trajectory:
    """Append padding, which is not valid, up to a number of steps."""
    missing, final_obs = steps - played.valid.shape[1], played.final_obs
    padded = replace(played, final_obs=None).map(
        lambda x: torch.cat([x, x[:, -1:].expand(-1, missing, *x.shape[2:])], dim=1) if missing else x
    )
    if missing:
        never = torch.zeros_like(padded.valid[:, -missing:])
        ends = {name: getattr(played, name) for name in ("valid", "terminated", "truncated")}
        padded = replace(padded, **{k: torch.cat([x, never], dim=1) for k, x in ends.items() if x is not None})
    return replace(padded, final_obs=final_obs)


def _joined(parts: list[Any]) -> Any:
    """Concatenate trajectories, or their fields, along the streams."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, dict):
        return {name: _joined([part[name] for part in parts]) for name in first}
    if first is None:
        return None
    return replace(first, **{f.name: _joined([getattr(part, f.name) for part in parts]) for f in fields(first)})


class _Record:
    """Collects the steps of a rollout."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Tensor]] = {}
        self.done_B: Tensor | None = None

    @property
    def ended(self) -> bool:
        """Whether all episodes have ended; the host waits for the device."""
        done_B = torch.stack([self.columns[name][-1] for name in ("terminated", "truncated") if name in self.columns])
        self.done_B = done_B.any(0) if self.done_B is None else done_B.any(0) | self.done_B
        return bool(self.done_B.all())

    def add(
        self,
        obs: Tensor,
        target: Tensor | None,
        allowed: Tensor | None,
        facts: dict[str, Tensor],
        action: Tensor,
        after: Transition[Any],
    ) -> None:
        """Append one step. A value that is None at one step must be None at every step."""
        seen = {"obs": obs, "target": target, "allowed": allowed, "action": action, "reward": after.reward_B}
        ends = {"terminated": after.terminated_B, "truncated": after.truncated_B}
        if after.truncated_B is not None:
            ends["final_obs"] = after.obs if after.final_obs is None else after.final_obs
        told = {} if after.told is None else {f"told.{f.name}": getattr(after.told, f.name) for f in fields(Told)}
        seen["reward_known"] = after.reward_known_B
        facts = {f"facts.{name}": value for name, value in {**facts, **after.facts}.items()}
        for name, value in {**seen, **ends, **told, **facts}.items():
            if value is not None:
                self.columns.setdefault(name, []).append(value)

    def trajectory(self) -> Trajectory:
        """Return all steps as a trajectory; steps after an episode's end are padding."""
        x = {name: torch.stack(values, dim=1) for name, values in self.columns.items()}
        facts = {name.removeprefix("facts."): x.pop(name) for name in list(x) if name.startswith("facts.")}
        channel = {name.removeprefix("told."): x.pop(name) for name in list(x) if name.startswith("told.")}
        terminated_BT, truncated_BT, seen = x.pop("terminated"), x.pop("truncated", None), x.pop("final_obs", None)
        done_BT = terminated_BT if truncated_BT is None else terminated_BT | truncated_BT
        valid_BT = done_BT.int().cumsum(1) - done_BT.int() == 0
        row_B, last_B = torch.arange(len(valid_BT), device=valid_BT.device), valid_BT.sum(1) - 1
        return Trajectory(
            terminated=terminated_BT & valid_BT,
            truncated=None if truncated_BT is None else truncated_BT & ~terminated_BT & valid_BT,
            final_obs=None if seen is None else seen[row_B, last_B],
            valid=valid_BT,
            facts=facts,
            told=Told(**channel) if channel else None,
            **x,
        )
