"""RunConfig: every setting that decides a run's numbers, as frozen dataclasses, and the conversion to and from JSON."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from uat.domains import DOMAINS, Domain
from uat.feedback import TRUE, CorruptedDomain, FeedbackConfig
from uat.methods import METHODS
from uat.objectives import OBJECTIVES, ImitationConfig
from uat.registry import Registry
from uat.settings import (
    Amount,
    Count,
    Episodes,
    Epochs,
    Scale,
    Seed,
    Share,
    Warmup,
    check_fields,
    checked,
    current_names,
    execution_fields,
    field_types,
    original_names,
    shown,
    with_current_names,
)
from uat.spec import Assets, Box, Discrete, Items, Named, Spec, Vector, Weights

PRESETS = ("smoke", "quick", "paper")
IMITATION = ImitationConfig()
Precision = Literal["fp64", "fp32", "tf32", "bf16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    epochs: Epochs = 500
    """Maximum number of epochs. In a simulator domain an epoch plays one batch of episodes, followed by one optimizer
    step, or by those of an objective that uses each rollout several times."""
    steps: Count | None = None
    """Environment steps after which training by an objective that counts them, such as ppo, ends; `epochs` may end it
    before."""
    batch_size: Count = 256
    """Episodes per epoch."""
    lr: Scale = 2e-3
    """Learning rate of all parameters except the utility encoder and the regime readout."""
    utility_lr: Scale = 2e-2
    """Learning rate of the utility encoder and the regime readout."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rates after the warm-up: constant, or decaying along a line or a cosine."""
    last_lr: Share = 0.0
    """Share of the learning rates at which a decay ends."""
    warmup: Warmup = 0
    """Epochs of warm-up, in which the learning rates rise linearly from zero."""
    weight_decay: Amount = 1e-5
    """Adam's L2 penalty."""
    clip: Scale = 1.0
    """Maximum norm of the gradient; larger gradients are clipped."""
    validate_every: Epochs = 10
    """Epochs between validations; each validation also writes a checkpoint."""
    validation_episodes: Episodes = 1024
    """Episodes of each validation, always the same ones."""
    patience: Epochs = 100
    """Epochs without a better validation score after which training stops."""
    random_start: bool = False
    """Start training episodes at random rows of the position table, so that the policy can act in longer episodes."""
    standardise: bool = False
    """Standardise raw observations by mean and deviation over the first 256 training episodes, which are recorded, or
    played with uniformly random actions."""
    precision: Precision = "fp32"
    """Floating-point precision: with tf32 and bf16 a GPU rounds the inputs of matrix products; fp64 is for tests."""

    def __post_init__(self) -> None:
        check_fields(self, "train.")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    episodes: Episodes = 4096
    """Test episodes, the same for every method and seed."""
    sampled: bool = False
    """Sample the policy's actions in validation and in evaluation, with noise that depends on the episode alone;
    otherwise it takes the most likely action. A policy that explores by chance, as PPO may learn to, is better
    sampled."""

    def __post_init__(self) -> None:
        check_fields(self, "evaluation.")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One cell of the table: a method, trained and scored in a domain."""

    domain_name: str
    method_name: str
    preset: str
    """The preset from which the settings were composed."""
    seed: Seed
    """Seed of initial weights, training worlds, sampled actions and dropout."""
    domain: Any
    """The domain's own config."""
    method: Any
    """The method's own config."""
    train: TrainConfig
    evaluation: EvaluationConfig
    feedback: FeedbackConfig = TRUE
    """Corruption of the actions and rewards that policies see, in training and in evaluation."""
    objective_name: str = "imitation"
    """The objective of the training; see `uat.objectives`."""
    objective: Any = IMITATION
    """The objective's own config."""

    def __post_init__(self) -> None:
        check_fields(self)
        wanted = OBJECTIVES[lookup("objective", self.objective_name, OBJECTIVES)].config
        lookup("preset", self.preset, PRESETS)
        method = METHODS[lookup("method", self.method_name, METHODS)]
        if not method.serves(self.domain_name):
            served = ", ".join(method.domains or ())
            raise ValueError(f"the method {self.method_name!r} does not serve {self.domain_name!r}; it serves {served}")
        for name, kind in (
            ("domain", DOMAINS[lookup("domain", self.domain_name, DOMAINS)].config),
            ("method", method.config),
            ("objective", wanted),
        ):
            if type(getattr(self, name)) is not kind:
                raise ValueError(f"{name}={shown(getattr(self, name))} must be a {kind.__name__}")
        for name, value in method.changes.items():
            if getattr(self.method, name) != value:
                raise ValueError(
                    f"method.{name}={getattr(self.method, name)} is not {self.method_name}, which has {name}={value}"
                )

    def build_domain(self) -> Any:
        """Build the domain with the feedback that the run's policy receives."""
        domain = self.build_true_domain()
        return domain if self.feedback.is_true else CorruptedDomain(domain, self.feedback)

    def build_true_domain(self) -> Any:
        """Build the domain with true feedback, for its references."""
        domain = DOMAINS[self.domain_name].build(self.domain)
        if not isinstance(domain, Domain):
            raise ValueError(f"{self.domain_name} must make a uat.Domain, got {shown(domain)}")
        return domain

    def settled(self) -> RunConfig:
        """Return the config with the settings of the domain that depend on its worlds."""
        settle = DOMAINS[self.domain_name].settle
        return self if settle is None else replace(self, domain=settle(self.domain))

    def identity(self) -> str:
        """Return the name of the run: a hash of the changed settings and of the method's and the domain's revision.

        Folders and devices do not enter; a prepared data file enters by a hash of its contents. A setting that a later
        version adds changes no hash while it is at its default.
        """
        plain = run_config_from_json(to_json(self))  # 1 and 1.0 are the same setting
        changed = {name: changes(getattr(plain, name)) for name in SECTIONS}
        changed["domain"] |= DOMAINS[self.domain_name].content(self.domain)
        if not changed["feedback"]:
            del changed["feedback"]  # the section was added later: runs with true feedback keep their names
        own = changed.pop("objective")
        if self.objective_name != "imitation":  # added later, too
            changed["objective"] = {"name": self.objective_name, **own}
        revisions = [METHODS[self.method_name].policy.revision, DOMAINS[self.domain_name].revision]
        what = [self.domain_name, self.method_name, self.preset, self.seed, changed, revisions]
        text = json.dumps(what, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def kind(self) -> str:
        """Return a name that runs share if they differ by seed alone."""
        return replace(self, seed=0).identity()


SECTIONS = ("domain", "method", "train", "evaluation", "feedback", "objective")


def changes(section: Any) -> dict[str, Any]:
    """Return the fields that are not at their defaults, under their oldest names; without those of execution alone."""
    default, oldest, without = type(section)(), original_names(type(section)), execution_fields(type(section))
    changed = {name: value for name, value in to_json(section).items() if value != to_json(getattr(default, name))}
    return {oldest[name]: value for name, value in changed.items() if name not in without}


def with_oldest_names(section: Any) -> dict[str, Any]:
    """Return all fields as JSON under their oldest names, for comparison with files of other versions."""
    oldest = original_names(type(section))
    return {oldest[name]: value for name, value in to_json(section).items()}


FIXED = ("domain_name", "method_name", "preset", "objective_name")
"""Fields that select all other settings, and so cannot be overridden."""


def override(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Return the config with some fields changed: `override(c, {"train.lr": 1e-3, "seed": 2})`."""
    if not isinstance(config, RunConfig):
        raise TypeError(f"config={shown(config)} must be a RunConfig")
    if not isinstance(changes, Mapping):
        raise TypeError(f"changes={shown(changes)} must map names of settings to values")
    new: dict[str, Any] = {}
    for name, value in changes.items():
        if name in FIXED:
            raise ValueError(f"{name} cannot be overridden: it selects the other settings; compose another recipe")
        if name in SECTIONS:
            known = [f"{name}.{inner}" for inner in field_types(type(getattr(config, name)))]
            example = f"set one of its fields, such as {known[0]}" if known else "it has no settings"
            raise ValueError(f"{name!r} is a section; {example}")
        name = current_name(config, name)
        lookup("setting", name, setting_names(config))
        new[name] = value
    return _with(config, new) if new else config


def current_name(config: RunConfig, name: Any) -> Any:
    """Return the current dotted name of a setting, given its current or an old one."""
    section, dot, field = name.partition(".") if isinstance(name, str) else (name, "", "")
    if not dot or section not in SECTIONS:
        return name
    return f"{section}.{current_names(type(getattr(config, section))).get(field, field)}"


def oldest_name(config: RunConfig, name: str) -> str:
    """Return the oldest dotted name of a setting."""
    section, dot, field = name.partition(".")
    return f"{section}.{original_names(type(getattr(config, section)))[field]}" if dot else name


def _with(owner: Any, changes: Mapping[str, Any], prefix: str = "") -> Any:
    """Return a config with all changes made at once, since values may be valid only together."""
    new: dict[str, Any] = {}
    for name, value in changes.items():
        head, dot, _ = name.partition(".")
        if not dot:
            new[head] = checked(value, field_types(type(owner))[head], prefix + head)
        elif head not in new:
            inner = {key[len(head) + 1 :]: x for key, x in changes.items() if key.startswith(f"{head}.")}
            new[head] = _with(getattr(owner, head), inner, f"{prefix}{head}.")
    return replace(owner, **new)


def setting_names(config: Any, prefix: str = "") -> list[str]:
    """Return the dotted names of all fields that `override` can change."""
    names = []
    for item in dataclasses.fields(config):
        value, name = getattr(config, item.name), prefix + item.name
        names += setting_names(value, f"{name}.") if dataclasses.is_dataclass(value) else [name]
    return [name for name in names if name not in FIXED]


def suggestion(word: str, known: Iterable[str]) -> str:
    """The end of an error sentence: the nearest known word, or all of them."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def lookup(kind: str, name: str, table: Mapping[str, Any] | Iterable[str]) -> str:
    """Return the name if it is known; otherwise raise a ValueError with a suggestion."""
    if not isinstance(name, str):
        raise ValueError(f"{kind}={shown(name)} must be str")
    if name not in table:
        if isinstance(table, Registry) and (reason := table.unsupported_reason(name)) is not None:
            raise ValueError(reason)
        raise ValueError(f"unknown {kind} {shown(name)}{suggestion(name, table)}")
    return name


# ---------------------------------------------------------------- JSON


def to_json(value: Any) -> Any:
    """Return a config or a spec as plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_json(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, list | tuple) else value


def run_config_from_json(data: Mapping[str, Any]) -> RunConfig:
    """Build the RunConfig that `to_json` wrote: absent settings take their defaults, unknown ones raise an error."""
    sections = {"train": TrainConfig, "evaluation": EvaluationConfig, "feedback": FeedbackConfig}
    try:
        sections["domain"] = DOMAINS[lookup("domain", data["domain_name"], DOMAINS)].config
        sections["method"] = METHODS[lookup("method", data["method_name"], METHODS)].config
    except KeyError as missing:
        raise ValueError(f"the field {missing} is missing") from None
    objective = data.get("objective_name", "imitation")
    sections["objective"] = OBJECTIVES[lookup("objective", objective, OBJECTIVES)].config
    optional = {"feedback": {}, "objective": {}}
    built = {name: from_json(kind, data.get(name, optional.get(name)), name) for name, kind in sections.items()}
    return from_json(RunConfig, {**data, **built}, "")


def from_json(kind: type[Any], data: Any, where: str) -> Any:
    hints = field_types(kind)
    if not isinstance(data, Mapping):
        raise ValueError(f"the section {where!r} is missing or not a table")
    dot = f"{where}." if where else ""
    data = with_current_names(kind, data, dot)
    if unknown := sorted(data.keys() - hints.keys()):
        raise ValueError(f"unknown field {dot}{unknown[0]}{suggestion(unknown[0], hints)}")
    optional = {item.name for item in dataclasses.fields(kind) if item.default is not dataclasses.MISSING}
    if missing := sorted(hints.keys() - data.keys() - optional):
        raise ValueError(f"the field {dot}{missing[0]} is missing")
    return kind(**{name: checked(data[name], hint, dot + name) for name, hint in hints.items() if name in data})


SPACES: dict[str, type[Any]] = {kind.__name__: kind for kind in (Vector, Items, Assets, Named, Discrete, Weights, Box)}


def spec_to_json(spec: Spec) -> dict[str, Any]:
    return {**to_json(spec), "obs": _space_to_json(spec.obs), "action": _space_to_json(spec.action)}


def _space_to_json(space: Any) -> dict[str, Any]:
    own = to_json(space)
    if isinstance(space, Named):
        own["parts"] = {name: _space_to_json(part) for name, part in space.parts.items()}
    return {"kind": type(space).__name__, **own}


def spec_from_json(data: Mapping[str, Any]) -> Spec:
    others = {("facts" if name == "extras" else name): value for name, value in data.items()}  # old name
    facts = {name: tuple(shape) for name, shape in others["facts"].items()}
    spaces = {name: _space_from_json(data[name]) for name in ("obs", "action")}
    return Spec(**{**others, **spaces, "facts": facts})


def _space_from_json(data: Mapping[str, Any]) -> Any:
    own = {name: value for name, value in data.items() if name != "kind"}
    if data["kind"] == "Named":
        own["parts"] = {name: _space_from_json(part) for name, part in own["parts"].items()}
    return SPACES[data["kind"]](**own)
