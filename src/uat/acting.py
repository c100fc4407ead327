"""Playing: an agent in a simulator gives a trajectory.

The loop runs on tensors alone: no value is read back to the host, so that the whole rollout can be
captured as one CUDA graph. Randomness of worlds and of sampled actions is handed in.

Where no action changes anything (a `Recording`) there is nothing to play: the agent reads the episodes and is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from uat.contracts import Agent, Answers, Reader, Recording, Simulator
from uat.episode import Batch, Noise, Step, Trajectory
from uat.settings import Share, check_fields
from uat.spec import Discrete, Spec


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Who fills logs: the privileged expert, with a share of uniformly random actions.

    It knows the world's expert, so it is no Agent. Among ids a share of the actions is random; a weight vector is a
    share of the way from the expert's to the uniform one.
    """

    random_share: Share = 0.3

    def __post_init__(self) -> None:
        check_fields(self)

    def logits(self, target: Tensor, spec: Spec, allowed_BA: Tensor | None) -> Tensor:
        """log of (1 - share) expert + share uniform over what is allowed: (B, A)."""
        if isinstance(spec.action, Discrete):
            target = target[:, None] == torch.arange(spec.action.count, device=target.device)
        expert_BA = target.double()
        every_BA = torch.ones_like(expert_BA) if allowed_BA is None else allowed_BA.double()
        uniform_BA = every_BA / every_BA.sum(-1, keepdim=True)
        return torch.lerp(expert_BA, uniform_BA, self.random_share).log().float()


def choose(logits_BA: Tensor, spec: Spec, gumbel_BA: Tensor | None = None) -> Tensor:
    """The action of each stream: the arg-max (a sample, if Gumbel noise is given), or the softmax as weights."""
    if isinstance(spec.action, Discrete):
        return (logits_BA if gumbel_BA is None else logits_BA + gumbel_BA).argmax(-1)
    return logits_BA.softmax(-1)


def decide(agent: Any, spec: Spec, state: Any, step: Step, gumbel_BA: Tensor | None) -> tuple[Tensor, Any]:
    """The action of each stream and the state after it; an agent that chooses by itself does."""
    if hasattr(agent, "decide"):
        return agent.decide(state, step, gumbel_BA)
    logits_BA, state = agent.step(state, step)
    return choose(logits_BA, spec, gumbel_BA), state


def look(agent: Any, state: Any, facts: dict[str, Tensor]) -> Any:
    """The state after a reference that may has looked at what the world hides; policies have no `look`."""
    return agent.look(state, facts) if hasattr(agent, "look") else state


@dataclass(frozen=True, slots=True)
class Logits:
    """Answers of an agent that gives the logits of all actions."""

    logits_BA: Tensor

    def among(self, candidate_BK: Tensor) -> Tensor:
        return self.logits_BA.gather(1, candidate_BK)

    def every(self, episodes: slice) -> Tensor:
        return self.logits_BA[episodes]


@torch.no_grad()
def replay(agent: Any, recording: Recording, noise: Noise) -> Trajectory:
    """Ask an agent about recorded episodes; if nobody is asked, they are as they happened.

    An agent that reads whole episodes (`read`) does so; any other is told step by step.
    """
    trajectory = recording.trajectory(noise)
    if agent is None or isinstance(agent, Behaviour):
        return trajectory
    batch = recording.spec.clock.batch(trajectory)
    answers = agent.read(batch) if hasattr(agent, "read") else read_by_steps(agent, batch)
    return recording.judged(trajectory, noise, answers)


def read_by_steps(agent: Agent[Any], batch: Batch) -> Answers:
    """The slow twin of an agent's own `read`: what it answers at the last real step, told one step at a time."""
    streams, steps = batch.valid.shape
    state, last = agent.init_state(streams, steps, batch.obs.device), batch.last_B[:, None]
    logits_BA = None
    for t in range(steps):
        now_BA, state = agent.step(state, batch.step(t))
        logits_BA = now_BA if logits_BA is None else torch.where(last >= t, now_BA, logits_BA)
    assert logits_BA is not None
    return Logits(logits_BA)


def told(simulator: Any, world: Any, action: Tensor, reward_B: Tensor) -> tuple[Tensor, Tensor]:
    """What a policy is told of the step that led to this world: what happened, unless the simulator says otherwise."""
    return simulator.told(world) if hasattr(simulator, "told") else (action, reward_B)


@torch.no_grad()
def rollout(
    agent: Agent[Any] | Reader | Behaviour | None,
    simulator: Simulator[Any] | Recording,
    noise: Noise,
    gumbel_BTA: Tensor | None = None,
) -> Trajectory:
    """Play one episode in each world: greedily, or sampling with the noise given; without an agent the expert plays.

    After an episode ends its stream goes on as padding (`valid` False) until the horizon. Recorded episodes are
    replayed.
    """
    if isinstance(simulator, Recording):
        return replay(agent, simulator, noise)
    agent, spec = cast("Agent[Any] | Behaviour | None", agent), simulator.spec
    if spec.reward_lag < 1:
        raise ValueError(f"reward_lag={spec.reward_lag} is for logs: in a simulator the reward comes after the action")
    if hasattr(agent, "plays") and cast(Any, agent).plays(simulator):
        return cast(Any, agent).play(simulator, noise, gumbel_BTA)
    world, obs = simulator.reset(noise)
    streams, device = obs.shape[0], obs.device
    state = None if agent is None or isinstance(agent, Behaviour) else agent.init_state(streams, spec.horizon, device)
    history = spec.clock.begin(spec.no_action(streams, device))
    record: dict[str, list[Tensor]] = {}
    for t in range(spec.horizon):
        target, allowed, facts = simulator.expert(world), simulator.allowed(world), simulator.facts(world)
        action = target
        gumbel_BA = None if gumbel_BTA is None else gumbel_BTA[:, t]
        if isinstance(agent, Behaviour):
            action = choose(agent.logits(target, spec, allowed), spec, gumbel_BA)
        elif agent is not None:
            state = look(agent, state, facts)
            action, state = decide(agent, spec, state, history.step(obs, allowed), gumbel_BA)
        seen = {"obs": obs, "target": target, **({} if allowed is None else {"allowed": allowed})}
        world, obs, reward_B, done_B = simulator.step(world, action)
        told_action, told_reward_B = told(simulator, world, action, reward_B)
        history.add(told_action, told_reward_B)
        happened = {"action": action, "reward": reward_B, "done": done_B}
        if hasattr(simulator, "told"):
            happened |= {"told_action": told_action, "told_reward": told_reward_B}
        for name, value in {**seen, **happened, **{f"facts.{k}": v for k, v in facts.items()}}.items():
            record.setdefault(name, []).append(value)
    return _trajectory({name: torch.stack(values, dim=1) for name, values in record.items()})


def _trajectory(record: dict[str, Tensor]) -> Trajectory:
    """What was recorded; steps after an episode's end are padding."""
    facts = {name.removeprefix("facts."): record.pop(name) for name in list(record) if name.startswith("facts.")}
    done_BT = record.pop("done")
    valid_BT = done_BT.int().cumsum(1) - done_BT.int() == 0
    return Trajectory(done=done_BT & valid_BT, valid=valid_BT, facts=facts, **record)
