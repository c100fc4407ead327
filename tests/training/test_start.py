"""`uat.train` accepts a config, or a domain and a method as names, addresses, classes or objects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import uat
from uat.domains.darkroom import DarkRoom, DarkRoomConfig
from uat.methods.vanilla import Vanilla, VanillaConfig
from uat.recipes import compose, default_folder
from uat.tensor_files import RunError

TINY: dict[str, Any] = {"train.epochs": 2, "train.batch_size": 4, "train.validation_episodes": 2}
SMALL_ROOM = DarkRoomConfig(size=4, horizon=6, num_worlds=8)


class Turned(DarkRoom):
    """A dark room with an argument that is not in its config."""

    def __init__(self, config: DarkRoomConfig, turns: int = 0) -> None:
        super().__init__(config)
        self.turns, self.setting = turns, f"turns={turns}"


class Own(Vanilla):
    """A method that is not registered."""


def tiny(domain: Any, method: Any = "vanilla", **settings: Any) -> uat.RunConfig:
    return compose(domain, method, "smoke", settings={**TINY, **settings})


def test_a_domain_at_hand_is_known_by_its_registered_name_and_keeps_its_settings() -> None:
    config = tiny(DarkRoom(SMALL_ROOM), seed=3)
    assert (config.domain_name, config.domain, config.seed) == ("darkroom", SMALL_ROOM, 3)
    by_name = uat.override(uat.recipe("darkroom", "vanilla", "smoke"), {**TINY, "seed": 3})
    assert uat.override(by_name, {"domain.size": 4, "domain.horizon": 6, "domain.num_worlds": 8}) == config


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("uat", "uat"),
        (uat.UAT, "uat"),
        (VanillaConfig(d_model=24), "vanilla"),
        (uat.METHODS["uat-linear"].configure(d_model=8), "uat"),
        (Own, f"python:{__name__}:Own"),
        (f"python:{__name__}:Own", f"python:{__name__}:Own"),
    ],
)
def test_a_method_is_a_name_an_address_a_class_or_a_config(method: Any, name: str) -> None:
    config = tiny("darkroom", method)
    assert config.method_name == name
    assert config.method.d_model == getattr(method, "d_model", uat.recipe("darkroom", "uat", "smoke").method.d_model)
    assert default_folder(config).name == f"darkroom-{name.rpartition(':')[2]}-smoke-0"


def test_a_class_inside_a_function_has_no_address() -> None:
    class Hidden(Vanilla):
        pass

    with pytest.raises(ValueError, match=r"Hidden is defined inside a function.*uat\.register_method"):
        tiny("darkroom", Hidden)


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("wat", "unknown method 'wat'; did you mean 'uat'"),
        (3, "method=3 must be the name"),
        (SMALL_ROOM, "not the config of a known method"),
    ],
)
def test_what_is_no_method_is_refused(method: Any, why: str) -> None:
    with pytest.raises((ValueError, TypeError), match=why):
        tiny("darkroom", method)


def test_settings_of_a_domain_do_not_go_with_a_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"preset='smoke' goes with a domain.*uat\.override"):
        uat.train(tiny("darkroom"), tmp_path / "run", preset="smoke")
    assert not list(tmp_path.iterdir())


def test_an_object_is_trained_scored_and_audited_and_its_policy_needs_no_domain(tmp_path: Path) -> None:
    room = Turned(SMALL_ROOM, turns=1)
    run = uat.train(room, tmp_path / "run", method=Own, preset="smoke", settings=TINY, device="cpu")
    assert run.config.domain_name == "object:Turned"
    assert run.config.domain.setting == "turns=1"
    scores = uat.evaluate(run, episodes=4).scores
    assert {score.domain for score in scores} == {"object:Turned"}
    assert run.rows("scores.jsonl")
    assert uat.audit(uat.load(run.path), room, episodes=4).blind
    again = uat.train(room, tmp_path / "run", method=Own, preset="smoke", settings=TINY, device="cpu", resume=True)
    assert again.config == run.config
    with pytest.raises(RunError, match="holds another run"):
        uat.train(Turned(SMALL_ROOM, turns=2), run.path, method=Own, preset="smoke", settings=TINY, resume=True)
    with pytest.raises(RunError, match="was not trained in the given domain: its setting is turns=2"):
        uat.evaluate(run, domain=Turned(SMALL_ROOM, turns=2))


@pytest.mark.slow
def test_another_process_loads_the_policy_and_needs_the_object_to_score_it(tmp_path: Path) -> None:
    room = Turned(SMALL_ROOM, turns=1)
    run = uat.train(room, tmp_path / "run", method=Own, preset="smoke", settings=TINY, device="cpu")
    assert in_a_new_process(f"""
import uat
from uat.tensor_files import RunError
path = {str(run.path)!r}
for act in (lambda: uat.load(path), lambda: uat.evaluate(path)):
    try: act()
    except RunError as error: print(error)
policy = uat.load(path, trust=True)
print(type(policy).__name__)
from tests.training.test_start import SMALL_ROOM, Turned
print(len(uat.evaluate(path, domain=Turned(SMALL_ROOM, turns=1), episodes=2, references=False).scores) > 3)
""") == [
        f"{run.path}/config.json: the method python:{__name__}:Own is code, which is imported only if you say so: "
        "--trust on the command line, trust=True in Python",
        f"{run.path}/config.json: the domain object:Turned was passed as an object: pass it again "
        "(domain=... in Python)",
        "Own",
        "True",
    ]


def in_a_new_process(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_policy_is_saved_under_its_own_name_and_refused_where_it_could_not_be_loaded(tmp_path: Path) -> None:
    spec = DarkRoom(SMALL_ROOM).spec
    config = tiny("darkroom").method
    for policy, name in ((Vanilla(spec, config), "vanilla"), (Own(spec, config), f"python:{__name__}:Own")):
        uat.save(tmp_path / "policy.safetensors", policy)
        back = uat.load(tmp_path / "policy.safetensors", trust=True)
        assert (type(back), back.config) == (type(policy), config)
        assert uat.METHODS[name].policy is type(policy)
    policy = Vanilla(spec, config)
    policy.register_buffer("extra", torch.zeros(1))
    with pytest.raises(ValueError, match="was not written: the weight extra is unknown to Vanilla"):
        uat.save(tmp_path / "other.safetensors", policy)
    assert not (tmp_path / "other.safetensors").exists()


@pytest.mark.parametrize("name", uat.DOMAINS.own)
def test_every_domain_of_ours_is_known_by_its_name(name: str) -> None:
    domain = uat.recipe(name, "uat", "smoke").build_domain()
    assert tiny(domain, "uat", **{"train.batch_size": 12}).domain_name == name


@pytest.mark.parametrize("name", ["darkrom", "python:no_such_module:x", "python:json:dumps", "object:Gone"])
def test_a_domain_that_is_not_there_is_named_with_its_argument(name: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^config='{name}': ") as caught:
        uat.train(name, tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
