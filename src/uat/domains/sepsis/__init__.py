"""Sepsis treatment with hidden regimes: a simulator for research on methods, not medical advice."""

from uat.domains.sepsis.domain import Sepsis
from uat.domains.sepsis.world import SepsisConfig

__all__ = ["Sepsis", "SepsisConfig"]
