"""CUDA graphs against their slow twins: the same worlds, actions and steps, without waiting for the host."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from uat.acting import rollout
from uat.config import RunConfig, override
from uat.contracts import Agent, Recording, Simulator
from uat.domains import split_seed
from uat.engines.graph import Captured, _held
from uat.engines.rollout import RolloutRunner
from uat.episode import Noise, Trajectory
from uat.recipes import recipe
from uat.runs import Run
from uat.training import train
from uat.training.optimizing import set_rates
from uat.training.surroundings import seeded
from uat.training.trainer import Trainer, build_policy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
IDS, SEED = torch.arange(64), split_seed("train", 0)


def config(**changes: Any) -> RunConfig:
    """Double precision and no dropout, so that two paths can be compared; `train__lr=1.0` sets train.lr."""
    small = {"domain.horizon": 12, "train.batch_size": 64, "train.precision": "fp64", "method.dropout": 0.0}
    small |= {name.replace("__", "."): value for name, value in changes.items()}
    return override(recipe("darkroom", "uat", "smoke"), small)


def new_trainer(folder: Path, **changes: Any) -> Trainer:
    return Trainer(Run.create(config(**changes), folder), CUDA)


def eager(agent: Agent[Any] | None, simulator: Simulator[Any] | Recording, noise: Noise) -> Trajectory:
    """Play the rollout launch by launch."""
    worlds = {name: value for name, value in noise.items() if name != "actions"}
    if isinstance(agent, torch.nn.Module):
        agent.eval()
    return rollout(agent, simulator, worlds, noise.get("actions"))


def assert_same(a: Trajectory, b: Trajectory) -> None:
    assert torch.equal(a.action.cpu(), b.action.cpu())
    assert torch.equal(a.obs.cpu(), b.obs.cpu())
    assert torch.equal(a.reward.cpu(), b.reward.cpu())
    assert torch.equal(a.required_target.cpu(), b.required_target.cpu())
    assert torch.equal(a.valid.cpu(), b.valid.cpu())


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.checkpoint.tensors().items()}


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Raise an error at every call that makes the host wait for the device."""
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls this mode a prototype, once
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---------------------------------------------------------------- worlds


@pytest.mark.parametrize("schedule", ["gradual", "abrupt", "cyclic"])
def test_worlds_are_the_same_bits_on_both_devices(schedule: str) -> None:
    domain = config(domain__schedule=schedule, domain__tie_break="random", domain__shift_steps=(4, 8)).build_domain()
    ids = torch.arange(5000)
    here, there = (
        RolloutRunner(None, domain.simulator("train", device), device=device, sampled=True).noise(ids.to(device), SEED)
        for device in (CPU, CUDA)
    )
    assert here.keys() == there.keys()
    for name, value in here.items():
        assert there[name].device.type == "cuda"
        assert torch.equal(value, there[name].cpu()), name


@pytest.mark.parametrize("sampled", [False, True])
def test_a_policy_plays_the_same_episodes_on_both_devices(sampled: bool) -> None:
    domain = config().build_domain()
    here, there = (
        RolloutRunner(
            build_policy(config(), domain, device), domain.simulator("train", device), device=device, sampled=sampled
        ).play(IDS, SEED)
        for device in (CPU, CUDA)
    )
    assert_same(here, there)


# ---------------------------------------------------------------- rollout


@pytest.mark.parametrize("sampled", [False, True])
def test_a_captured_rollout_equals_the_eager_one(sampled: bool) -> None:
    domain = config().build_domain()
    policy, simulator = build_policy(config(), domain, CUDA), domain.simulator("train", CUDA)
    player = RolloutRunner(policy, simulator, device=CUDA, sampled=sampled)
    for ids in (IDS, IDS + 1000, IDS.flip(0)):  # captured by the first, replayed by the others
        played = player.play(ids, SEED)
        assert_same(played, eager(policy, simulator, player.noise(ids.to(CUDA), SEED)))


@pytest.mark.parametrize(
    "channel",
    [
        {"feedback__reward": "shuffled", "feedback__noise": 0.5, "feedback__delay": 2},
        {"feedback__reward": "null", "feedback__action": "null"},
        {"feedback__reward": "inverted"},
    ],
)
def test_a_corrupted_channel_is_captured_and_fused_like_the_true_one(channel: dict[str, Any]) -> None:
    """float32, so that policy and room take their fused steps; the slow twin plays the same noise on the CPU."""
    told = config(**channel, train__precision="fp32")
    domain = told.build_domain()
    policy, slow = (build_policy(told, domain, device) for device in (CUDA, CPU))
    player = RolloutRunner(policy, domain.simulator("train", CUDA), device=CUDA, sampled=True)
    assert player.path == "cuda graph, fused step"
    for ids in (IDS, IDS + 1000):
        played = player.play(ids, SEED)
        assert player.captured is not None
        noise = {name: value.cpu() for name, value in player.noise(ids.to(CUDA), SEED).items()}
        expected = eager(slow, domain.simulator("train", CPU), noise)
        assert_same(played, expected)
        assert (played.told is None) == (expected.told is None)
        if played.told is not None and expected.told is not None:
            torch.testing.assert_close(played.told.action, expected.told.action, check_device=False)
            torch.testing.assert_close(played.told.reward, expected.told.reward, check_device=False)


def test_a_captured_rollout_follows_the_weights() -> None:
    domain = config().build_domain()
    policy, simulator = build_policy(config(), domain, CUDA), domain.simulator("train", CUDA)
    player = RolloutRunner(policy, simulator, device=CUDA, sampled=True)
    before = player.play(IDS, SEED).action.clone()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter))
    after = player.play(IDS, SEED)
    assert not torch.equal(after.action, before)
    assert_same(after, eager(policy, simulator, player.noise(IDS.to(CUDA), SEED)))


def test_another_number_of_episodes_is_captured_anew() -> None:
    domain = config().build_domain()
    policy, simulator = build_policy(config(), domain, CUDA), domain.simulator("train", CUDA)
    player = RolloutRunner(policy, simulator, device=CUDA, sampled=False)
    for count in (64, 7, 64):
        assert_same(player.play(IDS[:count], SEED), eager(policy, simulator, player.noise(IDS[:count].to(CUDA), SEED)))


@pytest.mark.parametrize("name", ["ceiling", "random", "expert"])
def test_captured_references_equal_those_on_a_cpu(name: str) -> None:
    domain = config().build_domain()
    played = []
    for device in (CPU, CUDA):
        agent = None if name == "expert" else domain.references()[name]
        player = RolloutRunner(agent, domain.simulator("test", device), device=device, sampled=name == "random")
        played.append([player.play(ids, SEED).map(torch.clone) for ids in (IDS, IDS + 64)])
    for here, there in zip(*played, strict=True):
        assert_same(here, there)


# ---------------------------------------------------------------- optimize


def test_captured_epochs_equal_eager_ones(tmp_path: Path) -> None:
    fast, slow = new_trainer(tmp_path / "fast"), new_trainer(tmp_path / "slow")
    replayed, plain = (one.epoch(one.engine.learner.phases()[0]) for one in (fast, slow))
    with seeded(0, CUDA):
        for index in range(5):
            told = replayed.run(index, index + 1)
            ids = torch.arange(index * 64, (index + 1) * 64, device=CUDA)
            trajectory = eager(slow.policy, slow.rollouts.simulator, slow.rollouts.noise(ids, SEED))
            set_rates(slow.checkpoint.optimizer, slow.config.train, index + 1)
            expected = plain.updates.plain(trajectory)
            for name, value in expected.items():
                torch.testing.assert_close(told[name], value.detach(), atol=1e-9, rtol=1e-9)
    assert replayed.updates.captured is not None
    assert plain.updates.captured is None
    before = weights_of(new_trainer(tmp_path / "untrained"))
    ours, theirs = weights_of(fast), weights_of(slow)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-9, rtol=1e-9, msg=name)
    assert (ours["policy.backbone.positions"] - before["policy.backbone.positions"]).abs().max() > 1e-3


def test_warm_up_leaves_weights_and_adam_untouched(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path)
    epoch = trainer.epoch(trainer.engine.learner.phases()[0])
    trajectory = trainer.rollouts.play(IDS, SEED)
    before = weights_of(trainer)
    with seeded(0, CUDA):
        Captured(lambda: epoch.updates.plain(trajectory), preserve=trainer.checkpoint.tensors().values())
        after = weights_of(trainer)
        assert all(torch.equal(before[name], after[name]) for name in before)
        Captured(lambda: epoch.updates.plain(trajectory))
    spoilt = weights_of(trainer)
    assert not torch.equal(spoilt["policy.backbone.positions"], before["policy.backbone.positions"])
    assert spoilt["adam.step.backbone.positions"] > before["adam.step.backbone.positions"]


def test_rates_reach_a_captured_step(tmp_path: Path) -> None:
    """A cosine ends at zero: the last epoch replays the same graph and changes no weight."""
    trainer = new_trainer(tmp_path, train__epochs=3, train__lr_schedule="cosine")
    epoch = trainer.epoch(trainer.engine.learner.phases()[0])
    with seeded(0, CUDA):
        epoch.run(0, 1)
        once = weights_of(trainer)["policy.backbone.positions"]
        epoch.run(1, 2)
        twice = weights_of(trainer)["policy.backbone.positions"]
        epoch.run(2, 3)
    assert not torch.equal(once, twice)
    assert torch.equal(twice, weights_of(trainer)["policy.backbone.positions"])


def test_dropout_in_a_captured_step_follows_the_seed(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path, method__dropout=0.5)
    epoch = trainer.epoch(trainer.engine.learner.phases()[0])
    trajectory = trainer.rollouts.play(IDS, SEED)
    with seeded(0, CUDA):
        step = Captured(
            lambda: trainer.policy.train().loss(trainer.policy.spec.clock.batch(trajectory))["imitation"][0]
        )
        losses = []
        for seed in (1, 2, 1):
            torch.manual_seed(seed)
            losses.append(step().item())
    assert losses[0] == losses[2] != losses[1]
    assert epoch.updates.captured is None


def test_random_starts_reach_a_captured_step(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path, train__random_start=True, method__max_positions=40)
    epoch = trainer.epoch(trainer.engine.learner.phases()[0])
    with seeded(0, CUDA):
        epoch.run(0, 1)
        assert epoch.updates.start_B is not None
        first, address = epoch.updates.start_B.clone(), epoch.updates.start_B.data_ptr()
        epoch.run(1, 2)
    assert epoch.updates.start_B.data_ptr() == address
    assert not torch.equal(epoch.updates.start_B, first)
    assert epoch.updates.start_B.min() >= 0
    assert epoch.updates.start_B.max() <= 40 - 12


# ---------------------------------------------------------------- the host is not asked


def test_nothing_in_a_rollout_waits_for_the_device() -> None:
    domain = config(domain__shift_steps=(4, 8)).build_domain()
    policy, simulator = build_policy(config(), domain, CUDA), domain.simulator("train", CUDA)
    noise = RolloutRunner(policy, simulator, device=CUDA, sampled=True).noise(IDS.to(CUDA), SEED)
    eager(policy, simulator, noise)
    with no_synchronisation():
        eager(policy, simulator, noise)
        eager(None, simulator, noise)


def test_nothing_in_an_optimizer_step_waits_for_the_device(tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path)
    epoch = trainer.epoch(trainer.engine.learner.phases()[0])
    trajectory = trainer.rollouts.play(IDS, SEED)
    with seeded(0, CUDA):
        epoch.updates.plain(trajectory)
        with no_synchronisation():
            set_rates(trainer.checkpoint.optimizer, trainer.config.train, 2)
            epoch.updates.plain(trajectory)


def test_the_check_for_waiting_works() -> None:
    x = torch.ones(3, device=CUDA)
    with no_synchronisation(), pytest.raises(RuntimeError, match="synchroniz"):
        x.sum().item()


def test_a_graph_keeps_alive_what_it_reads() -> None:
    def double() -> Captured[Tensor]:
        x = torch.ones(1000, device=CUDA)
        return Captured(lambda: x * 2)

    captured = double()
    others = [torch.full((1000,), 7.0, device=CUDA) for _ in range(100)]
    assert (captured() == 2).all()
    assert all((other == 7).all() for other in others)


def test_what_is_closed_gives_back_its_stream_and_its_memory() -> None:
    streams, before = len(_held), torch.cuda.memory_allocated()
    captured = Captured(lambda: torch.ones(2**20, device=CUDA) * 2)
    assert len(_held) == streams + 1
    assert torch.cuda.memory_allocated() >= before + 2**22
    captured.close()
    assert (len(_held), torch.cuda.memory_allocated()) == (streams, before)


def test_a_training_leaves_no_stream_behind(tmp_path: Path) -> None:
    streams = len(_held)
    gc.disable()  # which would find them in the end
    try:
        train(config(train__epochs=2, train__validate_every=1), tmp_path / "run", device=CUDA)
    finally:
        gc.enable()
    assert len(_held) == streams


ENDS = """
import torch
from uat.engines.graph import Captured
x = torch.ones(1000, device="cuda")
captured = Captured(lambda: torch.nn.functional.dropout(x, 0.5))
captured.itself = captured  # only the end of the program breaks this up
captured()
"""


def test_a_program_that_still_has_graphs_ends_well() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


# ---------------------------------------------------------------- a whole run


def test_a_run_on_cuda_learns_and_gives_the_numbers_of_a_cpu(tmp_path: Path) -> None:
    settings = config(train__epochs=6, train__validate_every=2)
    here, there = (train(settings, tmp_path / name, device=name).rows("metrics.jsonl") for name in ("cpu", "cuda"))
    assert there[-1]["loss/imitation"] < there[0]["loss/imitation"]
    for cpu_row, cuda_row in zip(here, there, strict=True):
        assert cuda_row == {name: pytest.approx(value, abs=1e-6) for name, value in cpu_row.items()}
