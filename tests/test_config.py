"""Settings: they live once, survive JSON, name a run, and say what is wrong with a value."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

import uat
from tests.builders import IN_THE_DARK
from uat.config import (
    PRESETS,
    EvaluationConfig,
    RunConfig,
    TrainConfig,
    override,
    run_config_from_json,
    setting_names,
    spec_from_json,
    spec_to_json,
    to_json,
)
from uat.domains import DOMAINS
from uat.methods import METHODS
from uat.paper.recipes import BACKBONE, PRESET
from uat.recipes import pairs, recipe
from uat.spec import Assets, Discrete, Items, Spec, Vector, Weights

SOURCE = Path(uat.__file__).parent
CONFIGS = dict.fromkeys(
    [TrainConfig, EvaluationConfig, *(m.config for m in METHODS.values()), *(d.config for d in DOMAINS.values())]
)
FIELDS = [(config, item.name) for config in CONFIGS for item in dataclasses.fields(config)]
RECIPES = [(domain, method, preset) for domain, method in pairs() for preset in PRESETS]


def through_json(config: RunConfig) -> RunConfig:
    return run_config_from_json(json.loads(json.dumps(to_json(config))))


def smoke(method: str = "uat") -> RunConfig:
    return recipe("darkroom", method, "smoke")


def value_at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def another(value: Any) -> Any:
    """A valid value other than this one, for any setting of a recipe."""
    swaps: dict[Any, Any] = {"gradual": "cyclic", "larger-axis": "row-first", "refuse": "clamp", "constant": "cosine"}
    swaps |= {"observation": "two", "feedback": "two", "transition": "two", "two": "previous", "linear": "encoder"}
    swaps |= {"early": "late", "late": "early", "action": "nothing"}
    swaps |= {"fp32": "fp64", "tf32": "fp64", "true": "null", "learned": "none", None: 99, (): (7,)}
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 2 * value or 1
    return value / 2 if isinstance(value, float) and value else swaps.get(value, 0.25)


# ---------------------------------------------------------------- recipes and JSON


@pytest.mark.parametrize(("domain", "method", "preset"), RECIPES)
def test_every_recipe_survives_json(domain: str, method: str, preset: str) -> None:
    config = recipe(domain, method, preset, seed=3)
    back = through_json(config)
    assert back == config
    assert back.identity() == config.identity()
    assert (back.domain_name, back.method_name, back.preset, back.seed) == (domain, method, preset, 3)


def test_tuples_and_numbers_come_back_with_their_types() -> None:
    config = override(smoke(), {"domain.shift_steps": [20, 40], "train.clip": 2, "method.max_positions": 80})
    back = through_json(config)
    assert back.domain.shift_steps == (20, 40)
    assert isinstance(back.train.clip, float)
    assert back.method.max_positions == 80


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("seed"), "seed is missing"),
        (lambda data: data.pop("method_name"), "'method_name' is missing"),
        (lambda data: data.pop("train"), "'train' is missing"),
        (lambda data: data["train"].update(lrr=1.0), r"unknown field train\.lrr; did you mean 'lr'"),
        (lambda data: data.update(sed=1), "unknown field sed; did you mean 'seed'"),
        (lambda data: data.update(method_name="uta"), "unknown method 'uta'; did you mean 'uat'"),
        (lambda data: data.update(domain_name="darkrom"), "unknown domain 'darkrom'; did you mean 'darkroom'"),
        (lambda data: data["train"].update(epochs="4"), r"train\.epochs='4' must be int"),
        (lambda data: data["train"].update(epochs=0), r"train\.epochs=0"),
        (lambda data: data.update(domain=[1]), "'domain' is missing or not a table"),
    ],
)
def test_json_that_is_no_config_is_refused_with_the_field(change: Any, message: str) -> None:
    data = to_json(smoke())
    change(data)
    with pytest.raises(ValueError, match=message):
        run_config_from_json(data)


@pytest.mark.parametrize("obs", [Vector(10), Items(7), Assets(3, 4)], ids=repr)
@pytest.mark.parametrize("action", [Discrete(5), Weights(3)], ids=repr)
def test_every_kind_of_spec_survives_json(obs: Any, action: Any) -> None:
    spec = Spec(obs=obs, action=action, horizon=9, reward_scale=0.5, reward_lag=2, facts={"price": (3,), "fee": ()})
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


def test_presets_differ_and_the_pair_settings_reach_the_method() -> None:
    smoke_run, paper = smoke(), recipe("darkroom", "uat")
    assert paper.preset == "paper"
    assert smoke_run.train.epochs < paper.train.epochs
    assert (paper.method.d_model, paper.method.feedback_decay, paper.train.utility_lr) == (64, 0.7, 2e-2)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NarrowConfig:
    d_model: int = 7
    """All that this method shares with the backbone of a domain."""


@pytest.mark.parametrize("preset", PRESETS)
def test_a_method_takes_those_backbone_settings_that_it_has(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "narrow", dataclasses.replace(METHODS["vanilla"], config=NarrowConfig))
    config = recipe("darkroom", "narrow", preset)
    assert config.method == NarrowConfig(d_model=recipe("darkroom", "vanilla", preset).method.d_model)
    assert config.train == recipe("darkroom", "vanilla", preset).train


def test_every_shared_setting_is_one_of_some_method() -> None:
    """So that a misspelt one is not left out without a word."""
    known = {f"method.{item.name}" for method in METHODS.values() for item in dataclasses.fields(method.config)}
    shared = {name for settings in (*BACKBONE.values(), *PRESET.values()) for name in settings}
    assert {name for name in shared if name.startswith("method.")} <= known


def test_a_method_serves_domains_that_there_are() -> None:
    for name, method in METHODS.items():
        assert method.domains is None or (method.domains and set(method.domains) <= DOMAINS.keys()), name


def test_runs_of_one_kind_differ_by_seed_alone() -> None:
    assert recipe("darkroom", "uat", seed=1).kind() == recipe("darkroom", "uat", seed=2).kind()
    others = [smoke(), smoke("vanilla"), override(smoke(), {"train.lr": 0.5}), recipe("darkroom", "uat")]
    assert len({config.kind() for config in others}) == len(others)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("darkrom", "uat", "smoke"), "unknown domain 'darkrom'; did you mean 'darkroom'"),
        (("darkroom", "vanila", "smoke"), "unknown method 'vanila'; did you mean 'vanilla'"),
        (("darkroom", "uat", "smoky"), "unknown preset 'smoky'; did you mean 'smoke'"),
        (("darkroom", "uat", "zzz"), "unknown preset 'zzz'; known: smoke, quick, paper"),
    ],
)
def test_an_unknown_recipe_is_refused_with_the_nearest_name(names: tuple[str, str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe(*names)


# ---------------------------------------------------------------- override


def test_override_changes_what_it_names_and_nothing_else() -> None:
    before = smoke()
    after = override(before, {"train.lr": 1, "seed": 2, "domain.schedule": "cyclic", "method.max_positions": None})
    assert (after.train.lr, after.seed, after.domain.schedule) == (1.0, 2, "cyclic")
    assert isinstance(after.train.lr, float)
    assert override(after, {"train.lr": before.train.lr, "seed": 0, "domain.schedule": "gradual"}) == before
    assert override(before, {}) == before


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("train.lr", "a", r"train\.lr='a' must be float"),
        ("train.lr", True, r"train\.lr=True must be float"),
        ("train.lr", None, r"train\.lr=None must be float"),
        ("train.epochs", 1.5, r"train\.epochs=1\.5 must be int"),
        ("train.epochs", True, r"train\.epochs=True must be int"),
        ("train.random_start", 1, r"train\.random_start=1 must be bool"),
        ("train.lr_schedule", "step", r"train\.lr_schedule='step' must be one of 'constant', 'linear', 'cosine'"),
        ("domain.shift_steps", 5, r"domain\.shift_steps=5 must be"),
        ("domain.shift_steps", [1.5], r"domain\.shift_steps=1\.5 must be int"),
        ("method.max_positions", "x", r"method\.max_positions='x' must be int"),
        ("seed", "0", "seed='0' must be int"),
    ],
)
def test_a_value_of_the_wrong_type_is_named_with_its_field(path: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        override(smoke(), {path: value})


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *((f"train.{name}", 0) for name in ("epochs", "batch_size", "validate_every", "validation_episodes")),
        *((f"train.{name}", value) for name in ("lr", "utility_lr", "clip") for value in (0.0, -1.0, NAN)),
        *((f"train.{name}", INF) for name in ("lr", "utility_lr", "weight_decay")),
        ("train.patience", 0),
        ("train.warmup", -1),
        ("train.weight_decay", -1e-9),
        ("train.weight_decay", NAN),
        ("evaluation.episodes", 0),
        ("method.d_model", 0),
        ("method.num_heads", 3),
        ("method.dropout", 1.0),
        ("method.dropout", NAN),
        ("method.max_positions", 0),
        ("method.feedback_decay", 1.0),
        ("method.feedback_decay", -0.1),
        ("method.feedback_decay", NAN),
        ("method.d_utility", 0),
        ("domain.size", 1),
        ("domain.horizon", 0),
        ("domain.shift_steps", (60,)),
    ],
)
def test_a_value_out_of_range_is_named_with_its_field(path: str, value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        override(smoke(), {path: value})
    assert f"{path.split('.')[-1]}={value}" in str(caught.value)


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("train.lrr", "train.lr"),
        ("train.epoch", "train.epochs"),
        ("trian.lr", "train.lr"),
        ("method.d_modle", "method.d_model"),
        ("domain.shedule", "domain.schedule"),
        ("sead", "seed"),
    ],
)
def test_a_misspelt_setting_gets_a_suggestion(path: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"unknown setting '{path}'; did you mean '{near}'"):
        override(smoke(), {path: 1})


@pytest.mark.parametrize("path", ["train.lr.x", "seed.x", "nothing.at.all", "", "."])
def test_a_path_that_leads_nowhere_is_an_unknown_setting(path: str) -> None:
    with pytest.raises(ValueError, match="unknown setting"):
        override(smoke(), {path: 1})


@pytest.mark.parametrize("section", ["train", "method", "domain", "evaluation", "feedback"])
def test_a_section_is_not_a_setting(section: str) -> None:
    with pytest.raises(ValueError, match=rf"'{section}' is a section; .* {section}\."):
        override(smoke(), {section: 1})


@pytest.mark.parametrize("method", IN_THE_DARK)
def test_every_setting_that_is_offered_can_be_set(method: str) -> None:
    config = smoke(method)
    for path in setting_names(config):
        assert override(config, {path: value_at(config, path)}) == config, path


@pytest.mark.parametrize("name", ["domain_name", "method_name", "preset"])
def test_a_name_that_chose_the_settings_cannot_be_changed_afterwards(name: str) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        override(smoke(), {name: "smoke"})
    assert f"did you mean '{name}'" not in str(caught.value)


# ---------------------------------------------------------------- identity


@pytest.mark.parametrize("method", [name for name in IN_THE_DARK if not METHODS[name].changes])
def test_every_setting_changes_the_identity(method: str) -> None:
    """Variants share their settings with what they vary."""
    config = smoke(method)
    paths = [path for path in setting_names(config) if "." in path or path == "seed"]
    changed = {path: override(config, {path: another(value_at(config, path))}).identity() for path in paths}
    assert len({config.identity(), *changed.values()}) == len(paths) + 1


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].changes])
def test_what_makes_a_variant_cannot_be_changed(method: str) -> None:
    config, changes = smoke(method), METHODS[method].changes
    for name, value in changes.items():
        assert getattr(config.method, name) == value
        with pytest.raises(ValueError, match=rf"method\.{name}=.* is not {method}"):
            override(config, {f"method.{name}": another(value)})


def test_a_setting_that_is_absent_has_its_default() -> None:
    """So that a setting added later neither hides old runs nor renames them."""
    config = recipe("darkroom", "uat", "smoke")
    data = to_json(config)
    del data["train"]["random_start"]
    assert run_config_from_json(data) == config


def test_method_and_preset_are_part_of_the_identity() -> None:
    runs = [smoke("uat"), smoke("vanilla"), dataclasses.replace(smoke("uat"), preset="quick")]
    assert len({run.identity() for run in runs}) == 3


def test_a_new_revision_of_the_method_is_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before, vanilla = smoke().identity(), smoke("vanilla").identity()
    monkeypatch.setattr(METHODS["uat"].policy, "revision", 2)
    assert smoke().identity() != before
    assert smoke("vanilla").identity() == vanilla


def test_identity_ignores_how_the_config_came_about() -> None:
    there = override(smoke(), {"train.lr": 0.5, "seed": 1})
    back = override(there, {"seed": 0, "train.lr": smoke().train.lr})
    assert back.identity() == smoke().identity()
    shuffled = dict(reversed(to_json(smoke()).items()))
    assert run_config_from_json(shuffled).identity() == smoke().identity()


def test_a_whole_number_is_the_same_run_as_its_float() -> None:
    whole = dataclasses.replace(smoke(), train=dataclasses.replace(smoke().train, clip=1))
    assert whole == smoke()
    assert whole.identity() == smoke().identity()


# ---------------------------------------------------------------- sentences and readers


def sentences(config: type[Any]) -> dict[str, str | None]:
    """The text under each field of a dataclass and of its bases."""
    found: dict[str, str | None] = {}
    for owner in reversed(config.__mro__):
        if not dataclasses.is_dataclass(owner):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0].body  # pyright: ignore[reportAttributeAccessIssue]
        for here, below in zip(body, [*body[1:], None], strict=True):
            if isinstance(here, ast.AnnAssign) and isinstance(here.target, ast.Name):
                text = below.value if isinstance(below, ast.Expr) else None
                found[here.target.id] = text.value if isinstance(text, ast.Constant) else None  # pyright: ignore[reportArgumentType]
    return found


@pytest.mark.parametrize(("config", "name"), FIELDS, ids=lambda part: getattr(part, "__name__", part))
def test_every_setting_has_a_sentence_under_it(config: type[Any], name: str) -> None:
    sentence = sentences(config)[name]
    assert sentence, f"{config.__name__}.{name} has no sentence"
    assert sentence.endswith(".")
    assert sentence[0].isupper() or sentence.startswith(name)


def names_read() -> set[str]:
    """Attributes that the package reads outside of the checks in __post_init__, also by getattr."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef) and node.name == "__post_init__":
            return
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            found.update(arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant))  # pyright: ignore[reportArgumentType]
        for child in ast.iter_child_nodes(node):
            visit(child)

    for file in SOURCE.rglob("*.py"):
        visit(ast.parse(file.read_text()))
    return found


def test_every_setting_is_read_somewhere() -> None:
    read = names_read()
    unread = [f"{config.__name__}.{name}" for config, name in FIELDS if name not in read]
    assert not unread
