"""Worlds with a hidden rule: every step shows a new observation, and the reward says how good the action was for it.

Order of events at step t: the rule may change, the agent observes, the expert labels, the agent acts; the reward is
that of the observation and the rule of step t. Actions change neither observations nor rules.

Axes: B worlds, T time, K actions, J = K - 1, O observation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from uat.contracts import Simulator, Transition
from uat.domains.rule.law import Task, drifting, normal, rows, rules, simplex, turns
from uat.episode import Noise, Told
from uat.noise import integers, uniform
from uat.settings import Between, Inner, Scale, Steps, check_fields
from uat.spec import Discrete, Spec, Vector

MOST_OBS = 1000
MOST_ACTIONS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleConfig:
    task: Task = "fixed"
    """Changes of the rule within an episode: fixed (none), flip (at hidden steps) or drift (a little at every step)."""
    reward: Literal["sign", "payoff"] = "sign"
    """Reward of an action: sign (+1 for the right one, -1 for others) or payoff (its score and normal noise)."""
    actions: Literal["own", "random"] = "own"
    """Actions and rewards that policies see: their own, or those of a uniformly random log."""
    d_obs: Annotated[int, Between(1, MOST_OBS)] = 10
    """Width of an observation."""
    num_actions: Annotated[int, Between(2, MOST_ACTIONS)] = 2
    """Number of actions, each with a row of the rule."""
    horizon: Steps = 40
    """Steps of one episode; no episode ends early."""
    label_noise: Annotated[float, Between(0, 0.5, without_high=True)] = 0.0
    """Chance that a reward of the kind sign is negated."""
    payoff_noise: Scale = 1.0
    """Standard deviation of the noise on a reward of the kind payoff."""
    flip_chance: Inner = 0.05
    """Chance of a flip before each step but the first, in the task flip."""
    drift: Inner = 0.05
    """Share of the rule's variance that is drawn again before each step, in the task drift."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def spec(self) -> Spec:
        return Spec(obs=Vector(self.d_obs), action=Discrete(self.num_actions), horizon=self.horizon)


@dataclass(frozen=True, slots=True)
class World:
    obs_BTO: Tensor
    """Observations of all steps, and one after the last."""
    score_BTK: Tensor
    """Score W_a · o of every action."""
    best_BT: Tensor
    """The right action: the one with the highest score."""
    blur_BT: Tensor
    """Noise on the reward: a factor of 1 or -1 for signs, a number to add for payoffs."""
    turn_BT: Tensor
    """Places by which the rows are rotated."""
    log_BT: Tensor | None
    """Actions that policies see in place of their own; None: their own."""
    ended_B: Tensor
    """False everywhere: no episode ends before the horizon."""
    t: int = 0


class RuleSimulator(Simulator[World]):
    """Worlds of all tasks. Everything after `noise` can be captured as a CUDA graph."""

    def __init__(self, config: RuleConfig, device: torch.device | str) -> None:
        self.config, self.spec, self.device = config, config.spec, device
        self.corner_KJ = simplex(config.num_actions).to(device)

    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        """Return observations, scores and noise of all steps; scores are sums in double precision."""
        c, ids_B = self.config, episode_ids.to(self.device, non_blocking=True)
        obs_BTO = normal(seed, "rule.observation", ids_B, (c.horizon + 1) * c.d_obs).view(-1, c.horizon + 1, c.d_obs)
        obs_BTO, turn_BT = obs_BTO.float(), torch.zeros(len(ids_B), c.horizon, dtype=torch.long, device=ids_B.device)
        if c.task == "drift":
            z_BTJO = drifting(seed, ids_B, c.num_actions, c.d_obs, c.horizon, c.drift)
        else:
            z_BTJO = rules(seed, ids_B, c.num_actions, c.d_obs)[:, None]
        if c.task == "flip":
            turn_BT = turns(seed, ids_B, c.num_actions, c.horizon, c.flip_chance)
        u_BTJ = (z_BTJO * obs_BTO[:, : c.horizon, None]).sum(-1)
        score_BTK = rows(self.corner_KJ, u_BTJ[..., None])[..., 0]
        row_BTK = (torch.arange(c.num_actions, device=ids_B.device) + turn_BT[..., None]) % c.num_actions
        noise = {
            "observation": obs_BTO,
            "score": score_BTK.gather(-1, row_BTK).float(),
            "turn": turn_BT,
            "reward": self._blur(ids_B, seed),
        }
        if c.actions == "random":
            noise["action"] = integers(seed, "rule.action", ids_B, c.horizon, below=c.num_actions)
        return noise

    def reset(self, noise: Noise) -> tuple[World, Tensor]:
        score_BTK = noise["score"]
        world = World(
            obs_BTO=noise["observation"],
            score_BTK=score_BTK,
            best_BT=score_BTK.argmax(-1),
            blur_BT=noise["reward"],
            turn_BT=noise["turn"],
            log_BT=noise.get("action"),
            ended_B=torch.zeros_like(noise["turn"][:, 0], dtype=torch.bool),
        )
        return world, world.obs_BTO[:, 0]

    def expert(self, world: World) -> Tensor:
        return world.best_BT[:, world.t]

    def step(self, world: World, action: Tensor) -> Transition[World]:
        after, told = replace(world, t=world.t + 1), None
        if world.log_BT is not None:
            logged_B = world.log_BT[:, world.t]
            told = Told(action=logged_B, reward=self.reward(world, logged_B))
        ended_B = ~world.ended_B if after.t == self.spec.steps else world.ended_B  # the horizon is part of the task
        return Transition(after, world.obs_BTO[:, after.t], self.reward(world, action), ended_B, told=told)

    def reward(self, world: World, action: Tensor) -> Tensor:
        """(B,) reward of an action at this step."""
        blur_B = world.blur_BT[:, world.t]
        if self.config.reward == "payoff":
            return world.score_BTK[:, world.t].gather(1, action[:, None])[:, 0] + blur_B
        return torch.where(action == world.best_BT[:, world.t], blur_B, -blur_B)

    def facts(self, world: World) -> dict[str, Tensor]:
        """The scores of all actions, and the places by which the rows are rotated."""
        return {"score": world.score_BTK[:, world.t], "turn": world.turn_BT[:, world.t]}

    def _blur(self, ids_B: Tensor, seed: int) -> Tensor:
        c = self.config
        if c.reward == "payoff":
            return (c.payoff_noise * normal(seed, "rule.payoff", ids_B, c.horizon)).float()
        return torch.where(uniform(seed, "rule.label", ids_B, c.horizon) < c.label_noise, -1.0, 1.0)
