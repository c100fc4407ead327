"""Tuning: trainings with several settings, compared on validation episodes."""

from uat.tuning.start import tune
from uat.tuning.sweep import Sweep

__all__ = ["Sweep", "tune"]
