"""Recorded episodes, which actions do not change: training uses them as recorded, and logits come in small batches."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import uat.domains.movielens.episodes as module
from tests.builders import build_random, random_batch
from uat.config import RunConfig, override
from uat.engines.rollout import RolloutRunner
from uat.evaluation.scores import evaluate
from uat.methods import METHODS, Policy
from uat.nn import vocabulary
from uat.nn.heads import Head
from uat.recipes import pairs, recipe
from uat.runs import Run
from uat.serving import Session
from uat.spec import Discrete, Items, Spec
from uat.training import train
from uat.training.progress import Progress
from uat.training.trainer import Trainer, build_policy

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TINY: dict[str, Any] = {
    "domain.horizon": 14,
    "method.d_model": 8,
    "method.num_heads": 2,
    "method.num_layers": 1,
    "method.d_ff": 8,
    "train.epochs": 2,
    "train.batch_size": 6,
}


def tiny(method: str, **changes: Any) -> RunConfig:
    config = recipe("movielens", method, "smoke")
    return override(config, {**TINY, **{name.replace("__", "."): value for name, value in changes.items()}})


@pytest.mark.parametrize("method", [name for domain, name in pairs() if domain == "movielens"])
def test_every_method_trains_and_is_scored_beside_the_references(method: str, tmp_path: Path) -> None:
    config = tiny(method)
    evaluation = evaluate(train(config, tmp_path / "run", device="cpu"), device="cpu")
    metrics = [metric.name for metric in config.build_domain().metrics]
    everybody = (method, "ceiling", "no-feedback", "expert", "random")
    assert {name: list(values) for name, values in evaluation.episodes.items()} == dict.fromkeys(everybody, metrics)
    assert all(torch.tensor(score.value).isfinite() for score in evaluation.scores)


def test_nobody_is_asked_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(Run.create(tiny("uat"), tmp_path / "run"), CPU)

    def asked(*args: Any) -> Any:
        raise AssertionError("training asked the policy")

    for name in ("step", "read", "decide"):
        monkeypatch.setattr(type(trainer.learner), name, asked)
    noise = trainer.rollouts.noise(torch.arange(6), seed=0)
    assert noise.keys() == {"window", "regime", "target"}  # no number for each of many actions
    epoch = trainer.epoch(trainer.learner.phases()[0])
    first, second = epoch.run(0, 1), epoch.run(1, 2)
    assert first["loss/imitation"] != second["loss/imitation"]
    with pytest.raises(AssertionError, match="training asked"):
        trainer.validate()


@pytest.mark.parametrize("method", ["uat", "vanilla", "tent"])
def test_no_more_logits_exist_than_may(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies that adapt need the logits of all streams at one step; the others, fewer."""
    config = tiny(method)
    domain = config.build_domain()
    items, episodes = domain.spec.action.count, domain.episodes["test"]
    policy: Policy = build_policy(config, domain, CPU)
    monkeypatch.setattr(module, "AT_ONCE", 4 * items)
    monkeypatch.setattr(vocabulary, "AT_ONCE", 4 * items)
    made: list[int] = []
    plain = Head.logits

    def watched(self: Head, h: Tensor, allowed: Tensor | None = None) -> Tensor:
        logits = plain(self, h, allowed)
        made.append(logits.numel())
        return logits

    monkeypatch.setattr(Head, "logits", watched)
    player = RolloutRunner(policy, domain.simulator("test", CPU), device=CPU, sampled=False)
    domain.measure(player.play(torch.arange(episodes), seed=0))
    most = 4 * items if METHODS[method].policy.trains_as is None else episodes * items
    assert max(made) == most
    made.clear()
    worlds = domain.simulator("train", CPU)
    policy.loss(domain.spec.clock.batch(worlds.trajectory(worlds.noise(torch.arange(5), 0))))
    assert made == []


def test_a_killed_run_goes_on_to_the_same_numbers(tmp_path: Path) -> None:
    config = tiny("uat", train__epochs=4, train__validate_every=2)
    whole = train(config, tmp_path / "whole", device="cpu")
    turns = Trainer(Run.create(config, tmp_path / "part"), CPU).turns(lambda label, total: Progress())
    for _ in range(3):  # the third epoch is lost
        next(turns)
    del turns
    resumed = train(config, tmp_path / "part", resume=True, device="cpu")
    assert resumed.rows("metrics.jsonl") == whole.rows("metrics.jsonl")


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_a_session_that_is_told_the_log_answers_as_reading_does(delay: int) -> None:
    config = tiny("uat", domain__delay=delay)
    domain = config.build_domain()
    policy, worlds = build_random("uat", domain.spec, dtype=torch.float32), domain.simulator("test", CPU)
    logged = worlds.trajectory(worlds.noise(torch.arange(3), 0))
    session, answer = Session(policy, streams=3), None
    for t in range(domain.spec.horizon):
        earned = logged.reward[:, t] if delay == 0 else logged.reward[:, t - 1] if t else None
        answer = session.act(logged.obs[:, t], action=logged.action[:, t - 1] if t else None, reward=earned)
    with torch.no_grad():
        read = policy.read(domain.spec.clock.batch(logged)).every(slice(None))
    assert answer is not None
    assert torch.equal(answer, read.argmax(1))


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@on_cuda
def test_epochs_and_validation_are_captured_and_give_the_numbers_of_a_cpu(tmp_path: Path) -> None:
    changes = {"train__precision": "fp64", "method__dropout": 0.0, "method__d_model": 16}
    found = {}
    for device in (CPU, CUDA):
        trainer = Trainer(Run.create(tiny("uat", **changes), tmp_path / device.type), device)
        epoch = trainer.epoch(trainer.learner.phases()[0])
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # such as: it cannot be captured
            numbers = [epoch.run(index, index + 1)["loss/imitation"].cpu() for index in range(4)]
            judged = trainer.validate()["hr@10"].cpu()
        found[device.type] = torch.stack([*numbers, judged.double()])
        assert (epoch.updates.captured is not None) == (trainer.validation.captured is not None) == (device == CUDA)
    torch.testing.assert_close(found["cuda"], found["cpu"], rtol=0, atol=1e-9)


@pytest.mark.gpu
@on_cuda
def test_sixty_thousand_items_train_within_eight_gigabytes() -> None:
    spec = Spec(obs=Items(60_000), action=Discrete(60_000), horizon=50)
    policy = build_random("uat", spec, dtype=torch.float32, d_model=64, num_heads=4, d_ff=128).to(CUDA).train()
    optimizer, batch = torch.optim.Adam(policy.parameters(), fused=True), random_batch(spec, episodes=256).to(CUDA)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        total, count = policy.loss(batch)["imitation"]
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    assert torch.cuda.max_memory_allocated() < 8 * 2**30
