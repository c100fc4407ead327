"""Training from logs: behaviour policy, number of epochs, hooks after a step, and criterion for the best weights."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.builders import CPU, SPECS
from tests.training.test_trainer import Crash, crash_at, last_weights, numbers, saved_weights, tiny
from uat.acting import Behaviour, rollout
from uat.config import RunConfig, TrainConfig, override
from uat.distributions import choose
from uat.domains import split_seed
from uat.engines.rollout import RolloutRunner
from uat.episode import Batch, Losses, Step, Trajectory
from uat.methods import METHODS, Method, Phase, Policy
from uat.nn.heads import build_head
from uat.noise import gumbel
from uat.runs import Run
from uat.spec import Spec
from uat.training import train
from uat.training.optimizing import build_optimizer, rate_of
from uat.training.trainer import Trainer

IDS = torch.arange(400)

# ---------------------------------------------------------------- who fills the log


def log(share: float, ids: Tensor = IDS, seed: int = 3) -> Trajectory:
    simulator = tiny().build_domain().simulator("train", "cpu")
    return RolloutRunner(Behaviour(share), simulator, device=CPU, sampled=True).play(ids, seed)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_behaviour_plays_the_expert_but_for_its_share(share: float) -> None:
    """A random action equals the expert's one time in five."""
    trajectory = log(share)
    apart = (trajectory.action != trajectory.target).double().mean().item()
    assert apart == pytest.approx(share * 4 / 5, abs=3.5 * (0.25 / trajectory.action.numel()) ** 0.5)
    assert share > 0 or apart == 0


def test_random_actions_are_uniform_and_30_percent_by_default() -> None:
    assert Behaviour().random_share == 0.3
    counts = log(1.0).action.flatten().bincount(minlength=5) / log(1.0).action.numel()
    torch.testing.assert_close(counts, torch.full((5,), 0.2), rtol=0, atol=0.04)


def test_a_random_action_is_held_for_a_stretch_and_the_share_stays() -> None:
    simulator = tiny().build_domain().simulator("train", "cpu")
    steps, length = simulator.spec.steps, 4
    held = RolloutRunner(Behaviour(0.3, length), simulator, device=CPU, sampled=True).play(IDS, 3)
    apart = (held.action != held.target).double().mean().item()
    assert apart == pytest.approx(0.3 * 4 / 5, abs=3.5 * (0.25 * length / held.action.numel()) ** 0.5)
    always = RolloutRunner(Behaviour(1.0, length), simulator, device=CPU, sampled=True).play(IDS, 3).action
    first_T = torch.arange(steps) - torch.arange(steps) % length
    assert torch.equal(always, always[:, first_T])
    assert always.unique().numel() == 5
    once = RolloutRunner(Behaviour(0.3, 1), simulator, device=CPU, sampled=True).play(IDS, 3)
    assert torch.equal(once.action, log(0.3).action)


@pytest.mark.parametrize("steps", [0, -1])
def test_a_stretch_without_steps_is_refused(steps: int) -> None:
    with pytest.raises(ValueError, match=rf"random_steps={steps} must be at least 1"):
        Behaviour(random_steps=steps)


def test_a_log_depends_on_seed_and_id_alone() -> None:
    whole, part, other = log(0.3), log(0.3, IDS[[7, 3]]), log(0.3, seed=4)
    for name in ("obs", "action", "reward", "target"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[[7, 3]]), name
    assert not torch.equal(other.action, whole.action)


def test_behaviour_and_policies_sample_with_streams_of_their_own() -> None:
    simulator = tiny().build_domain().simulator("train", "cpu")
    logged, played = (
        RolloutRunner(who, simulator, device=CPU, sampled=True).noise(IDS, 3) for who in (Behaviour(), None)
    )
    assert logged.keys() == played.keys()
    assert not torch.equal(logged["actions"], played["actions"])
    assert torch.equal(logged["goal"], played["goal"])


def test_only_allowed_actions_are_drawn() -> None:
    spec, target = SPECS["vector-discrete"], torch.zeros(2000, dtype=torch.long)
    allowed = torch.tensor([True, False, True, False]).expand(2000, 4)
    logits = Behaviour(0.5).logits(target, spec, allowed)
    drawn = choose(logits, spec, gumbel(0, "behaviour", torch.arange(2000), 4).float()).bincount(minlength=4) / 2000
    assert drawn[[1, 3]].tolist() == [0, 0]
    assert drawn[2].item() == pytest.approx(0.25, abs=0.04)


def test_weights_go_a_share_of_the_way_to_the_uniform_ones() -> None:
    spec, allowed = SPECS["vector-weights"], torch.tensor([[True, True, False, False]])
    logits = Behaviour(0.3).logits(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), spec, allowed)
    torch.testing.assert_close(choose(logits, spec), torch.tensor([[0.85, 0.15, 0.0, 0.0]]))


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"random_share=.* must lie in \[0, 1\]"):
        Behaviour(share)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_log_is_that_of_a_cpu() -> None:
    cuda = torch.device("cuda")
    simulator = tiny().build_domain().simulator("train", cuda)
    player = RolloutRunner(Behaviour(), simulator, device=cuda, sampled=True)
    for ids in (IDS, IDS + 400):
        here, there = log(0.3, ids), player.play(ids, 3)
        for name in ("obs", "action", "reward", "target"):
            assert torch.equal(getattr(there, name).cpu(), getattr(here, name)), name


# ---------------------------------------------------------------- a method that learns from logs


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedToyConfig:
    random_share: float | None = 0.3
    """Share of random actions in the log; unset: the policy learns from its own play."""
    share: float = 1.0
    judged_by: Any = "play"
    fast_lr: float = 0.2
    """Learning rate of the second weight."""


class LoggedToy(Policy):
    """A policy that pulls its weights to the mean reward of its batch, and keeps an average of one of them."""

    config: LoggedToyConfig

    def __init__(self, spec: Spec, config: LoggedToyConfig) -> None:
        super().__init__(spec, config)
        self.head = build_head(spec, 1)
        self.a, self.b = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
        self.average = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.shown: list[Trajectory] = []

    def features(self, batch: Batch) -> Tensor:
        return batch.obs.new_zeros(*batch.valid.shape, 1)

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> None:
        return None

    def step(self, state: None, step: Step) -> tuple[Tensor, None]:
        return step.obs.new_zeros(len(step.obs), self.spec.action.count), None

    def phases(self) -> tuple[Phase, ...]:
        c = self.config
        behaviour = None if c.random_share is None else Behaviour(c.random_share)
        return (Phase("pull", self.loss, behaviour, c.share, self.follow, c.judged_by),)

    def loss(self, batch: Batch) -> Losses:
        assert batch.trajectory is not None
        self.shown.append(batch.trajectory)
        count = batch.valid.sum()
        far = (self.a - 1).square() + (self.b - 1).square() + 0 * self.spec.clock.earned(batch.trajectory).mean()
        return {"far": (far * count, count)}

    def follow(self) -> None:
        self.average.lerp_(self.a, 0.5)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        return {"base": [self.a, *self.head.parameters()], "fast": [self.b]}

    def learning_rates(self) -> dict[str, float]:
        return {"fast": self.config.fast_lr}


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "tensorboard" else find(name))
    monkeypatch.setattr("uat.training.checkpoint.SAVE_SECONDS", 0.0)
    monkeypatch.setitem(METHODS, "toy", Method(policy=LoggedToy, config=LoggedToyConfig, summary="learns from logs"))
    base = tiny("vanilla", train__epochs=4, train__lr=0.1, train__weight_decay=0.0)

    def config(settings: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
        plain = dataclasses.replace(base, method_name="toy", method=LoggedToyConfig(**(settings or {})))
        return override(plain, {name.replace("__", "."): value for name, value in changes.items()})

    return config


def trainer(config: RunConfig, folder: Path) -> tuple[Trainer, LoggedToy]:
    made = Trainer(Run.create(config, folder), CPU)
    assert isinstance(made.learner, LoggedToy)
    return made, made.learner


@pytest.mark.parametrize("share", [0.3, 0.9, None])
def test_a_phase_is_shown_episodes_of_its_source(
    share: float | None, toy: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = toy({"random_share": share})
    made, policy = trainer(config, tmp_path)
    epoch = made.epoch(policy.phases()[0])
    for index in range(2):
        epoch.run(index, index + 1)
        ids = torch.arange(4 * index, 4 * index + 4)
        who = policy if share is None else Behaviour(share)
        player = RolloutRunner(who, made.rollouts.simulator, device=CPU, sampled=True)
        expected = player.play(ids, split_seed("train", config.seed))
        assert torch.equal(policy.shown[index].action, expected.action)
        assert torch.equal(policy.shown[index].obs, expected.obs)


def test_a_share_of_the_epochs_and_the_schedule_of_that_length(toy: Callable[..., RunConfig], tmp_path: Path) -> None:
    for share, epochs in ((0.5, 2), (2.0, 8), (0.01, 1)):
        rows = train(toy({"share": share}), tmp_path / f"{share}", device="cpu").rows("metrics.jsonl")
        assert len(rows) == epochs
    made, policy = trainer(toy({"share": 0.5}, train__lr_schedule="cosine"), tmp_path / "cosine")
    epoch = made.epoch(policy.phases()[0])
    epoch.run(0, 1)
    once = policy.a.item()
    epoch.run(1, 2)  # the last of this phase: its rate is zero
    assert once != 0
    assert policy.a.item() == once


def test_after_step_follows_every_step_and_survives_a_kill(
    toy: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(toy(), tmp_path / "whole", device="cpu")
    assert last_weights(run)["average"].item() == pytest.approx(0.4 / 2 + 0.3 / 4 + 0.2 / 8 + 0.1 / 16, abs=0.01)
    for event in range(4, 12):
        folder = tmp_path / f"{event}"
        with monkeypatch.context() as patch:
            crash_at(event, patch)
            with pytest.raises(Crash):
                train(toy(), folder, device="cpu")
        train(toy(), folder, resume=True, device="cpu")
        assert numbers(folder) == numbers(run.path), f"crash before write {event}"


def test_validation_by_loss_keeps_the_least(
    toy: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "validate", lambda _: pytest.fail("played"))
    config = toy({"judged_by": "loss"}, train__lr=0.8, train__epochs=6, train__validate_every=1)
    run = train(config, tmp_path, device="cpu")
    rows = run.rows("metrics.jsonl")
    judged = [row["validation/loss"] for row in rows]
    assert judged[:-1] == pytest.approx(
        [row["loss/far"] for row in rows[1:]]
    )  # the loss after a step is the next one's
    best = judged.index(min(judged))
    assert 0 < best < 5  # steps of 0.8 overshoot the goal
    kept = saved_weights(run)
    far = (kept["a"] - 1) ** 2 + (kept["b"] - 1) ** 2
    assert far.item() == pytest.approx(min(judged))


def test_validation_by_nothing_keeps_the_last_and_knows_no_patience(
    toy: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "validate", lambda _: pytest.fail("played"))
    run = train(toy({"judged_by": "nothing"}, train__patience=1, train__validate_every=1), tmp_path, device="cpu")
    rows, kept, last = run.rows("metrics.jsonl"), saved_weights(run), last_weights(run)
    assert len(rows) == 4
    assert not any(name.startswith("validation/") for row in rows for name in row)
    assert all(torch.equal(kept[name], last[name]) for name in last)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"share": 0.0}, "share=0.0 must be positive"), ({"judged_by": "chance"}, "judged_by='chance' must be one of")],
)
def test_a_phase_that_makes_no_sense_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Phase("pull", lambda batch: {}, **settings)


# ---------------------------------------------------------------- rates of other groups


def test_a_group_learns_at_the_rate_that_its_policy_declares(toy: Callable[..., RunConfig], tmp_path: Path) -> None:
    _, policy = trainer(toy(train__epochs=1), tmp_path)
    rates = {group["name"]: group["lr"].item() for group in build_optimizer(policy, TrainConfig(lr=0.1)).param_groups}
    assert rates == pytest.approx({"base": 0.1, "fast": 0.2})
    assert rate_of("utility", policy, TrainConfig(utility_lr=0.3)) == 0.3


def test_a_group_without_a_rate_is_named(toy: Callable[..., RunConfig], tmp_path: Path) -> None:
    _, policy = trainer(toy(), tmp_path)
    with pytest.raises(ValueError, match=r"group 'slow' without .* one of fast, base, utility"):
        rate_of("slow", policy, TrainConfig())


# ---------------------------------------------------------------- what was earned


def test_what_was_earned_is_scaled_and_nothing_in_padding() -> None:
    trajectory = replace(log(0.3, IDS[:2]), reward=torch.tensor([[1.0, 2, 3, 4, 5], [6, 7, torch.nan, 9, 9]]))
    trajectory.valid[1, 2:] = False
    spec = replace(tiny().build_domain().spec, reward_scale=2.0)
    assert spec.clock.earned(trajectory).tolist() == [[2, 4, 6, 8, 10], [12, 14, 0, 0, 0]]
    counts = replace(trajectory, reward=torch.ones(2, 5, dtype=torch.long))
    assert spec.clock.earned(counts).tolist() == [[2.0] * 5, [2.0, 2.0, 0, 0, 0]]


def test_rollouts_take_a_behaviour_without_noise_as_the_expert() -> None:
    simulator = tiny().build_domain().simulator("train", "cpu")
    noise = simulator.noise(IDS, 0)
    assert torch.equal(rollout(Behaviour(0.3), simulator, noise).action, rollout(None, simulator, noise).action)
