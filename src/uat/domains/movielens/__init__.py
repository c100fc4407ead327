"""Recommendation with delayed feedback: which group of genres a user wants shows in rewards alone."""

from uat.domains.movielens.domain import MovieLens
from uat.domains.movielens.episodes import MovieLensConfig

__all__ = ["MovieLens", "MovieLensConfig"]
