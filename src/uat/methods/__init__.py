"""Methods: one file is one row of the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from uat.methods.adt import ADT, ADTConfig
from uat.methods.bert4rec import BERT4Rec, BERT4RecConfig
from uat.methods.cadm import CaDM, CaDMConfig
from uat.methods.cotta import Cotta, CottaConfig
from uat.methods.deeptrader import DeepTrader, DeepTraderConfig
from uat.methods.dt import DT, DTConfig
from uat.methods.gtrxl import GTrXL, GTrXLConfig
from uat.methods.iql import IQL, IQLConfig
from uat.methods.policy import Phase, Policy
from uat.methods.sarl import SARL, SARLConfig
from uat.methods.sasrec import SASRec, SASRecConfig
from uat.methods.tent import Tent, TentConfig
from uat.methods.uat import UAT, UATConfig
from uat.methods.vanilla import Vanilla, VanillaConfig
from uat.spec import Spec

__all__ = ["METHODS", "Method", "Phase", "Policy", "training_name"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """An entry of the registry: a policy class, its config, and how a variant's config differs."""

    policy: type[Policy]
    config: type[Any]
    summary: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    domains: tuple[str, ...] | None = None
    """Names of the domains that it serves; None: every one."""

    def serves(self, domain: str) -> bool:
        return self.domains is None or domain in self.domains

    def configure(self, **settings: Any) -> Any:
        """The config with these settings and this entry's own changes, which win."""
        return self.config(**{**settings, **self.changes})

    def build(self, spec: Spec, config: Any) -> Policy:
        if type(config) is not self.config:
            raise ValueError(f"{self.policy.__name__} takes a {self.config.__name__}, got a {type(config).__name__}")
        return self.policy(spec, replace(config, **self.changes))


METHODS: dict[str, Method] = {
    "vanilla": Method(
        policy=Vanilla, config=VanillaConfig, summary="causal Transformer over observations; sees no feedback"
    ),
    "gtrxl": Method(
        policy=GTrXL, config=GTrXLConfig, summary="gated Transformer-XL over observations; sees no feedback"
    ),
    "tent": Method(policy=Tent, config=TentConfig, summary="Vanilla that lowers its entropy by its norms while acting"),
    "cotta": Method(policy=Cotta, config=CottaConfig, summary="Vanilla that learns from its own average while acting"),
    "dt": Method(policy=DT, config=DTConfig, summary="rewards and the return so far are tokens between observations"),
    "adt": Method(
        policy=ADT, config=ADTConfig, summary="previous action and reward are concatenated to each observation"
    ),
    "uat": Method(policy=UAT, config=UATConfig, summary="actions and rewards reshape queries, keys and values"),
    "uat-no-action": Method(
        policy=UAT, config=UATConfig, summary="UAT told of rewards alone", changes={"sees_action": False}
    ),
    "uat-no-reward": Method(
        policy=UAT, config=UATConfig, summary="UAT told of actions alone", changes={"sees_reward": False}
    ),
    "uat-linear": Method(
        policy=UAT, config=UATConfig, summary="UAT with a linear utility encoder", changes={"nonlinear": False}
    ),
    "uat-no-q": Method(
        policy=UAT, config=UATConfig, summary="UAT that leaves queries alone", changes={"modulates_queries": False}
    ),
    "uat-no-kv": Method(
        policy=UAT,
        config=UATConfig,
        summary="UAT that leaves keys and values alone",
        changes={"modulates_keys_values": False},
    ),
    "uat-no-bias": Method(
        policy=UAT, config=UATConfig, summary="UAT without the offsets U", changes={"utility_bias": False}
    ),
    "iql": Method(
        policy=IQL,
        config=IQLConfig,
        summary="implicit Q-learning from logs; acts on observations alone",
        domains=("sepsis",),
    ),
    "cadm": Method(
        policy=CaDM,
        config=CaDMConfig,
        summary="plans under a model of the world that knows its context, learnt from logs",
        domains=("sepsis",),
    ),
    "deeptrader": Method(
        policy=DeepTrader,
        config=DeepTraderConfig,
        summary="scores assets by convolutions over days and graphs; a market unit decides how much stays in cash",
        domains=("markets",),
    ),
    "sarl": Method(
        policy=SARL,
        config=SARLConfig,
        summary="policy gradient on returns; predicted price movements are part of its state",
        domains=("markets",),
    ),
    "sasrec": Method(
        policy=SASRec,
        config=SASRecConfig,
        summary="causal Transformer that scores items by the table that embeds them",
        domains=("movielens",),
    ),
    "bert4rec": Method(
        policy=BERT4Rec,
        config=BERT4RecConfig,
        summary="Transformer that looks both ways and fills a gap behind the items seen",
        domains=("movielens",),
    ),
}


def training_name(method: str) -> str:
    """The method whose training gives this one its weights: most often itself."""
    return METHODS[method].policy.trains_as or method
