"""The Utility-Augmented Transformer: policies that adapt to a world that silently changes."""

from uat.config import RunConfig, override
from uat.domains import DOMAINS
from uat.evaluation import audit, evaluate
from uat.feedback import FeedbackConfig, corrupt
from uat.logs import episodes
from uat.methods import METHODS, Policy
from uat.methods.uat import UAT, UATConfig
from uat.methods.vanilla import Vanilla, VanillaConfig
from uat.recipes import recipe
from uat.runs import Run
from uat.runs import load_policy as load
from uat.runs import save_policy as save
from uat.serving import Session
from uat.training import train, train_together
from uat.types import Assets, Batch, Clock, Discrete, Items, Score, Spec, Step, Trajectory, Vector, Weights

__version__ = "0.1.0"

__all__ = [
    "DOMAINS",
    "METHODS",
    "UAT",
    "Assets",
    "Batch",
    "Clock",
    "Discrete",
    "FeedbackConfig",
    "Items",
    "Policy",
    "Run",
    "RunConfig",
    "Score",
    "Session",
    "Spec",
    "Step",
    "Trajectory",
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
    "save",
    "train",
    "train_together",
]
