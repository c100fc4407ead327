"""The base class of objectives: what a training minimises, on whose episodes.

An objective is an axis of its own beside methods and domains. It turns a policy into the phases of its training, and it
may have weights of its own, such as a critic, which are trained beside the policy and are not needed to act.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn

from uat.contracts import Recording, Simulator
from uat.methods.policy import Phase, Policy
from uat.metrics import Metric


class Objective(ABC):
    """What a policy's training minimises."""

    name: ClassVar[str]
    metric: ClassVar[str | None] = None
    """The domain's metric that selects the best weights, where the domain has it; None: its first one."""
    plain_pass: ClassVar[bool] = True
    """Whether losses are computed by the policy's own pass; False: the engine may compute them faster."""

    def __init__(self, policy: Policy, config: Any) -> None:
        self.policy, self.config = policy, config
        self.modules: nn.Module | None = None
        """Weights and statistics of the objective itself; checkpoints hold them."""

    @classmethod
    def unsupported_reason(cls, policy: Policy, worlds: Simulator[Any] | Recording, config: Any) -> str | None:
        """Return why this policy cannot learn in these worlds by the objective; None: it can."""
        return None

    @classmethod
    def criterion(cls, metrics: Sequence[Metric]) -> Metric:
        """Return the metric that selects the best weights among those of a domain."""
        return next((metric for metric in metrics if metric.name == cls.metric), metrics[0])

    @abstractmethod
    def phases(self) -> tuple[Phase, ...]:
        """Return the stages of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveEntry:
    """An entry of the table of objectives."""

    build: type[Objective]
    config: type[Any]
    summary: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a run that differ from the domain's recipe under this objective."""
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Preset -> settings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImitationConfig:
    """Imitation has no settings."""


class Imitation(Objective):
    """Clone the expert's actions on the policy's own episodes, or train as the method itself defines."""

    name = "imitation"
    plain_pass = False

    def phases(self) -> tuple[Phase, ...]:
        return self.policy.phases()


def has_own_phases(policy: type[Policy]) -> bool:
    """Whether a method defines its training itself, so that no other objective can replace it."""
    return policy.phases is not Policy.phases or policy.loss is not Policy.loss
