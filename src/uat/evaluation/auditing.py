"""Audit any policy: is it feedback-blind, and how much do its decisions depend on each channel?

The paper defines two properties by pairs of histories that share every observation and differ only in feedback:

  a policy is feedback-blind         if no such pair changes its representation or its output
  a process is feedback-informative  if some such pair, with both histories possible, changes the best decision

The best decision is that of the domain's Bayes filter, and a history is possible if the filter's posterior exists. The
second history of each pair takes its feedback from another episode, or from random values (any action, rewards of any
size). The random values show whether a policy cannot see feedback, or only happened to see no informative feedback.

The dependence of decisions on a channel (observation, action, reward) is measured by resampling: the channel of each
episode is replaced by that of another one. At every real step, the Jensen-Shannon divergence in bits between the action
distributions before and after lies between 0 (identical) and 1 (disjoint).

Any object with the two methods of `Agent`, `init_state` and `step`, can be audited. If it also has `features`, its
representation R_t is compared as well.

Axes: B episodes, T time, A actions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from uat.acting import rollout
from uat.checks import check_valid
from uat.contracts import Agent, Reader, Recording, Simulator, Worlds
from uat.distributions import LEAST_LOG_STD, MOST_LOG_STD, NODES, action_noise, choose
from uat.domains import Domain, split_seed
from uat.episode import Batch, Step, Trajectory, episode_mean
from uat.evaluation.intervals import interval
from uat.evaluation.scores import CEILING
from uat.methods import Policy
from uat.runs import Run, load_policy, opened
from uat.settings import Between, Seed, checked, shown
from uat.spec import Box, Discrete, Items, Named, Observations, Spec
from uat.threads import cpu_threads
from uat.training.surroundings import pick_device

CHANNELS = ("observation", "action", "reward")
FEEDBACK = ("action", "reward")
FIELDS = {"observation": "obs", "action": "prev_action", "reward": "prev_reward"}
"""The field of a batch that holds each channel."""
EARNED = {"observation": "obs", "action": "action", "reward": "reward"}
"""The field of a trajectory that holds each channel."""
RANDOM_REWARD_SCALE = 3.0
"""Scale of random rewards, relative to the largest observed reward."""
REFERENCE_EPISODES = 16
"""Number of episodes in which the reference is evaluated: an exact filter is slow, and one witness is enough."""
MOST_AUDITED, MOST_DRAWS = 65_536, 1_000
"""Limits of the number of episodes, all held in memory, and of the resampling draws per channel."""
MARGIN = 1e-6
"""Margin by which the best action's score must exceed the other decision's for the two to count as different."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependence:
    """Dependence of decisions on one channel."""

    channel: str
    seen: bool
    """Whether any change of this channel alone changes any output."""
    divergence: float
    """Mean Jensen-Shannon divergence of action distributions when the channel is resampled, in bits."""
    low: float
    high: float
    """95 % interval of the divergence over episodes."""
    changed: float
    """Share of decisions that change: share of arg-max actions, or share of the weight that is moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Result of an audit."""

    blind: bool
    """Whether feedback changed neither representation nor output in any pair of histories."""
    largest: float
    """Largest change that feedback caused in any number of a representation or output; 0 for a blind policy."""
    channels: tuple[Dependence, ...]
    episodes: int
    steps: int
    """Number of real (not padded) steps."""
    informative: bool | None
    """Whether some pair of possible histories has two different best decisions; None without a reference."""
    witnesses: int
    """Number of such pairs."""
    told_apart: float | None
    """Share of the witnesses for which the policy's outputs differ; None without witnesses."""

    def rows(self) -> list[dict[str, Any]]:
        """One row per channel."""
        own = {name: value for name, value in asdict(self).items() if name != "channels"}
        return [{**asdict(channel), **own} for channel in self.channels]

    def sentence(self) -> str:
        seen = [c.channel for c in self.channels if c.seen and c.channel in FEEDBACK]
        verdict = "feedback-blind" if self.blind else f"not feedback-blind: it sees {' and '.join(seen) or 'feedback'}"
        if self.informative is None:
            return f"{verdict}."
        if not self.informative:
            return f"{verdict}; no two of these histories show the process to be feedback-informative."
        return (
            f"{verdict}; the process is feedback-informative ({self.witnesses} pairs of histories with equal "
            f"observations and two best decisions), and the policy tells {self.told_apart:.0%} of them apart."
        )


@runtime_checkable
class Stepping(Protocol):
    """Any policy: an audit needs only these two methods."""

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> Any: ...

    def step(self, state: Any, step: Step) -> tuple[Tensor, Any]: ...


def audit(
    policy: Stepping,
    histories: Simulator[Any] | Recording | Trajectory | Domain | None = None,
    *,
    spec: Spec | None = None,
    reference: Agent[Any] | Reader | None = None,
    episodes: int = 64,
    draws: int = 2,
    seed: int = 0,
    device: torch.device | str = "cpu",
    threads: int | None = None,
) -> Audit:
    """Audit a policy of this library or any other (see the module's docstring).

    histories: a simulator in which the policy plays, or recorded or logged episodes; by default random episodes. They
        should resemble the policy's real inputs, since divergences are means over them. A domain means its test
        worlds, with its Bayes filter as reference if it has one.
    spec: the decision problem, for policies without a `.spec`.
    reference: an optimal agent, such as a domain's Bayes filter, to decide whether the process is feedback-informative.
    draws: how often each channel is resampled.
    threads: CPU threads; unset: UAT_THREADS, or one.
    """
    _check_policy(policy)
    checked(histories, Domain | Worlds | Trajectory | None, "audit: histories")
    checked(spec, Spec | None, "audit: spec")
    checked(reference, Reader | None, "audit: reference")
    with cpu_threads(threads):
        device = pick_device(device)
        if isinstance(histories, Domain):
            reference = histories.references().get(CEILING) if reference is None else reference
            histories = histories.simulator("test", device)
        return _audit(policy, histories, spec, reference, episodes, draws, seed, device)


def _check_policy(policy: Any) -> None:
    if isinstance(policy, type) or not isinstance(policy, Stepping):
        raise ValueError(f"audit: policy={shown(policy)} must be an object with the methods init_state and step")


def _audit(
    policy: Stepping,
    histories: Simulator[Any] | Recording | Trajectory | None,
    spec: Spec | None,
    reference: Agent[Any] | Reader | None,
    episodes: int,
    draws: int,
    seed: int,
    device: torch.device | str,
) -> Audit:
    spec = spec or _spec_of(policy, histories)
    checked(episodes, Annotated[int, Between(2, MOST_AUDITED)], "audit: episodes")
    checked(draws, Annotated[int, Between(1, MOST_DRAWS)], "audit: draws")
    checked(seed, Seed, "audit: seed")
    if isinstance(policy, torch.nn.Module):
        policy.eval()
    if isinstance(histories, Trajectory):
        check_valid(histories.valid, tuple(histories.valid.shape))
        trajectory = histories.to(device)
    elif histories is None:
        trajectory = random_histories(spec, episodes, seed).to(device)
    else:
        trajectory = play(policy, histories, episodes, seed)
    if len(trajectory.valid) < 2:
        raise ValueError("audit: histories holds 1 episode; at least 2 are needed to exchange feedback between them")
    return _Auditor(policy, spec, trajectory, draws, torch.Generator().manual_seed(seed)).audit(reference)


def audit_run(
    run: Run | Path | str,
    *,
    episodes: int = 64,
    draws: int = 2,
    device: torch.device | str | None = None,
    threads: int | None = None,
    trust: bool = False,
    domain: Any = None,
) -> Audit:
    """Audit a run's policy on test worlds of its domain, with the domain's Bayes filter as reference if it has one.

    trust: allow importing the code that the run's config names (`python:module:name`), which is refused by default.
    domain: the domain object or environment that was passed to `uat.train`, if it has no name.
    """
    run, chosen = opened(run, trust=trust, domain=domain), pick_device(device)
    with cpu_threads(threads):
        policy = load_policy(run.path).to(chosen)
        options = {"episodes": episodes, "draws": draws, "seed": split_seed("test", 0), "device": chosen}
        return audit(policy, run.config.build_domain(), **options)


def _spec_of(policy: Stepping, histories: Simulator[Any] | Recording | Trajectory | None) -> Spec:
    if isinstance(policy, Policy):
        return policy.spec
    if isinstance(histories, Worlds):
        return histories.spec
    raise ValueError("audit: this policy has no spec; name the decision problem with spec=")


# ---------------------------------------------------------------- histories


def play(policy: Stepping, simulator: Simulator[Any] | Recording, episodes: int, seed: int) -> Trajectory:
    """Episodes of a policy that samples its actions, since feedback then varies more than under arg-max actions.

    A recording returns its own episodes.
    """
    spec, ids = simulator.spec, torch.arange(episodes)
    noise, gumbel_BTA = simulator.noise(ids, seed), None
    if isinstance(simulator, Recording):
        return simulator.trajectory(noise)
    device = next(iter(noise.values())).device
    gumbel_BTA = action_noise(spec, seed, "audit", ids.to(device), spec.steps)
    if not isinstance(policy, Agent):
        raise ValueError(f"audit: {type(policy).__name__} is not a uat.contracts.Agent and cannot play in a simulator")
    return rollout(policy, simulator, noise, gumbel_BTA)


def random_histories(spec: Spec, episodes: int, seed: int) -> Trajectory:
    """Episodes of full length drawn at random: normal numbers, and uniformly distributed ids."""
    generator, shape = torch.Generator().manual_seed(seed), (episodes, spec.steps)
    obs = any_observations(spec.obs, shape, generator)
    action, valid = any_actions(spec, shape, generator), torch.ones(shape, dtype=torch.bool)
    reward = torch.randn(shape, generator=generator) / spec.reward_scale
    never = torch.zeros_like(valid)
    facts = {name: torch.rand(*shape, *inner, generator=generator) + 0.5 for name, inner in spec.facts.items()}
    return Trajectory(obs=obs, action=action, reward=reward, terminated=never, target=action, valid=valid, facts=facts)


def any_observations(space: Observations, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    match space:
        case Items(count):
            return torch.randint(count, shape, generator=generator)
        case Named(parts):
            return space.pack({name: any_observations(part, shape, generator) for name, part in parts.items()})
        case _:
            return torch.randn(*shape, *space.shape, generator=generator)


def any_actions(spec: Spec, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if isinstance(spec.action, Discrete):
        return torch.randint(spec.action.count, shape, generator=generator)
    if isinstance(spec.action, Box):
        low, high = torch.tensor(spec.action.low), torch.tensor(spec.action.high)
        return low + (high - low) * torch.rand(*shape, spec.action.count, generator=generator)
    return torch.randn(*shape, spec.action.count, generator=generator).softmax(-1)


# ---------------------------------------------------------------- answers


@torch.no_grad()
def answers(agent: Stepping, batch: Batch, facts: dict[str, Tensor] | None = None) -> Tensor:
    """Logits (B, T, A) of an agent that is fed the histories step by step; `facts` are for references only."""
    (streams, steps), device = batch.valid.shape, batch.valid.device
    state, logits = agent.init_state(streams, steps, device), []
    for t in range(steps):
        step = Step(
            obs=batch.obs[:, t],
            prev_action=batch.prev_action[:, t],
            prev_reward=batch.prev_reward[:, t],
            first=torch.full((streams,), t == 0, device=device),
            allowed=None if batch.allowed is None else batch.allowed[:, t],
        )
        if facts is not None and isinstance(agent, Agent):
            state = agent.look(state, {name: value[:, t] for name, value in facts.items()})
        logits_BA, state = agent.step(state, step)
        logits.append(logits_BA)
    return torch.stack(logits, dim=1)


def divergence(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Jensen-Shannon divergence (...) of two softmaxes over the last axis, in bits: 0 if equal, at most 1."""
    p, q = p_logits.double().softmax(-1), q_logits.double().softmax(-1)
    middle = (p + q) / 2
    nats = (torch.xlogy(p, p) + torch.xlogy(q, q)) / 2 - torch.xlogy(middle, middle)
    return nats.sum(-1).clamp_min(0.0) / torch.log(torch.tensor(2.0, dtype=torch.float64))


def box_divergence(p_numbers: Tensor, q_numbers: Tensor) -> Tensor:
    """Jensen-Shannon divergence (...) in bits between the Gaussians of a box's action, averaged over its numbers.

    Squashing to the limits does not change it. Means over each Gaussian are Gauss-Hermite sums.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    node_N, weight_N = (torch.from_numpy(x).to(p_numbers.device) for x in (nodes, weights / weights.sum()))
    means, log_stds = zip(*(x.double().chunk(2, dim=-1) for x in (p_numbers, q_numbers)), strict=True)
    log_stds = [log_std.clamp(LEAST_LOG_STD, MOST_LOG_STD) for log_std in log_stds]

    def log_density(i: int, u: Tensor) -> Tensor:
        return -0.5 * ((u - means[i][..., None]) / log_stds[i].exp()[..., None]).square() - log_stds[i][..., None]

    nats = torch.zeros_like(means[0])
    for i in range(2):
        u = means[i][..., None] + log_stds[i].exp()[..., None] * node_N
        own, other = log_density(i, u), log_density(1 - i, u)
        nats = nats + ((own - torch.logaddexp(own, other) + math.log(2)) * weight_N).sum(-1) / 2
    return (nats / math.log(2)).clamp(0.0, 1.0).mean(-1)


def distance(p_numbers: Tensor, q_numbers: Tensor, spec: Spec) -> Tensor:
    """Divergence (...) in bits of the two distributions over actions."""
    return (box_divergence if isinstance(spec.action, Box) else divergence)(p_numbers, q_numbers)


def moved(p_logits: Tensor, q_logits: Tensor, spec: Spec) -> Tensor:
    """Change of the decision (...): 1 if the arg-max action changes, the share of the weights that is moved, or how far
    the numbers of a box move, as a share of their ranges."""
    if isinstance(spec.action, Box):
        low, high = (torch.tensor(side, device=p_logits.device) for side in (spec.action.low, spec.action.high))
        return ((choose(p_logits, spec) - choose(q_logits, spec)).abs() / (high - low)).double().mean(-1)
    if isinstance(spec.action, Discrete):
        return (p_logits.argmax(-1) != q_logits.argmax(-1)).double()
    return (p_logits.double().softmax(-1) - q_logits.double().softmax(-1)).abs().sum(-1) / 2


def difference(x: Tensor, y: Tensor) -> Tensor:
    """Largest absolute difference at each step (B, T); masked actions do not differ."""
    distance = torch.where(x == y, 0.0, (x - y).abs())  # 0 for equal infinities, whose difference is NaN
    return distance.flatten(2).amax(-1)


def two_decisions(p: Tensor, q: Tensor) -> Tensor:
    """Whether the best actions differ (B, T), each better than the other by more than rounding.

    False where either history is impossible, which makes its scores NaN.
    """
    best_p, best_q = p.argmax(-1, keepdim=True), q.argmax(-1, keepdim=True)
    prefers_p = p.gather(-1, best_p) - p.gather(-1, best_q) > MARGIN
    prefers_q = q.gather(-1, best_q) - q.gather(-1, best_p) > MARGIN
    return (prefers_p & prefers_q)[..., 0]  # comparisons with NaN are False


def by_step(measure: Callable[[Tensor, Tensor], Tensor], p: Tensor, q: Tensor) -> Tensor:
    """Apply a measure of two tensors (B, T, A) step by step, since A may be large; returns (B, T)."""
    return torch.stack([measure(p[:, t], q[:, t]) for t in range(p.shape[1])], dim=1)


# ---------------------------------------------------------------- the audit itself


@dataclass(frozen=True, slots=True)
class _Auditor:
    policy: Stepping
    spec: Spec
    trajectory: Trajectory
    draws: int
    generator: torch.Generator

    def audit(self, reference: Agent[Any] | Reader | None) -> Audit:
        batch = self.spec.clock.batch(self.trajectory)
        before = answers(self.policy, batch)
        results = {channel: self._dependence(channel, batch, before) for channel in CHANNELS}
        largest = max(results[channel][1] for channel in FEEDBACK)
        pairs = self._witnesses(reference) if reference is not None else []
        witnesses, apart = sum(count for count, _ in pairs), sum(apart for _, apart in pairs)
        return Audit(
            blind=largest == 0.0,
            largest=largest,
            channels=tuple(dependence for dependence, _ in results.values()),
            episodes=len(batch.valid),
            steps=int(batch.valid.sum()),
            informative=None if reference is None else witnesses > 0,
            witnesses=witnesses,
            told_apart=apart / witnesses if witnesses else None,
        )

    def _dependence(self, channel: str, batch: Batch, before: Tensor) -> tuple[Dependence, float]:
        """Dependence on the channel, and the largest change of any output."""
        bits, changed, largest = [], [], self._random_change(channel, batch, before) if channel in FEEDBACK else 0.0
        for partner_B in self._partners(batch):
            other = exchanged(batch, (channel,), partner_B)
            after = answers(self.policy, other)
            bits.append(episode_mean(by_step(partial(distance, spec=self.spec), before, after), other.valid))
            changed.append(episode_mean(by_step(partial(moved, spec=self.spec), before, after), other.valid))
            largest = max(largest, torch.where(other.valid, difference(before, after), 0.0).max().item())
        bits_B = torch.stack(bits).mean(0).cpu()
        low, high = interval(bits_B[None])
        dependence = Dependence(
            channel=channel,
            seen=largest > 0,
            divergence=bits_B.mean().item(),
            low=max(low, 0.0),
            high=high,
            changed=torch.stack(changed).mean().item(),
        )
        return dependence, largest

    @torch.no_grad()
    def _random_change(self, channel: str, batch: Batch, before: Tensor) -> float:
        """Largest change of representation or output under random feedback, unrelated to the episode."""
        other = replace(batch, **{FIELDS[channel]: self._random_feedback(channel, batch)})
        changes = [difference(before, answers(self.policy, other))]
        if isinstance(self.policy, Policy):
            changes.append(difference(self.policy.features(batch), self.policy.features(other)))
        return max(torch.where(batch.valid, change, 0.0).max().item() for change in changes)

    def _random_feedback(self, channel: str, batch: Batch) -> Tensor:
        """Random actions, or large random rewards, at every step that can have received feedback."""
        shape = (batch.valid.shape[0], batch.valid.shape[1])
        if channel == "action":
            original, values, lag = batch.prev_action, any_actions(self.spec, shape, self.generator), 1
        else:
            original, lag = batch.prev_reward, self.spec.reward_lag
            largest = max(1.0, original.abs().max().item())
            values = torch.randn(shape, generator=self.generator) * RANDOM_REWARD_SCALE * largest
        changed = original.clone()
        changed[:, lag:] = values[:, lag:].to(original)
        return changed

    def _partners(self, batch: Batch) -> Iterator[Tensor]:
        """For each draw, the episode (B,) from which every episode takes the channel, never itself."""
        for _ in range(self.draws):
            order = torch.randperm(len(batch.valid), generator=self.generator)
            partner_B = torch.empty_like(order)
            partner_B[order] = order.roll(1)  # one cycle through all episodes
            yield partner_B.to(batch.valid.device)

    def _witnesses(self, reference: Agent[Any] | Reader) -> list[tuple[int, int]]:
        """Per exchange of feedback: how often the reference's decision changes, and in how many of these cases the
        policy's output changes too. The reference sees the true feedback, the policy what its channel delivers."""
        few = self.trajectory.map(lambda x: x[:REFERENCE_EPISODES])
        told = self.spec.clock.batch(few)
        truth = self.spec.clock.batch(replace(few, told=None))
        best, before, counts = decisions(reference, truth, few.facts), answers(self.policy, told), []
        last_B1 = told.valid.sum(1, keepdim=True) - 1
        for channels in (("action",), ("reward",), FEEDBACK):
            for partner_B in self._partners(told):
                other_truth, other_told = (exchanged(batch, channels, partner_B) for batch in (truth, told))
                differ = two_decisions(best, decisions(reference, other_truth, few.facts))
                answered_BT = difference(before, answers(self.policy, other_told)) > 0
                if differ.shape[1] < answered_BT.shape[1]:  # the reference gives scores of the last step only
                    differ = torch.zeros_like(answered_BT).scatter(1, last_B1, differ)
                differ_BT = differ & other_told.valid
                counts.append((int(differ_BT.sum()), int((differ_BT & answered_BT).sum())))
        return counts


def decisions(reference: Agent[Any] | Reader, batch: Batch, facts: dict[str, Tensor]) -> Tensor:
    """Scores (B, T, A) of the reference; (B, 1, A) if it reads whole episodes and scores only their last steps."""
    if isinstance(reference, Agent):
        return answers(reference, batch, facts)
    return reference.read(batch).every(slice(None))[:, None]


def exchanged(batch: Batch, channels: tuple[str, ...], partner_B: Tensor) -> Batch:
    """Replace channels by those of a partner episode; `valid` keeps the steps that are real in both.

    The true feedback in `trajectory` is exchanged as well, for references that read it.
    """
    taken: dict[str, Any] = {FIELDS[channel]: getattr(batch, FIELDS[channel])[partner_B] for channel in channels}
    if batch.trajectory is not None:
        own = {EARNED[channel]: getattr(batch.trajectory, EARNED[channel])[partner_B] for channel in channels}
        taken["trajectory"] = replace(batch.trajectory, **own)
    return replace(batch, valid=batch.valid & batch.valid[partner_B], **taken)
