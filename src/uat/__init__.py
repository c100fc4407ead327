"""The Utility-Augmented Transformer: policies that use action and reward feedback to adapt to a changing world.

Each name is imported at its first use, so that the command line can handle Ctrl-C while torch is being imported.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uat.clock import Clock
    from uat.config import RunConfig, override
    from uat.contracts import Recording, Simulator, Transition
    from uat.domains import DOMAINS, Domain, DomainEntry, register_domain
    from uat.episode import Batch, Step, Trajectory
    from uat.evaluation import audit, evaluate
    from uat.evaluation.watching import watch
    from uat.feedback import FeedbackConfig, corrupt
    from uat.logs import episodes
    from uat.methods import METHODS, Method, Policy, register_method
    from uat.methods.uat import UAT, UATConfig
    from uat.methods.vanilla import Vanilla, VanillaConfig
    from uat.metrics import Metric, Score
    from uat.recipes import recipe
    from uat.runs import Run
    from uat.runs import load_policy as load
    from uat.runs import save_policy as save
    from uat.serving import Session
    from uat.spec import Assets, Box, Discrete, Items, Named, Spec, Vector, Weights
    from uat.training import train, train_together
    from uat.tuning import Sweep, tune

__version__ = "0.1.0"

__all__ = [
    "DOMAINS",
    "METHODS",
    "UAT",
    "Assets",
    "Batch",
    "Box",
    "Clock",
    "Discrete",
    "Domain",
    "DomainEntry",
    "FeedbackConfig",
    "Items",
    "Method",
    "Metric",
    "Named",
    "Policy",
    "Recording",
    "Run",
    "RunConfig",
    "Score",
    "Session",
    "Simulator",
    "Spec",
    "Step",
    "Sweep",
    "Trajectory",
    "Transition",
    "UATConfig",
    "Vanilla",
    "VanillaConfig",
    "Vector",
    "Weights",
    "audit",
    "corrupt",
    "episodes",
    "evaluate",
    "load",
    "override",
    "recipe",
    "register_domain",
    "register_method",
    "save",
    "train",
    "train_together",
    "tune",
    "watch",
]

_PLACES = {
    "clock": ("Clock",),
    "config": ("RunConfig", "override"),
    "contracts": ("Recording", "Simulator", "Transition"),
    "domains": ("DOMAINS", "Domain", "DomainEntry", "register_domain"),
    "episode": ("Batch", "Step", "Trajectory"),
    "evaluation": ("audit", "evaluate"),
    "evaluation.watching": ("watch",),
    "feedback": ("FeedbackConfig", "corrupt"),
    "logs": ("episodes",),
    "methods": ("METHODS", "Method", "Policy", "register_method"),
    "methods.uat": ("UAT", "UATConfig"),
    "methods.vanilla": ("Vanilla", "VanillaConfig"),
    "metrics": ("Metric", "Score"),
    "recipes": ("recipe",),
    "runs": ("Run", "load_policy", "save_policy"),
    "serving": ("Session",),
    "training": ("train", "train_together"),
    "tuning": ("Sweep", "tune"),
    "spec": ("Assets", "Box", "Discrete", "Items", "Named", "Spec", "Vector", "Weights"),
}
"""Module -> the names it defines."""
_SHORT = {"load_policy": "load", "save_policy": "save"}
_PLACE = {_SHORT.get(name, name): (module, name) for module, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _PLACE:
        module, own = _PLACE[name]
        value = getattr(importlib.import_module(f"uat.{module}"), own)
        globals()[name] = value
        return value
    if not name.startswith("_") and importlib.util.find_spec(f"uat.{name}") is not None:
        return importlib.import_module(f"uat.{name}")
    raise AttributeError(f"module 'uat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
