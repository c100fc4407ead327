"""MovieLens in any of its published formats, or a synthetic stand-in, as one log of arrays.

`load` needs polars (`pip install 'uat-transformer[data]'`) except for a packed file. Downloads have a module of their
own (`fetching`) because their imports are slow.
"""

from uat.data.movielens.genres import GROUPS, group_of
from uat.data.movielens.log import Filters, Log
from uat.data.movielens.sources import Summary, check, load, pack
from uat.data.movielens.synthetic import SyntheticConfig, synthetic

__all__ = [
    "GROUPS",
    "Filters",
    "Log",
    "Summary",
    "SyntheticConfig",
    "check",
    "group_of",
    "load",
    "pack",
    "synthetic",
]
