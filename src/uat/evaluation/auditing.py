"""An audit of any policy: is it feedback-blind, and how much do its decisions hang on each channel?

By the paper's two definitions, on pairs of histories that share every observation and differ in feedback alone:

  a policy is feedback-blind         if no such pair changes its representation or its answer
  a process is feedback-informative  if some such pair, both of which can happen, changes the best decision

The best decision is that of the domain's Bayes filter, and a history can happen if the filter's posterior exists. The
second histories of the pairs take their feedback from another episode, whole, and from nowhere (any action, rewards
of any size), so that a policy which has learnt to ignore feedback and one that cannot see it are told apart from one
that merely meets none.

How much decisions hang on a channel (observation, action, reward) is measured by resampling: the channel of each
episode is taken from another one. At every real step the Jensen-Shannon divergence between the action distributions
before and after, in bits, lies between 0 (nothing changes) and 1 (nothing stays).

Any object with the two methods of `Agent` can be audited: `init_state` and `step`. One that also has `features` shows
its representation R_t.

Axes: B episodes, T time, A actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor

from uat.acting import rollout
from uat.contracts import Agent, Reader, Recording, Simulator, Worlds
from uat.domains import split_seed
from uat.episode import Batch, Step, Trajectory, episode_mean
from uat.evaluation.intervals import interval
from uat.evaluation.scores import CEILING
from uat.methods import Policy
from uat.noise import gumbel
from uat.runs import Run, load_policy
from uat.settings import Between, Seed, checked
from uat.spec import Assets, Discrete, Items, Spec, Vector
from uat.threads import cpu_threads
from uat.training.surroundings import pick_device

CHANNELS = ("observation", "action", "reward")
FEEDBACK = ("action", "reward")
FIELDS = {"observation": "obs", "action": "prev_action", "reward": "prev_reward"}
"""Where a channel lies in a batch."""
EARNED = {"observation": "obs", "action": "action", "reward": "reward"}
"""Where it lies in a trajectory."""
LOUD = 3.0
"""Rewards from nowhere are normal numbers of so many times the largest one that was told."""
WITNESSING = 16
"""Episodes in which the reference is asked: an exact filter is slow, and one witness would do."""
MOST_AUDITED, MOST_DRAWS = 65_536, 1_000
"""Episodes, all held in memory, and how often each channel is resampled."""
SURE = 1e-6
"""By how much the score of the best action must exceed that of another decision, for the two to differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependence:
    """What one channel does to decisions."""

    channel: str
    seen: bool
    """Whether any change of this channel alone changes any answer."""
    divergence: float
    """Mean Jensen-Shannon divergence of action distributions when the channel is resampled, in bits."""
    low: float
    high: float
    """Its 95 % interval over episodes."""
    changed: float
    """Share of decisions that change: of arg-max actions, or of the weight that moves elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What an audit found."""

    blind: bool
    """Whether feedback changed neither representation nor answer, in any pair of histories."""
    largest: float
    """The largest change of a number in representations and answers that feedback made; 0 for the blind."""
    channels: tuple[Dependence, ...]
    episodes: int
    steps: int
    """Real steps that were looked at."""
    informative: bool | None
    """Whether some pair of possible histories has two best decisions; None: nobody was there to say."""
    witnesses: int
    """How many such pairs were found."""
    told_apart: float | None
    """In which share of the witnesses the policy's answers differ; None without witnesses."""

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


class Stepping(Protocol):
    """A policy of anybody's: these two methods are all that an audit asks for."""

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> Any: ...

    def step(self, state: Any, step: Step) -> tuple[Tensor, Any]: ...


def audit(
    policy: Stepping,
    histories: Simulator[Any] | Recording | Trajectory | None = None,
    *,
    spec: Spec | None = None,
    reference: Agent[Any] | Reader | None = None,
    episodes: int = 64,
    draws: int = 2,
    seed: int = 0,
    device: torch.device | str = "cpu",
    threads: int | None = None,
) -> Audit:
    """Audit a policy, ours or anybody's (see the module).

    histories: a simulator, in which the policy plays; recorded or logged episodes; unset: random ones. They should
        look like what the policy meets, since divergences are means over them.
    spec: the decision problem, for policies that do not say `.spec`.
    reference: who decides best, to say whether the process is feedback-informative: a domain's Bayes filter.
    draws: how often each channel is resampled.
    threads: CPU threads; unset: UAT_THREADS, or one.
    """
    with cpu_threads(threads):
        return _audit(policy, histories, spec, reference, episodes, draws, seed, device)


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
        trajectory = histories.to(device)
    elif histories is None:
        trajectory = random_histories(spec, episodes, seed).to(device)
    else:
        trajectory = play(policy, histories, episodes, seed)
    if len(trajectory.valid) < 2:
        raise ValueError("audit: one episode has no other to take feedback from; bring at least two")
    return _Auditor(policy, spec, trajectory, draws, torch.Generator().manual_seed(seed)).audit(reference)


def audit_run(
    run: Run | Path | str,
    *,
    episodes: int = 64,
    draws: int = 2,
    device: torch.device | str | None = None,
    threads: int | None = None,
) -> Audit:
    """Audit a run's policy on test worlds of its domain, beside the domain's Bayes filter where there is one."""
    run, chosen = run if isinstance(run, Run) else Run.open(run), pick_device(device)
    with cpu_threads(threads):
        domain = run.config.build_domain()
        policy = load_policy(run.path).to(chosen)
        worlds, filter_ = domain.simulator("test", chosen), domain.references().get(CEILING)
        seed = split_seed("test", 0)
        return audit(policy, worlds, reference=filter_, episodes=episodes, draws=draws, seed=seed, device=chosen)


def _spec_of(policy: Stepping, histories: Simulator[Any] | Recording | Trajectory | None) -> Spec:
    if isinstance(policy, Policy):
        return policy.spec
    if isinstance(histories, Worlds):
        return histories.spec
    raise ValueError("audit: this policy has no spec; name the decision problem with spec=")


# ---------------------------------------------------------------- histories


def play(policy: Stepping, simulator: Simulator[Any] | Recording, episodes: int, seed: int) -> Trajectory:
    """What a policy meets where it samples its actions: feedback differs more than under its arg-max. Nobody plays
    recorded episodes."""
    spec, ids = simulator.spec, torch.arange(episodes)
    noise, gumbel_BTA = simulator.noise(ids, seed), None
    if isinstance(simulator, Recording):
        return simulator.trajectory(noise)
    if isinstance(spec.action, Discrete):
        device = next(iter(noise.values())).device
        flat = gumbel(seed, "audit", ids.to(device), spec.horizon * spec.action.count)
        gumbel_BTA = flat.view(-1, spec.horizon, spec.action.count).float()
    if not isinstance(policy, Agent):
        raise ValueError(f"audit: {type(policy).__name__} is no uat.contracts.Agent, and cannot play in a simulator")
    return rollout(policy, simulator, noise, gumbel_BTA)


def random_histories(spec: Spec, episodes: int, seed: int) -> Trajectory:
    """Whole episodes in which everything is drawn at random: normal numbers, and ids that are equally likely."""
    generator, shape = torch.Generator().manual_seed(seed), (episodes, spec.horizon)
    match spec.obs:
        case Vector(width):
            obs = torch.randn(*shape, width, generator=generator)
        case Assets(count, features):
            obs = torch.randn(*shape, count, features, generator=generator)
        case Items(count):
            obs = torch.randint(count, shape, generator=generator)
    action, valid = any_actions(spec, shape, generator), torch.ones(shape, dtype=torch.bool)
    reward = torch.randn(shape, generator=generator) / spec.reward_scale
    never = torch.zeros_like(valid)
    facts = {name: torch.rand(*shape, *inner, generator=generator) + 0.5 for name, inner in spec.facts.items()}
    return Trajectory(obs=obs, action=action, reward=reward, terminated=never, target=action, valid=valid, facts=facts)


def any_actions(spec: Spec, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if isinstance(spec.action, Discrete):
        return torch.randint(spec.action.count, shape, generator=generator)
    return torch.randn(*shape, spec.action.count, generator=generator).softmax(-1)


# ---------------------------------------------------------------- answers


@torch.no_grad()
def answers(agent: Stepping, batch: Batch, facts: dict[str, Tensor] | None = None) -> Tensor:
    """Logits (B, T, A) of histories that are told step by step; facts: what a reference may look at."""
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
    """(...) Jensen-Shannon divergence of two softmaxes over the last axis, in bits: 0 where equal, at most 1."""
    p, q = p_logits.double().softmax(-1), q_logits.double().softmax(-1)
    middle = (p + q) / 2
    nats = (torch.xlogy(p, p) + torch.xlogy(q, q)) / 2 - torch.xlogy(middle, middle)
    return nats.sum(-1).clamp_min(0.0) / torch.log(torch.tensor(2.0, dtype=torch.float64))


def moved(p_logits: Tensor, q_logits: Tensor, spec: Spec) -> Tensor:
    """(...) how much of what is done changes: whether the arg-max does, or which share of the weights."""
    if isinstance(spec.action, Discrete):
        return (p_logits.argmax(-1) != q_logits.argmax(-1)).double()
    return (p_logits.double().softmax(-1) - q_logits.double().softmax(-1)).abs().sum(-1) / 2


def difference(x: Tensor, y: Tensor) -> Tensor:
    """(B, T) the largest difference of each step; a masked action has none."""
    both = torch.where(x == y, 0.0, (x - y).abs())  # equal infinities differ by nothing
    return both.flatten(2).amax(-1)


def two_decisions(p: Tensor, q: Tensor) -> Tensor:
    """(B, T) whether the best actions differ, each better than the other's by more than rounding; False where either
    history cannot be, so that its scores are not numbers."""
    best_p, best_q = p.argmax(-1, keepdim=True), q.argmax(-1, keepdim=True)
    prefers_p = p.gather(-1, best_p) - p.gather(-1, best_q) > SURE
    prefers_q = q.gather(-1, best_q) - q.gather(-1, best_p) > SURE
    return (prefers_p & prefers_q)[..., 0]  # comparisons with NaN are False


def by_step(measure: Callable[[Tensor, Tensor], Tensor], p: Tensor, q: Tensor) -> Tensor:
    """(B, T) a measure of two (B, T, A), one step at a time: the actions may be many."""
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
        found = {channel: self._dependence(channel, batch, before) for channel in CHANNELS}
        largest = max(found[channel][1] for channel in FEEDBACK)
        pairs = self._witnesses(reference) if reference is not None else []
        witnesses, apart = sum(count for count, _ in pairs), sum(apart for _, apart in pairs)
        return Audit(
            blind=largest == 0.0,
            largest=largest,
            channels=tuple(dependence for dependence, _ in found.values()),
            episodes=len(batch.valid),
            steps=int(batch.valid.sum()),
            informative=None if reference is None else witnesses > 0,
            witnesses=witnesses,
            told_apart=apart / witnesses if witnesses else None,
        )

    def _dependence(self, channel: str, batch: Batch, before: Tensor) -> tuple[Dependence, float]:
        """What the channel does, and the largest change that it makes anywhere."""
        bits, changed, largest = [], [], self._from_nowhere(channel, batch, before) if channel in FEEDBACK else 0.0
        for partner_B in self._partners(batch):
            other = exchanged(batch, (channel,), partner_B)
            after = answers(self.policy, other)
            bits.append(episode_mean(by_step(divergence, before, after), other.valid))
            changed.append(episode_mean(by_step(partial(moved, spec=self.spec), before, after), other.valid))
            largest = max(largest, torch.where(other.valid, difference(before, after), 0.0).max().item())
        bits_B = torch.stack(bits).mean(0).cpu()
        low, high = interval(bits_B[None])
        found = Dependence(
            channel=channel,
            seen=largest > 0,
            divergence=bits_B.mean().item(),
            low=max(low, 0.0),
            high=high,
            changed=torch.stack(changed).mean().item(),
        )
        return found, largest

    @torch.no_grad()
    def _from_nowhere(self, channel: str, batch: Batch, before: Tensor) -> float:
        """The largest change of representation or answer under feedback that has nothing to do with the episode."""
        other = replace(batch, **{FIELDS[channel]: self._loud(channel, batch)})
        changes = [difference(before, answers(self.policy, other))]
        if isinstance(self.policy, Policy):
            changes.append(difference(self.policy.features(batch), self.policy.features(other)))
        return max(torch.where(batch.valid, change, 0.0).max().item() for change in changes)

    def _loud(self, channel: str, batch: Batch) -> Tensor:
        """Any action, or rewards of any size, wherever something may have been told."""
        shape = (batch.valid.shape[0], batch.valid.shape[1])
        if channel == "action":
            told, values, lag = batch.prev_action, any_actions(self.spec, shape, self.generator), 1
        else:
            told, lag = batch.prev_reward, self.spec.reward_lag
            values = torch.randn(shape, generator=self.generator) * LOUD * max(1.0, told.abs().max().item())
        changed = told.clone()
        changed[:, lag:] = values[:, lag:].to(told)
        return changed

    def _partners(self, batch: Batch) -> Iterator[Tensor]:
        """(B,) for each draw, whose channel every episode is given: never its own."""
        for _ in range(self.draws):
            order = torch.randperm(len(batch.valid), generator=self.generator)
            partner_B = torch.empty_like(order)
            partner_B[order] = order.roll(1)  # one cycle through all
            yield partner_B.to(batch.valid.device)

    def _witnesses(self, reference: Agent[Any] | Reader) -> list[tuple[int, int]]:
        """How often the reference decides otherwise after other feedback, and how often of these the policy answers
        otherwise too. The reference is told what happened; the policy what its channel tells."""
        few = self.trajectory.map(lambda x: x[:WITNESSING])
        told = self.spec.clock.batch(few)
        truth = self.spec.clock.batch(replace(few, told=None))
        best, before, found = decisions(reference, truth, few.facts), answers(self.policy, told), []
        last_B1 = told.valid.sum(1, keepdim=True) - 1
        for channels in (("action",), ("reward",), FEEDBACK):
            for partner_B in self._partners(told):
                other_truth, other_told = (exchanged(batch, channels, partner_B) for batch in (truth, told))
                differ = two_decisions(best, decisions(reference, other_truth, few.facts))
                answered_BT = difference(before, answers(self.policy, other_told)) > 0
                if differ.shape[1] < answered_BT.shape[1]:  # the reference was asked at the last step alone
                    differ = torch.zeros_like(answered_BT).scatter(1, last_B1, differ)
                differ_BT = differ & other_told.valid
                found.append((int(differ_BT.sum()), int((differ_BT & answered_BT).sum())))
        return found


def decisions(reference: Agent[Any] | Reader, batch: Batch, facts: dict[str, Tensor]) -> Tensor:
    """Scores (B, T, A) of who decides best; (B, 1, A) of one that reads whole episodes and is asked at their ends."""
    if isinstance(reference, Agent):
        return answers(reference, batch, facts)
    return reference.read(batch).every(slice(None))[:, None]


def exchanged(batch: Batch, channels: tuple[str, ...], partner_B: Tensor) -> Batch:
    """Some channels of another episode each, and the steps that are real in both. The trajectory goes along, for
    references that read it there."""
    taken: dict[str, Any] = {FIELDS[channel]: getattr(batch, FIELDS[channel])[partner_B] for channel in channels}
    if batch.trajectory is not None:
        own = {EARNED[channel]: getattr(batch.trajectory, EARNED[channel])[partner_B] for channel in channels}
        taken["trajectory"] = replace(batch.trajectory, **own)
    return replace(batch, valid=batch.valid & batch.valid[partner_B], **taken)
