"""Methods and their registry. Each method is one file, and one row of the table of results."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from uat.methods.adt import ADT, ADTConfig
from uat.methods.bert4rec import BERT4Rec, BERT4RecConfig
from uat.methods.cadm import CaDM, CaDMConfig
from uat.methods.cotta import Cotta, CottaConfig
from uat.methods.deeptrader import DeepTrader, DeepTraderConfig
from uat.methods.dt import DT, DTConfig
from uat.methods.gtrxl import GTrXL, GTrXLConfig
from uat.methods.iql import IQL, IQLConfig
from uat.methods.policy import Phase, Policy, config_type
from uat.methods.sarl import SARL, SARLConfig
from uat.methods.sasrec import SASRec, SASRecConfig
from uat.methods.tent import Tent, TentConfig
from uat.methods.uat import UAT, UATConfig
from uat.methods.vanilla import Vanilla, VanillaConfig
from uat.registry import Registry, is_address
from uat.settings import check_settings_class, checked, first_sentence, shown
from uat.spec import Spec

__all__ = ["METHODS", "Method", "Phase", "Policy", "known_as", "register_method", "training_name"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """An entry of the registry: a policy class, its config class, and the settings that a variant fixes."""

    policy: type[Policy]
    config: type[Any]
    summary: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    ablation: bool = False
    """Whether the entry is another method without one of its parts, shown in tables of ablations alone."""
    domains: tuple[str, ...] | None = None
    """Names of the domains that the method serves; None: all."""

    def serves(self, domain: str) -> bool:
        return self.domains is None or domain in self.domains

    def configure(self, **settings: Any) -> Any:
        """Return a config with these settings; the entry's own `changes` take precedence."""
        return self.config(**{**settings, **self.changes})

    def build(self, spec: Spec, config: Any) -> Policy:
        if type(config) is not self.config:
            raise ValueError(f"{self.policy.__name__} takes a {self.config.__name__}, got a {type(config).__name__}")
        return self.policy(spec, replace(config, **self.changes))


OWN: dict[str, Method] = {
    "vanilla": Method(
        policy=Vanilla, config=VanillaConfig, summary="causal Transformer over observations; sees no feedback"
    ),
    "gtrxl": Method(
        policy=GTrXL, config=GTrXLConfig, summary="gated Transformer-XL over observations; sees no feedback"
    ),
    "tent": Method(
        policy=Tent,
        config=TentConfig,
        summary="Vanilla that adapts its LayerNorms while acting, by minimising its entropy",
    ),
    "cotta": Method(
        policy=Cotta, config=CottaConfig, summary="Vanilla that learns while acting, from an average of its weights"
    ),
    "dt": Method(policy=DT, config=DTConfig, summary="rewards and the return so far are tokens between observations"),
    "dt-actions": Method(
        policy=DT,
        config=DTConfig,
        summary="Decision Transformer that sees its actions as tokens, too",
        changes={"include_actions": True},
    ),
    "adt": Method(
        policy=ADT, config=ADTConfig, summary="previous action and reward are concatenated to each observation"
    ),
    "adt-prev": Method(
        policy=ADT,
        config=ADTConfig,
        summary="the whole previous transition is concatenated to each observation",
        changes={"tokens": "transition"},
    ),
    "dpt": Method(
        policy=ADT,
        config=ADTConfig,
        summary="two tokens a step: the previous transition and the observation",
        changes={"tokens": "two"},
    ),
    "uat": Method(policy=UAT, config=UATConfig, summary="actions and rewards reshape queries, keys and values"),
    "uat-no-action": Method(
        policy=UAT, config=UATConfig, summary="UAT that sees rewards only", changes={"use_action": False}, ablation=True
    ),
    "uat-no-reward": Method(
        policy=UAT, config=UATConfig, summary="UAT that sees actions only", changes={"use_reward": False}, ablation=True
    ),
    "uat-linear": Method(
        policy=UAT,
        config=UATConfig,
        summary="UAT with a linear utility encoder",
        changes={"nonlinear": False},
        ablation=True,
    ),
    "uat-no-q": Method(
        policy=UAT,
        config=UATConfig,
        summary="UAT without feedback in queries",
        changes={"modulates_queries": False},
        ablation=True,
    ),
    "uat-no-kv": Method(
        policy=UAT,
        config=UATConfig,
        summary="UAT without feedback in keys and values",
        changes={"modulates_keys_values": False},
        ablation=True,
    ),
    "uat-no-bias": Method(
        policy=UAT,
        config=UATConfig,
        summary="UAT without the offsets U",
        changes={"utility_bias": False},
        ablation=True,
    ),
    "uat-late": Method(
        policy=UAT,
        config=UATConfig,
        summary="ours: UAT whose keys and values wait for the feedback on their own step",
        changes={"binding": "late"},
    ),
    "uat-plus": Method(
        policy=UAT,
        config=UATConfig,
        summary="ours: UAT whose tokens also hold the whole previous transition",
        changes={"binding": "early", "tokens": "transition"},
    ),
    "iql": Method(
        policy=IQL,
        config=IQLConfig,
        summary="implicit Q-learning from logs; acts on observations only",
        domains=("sepsis",),
    ),
    "cadm": Method(
        policy=CaDM,
        config=CaDMConfig,
        summary="plans with a context-aware model of the world, learned from logs",
        domains=("sepsis",),
    ),
    "deeptrader": Method(
        policy=DeepTrader,
        config=DeepTraderConfig,
        summary="scores assets by convolutions over days and graphs; a market unit sets the share of cash",
        domains=("markets",),
    ),
    "sarl": Method(
        policy=SARL,
        config=SARLConfig,
        summary="policy gradient on returns, with predicted price movements in its state",
        domains=("markets",),
    ),
    "sasrec": Method(
        policy=SASRec,
        config=SASRecConfig,
        summary="causal Transformer over items, whose embeddings also score them",
        domains=("movielens",),
    ),
    "bert4rec": Method(
        policy=BERT4Rec,
        config=BERT4RecConfig,
        summary="bidirectional Transformer that fills a gap after the items seen",
        domains=("movielens",),
    ),
}


def as_method(value: Any) -> Method:
    """Return the entry for a package's `Method`, or for its policy class, which must declare its config class."""
    if isinstance(value, Method):
        _check_method(value)
        return value
    if not (isinstance(value, type) and issubclass(value, Policy)):
        raise TypeError(f"expected a subclass of uat.Policy or a uat.Method, got {shown(value)}")
    if (config := config_type(value)) is None:
        raise TypeError(
            f"{value.__name__} does not declare its settings: annotate `config` in the class with a dataclass, "
            f"such as config: {value.__name__}Config"
        )
    entry = Method(policy=value, config=config, summary=first_sentence(value))
    _check_method(entry)
    return entry


def _check_method(method: Method) -> None:
    """Raise an error for an entry that cannot build a policy."""
    if not (isinstance(method.policy, type) and issubclass(method.policy, Policy)):
        raise TypeError(f"policy={shown(method.policy)} must be a subclass of uat.Policy")
    if inspect.isabstract(method.policy):
        missing = ", ".join(sorted(method.policy.__abstractmethods__))
        raise TypeError(f"{method.policy.__name__} does not define {missing}")
    check_settings_class(method.config, "config")
    if unknown := sorted(set(method.changes) - {item.name for item in fields(method.config)}):
        raise ValueError(f"changes: {method.config.__name__} has no setting {unknown[0]!r}")


METHODS: Registry[Method] = Registry(
    "method", "uat.methods", OWN, as_method, reserved=frozenset({"ceiling", "expert", "random"})
)
"""All methods: the built-in ones, those that a program registers, and those of installed packages."""


def register_method(
    name: str,
    policy: type[Policy],
    config: type[Any] | None = None,
    *,
    summary: str | None = None,
    changes: Mapping[str, Any] | None = None,
    domains: tuple[str, ...] | None = None,
) -> Method:
    """Register a policy class as a method, for `uat list`, `uat.train`, `uat.save` and the command line.

    config: a frozen dataclass of settings with defaults; unset: the annotation of `config` in the class.
    summary: one line for `uat list`; unset: the first line of the class's docstring.
    changes: settings that this name fixes, for a variant of another method.
    domains: names of the domains that the method serves; unset: all.

    Registering the same class under the same name again, as in a notebook cell, replaces the entry.
    """
    entry = Method(policy=policy, config=config, summary="") if config is not None else as_method(policy)
    entry = replace(
        entry,
        summary=first_sentence(policy) if summary is None else checked(summary, str, "summary"),
        changes=dict(changes or {}),
        domains=None if domains is None else checked(domains, tuple[str, ...], "domains"),
    )
    _check_method(entry)
    METHODS.register(name, entry, owner=policy.__module__, identity=(policy.__module__, policy.__qualname__))
    return entry


def known_as(method: Any) -> tuple[str, Any]:
    """Return a method's name in configs and files, and its settings: the given config, or None.

    method: a name, an address (imported here, because the caller named it), a policy class, or a config.
    """
    if isinstance(method, str):
        if is_address(method):
            METHODS.adopt(method)
        return method, None
    if isinstance(method, type) and issubclass(method, Policy):
        return _name_of_class(method), None
    if is_dataclass(method) and not isinstance(method, type):
        for name, entry in METHODS.loaded().items():
            if type(method) is entry.config and replace(method, **entry.changes) == method:
                return name, method
        raise ValueError(
            f"method={shown(method)} is not the config of a known method: register it with uat.register_method"
        )
    raise TypeError(f"method={shown(method)} must be the name of a method, a policy class or a config")


def _name_of_class(policy: type[Policy]) -> str:
    """Return the name under which a policy class is registered, or its address."""
    entries = METHODS.loaded().items()
    if (name := next((n for n, entry in entries if entry.policy is policy and not entry.changes), None)) is not None:
        return name
    if (name := METHODS.offered_as(policy)) is not None:
        return name
    if "<locals>" in policy.__qualname__:
        raise ValueError(
            f"{policy.__name__} is defined inside a function, so other processes could not load its policies: define "
            "it in a module, or register it with uat.register_method"
        )
    return METHODS.name_of(policy)


def training_name(method: str) -> str:
    """Return the method whose training provides the weights of this one: usually the method itself."""
    return METHODS[method].policy.trains_as or method
