"""Contract tests of every domain of the registry."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.builders import build_random
from uat.acting import rollout
from uat.config import override
from uat.contracts import Agent, Reader, Recording, Simulator, read_by_steps
from uat.domains import DOMAINS, Domain, split_seed
from uat.engines.rollout import RolloutRunner
from uat.episode import Step, Trajectory
from uat.recipes import pairs, recipe
from uat.spec import Discrete, Items, Spec

B, SEED = 12, 7
SPLITS = ("train", "validation", "test")
IDS = torch.arange(B)

every_split = pytest.mark.parametrize("split", SPLITS)


@pytest.fixture(params=DOMAINS)
def domain(request: pytest.FixtureRequest) -> Domain:
    entry = DOMAINS[request.param]
    return entry.build(entry.config())


class Recorder(Agent[None]):
    """Plays at random, and remembers every step it was shown, as it was then."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.steps = spec, list[Step]()
        self.generator = torch.Generator().manual_seed(0)

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> None:
        return None

    def step(self, state: None, step: Step) -> tuple[Tensor, None]:
        self.steps.append(step.map(torch.clone))
        logits_BA = torch.randn(len(step.first), self.spec.action.count, generator=self.generator)
        return logits_BA if step.allowed is None else logits_BA.masked_fill(~step.allowed, -torch.inf), None


def play(simulator: Simulator[Any] | Recording, agent: Agent[Any] | Reader | None = None) -> Trajectory:
    return rollout(agent, simulator, simulator.noise(IDS, SEED))


def is_recorded(domain: Domain) -> bool:
    """Whether the domain has recordings, which agents read instead of playing; its expert is a reference."""
    return isinstance(domain.simulator("test", "cpu"), Recording)


def agents_of(domain: Domain) -> dict[str, Agent[Any] | Reader | None]:
    """All references and, where it plays, the expert."""
    return {**domain.references(), **({} if is_recorded(domain) else {"expert": None})}


def random_play(domain: Domain) -> Trajectory:
    return play(domain.simulator("test", "cpu"), Recorder(domain.spec))


@pytest.mark.parametrize("name", DOMAINS)
def test_the_task_field_chooses_the_task(name: str) -> None:
    entry = DOMAINS[name]
    method = next(method for domain, method in pairs() if domain == name)
    for task in entry.tasks:
        config = recipe(name, method, "smoke")
        config = override(config, {entry.task_field: task}) if entry.task_field else config
        assert config.build_domain().task == task


# ---------------------------------------------------------------- worlds


@every_split
def test_noise_depends_on_seed_and_id_alone(domain: Domain, split: Any) -> None:
    simulator = domain.simulator(split, "cpu")
    ids, some = torch.arange(40), torch.tensor([31, 5, 0, 5])
    whole, part, other = simulator.noise(ids, SEED), simulator.noise(some, SEED), simulator.noise(ids, SEED + 1)
    assert whole
    for name, value in whole.items():
        assert torch.equal(part[name], value[some]), name
    if split not in domain.episodes:  # those are so many and no more, whatever the seed
        assert any(not torch.equal(other[name], value) for name, value in whole.items())


@every_split
def test_a_split_that_holds_so_many_episodes_holds_no_two_alike(domain: Domain, split: Any) -> None:
    count = domain.episodes.get(split)
    if count is not None:
        noise = domain.simulator(split, "cpu").noise(torch.arange(count + 1), SEED)
        rows = torch.stack([value.double().view(count + 1, -1).sum(1) for value in noise.values()], dim=1)
        assert len(rows.unique(dim=0)) == count
        assert torch.equal(rows[-1], rows[0])  # ids go round


@every_split
def test_same_noise_gives_the_same_episodes_in_any_batch(domain: Domain, split: Any) -> None:
    simulator = domain.simulator(split, "cpu")
    whole = rollout(None, simulator, simulator.noise(IDS, SEED))
    some = torch.tensor([9, 2])
    part = rollout(None, simulator, simulator.noise(some, SEED))
    for name in ("obs", "action", "reward", "terminated", "target", "valid"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[some]), name


def test_playing_reads_no_value_on_the_host(domain: Domain) -> None:
    """Meta tensors hold no values, so that whatever would block a CUDA graph raises here, references included."""
    noise = domain.simulator("test", "cpu").noise(IDS, SEED)
    simulator = domain.simulator("test", "meta")
    for agent in agents_of(domain).values():
        played = rollout(agent, simulator, {name: value.to("meta") for name, value in noise.items()})
        measured = domain.measure(played)
        assert all(value.shape == (B,) for value in measured.values())


def test_splits_show_different_worlds(domain: Domain) -> None:
    shown = {split: domain.simulator(split, "cpu").noise(IDS, split_seed(split, 0)) for split in SPLITS}
    for a, b in (("train", "validation"), ("train", "test"), ("validation", "test")):
        assert any(not torch.equal(shown[a][name], shown[b][name]) for name in shown[a]), (a, b)


def test_rollouts_fit_the_spec(domain: Domain) -> None:
    spec, trajectory = domain.spec, random_play(domain)
    shape = (B, spec.horizon)
    expected = (*shape, *spec.obs.shape), torch.int64 if isinstance(spec.obs, Items) else torch.float32
    assert (tuple(trajectory.obs.shape), trajectory.obs.dtype) == expected
    ids = isinstance(spec.action, Discrete)
    for value in (trajectory.action, trajectory.required_target):
        assert value.shape == (shape if ids else (*shape, spec.action.count))
        assert value.dtype == (torch.int64 if ids else torch.float32)
    assert (trajectory.reward.shape, trajectory.reward.dtype) == (shape, torch.float32)
    for value in (trajectory.terminated, trajectory.valid):
        assert (value.shape, value.dtype) == (shape, torch.bool)
    if trajectory.allowed is not None:
        assert (trajectory.allowed.shape, trajectory.allowed.dtype) == ((*shape, spec.action.count), torch.bool)
    for name, inner in spec.facts.items():
        assert trajectory.facts[name].shape == (*shape, *inner), name


def test_rollouts_hold_legal_values(domain: Domain) -> None:
    spec, trajectory = domain.spec, random_play(domain)
    real = trajectory.valid
    assert real[:, 0].all()
    assert (real[:, 1:] <= real[:, :-1]).all()  # padding only after the end
    assert torch.equal(real[:, 1:], real[:, :-1] & ~trajectory.done[:, :-1])
    assert trajectory.reward[real].isfinite().all()
    assert trajectory.obs[real].isfinite().all()
    for value in (trajectory.action[real], trajectory.required_target[real]):
        if isinstance(spec.action, Discrete):
            assert value.min() >= 0
            assert value.max() < spec.action.count
        else:
            assert value.min() >= 0
            torch.testing.assert_close(value.sum(-1), torch.ones(len(value)), rtol=0, atol=1e-5)
    if isinstance(spec.obs, Items):
        assert trajectory.obs.min() >= -1
        assert trajectory.obs.max() < spec.obs.count


def test_rewards_reach_a_policy_at_a_reasonable_size(domain: Domain) -> None:
    """The scale exists so that the reward channel is neither lost nor blown up."""
    size = (random_play(domain).reward * domain.spec.reward_scale).abs().mean()
    assert 0.01 < size < 10


# ---------------------------------------------------------------- the clock


@pytest.mark.parametrize("lag", [None, 2, 3])
def test_clock_shows_an_agent_what_training_will_show(domain: Domain, lag: int | None) -> None:
    simulator = domain.simulator("test", "cpu")
    if lag is not None:
        simulator.spec = replace(simulator.spec, reward_lag=lag)
    agent = Recorder(simulator.spec)
    batch = simulator.spec.clock.batch(play(simulator, agent))
    assert batch.prev_reward.abs().max() > 0
    assert len(agent.steps) == simulator.spec.horizon
    for t, step in enumerate(agent.steps):
        real_B = batch.valid[:, t]  # an agent plays on in padding, training finds nothing there
        for name in ("obs", "prev_action", "prev_reward", "allowed"):
            told, taught = getattr(step, name), getattr(batch, name)
            assert (told is None) == (taught is None)
            assert told is None or torch.equal(told[real_B], taught[real_B, t]), f"{name} differs at t = {t}"
        assert (step.first == (t == 0)).all()


def test_a_reward_before_its_action_is_refused(domain: Domain) -> None:
    """In a simulator; recorded rewards may be known at once."""
    simulator = domain.simulator("test", "cpu")
    simulator.spec = replace(simulator.spec, reward_lag=0)
    if is_recorded(domain):
        batch = simulator.spec.clock.batch(play(simulator))
        assert torch.equal(batch.prev_reward, play(simulator).reward * simulator.spec.reward_scale)
        return
    with pytest.raises(ValueError, match="reward_lag=0 is for logs"):
        play(simulator)


def test_nothing_that_is_answered_changes_a_recording(domain: Domain) -> None:
    """In a recording an agent sees the recorded actions and rewards, not its own."""
    if not is_recorded(domain):
        return
    asked, unasked = random_play(domain), play(domain.simulator("test", "cpu"))
    for name in ("obs", "action", "reward", "terminated", "target", "valid"):
        assert torch.equal(getattr(asked, name), getattr(unasked, name)), name
    assert unasked.valid.all()  # whole episodes: the last step is the one that is asked about


@pytest.mark.parametrize("method", ["uat", "tent"])
def test_reading_a_recording_equals_stepping_through_it(domain: Domain, method: str) -> None:
    if not is_recorded(domain):
        return
    policy, simulator = build_random(method, domain.spec), domain.simulator("test", "cpu")
    assert isinstance(simulator, Recording)
    noise = simulator.noise(IDS, SEED)
    read = domain.measure(rollout(policy, simulator, noise))
    trajectory = simulator.trajectory(noise)
    stepped = read_by_steps(policy, domain.spec.clock.batch(trajectory))
    for name, value in domain.measure(simulator.judged(trajectory, noise, stepped)).items():
        torch.testing.assert_close(value, read[name], rtol=0, atol=1e-12, equal_nan=True, msg=name)


# ---------------------------------------------------------------- metrics and references


def test_expert_scores_full_accuracy(domain: Domain) -> None:
    if is_recorded(domain):  # what happened is not what the expert would do
        return
    trajectory = play(domain.simulator("test", "cpu"))
    assert torch.equal(trajectory.action[trajectory.valid], trajectory.required_target[trajectory.valid])
    accuracies = {name: value for name, value in domain.measure(trajectory).items() if "accuracy" in name}
    assert accuracies or not isinstance(domain.spec.action, Discrete)
    for name, value in accuracies.items():
        assert (value[~value.isnan()] == 1).all(), name


def test_measure_gives_every_declared_metric_per_episode(domain: Domain) -> None:
    measured = domain.measure(random_play(domain))
    for name, value in measured.items():
        assert value.shape == (B,), name
        assert value[~value.isnan()].isfinite().all(), name
    metrics = domain.summarise(measured)
    assert list(metrics) == [metric.name for metric in domain.metrics]
    for metric in domain.metrics:
        value = metrics[metric.name]
        assert value.dim() == 1, metric
        assert value[~value.isnan()].isfinite().all(), metric
        assert value.isfinite().any() if metric.partial else value.isfinite().all(), metric
    assert not domain.metrics[0].partial


def test_padding_changes_no_metric(domain: Domain) -> None:
    """Most of a random player's episode becomes padding, filled from the expert's, with NaN among its rewards."""
    if is_recorded(domain):  # recorded episodes are not played
        return
    kept = domain.spec.steps // 4
    clean, expert = random_play(domain), play(domain.simulator("test", "cpu"))
    clean.valid = clean.valid & (torch.arange(domain.spec.steps) < kept)

    def spoilt(value: Tensor, filling: Tensor) -> Tensor:
        return torch.cat([value[:, :kept], filling[:, kept:]], 1)

    dirty = replace(
        clean,
        **{
            name: spoilt(getattr(clean, name), getattr(expert, name))
            for name in ("obs", "action", "terminated", "target")
        },
        reward=spoilt(clean.reward, torch.full_like(clean.reward, torch.nan)),
        facts={name: spoilt(value, expert.facts[name]) for name, value in clean.facts.items()},
    )
    assert not torch.equal(dirty.action, clean.action)
    before, after = domain.measure(clean), domain.measure(dirty)
    for name, value in before.items():
        torch.testing.assert_close(value, after[name], rtol=0, atol=0, equal_nan=True, msg=name)


def test_references_act(domain: Domain) -> None:
    """The ceiling, where there is one, stands above chance, and the expert above both."""
    first, references = domain.metrics[0], domain.references()
    assert "random" in references
    simulator, device, scores = domain.simulator("test", "cpu"), torch.device("cpu"), {}
    for name, agent in agents_of(domain).items():
        player = RolloutRunner(agent, simulator, device=device, sampled=agent is not None and agent.sampled)
        measured = domain.summarise(domain.measure(player.play(torch.arange(32), split_seed("test", 0))))
        assert all(measured[m.name].isfinite().all() for m in domain.metrics if not m.partial), name
        scores[name] = measured[first.name].mean().item()
    assert first.better(scores.get("ceiling", scores["expert"]), than=scores["random"])
    assert first.better(scores["expert"], than=scores.get("ceiling", scores["random"]))


def test_a_domain_says_what_it_is(domain: Domain) -> None:
    assert domain.task in domain.train_tasks
    assert domain.setting == "default"
    assert DOMAINS[domain.name].tasks == domain.train_tasks
    assert len({metric.name for metric in domain.metrics}) == len(domain.metrics) > 0
