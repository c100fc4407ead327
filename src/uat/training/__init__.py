"""Training: a policy, a domain and a config become a run."""

from uat.training.start import train
from uat.training.together import train_together

__all__ = ["train", "train_together"]
