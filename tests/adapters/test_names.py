"""Names of environments: found, suggested, trusted or refused; objects without a name; runs that are opened again."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import popgym  # noqa: F401 (registers environments)
import pytest
import torch
from gymnasium.vector import SyncVectorEnv

import uat
from tests.adapters.envs import Counting, Mixed, Steering
from tests.adapters.playing import Reinforce
from uat.adapters.gymnasium import GivenConfig, GymConfig, domain
from uat.cli import main
from uat.config import override
from uat.domains import DOMAINS
from uat.recipes import compose, default_folder
from uat.runs import Run
from uat.tensor_files import RunError
from uat.training.progress import Progress

SMALL = {"train.epochs": 2, "train.batch_size": 4, "train.validation_episodes": 3, "evaluation.episodes": 3}


@pytest.fixture(autouse=True)
def forget() -> Any:
    """Take away the entries and environments that a test adds."""
    before, registered = DOMAINS.loaded(), dict(gymnasium.registry)
    yield
    for name in DOMAINS.loaded().keys() - before.keys():
        del DOMAINS[name]
    gymnasium.registry.clear()
    gymnasium.registry.update(registered)


def trained(what: Any, path: Path, **settings: Any) -> Run:
    return uat.train(what, path, method=Reinforce, preset="smoke", settings={**SMALL, **settings})


def refused(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gym:CartPol-v1", "no environment 'CartPol-v1'; did you mean gym:CartPole-v1?"),
        ("gym:popgym-Unheard-v0", "if the package popgym registers it, write gym:popgym:popgym-Unheard-v0"),
        ("gym:zzz", "no environment 'zzz'; name the package that registers it: gym:PACKAGE:ID"),
        ("gym:", "no environment ''"),
        ("gym:popgym:popgym-MultiarmedBanditMediu-v0", "mean gym:popgym:popgym-MultiarmedBanditMedium-v0?"),
        ("gym:unheard_of:X-v0", "the package unheard_of cannot be imported: ModuleNotFoundError"),
        ("gym:a-b:X-v0", "'gym:a-b:X-v0' is not an address: expected gym:PACKAGE:ID"),
        ("gym::X-v0", "'gym::X-v0' is not an address: expected gym:PACKAGE:ID"),
    ],
)
def test_unknown_names_are_refused_with_a_suggestion(
    name: str, sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(gymnasium.registry, "popgym-Unheard-v0", raising=False)
    assert sentence in refused("train", name, "--dry-run", capsys=capsys)
    with pytest.raises(ValueError) as error:
        uat.train(name)
    assert sentence in str(error.value)


def test_without_gymnasium_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ValueError, match=r"gym:CartPole-v1.* need gymnasium: pip install 'uat-transformer\[gym\]'"):
        uat.train("gym:CartPole-v1")


def test_other_registries_refuse_names_of_environments(capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not an address" in refused("train", "darkroom", "--method", "gym:popgym:x", capsys=capsys)


def test_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    start = ("train", "gym:CartPole-v1", "--preset", "smoke", "--out", "runs/never", "--domain.arguments")
    assert 'cannot be made with the arguments {"a": 1}: TypeError' in refused(*start, '{"a": 1}', capsys=capsys)
    assert "domain.arguments='{' is not valid JSON" in refused(*start, "{", capsys=capsys)
    assert "domain.arguments='[]' must be a JSON object" in refused(*start, "[]", capsys=capsys)
    assert not Path("runs/never").exists()


def test_the_list_of_domains_ends_with_environments(capsys: pytest.CaptureFixture[str]) -> None:
    main(["list", "domains"])
    assert "gym:ID is any Gymnasium environment, such as gym:CartPole-v1" in capsys.readouterr().out


def test_a_run_has_a_folder_with_a_safe_name() -> None:
    DOMAINS.adopt("gym:popgym:popgym-RepeatFirstEasy-v0")
    gymnasium.register("Some/Where-v0", lambda **arguments: Counting(**arguments))
    names = {"gym:popgym:popgym-RepeatFirstEasy-v0": "popgym-RepeatFirstEasy-v0", "gym:Some/Where-v0": "Some+Where-v0"}
    for name, folder in names.items():
        assert default_folder(compose(name)) == Path("runs") / f"{folder}-uat-paper-0"


def test_workers_are_no_part_of_the_identity() -> None:
    config = compose("gym:CartPole-v1")
    assert override(config, {"domain.workers": 3}).identity() == config.identity()
    assert override(config, {"domain.max_steps": 3}).identity() != config.identity()
    assert override(config, {"domain.workers": 3, "domain.max_steps": 3}).build_domain().setting == "max_steps=3"


def test_code_in_a_run_folder_is_imported_only_if_the_caller_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "import gymnasium\ngymnasium.register('Arms-v0', 'tests.adapters.envs:Counting')\n"
    (tmp_path / "arms_of_mine.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    run = trained("gym:arms_of_mine:Arms-v0", tmp_path / "run")
    assert uat.load(run.path, trust=True).spec.action == uat.Discrete(3)

    def forget_all() -> None:
        sys.modules.pop("arms_of_mine", None)
        gymnasium.registry.pop("Arms-v0", None)
        if "gym:arms_of_mine:Arms-v0" in DOMAINS.loaded():
            del DOMAINS["gym:arms_of_mine:Arms-v0"]

    forget_all()
    assert "is code, which is imported only if you say so: --trust" in refused("evaluate", str(run.path), capsys=capsys)
    assert "arms_of_mine" not in sys.modules
    main(["evaluate", str(run.path), "--trust"])
    assert "arms_of_mine" in sys.modules
    forget_all()
    assert uat.evaluate(run.path, trust=True).scores[0].metric == "return"


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize("make", [Counting, Mixed, Steering, partial(Counting, masked=True)])
def test_a_run_is_trained_scored_and_audited(make: Any, tmp_path: Path) -> None:
    run = trained(make, tmp_path / "run", **{"train.standardise": True, "domain.max_steps": 6})
    assert run.config.domain.max_steps == 6
    rows = {(score.method == "random", score.metric): score.value for score in uat.evaluate(run).scores}
    assert rows.keys() == {(own, metric) for own in (True, False) for metric in ("return", "length", "success")}
    assert 0 < rows[True, "length"] <= 6
    audit = uat.audit(uat.load(run.path, trust=True), run.config.build_domain(), episodes=4)
    assert not audit.blind


def test_an_interrupted_run_is_resumed_to_the_same_weights(tmp_path: Path) -> None:
    class Interrupted(Progress):
        def update(self, epoch: int, note: str = "") -> None:
            if epoch == 2:
                raise KeyboardInterrupt

    config = compose(
        "gym:CartPole-v1", Reinforce, "smoke", settings={**SMALL, "train.epochs": 4, "domain.max_steps": 9}
    )
    whole = uat.train(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        uat.train(config, tmp_path / "cut", progress=lambda label, total: Interrupted())
    cut = uat.train(config, tmp_path / "cut", resume=True)
    assert (tmp_path / "cut" / "metrics.jsonl").read_text() == (tmp_path / "whole" / "metrics.jsonl").read_text()
    for name, weight in uat.load(whole.path, trust=True).state_dict().items():
        assert torch.equal(weight, uat.load(cut.path, trust=True).state_dict()[name])


def test_a_run_whose_environment_fails_can_be_resumed(tmp_path: Path) -> None:
    class Failing(Counting):
        steps_left = 150

        def step(self, action: Any) -> Any:
            Failing.steps_left -= 1
            if not Failing.steps_left:
                raise RuntimeError("the simulator has crashed")
            return super().step(action)

    settings = {**SMALL, "train.epochs": 8, "train.validate_every": 1}
    config = compose(Failing, Reinforce, "smoke", settings=settings)
    with pytest.raises(ValueError, match="Failing raised RuntimeError: the simulator has crashed, in step "):
        uat.train(config, tmp_path / "run")
    uat.train(config, tmp_path / "run", resume=True)
    uat.train(config, tmp_path / "other")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == (tmp_path / "other" / "metrics.jsonl").read_text()


# ---------------------------------------------------------------- objects


def test_an_environment_made_by_its_id_is_known_by_name() -> None:
    env = gymnasium.make("CartPole-v1", render_mode="rgb_array", sutton_barto_reward=True, max_episode_steps=30)
    own = domain(env)
    assert own.name == "gym:CartPole-v1"
    assert own.config == GymConfig(arguments='{"max_episode_steps": 30, "sutton_barto_reward": true}')
    assert own.spec.horizon == 30
    DOMAINS.adopt("gym:popgym:popgym-RepeatFirstEasy-v0")
    assert domain(gymnasium.make("popgym-RepeatFirstEasy-v0")).name == "gym:popgym:popgym-RepeatFirstEasy-v0"


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda env: gymnasium.wrappers.TransformReward(env, lambda x: 2 * float(x)),
        gymnasium.wrappers.FlattenObservation,
    ],
)
def test_a_wrapped_environment_is_an_object(wrapped: Any) -> None:
    own = domain(wrapped(gymnasium.make("Pendulum-v1")))
    assert own.name == "object:PendulumEnv"
    assert isinstance(own.config, GivenConfig)


@pytest.mark.parametrize("kind", ["object", "class", "function", "vector"])
def test_an_object_is_passed_again_to_be_scored(kind: str, tmp_path: Path) -> None:
    def made() -> Any:
        makes = {
            "class": lambda: Counting,
            "function": lambda: partial(Counting, most=7),
            "object": lambda: Counting(7),
        }
        return makes[kind]() if kind in makes else SyncVectorEnv([Counting] * 3)

    run = trained(made(), tmp_path / "run", **{"domain.max_steps": 5})
    own = {"object:SyncVectorEnv" if kind == "vector" else "object:Counting": run.config.domain_name}
    assert list(own) == list(own.values())
    first = uat.evaluate(run).scores
    del DOMAINS[run.config.domain_name]
    with pytest.raises(RunError, match="was passed as an object: pass it again"):
        uat.evaluate(run.path, trust=True)
    assert uat.evaluate(run.path, trust=True, domain=made()).scores == first
    with pytest.raises(RunError, match="was not trained in the given domain: its name is object:Mixed"):
        uat.evaluate(run, domain=Mixed)


def test_an_object_that_cannot_be_copied_asks_for_a_factory() -> None:
    class Locked(Counting):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot pickle a lock")

    with pytest.raises(
        ValueError, match=r"Locked cannot be copied \(TypeError: cannot pickle a lock\).* pass a factory"
    ):
        domain(Locked())


def test_a_factory_that_makes_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must return a gymnasium.Env, got 3"):
        uat.train(lambda: 3)
    with pytest.raises(ValueError, match=r"raised ZeroDivisionError"):
        domain(lambda: 1 / 0)
    with pytest.raises(ValueError, match=r"config=3 must be RunConfig, a domain, or the name of one"):
        uat.train(3)
    with pytest.raises(ValueError, match=r"3 must be a gymnasium.Env, a VectorEnv, or a function"):
        domain(3)
    with pytest.raises(ValueError, match=r"'darkroom' must be a name such as gym:CartPole-v1"):
        domain("darkroom")


# ---------------------------------------------------------------- loops of your own


@pytest.mark.parametrize("make", [Counting, Mixed, Steering])
def test_a_session_plays_in_a_loop(make: Any) -> None:
    own, env = domain(make, max_steps=20), make()
    config = compose(make, Reinforce, "smoke")
    session = uat.Session(Reinforce(own.spec, config.method))
    obs, _ = env.reset(seed=0)
    action = own.action(session.act(own.observation(obs)))
    over = False
    while not over:
        obs, reward, over, _, _ = env.step(action)  # asserts that the action is in its space
        action = own.action(session.act(own.observation(obs), reward=reward))


def test_several_streams_are_converted_together() -> None:
    own, envs = domain(Mixed), [Mixed(), Mixed()]
    session = uat.Session(Reinforce(own.spec, compose(Mixed, Reinforce, "smoke").method), streams=2)
    actions = session.act(own.observation(*[env.reset(seed=0)[0] for env in envs]))
    for stream, env in enumerate(envs):
        assert env.action_space.contains(own.action(actions, stream))


def test_vectors_and_ids_need_no_conversion() -> None:
    own, env = domain("gym:CartPole-v1"), gymnasium.make("CartPole-v1")
    session = uat.Session(Reinforce(own.spec, compose(own, Reinforce, "smoke").method))
    obs, _ = env.reset(seed=0)
    action = session.act(obs[None])
    assert np.array_equal(np.asarray(own.observation(obs)), obs[None])
    assert own.action(action) == int(action)
    env.step(int(action))
