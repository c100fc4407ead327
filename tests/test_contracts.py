"""The base classes: nothing is looked for by name, and what a stranger leaves out has a default that works."""

from __future__ import annotations

import ast
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import uat
from tests.builders import CPU, build_random, random_trajectory
from tests.training.small_runs import tiny
from uat.acting import Behaviour, has_expert, rollout
from uat.contracts import Agent, Simulator, Transition
from uat.domains import DOMAINS, Domain, DomainEntry
from uat.domains.darkroom.world import DarkRoomConfig, DarkRoomSimulator
from uat.episode import Batch, Losses, Noise, Step, masked_sum
from uat.evaluation.scores import evaluate
from uat.feedback import corrupt
from uat.methods import METHODS, Phase
from uat.methods.vanilla import Vanilla
from uat.noise import integers
from uat.spec import Discrete, Spec, Vector
from uat.training import train

ROOT = Path(uat.__file__).parent


# ---------------------------------------------------------------- nothing is probed by name

ALLOWED = {
    "engines/triton/play.py": "a compiled kernel of Triton, or its interpreter",
    "engines/warm_up.py": "Triton's own objects, which differ by version; named tuples",
    "executors/workers.py": "not every system has pthread_sigmask",
    "files.py": "not every system has O_NOFOLLOW",
    "memory.py": "not every system has sysconf",
    "nn/heads.py": "a user's linear map may have no bias",
    "nn/shifted.py": "a user's linear map may have no bias",
    "nn/structure.py": "torch's own module hooks, by the names that torch gives them",
    "settings.py": "types of fields may be any of typing's",
    "terminal.py": "a stream of anybody's may have no encoding",
    "threads.py": "not every system has sched_getaffinity",
}
"""Files in which something is looked for by name, and why; contracts never are."""


def probes(file: Path) -> list[int]:
    """Lines with hasattr, or with getattr and a default."""
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    named = [(call, call.func.id) for call in calls if isinstance(call.func, ast.Name)]
    return [c.lineno for c, name in named if name == "hasattr" or (name == "getattr" and len(c.args) > 2)]


def test_no_contract_is_probed_by_name() -> None:
    lines = {file.relative_to(ROOT).as_posix(): probes(file) for file in ROOT.rglob("*.py")}
    found = {file: at for file, at in lines.items() if at}
    wrong = {file: at for file, at in found.items() if file not in ALLOWED}
    assert not wrong, f"declare it in a base class with a default, instead of probing for it: {wrong}"
    assert ALLOWED.keys() == found.keys()  # no exception outlives its reason


@pytest.mark.parametrize("code", ["hasattr(x, 'step')", "getattr(x, 'step', None)"])
def test_a_probe_is_found(code: str, tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(f"def f(x):\n    return {code}, getattr(x, 'step')\n")
    assert probes(tmp_path / "new.py") == [2]


# ---------------------------------------------------------------- a world without an expert, as a stranger writes it


class Arms(Simulator[Tensor]):
    """One of three arms pays; which one is hidden. There is no expert."""

    spec = Spec(obs=Vector(1), action=Discrete(3), horizon=5)

    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        return {"arm": integers(seed, "arms", episode_ids, 1, below=3)[:, 0]}

    def reset(self, noise: Noise) -> tuple[Tensor, Tensor]:
        return noise["arm"], torch.ones(len(noise["arm"]), 1)

    def step(self, world: Tensor, action: Tensor) -> Transition[Tensor]:
        paid_B = action == world
        return Transition(world, torch.ones(len(world), 1), paid_B.float(), terminated_B=paid_B)


class Bandit(Domain):
    """The smallest domain: its only metric is the return, and it has no references."""

    name, spec = "bandit", Arms.spec

    def simulator(self, split: str, device: torch.device | str) -> Arms:
        return Arms()


class Uniform(Agent[None]):
    spec = Arms.spec

    def init_state(self, streams: int, capacity: int, device: torch.device | str) -> None:
        return None

    def step(self, state: None, step: Step) -> tuple[Tensor, None]:
        return torch.zeros(len(step.obs), 3), None


class Reinforce(Vanilla):
    """Learns from what it earned: sum over t of -log pi(a_t) r_t."""

    def phases(self) -> tuple[Phase, ...]:
        return (Phase("reinforce", self._loss),)

    def _loss(self, batch: Batch) -> Losses:
        assert batch.trajectory is not None
        nll_BT = self.head.nll(self.features(batch), batch.trajectory.action)
        return {"reinforce": masked_sum(nll_BT * batch.trajectory.reward, batch.valid)}


def test_a_world_without_an_expert_is_played_by_agents_and_by_nobody_else() -> None:
    arms, agent = Arms(), Uniform()
    noise = arms.noise(torch.arange(6), 0)
    played = rollout(agent, arms, noise)
    assert played.target is None
    assert played.truncated is None
    assert torch.equal(played.done, played.terminated)
    assert (played.terminated.any(1) == (noise["arm"] == 0)).all()  # the first of equals is always chosen
    assert not has_expert(arms)
    assert has_expert(DarkRoomSimulator(DarkRoomConfig(), "cpu"))
    told = rollout(agent, corrupt(arms, reward="inverted"), noise).told
    assert told is not None
    assert torch.equal(told.reward, -played.reward)
    for nobody in (None, Behaviour()):
        with pytest.raises(ValueError, match="Arms has no expert: give an agent"):
            rollout(nobody, arms, noise)


def test_imitation_says_that_it_needs_an_expert() -> None:
    spec = Arms.spec
    batch = spec.clock.batch(dataclasses.replace(random_trajectory(spec), target=None))
    with pytest.raises(ValueError, match="imitation needs an expert's actions"):
        build_random("uat", spec).loss(batch)


def test_an_abstract_method_that_is_missing_is_named() -> None:
    class Half(Simulator[Tensor]):
        spec = Arms.spec

    with pytest.raises(TypeError, match="noise"):
        Half()  # pyright: ignore[reportAbstractUsage]


@dataclass(frozen=True)
class NoSettings:
    pass


def test_a_domain_of_defaults_is_trained_and_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = DomainEntry(build=lambda _: Bandit(), config=NoSettings, tasks=("default",), summary="arms")
    monkeypatch.setitem(DOMAINS, "bandit", entry)
    monkeypatch.setitem(METHODS, "vanilla", dataclasses.replace(METHODS["vanilla"], policy=Reinforce))
    config = dataclasses.replace(tiny("vanilla"), domain_name="bandit", domain=NoSettings())
    run = train(config, tmp_path, device="cpu")
    found = evaluate(run, device="cpu")
    assert {(row.method, row.metric) for row in found.scores} == {("vanilla", "return")}


# ---------------------------------------------------------------- ends and cuts


@dataclass(frozen=True)
class Clocked:
    t: int
    ids_B: Tensor


class Cut(Simulator[Clocked]):
    """Episode b ends after b + 1 steps, or is cut off after 3; then the next one begins at once, as in Gymnasium."""

    spec = Spec(obs=Vector(1), action=Discrete(2), horizon=5)

    def noise(self, episode_ids: Tensor, seed: int) -> Noise:
        return {"id": episode_ids}

    def reset(self, noise: Noise) -> tuple[Clocked, Tensor]:
        return Clocked(0, noise["id"]), torch.zeros(len(noise["id"]), 1)

    def step(self, world: Clocked, action: Tensor) -> Transition[Clocked]:
        t = world.t + 1
        over_B, cut_B = world.ids_B + 1 == t, torch.full_like(world.ids_B, t == 3).bool()
        last = torch.full((len(over_B), 1), float(t))
        after = torch.where((over_B | cut_B)[:, None], -1.0, last)
        return Transition(Clocked(t, world.ids_B), after, last[:, 0], over_B, cut_B, final_obs=last)

    def expert(self, world: Clocked) -> Tensor:
        return torch.zeros_like(world.ids_B)


def test_an_episode_ends_or_is_cut_off_and_what_was_seen_last_is_kept() -> None:
    cut = Cut()
    played = rollout(None, cut, cut.noise(torch.arange(5), 0))
    assert played.valid.sum(1).tolist() == [1, 2, 3, 3, 3]
    assert played.truncated is not None
    assert played.terminated.any(1).tolist() == [True, True, True, False, False]
    assert played.truncated.any(1).tolist() == [
        False,
        False,
        False,
        True,
        True,
    ]  # only one end
    assert torch.equal(played.done, played.terminated | played.truncated)
    assert played.final_obs is not None
    assert played.final_obs[:, 0].tolist() == [1, 2, 3, 3, 3]


def test_a_log_says_which_episodes_were_cut_off() -> None:
    spec = Cut.spec
    log: dict[str, Any] = {"obs": torch.zeros(2, 3, 1), "action": torch.zeros(2, 3).long(), "reward": torch.ones(2, 3)}
    valid = torch.tensor([[True, True, False], [True, True, True]])
    found = uat.episodes(spec, **log, valid=valid, truncated=[True, False])
    assert found.truncated is not None
    assert found.truncated.tolist() == [[False, True, False], [False] * 3]
    assert found.terminated.tolist() == [[False] * 3, [False, False, True]]
    with pytest.raises(ValueError, match=r"truncated: expected booleans of shape \(2,\)"):
        uat.episodes(spec, **log, truncated=[[True]])
    assert rollout(None, Cut(), Cut().noise(torch.arange(2), 0)).to(CPU).final_obs is not None


# ---------------------------------------------------------------- streams without an end


class Endless(Arms):
    """Arms that never stop: each step pays or does not."""

    spec = dataclasses.replace(Arms.spec, horizon=None)

    def step(self, world: Tensor, action: Tensor) -> Transition[Tensor]:
        never_B = torch.zeros(len(world), dtype=torch.bool)
        return Transition(world, torch.full((len(world), 1), 2.0), (action == world).float(), terminated_B=never_B)


def test_an_endless_stream_is_cut_where_one_says() -> None:
    arms = Endless()
    noise = arms.noise(torch.arange(3), 0)
    played = rollout(Uniform(), arms, noise, steps=9)
    assert played.valid.shape == (3, 9)
    assert not played.terminated.any()
    assert played.truncated is not None
    assert played.truncated[:, -1].all()
    assert not played.truncated[:, :-1].any()
    assert played.final_obs is not None
    assert (played.final_obs == 2).all()
    with pytest.raises(ValueError, match=r"Spec.horizon=None: .* give the number of steps"):
        rollout(Uniform(), arms, noise)
    with pytest.raises(ValueError, match="steps=0 must be at least 1"):
        rollout(Uniform(), arms, noise, steps=0)


def test_fewer_steps_than_the_horizon_cut_an_episode_that_has_not_ended() -> None:
    arms = Arms()
    noise = arms.noise(torch.arange(6), 0)
    played = rollout(Uniform(), arms, noise, steps=2)
    assert played.truncated is not None
    assert torch.equal(played.truncated[:, -1], noise["arm"] != 0)
    assert torch.equal(played.done.any(1), torch.ones(6, dtype=torch.bool))


@pytest.mark.parametrize(("method", "setting"), [("uat", "max_positions"), ("gtrxl", "memory")])
def test_a_method_that_needs_a_length_says_which_setting_gives_it(method: str, setting: str) -> None:
    with pytest.raises(ValueError, match=setting):
        METHODS[method].build(Endless.spec, METHODS[method].configure())
    assert METHODS[method].build(Endless.spec, METHODS[method].configure(**{setting: 6})).spec.horizon is None


def test_the_page_about_worlds_shows_a_world_that_plays() -> None:
    page = (Path(__file__).parents[1] / "docs" / "howto" / "write-a-world.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    worlds = names["Bandit"]().simulator("test", "cpu")
    played = rollout(Uniform(), worlds, worlds.noise(torch.arange(6), 0))
    assert played.target is None
    assert names["Bandit"]().measure(played)["return"].max() == 1
