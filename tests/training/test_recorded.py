"""Episodes that no action changes: training takes them as they happened, and answers are asked for in small bites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import uat.domains.movielens.episodes as module
from uat.config import RunConfig, override
from uat.evaluation.scores import evaluate
from uat.methods import METHODS, Policy
from uat.nn import vocabulary
from uat.nn.heads import Head
from uat.recipes import pairs, recipe
from uat.runs import Run
from uat.training import train
from uat.training.playing import Player
from uat.training.progress import Progress
from uat.training.trainer import Trainer, build_policy

CPU = torch.device("cpu")
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
    noise = trainer.player.noise(torch.arange(6), seed=0)
    assert noise.keys() == {"window", "regime", "target"}  # no number for each of many actions
    epoch = trainer.epoch(trainer.learner.phases()[0])
    first, second = epoch.run(0, 1), epoch.run(1, 2)
    assert first["loss/imitation"] != second["loss/imitation"]
    with pytest.raises(AssertionError, match="training asked"):
        trainer.validate()


@pytest.mark.parametrize("method", ["uat", "vanilla", "tent"])
def test_no_more_logits_exist_than_may(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who adapts needs those of all streams at one step."""
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
    player = Player(policy, domain.simulator("test", CPU), device=CPU, sampled=False)
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
    turns.close()
    resumed = train(config, tmp_path / "part", resume=True, device="cpu")
    assert resumed.rows("metrics.jsonl") == whole.rows("metrics.jsonl")
