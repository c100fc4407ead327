"""Episodes of environments: seeded by data, ended by the environment, and the same however they are stepped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import uat
from tests.adapters.envs import Broken, Counting, Endless, Forbidding, Mixed, Steering
from tests.adapters.playing import CPU, assert_same, episodes, played
from uat.acting import rollout
from uat.adapters.gymnasium import domain
from uat.adapters.simulator import GymSimulator
from uat.contracts import Simulator
from uat.feedback import corrupt

VARIANTS = {
    "counting": Counting,
    "masked": partial(Counting, masked=True),
    "limit": partial(Counting, limit=True),
    "mixed": Mixed,
    "steering": Steering,
}


@pytest.mark.parametrize("name", VARIANTS)
def test_an_episode_depends_on_its_number_and_the_seed_alone(name: str) -> None:
    own = domain(VARIANTS[name])
    whole = episodes(own, torch.arange(6))
    part = episodes(own, torch.tensor([4, 1]))
    steps = part.valid.shape[1]
    for name in ("obs", "action", "reward"):
        a, b = getattr(whole, name)[[4, 1], :steps], getattr(part, name)
        assert torch.equal(a[part.valid], b[part.valid])
    assert not torch.equal(whole.reward, episodes(own, torch.arange(6), seed=1).reward[:, : whole.valid.shape[1]])


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_vector_of_environments_gives_the_same_episodes_in_every_mode(name: str, mode: AutoresetMode) -> None:
    """Seven episodes take two turns of five environments, with three spare ones."""
    vector = SyncVectorEnv([VARIANTS[name]] * 5, autoreset_mode=mode)
    assert_same(played(VARIANTS[name]), played(vector))
    vector.close()


def test_an_episode_is_what_the_environment_itself_plays() -> None:
    own = domain(partial(Counting, limit=True))
    simulator = own.simulator("train", CPU)
    noise = simulator.noise(torch.arange(3), 0)
    trajectory = rollout(own.references()["random"], simulator, noise)
    assert trajectory.truncated is not None
    assert trajectory.final_obs is not None
    for row, seed in enumerate(noise["seed"].tolist()):
        env = Counting(limit=True)
        obs, _ = env.reset(seed=seed)
        for t in range(env.length):
            assert np.array_equal(trajectory.obs[row, t].numpy(), obs)
            obs, reward, over, cut, _ = env.step(trajectory.action[row, t].item())
            assert trajectory.reward[row, t].item() == pytest.approx(reward)
            assert (trajectory.terminated[row, t], trajectory.truncated[row, t]) == (over, cut)
        assert trajectory.valid[row].sum() == env.length
        assert np.array_equal(trajectory.final_obs[row].numpy(), obs)
    simulator.close()


def test_a_rollout_is_as_long_as_its_longest_episode() -> None:
    own = domain(Counting)
    assert own.spec.horizon == 1_000
    trajectory = played(own)
    assert trajectory.valid.shape[1] == trajectory.valid.sum(1).max()
    values = own.measure(trajectory)
    assert torch.equal(values["length"], trajectory.valid.sum(1).float())
    assert torch.equal(values["success"], (values["length"] % 2 == 0).float())
    assert torch.allclose(values["return"], torch.where(trajectory.valid, trajectory.reward, 0).sum(1))


def test_an_episode_that_never_ends_is_truncated() -> None:
    own = domain(Endless, max_steps=4)
    trajectory = played(own)
    assert trajectory.truncated is not None
    assert trajectory.valid.shape[1] == 4
    assert trajectory.truncated[:, -1].all()
    assert trajectory.truncated[:, :-1].sum() == trajectory.terminated.sum() == 0
    assert torch.equal(own.measure(trajectory)["success"], torch.ones(7))


def test_the_time_limit_of_the_environment_holds_beside_that_of_the_settings() -> None:
    assert domain("gym:CartPole-v1").spec.horizon == 500
    assert domain("gym:CartPole-v1", max_steps=50).spec.horizon == 50
    assert domain("gym:CartPole-v1", max_steps=900).spec.horizon == 500
    assert domain("gym:CartPole-v1", arguments='{"max_episode_steps": 7}').spec.horizon == 7


def test_random_actions_are_allowed_ones() -> None:
    trajectory = played(partial(Counting, masked=True), count=20)
    assert trajectory.allowed is not None
    chosen = trajectory.allowed.gather(2, trajectory.action[..., None])[..., 0]
    assert chosen[trajectory.valid].all()
    assert not trajectory.action[trajectory.valid].eq(2).any()
    assert {0, 1} == set(trajectory.action[trajectory.valid].tolist())


def test_success_is_undefined_where_the_environment_is_silent() -> None:
    own = domain("gym:CartPole-v1", max_steps=5)
    assert own.measure(played(own))["success"].isnan().all()


def test_a_world_cannot_go_back() -> None:
    simulator = domain(Counting).simulator("train", CPU)
    first, _ = simulator.reset(simulator.noise(torch.arange(2), 0))
    simulator.step(first, torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="cannot go back to step 0 of reset 1"):
        simulator.step(first, torch.zeros(2, dtype=torch.long))
    simulator.close()


def test_corrupted_feedback_leaves_the_episodes_alone() -> None:
    own = domain(Counting)
    simulator = corrupt(own.simulator("train", CPU), reward="inverted")
    assert isinstance(simulator, Simulator)
    assert simulator.on_host
    noise = simulator.noise(torch.arange(3), 0)
    trajectory = rollout(own.references()["random"], simulator, noise)
    assert trajectory.told is not None
    assert torch.equal(trajectory.told.reward[trajectory.valid], -trajectory.reward[trajectory.valid])
    assert simulator.seconds > 0
    simulator.close()


def test_environments_are_closed_and_made_again() -> None:
    made: list[Any] = []

    class Closing(Counting):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)
            self.closed = False

        def close(self) -> None:
            self.closed = True

    simulator = domain(lambda: Closing()).simulator("train", CPU)
    simulator.reset(simulator.noise(torch.arange(3), 0))
    before = len(made)
    simulator.reset(simulator.noise(torch.arange(2), 0))
    assert len(made) == before
    simulator.close()
    assert all(env.closed for env in made)
    simulator.reset(simulator.noise(torch.arange(1), 0))
    assert len(made) == before + 1
    del simulator
    assert made[-1].closed


# ---------------------------------------------------------------- environments that are wrong

WRONG = [
    (
        partial(Broken, "raises"),
        r"raised RuntimeError: no fuel, in step 3 of the episode that starts with env.reset\(seed=",
    ),
    (
        partial(Broken, "nan"),
        "returned nan as number 1 of the observation, where only finite float32 numbers can be, in step 3",
    ),
    (partial(Broken, "large"), r"returned 1e\+300 as number 1 .* in step 3"),
    (partial(Broken, "shape"), r"returned an observation of shape \(3,\) .* where its space has \(2,\), in step 3"),
    (partial(Broken, "reward"), "returned the reward nan, where a finite number is expected, in step 3"),
    (partial(Broken, "words"), "returned the reward 'high', where a finite number is expected, in step 3"),
    (partial(Broken, "four"), r"from step, which must return \(obs, reward, terminated, truncated, info\), in step 3"),
    (partial(Broken, "reset"), r"from reset, which must return \(obs, info\), in step 0"),
    (partial(Broken, "spaces"), r"has another observation_space in the episode that starts with env.reset\(seed="),
    (partial(Broken, "late mask"), r"gave info\['action_mask'\] for the first time; .* in step 3"),
    (partial(Forbidding, (False,) * 3), r"allows no action in info\['action_mask'\]; .* in step 1"),
    (partial(Forbidding, (True,) * 4), r"gave a mask of actions with 4 entries, where its actions have 3 .* in step 1"),
]


@pytest.mark.parametrize(("make", "sentence"), WRONG, ids=[str(make.args[0]) for make, _ in WRONG])
def test_a_wrong_environment_is_named_with_the_step(make: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as error:
        played(make)
    assert str(error.value).startswith(f"{make.func.__name__} ")


def test_environments_with_different_spaces_are_refused() -> None:
    sizes = iter([2, 2, 3, 3, 3])

    def make() -> Counting:
        env = Counting()
        env.action_space = gymnasium.spaces.Discrete(next(sizes))
        return env

    with pytest.raises(ValueError, match=r"another action_space in another environment .* at first Discrete\(2\)"):
        played(make, count=3)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_vector_with_a_wrong_environment_is_named(mode: AutoresetMode) -> None:
    vector = SyncVectorEnv([partial(Broken, "raises")] * 2, autoreset_mode=mode)
    with pytest.raises(ValueError, match=r"SyncVectorEnv\(2\) raised RuntimeError: no fuel, after 2 steps"):
        played(vector)
    vector = SyncVectorEnv([partial(Broken, "reward")] * 2, autoreset_mode=mode)
    with pytest.raises(ValueError, match=r"SyncVectorEnv\(2\) returned the reward nan, .* in step 3"):
        played(vector)


def test_a_vector_that_does_not_say_how_it_restarts_is_refused() -> None:
    vector = SyncVectorEnv([Counting] * 2)
    vector.metadata = {}
    with pytest.raises(ValueError, match=r"set metadata\['autoreset_mode'\]"):
        played(vector)
    with pytest.raises(ValueError, match=r"domain.workers=2 is for single environments: SyncVectorEnv\(2\)"):
        domain(SyncVectorEnv([Counting] * 2), workers=2)


# ---------------------------------------------------------------- processes


def assert_ended(simulator: GymSimulator) -> None:
    assert simulator.stepping.workers == []  # pyright: ignore[reportAttributeAccessIssue]


def test_workers_give_the_same_episodes() -> None:
    """Seven episodes are shared out unevenly; one episode leaves a worker without work."""
    make = VARIANTS["masked"]
    assert_same(played(make), played(make, workers=2))
    assert_same(played("gym:CartPole-v1", count=1), played("gym:CartPole-v1", count=1, workers=2))


def test_an_environment_that_raises_in_a_worker_gives_the_same_sentence() -> None:
    make = partial(Broken, "raises")
    with pytest.raises(ValueError) as here:
        played(make, count=2)
    simulator = domain(make, workers=2).simulator("train", CPU)
    own = domain(make, workers=2)
    with pytest.raises(ValueError) as there:
        rollout(own.references()["random"], simulator, simulator.noise(torch.arange(2), 0))
    assert str(there.value) == str(here.value)
    assert_ended(simulator)


def test_a_worker_that_dies_is_reported() -> None:
    simulator = domain(Counting, workers=1).simulator("train", CPU)
    world, _ = simulator.reset(simulator.noise(torch.arange(2), 0))
    (worker,) = simulator.stepping.workers  # pyright: ignore[reportAttributeAccessIssue]
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    with pytest.raises(ValueError, match=r"Counting: a process .* has ended by itself \(exit code -9\)"):
        simulator.step(world, torch.zeros(2, dtype=torch.long))
    assert_ended(simulator)
    simulator.reset(simulator.noise(torch.arange(2), 0))  # others start
    simulator.close()
    assert_ended(simulator)


def test_what_cannot_be_sent_to_other_processes_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(ValueError, match=r"Counting cannot be sent to other processes .*workers=0"):
        played(lambda: Counting(most=9 if lock.locked() else 8), workers=1)


SCRIPT = """
    import sys, time
    import gymnasium
    from uat.adapters.environments import Rules
    from uat.adapters.sources import Registered
    from uat.adapters.workers import WorkerEnvironments

    class Own(gymnasium.Env):
        observation_space, action_space = gymnasium.spaces.Discrete(2), gymnasium.spaces.Discrete(2)
        def reset(self, *, seed=None, options=None):
            print("an environment may print")
            return 0, {}
        def step(self, action):
            return 1, 1.0, False, False, {}

    gymnasium.register("Own-v0", Own)
    spaces = Own.observation_space, Own.action_space
    environments = WorkerEnvironments(Registered("gym:Own-v0"), Rules(9, "action_mask"), spaces, workers=2)
    environments.reset([0, 1, 2])
    print(*[worker.process.pid for worker in environments.workers], flush=True)
    time.sleep(60)
"""


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_a_script_that_is_killed(tmp_path: Path, how: signal.Signals) -> None:
    """The script has no guard around its main part, and registers an environment of its own."""
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    path = {**os.environ, "PYTHONPATH": str(Path(uat.__file__).parents[1])}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, env=path, **pipes) as script:
        assert script.stdout is not None
        pids = [int(pid) for pid in script.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_running, pids))
        script.send_signal(how)
        script.wait(20)
    until = time.monotonic() + 20
    while any(map(is_running, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(is_running, pids))
