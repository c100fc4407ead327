"""Training: a policy, a domain and a config become a run."""

from uat.training.together import train_together
from uat.training.trainer import train

__all__ = ["train", "train_together"]
