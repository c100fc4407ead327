"""Methods: one file is one row of the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from uat.methods.cotta import Cotta, CottaConfig
from uat.methods.policy import Phase, Policy
from uat.methods.tent import Tent, TentConfig
from uat.methods.uat import UAT, UATConfig
from uat.methods.vanilla import Vanilla, VanillaConfig
from uat.types import Spec

__all__ = ["METHODS", "Method", "Phase", "Policy", "training_name"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """An entry of the registry: a policy class, its config, and how a variant's config differs."""

    policy: type[Policy]
    config: type[Any]
    summary: str
    changes: Mapping[str, Any] = field(default_factory=dict)

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
    "uat": Method(policy=UAT, config=UATConfig, summary="actions and rewards reshape queries, keys and values"),
    "tent": Method(policy=Tent, config=TentConfig, summary="Vanilla that lowers its entropy by its norms while acting"),
    "cotta": Method(policy=Cotta, config=CottaConfig, summary="Vanilla that learns from its own average while acting"),
}


def training_name(method: str) -> str:
    """The method whose training gives this one its weights: most often itself."""
    return METHODS[method].policy.trains_as or method
