"""Training: a policy, a domain and a config become a run."""

from uat.training.trainer import train

__all__ = ["train"]
